"""The blocks of the gradient of a convolution's weight: sums over pixels, for each tap.

Taps are kept axes of the image. If they share pixels, a block has all taps: a packed line of pixels is used for all
taps of a line. Otherwise each tap is a product of its own, which skips the pixels outside of the image.
"""

from __future__ import annotations

from dataclasses import replace

from pellucid.codegen.block_sizes import COLUMN_STEP, PACK, ROWS, Pricing, even_pieces, product_sizes
from pellucid.codegen.blocks import MAX_ROW_AXES, MAX_TAP_AXES, Blocks, Groups, Order, Taps, outermost_first
from pellucid.ir.contraction import COLUMNS, Bound, Contraction, stride_along
from pellucid.ir.index import ONE, Expr, product
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import DEPTH
from pellucid.machine.work import estimate

# Channels of a block of a depthwise weight's gradient: a cache line of each pixel.
TAP_CHANNELS = 16
# Maximum number of columns of a block of all taps; its sums take at most 1 / CACHE_PART of the L2 cache.
TAP_COLUMNS = 64
CACHE_PART = 4
# Units of a panel of the image, as in `convolve.h`.
ROOM = 2 * DEPTH
# The cost, in multiply-adds, of adding a partial sum to a sum in the L2 cache.
ADD = 4.0


def sums_over_pixels(found: Contraction, ranges: dict[str, Expr], machine: Machine) -> Blocks | None:
    """Blocks of sums over pixels, with channels-last operands; None for others.

    For pixels outside of the bounds the right operand is zero.
    """
    if found.dtype is not DType.F32 or found.choice or found.cast or len(found.inner) > MAX_ROW_AXES:
        return None
    if found.bounds and not found.zeros:
        return None
    ways: list[Blocks] = []
    for each in (found.swapped(),) if found.bounds else (found, found.swapped()):
        left, right = (load.index for load in each.loads)
        rows = [name for name in each.rows if stride_along(left, name) == ONE]
        columns = [name for name in each.columns if stride_along(right, name) == ONE]
        if not rows or not columns or each.bounded & {rows[0], columns[0]}:
            continue
        inner = outermost_first(each.inner, left)
        height, width = product_sizes(each, rows[0], columns[0], ranges, machine, PACK)
        order = Order.OUTER_LAST
        ways.append(Blocks(each, rows[0], (), columns[0], inner, height, width, ranges, pixels=True, order=order))
    by_tap = ways[0] if ways and found.windowed else None
    return next(filter(None, (_of_all_taps(way, machine) for way in ways)), by_tap)


def _of_all_taps(blocks: Blocks, machine: Machine) -> Blocks | None:
    """`blocks` with all taps in each block; None if taps cannot share pixels, or are faster one by one."""
    found, ranges, pixel = blocks.contraction, blocks.ranges, blocks.inner[-1]
    right = found.loads[1].index
    taps = outermost_first((name for name in found.columns if name != blocks.column), right)
    if not 1 <= len(taps) <= MAX_TAP_AXES or found.rows != (blocks.row,) or found.batch:
        return None
    steps = [stride_along(right, name).value or 0 for name in (taps[-1], pixel)]
    if not all(ranges[name].value for name in (*taps, blocks.row, blocks.column)) or min(steps) <= 0:
        return None
    whole = replace(blocks, whole=taps, order=Order.ROWS_THEN_COLUMNS)
    window = whole.window_of_taps()
    if max(window.pixel, _halo(window)) > DEPTH:
        return None
    if not _bounds_by_line(found, taps, blocks.inner) or not _same_strides(whole, window):
        return None
    return _sized(whole, window, machine)


def _halo(window: Taps) -> int:
    """The number of units that the taps of a line span."""
    return (estimate(window.extents[1]) - 1) * window.right + 1


def _same_strides(blocks: Blocks, window: Taps) -> bool:
    """True if the strides of taps and pixels of a line have the same ratio in each bound as in memory.

    Then a whole unit is either inside or outside of a bound.
    """
    steps = [
        [stride_along(bound.position, name) for name in (blocks.taps[-1], blocks.inner[-1])]
        for bound in blocks.contraction.bounds
    ]
    return all(tap * window.pixel == pixel * window.right and estimate(pixel) >= 0 for tap, pixel in steps)


def _bounds_by_line(found: Contraction, taps: tuple[str, ...], inner: tuple[str, ...]) -> bool:
    """True if each bound depends on lines only (of taps and of pixels), or on positions within a line only.

    Axes are outermost first. The outermost of three pixel axes are images, unless lines have a longer stride.
    """
    lines, line = {taps[0], *inner[-2:-1]} - {taps[-1]}, {taps[-1], inner[-1]}
    return all(bound.position.vars() <= lines or bound.position.vars() <= line for bound in found.bounds)


def _sized(blocks: Blocks, window: Taps, machine: Machine) -> Blocks | None:
    """`blocks` with the cheapest sizes; None if taps one by one take less time.

    That choice determines the order in which terms are added, so it must not depend on the number of cores.
    """
    m, n = (estimate(blocks.ranges[name]) for name in (blocks.row, blocks.column))
    height, width = map(estimate, window.extents)
    summed, units = _at_a_time(blocks, window)
    pricing = Pricing(m, 1, n, 1, machine.cores, 0.0, PACK / (height * width), PACK * units / width)
    most = machine.own_cache // (CACHE_PART * DType.F32.itemsize * height * width)  # sums of a tap
    columns = min(n, TAP_COLUMNS)
    all_taps = 1 + ADD / summed + pricing.gather / columns + pricing.pack / max(1, min(m, most // columns))
    by_tap = 1 + ADD / DEPTH + PACK / min(m, ROWS) + PACK / min(n, COLUMNS)
    for bound in blocks.contraction.bounds:
        by_tap *= _inside(bound, blocks.ranges, blocks.taps)
    if all_taps > by_tap:
        return None
    widths = {even_pieces(n, limit, COLUMN_STEP) for limit in (TAP_COLUMNS, COLUMN_STEP)}
    heights = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [(rows, columns) for rows in heights for columns in widths if rows * columns <= most]
    rows, columns = min(found, key=lambda each: (pricing(*each), each), default=(1, COLUMN_STEP))
    return replace(blocks, rows=rows, columns=columns)


def _at_a_time(blocks: Blocks, window: Taps) -> tuple[int, float]:
    """The pixels that `convolve.h` sums at a time, and the number of packed units per pixel."""
    *above, pixels = (estimate(blocks.ranges[name]) for name in blocks.inner)
    piece = max(1, min(pixels, DEPTH, (ROOM - _halo(window)) // window.pixel + 1))
    span = (piece - 1) * window.pixel + _halo(window)
    lines = min(above[-1], DEPTH // piece, ROOM // span) if above and piece == pixels else 1
    return max(1, lines) * piece, span / piece


def _inside(bound: Bound, ranges: dict[str, Expr], taps: tuple[str, ...]) -> float:
    """The fraction of (tap, pixel) pairs inside of a bound; 1 if sizes are not known."""
    axes = bound.position.vars()
    if any(size.value is None for size in (bound.extent, *(ranges[name] for name in axes))):
        return 1.0
    tap, pixel = ([name for name in axes if (name in taps) == among] for among in (True, False))
    if len(tap) != 1 or len(pixel) != 1:
        return 1.0
    count, pixels = (max(1, estimate(ranges[name])) for name in (*tap, *pixel))
    move, step = (estimate(stride_along(bound.position, name)) for name in (*tap, *pixel))
    first, extent = estimate(bound.position), estimate(bound.extent)  # with all axes at 0
    met = 0
    for start in range(first, first + count * move, move):
        met += max(0, min(pixels, -((start - extent) // step)) - max(0, -(start // step)))
    return met / (count * pixels)


def sums_by_channel(found: Contraction, ranges: dict[str, Expr]) -> Blocks | None:
    """Blocks of the gradient of a depthwise weight: all taps of some channels, with channels-last operands.

    None for all else, and if a bound depends on both a line of pixels and a position within it.
    """
    image = found if found.rows else found.swapped()
    if not image.windowed or image.columns or len(image.batch) != 1 or image.zeros or len(image.inner) > MAX_ROW_AXES:
        return None
    (channel,), moves = image.batch, image.loads[0].index
    known = all(ranges[name].value is not None for name in image.rows)
    if not known or any(stride_along(load.index, channel) != ONE for load in image.loads):
        return None
    taps, inner = (outermost_first(axes, moves) for axes in (image.rows, image.inner))
    if not 1 <= len(taps) <= MAX_TAP_AXES or any(ranges[name].value == 0 for name in taps):
        return None
    if not _bounds_by_line(image, taps, inner):
        return None
    height = estimate(ranges[taps[0]])
    return Blocks(
        image, taps[0], taps[1:], channel, inner, height, TAP_CHANNELS, ranges, pixels=True, order=Order.OUTER_LAST
    )


def sums_by_group(found: Contraction, ranges: dict[str, Expr], groups: Groups, machine: Machine) -> Blocks | None:
    """Like `sums_by_channel`, for several groups: all taps of some channels, for the outputs of groups in registers.

    found: the contraction of the first group's image, see `join_groups`.
    """
    image = found if found.left.out == groups.image else found.swapped()
    channel = image.channels_among(image.rows)
    if not channel or len(image.columns) != 1 or image.batch:
        return None
    (column,), moves = image.columns, image.loads[0].index
    taps = outermost_first((name for name in image.rows if name != channel), moves)
    inner = outermost_first(image.inner, moves)
    if image.zeros or max(len(taps) - MAX_TAP_AXES, len(inner) - MAX_ROW_AXES) > 0:
        return None
    if any(not ranges[name].value for name in taps) or stride_along(image.loads[1].index, column) != ONE:
        return None
    if image.bounds and not (taps and _bounds_by_line(image, taps, inner)):
        return None
    # Columns of one register only, so that a block has many channels, along which the result is contiguous.
    columns = machine.lanes if groups.period % machine.lanes == 0 else groups.period
    most = ROWS * COLUMNS // (columns * estimate(product(ranges[name] for name in taps)))
    rows = even_pieces(groups.channels, max(1, most), 1)
    order = Order.OUTER_LAST
    return Blocks(image, channel, taps, column, inner, rows, columns, ranges, pixels=True, groups=groups, order=order)
