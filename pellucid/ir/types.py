"""Element types of buffers and values."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type; the value is the name used in printed IR.

    Buffers may hold any of them. Values in a kernel body never have a narrow float type: a load of `bf16` or
    `f16` widens to `f32`, a store narrows with round-to-nearest-even, see `compute`. Buffers of the complex types
    pass between ATen calls only; no kernel touches them.
    """

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"
    C64 = "c64"
    C128 = "c128"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        return self in (DType.F64, DType.F32, DType.BF16, DType.F16)

    @property
    def is_int(self) -> bool:
        """True for the integer types; `bool` is not one of them."""
        return self in (DType.I64, DType.I32, DType.I16, DType.I8, DType.U8)

    @property
    def is_complex(self) -> bool:
        return self in (DType.C64, DType.C128)

    @property
    def compute(self) -> DType:
        """The type in which values of this element type are computed."""
        return DType.F32 if self in (DType.BF16, DType.F16) else self

    def __repr__(self) -> str:
        return self.value


_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.BF16: 2,
    DType.F16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
    DType.C64: 8,
    DType.C128: 16,
}
