"""Variants of a kernel: plans of about the same estimated cost, which are built too so that calls find the fastest.

A variant must give bitwise equal results, since results must not change from call to call. So the terms of each element
are added in the same order, and each value is computed by the same function.

Which of several loop nests of equal cost is faster depends on what the cost model leaves out: how rows map to cache
sets, how many streams the hardware prefetcher follows, what TLB misses cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

from pellucid.codegen.plan import Plan, make_plan
from pellucid.codegen.vector import VectorChoice, base_lanes, choose, pressure, unroll
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Compute, Kernel, Line, Load, Reduce, Store
from pellucid.ir.ops import EXPENSIVE, OPS
from pellucid.machine import Machine
from pellucid.machine.tiles import SQUARES, tiling
from pellucid.machine.work import estimate
from pellucid.options import Options

CLOSE = 1.3
"""Maximum cost of a variant, relative to the chosen plan."""

MAX_LANES = 64


def plan_loops(kernel: Kernel, machine: Machine, options: Options) -> Iterator[Plan]:
    """The plan of a kernel that is no contraction, followed by its variants.

    These differ in the vector axis, in the order of the loops around it, or in the lanes of a step.
    """
    choice = choose(kernel, machine, options.vectorize)
    first = make_plan(kernel, machine, options, choice)
    yield first
    if choice.axis is None or _order_matters(kernel):
        return
    planned = partial(make_plan, kernel, machine, options)
    others = chain(
        map(planned, _other_axes(kernel, choice, machine)),
        _other_orders(first),
        map(planned, _other_lanes(kernel, choice, machine)),
    )
    yield from (plan for plan in others if not differs(first, plan))


def _order_matters(kernel: Kernel) -> bool:
    """Whether several points may store to one element, so that the order of the loops matters."""
    return any(store.join or store.index.vals() for _, store in kernel.stores())


def differs(first: Plan, other: Plan) -> str:
    """Why results of two plans of a kernel may differ in some bits; empty if they cannot."""
    reduced = set(first.kernel.reduced)
    if any(_in_order(line) for line in first.kernel.body):
        if first.vector != other.vector and {first.vector, other.vector} & reduced:
            return "terms would be added in another order"
        if first.width != other.width and ({first.vector, first.tile, other.tile} & reduced):
            return "terms would be added in blocks of another size"
        if (first.tile in reduced) != (other.tile in reduced):
            return "terms would be added in blocks of another size"
    for line in first.kernel.body:
        if _is_function(line) and (line.out in first.wide) != (line.out in other.wide):
            return f"{line.out} would be computed by another function"
    return ""


def _in_order(line: Line) -> bool:
    """Whether it is a reduction whose bits depend on the order of its terms: of floats, or of positions."""
    return isinstance(line.rhs, Reduce) and (line.dtype.is_float or line.rhs.op in ("argmax", "argmin"))


def _is_function(line: Line) -> bool:
    """Whether its scalar form may round differently from its vector form."""
    return isinstance(line.rhs, Compute) and line.dtype.is_float and OPS[line.rhs.op].cost >= EXPENSIVE


def _other_axes(kernel: Kernel, choice: VectorChoice, machine: Machine) -> Iterator[VectorChoice]:
    for price, axis, lanes in choice.alternatives:
        if price <= CLOSE:
            yield _choice(kernel, axis, lanes * unroll(kernel, axis, lanes, machine), machine)


def _other_lanes(kernel: Kernel, choice: VectorChoice, machine: Machine) -> Iterator[VectorChoice]:
    """Steps of twice, half and four times as many lanes, if they fit the registers."""
    axis, least = str(choice.axis), base_lanes(kernel, machine)
    live, extent = pressure(kernel, axis), estimate(kernel.ranges[axis])
    most = max(SQUARES) if choice.tiles.axis else MAX_LANES
    for width in (2 * choice.width, choice.width // 2, 4 * choice.width):
        fits = least <= width <= min(most, extent) and width // least * live <= machine.isa.registers
        if fits:
            yield _choice(kernel, axis, width, machine)


def _choice(kernel: Kernel, axis: str, width: int, machine: Machine) -> VectorChoice:
    return VectorChoice(axis, width, tiling(kernel, axis, width, machine), ())


def _other_orders(first: Plan) -> Iterator[Plan]:
    """The loops around the vectors in the memory order of the results, or else of the loads."""
    stores, loads = (
        [line.rhs.index for line in first.kernel.body if isinstance(line.rhs, kind)] for kind in (Store, Load)
    )
    for indices in (stores, loads):
        order = tuple(sorted(first.outer, key=lambda axis: -_longest(indices, axis)))
        if order != first.outer:
            yield replace(first, outer=order)
            return


def _longest(indices: Iterable[Expr], axis: str) -> int:
    """The longest step along an axis, in elements."""
    steps = (index.coefficient(axis) for index in indices)
    return max((abs(estimate(step)) for step in steps if step is not None), default=0)
