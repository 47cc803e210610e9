"""How many lines and columns blocks by tiles have, and in which order they follow one another, by what they cost.

A block transforms its pixels, again for each block of columns, and reads the transformed weights of its columns, or
makes them, again for each block of lines. Prices are multiplications of the slowest core that take as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

from pellucid.codegen.block_sizes import COLUMN_STEP, waiting
from pellucid.codegen.blocks import Order
from pellucid.machine import Machine
from pellucid.machine.kernels import PLACES, TAPS, TRANSFORMED

# The part of a core's own cache that transformed pixels may take, and the bytes of all that a block needs: they lie on
# the stack, of which a thread may have 2 MiB.
_SHARE = 0.95
_STACK = 1408 << 10
# Multiplications that take as long as: to transform a tile in one channel, or its sums back; to begin with the weights
# of a channel and column that are transformed, or to transform them; or to pack them for windows. The latter two are
# between 112 and 300, and 200, of wider cores, where all but multiplications takes as long as elsewhere.
_TILE = 52.0
_SUMS = 60.0
_FETCH = 32.0
_TRANSFORM = 200.0
_PACK = 130.0
# Products that gathering and packing cost beside each in windows.
_WINDOWS = 1.05
# The part of a cache that holds what is read again; the rest is for all that is read meanwhile.
_HELD = 2
# The part of a level's bandwidth that products reach.
_REACH = 0.66
# Blocks for each core of which it does not matter which core has which.
_MANY = 32
# Pixels of a side of a tile, in the result.
SIDE = 2
# Bytes of the weights of all places, of one channel and column.
_WEIGHTS = 4 * PLACES


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution: `images` times, `lines` of `pixels`, and their axes. packed: its weights are.

    pieces: how many a line was cut into; `images` and `pixels` are those of pieces.
    known: lines have the same length in every call; else sizes are a guess, and blocks as large as may be.
    """

    line: str
    pixel: str
    images: int
    lines: int
    pixels: int
    channels: int
    columns: int
    packed: bool
    pieces: int = 1
    known: bool = True

    def in_pieces(self, count: int) -> Shape:
        """With each line cut into so many."""
        return replace(self, images=self.images * count, pixels=self.pixels // count, pieces=count)

    def tiles(self, lines: int) -> int:
        """Of a block of so many lines."""
        return -(-lines // 2) * -(-self.pixels // 2)

    def weights(self, columns: int) -> int:
        """Pairs of a channel and one of so many columns, in whole panels."""
        return self.channels * -(-columns // COLUMN_STEP) * COLUMN_STEP

    def keeps(self, way: Way) -> bool:
        """Whether weights that are transformed for a block serve the next ones too."""
        return not self.packed and way.order is Order.COLUMNS_FIRST

    def transformed(self, machine: Machine) -> int:
        """Bytes of the transformed pixels of a tile."""
        return 4 * PLACES * (self.channels + machine.lanes)

    def most_tiles(self, columns: int, machine: Machine) -> int:
        """Of a block of so many columns: as many as the cache and the stack hold."""
        weights = 0 if self.packed else PLACES * COLUMN_STEP * min(self.channels, TRANSFORMED)
        tile = self.transformed(machine) + 4 * (PLACES * COLUMN_STEP + SIDE * SIDE * columns)
        return min(int(_SHARE * machine.own_cache) // self.transformed(machine), (_STACK - 4 * weights) // tile)


@dataclass(frozen=True, slots=True)
class Way:
    """Lines and columns of a block, and the order of blocks."""

    lines: int
    columns: int
    order: Order

    def __str__(self) -> str:
        first = ", columns first" if self.order is Order.COLUMNS_FIRST else ""
        return f"{self.lines} lines x {self.columns}{first}"


def by_windows(shape: Shape, height: int, machine: Machine) -> float:
    """The price of windows, in blocks of so many pixels."""
    pixels, weights = shape.images * shape.lines * shape.pixels, shape.channels * shape.columns
    packing = 0.0 if shape.packed else _PACK * -(-pixels // height)
    return (_WINDOWS * TAPS * pixels + packing) * weights / machine.cores


def ranked(shape: Shape, machine: Machine) -> list[tuple[float, Shape, Way]]:
    """The ways that caches and stack hold, with their prices, the cheapest first.

    If they do not hold two lines, lines are cut into pieces of whole tiles, wherever they end if sizes are a guess.
    """
    most = shape.pixels // 2
    pieces = (count for count in range(2, most + 1) if shape.pixels % (2 * count) == 0 or not shape.known)
    found = _priced(shape, machine) or [each for count in pieces for each in _priced(shape.in_pieces(count), machine)]
    return sorted(found, key=itemgetter(0))


def _priced(shape: Shape, machine: Machine) -> list[tuple[float, Shape, Way]]:
    return [(_price(shape, way, machine), shape, way) for way in _ways(shape, machine)]


def _ways(shape: Shape, machine: Machine) -> Iterator[Way]:
    """Those that caches and stack hold. Lines come in pairs: so tiles are the same in each."""
    panels = -(-shape.columns // COLUMN_STEP)
    widths = sorted({-(-panels // pieces) * COLUMN_STEP for pieces in range(1, panels + 1)})
    room = machine.last_cache // (_HELD * machine.cores)
    for lines in range(2, shape.lines + 2, 2):
        for columns in widths:
            most = shape.most_tiles(columns, machine)
            larger = lines < shape.lines and shape.tiles(lines + 2) <= most
            if shape.tiles(lines) > most or (larger and not shape.known):
                continue
            yield Way(lines, columns, Order.COLUMNS_THEN_ROWS)
            if shape.images > 1 if shape.packed else _WEIGHTS * shape.weights(columns) <= room:
                yield Way(lines, columns, Order.COLUMNS_FIRST)


def _price(shape: Shape, way: Way, machine: Machine) -> float:
    """What the slowest core has to do, of which each has as many blocks, one after the other."""
    heights = [min(way.lines, shape.lines - line) for line in range(0, shape.lines, way.lines)]
    widths = [min(way.columns, shape.columns - column) for column in range(0, shape.columns, way.columns)]
    once = [_once(shape, way, width, machine) for width in widths]
    priced = [[_block(shape, way, height, width, machine) for height in heights] for width in widths]
    images, cores = range(shape.images), machine.cores
    count, turns = len(widths) * len(heights) * shape.images, 1 if way.order is Order.COLUMNS_FIRST else shape.images
    if count >= _MANY * cores:
        return (sum(map(sum, priced)) * shape.images + sum(once) * turns) / cores * waiting(count, cores)
    # Those of one group, an image's blocks of some columns or all of them, have weights of their own.
    if way.order is Order.COLUMNS_FIRST:
        blocks = [(column, once[column], price) for column, of in enumerate(priced) for _ in images for price in of]
    else:
        blocks = [((image, k), once[k], price) for image in images for k, of in enumerate(priced) for price in of]
    ends = [core * count // cores for core in range(cores + 1)]
    shares = (blocks[first:last] for first, last in pairwise(ends))
    return max(
        sum(price for *_, price in share) + sum(next(of)[1] for _, of in groupby(share, itemgetter(0)))
        for share in shares
    )


def _block(shape: Shape, way: Way, lines: int, columns: int, machine: Machine) -> float:
    """The price of one block, but for what is done `_once`."""
    tiles, weights = shape.tiles(lines), shape.weights(columns)
    image = 4 * shape.lines * shape.pixels * shape.channels
    reach = image * (shape.images if way.order is Order.COLUMNS_FIRST else 1)
    read = _moving(4 * (lines + 2) * (shape.pixels + 2) * shape.channels, reach, machine)
    around = read + tiles * (_TILE * shape.channels + _SUMS * weights / shape.channels)
    if not (shape.packed or shape.keeps(way)):
        return around + weights * (PLACES * tiles + _TRANSFORM)
    return around + weights * max(PLACES * tiles + _FETCH, _near(shape, columns, machine))


def _once(shape: Shape, way: Way, columns: int, machine: Machine) -> float:
    """What the first of a group of blocks does for all: it makes the weights, or gets them from where they lie."""
    weights = shape.weights(columns)
    if not shape.packed:
        return _TRANSFORM * weights if shape.keeps(way) else 0.0
    far = _moving(_WEIGHTS, _WEIGHTS * shape.weights(shape.columns), machine)
    return weights * max(0.0, far - _near(shape, columns, machine))


def _near(shape: Shape, columns: int, machine: Machine) -> float:
    """To read the weights of a channel and column again that the last block has read too."""
    return _moving(_WEIGHTS, machine.cores * _WEIGHTS * shape.weights(columns), machine)


def _moving(size: float, reach: int, machine: Machine) -> float:
    """Multiplications of a core while all move so many bytes each, from the level of cache that holds `reach` bytes."""
    level, cores = machine.level(_HELD * reach, machine.cores), machine.cores
    return size / (_REACH * level.read.of(cores)) * machine.flops.f32.of(cores) / 2
