"""Whether a convolution is computed by Winograd's method, with less than half of the multiplications.

`native/kernel/winograd.h` computes tiles of 2 x 2 pixels from 4 x 4 of the image, for 3 x 3 taps with stride 1. Its
block sizes are chosen in `codegen/tile_sizes.py`. Dilated convolutions are split into phases, in which taps are
adjacent, and lines that are too long for the cache into pieces (`codegen/phases.py`).
"""

from __future__ import annotations

from dataclasses import replace

from pellucid.codegen.block_sizes import pieces_of_lines, points_except, runners_up, split_image
from pellucid.codegen.blocks import Blocks, taps_of
from pellucid.codegen.phases import in_phases, in_pieces
from pellucid.codegen.tile_sizes import SIDE, Shape, Way, ranked, windows_cost
from pellucid.ir.contraction import find_contraction, stride_along
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Kernel
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.work import estimate

# The minimum speed-up over windows, since tiles round more often.
_WORTH = 1.15
# With fewer channels or columns most of the time would go into transformations.
_MIN_CHANNELS = 32


def with_winograd(blocks: Blocks, kernel: Kernel, machine: Machine) -> tuple[Kernel, Blocks, tuple[Decision, ...]]:
    """The kernel and its blocks for Winograd's method if that is faster, else unchanged; with the decision."""
    found = _shape(kernel, blocks, machine) if blocks.window else None
    if found is None:
        return kernel, blocks, ()
    phased, tiled, shape = found
    windows, tiles = windows_cost(shape, blocks.height, machine), ranked(shape, machine)
    subject = (kernel.name, blocks.contraction.total.out)
    if not tiles:
        why = "tiles of two lines would not fit the cache"
        return kernel, blocks, (Decision("codegen.tiles", subject, False, why),)
    (price, shape, way), *others = tiles
    ok = price * _WORTH < windows
    why = f"tiles of 2 x 2 pixels take {price / windows:.2f} times as long as windows"
    facts = (
        *(("lines", way.lines), ("columns", way.columns)),
        *(("kept", int(shape.reuses_weights(way))), ("pieces", shape.pieces)),
        ("runners_up", runners_up(price, [(each, str(other)) for each, _, other in others])),
    )
    decision = Decision("codegen.tiles", subject, ok, why, facts)
    if not ok:
        return kernel, blocks, (decision,)
    return *_tiled(phased, tiled, shape, way, machine), (decision,)


def _tiled(kernel: Kernel, blocks: Blocks, shape: Shape, way: Way, machine: Machine) -> tuple[Kernel, Blocks]:
    """The kernel and its blocks with the lines and columns of `way`."""
    if shape.pieces > 1 and shape.known:
        kernel = in_pieces(kernel, shape.pixel, shape.pieces)
        blocks = _over(blocks, kernel)
    blocks = replace(blocks, row=shape.line, whole=(shape.pixel,), columns=way.columns, order=way.order)
    if shape.known:
        return kernel, replace(blocks, rows=way.lines, tiles=shape.tiles(way.lines), varying=None)
    most, share = shape.most_tiles(way.columns, machine), pieces_of_lines(shape.columns, way.columns, machine)
    varying = split_image(blocks.ranges[shape.line], blocks.ranges[shape.pixel], most, SIDE, share)
    return kernel, replace(blocks, rows=SIDE * SIDE * most, tiles=most, varying=varying)


def _shape(kernel: Kernel, blocks: Blocks, machine: Machine) -> tuple[Kernel, Blocks, Shape] | None:
    """The kernel, blocks and sizes for `winograd.h`, in phases if dilated; None if it does not support the convolution.

    Packed weights are never flipped.
    """
    found, ranges = blocks.contraction, blocks.ranges
    taps, channels = taps_of(found, blocks.inner)
    left = found.loads[0].index
    if found.dtype is not DType.F32 or blocks.by_channel or blocks.spread or blocks.groups or found.batch:
        return None
    if len(found.columns) != 1 or len(taps) != 2 or len(channels) != 1:
        return None
    weights = (*taps, *channels, blocks.column)
    if any(ranges[name].value is None for name in weights) or [ranges[name].value for name in taps] != [3, 3]:
        return None
    ordered = sorted(found.rows, key=lambda name: -estimate(stride_along(left, name)))
    if len(ordered) < 2:
        return None
    line, pixel = ordered[-2:]
    steps = {_step(index, (line, pixel), taps) for index in (left, *(bound.position for bound in found.bounds))}
    step = steps.pop() if len(steps) == 1 else 0
    depth, columns = estimate(ranges[channels[0]]), estimate(ranges[blocks.column])
    if step == 0 or (step < 0 and blocks.packed) or min(depth, columns) < _MIN_CHANNELS or depth % machine.lanes:
        return None
    if abs(step) > 1:
        phases = in_phases(kernel, (line, pixel), abs(step))
        if phases is None:
            return None
        kernel, blocks = phases, _over(blocks, phases)
    ranges = kernel.ranges
    lines, pixels = estimate(ranges[line]), estimate(ranges[pixel])
    images = points_except(ranges, (line, pixel, *blocks.inner, blocks.column))
    known = ranges[pixel].value is not None
    return kernel, blocks, Shape(line, pixel, images, lines, pixels, depth, columns, blocks.packed, known=known)


def _over(blocks: Blocks, kernel: Kernel) -> Blocks:
    """`blocks` for a kernel some of whose axes were split."""
    found = find_contraction(kernel)
    assert found is not None
    return replace(blocks, contraction=found, ranges=kernel.ranges)


def _step(index: Expr, axes: tuple[str, str], taps: tuple[str, ...]) -> int:
    """The dilation: the stride of `taps` in points of `axes`, negative if reversed; 0 if there is no common one."""
    moves, steps = ([stride_along(index, name) for name in names] for names in (axes, taps))
    known = ((move.value, step.value) for move, step in zip(moves, steps, strict=True) if move.value)
    move, step = next(known, (0, 0))
    count = step // move if move and step else 0
    return count if steps == [count * each for each in moves] else 0
