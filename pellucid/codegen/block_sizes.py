"""How many rows and columns the blocks of a contraction have, by what they cost.

Sizes, strides and the machine decide, never the number of threads that a call has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from pellucid.ir.contraction import COLUMNS, Contraction, stride_along
from pellucid.ir.index import ONE, Expr, as_expr, chunks, const, equal_piece, floordiv, product
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import AMX_ROWS, DEPTH, FEW_ROWS, SAME_SET
from pellucid.machine.work import estimate

# Rows of the largest block: what is read again lies in the second cache.
ROWS = 240
# Bytes of the second cache from which on it holds twice as many rows, beside what is packed for them.
LARGE_CACHE = 1 << 20
# Blocks are multiples of these: columns of two registers of AVX-512; rows of little, so that blocks are equal.
COLUMN_STEP = 32
ROW_STEP = 2
# Smaller blocks than these would pack the operands too often.
FEWEST_ROWS = 48
# Rows of an unknown number that one core takes rather than let another share them.
SHARED_ROWS = 16
# In a convolution, to gather a term for a row takes as long as so many products, which all columns share, and to pack
# one for a column, which all rows share.
GATHER = 3.5
PACK = 7.3
# The largest block of products by tiles of bf16 (AMX).
MOST_TILE_ROWS = 256
# Rows of a block whose sums are made in one go, with a right operand that is packed already: they stay in the first
# cache until other lines have read them. Tiles take longer to read than to multiply, so there more rows share them.
ROWS_IN_ONE_GO = 24
TILE_ROWS_IN_ONE_GO = 64
# The part of the peak that products by tiles of bf16 reach (AMX), with operands in the second cache.
TILES_REACH = 0.5
# Sums of a block where nothing is packed or gathered for it: the first cache holds them beside what they are made of;
# and of a line, whose columns are rather many.
FEW_SUMS = 2048
FEW_SUMS_OF_LINE = 6144
# Blocks from which on no thread waits long for another.
ENOUGH_BLOCKS = 16
# The part of its time that a panel takes of which columns fill but one register.
HALF_PANEL = 0.6
# Choices that a decision keeps beside the one that was made.
RUNNERS_UP = 3
# How much longer than with equal shares cores may take before blocks become smaller.
WAIT = 1.05
# The part of its time that a core loses where the rows that it reads were written by another.
FETCH = 0.06


@dataclass(frozen=True, slots=True)
class Pricing:
    """What a block takes next to its products alone, by its lines, each of `size` of `m` rows, and its columns, of `n`.

    outer: how often all that is done. fetch: what it costs to share out columns in place of rows. gather, pack: see
    `GATHER`. No sum depends on the blocks, so the number of cores may decide.
    """

    m: int
    size: int
    n: int
    outer: int
    cores: int
    fetch: float
    gather: float
    pack: float

    def __call__(self, lines: int, columns: int) -> float:
        uneven = -(-self.m // lines) * lines / self.m
        pieces = self.outer * -(-self.m // lines)
        blocks = pieces * -(-self.n // columns)
        fetched = self.fetch if pieces % self.cores else 0.0
        each = uneven + self.gather / min(columns, self.n) + self.pack / (lines * self.size) + fetched
        return each * waiting(blocks, self.cores)

    def empty(self, lines: int, columns: int, machine: Machine) -> float:
        """How much longer products take because columns leave registers empty, or the last block's are fewer."""
        pieces = -(-self.n // columns)
        few = self.outer * -(-self.m // lines) * pieces < ENOUGH_BLOCKS
        registers = -(-(min(columns, self.n) if few else self.n) // machine.lanes)
        panels = registers // 2 + registers % 2 * HALF_PANEL
        return panels * (pieces if few else 1) * 2 * machine.lanes / self.n


def runners_up(price: float, others: Iterable[tuple[float, str]]) -> str:
    """Of what was not chosen the first few, by their prices next to that of the choice."""
    return ", ".join(f"{name}: {other / price:.2f}" for other, name in islice(others, RUNNERS_UP))


def few_sums(pricing: Pricing) -> list[tuple[int, int]]:
    """Lines and columns of a block of which the first cache holds all sums: the most columns, then the best lines."""
    m, size, n = pricing.m, pricing.size, pricing.n
    widths = {even_pieces(n, width, COLUMN_STEP) for width in range(COLUMN_STEP, COLUMNS + 1, COLUMN_STEP)}
    columns = max((width for width in widths if size * width <= FEW_SUMS_OF_LINE), default=COLUMN_STEP)
    most = max(1, FEW_SUMS // (size * columns))
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [(each, columns) for each in lines if each <= most]
    return sorted(found, key=lambda each: (pricing(*each), -each[0]))


def lines_and_columns(pricing: Pricing, step: int, most: int) -> list[tuple[int, int]]:
    """Lines and columns of a block, the best first: as many for each core, and little work beside the products.

    step: columns are multiples of it, and about as many as `most`.
    """
    m, size = pricing.m, pricing.size
    fewest = min(FEWEST_ROWS, m * size)
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [each for each in lines if fewest <= each * size <= ROWS] or [max(1, ROWS // size)]
    columns = {even_pieces(pricing.n, width, step) for width in (most, most // 2, step)}
    return sorted(((each, other) for each in found for other in columns), key=lambda each: (pricing(*each), each))


def product_pricing(
    found: Contraction, row: str, column: str, ranges: dict[str, Expr], machine: Machine, pack: float
) -> Pricing:
    """Of blocks of a product, whose rows are packed too where they are neighbours, or lie in one set of the first cache
    and the second does not hold them."""
    m, n, outer = rows_of(ranges[row]), estimate(ranges[column]), points_besides(ranges, (row, column, *found.inner))
    size, faster = found.dtype.itemsize, speed_up(found.dtype, machine)
    apart = stride_along(found.loads[0].index, row)
    one_set = m > FEW_ROWS and apart.value and apart.value * size % SAME_SET == 0
    copied = one_set and 2 * m * estimate(product(ranges[name] for name in found.inner)) * size > machine.own_cache
    gather = PACK * faster if apart == ONE or copied else 0.0
    return Pricing(m, 1, n, outer, machine.cores, 0.0, gather, pack * faster)


def rows_of(extent: Expr) -> int:
    """How many rows there are; many where sizes say it at each call: blocks for few would be slow for many."""
    return extent.value if extent.value is not None else max(2 * ROWS, estimate(extent))


def row_step(dtype: DType, machine: Machine) -> int:
    """Rows of blocks are a multiple of it."""
    return AMX_ROWS if machine.isa.by_tiles(dtype) else ROW_STEP


def product_sizes(
    found: Contraction,
    row: str,
    column: str,
    ranges: dict[str, Expr],
    machine: Machine,
    pack: float,
    shared: bool = True,
    made: bool = False,
) -> tuple[int, int]:
    """Rows and columns of a block: as many as the caches like, fewer where that makes too few blocks for threads.

    Rows that are neighbours are packed for each block of columns, so there sizes have a price. pack: see `PACK`.
    shared: cores share out rows where each can keep the right operand. made: another kernel makes that.
    """
    m, n, outer = rows_of(ranges[row]), estimate(ranges[column]), points_besides(ranges, (row, column, *found.inner))
    cores, tiles = machine.cores, machine.isa.by_tiles(found.dtype)
    terms = estimate(product(ranges[name] for name in found.inner))
    most, step = MOST_TILE_ROWS if tiles else ROWS, row_step(found.dtype, machine)
    if pack and not tiles and machine.own_cache >= LARGE_CACHE:
        most = 2 * ROWS  # the right operand is packed half as often
    if found.loads[0].index.coefficient(row) == ONE:
        return _packed_sizes(product_pricing(found, row, column, ranges, machine, pack), most, step)
    if not pack and terms <= DEPTH * machine.isa.terms(found.dtype):
        most, step = TILE_ROWS_IN_ONE_GO if tiles else ROWS_IN_ONE_GO, ROW_STEP
    rows, columns = even_pieces(m, most, step), even_pieces(n, COLUMNS, COLUMN_STEP)
    many = ranges[row].value is not None and m >= cores * FEWEST_ROWS
    if shared and many and outer < cores and right_fits(found, column, ranges, machine):
        pieces = cores * -(-m // (cores * most))
        share = even_pieces(m, -(-m // pieces), step)
        if speed_up(found.dtype, machine) * (pack / share - pack / rows) < FETCH:
            return share, columns

    def few() -> bool:
        return outer * -(-m // rows) * -(-n // columns) < ENOUGH_BLOCKS

    row_blocks = outer * -(-m // rows)
    if 5 * rows * terms * found.dtype.itemsize > 2 * machine.own_cache:
        # Each block of columns reads its rows anew, from beyond the cache: few of them, if cores have equal shares.
        widths = [even_pieces(n, limit, COLUMN_STEP) for limit in range(COLUMNS, 0, -COLUMN_STEP)]
        width = min(widths, key=lambda width: max(WAIT, waiting(row_blocks * -(-n // width), cores)))
        heights = [even_pieces(m, -(-m // pieces), step) for pieces in (-(-m // rows), 1 - (-m // rows))]
        apart = outer * -(-n // width)
        return min(heights, key=lambda each: (1 + pack / each) * waiting(apart * -(-m // each), cores)), width
    # Few columns may still lie in the cache where they were made, which pays for reading the rows more often.
    short = made and m <= FEWEST_ROWS and 4 * terms * columns * found.dtype.itemsize > machine.own_cache
    while (short or few()) and columns > COLUMN_STEP:
        columns = even_pieces(columns, columns // 2, COLUMN_STEP)
    return rows, columns


def _packed_sizes(pricing: Pricing, most: int, step: int) -> tuple[int, int]:
    """The cheapest rows and columns of a block for which both operands are packed. most, step: of rows."""
    m, n = pricing.m, pricing.n
    heights = {even_pieces(m, limit, step) for limit in range(min(FEWEST_ROWS, most), most + 1, step)}
    widths = {even_pieces(n, limit, COLUMN_STEP) for limit in range(COLUMN_STEP, COLUMNS + 1, COLUMN_STEP)}

    def price(rows: int, columns: int) -> float:
        blocks = pricing.outer * -(-m // rows) * -(-n // columns)
        uneven = -(-n // columns) * columns / even_pieces(n, n, COLUMN_STEP) if blocks < ENOUGH_BLOCKS else 1.0
        return uneven * pricing(rows, columns)

    sizes = [(rows, columns) for rows in heights for columns in widths]
    return min(sizes, key=lambda each: (price(*each), -each[0] * each[1]))


@dataclass(frozen=True, slots=True)
class Varying:
    """How many lines a block has where sizes say at each call how many there are, or how long they are.

    pixels: of a line in a block, None for all of it.
    """

    lines: Expr
    pixels: Expr | None = None


def split_rows(
    found: Contraction, row: str, column: str, ranges: dict[str, Expr], machine: Machine, sizes: tuple[int, int]
) -> Varying:
    """Even pieces of the rows of a product. sizes: the most rows of a block, and its columns; see `product_sizes`.

    Cores share out rows where they would not have as many blocks of columns.
    """
    most, columns = sizes
    outer = points_besides(ranges, (row, column, *found.inner))
    uneven = outer * -(-estimate(ranges[column]) // columns) % machine.cores > 0
    step, share = row_step(found.dtype, machine), 1
    if uneven:
        step, share = max(step, SHARED_ROWS), machine.cores
    return Varying(split_lines(ranges[row], most - most % step, share, step))


def split_lines(lines: Expr, most: int | Expr, share: int, step: int = 1) -> Expr:
    """The size of even pieces of `lines`: a multiple of `step`, and at most `most`, which is one too.

    share: they come in such numbers, so that each core has as many.
    """
    pieces = chunks(lines, as_expr(most) * share) * share
    return equal_piece(lines, pieces * step) * step


def split_image(lines: Expr, pixels: Expr, most: int, unit: int, share: int) -> Varying:
    """Even pieces of an image, of at most `most` squares of `unit` by `unit` pixels. share: see `split_lines`.

    As many lines as a block holds of whole lines, or one of a piece of a line.
    """
    along = chunks(pixels, unit)
    width = equal_piece(along, chunks(along, most))
    return Varying(split_lines(chunks(lines, unit), floordiv(const(most), width), share) * unit, width * unit)


def pieces_of_lines(n: int, columns: int, machine: Machine) -> int:
    """In which numbers pieces of lines have to come, beside those of `n` columns, so that each core has as many."""
    return machine.cores if -(-n // columns) % machine.cores else 1


def waiting(blocks: int, cores: int) -> float:
    """How much longer the core takes that has the most of equal blocks, next to equal shares."""
    return -(-blocks // cores) * cores / blocks


def speed_up(dtype: DType, machine: Machine) -> float:
    """How much faster products are, next to gathering and packing, than where `GATHER` and `PACK` were measured."""
    return TILES_REACH * machine.isa.products(dtype) if machine.isa.by_tiles(dtype) else 1.0


def points_besides(ranges: dict[str, Expr], without: tuple[str, ...]) -> int:
    """How many points the axes have that are not among these."""
    return max(1, estimate(product(extent for name, extent in ranges.items() if name not in without)))


def right_fits(found: Contraction, column: str, ranges: dict[str, Expr], machine: Machine) -> bool:
    """True if each core can keep the whole right operand, beside its rows of the left one.

    Then cores share out rows: what one reads is what it wrote in the kernel before.
    """
    numbers = product(ranges[name] for name in (*found.inner, column))
    return 2 * estimate(numbers) * found.dtype.itemsize <= machine.own_cache


def even_pieces(extent: int, most: int, step: int) -> int:
    """The size of equal pieces of `extent`, about `most` and a multiple of `step`."""
    extent = max(extent, 1)
    pieces = -(-extent // max(most, step))
    return -(-extent // (pieces * step)) * step
