"""Which elements of its buffers each iteration of a kernel's parallel loop may touch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pellucid.codegen.plan import Plan
from pellucid.ir.index import Atom, Expr, FloorDiv, Mod, Var
from pellucid.ir.nodes import Kernel, Load, Store

Numbers: TypeAlias = npt.NDArray[np.int64]
Span: TypeAlias = "tuple[Numbers | int, Numbers | int]"
"""The minimum and the maximum value, as arrays over iterations where they differ between these."""


class Reach:
    """The elements of a buffer that each iteration may touch.

    first, last: by iteration, the minimum and the maximum element, from the beginning of the buffer on; both are inside
    it, unless an iteration touches none: then `last` is less than `first`.
    advances: whether both never decrease from one iteration to the next.
    """

    __slots__ = ("advances", "first", "last")

    def __init__(self, first: Numbers, last: Numbers) -> None:
        self.first = first
        self.last = last
        self.advances = bool((np.diff(first) >= 0).all() and (np.diff(last) >= 0).all())

    def over(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the last element that iterations `begin` to `end`, at least one, may touch."""
        if self.advances:
            return int(self.first[begin]), int(self.last[end - 1])
        return int(self.first[begin:end].min()), int(self.last[begin:end].max())


@dataclass(frozen=True, slots=True)
class Reaches:
    """loads, stores: by the position of the kernel's parameter."""

    loads: Mapping[int, Reach]
    stores: Mapping[int, Reach]


def reaches(kernel: Kernel, plan: Plan, offsets: tuple[int, ...]) -> Reaches | None:
    """What each iteration touches; None if that depends on values or symbolic sizes, or is not supported.

    kernel: the whole kernel, of which `plan.kernel` may be only the epilogue. offsets: see `CppKernel`.
    """
    if plan.rows is not None or plan.colliding or (plan.blocks and plan.blocks.groups):
        return None
    box = _box(kernel, plan, 1)
    squares = _box(kernel, plan, plan.width) if plan.tiled else box
    if box is None or squares is None:
        return None
    found: dict[type, dict[int, Reach]] = {Load: {}, Store: {}}
    numbers = {param.name: number for number, param in enumerate(kernel.params)}
    for line in kernel.body:
        if not isinstance(line.rhs, Load | Store):
            continue
        number = numbers[line.rhs.buffer]
        span = _span(line.rhs.index, squares if isinstance(line.rhs, Load) and line.out in plan.tiled else box)
        if span is None or (isinstance(line.rhs, Store) and line.rhs.join):
            return None
        reach = _within(span, kernel.params[number].numel.value or 0, offsets[number], plan.extent.value or 0)
        known = found[type(line.rhs)]
        known[number] = _joined(known[number], reach) if number in known else reach
    return Reaches(found[Load], found[Store])


def _box(kernel: Kernel, plan: Plan, square: int) -> dict[str, Span] | None:
    """By axis, the minimum and the maximum counter in each iteration.

    square: extents of axes with squares are rounded up to it: the last square is read as far as the buffer goes.
    """
    box: dict[str, Span] = {}
    ends: dict[str, int] = {}
    for axis in kernel.space:
        if axis.extent.value is None:
            return None
        whole = square if axis.name in (plan.vector, plan.tile) else 1
        ends[axis.name] = -(-axis.extent.value // whole) * whole
        box[axis.name] = 0, ends[axis.name] - 1
    rest = np.arange(plan.extent.value or 0, dtype=np.int64)
    for counter in reversed(plan.counters):
        count, step = counter.count.value, counter.step.value
        if count is None or step is None or counter.axis not in ends:
            return None
        begin = rest % count * step
        box[counter.axis] = begin, np.minimum(begin + step, ends[counter.axis]) - 1
        rest = rest // count
    return box


def _span(expr: Expr, box: Mapping[str, Span]) -> Span | None:
    low: Any = 0
    high: Any = 0
    for monomial, coefficient in expr.terms:
        term: Span = coefficient, coefficient
        for atom in monomial:
            span = _span_of_atom(atom, box)
            if span is None:
                return None
            term = _product(term, span)
        low, high = low + term[0], high + term[1]
    return low, high


def _product(left: Span, right: Span) -> Span:
    ends = [a * b for a in left for b in right]
    return (np.minimum.reduce(np.broadcast_arrays(*ends)), np.maximum.reduce(np.broadcast_arrays(*ends)))


def _span_of_atom(atom: Atom, box: Mapping[str, Span]) -> Span | None:
    match atom:
        case Var(name):
            return box[name]
        case FloorDiv(num, den) | Mod(num, den):
            span, by = _span(num, box), den.value
            if span is None or by is None:
                return None
            low, high = span[0] // by, span[1] // by
            if isinstance(atom, FloorDiv):
                return low, high
            within = low == high
            return np.where(within, span[0] - low * by, 0), np.where(within, span[1] - low * by, by - 1)
        case _:
            return None


def _within(span: Span, numel: int, offset: int, extent: int) -> Reach:
    """The span clipped to a parameter's `numel` elements: masked loads touch nothing outside of it."""
    first, last = (np.broadcast_to(np.asarray(end, dtype=np.int64), (extent,)) for end in span)
    return Reach(np.maximum(first, 0) + offset, np.minimum(last, numel - 1) + offset)


def _joined(one: Reach, other: Reach) -> Reach:
    return Reach(np.minimum(one.first, other.first), np.maximum(one.last, other.last))
