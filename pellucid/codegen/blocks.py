"""The blocks of a contraction: which of its axes are cut, the sizes of the pieces, and the operands of a block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from pellucid.codegen.block_sizes import Pricing, Varying
from pellucid.codegen.nest import Part
from pellucid.ir.contraction import Choice, Contraction, is_evenly_strided, stride_along
from pellucid.ir.index import ONE, ZERO, Atom, Expr, Var, const, product, var
from pellucid.ir.nodes import Load, Store
from pellucid.ir.traffic import LINE
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import PLACES, TAPS
from pellucid.machine.work import estimate

# Maximum number of taps of a line of a depthwise convolution that share pixel loads, and the maximum stride of windows
# for which they do; `channels.h` has the same limits.
MAX_SHARING = 7
MAX_STEPS = 2

# Maximum number of axes of the rows of a window (images, lines, pixels), and of its taps.
MAX_ROW_AXES = 3
MAX_TAP_AXES = 2

MATRIX = "matrix"
"""The name, in C++, of the index of the matrix that a row selects."""


class Order(Enum):
    """The loop order over blocks, outermost first.

    `outer` are all axes of a kernel that blocks do not cut: images, heads, batches.
    """

    ROWS_THEN_COLUMNS = ("outer", "rows", "columns")
    COLUMNS_THEN_ROWS = ("outer", "columns", "rows")
    COLUMNS_FIRST = ("columns", "outer", "rows")
    OUTER_LAST = ("rows", "columns", "outer")


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in `buffer` that begins at index `start`, with the strides of its rows and columns."""

    buffer: str
    start: Expr
    row: Expr
    column: Expr


@dataclass(frozen=True, slots=True)
class Edge:
    """The bounds of a padded dimension: a term is inside the image where 0 <= first + rows * i + taps * j < extent."""

    first: Expr
    rows: tuple[Expr, ...]
    taps: tuple[Expr, ...]
    extent: Expr


@dataclass(frozen=True, slots=True)
class Window:
    """A left operand whose rows are points of several axes, and whose terms are pairs of a tap and a channel.

    start: the index of the block's first row and term. rows, taps: (extent, stride), outermost first.
    channels: their number. channel_stride: elements from one to the next. edges: one for each dimension with padding.
    planes: in the right operand taps are the innermost axis of terms, not channels. zeros: see `Contraction`.
    """

    buffer: str
    start: Expr
    rows: tuple[tuple[Expr, Expr], ...]
    taps: tuple[tuple[Expr, Expr], ...]
    channels: Expr
    channel_stride: Expr
    planes: bool
    zeros: bool
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selections of a block's rows or terms: the first is at index `start`, and each next one `step` further."""

    buffer: str
    start: Expr
    step: Expr
    choice: Choice


@dataclass(frozen=True, slots=True)
class Pixels:
    """Both operands of a sum over pixels: term t is row t of either operand, unless `edges` exclude the pixel.

    left, right: the start of the first pixel's row. axes: (extent, stride in the left, in the right operand).
    """

    left: Operand
    right: Operand
    axes: tuple[tuple[Expr, Expr, Expr], ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Taps:
    """The layout of a window's taps in the right operand.

    extents: lines of taps, and taps of a line. down: elements from line to line. right, pixel: units of `unit` elements
    from tap to tap, and from pixel to pixel.
    """

    extents: tuple[Expr, Expr]
    down: Expr
    right: int
    pixel: int
    unit: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a convolution, `count` of them, see `codegen/groups.py`.

    image: the line that loads the image. backward: whether this is the gradient of the weight. outputs, channels: of
    one group; outputs are columns. together: groups that share a register. neighbours: taps of a line whose stride is
    that of its pixels, else 1.
    """

    image: str
    backward: bool
    count: int
    outputs: int
    channels: int
    together: int
    neighbours: int = 1

    @property
    def period(self) -> int:
        """Columns after which a new register begins."""
        return self.together * self.outputs

    def packed(self, columns: int, machine: Machine) -> int:
        """How many columns in panels `columns` columns take, as in `groups.h`."""
        panel = 2 * machine.lanes
        room = self.period if self.period % machine.lanes == 0 else -(-self.period // panel) * panel
        return columns // self.period * room + columns % self.period


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many neighbouring taps of a line share pixel loads; the stride of pixels is `step` times that of taps.

    taps = 1: nothing is shared; `step` is then 1.
    """

    taps: int = 1
    step: int = 1


@dataclass(frozen=True, slots=True)
class Stack:
    """`count` matrices, `stride` elements from one to the next. number: the one that a block reads, from 0 on."""

    count: int
    stride: Expr
    number: Expr


@dataclass(frozen=True, slots=True)
class Packing:
    """A right operand of `terms` rows and `columns` columns, packed as a whole before the program runs.

    dtype: of its elements. cast: their type in memory if it differs, else None. area: taps of a channel if terms are
    ordered by channel in this operand and by tap in the left one, else 1. tiles: it is transformed for Winograd's
    method too, see `Blocks.tiles`. single: its units hold one term each, in f32. groups: see `Blocks.groups`.
    stack: the operands of equal shape of which this is the first.
    """

    operand: Operand
    dtype: DType
    cast: DType | None
    terms: int
    columns: int
    area: int
    tiles: bool
    single: bool
    groups: Groups | None
    stack: Stack

    def numel(self, machine: Machine) -> int:
        """Its packed size in f32; if there are several matrices, each begins a cache line."""
        one, line = self.numel_of_one(machine), LINE // DType.F32.itemsize
        return one if self.stack.count == 1 else self.stack.count * (-(-one // line) * line)

    def numel_of_one(self, machine: Machine) -> int:
        """The packed size of one matrix in f32, in panels of two registers; the packing functions check it."""
        panel, terms = 2 * machine.lanes, machine.isa.terms(self.dtype)
        single = self.single or (self.groups is not None and self.groups.channels % terms != 0)
        units = -(-self.terms // (1 if single else terms))
        transformed = PLACES * self.terms // TAPS if self.tiles else 0
        columns = self.groups.packed(self.columns, machine) if self.groups else self.columns
        return -(-columns // panel) * panel * (units + transformed) + 1


@dataclass(frozen=True, slots=True)
class Blocks:
    """One block is `rows` points of the axis `row`, with all of `whole`, by `columns` points of `column`.

    varying: the symbolic sizes of a block along `row`, and along the last of `whole` if lines have no known length; a
    block then has at most `rows` rows in all.

    Sums run over the `terms` of `inner`, in the order of the left operand.
    window: the left operand is a `Window`, not a matrix. pixels: terms are pixels, see `Pixels`.
    planes: in the right operand the last of `inner` is the outermost axis of terms.
    spread: the left operand has few channels, with any stride, and is read without packing.
    packed: the right operand is packed before the program runs.
    stored: the store to which the sums are written directly; None if other lines run over each block, which is then in
    a local buffer.
    tiles: tiles of 2 x 2 pixels in a block if Winograd's method computes it (`codegen/winograd.py`), else 0.
    order: the loop order over blocks.
    groups: of a convolution, where a column sums over the channels of its group; the contraction is the first group's.
    along_rows: the epilogue, the lines that run over a block, has its vectors along rows, as the results are stored,
    and gathers the sums.
    pricing, sizes: the cost model of the block sizes, and the alternatives to `rows` and `columns`.
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
    varying: Varying | None = None
    pixels: bool = False
    spread: bool = False
    packed: bool = False
    stored: Store | None = None
    tiles: int = 0
    order: Order = Order.ROWS_THEN_COLUMNS
    groups: Groups | None = None
    along_rows: bool = False
    pricing: Pricing | None = None
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def terms(self) -> Expr:
        return product(self.ranges[name] for name in self.inner)

    @property
    def pixel(self) -> str:
        """The innermost axis of rows."""
        return (self.row, *self.whole)[-1]

    @property
    def stride(self) -> int:
        """Row stride of the local buffer. Gathers over an even number of cache lines would use few cache sets."""
        line = LINE // DType.F32.itemsize
        return self.columns + (line if self.along_rows and self.columns % (2 * line) == 0 else 0)

    @property
    def channels(self) -> int:
        """Channels of an image, for Winograd's method."""
        terms = self.terms.value
        assert self.tiles and terms is not None
        return terms // TAPS

    @property
    def share(self) -> float:
        """The fraction of products that is computed: below 1 with Winograd tiles, or terms of one batch entry each."""
        if self.contraction.choice and self.contraction.choice.batch:
            return 1 / max(1, estimate(self.ranges[self.contraction.choice.batch]))
        return PLACES * self.tiles / (TAPS * self.height) if self.tiles else 1.0

    @property
    def reuses_weights(self) -> bool:
        """Whether Winograd blocks of the same columns share their transformed weights."""
        return self.tiles > 0 and not self.packed and self.order is Order.COLUMNS_FIRST

    @property
    def by_channel(self) -> bool:
        """True if a column of the block depends on one column of each operand: a depthwise convolution."""
        return self.column in self.contraction.batch

    @property
    def height(self) -> int:
        """The maximum number of rows of a block, as a matrix."""
        return self.rows if self.varying else self.rows * estimate(product(self.ranges[name] for name in self.whole))

    @property
    def pixels_of_line(self) -> int:
        """The maximum number of rows of a block that are consecutive pixels of a line."""
        return estimate(self.ranges[self.whole[-1]]) if self.whole and Part.PIECE not in self.pieces else self.rows

    @property
    def pieces(self) -> dict[Part, tuple[str, Expr]]:
        """The axes that blocks cut, each with the points of one piece."""
        sizes = self.varying or Varying(const(self.rows))
        piece = {} if sizes.pixels is None else {Part.PIECE: (self.whole[-1], sizes.pixels)}
        return {Part.CHUNK: (self.row, sizes.lines), **piece, Part.BLOCK: (self.column, const(self.columns))}

    def points(self, axis: str) -> tuple[Expr, Expr]:
        """The first point of an axis in a block, and the number of its points there."""
        part = next((part for part, (name, _) in self.pieces.items() if name == axis), None)
        return (var(part.first), var(part.last) - var(part.first)) if part else (ZERO, self.ranges[axis])

    def sharing(self) -> Sharing:
        """The taps of a depthwise convolution that share pixel loads."""
        tap, pixel = self.inner[-1], self.pixel
        found, count = self.contraction, self.ranges[tap].value
        moves = [found.loads[0].index, *(bound.position for bound in found.bounds)]
        for step in range(1, MAX_STEPS + 1):
            if all(stride_along(move, pixel) == step * stride_along(move, tap) for move in moves):
                return Sharing(count, step) if count and step <= count <= MAX_SHARING else Sharing()
        return Sharing()

    def operands(self) -> tuple[Operand | Window, Operand]:
        """The parts of both operands for the block that begins at row `lo` and column `from`."""
        left, right = self.contraction.loads
        along = self.inner[-2 if self.planes else -1]
        return self._window(left) if self.window else self._part(left, self.row, along), self._part(
            right, along, self.column
        )

    def chosen(self) -> Chosen | None:
        """The selections of the rows or terms of the block that begins at row `lo`; None if they select nothing."""
        choice = self.contraction.choice
        if choice is None:
            return None
        axis = self.inner[0] if choice.batch else self.row
        index = choice.load.index
        return Chosen(choice.load.buffer, self._first(index), stride_along(index, axis), choice)

    def terms_by_pixel(self) -> Pixels:
        """Both operands for the block that begins at row `lo` and column `from`, where terms are pixels."""
        left, right = self.contraction.loads
        axes = tuple(
            (self.ranges[name], stride_along(left.index, name), stride_along(right.index, name)) for name in self.inner
        )
        one, other = self._part(left, self.row, self.inner[-1]), self._part(right, self.inner[-1], self.column)
        return Pixels(one, other, axes, self._edges(self.inner, self.taps))

    @property
    def taps(self) -> tuple[str, ...]:
        """The tap axes, all points of which are in each block, if this is the gradient of a weight."""
        return (self.row, *self.whole) if self.by_channel else self.whole

    def window_of_taps(self) -> Taps:
        """The layout of `taps` in the right operand, where terms are pixels that the taps share."""
        index, (*above, along) = self.contraction.loads[1].index, self.taps
        right, pixel = (stride_along(index, name).value for name in (along, self.inner[-1]))
        assert right and pixel
        unit = math.gcd(right, pixel)
        height, down = (self.ranges[above[0]], stride_along(index, above[0])) if above else (ONE, ZERO)
        return Taps((height, self.ranges[along]), down, right // unit, pixel // unit, unit)

    def result(self) -> Operand | None:
        """The part of the result for the same block, if the sums are written there directly."""
        return self._part(self.stored, (self.row, *self.whole)[-1], self.column) if self.stored else None

    def packing(self) -> Packing | None:
        """How the right operand is packed, if that happens before the program runs."""
        if not self.packed:
            return None
        start: dict[Atom, Expr] = {Var("from"): ZERO}
        right, stack = self.operands()[1], self.stack()
        start |= {Var(name): ZERO for name in self._batch_axes()}
        terms, columns = self.terms.value, self.ranges[self.column].value
        assert terms is not None and columns is not None and stack is not None
        area = area_of(self._terms()[0], self.ranges) if self.planes else 1
        operand = replace(right, start=right.start.substitute(start))
        dtype, cast, tiles = self.contraction.dtype, self.contraction.cast, self.tiles > 0
        return Packing(operand, dtype, cast, terms, columns, area, tiles, self.by_channel, self.groups, stack)

    def stack(self) -> Stack | None:
        """The stack of matrices to which the right operand of a block belongs; None if they are not evenly spaced."""
        choice, axes = self.contraction.choice, self._batch_axes()
        if choice and choice.count:
            return Stack(choice.count, choice.stride, var(MATRIX))
        right = self.contraction.loads[1].index
        if axes and not is_evenly_strided(right, axes, self.ranges):
            return None
        number = ZERO
        for name in axes:
            number = number * self.ranges[name] + var(name)
        count = product(self.ranges[name] for name in axes).value
        return Stack(count, stride_along(right, axes[-1]) if axes else ZERO, number) if count else None

    def _batch_axes(self) -> tuple[str, ...]:
        """The batch axes of the right operand: a matrix for each of their points, outermost first."""
        right = self.contraction.loads[1].index
        axes = right.vars() - {*self.inner, self.column}
        return tuple(sorted(axes, key=lambda name: -estimate(stride_along(right, name))))

    def syms(self) -> frozenset[str]:
        """The size symbols that the operands name."""
        indices = [load.index for load in self.contraction.loads]
        indices += [self.ranges[name] for name in self.whole] + [size for _, size in self.pieces.values()]
        indices += [each for bound in self.contraction.bounds for each in (bound.position, bound.extent)]
        if choice := self.contraction.choice:
            indices += [choice.load.index, choice.stride]
        return self.terms.syms().union(*(index.syms() for index in indices))

    def _part(self, access: Load | Store, row: str, column: str) -> Operand:
        strides = (stride_along(access.index, name) for name in (row, column))
        return Operand(access.buffer, self._first(access.index), *strides)

    def _terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of taps, and the axis of channels."""
        if self.spread:
            return self.inner[:-1], self.inner[-1:]
        return taps_of(self.contraction, self.inner)

    def _window(self, load: Load) -> Window:
        taps, channels = self._terms()
        return Window(
            load.buffer,
            self._first(load.index),
            tuple((self.points(name)[1], stride_along(load.index, name)) for name in (self.row, *self.whole)),
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
        first: dict[Atom, Expr] = {Var(name): ZERO for name in self.inner}
        first |= {Var(name): self.points(name)[0] for name in (self.row, *self.whole, self.column)}
        return index.substitute(first)


def taps_of(found: Contraction, inner: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of taps, and the axis of channels: the last one, if it is contiguous and no bound depends on it."""
    last = inner[-1]
    together = last not in found.bounded
    return (inner[:-1], inner[-1:]) if together and stride_along(found.loads[0].index, last) == ONE else (inner, ())


def area_of(taps: tuple[str, ...], ranges: dict[str, Expr]) -> int:
    """How many taps there are."""
    return estimate(product(ranges[name] for name in taps))


def outermost_first(axes: Iterable[str], index: Expr) -> tuple[str, ...]:
    """The axes, ordered by decreasing stride."""
    return tuple(sorted(axes, key=lambda name: -abs(estimate(stride_along(index, name)))))
