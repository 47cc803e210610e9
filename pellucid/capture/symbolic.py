"""Converts PyTorch's size expressions, which are SymPy's, into the project's own terms.

What the index algebra cannot express gets a name derived from its text, and is a symbol from then on. So an expression
has the same name wherever it occurs, and converting it needs no state.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import sympy
from torch.utils._sympy.value_ranges import bound_sympy

from pellucid.errors import UnsupportedError
from pellucid.ir.derived import Apply, Derived, Float, Term, names_in, term_text
from pellucid.ir.index import Expr, const, floordiv, mod, nonnegative, sym

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Functions of `torch.utils._sympy.functions` and of SymPy by class name, and the names of ours.
_FUNCTIONS = {
    "Min": "min",
    "Max": "max",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "Pow": "pow",
    "TruncToInt": "trunc",
    "FloorToInt": "floor",
    "CeilToInt": "ceil",
    "floor": "floor",
    "ceiling": "ceil",
    "RoundToInt": "round",
    "RoundDecimal": "round_to",
    "ToFloat": "float",
    "Abs": "abs",
    "LShift": "lshift",
    "RShift": "rshift",
    "BitwiseFn_bitwise_and": "and_",
    "BitwiseFn_bitwise_or": "or_",
    "BitwiseFn_bitwise_xor": "xor",
    "Where": "where",
    "Add": "add",
    "Mul": "mul",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "all_of",
    "Or": "any_of",
    "Not": "not_",
}
_FUNCTIONS |= {
    f"OpaqueUnaryFn_{name}": name
    for name in "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2".split()
}
# Functions with integer values that SymPy does not know to be integers.
_INTEGERS = ("LShift", "RShift", "BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or", "BitwiseFn_bitwise_xor")


class Symbolic:
    """Converts expressions of one shape environment into terms, with a cache."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        # PyTorch updates these ranges, and only ever narrows them.
        self._ranges = shape_env.var_to_range
        self._terms: dict[sympy.Basic, Term] = {}
        self._derived: dict[str, Derived] = {}
        self._named: dict[str, sympy.Basic] = {}

    def integer(self, expression: sympy.Basic) -> Expr:
        """Convert an expression whose value is an integer."""
        known = self._terms.get(expression)
        if not isinstance(known, Expr):
            self._terms[expression] = known = self._integer(expression)
        return known

    def _integer(self, expression: sympy.Basic) -> Expr:
        match expression:
            case sympy.Integer():
                return const(int(expression))
            case sympy.Symbol():
                return sym(self._symbol(expression))
            case sympy.Add():
                return sum((self.integer(term) for term in expression.args), start=const(0))
            case sympy.Mul() if all(map(_is_integer, expression.args)):
                result = const(1)
                for factor in expression.args:
                    result = result * self.integer(factor)
                return result
            case sympy.Pow(base=base, exp=exponent) if exponent.is_Integer and exponent > 0:
                result = const(1)
                for _ in range(int(exponent)):
                    result = result * self.integer(base)
                return result
        match type(expression).__name__, expression.args:
            case "Identity", (inner,):
                return self.integer(inner)
            case (("FloorDiv" | "CleanDiv"), (numerator, denominator)) if self._is_positive(denominator):
                return floordiv(self.integer(numerator), self.integer(denominator))
            case (("Mod" | "PythonMod"), (numerator, denominator)) if self._is_positive(denominator):
                return mod(self.integer(numerator), self.integer(denominator))
            case name, _:
                return sym(self._name(expression, name))

    def stride(self, expression: sympy.Basic) -> Expr:
        """Convert a stride; see `plain_stride`."""
        return self.integer(self.plain_stride(expression))

    def plain_stride(self, expression: sympy.Basic) -> sympy.Basic:
        """`expression` without the 1 in `max(1, size)`.

        PyTorch writes that for the sizes that a stride is a product of, so that strides of empty tensors are not 0.
        Here the 1 is dropped: it matters only for tensors without elements.
        """
        return expression.replace(_is_size_or_one, _without_one)

    def term(self, expression: sympy.Basic) -> Term:
        """Convert an expression of any kind: integer, float or condition."""
        match expression:
            case sympy.Integer():
                return const(int(expression))
            case sympy.Float() | sympy.Rational() | sympy.NumberSymbol() | sympy.core.numbers.Infinity():
                return float(expression)  # type: ignore[arg-type]
            case sympy.core.numbers.NegativeInfinity() | sympy.core.numbers.NaN():
                return float(expression)  # type: ignore[arg-type]
            case sympy.logic.boolalg.BooleanAtom():
                return bool(expression)
            case sympy.Symbol() if not expression.is_integer:
                return Float(str(expression))
            case _ if _is_integer(expression):
                return self.integer(expression)
            case _:
                return self._apply(expression)

    def derived(self, expression: sympy.Basic) -> dict[str, Derived]:
        """The derived integers in `expression` by name, each after those that it is computed from."""
        found: dict[str, Derived] = {}

        def visit(term: Term) -> None:
            for name in sorted(names_in(term)):
                if name in self._derived and name not in found:
                    visit(self._derived[name].term)
                    found[name] = self._derived[name]

        visit(self.term(expression))
        return found

    def needed(self, expression: sympy.Basic) -> dict[str, sympy.Basic]:
        """The integers that a program needs as arguments to compute `expression`.

        These are symbols, and derived integers that depend on floats, whose values programs do not have.
        """
        found: dict[str, sympy.Basic] = {}

        def visit(term: Term) -> None:
            for name in sorted(names_in(term)):
                if name in self._derived and not self.depends_on_floats(self._derived[name].term):
                    visit(self._derived[name].term)
                elif name in self._named:
                    found[name] = self._named[name]

        visit(self.term(expression))
        return found

    def depends_on_floats(self, term: Term) -> bool:
        """Whether a float that is no function of sizes is part of `term`."""
        return any(
            self.depends_on_floats(self._derived[name].term) if name in self._derived else name not in self._named
            for name in names_in(term)
        )

    def _apply(self, expression: sympy.Basic) -> Term:
        """`expression` as a function of its arguments."""
        name, args = type(expression).__name__, expression.args
        match name:
            case "Identity":
                return self.term(args[0])
            case "TruncToFloat":
                return Apply("float", (Apply("trunc", (self.term(args[0]),)),))
            case "ModularIndexing":
                return Apply("mod", (Apply("floordiv", (self.term(args[0]), self.term(args[1]))), self.term(args[2])))
            case "Piecewise":
                return self._piecewise([tuple(pair.args) for pair in args])
            case _ if name in _FUNCTIONS:
                return Apply(_FUNCTIONS[name], tuple(self.term(arg) for arg in args))
            case _:
                raise UnsupportedError(
                    f"the size expression {expression} uses {name}",
                    hint="compile with dynamic=False, or mark this dimension static with torch._dynamo.mark_static",
                )

    def _piecewise(self, pairs: list[tuple[sympy.Basic, ...]]) -> Term:
        (value, condition), *rest = pairs
        if not rest or condition == sympy.true:
            return self.term(value)
        return Apply("where", (self.term(condition), self.term(value), self._piecewise(rest)))

    def _name(self, expression: sympy.Basic, function: str) -> str:
        """The name of a derived integer; two expressions of the same text are the same number."""
        term = self._apply(expression)
        digest = hashlib.sha256(term_text(term).encode()).hexdigest()[:8]
        name = f"{self._letter(expression)}_{_FUNCTIONS.get(function, function.lower())}_{digest}"
        self._derived[name] = Derived(name, False, term)
        self._named[name] = expression
        return name

    def _symbol(self, symbol: sympy.Symbol) -> str:
        """PyTorch's own name if its letter matches the minimum value (`s0`, `u0`), else `u_s0`, `n_u0`."""
        name, letter = str(symbol), self._letter(symbol)
        name = name if name.startswith(letter) and name[1:].isdigit() else f"{letter}_{name}"
        self._named[name] = symbol
        return name

    def _letter(self, expression: sympy.Basic) -> str:
        """The letter for the known minimum of `expression`, see `pellucid.ir.index.min_value`."""
        ranges = {symbol: self._ranges.get(cast(sympy.Symbol, symbol)) for symbol in expression.free_symbols}
        lower = bound_sympy(expression, ranges).lower  # type: ignore[arg-type]
        return "s" if lower >= 1 else "u" if lower >= 0 else "n"

    def _is_positive(self, expression: sympy.Basic) -> bool:
        return nonnegative(self.integer(expression) - 1)


def _is_integer(expression: sympy.Basic) -> bool:
    return bool(expression.is_integer) or type(expression).__name__ in _INTEGERS


def _is_size_or_one(expression: sympy.Basic) -> bool:
    return type(expression).__name__ == "Max" and len(expression.args) == 2 and sympy.S.One in expression.args


def _without_one(expression: sympy.Basic) -> sympy.Basic:
    return next(argument for argument in expression.args if argument != sympy.S.One)
