"""Decide whether to recompute a value instead of loading it; both costs are estimated in nanoseconds of the machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pellucid.ir.contraction import find_contraction
from pellucid.ir.decision import Fact
from pellucid.ir.index import total
from pellucid.ir.nodes import Kernel, Load, axes_of
from pellucid.ir.ops import EXPENSIVE
from pellucid.ir.prefix import as_run
from pellucid.machine import Machine, issuing, kernel_work, moving, starting
from pellucid.machine.tiles import strided_along_all_axes, strided_cost
from pellucid.machine.work import estimate, estimated_bytes, evaluations, op_cost, touched_bytes
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.fusion_graph import FusionGraph, Group
from pellucid.schedule.inline import Inlined, Recipe, loads_of
from pellucid.schedule.match_axes import Mismatch

_MAX_LINES = 64
_MAX_READERS = 16


def check_strides(machine: Machine, first: Kernel, second: Kernel, merged: Kernel) -> Mismatch | None:
    """Refuse to merge two kernels if no loop order makes all accesses contiguous and separate kernels cost less.

    The epilogue of a contraction is exempt: it is written block by block, whatever its order.
    """
    lost = 0.0 if find_contraction(first) is not None else _striding_more(machine, (first, second), merged)
    if lost <= 0:
        return None
    work, parts = kernel_work(merged, 0), [kernel_work(kernel, 0) for kernel in (first, second)]
    read, written = (sum(getattr(part, way) for part in parts) - getattr(work, way) for way in ("read", "written"))
    gain = moving(machine, max(0, read), max(0, written), max(part.working_set for part in parts), machine.cores)
    gain += starting(machine, machine.cores)
    if lost <= gain:
        return None
    return Mismatch(
        "strided",
        f"in any loop order, some accesses of the merged kernel would be strided: that costs {lost:.3g} ns"
        f" and saves {gain:.3g} ns",
    )


def _striding_more(machine: Machine, separate: Sequence[Kernel], together: Kernel) -> float:
    """Nanoseconds that accesses take longer in one kernel, if no loop order makes all of them contiguous."""
    if not strided_along_all_axes(together):
        return 0.0
    spent = strided_cost(canonical_kernel(together), machine)
    return max(0.0, spent and spent - sum(strided_cost(canonical_kernel(kernel), machine) for kernel in separate))


def is_trivial(recipe: Recipe) -> bool:
    """True for constants, positions and masks computed from them: always cheaper to compute than to load."""
    return recipe.is_constant and sum(op_cost(line.rhs) for line in recipe.lines) < EXPENSIVE


def inlining_costs(
    graph: FusionGraph, recipe: Recipe, producer: Group, consumer: Group, inlined: Inlined
) -> tuple[bool, tuple[tuple[str, Fact], ...]]:
    """Whether inlining pays, and the nanoseconds that it saves and that recomputation takes."""
    machine, threads = graph.machine, graph.machine.cores
    working_set = kernel_work(consumer.kernel, 0).working_set
    saved = _saved(graph, recipe, producer, consumer)
    gain = moving(machine, saved.read, saved.written, working_set, threads)
    gain += issuing(machine, saved.work / machine.lanes, threads) + saved.kernels * starting(machine, threads)
    work, expensive = _work(inlined.kernel, inlined.copied)
    again = issuing(machine, work / machine.lanes, threads)
    price = again + moving(machine, _bytes_added(consumer.kernel, inlined), 0, working_set, threads)
    found = find_contraction(inlined.kernel)
    if not (found and found.rows and found.columns):  # blocks of a product read their operands in any order
        price += _striding_more(machine, (recipe.kernel, consumer.kernel), inlined.kernel)
    # Expensive lines are recomputed only if that takes less time than another kernel.
    pays = price <= gain and len(recipe.lines) <= _MAX_LINES and not (expensive and again > starting(machine, threads))
    return pays, (("ns_saved", round(gain)), ("ns_spent", round(price)), ("lines", len(recipe.lines)))


@dataclass(frozen=True, slots=True)
class _Saved:
    """Bytes not read and not written, scalar instructions not executed, and kernels not called."""

    read: float
    written: float = 0.0
    work: float = 0.0
    kernels: float = 0.0


def _saved(graph: FusionGraph, recipe: Recipe, producer: Group, consumer: Group) -> _Saved:
    """The consumer's loads; if all readers may inline `buffer`, also its share of the store and the producer's work."""
    buffer = recipe.store.buffer
    param = next(param for param in consumer.kernel.params if param.name == buffer)
    ranges = consumer.kernel.ranges
    indices = {load.index for _, load in consumer.kernel.loads() if load.buffer == buffer}
    read = sum(estimate(touched_bytes(index, param, ranges)) for index in indices)
    if not _may_vanish(graph, buffer):
        return _Saved(read)
    share = 1 / len(graph.readers[buffer])
    written = estimated_bytes(param) * share
    if sum(1 for _ in producer.kernel.stores()) > 1:
        return _Saved(read, written)
    sizes = {param.name: param for param in recipe.kernel.params}
    loads = {(load.buffer, load.index) for load in loads_of(recipe.lines)}
    loaded = total(touched_bytes(index, sizes[name], recipe.kernel.ranges) for name, index in loads)
    work, _ = _work(recipe.kernel, frozenset(line.out for line in recipe.lines))
    return _Saved(read + estimate(loaded) * share, written, work * share, share)


def _may_vanish(graph: FusionGraph, buffer: str) -> bool:
    """True if `buffer` is unused after all its readers inline it, and they are few enough for a share to matter."""
    readers = graph.readers[buffer]
    few = graph.buffers[buffer].role == "temp" and len(readers) <= _MAX_READERS
    return few and all(isinstance(reader.node, Kernel) for reader in readers)


def _work(kernel: Kernel, lines: Collection[str]) -> tuple[int, bool]:
    """Instructions of `lines` over all points, and whether an expensive one is among them."""
    kernel = as_run(kernel)
    scopes = axes_of(kernel)
    work, expensive = 0, False
    for line in kernel.body:
        cost = op_cost(line.rhs) if line.out in lines else 0
        if cost:
            work += cost * estimate(evaluations(scopes[line.out], kernel.space))
            expensive |= cost >= EXPENSIVE
    return work, expensive


def _bytes_added(before: Kernel, inlined: Inlined) -> int:
    """Bytes of the copied loads that the consumer did not have before."""
    known = {(load.buffer, load.index) for _, load in before.loads()}
    params = {param.name: param for param in inlined.kernel.params}
    added = {
        (line.rhs.buffer, line.rhs.index)
        for line in inlined.kernel.body
        if line.out in inlined.copied and isinstance(line.rhs, Load)
    }
    ranges = inlined.kernel.ranges
    return sum(estimate(touched_bytes(index, params[name], ranges)) for name, index in added - known)
