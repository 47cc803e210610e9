"""Choose the vector axis: the axis whose adjacent points share a register.

Candidates, including scalar code, are compared by their estimated instructions: all of them move the same bytes. The
cheapest is chosen. The decision lists the others with their times by the machine model, and what makes them expensive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TypeAlias

from pellucid.codegen.collisions import colliding
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Compute, IndexValue, Kernel, Line, Load, Reduce, Store, axes_of, operands
from pellucid.ir.ops import OPS
from pellucid.machine import Machine, kernel_work, time
from pellucid.machine.tiles import (
    GATHER_COST,
    INTERLEAVED_COST,
    SHORT_STRIDE_COST,
    SQUARES,
    Tiling,
    interleaved_axis,
    interleaved_stores,
    is_short_stride,
    tile_decisions,
    tiling,
)
from pellucid.machine.work import SYMBOL_GUESS, estimate


class Access(Enum):
    """The pattern of a load or store along the vector axis."""

    UNIFORM = "the same element for every lane"
    UNIT = "adjacent elements"
    NEAR = "every second, third or fourth element"
    GATHER = "any elements"


LANE_COST = {Access.NEAR: SHORT_STRIDE_COST, Access.GATHER: GATHER_COST}
"""Instructions per lane of an access; other patterns take one instruction per vector."""

# Operators that the prelude computes one lane at a time, for integers or for any type.
LANEWISE_INT = frozenset({"floordiv", "truncdiv", "remainder", "fmod", "pow"})
LANEWISE = frozenset({"floordiv", "shl", "shr"})

_Way: TypeAlias = "tuple[str | None, int]"
"""A vector axis, or None for scalar code, and lanes."""

TILE_COST = 0.5
LANEWISE_COST = 2.0
TOTAL_COST = 16.0


@dataclass(frozen=True, slots=True)
class VectorChoice:
    """The vector axis (None: scalar code), lanes per step, accesses done in squares, and the reasons.

    alternatives: the relative price, axis and lanes of the best choice along each other axis, the cheapest first.
    price: estimated instructions of one call.
    """

    axis: str | None
    width: int
    tiles: Tiling
    decisions: tuple[Decision, ...]
    alternatives: tuple[tuple[float, str, int], ...] = ()
    price: float = 0.0


def access(index: Expr, axis: str, wide_values: frozenset[str]) -> Access:
    """The access pattern of `index` along `axis`; `wide_values` are the values that differ between lanes."""
    if index.vals() & wide_values:
        return Access.GATHER
    step = index.coefficient(axis)
    if step is None:
        return Access.GATHER
    if step.value == 0:
        return Access.UNIFORM
    return Access.UNIT if step.value == 1 else Access.NEAR if is_short_stride(step) else Access.GATHER


def gathered(kernel: Kernel, vector: str | None, wide: frozenset[str]) -> frozenset[str]:
    """The loads and stores with one value per lane whose lanes are not adjacent in memory."""
    return frozenset(
        line.out
        for line in kernel.body
        if isinstance(line.rhs, Load | Store)
        and line.out in wide
        and access(line.rhs.index, str(vector), wide) is not Access.UNIT
    )


def is_lanewise(line: Line) -> bool:
    """True if the prelude has no vector form of this operator for this type."""
    if not isinstance(line.rhs, Compute):
        return False
    return line.rhs.op in LANEWISE or (line.rhs.op in LANEWISE_INT and not line.dtype.is_float)


def base_lanes(kernel: Kernel, machine: Machine) -> int:
    """Lanes of one step: as many values of the kernel's widest type, or of 4 bytes if it is wider, as fit a register.

    Wider types take two registers, narrower ones a part of one.
    """
    sizes = [line.dtype.itemsize for line in kernel.body if not isinstance(line.rhs, Store)]
    return machine.isa.register_bytes // min(4, max(sizes, default=4))


def choose(kernel: Kernel, machine: Machine, enabled: bool, serial: str = "") -> VectorChoice:
    """The cheapest vector axis of a simplified kernel, with its decision. serial: an axis that is no candidate."""
    refusal = _refusal(kernel, enabled)
    if refusal:
        return VectorChoice(None, 1, Tiling(), (Decision("codegen.vectorize", (kernel.name,), False, refusal),))
    scalar = cost(kernel, None, 1)
    prices: dict[tuple[str, int], float] = {}
    for name in candidates(kernel):
        if name == serial:
            continue
        for lanes in _widths(base_lanes(kernel, machine)):
            prices[name, lanes] = cost(kernel, name, lanes, tiling(kernel, name, lanes, machine).lines)

    def rank(way: tuple[str, int]) -> tuple[float, int]:
        return prices[way], -way[1]

    best, lanes = min(prices, key=rank)
    price = prices[best, lanes]
    chosen_way = (None, 1) if price >= scalar else (best, lanes)
    facts = (
        *(("axis", best), ("cost", round(price)), ("scalar_cost", round(scalar)), ("lanes", lanes)),
        *_priced(kernel, chosen_way, {(None, 1): scalar, **prices}, machine),
    )
    if price >= scalar:
        why = f"vectors along {best}, the best axis, would cost more than scalar code: {_obstacle(kernel, best)}"
        decision = Decision("codegen.vectorize", (kernel.name,), False, why, facts)
        return VectorChoice(None, 1, Tiling(), (decision,), price=scalar)
    width = lanes * unroll(kernel, best, lanes, machine)
    rest = sorted({name for name, _ in prices} - {best})
    ways = (min((way for way in prices if way[0] == name), key=rank) for name in rest)
    alternatives = sorted((prices[way] / price, *way) for way in ways)
    others = f", cheaper than along {', '.join(rest)}" if rest else ""
    why = f"{width} lanes along {best}{others}"
    chosen = Decision("codegen.vectorize", (kernel.name,), True, why, (*facts, ("width", width)))
    tiles = tiling(kernel, best, width, machine)
    reasons = (chosen, *tile_decisions(kernel, tiles), *_lane_by_lane(kernel, best, tiles.lines))
    return VectorChoice(best, width, tiles, reasons, tuple(alternatives), price)


def _priced(
    kernel: Kernel, chosen: _Way, steps: Mapping[_Way, float], machine: Machine
) -> tuple[tuple[str, int | str], ...]:
    """The estimated times of the chosen way and the others, on one thread, the cheapest first. steps: instructions."""
    work = kernel_work(kernel, 0)

    def nanoseconds(way: _Way) -> int:
        return round(time(replace(work, steps=steps[way]), machine).nanoseconds)

    def label(axis: str | None, lanes: int) -> str:
        return f"{lanes} lanes along {axis}" if axis else "scalar"

    others = sorted(steps.keys() - {chosen}, key=lambda way: (steps[way], -way[1], way[0] or ""))
    runners_up = ", ".join(f"{label(*way)}: {nanoseconds(way)} ns" for way in others)
    return ("estimated_ns", nanoseconds(chosen)), ("runners_up", runners_up)


def _widths(base: int) -> tuple[int, ...]:
    """The lanes to try: a register's, and fewer in case a square of that width is too large or mostly empty."""
    return tuple(sorted({base, *(lanes for lanes in SQUARES if lanes < base)}))


def _refusal(kernel: Kernel, enabled: bool) -> str:
    """Why this kernel cannot have vectors at all; empty if it can."""
    if not enabled:
        return "vectorisation is switched off"
    if not kernel.space:
        return "the kernel has a single point"
    if not candidates(kernel):
        return "any two points may store the same element, so they are stored one after the other"
    return ""


def candidates(kernel: Kernel) -> tuple[str, ...]:
    """The axes along which there may be vectors.

    Points that may store the same element must not be lanes of one vector. Positions of argmax and argmin count the
    reduced axes in the order of the space, the last one fastest, and their lanes have neighbouring positions.
    """
    positions = any(isinstance(line.rhs, Reduce) and line.rhs.op in ("argmax", "argmin") for line in kernel.body)
    barred = {*colliding(kernel), *(kernel.reduced[:-1] if positions else ())}
    return tuple(axis.name for axis in kernel.space if axis.name not in barred)


def cost(kernel: Kernel, axis: str | None, lanes: int, tiled: frozenset[str] = frozenset()) -> float:
    """Estimated instructions of one call with vectors of `lanes` along `axis`. tiled: accesses done in squares."""
    extents = {each.name: max(1, estimate(each.extent)) for each in kernel.space}
    depends = axes_of(kernel)
    wide_values = frozenset(out for out, axes in depends.items() if axis in axes)
    inner = frozenset(kernel.reduced)
    spent = 0.0
    for line in kernel.body:
        axes = depends[line.out] | (inner if isinstance(line.rhs, Reduce) else frozenset())
        points = prod(extents[name] for name in axes)
        steps = points * -(-extents[axis] // lanes) / extents[axis] if axis in axes and axis is not None else points
        spent += (
            TILE_COST * points
            if line.out in tiled
            else _line_cost(kernel, line, axis, axes, points, steps, wide_values)
        )
        if isinstance(line.rhs, Reduce) and axis in inner:
            spent += TOTAL_COST * prod(extents[name] for name in depends[line.out])
    return spent


def _line_cost(
    kernel: Kernel,
    line: Line,
    axis: str | None,
    axes: frozenset[str],
    points: float,
    steps: float,
    wide_values: frozenset[str],
) -> float:
    if axis is None or axis not in axes:
        return points * (_operator_cost(line) if isinstance(line.rhs, Compute) else 1)
    match line.rhs:
        case Store() if interleaved_axis(kernel, line, axis) or interleaved_stores(kernel, line, axis):
            return points * INTERLEAVED_COST
        case Load(_, index) | Store(_, index):
            each = LANE_COST.get(access(index, axis, wide_values))
            return steps if each is None else points * each
        case Compute():
            spent = _operator_cost(line)
            return points * (spent + LANEWISE_COST) if is_lanewise(line) else steps * spent
        case _:
            return steps


def _operator_cost(line: Line) -> int:
    assert isinstance(line.rhs, Compute)
    return OPS[line.rhs.op].cost


def _obstacle(kernel: Kernel, axis: str) -> str:
    """What makes vectors along `axis` expensive, as text."""
    lines = _lane_by_lane(kernel, axis)
    if lines:
        return lines[0].why
    extent = next(each.extent for each in kernel.space if each.name == axis)
    if extent.value is not None:
        return f"its extent is {extent}"
    return f"its extent depends on sizes, and is about {estimate(extent)} where they are about {SYMBOL_GUESS}"


def _lane_by_lane(kernel: Kernel, axis: str, tiled: frozenset[str] = frozenset()) -> tuple[Decision, ...]:
    """One decision for each line that is vectorised one lane at a time."""
    depends = axes_of(kernel)
    wide_values = frozenset(out for out, axes in depends.items() if axis in axes)
    found: list[Decision] = []
    for line in kernel.body:
        if line.out not in wide_values or line.out in tiled:
            continue
        match line.rhs:
            case Load(buffer, index) | Store(buffer, index) if access(index, axis, wide_values) is Access.GATHER:
                found.append(Decision("codegen.lanes", (kernel.name, buffer), False, _why_gather(index, axis)))
            case Compute(op) if is_lanewise(line):
                why = f"{op} of {line.dtype.value} has no vector instructions"
                found.append(Decision("codegen.lanes", (kernel.name, line.out), False, why))
            case _:
                pass
    return tuple(found)


def _why_gather(index: Expr, axis: str) -> str:
    if index.vals():
        return f"the index {index} depends on values"
    step = index.coefficient(axis)
    if step is None:
        return f"the index {index} divides {axis}"
    return f"neighbours along {axis} are {step} elements apart in {index}"


# ---------------------------------------------------------------------------------------------- unrolling


def unroll(kernel: Kernel, axis: str, lanes: int, machine: Machine) -> int:
    """How many registers of the common type one step processes.

    Reductions need several independent accumulators to hide the latency of the reducing operator, and column
    reductions should read whole cache lines; in both cases all live values should stay in registers.
    """
    if not any(isinstance(line.rhs, Reduce) for line in kernel.body):
        halves = all(param.dtype.itemsize <= 2 for param in kernel.params) and 4 * lanes == machine.isa.register_bytes
        halves = halves and tiling(kernel, axis, lanes, machine).axis is None
        return 2 if halves and pressure(kernel, axis) <= machine.isa.registers // 4 else 1
    if tiling(kernel, axis, lanes, machine).axis is not None:
        return 1  # the squares of a wider step exceed the registers
    extent = next(each.extent for each in kernel.space if each.name == axis).value
    live = pressure(kernel, axis)
    fitting = [k for k in (4, 2, 1) if k * lanes <= 64 and k * live <= (machine.isa.registers * 3) // 4] or [1]
    if extent is None:
        return fitting[0]
    return min(fitting, key=lambda k: (-(-extent // (k * lanes)) * k, -k))


def pressure(kernel: Kernel, axis: str) -> int:
    """The maximum number of vector values live at once in the order of the body; index values count twice."""
    depends = axes_of(kernel)
    last: dict[str, int] = {}
    for position, line in enumerate(kernel.body):
        for name in operands(line.rhs):
            last[name] = position
    most, live = 1, dict[str, int]()
    for position, line in enumerate(kernel.body):
        if axis in depends[line.out] and not isinstance(line.rhs, Store):
            live[line.out] = 2 if isinstance(line.rhs, IndexValue) or line.dtype.itemsize == 8 else 1
        most = max(most, sum(live.values()))
        live = {name: size for name, size in live.items() if last.get(name, -1) > position}
    return most
