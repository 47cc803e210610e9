"""Index algebra: integer polynomials over axes, size symbols, values, and floor-div and mod atoms.

An `Expr` has one canonical form, a sum of integer multiples of products of atoms, so that equality of
expressions is equality of Python objects. Sizes, strides and offsets are all `Expr`; a static one is a
constant. This is no general computer algebra: it decides what index arithmetic needs (exact division, range
of an affine form, substitution) and leaves the rest as an atom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, final


@dataclass(frozen=True, slots=True)
class Sym:
    """A size symbol: an integer that is known when the program is called; see `min_value`."""

    name: str


@dataclass(frozen=True, slots=True)
class Var:
    """The loop counter of an axis, from 0 to its extent."""

    name: str


@dataclass(frozen=True, slots=True)
class Val:
    """An `i64` value of the kernel body, for indirect addressing."""

    name: str


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """`num // den`, rounded down, where the division is not exact."""

    num: Expr
    den: Expr


@dataclass(frozen=True, slots=True)
class Mod:
    """`num % den`, in `[0, den)`."""

    num: Expr
    den: Expr


Atom: TypeAlias = Sym | Var | Val | FloorDiv | Mod
Monomial: TypeAlias = tuple[Atom, ...]


@lru_cache(maxsize=65536)
def _atom_key(atom: Atom) -> tuple[int, str]:
    match atom:
        case Sym(name):
            return (0, name)
        case Var(name):
            return (1, name)
        case Val(name):
            return (2, name)
        case FloorDiv() | Mod():
            return (3, atom_text(atom))


def _monomial_key(monomial: Monomial) -> tuple[int, tuple[tuple[int, str], ...]]:
    return (-len(monomial), tuple(_atom_key(atom) for atom in monomial))


@final
class Expr:
    """An immutable integer polynomial. Build one with `const`, `sym`, `var`, `val` and arithmetic."""

    __slots__ = ("_atoms", "_hash", "_vals", "_vars", "terms", "value")
    terms: tuple[tuple[Monomial, int], ...]
    value: int | None
    """The value of a constant, or None when it depends on an atom."""

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        kept = [(monomial, coefficient) for monomial, coefficient in terms.items() if coefficient]
        if len(kept) > 1:
            kept.sort(key=lambda term: _monomial_key(term[0]))
        self._fill(tuple(kept))

    def _fill(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        """Become the sum of `terms`, which are in canonical order and not 0. `_atoms`, `_vars`, `_vals` are caches."""
        self.terms = terms
        self.value = 0 if not terms else terms[0][1] if not terms[0][0] else None
        self._hash = hash(terms)
        self._atoms: frozenset[Atom] | None = None
        self._vars: frozenset[str] | None = None
        self._vals: frozenset[str] | None = None

    def __getstate__(self) -> tuple[tuple[Monomial, int], ...]:
        return self.terms  # not the hash: hashes of strings differ from process to process

    def __setstate__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self._fill(terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and (self is other or self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Expr | int) -> Expr:
        other = as_expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        terms = dict(self.terms)
        for monomial, coefficient in other.terms:
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Expr(terms)

    def __sub__(self, other: Expr | int) -> Expr:
        return self + as_expr(other) * -1

    def __neg__(self) -> Expr:
        return self * -1

    def __mul__(self, other: Expr | int) -> Expr:
        other = as_expr(other)
        if other.value is not None:
            return self._scaled(other.value)
        if self.value is not None:
            return other._scaled(self.value)
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                product = tuple(sorted((*left, *right), key=_atom_key))
                terms[product] = terms.get(product, 0) + a * b
        return Expr(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def _scaled(self, factor: int) -> Expr:
        """`factor` times this; the order of the terms does not change."""
        if factor == 1:
            return self
        terms = [(monomial, coefficient * factor) for monomial, coefficient in self.terms] if factor else []
        result = Expr.__new__(Expr)
        result._fill(tuple(terms))
        return result

    def atoms(self) -> frozenset[Atom]:
        """All atoms, those inside floor-div and mod included (and these themselves)."""
        if self._atoms is None:
            self._atoms = _atoms(self)
        return self._atoms

    def vars(self) -> frozenset[str]:
        """Names of the axes it depends on."""
        if self._vars is None:
            self._vars = frozenset([atom.name for atom in self.atoms() if isinstance(atom, Var)])
        return self._vars

    def vals(self) -> frozenset[str]:
        """Names of the values it depends on."""
        if self._vals is None:
            self._vals = frozenset([atom.name for atom in self.atoms() if isinstance(atom, Val)])
        return self._vals

    def syms(self) -> frozenset[str]:
        """Names of the size symbols it depends on."""
        return frozenset(atom.name for atom in self.atoms() if isinstance(atom, Sym))

    @property
    def at_zero(self) -> Expr:
        """The value where all axes are 0."""
        return self.substitute({Var(name): ZERO for name in self.vars()})

    def coefficient(self, name: str) -> Expr | None:
        """c where `self == c * Var(name) + rest` and rest is free of that axis; None if there is no such c.

        >>> (var("i") * 4 + var("j")).coefficient("i")
        4
        """
        if name not in self.vars():
            return ZERO
        terms: dict[Monomial, int] = {}
        target = Var(name)
        for monomial, coefficient in self.terms:
            if len(monomial) == 1 and type(monomial[0]) is Var:  # as most are
                if monomial[0] == target:
                    terms[()] = coefficient
            elif monomial.count(target) == 1:
                rest = list(monomial)
                rest.remove(target)
                if any(name in _atoms_of_atom_vars(atom) for atom in rest):
                    return None
                terms[tuple(rest)] = coefficient
            elif any(name in _atoms_of_atom_vars(atom) for atom in monomial):
                return None
        return const(terms[()]) if terms.keys() == {()} else Expr(terms)

    def without(self, name: str) -> Expr:
        """The expression at 0 on the axis `name`."""
        return self.substitute({Var(name): ZERO})

    def substitute(self, mapping: Mapping[Atom, Expr], ranges: Mapping[str, Expr] | None = None) -> Expr:
        """Replace atoms by expressions; floor-div and mod are simplified again, with the axes' `ranges`."""
        if not mapping or not any(atom in mapping for atom in self.atoms()):
            return self
        total = ZERO
        for monomial, coefficient in self.terms:
            product = const(coefficient)
            for atom in monomial:
                product = product * _substitute_atom(atom, mapping, ranges)
            total = total + product
        return total

    def evaluate(self, environment: Callable[[Sym | Var | Val], int]) -> int:
        """The integer for given atoms; also works elementwise on arrays."""
        total = 0
        for monomial, coefficient in self.terms:
            product = coefficient
            for atom in monomial:
                match atom:
                    case FloorDiv(num, den):
                        factor = num.evaluate(environment) // den.evaluate(environment)
                    case Mod(num, den):
                        factor = num.evaluate(environment) % den.evaluate(environment)
                    case _:
                        factor = environment(atom)
                product = product * factor
            total = total + product
        return total

    def __repr__(self) -> str:
        return text(self)


def _atoms(expr: Expr) -> frozenset[Atom]:
    found: set[Atom] = set()
    for monomial, _ in expr.terms:
        for atom in monomial:
            found.add(atom)
            if isinstance(atom, FloorDiv | Mod):
                found |= atom.num.atoms() | atom.den.atoms()
    return frozenset(found)


def _atoms_of_atom_vars(atom: Atom) -> frozenset[str]:
    match atom:
        case Var(name):
            return frozenset((name,))
        case FloorDiv(num, den) | Mod(num, den):
            return num.vars() | den.vars()
        case _:
            return frozenset()


def _substitute_atom(atom: Atom, mapping: Mapping[Atom, Expr], ranges: Mapping[str, Expr] | None) -> Expr:
    if atom in mapping:
        return mapping[atom]
    match atom:
        case FloorDiv(num, den):
            return floordiv(num.substitute(mapping, ranges), den.substitute(mapping, ranges), ranges)
        case Mod(num, den):
            return mod(num.substitute(mapping, ranges), den.substitute(mapping, ranges), ranges)
        case _:
            return of_atom(atom)


def of_atom(atom: Atom) -> Expr:
    """The expression that is one atom."""
    return Expr({(atom,): 1})


@lru_cache(maxsize=4096)
def const(value: int) -> Expr:
    """An integer."""
    return Expr({(): int(value)})


@lru_cache(maxsize=4096)
def var(name: str) -> Expr:
    """The counter of an axis."""
    return of_atom(Var(name))


@lru_cache(maxsize=4096)
def sym(name: str) -> Expr:
    """A size symbol."""
    return of_atom(Sym(name))


def val(name: str) -> Expr:
    """An `i64` value of the kernel body."""
    return of_atom(Val(name))


def as_expr(value: Expr | int) -> Expr:
    """`value` as an expression."""
    return value if isinstance(value, Expr) else const(value)


_MIN_VALUE = re.compile(r"([un])(_|\d)")


def min_value(name: str) -> int | None:
    """The minimum of the size symbol `name`: 0 for `u0` or `u_length`, unknown for `n0` or `n_shift`, else 1.

    Sizes are positive, because PyTorch recompiles for an empty tensor. Sizes that depend on data may be 0, and integers
    that are no sizes may be negative. The name encodes this, so that printed expressions keep it.
    """
    match = _MIN_VALUE.match(name)
    return 1 if match is None else 0 if match[1] == "u" else None


ZERO = const(0)
ONE = const(1)


def product(factors: Iterable[Expr | int]) -> Expr:
    """The product of all factors, 1 if there are none."""
    result = ONE
    for factor in factors:
        result = result * factor
    return result


def total(terms: Iterable[Expr | int]) -> Expr:
    """The sum of all terms, 0 if there are none."""
    sums: dict[Monomial, int] = {}
    for term in terms:
        for monomial, coefficient in as_expr(term).terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
    return Expr(sums)


def floordiv(num: Expr, den: Expr | int, ranges: Mapping[str, Expr] | None = None) -> Expr:
    """`num // den` for `den > 0`, with every multiple of `den` taken out exactly.

    ranges: extent of each axis, used to drop a remainder that is known to be in `[0, den)`.

    >>> floordiv(var("i") * 8 + var("j"), 8, {"j": const(8)})
    i
    """
    den = as_expr(den)
    if num.value is not None and den.value is not None:
        return const(num.value // den.value)
    quotient, rest = _divided(num, den, ranges)
    if in_range(rest, den, ranges):
        return quotient
    return quotient + of_atom(FloorDiv(rest, den))


def mod(num: Expr, den: Expr | int, ranges: Mapping[str, Expr] | None = None) -> Expr:
    """`num % den` for `den > 0`, without the multiples of `den`.

    >>> mod(var("i") * 8 + var("j"), 8, {"j": const(8)})
    j
    """
    den = as_expr(den)
    if num.value is not None and den.value is not None:
        return const(num.value % den.value)
    _, rest = _divided(num, den, ranges)
    if in_range(rest, den, ranges):
        return rest
    return of_atom(Mod(rest, den))


def chunks(extent: Expr, step: Expr | int) -> Expr:
    """Number of pieces of `step` points, the last of which may have fewer."""
    return floordiv(extent + (as_expr(step) - 1), step)


def equal_piece(extent: Expr, count: Expr) -> Expr:
    """The size of `count` equal pieces of `extent`, at least 1. count: at least 1 if there are points."""
    if nonnegative(extent - 1):
        return chunks(extent, count)
    empty = floordiv(ONE, extent + 1)  # 1 if there are no points, else 0: avoids a division by 0
    return chunks(extent, count + empty) + empty


def _divided(num: Expr, den: Expr, ranges: Mapping[str, Expr] | None) -> tuple[Expr, Expr]:
    """(q, r) of `_split`, with q one less where that brings r into range: `(n - 1) // n` is 0, not 1 + (-1 // n)."""
    quotient, rest = _split(num, den)
    if den.value is None and in_range(rest + den, den, ranges):
        return quotient - 1, rest + den
    return quotient, rest


def _split(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """(q, r) with `num == q * den + r`, q taking every term that `den` divides."""
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, coefficient in num.terms:
        divided = _divide_term(monomial, coefficient, den)
        if divided is None:
            rest[monomial] = coefficient
        else:
            quotient[divided[0]] = divided[1]
    if rest and den.value is not None and den.value > 0 and () in rest:
        whole, left = divmod(rest[()], den.value)
        quotient[()] = quotient.get((), 0) + whole
        rest[()] = left
    return Expr(quotient), Expr(rest)


def _divide_term(monomial: Monomial, coefficient: int, den: Expr) -> tuple[Monomial, int] | None:
    if len(den.terms) != 1:
        return None
    den_monomial, den_coefficient = den.terms[0]
    if coefficient % den_coefficient:
        return None
    left = list(monomial)
    for atom in den_monomial:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left), coefficient // den_coefficient


def exact_div(num: Expr, den: Expr) -> Expr | None:
    """`num / den` where the division is exact, else None."""
    if num == den:
        return ONE
    quotient, rest = _split(num, den)
    return quotient if rest == ZERO else None


def bounds(expr: Expr, ranges: Mapping[str, Expr] | None) -> tuple[Expr, Expr] | None:
    """(minimum, maximum) over all axes in `ranges`, as expressions over symbols; None when unknown.

    An axis that is missing from `ranges`, or a value, has no known bounds.
    """
    if _is_exact(expr):
        return expr, expr
    low, high = ZERO, ZERO
    for monomial, coefficient in expr.terms:
        term_low, term_high = const(coefficient), const(coefficient)
        for atom in monomial:
            span = _atom_bounds(atom, ranges)
            if span is None:
                return None
            # Atoms are never negative, so the order of the ends depends on the coefficient's sign alone.
            term_low, term_high = term_low * span[0], term_high * span[1]
            if not nonnegative(span[0]):
                return None
        if coefficient < 0:
            term_low, term_high = term_high, term_low
        low, high = low + term_low, high + term_high
    return low, high


def _atom_bounds(atom: Atom, ranges: Mapping[str, Expr] | None) -> tuple[Expr, Expr] | None:
    match atom:
        case Sym():
            return of_atom(atom), of_atom(atom)
        case Var(name):
            return None if ranges is None or name not in ranges else (ZERO, ranges[name] - 1)
        case Val():
            return None
        case FloorDiv(num, den):
            inner = bounds(num, ranges)
            if inner is None:
                return None
            low, high = floordiv(inner[0], den), floordiv(inner[1], den)
            return (low, high) if nonnegative(low) else None
        case Mod(_, den):
            return ZERO, den - 1


def _is_exact(expr: Expr) -> bool:
    """Whether it depends on symbols alone, without a remainder, which its divisor bounds better."""
    return not any(isinstance(atom, Var | Val | Mod) for atom in expr.atoms())


@lru_cache(maxsize=65536)
def nonnegative(expr: Expr) -> bool:
    """True if `expr >= 0` can be shown for all symbols from their minimum on and all axis counters from 0 on."""
    constant = 0
    for monomial, coefficient in _without_multiples(_without_quotients(expr)).terms:
        if monomial and (coefficient < 0 or not all(_atom_nonnegative(atom) for atom in monomial)):
            return False
        if all(_atom_positive(atom) for atom in monomial):  # the product is at least 1
            constant += coefficient
    return constant >= 0


def _without_quotients(expr: Expr) -> Expr:
    """A lower bound of `expr` that subtracts no quotient: `n - 8*(n // 8)` is at least `n - n`."""
    for monomial, coefficient in expr.terms:
        for number, atom in enumerate(monomial if coefficient < 0 else ()):
            if not isinstance(atom, FloorDiv):
                continue
            den, rest = atom.den.value, monomial[:number] + monomial[number + 1 :]
            if den and coefficient % den == 0 and all(map(_atom_nonnegative, rest)):
                bound = Expr({rest: coefficient // den}) * atom.num
                return _without_quotients(expr - Expr({monomial: coefficient}) + bound)
    return expr


def _without_multiples(expr: Expr) -> Expr:
    """A lower bound of `expr` without negative terms that a multiple of them outweighs: `n*m - n` is at least 0."""
    for monomial, coefficient in expr.terms:
        if coefficient >= 0 or not monomial or not all(map(_atom_nonnegative, monomial)):
            continue
        for larger, count in expr.terms:
            rest = _divide_term(larger, count, Expr({monomial: 1})) if count + coefficient >= 0 else None
            if rest is not None and larger != monomial and all(map(_atom_positive, rest[0])):
                return _without_multiples(expr - Expr({larger: -coefficient, monomial: coefficient}))
    return expr


def _atom_positive(atom: Atom) -> bool:
    match atom:
        case Sym(name):
            return min_value(name) == 1
        case FloorDiv(num, den):
            return nonnegative(num - den)
        case _:
            return False


def _atom_nonnegative(atom: Atom) -> bool:
    match atom:
        case Sym(name):
            return min_value(name) is not None
        case Var() | Mod():
            return True
        case Val():
            return False
        case FloorDiv(num, _):
            return nonnegative(num)


def in_range(expr: Expr, size: Expr | int, ranges: Mapping[str, Expr] | None = None) -> bool:
    """True if `0 <= expr < size` can be shown."""
    span = bounds(expr, ranges)
    if span is None:
        return False
    return nonnegative(span[0]) and nonnegative(as_expr(size) - 1 - span[1])


def atom_text(atom: Atom) -> str:
    """The text of one atom, in parentheses where it is a division; precedence is that of Python."""
    match atom:
        case Sym(name) | Var(name):
            return name
        case Val(name):
            return f"[{name}]"
        case FloorDiv(num, den):
            return f"({_operand_text(num, len(num.terms) > 1)} // {_divisor_text(den)})"
        case Mod(num, den):
            return f"({_operand_text(num, len(num.terms) > 1)} % {_divisor_text(den)})"


def _divisor_text(expr: Expr) -> str:
    is_atom = len(expr.terms) == 1 and len(expr.terms[0][0]) == 1 and expr.terms[0][1] == 1
    return _operand_text(expr, expr.value is None and not is_atom)


def _operand_text(expr: Expr, parentheses: bool) -> str:
    return f"({text(expr)})" if parentheses else text(expr)


def text(expr: Expr) -> str:
    """One line of text that `parse_expr` reads back: `512*i0 + i1 - 3`, `(i0 // 4)`, `[v3]` for a value."""
    parts: list[str] = []
    for monomial, coefficient in expr.terms:
        factors = [atom_text(atom) for atom in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        sign = ("-" if coefficient < 0 else "") if not parts else (" - " if coefficient < 0 else " + ")
        parts.append(sign + "*".join(factors))
    return "".join(parts) or "0"
