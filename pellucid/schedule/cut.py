"""Decide whether to cut a reduction into chunks that run in parallel, and along which axes.

The decision depends on sizes alone, never on the number of threads: the order of additions determines the last bits of
a sum, and the same program must compute the same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.contraction import find_contraction
from pellucid.ir.decision import Decision, Fact
from pellucid.ir.index import ONE, ZERO, Expr, chunks, const, equal_piece
from pellucid.ir.nodes import Axis, Kernel, Reduce
from pellucid.ir.prefix import find_prefix
from pellucid.machine.work import estimate, kernel_cost
from pellucid.options import Options

# More chunks than this gain nothing on known machines.
MAX_CHUNKS = 64
# Rough throughput of a core per nanosecond: bytes from memory, and instructions per lane in vector code.
BYTES_PER_NS = 10.0
LANE_INSTRUCTIONS_PER_NS = 32.0
# Nanoseconds of work that justify one more thread; the option `min_work_per_thread` overrides it.
MIN_NS = 20_000
# Columns that one iteration of a reduction over rows processes.
COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """`axis` in `count` chunks of `size` points; the last chunk is shorter unless `exact`. With size 1 each point is a
    chunk, and there is no axis inside.
    """

    axis: str
    count: Expr
    size: Expr
    exact: bool


def choose_cuts(kernel: Kernel, options: Options) -> tuple[tuple[Cut, ...], Decision]:
    """Cuts into enough chunks for all threads, or none where that does not pay, and the decision."""
    present = iterations(kernel)
    facts: tuple[tuple[str, Fact], ...] = (("iterations", present),)

    def decided(ok: bool, why: str) -> Decision:
        return Decision("schedule.two_phases", (kernel.name,), ok, why, facts)

    if mixes_reduction_axes(kernel):
        return (), decided(False, "it is an attention, computed for some rows of a head at a time")
    if find_contraction(kernel) is not None:
        return (), decided(False, "it multiplies matrices, block by block")
    if find_prefix(kernel) is not None:
        return (), decided(False, "it is a prefix sum, which adds one point after the other")
    cost = kernel_cost(kernel)
    nanoseconds = max(estimate(cost.loaded) / BYTES_PER_NS, estimate(cost.work) / LANE_INSTRUCTIONS_PER_NS)
    minimum = options.min_work_per_thread or MIN_NS
    unknown = any(kernel.ranges[name].value is None for name in kernel.reduced)
    useful = MAX_CHUNKS if unknown else min(MAX_CHUNKS, int(nanoseconds / minimum))
    facts = (*facts, ("estimated_ns", round(nanoseconds)))
    if any(store.index.vals() for _, store in kernel.stores()):
        return (), decided(False, "it stores at indices that depend on values")
    if any(axis.extent == ZERO for axis in kernel.space):
        return (), decided(False, "there are no points")
    if useful < 2:
        return (), decided(False, "the whole reduction is little work: one thread is enough")
    if 2 * present > useful:
        return (), decided(False, f"{present} iterations over kept axes keep the threads busy")
    cuts = _cuts(kernel, -(-useful // present), nanoseconds, options)
    if not cuts:
        return (), decided(False, "no reduced axis is long enough to be cut")
    pieces = ", ".join(f"{cut.axis} in {cut.count} chunks of {cut.size}" for cut in cuts)
    return cuts, decided(True, f"{present} iterations over kept axes are too few for all threads: {pieces}")


def iterations(kernel: Kernel) -> int:
    """Parallel iterations of the kernel without cuts: kept points, or blocks of columns where rows are reduced."""
    reduced = kernel.reduced
    kept = {axis.name: max(1, estimate(axis.extent)) for axis in kernel.space if axis.name not in reduced}
    loads = [load.index for _, load in kernel.loads()]
    if not any(index.coefficient(name) == ONE for index in loads for name in reduced):
        for name in kept:
            if any(index.coefficient(name) == ONE for index in loads):
                kept[name] = -(-kept[name] // COLUMNS)
                break
    return prod(kept.values())


def _cuts(kernel: Kernel, wanted: int, nanoseconds: float, options: Options) -> tuple[Cut, ...]:
    """Cuts along the reduced axes, the largest strides first, until there are `wanted` chunks.

    The position that argmax returns counts the axes in space order, so for argmax they are cut in that order.
    """
    axes = [axis for axis in kernel.space if axis.name in kernel.reduced]
    if not any(isinstance(line.rhs, Reduce) and line.rhs.op in ("argmax", "argmin") for line in kernel.body):
        axes.sort(key=lambda axis: -_step(kernel, axis.name))
    cuts: list[Cut] = []
    for position, axis in enumerate(axes):
        if wanted <= 1:
            break
        extent = axis.extent.value
        last = position == len(axes) - 1
        if extent is None:
            return (*cuts, _cut_unknown(axis, axes[position + 1 :], nanoseconds, kernel, options))
        if extent <= 2 * wanted and not last:
            if extent > 1:
                cuts.append(Cut(axis.name, axis.extent, ONE, True))
                wanted = -(-wanted // extent)
        elif extent >= 2 * wanted:
            return (*cuts, _cut_axis(axis.name, extent, wanted))
    return tuple(cuts)


def _cut_axis(name: str, extent: int, wanted: int) -> Cut:
    """Equal chunks if a count between `wanted` and four times that divides the extent, else a shorter last chunk."""
    for count in range(wanted, min(4 * wanted, extent // 2) + 1):
        if extent % count == 0:
            return Cut(name, const(count), const(extent // count), True)
    size = -(-extent // wanted)
    return Cut(name, const(-(-extent // size)), const(size), False)


def _cut_unknown(axis: Axis, inside: list[Axis], nanoseconds: float, kernel: Kernel, options: Options) -> Cut:
    """Chunks of equal size for an unknown extent, each with work for a thread, none longer than the axis."""
    points = prod(max(1, estimate(each.extent)) for each in kernel.space)
    within = points / max(1, estimate(axis.extent))
    each = max(nanoseconds / points * within, 1e-3)
    longest = 1 << max(6, round(2 * (options.min_work_per_thread or MIN_NS) / each) - 1).bit_length()
    size = equal_piece(axis.extent, chunks(axis.extent, longest))
    return Cut(axis.name, chunks(axis.extent, size), size, False)


def _step(kernel: Kernel, name: str) -> int:
    """The largest stride of the axis in any load, in elements."""
    longest = 0
    for _, load in kernel.loads():
        if name in load.index.vars():
            step = load.index.coefficient(name)
            longest = max(longest, 1 << 40 if step is None else abs(estimate(step)))
    return longest
