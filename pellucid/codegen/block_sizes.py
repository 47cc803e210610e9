"""How many rows and columns the blocks of a contraction have, by their estimated cost.

The choice depends on sizes, strides and the machine, never on the number of threads of a call.
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

# Maximum number of rows of a block: the data that it reads again stays in the L2 cache.
ROWS = 240
# From this number of bytes on, the L2 cache holds twice as many rows in addition to the packed operands.
LARGE_CACHE = 1 << 20
# Block sizes are multiples of these: columns of two AVX-512 registers; a small number of rows, so that blocks are even.
COLUMN_STEP = 32
ROW_STEP = 2
# Blocks of fewer rows would pack the operands too often.
MIN_ROWS = 48
# If the number of rows is symbolic, a core's share has at least this many.
SHARED_ROWS = 16
# Costs in multiply-adds: in a convolution, to gather a term for a row, shared by all columns; and to pack a term for a
# column, shared by all rows.
GATHER = 3.5
PACK = 7.3
# Maximum number of rows of a block of products by AMX tiles, in bf16.
MAX_AMX_ROWS = 256
# Rows of a block that sums all terms in a single pass, with a packed right operand: the sums stay in the L1 cache until
# the epilogue has read them. Loading an AMX tile takes longer than multiplying it, so more rows share each tile there.
ROWS_IN_ONE_PASS = 24
AMX_ROWS_IN_ONE_PASS = 64
# The fraction of the peak that products by AMX tiles reach, with operands in the L2 cache.
AMX_EFFICIENCY = 0.5
# Sums of a block for which nothing is packed or gathered: the L1 cache holds them and their operands. And sums of one
# line, where more columns are worth more.
FEW_SUMS = 2048
FEW_SUMS_OF_LINE = 6144
# With this number of blocks no thread waits long for another.
ENOUGH_BLOCKS = 16
# Relative time of a panel whose columns fill only one of its two registers.
HALF_PANEL = 0.6
# Alternatives that a decision records in addition to the chosen one.
RUNNERS_UP = 3
# Load imbalance up to which blocks are not made smaller: the time of the slowest core relative to equal shares.
MAX_IMBALANCE = 1.05
# The fraction of its time that a core loses if another core wrote the rows that it reads.
FETCH = 0.06


@dataclass(frozen=True, slots=True)
class Pricing:
    """The cost of blocks, relative to their products alone, as a function of their lines and columns.

    m: lines in all, of `size` rows each. n: columns in all. outer: how often the product is computed. fetch: the cost
    of distributing columns over cores instead of rows. gather, pack: see `GATHER`. The order in which terms are added
    does not depend on block sizes, so these may depend on the number of cores.
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
        return each * imbalance(blocks, self.cores)

    def padding(self, lines: int, columns: int, machine: Machine) -> float:
        """How much longer products take because columns do not fill whole registers, or the last block is narrower."""
        pieces = -(-self.n // columns)
        few = self.outer * -(-self.m // lines) * pieces < ENOUGH_BLOCKS
        registers = -(-(min(columns, self.n) if few else self.n) // machine.lanes)
        panels = registers // 2 + registers % 2 * HALF_PANEL
        return panels * (pieces if few else 1) * 2 * machine.lanes / self.n


def runners_up(price: float, others: Iterable[tuple[float, str]]) -> str:
    """The first few alternatives, with their costs relative to that of the chosen one."""
    return ", ".join(f"{name}: {other / price:.2f}" for other, name in islice(others, RUNNERS_UP))


def few_sums(pricing: Pricing) -> list[tuple[int, int]]:
    """Lines and columns of blocks whose sums fit the L1 cache: as many columns as possible, then the cheapest lines."""
    m, size, n = pricing.m, pricing.size, pricing.n
    widths = {even_pieces(n, width, COLUMN_STEP) for width in range(COLUMN_STEP, COLUMNS + 1, COLUMN_STEP)}
    columns = max((width for width in widths if size * width <= FEW_SUMS_OF_LINE), default=COLUMN_STEP)
    most = max(1, FEW_SUMS // (size * columns))
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [(each, columns) for each in lines if each <= most]
    return sorted(found, key=lambda each: (pricing(*each), -each[0]))


def lines_and_columns(pricing: Pricing, step: int, most: int) -> list[tuple[int, int]]:
    """Lines and columns of a block, the cheapest first: evenly many for each core, and little overhead.

    step: columns are multiples of it, and at most about `most`.
    """
    m, size = pricing.m, pricing.size
    fewest = min(MIN_ROWS, m * size)
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [each for each in lines if fewest <= each * size <= ROWS] or [max(1, ROWS // size)]
    columns = {even_pieces(pricing.n, width, step) for width in (most, most // 2, step)}
    return sorted(((each, other) for each in found for other in columns), key=lambda each: (pricing(*each), each))


def product_pricing(
    found: Contraction, row: str, column: str, ranges: dict[str, Expr], machine: Machine, pack: float
) -> Pricing:
    """The cost of blocks of a product. Rows are packed too if they are adjacent in memory, or if they map to one set of
    the L1 cache and exceed the L2 cache."""
    m, n, outer = rows_of(ranges[row]), estimate(ranges[column]), points_except(ranges, (row, column, *found.inner))
    size, faster = found.dtype.itemsize, speed_up(found.dtype, machine)
    stride = stride_along(found.loads[0].index, row)
    one_set = m > FEW_ROWS and stride.value and stride.value * size % SAME_SET == 0
    copied = one_set and 2 * m * estimate(product(ranges[name] for name in found.inner)) * size > machine.own_cache
    gather = PACK * faster if stride == ONE or copied else 0.0
    return Pricing(m, 1, n, outer, machine.cores, 0.0, gather, pack * faster)


def rows_of(extent: Expr) -> int:
    """The number of rows; a large one if it is symbolic: blocks for few rows would be slow for many."""
    return extent.value if extent.value is not None else max(2 * ROWS, estimate(extent))


def row_step(dtype: DType, machine: Machine) -> int:
    """The granularity of a block's rows."""
    return AMX_ROWS if machine.isa.uses_tiles(dtype) else ROW_STEP


def product_sizes(
    found: Contraction,
    row: str,
    column: str,
    ranges: dict[str, Expr],
    machine: Machine,
    pack: float,
    shared: bool = True,
    produced: bool = False,
) -> tuple[int, int]:
    """Rows and columns of a block: as many as fit the caches, fewer if there would be too few blocks for the threads.

    Adjacent rows are packed again for each block of columns, so their sizes are chosen by cost. pack: see `PACK`.
    shared: distribute rows over cores if each can cache the right operand. produced: another kernel computes that.
    """
    m, n, outer = rows_of(ranges[row]), estimate(ranges[column]), points_except(ranges, (row, column, *found.inner))
    cores, amx = machine.cores, machine.isa.uses_tiles(found.dtype)
    terms = estimate(product(ranges[name] for name in found.inner))
    most, step = MAX_AMX_ROWS if amx else ROWS, row_step(found.dtype, machine)
    if pack and not amx and machine.own_cache >= LARGE_CACHE:
        most = 2 * ROWS  # the right operand is packed half as often
    if found.loads[0].index.coefficient(row) == ONE:
        return _packed_sizes(product_pricing(found, row, column, ranges, machine, pack), most, step)
    if not pack and terms <= DEPTH * machine.isa.terms(found.dtype):
        most, step = AMX_ROWS_IN_ONE_PASS if amx else ROWS_IN_ONE_PASS, ROW_STEP
    rows, columns = even_pieces(m, most, step), even_pieces(n, COLUMNS, COLUMN_STEP)
    many = ranges[row].value is not None and m >= cores * MIN_ROWS
    if shared and many and outer < cores and right_fits(found, column, ranges, machine):
        pieces = cores * -(-m // (cores * most))
        share = even_pieces(m, -(-m // pieces), step)
        if speed_up(found.dtype, machine) * (pack / share - pack / rows) < FETCH:
            return share, columns

    def few() -> bool:
        return outer * -(-m // rows) * -(-n // columns) < ENOUGH_BLOCKS

    row_blocks = outer * -(-m // rows)
    if 5 * rows * terms * found.dtype.itemsize > 2 * machine.own_cache:
        # Each block of columns reads its rows again, from outside the cache: use few, if the cores' shares are even.
        widths = [even_pieces(n, limit, COLUMN_STEP) for limit in range(COLUMNS, 0, -COLUMN_STEP)]
        width = min(widths, key=lambda width: max(MAX_IMBALANCE, imbalance(row_blocks * -(-n // width), cores)))
        heights = [even_pieces(m, -(-m // pieces), step) for pieces in (-(-m // rows), 1 - (-m // rows))]
        column_blocks = outer * -(-n // width)
        return min(heights, key=lambda each: (1 + pack / each) * imbalance(column_blocks * -(-m // each), cores)), width
    # Few columns may still be in the cache of the core that computed them, which outweighs reading rows more often.
    short = produced and m <= MIN_ROWS and 4 * terms * columns * found.dtype.itemsize > machine.own_cache
    while (short or few()) and columns > COLUMN_STEP:
        columns = even_pieces(columns, columns // 2, COLUMN_STEP)
    return rows, columns


def _packed_sizes(pricing: Pricing, most: int, step: int) -> tuple[int, int]:
    """The cheapest rows and columns of a block for which both operands are packed. most, step: of rows."""
    m, n = pricing.m, pricing.n
    heights = {even_pieces(m, limit, step) for limit in range(min(MIN_ROWS, most), most + 1, step)}
    widths = {even_pieces(n, limit, COLUMN_STEP) for limit in range(COLUMN_STEP, COLUMNS + 1, COLUMN_STEP)}

    def price(rows: int, columns: int) -> float:
        blocks = pricing.outer * -(-m // rows) * -(-n // columns)
        uneven = -(-n // columns) * columns / even_pieces(n, n, COLUMN_STEP) if blocks < ENOUGH_BLOCKS else 1.0
        return uneven * pricing(rows, columns)

    sizes = [(rows, columns) for rows in heights for columns in widths]
    return min(sizes, key=lambda each: (price(*each), -each[0] * each[1]))


@dataclass(frozen=True, slots=True)
class Varying:
    """The lines of a block if their number or length is symbolic. pixels: of each line; None for whole lines."""

    lines: Expr
    pixels: Expr | None = None


def split_rows(
    found: Contraction, row: str, column: str, ranges: dict[str, Expr], machine: Machine, sizes: tuple[int, int]
) -> Varying:
    """Even pieces of the rows of a product. sizes: the maximum rows of a block, and its columns, see `product_sizes`.

    Rows are distributed over cores if the blocks of columns cannot be distributed evenly.
    """
    most, columns = sizes
    outer = points_except(ranges, (row, column, *found.inner))
    uneven = outer * -(-estimate(ranges[column]) // columns) % machine.cores > 0
    step, share = row_step(found.dtype, machine), 1
    if uneven:
        step, share = max(step, SHARED_ROWS), machine.cores
    return Varying(split_lines(ranges[row], most - most % step, share, step))


def split_lines(lines: Expr, most: int | Expr, share: int, step: int = 1) -> Expr:
    """The size of even pieces of `lines`: a multiple of `step`, at most `most`, itself a multiple of `step`.

    share: the number of pieces is a multiple of it, so that each core has equally many.
    """
    pieces = chunks(lines, as_expr(most) * share) * share
    return equal_piece(lines, pieces * step) * step


def split_image(lines: Expr, pixels: Expr, most: int, unit: int, share: int) -> Varying:
    """Even pieces of an image, of at most `most` squares of `unit` by `unit` pixels. share: see `split_lines`.

    A piece has as many whole lines as fit, or a part of a single line of squares.
    """
    along = chunks(pixels, unit)
    width = equal_piece(along, chunks(along, most))
    return Varying(split_lines(chunks(lines, unit), floordiv(const(most), width), share) * unit, width * unit)


def pieces_of_lines(n: int, columns: int, machine: Machine) -> int:
    """The `share` for `split_lines`, given `n` columns: 1 if blocks of columns alone give cores equal shares."""
    return machine.cores if -(-n // columns) % machine.cores else 1


def imbalance(blocks: int, cores: int) -> float:
    """The time of the core with the most blocks, relative to equal shares."""
    return -(-blocks // cores) * cores / blocks


def speed_up(dtype: DType, machine: Machine) -> float:
    """The speed of products, relative to gathering and packing; 1 where `GATHER` and `PACK` were measured."""
    return AMX_EFFICIENCY * machine.isa.products(dtype) if machine.isa.uses_tiles(dtype) else 1.0


def points_except(ranges: dict[str, Expr], without: tuple[str, ...]) -> int:
    """The number of points of all axes except `without`."""
    return max(1, estimate(product(extent for name, extent in ranges.items() if name not in without)))


def right_fits(found: Contraction, column: str, ranges: dict[str, Expr], machine: Machine) -> bool:
    """True if each core can cache the whole right operand, in addition to its rows of the left one.

    Rows are then distributed over cores: each core reads what it wrote in the preceding kernel.
    """
    numbers = product(ranges[name] for name in (*found.inner, column))
    return 2 * estimate(numbers) * found.dtype.itemsize <= machine.own_cache


def even_pieces(extent: int, most: int, step: int) -> int:
    """The size of equal pieces of `extent`, about `most` and a multiple of `step`."""
    extent = max(extent, 1)
    pieces = -(-extent // max(most, step))
    return -(-extent // (pieces * step)) * step
