"""Element types of buffers and values."""

from __future__ import annotations

from enum import Enum

import torch

ALIGNMENT = 64
"""Memory that we allocate starts at a multiple of this many bytes: a cache line, and the widest vector."""


class DType(Enum):
    """An element type; the value is the name used in printed IR.

    Buffers may hold any of them. Values in a kernel body never have a narrow float type: a load of `bf16` or
    `f16` widens to `f32`, a store narrows with round-to-nearest-even, see `compute`. Buffers of the opaque types
    pass between ATen calls only; no kernel accesses them.
    """

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"

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
        return self in _SIGNED or self in _UNSIGNED

    @property
    def limits(self) -> tuple[int, int]:
        """The minimum and maximum of an integer type, or of bool."""
        if self in _SIGNED:
            return -(1 << (8 * self.itemsize - 1)), (1 << (8 * self.itemsize - 1)) - 1
        return 0, 1 if self is DType.BOOL else (1 << (8 * self.itemsize)) - 1

    def wrap(self, number: int) -> int:
        """`number` modulo 2^bits, as a number of this integer type."""
        low, high = self.limits
        return low + (number - low) % (high - low + 1)

    @property
    def is_wide_unsigned(self) -> bool:
        """True for the unsigned integers of more than a byte, for which ATen implements few operators."""
        return self in _UNSIGNED and self is not DType.U8

    @property
    def is_opaque(self) -> bool:
        """True for complex numbers and 8-bit floats, which only ATen computes with."""
        return self in _OPAQUE

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
    DType.U64: 8,
    DType.U32: 4,
    DType.U16: 2,
    DType.U8: 1,
    DType.BOOL: 1,
    DType.COMPLEX32: 4,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.F8E4M3: 1,
    DType.F8E5M2: 1,
}

_SIGNED = (DType.I64, DType.I32, DType.I16, DType.I8)
_UNSIGNED = (DType.U64, DType.U32, DType.U16, DType.U8)
_OPAQUE = frozenset(list(DType)[list(DType).index(DType.COMPLEX32) :])

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U64: torch.uint64,
    DType.U32: torch.uint32,
    DType.U16: torch.uint16,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
    DType.COMPLEX32: torch.complex32,
    DType.COMPLEX64: torch.complex64,
    DType.COMPLEX128: torch.complex128,
    DType.F8E4M3: torch.float8_e4m3fn,
    DType.F8E5M2: torch.float8_e5m2,
}
