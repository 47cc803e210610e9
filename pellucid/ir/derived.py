"""Numbers computed from sizes that the index algebra cannot express: `min(s0, 10)`, `trunc(div(s0, 3))`.

The algebra of `index` must decide equality and ranges, so it knows polynomials, floor-div and mod only. All other
functions of sizes are in a closed table here. Such a number gets a name in the program; an integer is then used like
any size symbol, a float is read from memory or passed to a call. Its value is computed in Python, once for each set of
sizes, with Python's semantics of integers and floats.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias, cast

from pellucid.errors import InternalError
from pellucid.ir.index import Expr, Sym, Val, Var
from pellucid.ir.index import text as index_text

Number: TypeAlias = bool | int | float


@dataclass(frozen=True, slots=True)
class Float:
    """A float that is known when the graph is called; `Sym` is the counterpart for integers."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of `FUNCTIONS` on numbers."""

    function: str
    args: tuple[Term, ...]


Term: TypeAlias = "Apply | Expr | Float | bool | float"
"""How a number is computed. An integer is an `Expr`, constant or not."""


@dataclass(frozen=True, slots=True)
class Derived:
    """The number `term` under the name `name`: a float, or an integer that index expressions use as a symbol."""

    name: str
    is_float: bool
    term: Term


@dataclass(frozen=True, slots=True)
class Function:
    """arity: how many arguments; None for one or more."""

    arity: int | None
    evaluate: Callable[..., Any]


def _all(*values: bool) -> bool:
    return all(values)


def _any(*values: bool) -> bool:
    return any(values)


def _add(*values: Number) -> Number:
    return reduce(operator.add, values)


def _mul(*values: Number) -> Number:
    return reduce(operator.mul, values)


def _where(condition: bool, yes: Number, no: Number) -> Number:
    return yes if condition else no


def _round(value: float, digits: int) -> float:
    return round(value, digits)


def _round_to_int(value: float) -> int:
    return round(value)


_BINARY = "eq ne lt le gt ge floordiv mod truediv pow and_ or_ xor lshift rshift".split()
_UNARY = "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2 trunc floor ceil".split()

FUNCTIONS: dict[str, Function] = {
    **{name: Function(2, getattr(operator, name)) for name in _BINARY},
    **{name: Function(1, getattr(math, name)) for name in _UNARY},
    "min": Function(None, min),
    "max": Function(None, max),
    "add": Function(None, _add),
    "mul": Function(None, _mul),
    "all_of": Function(None, _all),
    "any_of": Function(None, _any),
    "not_": Function(1, operator.not_),
    "abs": Function(1, operator.abs),
    "int": Function(1, int),
    "float": Function(1, float),
    "round": Function(1, _round_to_int),
    "round_to": Function(2, _round),
    "where": Function(3, _where),
}
"""Each function by its name. `trunc`, `floor`, `ceil` and `round` convert floats to integers."""


class Numbers:
    """Values of symbols and derived numbers by name, computed on first use.

    Arithmetic raises as in Python: ZeroDivisionError, OverflowError, ValueError.
    """

    def __init__(
        self,
        values: Mapping[str, int | float],
        derived: Mapping[str, Derived],
        known: Mapping[Term, int | float] | None = None,
    ) -> None:
        """known: values of terms that were computed before."""
        self.values: dict[str, int | float] = dict(values)
        self._derived = derived
        self._known = known or {}

    def __call__(self, term: Term) -> Any:
        match term:
            case Expr():
                if term.value is not None:
                    return term.value
                known = self._known.get(term)
                return int(term.evaluate(self._atom)) if known is None else known
            case Apply(function, args):
                return FUNCTIONS[function].evaluate(*[self(arg) for arg in args])
            case Float(name):
                return self.of(name)
            case _:
                return term

    def of(self, name: str) -> int | float:
        """The value of the symbol or derived number `name`."""
        if name not in self.values:
            if name not in self._derived:
                raise InternalError(f"the size {name} is not known here")
            self.values[name] = cast("int | float", self(self._derived[name].term))
        return self.values[name]

    def _atom(self, atom: Sym | Var | Val) -> int:
        return cast(int, self.of(atom.name))


class Formulas:
    """Terms whose values are computed together, by one Python function that is generated from their texts.

    >>> Formulas(("s0",), {}, [sym("s0") * 2 + 1]).values(3)
    (7,)
    """

    def __init__(self, symbols: Sequence[str], derived: Mapping[str, Derived], terms: Iterable[Expr | Float]) -> None:
        """symbols: the parameters of `values`. Raises InternalError for a term that needs another symbol."""
        self.terms = tuple(terms)
        self._symbols = tuple(symbols)
        self._derived = derived
        lines = [f"def values({', '.join(symbols)}):", *_assignments(self._symbols, derived, self.terms)]
        lines.append(f"    return ({''.join(f'{python_text(term)}, ' for term in self.terms)})")
        names: dict[str, Any] = {"F": FUNCTIONS}
        exec("\n".join(lines), names)
        self.values: Callable[..., tuple[Any, ...]] = names["values"]
        """Maps the values of the symbols to those of the terms. Arithmetic raises as in Python."""

    def numbers(self, sizes: Sequence[int], values: Sequence[Any]) -> Numbers:
        """All numbers for these values of the symbols. values: of the terms, for these sizes."""
        given = dict(zip(self._symbols, sizes, strict=True))
        return Numbers(given, self._derived, dict(zip(self.terms, values, strict=True)))


def _assignments(symbols: Sequence[str], derived: Mapping[str, Derived], terms: Iterable[Term]) -> Iterator[str]:
    """Lines of Python that compute the derived numbers that terms need, each once, in order."""
    done = set(symbols)

    def lines(name: str) -> Iterator[str]:
        if name in done:
            return
        if name not in derived:
            raise InternalError(f"the size {name} is not known here")
        term = derived[name].term
        for other in sorted(names_in(term)):
            yield from lines(other)
        done.add(name)
        value = python_text(term)
        yield f"    {name} = {value if derived[name].is_float else f'int({value})'}"

    for term in terms:
        for name in sorted(names_in(term)):
            yield from lines(name)


def by_name(derived: tuple[Derived, ...]) -> dict[str, Derived]:
    """The derived numbers of a program by name."""
    return {each.name: each for each in derived}


def number_name(term: Term) -> str:
    """A name for the float `term`, a hash of its text."""
    return f"f_{hashlib.sha256(term_text(term).encode()).hexdigest()[:8]}"


def names_in(term: Term) -> frozenset[str]:
    """The symbols, floats and derived numbers that `term` refers to directly."""
    match term:
        case Expr():
            return term.syms()
        case Apply(_, args):
            return frozenset[str]().union(*(names_in(arg) for arg in args))
        case Float(name):
            return frozenset((name,))
        case _:
            return frozenset()


def python_text(term: Term) -> str:
    """`term` as a Python expression over the names of its symbols, with `FUNCTIONS` as `F`."""
    match term:
        case Apply(function, args):
            return f'F["{function}"].evaluate({", ".join(map(python_text, args))})'
        case float() if not math.isfinite(term):
            return f'float("{term}")'
        case bool():
            return repr(term)
        case _:
            return term_text(term)


def term_text(term: Term) -> str:
    """One line that the parser reads back: `min(2*s0 + 1, 10)`, `truediv(s0, 3.0)`."""
    match term:
        case Expr():
            return index_text(term)
        case Apply(function, args):
            return f"{function}({', '.join(map(term_text, args))})"
        case Float(name):
            return name
        case bool():
            return "true" if term else "false"
        case _:
            return repr(term)
