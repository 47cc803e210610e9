"""Building kernel bodies: `KernelBuilder` appends lines, `Value` overloads operators for formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from pellucid.ir.index import ONE, ZERO, Expr, as_expr, bounds, nonnegative, product, total, var
from pellucid.ir.nodes import (
    Axis,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Param,
    Reduce,
    Rhs,
    Scalar,
    Store,
    View,
)
from pellucid.ir.ops import OPS, ROUNDING, Result
from pellucid.ir.origin import Origin
from pellucid.ir.types import TORCH_DTYPES, DType


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the body under construction. Operators take values of one type, or Python numbers.

    const: the number, if the value is a compile-time constant.
    """

    builder: KernelBuilder
    name: str
    dtype: DType
    const: Scalar | None = None

    def op(self, name: str, *others: Value | Scalar) -> Value:
        return self.builder.op(name, self, *others)

    def __add__(self, other: Value | Scalar) -> Value:
        return self.op("add", other)

    def __sub__(self, other: Value | Scalar) -> Value:
        return self.op("sub", other)

    def __mul__(self, other: Value | Scalar) -> Value:
        return self.op("mul", other)

    def __truediv__(self, other: Value | Scalar) -> Value:
        return self.op("div", other)

    def __neg__(self) -> Value:
        return self.op("neg")

    def __rsub__(self, other: Scalar) -> Value:
        return self.builder.const(other, self.dtype) - self

    def __rtruediv__(self, other: Scalar) -> Value:
        return self.builder.const(other, self.dtype) / self

    def __lt__(self, other: Value | Scalar) -> Value:
        return self.op("lt", other)

    def __le__(self, other: Value | Scalar) -> Value:
        return self.op("le", other)

    def __gt__(self, other: Value | Scalar) -> Value:
        return self.op("gt", other)

    def __ge__(self, other: Value | Scalar) -> Value:
        return self.op("ge", other)

    def __and__(self, other: Value) -> Value:
        return self.op("bitwise_and", other)

    def __or__(self, other: Value) -> Value:
        return self.op("bitwise_or", other)

    def __invert__(self) -> Value:
        return self.op("bitwise_not")

    __radd__ = __add__
    __rmul__ = __mul__

    def to(self, dtype: DType) -> Value:
        return self.builder.cast(self, dtype)


def wrap(value: Scalar, dtype: DType) -> Scalar:
    """`value` as PyTorch converts a Python number to `dtype`: integers wrap around, floats are truncated."""
    if dtype.is_float:
        # A single NaN object: lines are compared, and a NaN only equals the same object.
        return math.nan if value != value else float(value)
    if dtype is DType.BOOL:
        return bool(value)
    return dtype.wrap(int(value))


class KernelBuilder:
    """One kernel over `shape`: dimension `d` is the axis `i<d>`, or the constant 0 where its extent is 1.

    index: the coordinates of a point, one expression per dimension of `shape`.
    """

    def __init__(self, name: str, shape: Sequence[Expr], origin: Origin) -> None:
        self.name = name
        self.origin = origin
        self.shape = tuple(shape)
        self.space = tuple(Axis(f"i{d}", extent) for d, extent in enumerate(shape) if extent != ONE)
        axes = {axis.name for axis in self.space}
        self.index = tuple(var(f"i{d}") if f"i{d}" in axes else ZERO for d in range(len(shape)))
        self._params: dict[str, Param] = {}
        self._lines: list[Line] = []

    @property
    def ranges(self) -> dict[str, Expr]:
        """Extent of each axis by name."""
        return {axis.name: axis.extent for axis in self.space}

    def axes(self, dims: Sequence[int]) -> tuple[str, ...]:
        """Names of the axes of these dimensions; dimensions of extent 1 have none."""
        return tuple(axis.name for axis in self.space if int(axis.name[1:]) in dims)

    def const(self, value: Scalar | Expr, dtype: DType) -> Value:
        """A constant or a size, in the compute type of `dtype`."""
        dtype = dtype.compute
        if isinstance(value, Expr):
            return self.size_value(value, dtype)
        value = wrap(value, dtype)
        return self._line(Const(value), dtype, value)

    def position(self, index: Expr | int) -> Value:
        """The `i64` value of an index expression."""
        return self._line(IndexValue(as_expr(index)), DType.I64)

    def within(self, position: Sequence[Expr], shape: Sequence[Expr]) -> Value | None:
        """The condition that a position is inside a tensor of `shape`; None if it always is."""
        conditions: list[Value] = []
        for coordinate, extent in zip(position, shape, strict=True):
            span = bounds(coordinate, self.ranges)
            if span is None or not nonnegative(span[0]):
                conditions.append(self.position(coordinate) >= 0)
            if span is None or not nonnegative(extent - 1 - span[1]):
                conditions.append(self.position(coordinate) < self.size_value(extent, DType.I64))
        return both(conditions)

    def check_index(self, value: Value, size: Expr, dim: int, *, wrap: bool) -> Value:
        """`value` as an index into dimension `dim` of `size` elements; the program raises IndexError outside of it."""
        return self._line(CheckIndex(value.to(DType.I64).name, size, wrap, dim), DType.I64)

    def load(
        self, view: View, dtype: DType, index: Sequence[Expr], mask: Value | None = None, other: Scalar = 0
    ) -> Value:
        """The element of `view` at the coordinates `index`, widened to `dtype.compute`."""
        self._use(view, dtype)
        position = offset_of(view, index)
        rhs = (
            Load(view.buffer, position, mask.name, wrap(other, dtype.compute)) if mask else Load(view.buffer, position)
        )
        return self._line(rhs, dtype.compute)

    def store(self, view: View, dtype: DType, index: Sequence[Expr], value: Value, *, join: str = "") -> None:
        """Write `value`, converted to the compute type of `dtype` first, to the coordinates `index` of `view`.

        join: the operator that combines it with the stored element, see `Store`.
        """
        self._use(view, dtype)
        value = value.to(dtype)
        self._line(Store(view.buffer, offset_of(view, index), value.name, join), value.dtype)

    def op(self, name: str, *args: Value | Scalar) -> Value:
        """A scalar operator; Python numbers take the type of the first value among the arguments."""
        row = OPS[name]
        typed = args[1:] if row.result is Result.SELECT else args
        dtype = next(arg.dtype for arg in typed if isinstance(arg, Value))
        values = [arg if isinstance(arg, Value) else self.const(arg, dtype) for arg in args]
        result = DType.BOOL if row.result is Result.BOOL else dtype
        return self._line(Compute(name, tuple(value.name for value in values)), result)

    def where(self, condition: Value, a: Value | Scalar, b: Value | Scalar) -> Value:
        return self.op("where", condition, a, b)

    def cast(self, value: Value, dtype: DType) -> Value:
        """`value` in the compute type of `dtype`; itself when it has that type."""
        dtype = dtype.compute
        if value.dtype is dtype:
            return value
        if value.const is not None:
            return self.const(value.const, dtype)
        return self._line(Compute("cast", (value.name,)), dtype)

    def convert(self, value: Value, dtype: DType) -> Value:
        """`value` as an element of `dtype`: unlike a narrow result, it is rounded immediately."""
        if dtype not in ROUNDING or value.dtype in (DType.BOOL, DType.U8, DType.I8):
            return self.cast(value, dtype)
        if value.const is not None:
            return self.const(torch.tensor(value.const, dtype=TORCH_DTYPES[dtype]).item(), dtype)
        return self.cast(value, dtype).op(ROUNDING[dtype])

    def reduce(self, op: str, value: Value, dims: Sequence[int]) -> Value:
        """Reduce over the dimensions `dims`; if all have extent 1, this is the value itself."""
        axes = self.axes(dims)
        if op in ("argmax", "argmin"):
            return self._line(Reduce(op, value.name, axes), DType.I64) if axes else self.const(0, DType.I64)
        return self._line(Reduce(op, value.name, axes), value.dtype) if axes else value

    def count(self, dims: Sequence[int]) -> Expr:
        """The number of points that the dimensions `dims` span."""
        return product(self.shape[d] for d in dims)

    def size_value(self, size: Expr, dtype: DType) -> Value:
        """A size as a number of type `dtype`."""
        return self.const(size.value, dtype) if size.value is not None else self.position(size).to(dtype)

    def finish(self) -> Kernel:
        return Kernel(self.name, tuple(self._params.values()), self.space, tuple(self._lines))

    def _use(self, view: View, dtype: DType) -> None:
        """Add the view's buffer to the parameters; `ProgramBuilder.finish` fills in its size."""
        if view.buffer not in self._params:
            self._params[view.buffer] = Param(view.buffer, dtype, ZERO)

    def _line(self, rhs: Rhs, dtype: DType, const: Scalar | None = None) -> Value:
        prefix = "st" if isinstance(rhs, Store) else "v"
        name = f"{prefix}{len(self._lines)}"
        self._lines.append(Line(name, rhs, dtype, self.origin))
        return Value(self, name, dtype, const)


def both(conditions: Sequence[Value | None]) -> Value | None:
    """The conjunction of conditions; None stands for one that always holds."""
    present = [each for each in conditions if each is not None]
    return reduce(lambda a, b: a & b, present) if present else None


def offset_of(view: View, index: Sequence[Expr]) -> Expr:
    """Position in the buffer, in elements, of the coordinates `index` of `view`."""
    return total([view.offset, *(i * stride for i, stride in zip(index, view.strides, strict=True))])


def broadcast_index(shape: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Coordinates into a tensor of `shape` that is broadcast to the space of `index` (aligned at the right)."""
    tail = index[len(index) - len(shape) :]
    return tuple(ZERO if extent == ONE else i for extent, i in zip(shape, tail, strict=True))
