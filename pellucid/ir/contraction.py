"""Contractions: kernels whose one reduction is a sum of products of two loads, as matrix products are.

axes i0: m, i1: n, i2: k
v0: f32 = load a[k*i0 + i2]
v1: f32 = load b[n*i2 + i1]
v2: f32 = mul v0, v1
v3: f32 = sum v2 over i2
...                              the epilogue, over i0 and i1

Of a convolution, the terms are taps and channels, and the left operand is read in windows. Where windows reach over the
edges, both loads have one mask, so that what lies outside adds nothing, whatever the weights are. Of an image that was
padded with zeros before, the left load alone has it: what lies outside adds zeros times weights. Of several groups, the
batch is the axis of groups.

The right operand of a product may have integers of one byte in memory, which are cast as they are read:

v1: i8 = load b[n*i2 + i1]
v2: f32 = cast v1

Rows may choose their right operand among matrices: `load b[k*n*v + n*i2 + i1]`, where `v` is loaded for the row.
Both loads have the mask that `v` is less than their number, so the sums of other rows are 0. In the gradient of these
matrices terms choose: both loads have the mask that `v`, loaded for the term, is the position on the axis of matrices.
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
    operands,
    remembered,
)
from pellucid.ir.ops import ROUNDING
from pellucid.ir.types import DType

DTYPES = frozenset({DType.F32, DType.BF16, DType.F16})
"""The types that operands may have in memory."""

CASTS = frozenset({DType.I8, DType.U8})
"""What may be cast to these as it is read: each of `DTYPES` has all of their values."""

MOST_SPREAD_CHANNELS, MOST_SPREAD_TERMS = 4, 192
"""An image in f32 with so few channels is read where it lies, for sums of so many terms (`codegen/find_blocks.py`)."""

MOST_TAPS = 128
"""Taps of a weight in f32 that may lie side by side: a kernel packs those of some channels together."""

_FEW_TAPS, _RUN = 12, 16
"""Of a weight with so few taps side by side, a kernel takes at least so many channels at a time, a register of them."""

COLUMNS = 128
"""Columns of the largest block: windows are gathered once for them, and what is packed is used often enough."""

_FEW_OF_GROUP = 8
"""Of a gradient with one tap, outputs and channels of a group that are too few for a product of matrices."""

GROUP_WEIGHTS = 192 << 10
"""Floats of the weights of several groups that a block packs on the stack; of a convolution that needs more there is no
kernel."""

ENDLESS = const(1 << 62)
"""The extent of a bound without an upper end."""


def packs_taps(shape: Sequence[int], groups: int, results: int) -> bool:
    """True if a weight in f32 with all taps side by side is as well for a kernel as a channels-last copy of it.

    shape: outputs, channels of a group, taps. results: elements. With many taps a kernel packs few channels at a time,
    and gathers windows in short runs: for each pixel and term that costs as much as for each output to copy it.
    """
    outputs, channels, *sides = shape
    taps = math.prod(sides)
    spread = groups == 1 and channels <= MOST_SPREAD_CHANNELS and channels * taps <= MOST_SPREAD_TERMS
    if taps <= _FEW_TAPS or spread or (groups > 1 and channels < _RUN):
        return taps <= MOST_TAPS
    gathered = results // max(1, outputs) * groups * -(-outputs // (groups * COLUMNS))
    return taps <= MOST_TAPS and gathered < outputs


@dataclass(frozen=True, slots=True)
class Bound:
    """A term counts where 0 <= position < extent."""

    position: Expr
    extent: Expr


@dataclass(frozen=True, slots=True)
class Choice:
    """What `load` reads for each row, or each term, says which of several products that belongs to.

    Rows choose a matrix as their right operand: one of `count`, which lie `apart` elements from one another, or by a
    larger number none. Terms choose a position on the axis `batch`, and count there alone.
    """

    load: Load
    count: int = 0
    apart: Expr = ZERO
    batch: str = ""


@dataclass(frozen=True, slots=True)
class Contraction:
    """The lines of a contraction, and what its kept axes are.

    left, right, product, total: the lines of both loads, of the product and of the sum. dtype: of both operands, in
        memory. cast: what the right operand has there instead, None if that is `dtype`.
    rows, columns: kept axes of the left and of the right operand alone; the result lies along columns rather than
        rows, and bounds are about rows. batch: kept axes of both.
    inner: the axes that are summed over. bounds: where terms count; everywhere without any.
    zeros: terms that do not count are zeros times the right operand.
    choice: what rows or terms choose, None if they have no choice. If terms do, the batch is their axis.
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
        """What the two operands load; of several matrices, of the first one."""
        assert isinstance(self.left.rhs, Load) and isinstance(self.right.rhs, Load)
        return self.left.rhs, _of_first(self.right.rhs)

    @property
    def windowed(self) -> bool:
        """True if the left operand is read in windows: its terms are those of several axes, or some do not count."""
        return bool(self.bounds) or len(self.inner) > 1

    @property
    def bounded(self) -> frozenset[str]:
        """The axes on which it hangs whether a term counts."""
        return frozenset[str]().union(*(bound.position.vars() for bound in self.bounds))

    def channels_among(self, axes: Iterable[str]) -> str | None:
        """The one of `axes` along which the left operand lies side by side, wherever it counts."""
        index = self.loads[0].index
        return next((name for name in axes if index.coefficient(name) == ONE and name not in self.bounded), None)

    @property
    def groups_are_rows(self) -> bool:
        """True for the gradient of a weight: channels of the image, the left operand, are rows, not terms."""
        return self.channels_among(self.rows) is not None and self.channels_among(self.inner) is None

    def swapped(self) -> Contraction:
        """The same with the operands exchanged, rows for columns."""
        assert self.cast is None and (self.choice is None or self.choice.batch)
        return replace(self, left=self.right, right=self.left, rows=self.columns, columns=self.rows)


@remembered
def find_contraction(kernel: Kernel) -> Contraction | None:
    """The contraction that `kernel` is, if it is one whose other lines do not depend on the summed axes.

    Its sums are in f32, its operands of one type: f32, or a narrower float in memory. A sum of
    squares is none, nor are the dot products of a batch: each element goes into one sum only. Neither is a product with
    one row, or one column, whose terms are read once: it is a reduction like any other, which computes its operands.
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
    mine = {left.out, right.out, product.out, *casts} | _made_of(mask, lines)
    if any(scopes[line.out] & inner and line.out not in mine for line in kernel.body):
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
    turned = stored_along(kernel, rows) and not stored_along(kernel, columns)
    return found.swapped() if turned and not _reads_windows(found, kernel.ranges) else found


def _sum_of_products(kernel: Kernel) -> tuple[Line, Line, tuple[str, ...], Line, Line] | None:
    """The loads of both operands, the names of what casts the second one, the product and the sum, if that is the only
    reduction; what is indexed by values comes second."""
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
    (left, mine), (right, casts) = (_uncast(lines[name], lines) for name in product.rhs.args)
    if not (isinstance(left.rhs, Load) and isinstance(right.rhs, Load) and left.rhs.other == right.rhs.other == 0):
        return None
    one, other = dtypes[left.rhs.buffer], dtypes[right.rhs.buffer]
    if mine or left.rhs.index.vals():
        left, mine, one, right, casts, other = right, casts, other, left, mine, one
    if mine or one not in DTYPES or (other not in CASTS if casts else other is not one):
        return None
    return left, right, casts, product, total


def _uncast(line: Line, lines: Mapping[str, Line]) -> tuple[Line, tuple[str, ...]]:
    """The line whose value `line` casts to a float, itself if it does not, and the names of the casts."""
    casts: list[str] = []
    while isinstance(line.rhs, Compute) and line.rhs.op in ("cast", *ROUNDING.values()) and line.dtype.is_float:
        casts.append(line.out)
        line = lines[line.rhs.args[0]]
    return line, tuple(casts)


def is_cast(kernel: Kernel) -> bool:
    """Whether all that a kernel does is to cast what a contraction could cast itself."""
    lines, stores, loads = {line.out: line for line in kernel.body}, list(kernel.stores()), list(kernel.loads())
    if len(stores) != 1 or len(loads) != 1 or stores[0][1].join:
        return False
    line, casts = _uncast(lines[stores[0][1].arg], lines)
    param = next(param for param in kernel.params if param.name == loads[0][1].buffer)
    return bool(casts) and isinstance(line.rhs, Load) and param.dtype in CASTS


def _reads_windows(found: Contraction, ranges: dict[str, Expr]) -> bool:
    """True if the right operand's terms lie side by side, as in a weight, and the left one's do not, as in an image."""
    left, right = (
        lies_evenly(load.index, tuple(sorted(found.inner, key=lambda name: -_step(load.index, name))), ranges)
        for load in found.loads
    )
    return len(found.inner) > 1 and right and not left


def _step(index: Expr, name: str) -> int:
    return stride_along(index, name).value or 0


def find_groups(kernel: Kernel, found: Contraction) -> tuple[Contraction, tuple[int, int, int]] | None:
    """`found`, with the image as its left operand, and the number of groups, outputs and channels of each.

    It is a convolution of several groups whose channels lie side by side, or the gradient of its weight, of which
    outputs are columns too, and channels are rows. None for any other contraction, as of depthwise convolutions.
    """
    if found.choice or found.cast:
        return None
    ways = ((each, _groups_of(kernel, each)) for each in (found, found.swapped()))
    return next(((each, sizes) for each, sizes in ways if sizes), None)


def _groups_of(kernel: Kernel, found: Contraction) -> tuple[int, int, int] | None:
    """The sizes of groups of a contraction whose left operand is an image, and whose outputs lie evenly everywhere.

    Those of a convolution are stored side by side.
    """
    if len(found.batch) != 1 or len(found.columns) > 1 or not found.rows:
        return None
    ranges, (group,), (left, _) = kernel.ranges, found.batch, found.loads
    backward = found.groups_are_rows
    window = found.rows if backward else found.inner
    near = found.channels_among(window)
    channels = ranges[near] if near else ONE
    outputs = ranges[found.columns[0]] if found.columns else ONE
    if backward and len(found.rows) == 1 and any((size.value or 0) > _FEW_OF_GROUP for size in (channels, outputs)):
        return None  # one tap of large groups: products of matrices
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
    """Those of `axes` along which neighbours are stored as neighbours."""
    return tuple(name for name in axes if any(store.index.coefficient(name) == ONE for _, store in kernel.stores()))


def _choice(left: Load, right: Load, lines: Mapping[str, Line], dtypes: Mapping[str, DType]) -> Choice | None:
    """What the mask of both loads says of a choice; None if it says anything else."""
    condition = lines[left.mask].rhs if left.mask and left.mask == right.mask else None
    if not isinstance(condition, Compute) or condition.op not in ("lt", "eq"):
        return None
    load, limit = (lines[name].rhs for name in condition.args)
    if not isinstance(load, Load) or load.mask or not is_affine(load.index) or dtypes[load.buffer] is not DType.I64:
        return None
    if condition.op == "lt" and isinstance(limit, Const) and right.index.vals() == frozenset((condition.args[0],)):
        first, second, third = (_at(right.index, const(number)) for number in range(3))
        apart = second - first
        return Choice(load, int(limit.value), apart) if not apart.vars() and third - second == apart else None
    if condition.op == "eq" and isinstance(limit, IndexValue):
        axes = tuple(limit.index.vars())
        return Choice(load, batch=axes[0]) if len(axes) == 1 and limit.index == var(axes[0]) else None
    return None


def _can_choose(found: Contraction, choice: Choice, kernel: Kernel) -> bool:
    """True if rows alone, or terms alone, have the choice."""
    axes = choice.load.index.vars()
    if choice.batch:
        return axes == frozenset(found.inner) and found.batch == (choice.batch,)
    return axes <= frozenset(found.rows) and bool(stored_along(kernel, found.columns))


def _of_first(right: Load) -> Load:
    """The load of a right operand; of several matrices, of the first one."""
    return replace(right, index=_at(right.index, ZERO)) if right.index.vals() else right


def _at(index: Expr, value: Expr) -> Expr:
    """`index` where the values that it depends on are all `value`."""
    return index.substitute({Val(name): value for name in index.vals()})


def is_affine(index: Expr) -> bool:
    """True if the index has a stride along each of its axes, and depends on no values."""
    strides = [index.coefficient(name) for name in index.vars()]
    return not index.vals() and all(stride is not None and not stride.vars() for stride in strides)


def _made_of(name: str | None, lines: Mapping[str, Line]) -> set[str]:
    """The names of a line and of all that it is made of."""
    if name is None:
        return set()
    return {name}.union(*(_made_of(each, lines) for each in operands(lines[name].rhs)))


def _bounds(mask: str | None, lines: Mapping[str, Line]) -> tuple[Bound, ...] | None:
    """What the mask of a load says of positions; None if it says anything else than that they lie between bounds."""
    found: dict[Expr, Expr] = {}
    open_ = [] if mask is None else [mask]
    while open_:
        rhs = lines[open_.pop()].rhs
        if not isinstance(rhs, Compute) or rhs.op not in ("bitwise_and", "lt", "ge"):
            return None
        if rhs.op == "bitwise_and":
            open_ += rhs.args
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
    """How far one step along an axis goes through memory; the index is affine."""
    stride = index.coefficient(name)
    assert stride is not None
    return stride


def lies_evenly(index: Expr, axes: tuple[str, ...], ranges: dict[str, Expr]) -> bool:
    """True if the axes, the last one innermost, are steps of equal size through memory."""
    step = stride_along(index, axes[-1])
    for name in reversed(axes):
        if stride_along(index, name) != step or ranges[name].value is None:
            return False
        step = step * ranges[name]
    return True
