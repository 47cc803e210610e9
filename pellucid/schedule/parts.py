"""Kernels that compute different values in each part of an axis are split into one kernel per part.

Then a `cat` needs no masks, and the producer of one of its tensors can store it directly in the result:

    before: `for i0 < 96: c = i0 < 64; store y[i0], where c, (load a[i0] if c), (load b[i0 - 64] if not c)`
    after:  `for i0 < 64: store y[i0], load a[i0]`
            `for i0 < 32: store y[i0 + 64], load b[i0]`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr, const, var
from pellucid.ir.nodes import (
    Axis,
    Buffer,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Node,
    Program,
    Reduce,
    Rhs,
)
from pellucid.ir.types import DType
from pellucid.machine import Machine, kernel_work, moving, starting, time
from pellucid.machine.tiles import strided_cost
from pellucid.machine.work import estimate, estimated_bytes, kernel_cost
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.cleanup import share_lines
from pellucid.schedule.fusion_graph import FusionGraph
from pellucid.schedule.merge import scalar_of
from pellucid.schedule.rewrite import Rewrite, live_lines, make_kernel, unique_name

STEP = "parts"
MAX_PARTS = 16


def split_parts(program: Program, machine: Machine) -> tuple[Program, list[Decision], frozenset[str]]:
    """`program` with such kernels split where that pays, the decisions, and the buffers that several parts write."""
    ways = {node.name: _ways(node) for node in program.nodes if isinstance(node, Kernel)}
    if not any(ways.values()):
        return program, [], frozenset()
    graph = FusionGraph(program, machine)
    taken = {node.name for node in program.nodes}
    nodes: list[Node] = []
    decisions: list[Decision] = []
    partitioned: set[str] = set()
    for node in program.nodes:
        if isinstance(node, Kernel) and ways[node.name] and _is_only_writer(graph, node):
            parts, decision = _decided(graph, node, ways[node.name])
            decisions.append(decision)
            if decision.ok:
                nodes += [replace(part, name=unique_name(f"{node.name}_part", taken)) for part in parts]
                partitioned.update(writes(node))
                continue
        nodes.append(node)
    return replace(program, nodes=tuple(nodes)), decisions, frozenset(partitioned)


def _is_only_writer(graph: FusionGraph, kernel: Kernel) -> bool:
    """Whether no other node writes the buffers that a kernel stores, and it loads none of them."""
    stored = writes(kernel)
    return all(len(graph.writers[name]) == 1 for name in stored) and {*stored}.isdisjoint(reads(kernel))


def _passed_on(graph: FusionGraph, kernel: Kernel) -> Iterator[Buffer]:
    """Temporaries of other kernels that only this kernel reads, so that these may store them elsewhere."""
    for name in reads(kernel):
        writers = (graph.program.nodes[position] for position in graph.writers.get(name, ()))
        only_reader = graph.buffers[name].role == "temp" and len(graph.readers[name]) == 1
        if only_reader and all(isinstance(writer, Kernel) for writer in writers):
            yield graph.buffers[name]


def _decided(
    graph: FusionGraph, kernel: Kernel, ways: Sequence[tuple[Kernel, ...]]
) -> tuple[tuple[Kernel, ...], Decision]:
    """The split whose parts take the shortest time, and whether that is less than the time of the whole kernel.

    Temporaries that only this kernel reads need not be stored and read again.
    """
    machine = graph.machine
    prices = [sum(_price(each, machine) for each in _merged(parts)) for parts in ways]
    divided = min(prices)
    parts, whole, spared = ways[prices.index(divided)], _price(kernel, machine), 0.0
    for buffer in _passed_on(graph, kernel):
        size = estimated_bytes(buffer)
        spared += moving(machine, size, size, size, machine.cores) + starting(machine, machine.cores)
    ok = divided - spared < whole
    facts = (("ns_whole", round(whole)), ("ns_parts", round(divided)), ("ns_spared", round(spared)))
    more = "less" if ok else "more"
    why = f"{len(parts)} kernels with fewer masks take {more} time than one that chooses at each point"
    return parts, Decision("schedule.parts", (kernel.name,), ok, why, facts)


def _merged(parts: Iterable[Kernel]) -> Iterator[Kernel]:
    """Parts with equal axes as one kernel, into which fusion will merge them."""
    by_space: dict[tuple[Axis, ...], list[Kernel]] = {}
    for part in parts:
        by_space.setdefault(part.space, []).append(part)
    for space, kernels in by_space.items():
        params = {param.name: param for kernel in kernels for param in kernel.params}
        body = [
            line
            for number, kernel in enumerate(kernels)
            for line in Rewrite({each.out: f"{each.out}.{number}" for each in kernel.body}).lines(kernel.body)
        ]
        yield make_kernel(kernels[0].name, space, share_lines(tuple(body)), params)


def _price(kernel: Kernel, machine: Machine) -> float:
    plain = canonical_kernel(kernel)
    steps = estimate(kernel_cost(plain).work) / machine.lanes
    return time(kernel_work(plain, steps), machine, machine.cores).nanoseconds + strided_cost(plain, machine)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@dataclass(frozen=True, slots=True)
class _Condition:
    """A value that is true before the point `bound` of an axis if `below`, else from that point on."""

    axis: str
    bound: int
    below: bool

    def within(self, axis: str, first: int, last: int) -> bool | None:
        """Its value at the points from `first` up to, excluding, `last`; None if it is not constant there."""
        if axis != self.axis or first < self.bound < last:
            return None
        return (last <= self.bound) == self.below


def _ways(kernel: Kernel) -> list[tuple[Kernel, ...]]:
    """The ways to split a kernel: along one axis, or along all axes where that differs."""
    stored = [store.index for _, store in kernel.stores()]
    if any(isinstance(line.rhs, Reduce | CheckIndex) for line in kernel.body) or any(index.vals() for index in stored):
        return []
    axes = [name for name in kernel.ranges if all(name in index.vars() for index in stored)]
    found = [parts for axis in axes if len(parts := _along(kernel, axis)) > 1]
    parts = (kernel,)
    for axis in axes:
        parts = tuple(each for part in parts for each in _along(part, axis))
    return [*found, parts] if 1 < len(parts) <= MAX_PARTS and parts not in found else found


def _along(kernel: Kernel, axis: str) -> tuple[Kernel, ...]:
    """A kernel for each part of an axis if one of them has fewer loads; else the kernel itself."""
    conditions, extent = _conditions(kernel), kernel.ranges[axis].value if axis in kernel.ranges else None
    bounds = {each.bound for each in conditions.values() if each.axis == axis and 0 < each.bound < (extent or 0)}
    if extent is None or not 0 < len(bounds) < MAX_PARTS:
        return (kernel,)
    parts = tuple(_part(kernel, conditions, axis, *ends) for ends in pairwise((0, *sorted(bounds), extent)))
    return parts if any(_loaded(part) < _loaded(kernel) for part in parts) else (kernel,)


def _loaded(kernel: Kernel) -> int:
    return sum(1 for _ in kernel.loads())


def _conditions(kernel: Kernel) -> dict[str, _Condition]:
    """The values of a kernel that compare a position with a constant."""
    values = {line.out: line.rhs for line in kernel.body}
    found: dict[str, _Condition] = {}
    for line in kernel.body:
        match line.rhs:
            case Compute("lt" | "ge" as op, (left, right)):
                position, number = values[left], values[right]
                if isinstance(position, IndexValue) and isinstance(number, Const):
                    for axis in position.index.vars():
                        shift = (position.index - var(axis)).value
                        if shift is not None:
                            found[line.out] = _Condition(axis, int(number.value) - shift, op == "lt")
            case _:
                pass
    return found


def _part(kernel: Kernel, conditions: Mapping[str, _Condition], axis: str, first: int, last: int) -> Kernel:
    """A kernel at the points of an axis from `first` up to, excluding, `last`, with constant conditions folded."""
    space = tuple(Axis(each.name, const(last - first)) if each.name == axis else each for each in kernel.space)
    moved: dict[str, Expr] = {axis: var(axis) + first}
    if last - first == 1:
        space, moved = tuple(each for each in space if each.name != axis), {axis: const(first)}
    known: dict[str, bool] = {}
    renamed: dict[str, str] = {}
    rewrite = Rewrite(renamed, moved, {}, {each.name: each.extent for each in space})
    body: list[Line] = []
    for line in kernel.body:
        always = conditions[line.out].within(axis, first, last) if line.out in conditions else None
        line = rewrite.line(line)
        rhs = _simplified(line, known) if always is None else Const(always)
        if isinstance(rhs, str):
            renamed[line.out] = rhs
            continue
        if isinstance(rhs, Const) and line.dtype is DType.BOOL:
            known[line.out] = bool(rhs.value)
        body.append(replace(line, rhs=rhs, origin=line.origin.step(STEP)))
    return make_kernel(kernel.name, space, live_lines(body), {param.name: param for param in kernel.params})


def _simplified(line: Line, known: Mapping[str, bool]) -> Rhs | str:
    """The right-hand side of a line where some conditions are known, or the name of the value that it equals."""
    match line.rhs:
        case Compute("where", (condition, chosen, other)) if condition in known:
            return chosen if known[condition] else other
        case Compute("bitwise_and" | "bitwise_or" as op, (left, right)) if left in known or right in known:
            value, rest = (known[left], right) if left in known else (known[right], left)
            return rest if value == (op == "bitwise_and") else Const(value)
        case Compute("bitwise_not", (arg,)) if arg in known:
            return Const(not known[arg])
        case Load(buffer, index, str(mask), other) if mask in known:
            return Load(buffer, index) if known[mask] else Const(scalar_of(other, line.dtype))
        case _:
            return line.rhs
