"""Which blocks the gradient of a convolution's weight is computed in: sums over pixels, for each tap.

Taps are kept axes of the image. Where they move as pixels do, a block has all of them: what is packed of a line of
pixels serves all taps of a line. Else each tap is a product by itself, which leaves out pixels beyond the edges.
"""

from __future__ import annotations

from dataclasses import replace

from pellucid.codegen.block_sizes import COLUMN_STEP, PACK, ROWS, Pricing, even_pieces, product_sizes
from pellucid.codegen.blocks import MOST_ROW_AXES, MOST_TAP_AXES, Blocks, Groups, Order, Taps, outermost_first
from pellucid.ir.contraction import COLUMNS, Bound, Contraction, stride_along
from pellucid.ir.index import ONE, Expr, product
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import DEPTH
from pellucid.machine.work import estimate

# Channels of a block of a depthwise weight's gradient: a cache line of each pixel.
TAP_CHANNELS = 16
# Columns of a block of all taps, of which a part of the second cache holds the sums.
TAP_COLUMNS = 64
CACHE_PART = 4
# Units of a panel of the image, as `convolve.h` has it.
ROOM = 2 * DEPTH
# To add the sums of some pixels to a sum in the second cache takes as long as so many products.
ADD = 4.0


def sums_over_pixels(found: Contraction, ranges: dict[str, Expr], machine: Machine) -> Blocks | None:
    """Blocks of sums over pixels, in both of whose operands channels lie side by side; None for any other.

    Where pixels do not count, the right operand is zero.
    """
    if found.dtype is not DType.F32 or found.choice or found.cast or len(found.inner) > MOST_ROW_AXES:
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
    """The same with all taps in a block; None where they do not move as pixels do, or are faster one by one."""
    found, ranges, pixel = blocks.contraction, blocks.ranges, blocks.inner[-1]
    right = found.loads[1].index
    taps = outermost_first((name for name in found.columns if name != blocks.column), right)
    if not 1 <= len(taps) <= MOST_TAP_AXES or found.rows != (blocks.row,) or found.batch:
        return None
    steps = [stride_along(right, name).value or 0 for name in (taps[-1], pixel)]
    if not all(ranges[name].value for name in (*taps, blocks.row, blocks.column)) or min(steps) <= 0:
        return None
    whole = replace(blocks, whole=taps, order=Order.ROWS_THEN_COLUMNS)
    window = whole.window_of_taps()
    if max(window.pixel, _halo(window)) > DEPTH:
        return None
    if not _line_by_line(found, taps, blocks.inner) or not _move_alike(whole, window):
        return None
    return _sized(whole, window, machine)


def _halo(window: Taps) -> int:
    """The units that the taps of a line reach."""
    return (estimate(window.extents[1]) - 1) * window.right + 1


def _move_alike(blocks: Blocks, window: Taps) -> bool:
    """True if a bound about pixels of a line is about the units where their taps meet them."""
    steps = [
        [stride_along(bound.position, name) for name in (blocks.taps[-1], blocks.inner[-1])]
        for bound in blocks.contraction.bounds
    ]
    return all(tap * window.pixel == pixel * window.right and estimate(pixel) >= 0 for tap, pixel in steps)


def _line_by_line(found: Contraction, taps: tuple[str, ...], inner: tuple[str, ...]) -> bool:
    """True if what counts hangs on lines of taps and of pixels, or on taps and pixels of a line, outermost first.

    What is outermost of three axes of pixels are images: where a step from line to line is longer, it is the lines.
    """
    lines, line = {taps[0], *inner[-2:-1]} - {taps[-1]}, {taps[-1], inner[-1]}
    return all(bound.position.vars() <= lines or bound.position.vars() <= line for bound in found.bounds)


def _sized(blocks: Blocks, window: Taps, machine: Machine) -> Blocks | None:
    """The same in blocks of the cheapest sizes; None where taps one by one take less time.

    That decides in which order terms are added: it must not hang on the number of cores.
    """
    m, n = (estimate(blocks.ranges[name]) for name in (blocks.row, blocks.column))
    height, width = map(estimate, window.extents)
    summed, units = _at_a_time(blocks, window)
    pricing = Pricing(m, 1, n, 1, machine.cores, 0.0, PACK / (height * width), PACK * units / width)
    most = machine.own_cache // (CACHE_PART * DType.F32.itemsize * height * width)  # sums of a tap
    columns = min(n, TAP_COLUMNS)
    together = 1 + ADD / summed + pricing.gather / columns + pricing.pack / max(1, min(m, most // columns))
    by_tap = 1 + ADD / DEPTH + PACK / min(m, ROWS) + PACK / min(n, COLUMNS)
    for bound in blocks.contraction.bounds:
        by_tap *= _inside(bound, blocks.ranges, blocks.taps)
    if together > by_tap:
        return None
    widths = {even_pieces(n, limit, COLUMN_STEP) for limit in (TAP_COLUMNS, COLUMN_STEP)}
    heights = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [(rows, columns) for rows in heights for columns in widths if rows * columns <= most]
    rows, columns = min(found, key=lambda each: (pricing(*each), each), default=(1, COLUMN_STEP))
    return replace(blocks, rows=rows, columns=columns)


def _at_a_time(blocks: Blocks, window: Taps) -> tuple[int, float]:
    """How many pixels are summed at a time, as `convolve.h` does it, and how many units are packed for each."""
    *above, pixels = (estimate(blocks.ranges[name]) for name in blocks.inner)
    piece = max(1, min(pixels, DEPTH, (ROOM - _halo(window)) // window.pixel + 1))
    span = (piece - 1) * window.pixel + _halo(window)
    lines = min(above[-1], DEPTH // piece, ROOM // span) if above and piece == pixels else 1
    return max(1, lines) * piece, span / piece


def _inside(bound: Bound, ranges: dict[str, Expr], taps: tuple[str, ...]) -> float:
    """The part of the pairs of a tap and a pixel that meet inside of a bound; all, where sizes are not known."""
    axes = bound.position.vars()
    if any(size.value is None for size in (bound.extent, *(ranges[name] for name in axes))):
        return 1.0
    tap, pixel = ([name for name in axes if (name in taps) == among] for among in (True, False))
    if len(tap) != 1 or len(pixel) != 1:
        return 1.0
    count, pixels = (max(1, estimate(ranges[name])) for name in (*tap, *pixel))
    move, step = (estimate(stride_along(bound.position, name)) for name in (*tap, *pixel))
    first, extent = estimate(bound.position), estimate(bound.extent)  # axes count as 0
    met = 0
    for start in range(first, first + count * move, move):
        met += max(0, min(pixels, -((start - extent) // step)) - max(0, -(start // step)))
    return met / (count * pixels)


def sums_by_channel(found: Contraction, ranges: dict[str, Expr]) -> Blocks | None:
    """Blocks of the gradient of a depthwise weight: all taps of some channels, which lie side by side in both operands.

    None for all else, and where whether a line of pixels counts hangs on more than its line of taps.
    """
    image = found if found.rows else found.swapped()
    if not image.windowed or image.columns or len(image.batch) != 1 or image.zeros or len(image.inner) > MOST_ROW_AXES:
        return None
    (channel,), moves = image.batch, image.loads[0].index
    known = all(ranges[name].value is not None for name in image.rows)
    if not known or any(stride_along(load.index, channel) != ONE for load in image.loads):
        return None
    taps, inner = (outermost_first(axes, moves) for axes in (image.rows, image.inner))
    if not 1 <= len(taps) <= MOST_TAP_AXES or any(ranges[name].value == 0 for name in taps):
        return None
    if not _line_by_line(image, taps, inner):
        return None
    height = estimate(ranges[taps[0]])
    return Blocks(
        image, taps[0], taps[1:], channel, inner, height, TAP_CHANNELS, ranges, pixels=True, order=Order.OUTER_LAST
    )


def sums_by_group(found: Contraction, ranges: dict[str, Expr], groups: Groups, machine: Machine) -> Blocks | None:
    """The same of a convolution of several groups: all taps of some channels, for the outputs of groups in registers.

    found: that of the first group's image, see `join_groups`.
    """
    image = found if found.left.out == groups.image else found.swapped()
    channel = image.channels_among(image.rows)
    if not channel or len(image.columns) != 1 or image.batch:
        return None
    (column,), moves = image.columns, image.loads[0].index
    taps = outermost_first((name for name in image.rows if name != channel), moves)
    inner = outermost_first(image.inner, moves)
    if image.zeros or max(len(taps) - MOST_TAP_AXES, len(inner) - MOST_ROW_AXES) > 0:
        return None
    if any(not ranges[name].value for name in taps) or stride_along(image.loads[1].index, column) != ONE:
        return None
    if image.bounds and not (taps and _line_by_line(image, taps, inner)):
        return None
    # Of one register, so that there are many channels, along which the result lies.
    columns = machine.lanes if groups.period % machine.lanes == 0 else groups.period
    most = ROWS * COLUMNS // (columns * estimate(product(ranges[name] for name in taps)))
    rows = even_pieces(groups.channels, max(1, most), 1)
    order = Order.OUTER_LAST
    return Blocks(image, channel, taps, column, inner, rows, columns, ranges, pixels=True, groups=groups, order=order)
