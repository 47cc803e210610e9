"""Whether the sums of a convolution are computed by tiles, with less than half of the multiplications.

`native/kernel/winograd.h` says how: 2 x 2 pixels of the result from 4 x 4 of the image, for 3 x 3 taps that move by one
pixel. Blocks are then other ones: pixels are transformed again for each block of columns, and what is packed of the
weights, or transformed, is read, or made, again for each block of lines. Taps that lie several pixels apart are
neighbours in each phase of the image, see `codegen/phases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

from pellucid.codegen.block_sizes import COLUMN_STEP, points_besides, waiting
from pellucid.codegen.blocks import Blocks, taps_of
from pellucid.codegen.phases import in_phases
from pellucid.ir.contraction import find_contraction, stride_along
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Kernel
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import PLACES, TAPS, TRANSFORMED
from pellucid.machine.work import estimate

# The part of a core's own cache that transformed pixels may take, and the bytes of all that a block needs: they lie on
# the stack, of which a thread may have 2 MiB.
_SHARE = 0.9
_STACK = 1408 << 10
# Multiplications that take as long as: to transform a tile in one channel, or its sums back; to fetch the weights of a
# channel and column that are packed, or to transform them; or to pack them for windows. The latter two are between 112
# and 300, and 200, of wider cores, where all but multiplications takes as long as elsewhere.
_TILE = 64.0
_SUMS = 60.0
_FETCH = 32.0
_TRANSFORM = 200.0
_PACK = 130.0
# Products that gathering and packing cost beside each in windows; what tiles must gain, since they round more often.
_WINDOWS = 1.05
_WORTH = 1.15
# The part of a core's share of the last cache that transformed weights may take which are kept.
_KEPT = 2
# Blocks for each core of which it does not matter which core has which.
_MANY = 32
# Fewer channels or columns are mostly transformed.
_FEWEST = 32


@dataclass(frozen=True, slots=True)
class _Shape:
    """A convolution: `images` times, `lines` of `pixels`, and their axes. packed: its weights are."""

    line: str
    pixel: str
    images: int
    lines: int
    pixels: int
    channels: int
    columns: int
    packed: bool

    def tiles(self, lines: int) -> int:
        """Of a block of so many lines."""
        return -(-lines // 2) * -(-self.pixels // 2)

    def price(self, lines: int, columns: int) -> float:
        """Multiplications that a block of so many lines and columns takes as long as, but for its weights."""
        weights = self.weights(columns)
        return self.tiles(lines) * (PLACES * weights + _TILE * self.channels + _SUMS * weights / self.channels)

    def weights(self, columns: int) -> int:
        """Pairs of a channel and one of so many columns, in whole panels."""
        return self.channels * -(-columns // COLUMN_STEP) * COLUMN_STEP


@dataclass(frozen=True, slots=True)
class _Way:
    """Lines and columns of a block. kept: see `Blocks`."""

    lines: int
    columns: int
    kept: bool


def by_tiles(blocks: Blocks, kernel: Kernel, machine: Machine) -> tuple[Kernel, Blocks, tuple[Decision, ...]]:
    """The kernel and its blocks as those by tiles where that is faster, with the reason; as they are elsewhere."""
    found = _shape(kernel, blocks, machine) if blocks.window else None
    if found is None:
        return kernel, blocks, ()
    phased, tiled, shape = found
    windows = _by_windows(shape, blocks.height) / machine.cores
    priced = [(_time(shape, each, machine.cores), each) for each in _candidates(shape, machine)]
    time, way = min(priced, key=itemgetter(0), default=(windows, _Way(0, 0, False)))
    ok = time * _WORTH < windows
    why = (
        f"tiles of 2 x 2 pixels take {time / windows:.2f} of the time of windows"
        if priced
        else "a line of tiles would not stay in the cache"
    )
    facts = (("lines", way.lines), ("columns", way.columns), ("kept", int(way.kept)))
    decision = Decision("codegen.tiles", (kernel.name, blocks.contraction.total.out), ok, why, facts)
    if not ok:
        return kernel, blocks, (decision,)
    axes = {"row": shape.line, "whole": (shape.pixel,)}
    sizes = {"rows": way.lines, "columns": way.columns, "tiles": shape.tiles(way.lines), "kept": way.kept}
    return phased, replace(tiled, **axes, **sizes), (decision,)


def _by_windows(shape: _Shape, height: int) -> float:
    """Multiplications that windows take as long as, in blocks of so many pixels."""
    pixels, weights = shape.images * shape.lines * shape.pixels, shape.channels * shape.columns
    return (_WINDOWS * TAPS * pixels + (0.0 if shape.packed else _PACK * -(-pixels // height))) * weights


def _shape(kernel: Kernel, blocks: Blocks, machine: Machine) -> tuple[Kernel, Blocks, _Shape] | None:
    """What `winograd.h` can compute, of phases where taps lie apart; None for any other convolution.

    Packed weights are never flipped.
    """
    found, ranges = blocks.contraction, blocks.ranges
    taps, channels = taps_of(found, blocks.inner)
    left, right = (load.index for load in found.loads)
    if found.dtype is not DType.F32 or blocks.by_channel or blocks.spread or blocks.groups or found.batch:
        return None
    if len(found.columns) != 1 or len(taps) != 2 or len(channels) != 1:
        return None
    known = all(each.value is not None for each in ranges.values()) and not right.syms()
    if not known or [ranges[name].value for name in taps] != [3, 3]:
        return None
    ordered = sorted(found.rows, key=lambda name: -estimate(stride_along(left, name)))
    if len(ordered) < 2:
        return None
    line, pixel = ordered[-2:]
    steps = {_step(index, (line, pixel), taps) for index in (left, *(bound.position for bound in found.bounds))}
    step = steps.pop() if len(steps) == 1 else 0
    depth, columns = estimate(ranges[channels[0]]), estimate(ranges[blocks.column])
    if step == 0 or (step < 0 and blocks.packed) or min(depth, columns) < _FEWEST or depth % machine.lanes:
        return None
    if abs(step) > 1:
        split = _in_phases(kernel, blocks, (line, pixel), abs(step))
        if split is None:
            return None
        kernel, blocks = split
    ranges = kernel.ranges
    lines, pixels = estimate(ranges[line]), estimate(ranges[pixel])
    images = points_besides(ranges, (line, pixel, *blocks.inner, blocks.column))
    return kernel, blocks, _Shape(line, pixel, images, lines, pixels, depth, columns, blocks.packed)


def _in_phases(kernel: Kernel, blocks: Blocks, axes: tuple[str, str], count: int) -> tuple[Kernel, Blocks] | None:
    split = in_phases(kernel, axes, count)
    found = split and find_contraction(split)
    return (split, replace(blocks, contraction=found, ranges=split.ranges)) if split and found else None


def _step(index: Expr, axes: tuple[str, str], taps: tuple[str, ...]) -> int:
    """By how many points of `axes` the taps move, negative if they move back; 0 for all else."""
    moves, steps = ([stride_along(index, name).value for name in names] for names in (axes, taps))
    move, step = next(((move, step) for move, step in zip(moves, steps, strict=True) if move), (0, 0))
    count = step // move if move and step is not None else 0
    return count if None not in moves and steps == [count * (each or 0) for each in moves] else 0


def _candidates(shape: _Shape, machine: Machine) -> Iterator[_Way]:
    """Lines and columns of blocks that caches and stack hold. Lines come in pairs: so tiles are the same in each."""
    own = PLACES * (shape.channels + machine.lanes), PLACES * COLUMN_STEP
    weights = 0 if shape.packed else PLACES * COLUMN_STEP * min(shape.channels, TRANSFORMED)
    panels = -(-shape.columns // COLUMN_STEP)
    widths = sorted({-(-panels // pieces) * COLUMN_STEP for pieces in range(1, panels + 1)})
    room = machine.last_cache // (_KEPT * machine.cores)
    for lines in range(2, shape.lines + 2, 2):
        tiles = shape.tiles(lines)
        if 4 * tiles * own[0] > _SHARE * machine.own_cache:
            return
        for columns in widths:
            if 4 * (tiles * sum(own) + weights + lines * shape.pixels * columns) <= _STACK:
                yield _Way(lines, columns, kept=False)
                if not shape.packed and 4 * PLACES * shape.weights(columns) <= room:
                    yield _Way(lines, columns, kept=True)


def _time(shape: _Shape, way: _Way, cores: int) -> float:
    """Multiplications that the slowest of `cores` takes as long as: each has as many blocks, one after the other.

    All lines of some columns follow one another; of all images, where weights are kept.
    """
    heights = [min(way.lines, shape.lines - line) for line in range(0, shape.lines, way.lines)]
    widths = [min(way.columns, shape.columns - column) for column in range(0, shape.columns, way.columns)]
    once = [(_TRANSFORM if way.kept else 0.0) * shape.weights(width) for width in widths]
    each = _FETCH if shape.packed or way.kept else _TRANSFORM
    priced = [
        [(column, shape.price(height, width) + each * shape.weights(width)) for height in heights]
        for column, width in enumerate(widths)
    ]
    count = len(widths) * len(heights) * shape.images
    if count >= _MANY * cores:
        blocks = sum(price for of_column in priced for _, price in of_column)
        return (blocks * shape.images + sum(once)) / cores * waiting(count, cores)
    if way.kept:
        blocks = [block for of_column in priced for block in of_column * shape.images]
    else:
        blocks = [block for of_column in priced for block in of_column] * shape.images
    ends = [core * count // cores for core in range(cores + 1)]
    shares = [blocks[first:last] for first, last in pairwise(ends)]
    return max(
        sum(price for _, price in share) + sum(once[each] for each in {at for at, _ in share}) for share in shares
    )
