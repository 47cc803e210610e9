"""Lines, columns and loop order of Winograd blocks, by estimated cost.

A block transforms its pixels, again for each block of columns, and reads or computes the transformed weights of its
columns, again for each block of lines. Costs are the time of the slowest core, in multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

from pellucid.codegen.block_sizes import COLUMN_STEP, imbalance
from pellucid.codegen.blocks import Order
from pellucid.machine import Machine
from pellucid.machine.kernels import PLACES, TAPS, TRANSFORMED

# The fraction of the L2 cache that transformed pixels may take, and the bytes of all local buffers of a block: they are
# on the stack, and a thread's stack may have 2 MiB.
_SHARE = 0.95
_STACK = 1408 << 10
# Costs in multiplications: to transform a tile of one channel, or its sums back; for one channel and column, to start
# reading transformed weights, to transform weights, or to pack them for windows. On wider cores, where everything but
# multiplications takes as long as elsewhere, _TRANSFORM is between 112 and 300, and _PACK is 200.
_TILE = 52.0
_SUMS = 60.0
_FETCH = 32.0
_TRANSFORM = 200.0
_PACK = 130.0
# The cost of a product with windows, including gathering and packing.
_WINDOWS = 1.05
# A cache must be this many times as large as the data that is reused from it: other data passes through it meanwhile.
_HELD = 2
# The fraction of a level's bandwidth that products reach.
_REACH = 0.66
# With this many blocks per core, the assignment of blocks to cores is not simulated.
_MANY = 32
# Pixels along a side of a tile, in the result.
SIDE = 2
# Bytes of the transformed weights of one channel and column.
_WEIGHTS = 4 * PLACES


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a convolution: `images` of `lines` of `pixels`; `line` and `pixel` are their axes.

    packed: its weights are packed. pieces: the number of pieces of a line; `images` and `pixels` count pieces then.
    known: lines have the same length in every call; else sizes are estimates, and blocks as large as possible.
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
        """The shape with each line cut into `count` pieces."""
        return replace(self, images=self.images * count, pixels=self.pixels // count, pieces=count)

    def tiles(self, lines: int) -> int:
        """Tiles of a block of `lines` lines."""
        return -(-lines // SIDE) * -(-self.pixels // SIDE)

    def weights(self, columns: int) -> int:
        """Pairs of a channel and a column, with columns rounded up to whole panels."""
        return self.channels * -(-columns // COLUMN_STEP) * COLUMN_STEP

    def reuses_weights(self, way: Way) -> bool:
        """Whether successive blocks reuse the transformed weights."""
        return not self.packed and way.order is Order.COLUMNS_FIRST

    def transformed(self, machine: Machine) -> int:
        """Bytes of the transformed pixels of a tile."""
        return 4 * PLACES * (self.channels + machine.lanes)

    def most_tiles(self, columns: int, machine: Machine) -> int:
        """The maximum number of tiles of a block of `columns` columns that fit the cache and the stack."""
        weights = 0 if self.packed else PLACES * COLUMN_STEP * min(self.channels, TRANSFORMED)
        tile = self.transformed(machine) + 4 * (PLACES * COLUMN_STEP + SIDE * SIDE * columns)
        return min(int(_SHARE * machine.own_cache) // self.transformed(machine), (_STACK - 4 * weights) // tile)


@dataclass(frozen=True, slots=True)
class Way:
    """Lines and columns of a block, and the loop order over blocks."""

    lines: int
    columns: int
    order: Order

    def __str__(self) -> str:
        first = ", columns first" if self.order is Order.COLUMNS_FIRST else ""
        return f"{self.lines} lines x {self.columns}{first}"


def windows_cost(shape: Shape, height: int, machine: Machine) -> float:
    """The cost of computing the convolution by windows, in blocks of `height` pixels."""
    pixels, weights = shape.images * shape.lines * shape.pixels, shape.channels * shape.columns
    packing = 0.0 if shape.packed else _PACK * -(-pixels // height)
    return (_WINDOWS * TAPS * pixels + packing) * weights / machine.cores


def ranked(shape: Shape, machine: Machine) -> list[tuple[float, Shape, Way]]:
    """The block sizes that fit the caches and the stack, with their costs, the cheapest first.

    If not even two lines fit, lines are cut into pieces: of whole tiles, or of any size if sizes are estimates.
    """
    most = shape.pixels // SIDE
    pieces = (count for count in range(2, most + 1) if shape.pixels % (SIDE * count) == 0 or not shape.known)
    found = _priced(shape, machine) or [each for count in pieces for each in _priced(shape.in_pieces(count), machine)]
    return sorted(found, key=itemgetter(0))


def _priced(shape: Shape, machine: Machine) -> list[tuple[float, Shape, Way]]:
    return [(_price(shape, way, machine), shape, way) for way in _ways(shape, machine)]


def _ways(shape: Shape, machine: Machine) -> Iterator[Way]:
    """The block sizes that fit the caches and the stack. Lines come in pairs, so tiles do not depend on block sizes."""
    panels = -(-shape.columns // COLUMN_STEP)
    widths = sorted({-(-panels // pieces) * COLUMN_STEP for pieces in range(1, panels + 1)})
    room = machine.last_cache // (_HELD * machine.cores)
    for lines in range(SIDE, shape.lines + SIDE, SIDE):
        for columns in widths:
            most = shape.most_tiles(columns, machine)
            larger = lines < shape.lines and shape.tiles(lines + SIDE) <= most
            if shape.tiles(lines) > most or (larger and not shape.known):
                continue
            yield Way(lines, columns, Order.COLUMNS_THEN_ROWS)
            if shape.images > 1 if shape.packed else _WEIGHTS * shape.weights(columns) <= room:
                yield Way(lines, columns, Order.COLUMNS_FIRST)


def _price(shape: Shape, way: Way, machine: Machine) -> float:
    """The cost of the slowest core; each core has an equal number of consecutive blocks."""
    heights = [min(way.lines, shape.lines - line) for line in range(0, shape.lines, way.lines)]
    widths = [min(way.columns, shape.columns - column) for column in range(0, shape.columns, way.columns)]
    once = [_once(shape, way, width, machine) for width in widths]
    priced = [[_block(shape, way, height, width, machine) for height in heights] for width in widths]
    images, cores = range(shape.images), machine.cores
    count, turns = len(widths) * len(heights) * shape.images, 1 if way.order is Order.COLUMNS_FIRST else shape.images
    if count >= _MANY * cores:
        return (sum(map(sum, priced)) * shape.images + sum(once) * turns) / cores * imbalance(count, cores)
    # Blocks with the same first element of the tuple share weights, whose cost `once` a core pays for once.
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
    """The cost of one block, without that of `_once`."""
    tiles, weights = shape.tiles(lines), shape.weights(columns)
    image = 4 * shape.lines * shape.pixels * shape.channels
    reach = image * (shape.images if way.order is Order.COLUMNS_FIRST else 1)
    read = _moving(4 * (lines + 2) * (shape.pixels + 2) * shape.channels, reach, machine)
    overhead = read + tiles * (_TILE * shape.channels + _SUMS * weights / shape.channels)
    if not (shape.packed or shape.reuses_weights(way)):
        return overhead + weights * (PLACES * tiles + _TRANSFORM)
    return overhead + weights * max(PLACES * tiles + _FETCH, _reread(shape, columns, machine))


def _once(shape: Shape, way: Way, columns: int, machine: Machine) -> float:
    """The additional cost of the first block of those that share weights: to transform or fetch the weights."""
    weights = shape.weights(columns)
    if not shape.packed:
        return _TRANSFORM * weights if shape.reuses_weights(way) else 0.0
    first = _moving(_WEIGHTS, _WEIGHTS * shape.weights(shape.columns), machine)
    return weights * max(0.0, first - _reread(shape, columns, machine))


def _reread(shape: Shape, columns: int, machine: Machine) -> float:
    """The cost of reading the weights of a channel and column that the previous block has read too."""
    return _moving(_WEIGHTS, machine.cores * _WEIGHTS * shape.weights(columns), machine)


def _moving(size: float, reach: int, machine: Machine) -> float:
    """The cost of reading `size` bytes, on each core, from the cache level that holds `reach` bytes."""
    level, cores = machine.level(_HELD * reach, machine.cores), machine.cores
    return size / (_REACH * level.read.of(cores)) * machine.flops.f32.of(cores) / 2
