"""Contractions: kernels whose only reduction is a sum of products of two loads, as in matrix products.

axes i0: m, i1: n, i2: k
v0: f32 = load a[k*i0 + i2]
v1: f32 = load b[n*i2 + i1]
v2: f32 = mul v0, v1
v3: f32 = sum v2 over i2
...                              the epilogue, over i0 and i1

In a convolution, the terms are taps and channels, and the left operand is read in windows. Where windows extend past
the edges, both loads have the same mask, so that positions outside add nothing, whatever the weights are. For an image
that was padded with zeros before, only the left load has the mask: positions outside add zeros times weights. With
several groups, the batch is the axis of groups.

The right operand of a product may be integers of one byte in memory, which are cast as they are read:

v1: i8 = load b[n*i2 + i1]
v2: f32 = cast v1

Each row may select its right operand among several matrices: `load b[k*n*v + n*i2 + i1]`, where `v` is loaded per row.
Both loads have the mask `v < number of matrices`, so the sums of other rows are 0. In the gradient of these matrices
each term selects: both loads have the mask that `v`, loaded per term, equals the position on the axis of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pellucid.ir.index import ONE, ZERO, Expr, Val, const, var
from pellucid.ir.nodes import (
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Reduce,
    Rhs,
    Store,
    axes_of,
    memoized,
    operands,
)
from pellucid.ir.ops import ROUNDING
from pellucid.ir.types import DType

DTYPES = frozenset({DType.F32, DType.BF16, DType.F16})
"""The types that operands may have in memory."""

CASTS = frozenset({DType.I8, DType.U8})
"""Types that may be cast to one of `DTYPES` as they are read: each of those represents all of their values."""

MAX_SPREAD_CHANNELS, MAX_SPREAD_TERMS = 4, 192
"""Up to this many channels and terms, an f32 image is read in place, without packing (`codegen/find_blocks.py`)."""

MAX_TAPS = 128
"""Maximum number of taps of an f32 weight whose taps are adjacent: a kernel packs those of some channels together."""

_FEW_TAPS, _RUN = 12, 16
"""With at most `_FEW_TAPS` adjacent taps, a kernel packs at least `_RUN` channels of a weight at a time: a register."""

COLUMNS = 128
"""Columns of the largest block: windows are gathered once for them, and packed operands are reused often enough."""

_FEW_OF_GROUP = 8
"""In the gradient of a weight with one tap: outputs and channels of a group that are too few for a matrix product."""

GROUP_WEIGHTS = 192 << 10
"""Maximum floats of the weights of several groups that a block packs on the stack; a convolution that needs more is no
kernel."""

ENDLESS = const(1 << 62)
"""The extent of a `Bound` without an upper end."""


def packs_taps(shape: Sequence[int], groups: int, results: int) -> bool:
    """True if an f32 weight with adjacent taps is as fast in a kernel as a channels-last copy of it.

    shape: outputs, channels of a group, taps. results: number of elements. With many taps a kernel packs few channels
    at a time and gathers windows in short runs: per pixel and term that costs as much as the copy per output and term.
    """
    outputs, channels, *sides = shape
    taps = math.prod(sides)
    spread = groups == 1 and channels <= MAX_SPREAD_CHANNELS and channels * taps <= MAX_SPREAD_TERMS
    if taps <= _FEW_TAPS or spread or (groups > 1 and channels < _RUN):
        return taps <= MAX_TAPS
    gathered = results // max(1, outputs) * groups * -(-outputs // (groups * COLUMNS))
    return taps <= MAX_TAPS and gathered < outputs


@dataclass(frozen=True, slots=True)
class Bound:
    """A term is added only where 0 <= position < extent."""

    position: Expr
    extent: Expr


@dataclass(frozen=True, slots=True)
class Choice:
    """`load` reads, for each row or each term, which of several products it belongs to.

    A row selects its right operand among `count` matrices, `stride` elements apart; a larger number selects none. A
    term selects a position on the axis `batch`, and is added only there.
    """

    load: Load
    count: int = 0
    stride: Expr = ZERO
    batch: str = ""


@dataclass(frozen=True, slots=True)
class Contraction:
    """The lines of a contraction, and the roles of its axes.

    left, right, product, total: the lines of both loads, of the product and of the sum. dtype: of both operands, in
        memory. cast: type of the right operand in memory if that is not `dtype`, else None.
    rows, columns: kept axes of only the left and of only the right operand; the result is contiguous along columns
        rather than rows, and bounds concern rows. batch: kept axes of both.
    inner: the axes that are summed over. bounds: where terms are added; everywhere if empty.
    zeros: terms outside the bounds are zeros times the right operand.
    choice: what rows or terms select, None if they do not. If terms select, `batch` is their axis.
    """

    left: Line
    right: Line
    product: Line
    total: Line
    dtype: DType
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    inner: tuple[str, ...]
    bounds: tuple[Bound, ...] = ()
    zeros: bool = False
    choice: Choice | None = None
    cast: DType | None = None

    @property
    def loads(self) -> tuple[Load, Load]:
        """The loads of the two operands; of the first matrix where rows select one."""
        assert isinstance(self.left.rhs, Load) and isinstance(self.right.rhs, Load)
        return self.left.rhs, _of_first(self.right.rhs)

    @property
    def windowed(self) -> bool:
        """True if the left operand is read in windows: its terms are on several axes, or there are bounds."""
        return bool(self.bounds) or len(self.inner) > 1

    @property
    def bounded(self) -> frozenset[str]:
        """The axes that the bounds depend on."""
        return frozenset[str]().union(*(bound.position.vars() for bound in self.bounds))

    def channels_among(self, axes: Iterable[str]) -> str | None:
        """The one of `axes` along which the left operand is contiguous and no bounds apply."""
        index = self.loads[0].index
        return next((name for name in axes if index.coefficient(name) == ONE and name not in self.bounded), None)

    @property
    def groups_are_rows(self) -> bool:
        """True for the gradient of a weight: channels of the image, the left operand, are rows, not terms."""
        return self.channels_among(self.rows) is not None and self.channels_among(self.inner) is None

    def swapped(self) -> Contraction:
        """This contraction with its operands exchanged, and rows with columns."""
        assert self.cast is None and (self.choice is None or self.choice.batch)
        return replace(self, left=self.right, right=self.left, rows=self.columns, columns=self.rows)


@memoized
def find_contraction(kernel: Kernel) -> Contraction | None:
    """The contraction that `kernel` computes, or None; its other lines must not depend on the summed axes.

    Its sums are in f32, its operands of one type: f32, or a narrower float in memory. A sum of squares is no
    contraction, nor are batched dot products: each element goes into one sum only. Neither is a product with one row or
    one column, whose terms are read once: that is an ordinary reduction, which may compute its operands.
    """
    parts = _sum_of_products(kernel)
    if parts is None:
        return None
    left, right, casts, product, total = parts
    assert isinstance(left.rhs, Load) and isinstance(right.rhs, Load) and isinstance(total.rhs, Reduce)
    lines = {line.out: line for line in kernel.body}
    dtypes = {param.name: param.dtype for param in kernel.params}
    masks = (left.rhs.mask, right.rhs.mask)
    mask, zeros = masks[0] or masks[1], masks[0] != masks[1]
    choice = _choice(left.rhs, right.rhs, lines, dtypes)
    bounds = () if choice else None if zeros and None not in masks else _bounds(mask, lines)
    if bounds is None:
        return None
    scopes, inner = axes_of(kernel), frozenset(total.rhs.axes)
    expected = {left.out, right.out, product.out, *casts} | _with_operands(mask, lines)
    if any(scopes[line.out] & inner and line.out not in expected for line in kernel.body):
        return None
    right_index = _of_first(right.rhs).index if choice else right.rhs.index
    if not all(map(is_affine, (left.rhs.index, right_index, *(bound.position for bound in bounds)))):
        return None
    chosen = frozenset((choice.batch,) if choice and choice.batch else ())
    one, other = left.rhs.index.vars() | chosen, right.rhs.index.vars() | chosen
    if one == other or not inner <= one & other or any(axis.name not in one | other for axis in kernel.space):
        return None

    def named(axes: frozenset[str]) -> tuple[str, ...]:
        return tuple(axis.name for axis in kernel.space if axis.name in axes)

    batch, rows, columns = named(one & other - inner), named(one - other), named(other - one)
    single = any(all(kernel.ranges[name] == ONE for name in axes) for axes in (rows, columns))
    if not bounds and len(inner) == 1 and single:
        return None
    dtype = dtypes[left.rhs.buffer]
    found = Contraction(left, right, product, total, dtype, batch, rows, columns, named(inner), bounds, zeros, choice)
    if casts:
        plain = rows and columns and not (found.windowed or choice)
        return replace(found, cast=dtypes[right.rhs.buffer]) if plain else None
    if choice and not _can_choose(found, choice, kernel):
        return None
    if bounds:
        sides = zip((one, other), masks, strict=True)
        windows = [side for side, masked in sides if masked and all(b.position.vars() <= side for b in bounds)]
        return None if not windows else found if windows[0] is one else found.swapped()
    swap = stored_along(kernel, rows) and not stored_along(kernel, columns)
    return found.swapped() if swap and not _reads_windows(found, kernel.ranges) else found


def _sum_of_products(kernel: Kernel) -> tuple[Line, Line, tuple[str, ...], Line, Line] | None:
    """The loads of both operands, the names of the casts of the second one, the product and the sum, if there is no
    other reduction; an operand that is indexed by values comes second."""
    lines = {line.out: line for line in kernel.body}
    dtypes = {param.name: param.dtype for param in kernel.params}
    reductions = [line for line in kernel.body if isinstance(line.rhs, Reduce)]
    if len(reductions) != 1:
        return None
    total = reductions[0]
    assert isinstance(total.rhs, Reduce)
    product = lines[total.rhs.arg]
    if total.rhs.op != "sum" or not isinstance(product.rhs, Compute) or product.rhs.op != "mul":
        return None
    (left, left_casts), (right, casts) = (_uncast(lines[name], lines) for name in product.rhs.args)
    if not (isinstance(left.rhs, Load) and isinstance(right.rhs, Load) and left.rhs.other == right.rhs.other == 0):
        return None
    one, other = dtypes[left.rhs.buffer], dtypes[right.rhs.buffer]
    if left_casts or left.rhs.index.vals():
        left, left_casts, one, right, casts, other = right, casts, other, left, left_casts, one
    if left_casts or one not in DTYPES or (other not in CASTS if casts else other is not one):
        return None
    return left, right, casts, product, total


def _uncast(line: Line, lines: Mapping[str, Line]) -> tuple[Line, tuple[str, ...]]:
    """The line whose value `line` casts to a float, or `line` itself, and the names of the casts."""
    casts: list[str] = []
    while isinstance(line.rhs, Compute) and line.rhs.op in ("cast", *ROUNDING.values()) and line.dtype.is_float:
        casts.append(line.out)
        line = lines[line.rhs.args[0]]
    return line, tuple(casts)


def is_cast(kernel: Kernel) -> bool:
    """Whether a kernel only casts a buffer that a contraction could cast itself."""
    lines, stores, loads = {line.out: line for line in kernel.body}, list(kernel.stores()), list(kernel.loads())
    if len(stores) != 1 or len(loads) != 1 or stores[0][1].join:
        return False
    line, casts = _uncast(lines[stores[0][1].arg], lines)
    param = next(param for param in kernel.params if param.name == loads[0][1].buffer)
    return bool(casts) and isinstance(line.rhs, Load) and param.dtype in CASTS


def _reads_windows(found: Contraction, ranges: dict[str, Expr]) -> bool:
    """True if terms are evenly strided in the right operand, like a weight, and not in the left one, like an image."""
    left, right = (
        is_evenly_strided(load.index, tuple(sorted(found.inner, key=lambda name: -_step(load.index, name))), ranges)
        for load in found.loads
    )
    return len(found.inner) > 1 and right and not left


def _step(index: Expr, name: str) -> int:
    return stride_along(index, name).value or 0


def find_groups(kernel: Kernel, found: Contraction) -> tuple[Contraction, tuple[int, int, int]] | None:
    """`found`, with the image as its left operand, and the number of groups, outputs and channels of each.

    `found` is a convolution with several groups of contiguous channels, or the gradient of its weight, whose columns
    are outputs too and whose rows are channels. None for any other contraction, such as a depthwise convolution.
    """
    if found.choice or found.cast:
        return None
    orders = ((each, _groups_of(kernel, each)) for each in (found, found.swapped()))
    return next(((each, sizes) for each, sizes in orders if sizes), None)


def _groups_of(kernel: Kernel, found: Contraction) -> tuple[int, int, int] | None:
    """The sizes of groups of a contraction whose left operand is an image, with outputs evenly strided everywhere.

    The outputs of a convolution are contiguous.
    """
    if len(found.batch) != 1 or len(found.columns) > 1 or not found.rows:
        return None
    ranges, (group,), (left, _) = kernel.ranges, found.batch, found.loads
    backward = found.groups_are_rows
    window = found.rows if backward else found.inner
    contiguous = found.channels_among(window)
    channels = ranges[contiguous] if contiguous else ONE
    outputs = ranges[found.columns[0]] if found.columns else ONE
    if backward and len(found.rows) == 1 and any((size.value or 0) > _FEW_OF_GROUP for size in (channels, outputs)):
        return None  # one tap of large groups: matrix products
    known = all(ranges[name].value is not None for name in (group, *found.columns, *window))
    if not known or channels == outputs == ONE or left.index.coefficient(group) != channels:
        return None
    others = [
        line.rhs.index
        for line in kernel.body
        if isinstance(line.rhs, Load | Store | IndexValue) and line.out != found.left.out
    ]
    steps = [(index.coefficient(group), index.coefficient(name)) for index in others for name in found.columns]
    if not backward and not stored_along(kernel, found.columns or found.batch):
        return None
    if any(b is None or a != b * outputs for a, b in steps):
        return None
    count, each, parts = (extent.value for extent in (ranges[group], outputs, channels))
    assert count is not None and each is not None and parts is not None
    return count, each, parts


def stored_along(kernel: Kernel, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` along which some store is contiguous."""
    return tuple(name for name in axes if any(store.index.coefficient(name) == ONE for _, store in kernel.stores()))


def _choice(left: Load, right: Load, lines: Mapping[str, Line], dtypes: Mapping[str, DType]) -> Choice | None:
    """The choice that the mask of both loads expresses; None if it is any other mask."""
    condition = lines[left.mask].rhs if left.mask and left.mask == right.mask else None
    if not isinstance(condition, Compute) or condition.op not in ("lt", "eq"):
        return None
    load, limit = (lines[name].rhs for name in condition.args)
    if not isinstance(load, Load) or load.mask or not is_affine(load.index) or dtypes[load.buffer] is not DType.I64:
        return None
    if condition.op == "lt" and isinstance(limit, Const) and right.index.vals() == frozenset((condition.args[0],)):
        first, second, third = (_at(right.index, const(number)) for number in range(3))
        stride = second - first
        return Choice(load, int(limit.value), stride) if not stride.vars() and third - second == stride else None
    if condition.op == "eq" and isinstance(limit, IndexValue):
        axes = tuple(limit.index.vars())
        return Choice(load, batch=axes[0]) if len(axes) == 1 and limit.index == var(axes[0]) else None
    return None


def _can_choose(found: Contraction, choice: Choice, kernel: Kernel) -> bool:
    """True if only rows, or only terms, select."""
    axes = choice.load.index.vars()
    if choice.batch:
        return axes == frozenset(found.inner) and found.batch == (choice.batch,)
    return axes <= frozenset(found.rows) and bool(stored_along(kernel, found.columns))


def _of_first(right: Load) -> Load:
    """The load of a right operand; of the first matrix where rows select one."""
    return replace(right, index=_at(right.index, ZERO)) if right.index.vals() else right


def _at(index: Expr, value: Expr) -> Expr:
    """`index` with all values that it depends on replaced by `value`."""
    return index.substitute({Val(name): value for name in index.vals()})


def is_affine(index: Expr) -> bool:
    """True if the index has a stride along each of its axes, and depends on no values."""
    strides = [index.coefficient(name) for name in index.vars()]
    return not index.vals() and all(stride is not None and not stride.vars() for stride in strides)


def _with_operands(name: str | None, lines: Mapping[str, Line]) -> set[str]:
    """The names of a line and of all lines that it depends on."""
    if name is None:
        return set()
    return {name}.union(*(_with_operands(each, lines) for each in operands(lines[name].rhs)))


def _bounds(mask: str | None, lines: Mapping[str, Line]) -> tuple[Bound, ...] | None:
    """The bounds that the mask of a load expresses; None if it is anything else than a conjunction of bounds."""
    found: dict[Expr, Expr] = {}
    pending = [] if mask is None else [mask]
    while pending:
        rhs = lines[pending.pop()].rhs
        if not isinstance(rhs, Compute) or rhs.op not in ("bitwise_and", "lt", "ge"):
            return None
        if rhs.op == "bitwise_and":
            pending += rhs.args
            continue
        position, limit = lines[rhs.args[0]].rhs, _limit(lines[rhs.args[1]].rhs)
        if not isinstance(position, IndexValue) or limit is None or position.index.vals():
            return None
        if rhs.op == "lt":
            found[position.index] = limit
        elif limit == ZERO:
            found.setdefault(position.index, ENDLESS)
        else:
            return None
    return tuple(Bound(position, extent) for position, extent in sorted(found.items(), key=repr))


def _limit(rhs: Rhs) -> Expr | None:
    """The size that a line is; None for any other value."""
    if isinstance(rhs, Const):
        return const(int(rhs.value))
    return rhs.index if isinstance(rhs, IndexValue) and not rhs.index.vars() | rhs.index.vals() else None


def stride_along(index: Expr, name: str) -> Expr:
    """The stride of an axis, in elements; the index must be affine."""
    stride = index.coefficient(name)
    assert stride is not None
    return stride


def is_evenly_strided(index: Expr, axes: tuple[str, ...], ranges: dict[str, Expr]) -> bool:
    """True if the points of the axes, the last one innermost, are at equal distances in memory."""
    step = stride_along(index, axes[-1])
    for name in reversed(axes):
        if stride_along(index, name) != step or ranges[name].value is None:
            return False
        step = step * ranges[name]
    return True
