"""The blocks of a contraction: which of its axes are cut, and into what sizes.

Sizes, strides and the machine decide, never the number of threads that a call has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from pellucid.ir.contraction import (
    MOST_SPREAD_CHANNELS,
    MOST_SPREAD_TERMS,
    Contraction,
    find_contraction,
    is_affine,
    stored_along,
)
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Atom, Expr, Var, product, var
from pellucid.ir.nodes import Kernel, Load, Store
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import AMX_ROWS, DEPTH, FEW_COLUMNS, PLACES, TAPS
from pellucid.machine.work import estimate
from pellucid.options import Options

# The largest block: what is read again lies in the second cache, and what is packed is used often enough.
ROWS = 240
COLUMNS = 128
# Bytes of the second cache from which on it holds twice as many rows, beside what is packed for them.
LARGE_CACHE = 1 << 20
# Blocks are multiples of these: columns of two registers of AVX-512; rows of little, so that blocks are equal.
COLUMN_STEP = 32
ROW_STEP = 2
# Smaller blocks than these would pack the operands too often.
FEWEST_ROWS = 48
# In a convolution, to gather a term for a row takes as long as so many products, which all columns share, and to pack
# one for a column, which all rows share.
GATHER = 3.5
PACK = 7.3
# The largest block of products by tiles of bf16 (AMX).
MOST_TILE_ROWS = 256
# Rows of a block whose sums are made in one go, with a right operand that is packed already: they stay in the first
# cache until other lines have read them. By tiles these are `AMX_ROWS`.
ROWS_IN_ONE_GO = 24
# The part of the peak that products by tiles of bf16 reach (AMX), with operands in the second cache.
TILES_REACH = 0.5
# What it takes, in a convolution of several groups, to find the place of a tap for a row.
PLACE = 48.0
# Floats of its weights that a block packs on the stack; `lower/convolution.py` leaves to oneDNN what needs more.
GROUP_WEIGHTS = 192 << 10
# Sums of a block where nothing is packed or gathered for it: the first cache holds them beside what they are made of;
# and of a line, whose columns are rather many.
FEW_SUMS = 2048
FEW_SUMS_OF_LINE = 6144
# Taps of a line of a depthwise convolution that can share the reads of pixels, and steps by which windows move then, as
# `channels.h` has it.
MOST_SHARING = 7
MOST_STEPS = 2
# Taps of a line that can share the reads of pixels, as `groups.h` has it.
MOST_NEIGHBOURS = 5
# Channels of a block of a depthwise weight's gradient: a cache line of each pixel.
TAP_CHANNELS = 16
# Axes that the rows of a window may have: images, lines, pixels; and its taps.
MOST_ROW_AXES = 3
MOST_TAP_AXES = 2
# Blocks from which on no thread waits long for another.
ENOUGH_BLOCKS = 16
# How much longer than with equal shares cores may take before blocks become smaller.
WAIT = 1.05
# The part of its time that a core loses where the rows that it reads were written by another.
FETCH = 0.05


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in `buffer` that begins at the index `start`, with the strides of its rows and columns."""

    buffer: str
    start: Expr
    row: Expr
    column: Expr


@dataclass(frozen=True, slots=True)
class Edge:
    """What lies outside of an image adds nothing: it counts where 0 <= first + rows * i + taps * j < extent."""

    first: Expr
    rows: tuple[Expr, ...]
    taps: tuple[Expr, ...]
    extent: Expr


@dataclass(frozen=True, slots=True)
class Window:
    """A left operand whose rows are points of several axes, and whose terms are those of taps and channels.

    start: the index of the block's first row and term. rows, taps: (extent, stride), outermost first.
    channels: terms that are `apart` steps from one another. edges: one for each dimension with padding.
    planes: the right operand's terms lie taps innermost, not channels. zeros: see `Contraction`.
    """

    buffer: str
    start: Expr
    rows: tuple[tuple[Expr, Expr], ...]
    taps: tuple[tuple[Expr, Expr], ...]
    channels: Expr
    apart: Expr
    planes: bool
    zeros: bool
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Pixels:
    """Both operands where terms are pixels, of which some may not count: each row lies where its pixel does.

    left, right: where the first pixel's row begins. axes: (extent, stride in the left, in the right operand).
    """

    left: Operand
    right: Operand
    axes: tuple[tuple[Expr, Expr, Expr], ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a convolution, each with so many `outputs`, its columns, and `channels`; see `codegen/groups.py`.

    together: groups that share a register. neighbours: taps of a line that lie as far apart as its pixels, else 1.
    """

    count: int
    outputs: int
    channels: int
    together: int
    neighbours: int = 1

    @property
    def period(self) -> int:
        """Columns after which registers begin anew."""
        return self.together * self.outputs

    def packed(self, columns: int, machine: Machine) -> int:
        """How many columns so many are in panels: `groups.h` has the same."""
        panel = 2 * machine.lanes
        room = self.period if self.period % machine.lanes == 0 else -(-self.period // panel) * panel
        return columns // self.period * room + columns % self.period


@dataclass(frozen=True, slots=True)
class Sharing:
    """So many neighbouring taps of a line share the reads of pixels: those are `step` times as far apart as taps.

    One tap shares nothing, and has pixels as far apart as they are.
    """

    taps: int = 1
    step: int = 1


@dataclass(frozen=True, slots=True)
class Packing:
    """A right operand of `terms` rows and `columns` columns, packed whole before the program runs.

    dtype: of its elements. area: taps of a channel where the operand's terms lie channel by channel and the left one's
    tap by tap, else 1. tiles: it is transformed too, see `Blocks.tiles`. single: its units hold one term each, in f32.
    groups: see `Blocks.groups`.
    """

    operand: Operand
    dtype: DType
    terms: int
    columns: int
    area: int
    tiles: bool
    single: bool
    groups: Groups | None

    def numel(self, machine: Machine) -> int:
        """How many f32 that makes, in panels of two registers: those who pack check it."""
        panel = 2 * machine.lanes
        units = -(-self.terms // (1 if self.single else machine.isa.terms(self.dtype)))
        transformed = PLACES * self.terms // TAPS if self.tiles else 0
        columns = self.groups.packed(self.columns, machine) if self.groups else self.columns
        return -(-columns // panel) * panel * (units + transformed) + 1


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


@dataclass(frozen=True, slots=True)
class Blocks:
    """One block is `rows` points of the axis `row`, with all of `whole`, by `columns` of `column`.

    Sums run over the `terms` of `inner`, in the order of the left operand. window: whether rows and terms of that are
    more than a row and a column of a matrix. pixels: whether terms are pixels, see `Pixels`.
    planes: the right operand's terms lie with the last of `inner` outermost.
    spread: the left operand has few channels, which lie anywhere, and is read as it lies.
    packed: the right operand is packed before the program runs. stored: where the sums go at once; None where other
    lines run over each block, which is then in memory of its own.
    tiles: how many of 2 x 2 pixels a block has, if its sums are computed by tiles (`codegen/winograd.py`), else 0.
    groups: of a convolution, where a column is made of the channels of its group; the contraction is that of the first.
    pricing, sizes: of other rows and columns that could have been chosen.
    """

    contraction: Contraction
    row: str
    whole: tuple[str, ...]
    column: str
    inner: tuple[str, ...]
    rows: int
    columns: int
    ranges: dict[str, Expr]
    window: bool = False
    planes: bool = False
    pixels: bool = False
    spread: bool = False
    packed: bool = False
    stored: Store | None = None
    tiles: int = 0
    groups: Groups | None = None
    pricing: Pricing | None = None
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def terms(self) -> Expr:
        return product(self.ranges[name] for name in self.inner)

    @property
    def channels(self) -> int:
        """Of an image whose sums are computed by tiles."""
        terms = self.terms.value
        assert self.tiles and terms is not None
        return terms // TAPS

    @property
    def share(self) -> float:
        """How many of the products are computed: all but by tiles."""
        return PLACES * self.tiles / (TAPS * self.height) if self.tiles else 1.0

    @property
    def by_channel(self) -> bool:
        """True if a column of the block is made of one column of both operands."""
        return self.column in self.contraction.batch

    @property
    def height(self) -> int:
        """Rows of a block, seen as a matrix."""
        return self.rows * estimate(product(self.ranges[name] for name in self.whole))

    @property
    def pixels_of_line(self) -> int:
        """The most rows of a block that follow one another in an image."""
        return estimate(self.ranges[self.whole[-1]]) if self.whole else self.rows

    def sharing(self) -> Sharing:
        """The taps of a depthwise convolution that share the reads of pixels."""
        tap, pixel = self.inner[-1], (self.row, *self.whole)[-1]
        found, count = self.contraction, self.ranges[tap].value
        moves = [found.loads[0].index, *(bound.position for bound in found.bounds)]
        for step in range(1, MOST_STEPS + 1):
            if all(stride_along(move, pixel) == step * stride_along(move, tap) for move in moves):
                return Sharing(count, step) if count and step <= count <= MOST_SHARING else Sharing()
        return Sharing()

    def operands(self) -> tuple[Operand | Window, Operand]:
        """The parts of both operands for the block that begins at row `lo` and column `from`."""
        left, right = self.contraction.loads
        along = self.inner[-2 if self.planes else -1]
        return self._window(left) if self.window else self._part(left, self.row, along), self._part(
            right, along, self.column
        )

    def terms_by_pixel(self) -> Pixels:
        """Both operands for the block that begins at row `lo` and column `from`, where terms are pixels."""
        left, right = self.contraction.loads
        axes = tuple(
            (self.ranges[name], stride_along(left.index, name), stride_along(right.index, name)) for name in self.inner
        )
        one, other = self._part(left, self.row, self.inner[-1]), self._part(right, self.inner[-1], self.column)
        return Pixels(one, other, axes, self._edges(self.inner, self.taps if self.by_channel else ()))

    @property
    def taps(self) -> tuple[str, ...]:
        """Of a depthwise weight whose gradient this is: its axes, whole in each block."""
        return (self.row, *self.whole)

    def result(self) -> Operand | None:
        """The part of the result for the same block, if the sums go there at once."""
        return self._part(self.stored, (self.row, *self.whole)[-1], self.column) if self.stored else None

    def packing(self) -> Packing | None:
        """How the right operand is packed, if that happens before the program runs."""
        if not self.packed:
            return None
        start: dict[Atom, Expr] = {Var("from"): ZERO}
        right = self.operands()[1]
        terms, columns = self.terms.value, self.ranges[self.column].value
        assert terms is not None and columns is not None
        area = _area(self._terms()[0], self.ranges) if self.planes else 1
        operand = replace(right, start=right.start.substitute(start))
        tiles = self.tiles > 0
        return Packing(operand, self.contraction.dtype, terms, columns, area, tiles, self.by_channel, self.groups)

    def syms(self) -> frozenset[str]:
        """The size symbols that the operands name."""
        return self.terms.syms().union(*(load.index.syms() for load in self.contraction.loads))

    def _part(self, access: Load | Store, row: str, column: str) -> Operand:
        strides = (stride_along(access.index, name) for name in (row, column))
        return Operand(access.buffer, self._first(access.index), *strides)

    def _terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of taps, and that of channels."""
        if self.spread:
            return self.inner[:-1], self.inner[-1:]
        return taps_of(self.contraction, self.inner)

    def _window(self, load: Load) -> Window:
        taps, channels = self._terms()
        rows = ((self.row, var("hi") - var("lo")), *((name, self.ranges[name]) for name in self.whole))
        return Window(
            load.buffer,
            self._first(load.index),
            tuple((extent, stride_along(load.index, name)) for name, extent in rows),
            tuple((self.ranges[name], stride_along(load.index, name)) for name in taps),
            product(self.ranges[name] for name in channels),
            stride_along(load.index, channels[0]) if channels else ONE,
            self.planes and not self.packed,
            self.contraction.zeros,
            self._edges((self.row, *self.whole), taps),
        )

    def _edges(self, rows: tuple[str, ...], taps: tuple[str, ...]) -> tuple[Edge, ...]:
        """The edges of the image, seen from a block."""

        def steps(position: Expr, axes: tuple[str, ...]) -> tuple[Expr, ...]:
            return tuple(stride_along(position, name) for name in axes)

        return tuple(
            Edge(self._first(at.position), steps(at.position, rows), steps(at.position, taps), at.extent)
            for at in self.contraction.bounds
        )

    def _first(self, index: Expr) -> Expr:
        """`index` at the first row, column and term of a block."""
        first: dict[Atom, Expr] = {Var(name): ZERO for name in (*self.inner, *self.whole)}
        return index.substitute({**first, Var(self.row): var("lo"), Var(self.column): var("from")})


def find_blocks(
    kernel: Kernel,
    options: Options,
    machine: Machine,
    frozen: frozenset[str] = frozenset(),
    groups: Groups | None = None,
) -> tuple[Blocks, tuple[Decision, ...]] | None:
    """The blocks of a kernel whose space is simplified, None if it is no contraction, or runs better otherwise.

    frozen: buffers that are the same at each call. groups: see `Blocks`.
    """
    found = find_contraction(kernel)
    if found is None or not options.vectorize:
        return None
    of_taps = _tap_gradients(found, kernel.ranges)
    if not of_taps and (not found.rows or not (found.columns or by_channel(found))):
        return None
    if groups:
        blocks = _of_groups(kernel, found, groups, machine)
    else:
        blocks = of_taps or _pixels(found, kernel.ranges, machine) or _lines(kernel, found, machine, frozen)
    if blocks is None:
        return None
    facts = (("rows", blocks.height), ("columns", blocks.columns))
    terms, lines = ", ".join(blocks.inner), ", ".join((blocks.row, *blocks.whole))
    why = f"a sum of products over {terms}: computed in blocks of {lines} and {blocks.column}"
    decision = Decision("codegen.contract", (kernel.name, found.total.out), True, why, facts)
    left, right = (load.buffer for load in found.loads)
    buffer = right if right in frozen else left
    if buffer not in frozen:
        return blocks, (decision,)
    refusal = _not_packed(kernel, blocks) if buffer == right else "the operand gives the rows of blocks, not columns"
    why = refusal or "the operand is frozen: it is packed before the program runs"
    freezing = Decision("codegen.freeze", (kernel.name, buffer), not refusal, why)
    return replace(blocks, packed=not refusal), (decision, freezing)


def _not_packed(kernel: Kernel, blocks: Blocks) -> str:
    """Why a frozen right operand is read as it lies; empty if it can be packed."""
    right = blocks.contraction.loads[1]
    columns = blocks.ranges[blocks.column]
    if blocks.pixels or right.index.vars() - {*blocks.inner, blocks.column}:
        return "the operand is not one matrix but a batch of them"
    if right.index.syms() or blocks.terms.value is None or columns.value is None:
        return "the operand's sizes are not known"
    if sum(load.buffer == right.buffer for _, load in kernel.loads()) > 1:
        return "the kernel also reads the operand elsewhere"
    if columns.value <= FEW_COLUMNS:
        return f"panels of {columns.value} columns would be mostly empty"
    return ""


def close_blocks(blocks: Blocks, close: float) -> Iterator[Blocks]:
    """Blocks of other sizes, the cheapest first, that take at most `close` times as long by their price.

    They fit where the largest blocks do. Those by tiles have sizes of their own.
    """
    if blocks.pricing is None or blocks.tiles:
        return
    price, whole = blocks.pricing, blocks.height // blocks.rows
    others = [each for each in dict.fromkeys(blocks.sizes) if each != (blocks.rows, blocks.columns)]
    for rows, columns in sorted(others, key=lambda each: price(*each)):
        if rows * whole * columns <= ROWS * COLUMNS and price(rows, columns) <= close * price(
            blocks.rows, blocks.columns
        ):
            yield replace(blocks, rows=rows, columns=columns)


def stored_at_once(blocks: Blocks, rest: Kernel, machine: Machine) -> Store | None:
    """The store of the sums, if it is all that is done with them and takes whole panels of them in one go.

    rest: what runs over a block. Sums that are made in several goes stay in the cache meanwhile.
    """
    terms, columns = blocks.terms.value, blocks.ranges[blocks.column].value
    if terms is None or terms > DEPTH * machine.isa.terms(blocks.contraction.dtype):
        return None
    if columns is None or columns % COLUMN_STEP or len(rest.body) != 2:
        return None
    store = rest.body[-1].rhs
    dtypes = {param.name: param.dtype for param in rest.params}
    if not isinstance(store, Store) or store.join or not is_affine(store.index):
        return None
    if dtypes[store.buffer] is not DType.F32:
        return None
    lines = (blocks.row, *blocks.whole)
    even = not blocks.whole or _lies(store.index, lines, blocks.ranges)
    return store if even and stride_along(store.index, blocks.column) == ONE else None


def _lines(kernel: Kernel, found: Contraction, machine: Machine, frozen: frozenset[str]) -> Blocks | None:
    """Blocks whose rows are lines of an image, or else points of one axis; None for windows that do not line up."""
    ranges = kernel.ranges

    def longest(axes: tuple[str, ...]) -> str:
        return max(axes, key=lambda name: estimate(ranges[name]))

    columns = found.columns or found.batch
    row, column = longest(found.rows), (stored_along(kernel, columns) or (longest(columns),))[0]
    several = len(found.rows) > 1 and estimate(ranges[row]) < FEWEST_ROWS
    packed = found.loads[1].buffer in frozen
    blocks = _windows(found, ranges, column, machine, packed) if found.windowed or several else None
    if blocks or found.windowed:
        return blocks
    pack = 0.0 if packed else PACK
    size = partial(_sizes, found, row, column, ranges, machine, pack)
    (height, width), apart = size(), size(shared=False)
    pricing = _pricing(found, row, column, ranges, machine, pack)
    others = (apart, *((height, _even(pricing.n, wide, COLUMN_STEP)) for wide in (2 * width, width // 2, 4 * width)))
    return Blocks(found, row, (), column, found.inner, height, width, ranges, pricing=pricing, sizes=others)


def _of_groups(kernel: Kernel, found: Contraction, groups: Groups, machine: Machine) -> Blocks | None:
    """Blocks of a convolution of several groups; None if terms do not line up."""
    (column,), ranges = found.columns, kernel.ranges
    blocks = _windows(found, ranges, column, machine, groups=groups)
    if blocks is None:
        return None
    taps, _ = taps_of(found, blocks.inner)
    pixel = (blocks.row, *blocks.whole)[-1]
    moves = [found.loads[0].index, *(bound.position for bound in found.bounds)]
    near = bool(taps) and all(stride_along(move, taps[-1]) == stride_along(move, pixel) for move in moves)
    neighbours = estimate(ranges[taps[-1]]) if near else 1
    return replace(blocks, groups=replace(groups, neighbours=neighbours if neighbours <= MOST_NEIGHBOURS else 1))


def _pixels(found: Contraction, ranges: dict[str, Expr], machine: Machine) -> Blocks | None:
    """Blocks of sums over pixels, in both of whose operands channels lie side by side; None for any other.

    Where pixels do not count, the right operand is zero.
    """
    if not found.windowed or (found.bounds and not found.zeros) or len(found.inner) > MOST_ROW_AXES:
        return None
    for each in (found.swapped(),) if found.bounds else (found, found.swapped()):
        left, right = (load.index for load in each.loads)
        rows = [name for name in each.rows if stride_along(left, name) == ONE]
        columns = [name for name in each.columns if stride_along(right, name) == ONE]
        bounded = frozenset[str]().union(*(bound.position.vars() for bound in each.bounds))
        if not rows or not columns or bounded & {rows[0], columns[0]}:
            continue
        inner = tuple(sorted(each.inner, key=lambda name: -estimate(stride_along(left, name))))
        height, width = _sizes(each, rows[0], columns[0], ranges, machine, PACK)
        return Blocks(each, rows[0], (), columns[0], inner, height, width, ranges, pixels=True)
    return None


def _tap_gradients(found: Contraction, ranges: dict[str, Expr]) -> Blocks | None:
    """Blocks of the gradient of a depthwise weight: all taps of some channels, which lie side by side in both operands.

    None for all else, and where whether a line of pixels counts hangs on more than its line of taps.
    """
    image = found if found.rows else found.swapped()
    if image.columns or len(image.batch) != 1 or image.zeros or len(image.inner) > MOST_ROW_AXES:
        return None
    (channel,), moves = image.batch, image.loads[0].index
    known = all(ranges[name].value is not None for name in (*image.rows, *image.inner))
    if not known or any(stride_along(load.index, channel) != ONE for load in image.loads):
        return None
    taps, inner = (
        tuple(sorted(axes, key=lambda name: -abs(estimate(stride_along(moves, name)))))
        for axes in (image.rows, image.inner)
    )
    if not 1 <= len(taps) <= MOST_TAP_AXES or any(ranges[name].value == 0 for name in taps):
        return None
    lines, pixels = {taps[0], *inner[:-1]} - {taps[-1]}, {taps[-1], inner[-1]}
    if not all(bound.position.vars() <= lines or bound.position.vars() <= pixels for bound in image.bounds):
        return None
    height = estimate(ranges[taps[0]])
    return Blocks(image, taps[0], taps[1:], channel, inner, height, TAP_CHANNELS, ranges, pixels=True)


def by_channel(found: Contraction) -> bool:
    """True for a depthwise convolution: each channel has its own sums, and channels of an image are neighbours."""
    return found.windowed and len(found.batch) == 1 and stride_along(found.loads[0].index, found.batch[0]) == ONE


def _windows(
    found: Contraction,
    ranges: dict[str, Expr],
    column: str,
    machine: Machine,
    packed: bool = False,
    groups: Groups | None = None,
) -> Blocks | None:
    """Blocks of a convolution: whole lines of an image, as many as the caches like. None if terms do not line up.

    packed: the right operand is packed before the program runs.
    """
    left, right = found.loads
    rows = sorted(found.rows, key=lambda name: -estimate(stride_along(left.index, name)))
    spread = None if groups or column in found.batch else _spread(found, ranges)
    inner = spread or _outermost_first(found.inner, left.index)
    taps, channels = (inner[:-1], inner[-1:]) if spread else taps_of(found, inner)
    planes = not _lies(right.index, inner, ranges)
    if planes and found.dtype is not DType.F32:
        return None
    if planes and not (channels and _lies(right.index, (*channels, *taps), ranges) and _area(taps, ranges) <= DEPTH):
        return None
    if column in found.batch and (channels or _area(taps, ranges) > DEPTH):
        return None
    if len(taps) > MOST_TAP_AXES or any(ranges[name].value is None for name in rows):
        return None
    whole: list[str] = []
    size = 1
    while len(rows) > 1 and len(whole) + 1 < MOST_ROW_AXES and size * estimate(ranges[rows[-1]]) <= ROWS:
        whole.insert(0, rows.pop())
        size *= estimate(ranges[whole[0]])
    m, n = estimate(ranges[rows[-1]]), estimate(ranges[column])
    outer = _points(ranges, (*inner, *whole, rows[-1], column))
    fetch = FETCH if _fits(found, column, ranges, machine) else 0.0
    faster = _faster(found.dtype, machine)
    step, gather, pack, most = COLUMN_STEP, GATHER * faster, PACK * faster, COLUMNS
    if groups:
        step = COLUMN_STEP if groups.period % machine.lanes == 0 else groups.period
        gather = PLACE / groups.channels
        most = min(COLUMNS, GROUP_WEIGHTS // estimate(product(ranges[name] for name in inner)))
    small = packed and (spread is not None or column in found.batch)
    if small:
        gather = pack = 0.0
    pricing = Pricing(m, size, n, outer, machine.cores, fetch, gather, pack)
    (lines, columns), *others = _few_sums(pricing) if small else _lines_and_columns(pricing, step, most)
    blocks = Blocks(found, rows[-1], tuple(whole), column, inner, lines, columns, ranges, True, planes)
    return replace(blocks, spread=spread is not None, pricing=pricing, sizes=tuple(others))


def _outermost_first(axes: Iterable[str], index: Expr) -> tuple[str, ...]:
    return tuple(sorted(axes, key=lambda name: -abs(estimate(stride_along(index, name)))))


def _spread(found: Contraction, ranges: dict[str, Expr]) -> tuple[str, ...] | None:
    """The axes of taps and then of channels, if an image has so few of these that their values are spread.

    None for any other. Channels may lie anywhere, side by side or plane by plane.
    """
    terms = product(ranges[name] for name in found.inner).value
    if found.dtype is not DType.F32 or found.batch or terms is None or terms > MOST_SPREAD_TERMS:
        return None
    if not 1 < len(found.inner) <= MOST_TAP_AXES + 1:
        return None
    bounded = frozenset[str]().union(*(bound.position.vars() for bound in found.bounds))
    left, right = (load.index for load in found.loads)
    few = [name for name in found.inner if name not in bounded and estimate(ranges[name]) <= MOST_SPREAD_CHANNELS]
    orders = [(_outermost_first((each for each in found.inner if each != name), left), name) for name in few]
    lying = (
        (*taps, name)
        for taps, name in orders
        if _lies(right, (*taps, name), ranges) or _lies(right, (name, *taps), ranges)
    )
    return next(lying, None)


def _few_sums(pricing: Pricing) -> list[tuple[int, int]]:
    """Lines and columns of a block of which the first cache holds all sums: the most columns, then the best lines."""
    m, size, n = pricing.m, pricing.size, pricing.n
    widths = {_even(n, width, COLUMN_STEP) for width in range(COLUMN_STEP, COLUMNS + 1, COLUMN_STEP)}
    columns = max((width for width in widths if size * width <= FEW_SUMS_OF_LINE), default=COLUMN_STEP)
    most = max(1, FEW_SUMS // (size * columns))
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [(each, columns) for each in lines if each <= most]
    return sorted(found, key=lambda each: (pricing(*each), -each[0]))


def _faster(dtype: DType, machine: Machine) -> float:
    """How much faster products are, next to gathering and packing, than where `GATHER` and `PACK` were measured."""
    return TILES_REACH * machine.isa.products(dtype) if machine.isa.by_tiles(dtype) else 1.0


def _lines_and_columns(pricing: Pricing, step: int, most: int) -> list[tuple[int, int]]:
    """Lines and columns of a block, the best first: as many for each core, and little work beside the products.

    step: columns are multiples of it, and about as many as `most`.
    """
    m, size = pricing.m, pricing.size
    fewest = min(FEWEST_ROWS, m * size)
    lines = {-(-m // pieces) for pieces in range(1, m + 1)}
    found = [each for each in lines if fewest <= each * size <= ROWS] or [max(1, ROWS // size)]
    columns = {_even(pricing.n, width, step) for width in (most, most // 2, step)}
    return sorted(((each, other) for each in found for other in columns), key=lambda each: (pricing(*each), each))


def _pricing(
    found: Contraction, row: str, column: str, ranges: dict[str, Expr], machine: Machine, pack: float
) -> Pricing:
    """Of blocks of a product, whose rows are packed too where they are neighbours."""
    m, n, outer = estimate(ranges[row]), estimate(ranges[column]), _points(ranges, (row, column, *found.inner))
    packed, faster = found.loads[0].index.coefficient(row) == ONE, _faster(found.dtype, machine)
    return Pricing(m, 1, n, outer, machine.cores, 0.0, PACK * faster if packed else 0.0, pack * faster)


def _lies(index: Expr, axes: tuple[str, ...], ranges: dict[str, Expr]) -> bool:
    """True if the axes, the last one innermost, are steps of equal size through memory."""
    step = stride_along(index, axes[-1])
    for name in reversed(axes):
        if stride_along(index, name) != step or ranges[name].value is None:
            return False
        step = step * ranges[name]
    return True


def _area(taps: tuple[str, ...], ranges: dict[str, Expr]) -> int:
    return estimate(product(ranges[name] for name in taps))


def taps_of(found: Contraction, inner: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of taps, and that of channels: the last one, if its terms are neighbours that count or not together."""
    last = inner[-1]
    together = all(last not in bound.position.vars() for bound in found.bounds)
    return (inner[:-1], inner[-1:]) if together and stride_along(found.loads[0].index, last) == ONE else (inner, ())


def stride_along(index: Expr, name: str) -> Expr:
    """How far one step along an axis goes through memory; the index is affine."""
    stride = index.coefficient(name)
    assert stride is not None
    return stride


def _points(ranges: dict[str, Expr], without: tuple[str, ...]) -> int:
    """How many points the axes have that are not among these."""
    return max(1, estimate(product(extent for name, extent in ranges.items() if name not in without)))


def _fits(found: Contraction, column: str, ranges: dict[str, Expr], machine: Machine) -> bool:
    """True if each core can keep the whole right operand, beside its rows of the left one.

    Then cores share out rows: what one reads is what it wrote in the kernel before.
    """
    numbers = product(ranges[name] for name in (*found.inner, column))
    return 2 * estimate(numbers) * found.dtype.itemsize <= machine.own_cache


def _sizes(
    found: Contraction,
    row: str,
    column: str,
    ranges: dict[str, Expr],
    machine: Machine,
    pack: float,
    shared: bool = True,
) -> tuple[int, int]:
    """Rows and columns of a block: as many as the caches like, fewer where that makes too few blocks for threads.

    Rows that are neighbours are packed for each block of columns, so there columns stay many. pack: see `PACK`.
    shared: cores share out rows where each can keep the right operand.
    """
    m, n, outer = estimate(ranges[row]), estimate(ranges[column]), _points(ranges, (row, column, *found.inner))
    packed, cores = found.loads[0].index.coefficient(row) == ONE, machine.cores
    terms, tiles = estimate(product(ranges[name] for name in found.inner)), machine.isa.by_tiles(found.dtype)
    most, step = (MOST_TILE_ROWS, AMX_ROWS) if tiles else (ROWS, ROW_STEP)
    if pack and not tiles and machine.own_cache >= LARGE_CACHE:
        most = 2 * ROWS  # the right operand is packed half as often
    if not (pack or packed) and terms <= DEPTH * machine.isa.terms(found.dtype):
        most, step = AMX_ROWS if tiles else ROWS_IN_ONE_GO, ROW_STEP
    rows, columns = _even(m, most, step), _even(n, COLUMNS, COLUMN_STEP)
    many = ranges[row].value is not None and m >= cores * FEWEST_ROWS
    if shared and many and outer < cores and not packed and _fits(found, column, ranges, machine):
        pieces = cores * -(-m // (cores * most))
        share = _even(m, -(-m // pieces), step)
        if _faster(found.dtype, machine) * (pack / share - pack / rows) < FETCH:
            return share, columns

    def few() -> bool:
        return outer * -(-m // rows) * -(-n // columns) < ENOUGH_BLOCKS

    while packed and few() and rows > 2 * FEWEST_ROWS:
        rows = _even(rows, rows // 2, step)
    row_blocks = outer * -(-m // rows)
    if not packed and 5 * rows * terms * found.dtype.itemsize > 2 * machine.own_cache:
        # Each block of columns reads its rows anew, from beyond the cache: few of them, if cores have equal shares.
        widths = [_even(n, limit, COLUMN_STEP) for limit in range(COLUMNS, 0, -COLUMN_STEP)]
        width = min(widths, key=lambda width: max(WAIT, waiting(row_blocks * -(-n // width), cores)))
        heights = [_even(m, -(-m // pieces), step) for pieces in (-(-m // rows), 1 - (-m // rows))]
        apart = outer * -(-n // width)
        return min(heights, key=lambda each: (1 + pack / each) * waiting(apart * -(-m // each), cores)), width
    while few() and columns > COLUMN_STEP:
        columns = _even(columns, columns // 2, COLUMN_STEP)
    return rows, columns


def waiting(blocks: int, cores: int) -> float:
    """How much longer the core takes that has the most of equal blocks, next to equal shares."""
    return -(-blocks // cores) * cores / blocks


def _even(extent: int, most: int, step: int) -> int:
    """The size of equal pieces of `extent`, about `most` and a multiple of `step`."""
    extent = max(extent, 1)
    pieces = -(-extent // max(most, step))
    return -(-extent // (pieces * step)) * step
