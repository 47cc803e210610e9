"""Find a common iteration space for two kernels, from the buffers that they share.

The first kernel stores `B[512*i + j]`, the second loads `B[512*k + 64*h + d]`. Both indices are numbers written in
a mixed radix: digits (the axes), each with a weight (its stride) and a range (its extent). Digits of equal weight
are the same digit; where their ranges differ, the larger one is split. Here `j` becomes `(h, d)` and `i` is `k`.
The order of the axes in either kernel does not matter, so a transposed consumer needs no special case.

Axes that are not in the index of the shared buffer, those that one kernel reduces and over which the other one
broadcasts or reduces too, are paired through inputs that both kernels load, or else by their extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pellucid.ir.index import ONE, ZERO, Expr, exact_div, product, var
from pellucid.ir.nodes import Axis, Kernel, Reduce
from pellucid.ir.ops import REDUCTIONS
from pellucid.schedule.rewrite import Rewrite

Anchor: TypeAlias = tuple[Expr, Expr]


@dataclass(frozen=True, slots=True)
class Match:
    """One space for two kernels, and the rewrite of each to that space."""

    space: tuple[Axis, ...]
    first: Rewrite
    second: Rewrite


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why something cannot be fused; `category` is one of a small set of words."""

    category: str
    why: str


def match_axes(
    first: Kernel, second: Kernel, anchors: Sequence[Anchor], hints: Sequence[Anchor] = ()
) -> Match | Mismatch:
    """The common space of `first` and `second`.

    anchors: index expressions, one of each kernel, that address the same element at the same point.
    hints: pairs that probably do.
    """
    left, right = _Digits(first), _Digits(second)
    for one, other in anchors:
        refusal = _pair_digits(left, right, one, other)
        if refusal is not None:
            return refusal
    if left.open and right.open:
        for one, other in hints:
            _pair_digits(left, right, one, other)
        if not _pair_in_order(left, right):
            return Mismatch("reduction-axes", "axes that the shared buffers do not determine have different extents")
    space = _common_space(left, right)
    refusal = _check_scopes(left, right) or _check_index_reductions((left, right), space)
    return refusal or Match(space, left.rewrite(space), right.rewrite(space))


def same_order(first: Kernel, second: Kernel, match: Match) -> bool:
    """Whether the axes that both kernels have are in the same order in both."""
    orders = [
        [piece for axis in kernel.space for piece in rewrite.pieces.get(axis.name, (axis.name,))]
        for kernel, rewrite in ((first, match.first), (second, match.second))
    ]
    common = set(orders[0]) & set(orders[1])
    one, other = ([name for name in order if name in common] for order in orders)
    return one == other


class _Digits:
    """The axes of one kernel while they are split into common digits, the innermost digit first."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.open = {axis.name: axis.extent for axis in kernel.space}
        self.weight = dict.fromkeys(self.open, ONE)
        self.digits: dict[str, list[Axis]] = {name: [] for name in self.open}
        self.reduced = kernel.reduced

    def take(self, name: str, digit: Axis, rest: Expr) -> None:
        """Split `digit` off as the next one of the axis `name`; `rest` is the remaining extent."""
        self.digits[name].append(digit)
        self.weight[name] = self.weight[name] * digit.extent
        if rest == ONE:
            del self.open[name]
        else:
            self.open[name] = rest

    def names(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The common axes that make up `axes`, outermost first."""
        return tuple(digit.name for axis in axes for digit in reversed(self.digits[axis]))

    def ordered(self) -> Iterator[Axis]:
        """All digits, in the order of the kernel's space."""
        for axis in self.kernel.space:
            yield from reversed(self.digits[axis.name])

    def rewrite(self, space: tuple[Axis, ...]) -> Rewrite:
        forms: dict[str, Expr] = {}
        pieces: dict[str, tuple[str, ...]] = {}
        for name, digits in self.digits.items():
            if len(digits) == 1 and digits[0].name == name:
                continue
            form, weight = ZERO, ONE
            for digit in digits:
                form, weight = form + weight * var(digit.name), weight * digit.extent
            forms[name], pieces[name] = form, self.names([name])
        return Rewrite(axes=forms, pieces=pieces, ranges={axis.name: axis.extent for axis in space})


def _pair(left: _Digits, one: str, right: _Digits, other: str) -> bool:
    """Pair the next digits of axis `one` of `left` and axis `other` of `right`; False if no digit fits both."""
    a, b = left.open[one], right.open[other]
    extent = a if exact_div(b, a) is not None else b
    rest_a, rest_b = exact_div(a, extent), exact_div(b, extent)
    if rest_a is None or rest_b is None or extent == ONE:
        return False
    whole = rest_a == ONE and not left.digits[one]
    name = one if whole else _fresh(f"{one}.{len(left.digits[one])}", set(left.digits))
    digit = Axis(name, extent)
    left.take(one, digit, rest_a)
    right.take(other, digit, rest_b)
    return True


def _pair_digits(left: _Digits, right: _Digits, one: Expr, other: Expr) -> Mismatch | None:
    """Pair the digits of equal weight of two index expressions that must address the same element."""
    a, b = _strides(left, one), _strides(right, other)
    if a is None or b is None:
        return Mismatch("different-loop-orders", f"no common radix for {one} and {other}")
    progress = True
    while progress:
        progress = False
        weights = {b[name] * right.weight[name]: name for name in b if name in right.open}
        for name in a:
            partner = weights.get(a[name] * left.weight[name]) if name in left.open else None
            if partner is not None and partner in right.open and _pair(left, name, right, partner):
                progress = True
                break
    return _explain(left, right, [n for n in a if n in left.open], [n for n in b if n in right.open], one, other)


def _strides(side: _Digits, index: Expr) -> dict[str, Expr] | None:
    """The weight of each axis in `index`, None when it is not affine in one of them."""
    result: dict[str, Expr] = {}
    names = index.vars()
    for axis in side.kernel.space:
        if axis.name in names:
            stride = index.coefficient(axis.name)
            if stride is None or stride.vars():
                return None
            result[axis.name] = stride
    return result


def _explain(left: _Digits, right: _Digits, a: list[str], b: list[str], one: Expr, other: Expr) -> Mismatch | None:
    """None if all digits are paired and the constant parts agree, else the reason."""
    if not a and not b:
        base_a, base_b = one.at_zero, other.at_zero
        if base_a == base_b:
            return None
        if base_a.vals() or base_b.vals():
            return Mismatch("indirect", f"{other} is computed from a value")
        return Mismatch("different-offset", f"{one} and {other} start at different elements")
    if other.vals() or one.vals():
        return Mismatch("indirect", f"{other} is computed from a value")
    size_a = product(left.kernel.ranges[name] for name in one.vars())
    size_b = product(right.kernel.ranges[name] for name in other.vars())
    if size_a != size_b:
        return Mismatch("different-numel", f"one touches {size_a} elements, the other {size_b}")
    return Mismatch("different-loop-orders", f"the points of {one} and of {other} do not line up")


def _pair_in_order(left: _Digits, right: _Digits) -> bool:
    """Pair the remaining axes of both sides from the innermost outwards; True if all are paired."""
    while left.open and right.open:
        one = [axis.name for axis in left.kernel.space if axis.name in left.open][-1]
        other = [axis.name for axis in right.kernel.space if axis.name in right.open][-1]
        if not _pair(left, one, right, other):
            return False
    return not left.open and not right.open


def _common_space(left: _Digits, right: _Digits) -> tuple[Axis, ...]:
    """All digits, in the order of the side that has all of them.

    An axis that only one side has becomes a digit of the common space here.
    """
    _close(left, {digit.name for digits in right.digits.values() for digit in digits})
    _close(right, {digit.name for digits in left.digits.values() for digit in digits})
    a, b = tuple(left.ordered()), tuple(right.ordered())
    return a if len(a) >= len(b) else b


def _close(side: _Digits, taken: set[str]) -> None:
    taken |= {digit.name for digits in side.digits.values() for digit in digits}
    for name, extent in list(side.open.items()):
        whole = not side.digits[name]
        fresh = _fresh(name if whole else f"{name}.{len(side.digits[name])}", taken)
        taken.add(fresh)
        side.take(name, Axis(fresh, extent), ONE)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    return name


def _check_scopes(left: _Digits, right: _Digits) -> Mismatch | None:
    """Refuse spaces in which a side would run neither at every point nor at every point of the kept axes."""
    full = {axis.name for side in (left, right) for axis in side.ordered()}
    reduced_left, reduced_right = left.names(left.reduced), right.names(right.reduced)
    reduced = set(reduced_left) | set(reduced_right)
    if reduced_left and reduced_right and set(reduced_left) != set(reduced_right):
        return Mismatch("reduction-axes", "the two reduce over different axes")
    for side in (left, right):
        own = {axis.name for axis in side.ordered()}
        if own not in (full, full - reduced):
            return Mismatch("broadcast", "one of them runs over only part of the other's space")
    return None


def _check_index_reductions(sides: tuple[_Digits, _Digits], space: tuple[Axis, ...]) -> Mismatch | None:
    """Refuse to reorder the axes of argmax and argmin, which count along the reduced axes in space order."""
    for side in sides:
        if not side.reduced:
            continue
        rows = (line.rhs for line in side.kernel.body if isinstance(line.rhs, Reduce))
        if any(REDUCTIONS[rhs.op].combine == "" for rhs in rows):
            names = side.names(side.reduced)
            if names != tuple(axis.name for axis in space if axis.name in names):
                return Mismatch("different-loop-orders", "an index reduction depends on the order of its axes")
    return None
