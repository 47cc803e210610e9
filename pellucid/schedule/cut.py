"""Is a reduction worth cutting into chunks that run in parallel, and along which axes?

The answer depends on sizes alone, never on the number of threads: the order in which a sum is added up decides its
last bits, and the same program must give the same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pellucid.ir.attention import reduces_in_turn
from pellucid.ir.contraction import find_contraction
from pellucid.ir.decision import Decision, Fact
from pellucid.ir.index import ONE, ZERO, Expr, chunks, const, equal_piece
from pellucid.ir.nodes import Axis, Kernel, Reduce
from pellucid.ir.prefix import find_prefix
from pellucid.machine.work import estimate, kernel_cost
from pellucid.options import Options

# More parallel iterations than this gain nothing on machines that we know.
MOST = 64
# What a core does in a nanosecond, roughly: bytes from memory, and instructions on one lane in vector code.
BYTES_PER_NS = 10.0
LANE_INSTRUCTIONS_PER_NS = 32.0
# Such nanoseconds that justify one more thread, unless the option `min_work_per_thread` says.
LEAST_NS = 20_000
# Columns that one iteration of a reduction over rows takes on.
COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """`axis` in `count` chunks of `size` points; the last chunk is shorter unless `exact`. A size of 1 makes each
    point a chunk, and leaves no axis inside.
    """

    axis: str
    count: Expr
    size: Expr
    exact: bool


def choose_cuts(kernel: Kernel, options: Options) -> tuple[tuple[Cut, ...], Decision]:
    """The cuts that make enough chunks for all threads, none where that is not worth it, and the reason."""
    there = iterations(kernel)
    facts: tuple[tuple[str, Fact], ...] = (("iterations", there),)

    def decided(ok: bool, why: str) -> Decision:
        return Decision("schedule.two_phases", (kernel.name,), ok, why, facts)

    if reduces_in_turn(kernel):
        return (), decided(False, "it is an attention, some rows of a head at a time")
    if find_contraction(kernel) is not None:
        return (), decided(False, "it multiplies matrices, block by block")
    if find_prefix(kernel) is not None:
        return (), decided(False, "it is a prefix sum, which takes one point after the other")
    cost = kernel_cost(kernel)
    nanoseconds = max(estimate(cost.loaded) / BYTES_PER_NS, estimate(cost.work) / LANE_INSTRUCTIONS_PER_NS)
    least = options.min_work_per_thread or LEAST_NS
    unknown = any(kernel.ranges[name].value is None for name in kernel.reduced)
    useful = MOST if unknown else min(MOST, int(nanoseconds / least))
    facts = (*facts, ("estimated_ns", round(nanoseconds)))
    if any(store.index.vals() for _, store in kernel.stores()):
        return (), decided(False, "it stores at places that depend on values")
    if any(axis.extent == ZERO for axis in kernel.space):
        return (), decided(False, "there are no points")
    if useful < 2:
        return (), decided(False, "the whole reduction is little work: one thread is enough")
    if 2 * there > useful:
        return (), decided(False, f"{there} iterations over kept axes keep the threads busy")
    cuts = _cuts(kernel, -(-useful // there), nanoseconds, options)
    if not cuts:
        return (), decided(False, "no reduced axis is long enough to be cut")
    pieces = ", ".join(f"{cut.axis} in {cut.count} chunks of {cut.size}" for cut in cuts)
    return cuts, decided(True, f"{there} iterations over kept axes are too few for all threads: {pieces}")


def iterations(kernel: Kernel) -> int:
    """Parallel iterations that the kernel has as it is: kept points, or blocks of columns where rows are reduced."""
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
    """Cuts along the reduced axes, the farthest strides first, until there are `wanted` chunks.

    The position that argmax gives counts the axes in their own order, so there they are cut in that order.
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
    """Equal chunks where a number of them from `wanted` up to four times that divides the extent."""
    for count in range(wanted, min(4 * wanted, extent // 2) + 1):
        if extent % count == 0:
            return Cut(name, const(count), const(extent // count), True)
    size = -(-extent // wanted)
    return Cut(name, const(-(-extent // size)), const(size), False)


def _cut_unknown(axis: Axis, inside: list[Axis], nanoseconds: float, kernel: Kernel, options: Options) -> Cut:
    """Equal chunks, each of them worth a thread by itself, and none longer than the axis."""
    points = prod(max(1, estimate(each.extent)) for each in kernel.space)
    within = points / max(1, estimate(axis.extent))
    each = max(nanoseconds / points * within, 1e-3)
    most = 1 << max(6, round(2 * (options.min_work_per_thread or LEAST_NS) / each) - 1).bit_length()
    size = equal_piece(axis.extent, chunks(axis.extent, most))
    return Cut(axis.name, chunks(axis.extent, size), size, False)


def _step(kernel: Kernel, name: str) -> int:
    """The longest step through memory that one step along the axis makes."""
    longest = 0
    for _, load in kernel.loads():
        if name in load.index.vars():
            step = load.index.coefficient(name)
            longest = max(longest, 1 << 40 if step is None else abs(estimate(step)))
    return longest
