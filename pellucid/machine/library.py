"""Operators that ATen computes faster than our kernels, by the machine model and measurements: they are not lowered.

The bounds of products were measured on an AMD EPYC (Zen 4), two threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.ir.index import ONE, as_expr, nonnegative, product
from pellucid.ir.nodes import View
from pellucid.ir.types import DType
from pellucid.machine.attention import Heads
from pellucid.machine.kernels import FEW_ROWS
from pellucid.machine.model import Machine
from pellucid.machine.reference import AVX2

_STRIDED = "neither rows nor columns of the right operand are contiguous, so ATen copies it first"
_TRANSPOSED = "with AVX2, ATen's BLAS is faster where columns of the left operand are contiguous"
_LONG = "few rows and columns leave threads idle, ATen's BLAS distributes the terms over threads"

MIN_REUSE = 9
"""Matrices whose batch is the innermost dimension of both operands are multiplied by vectors along the batch if each
loaded element is used in fewer products than this."""
# If kernels are faster than ATen by more than this factor in some type, ATen has no instructions for the type.
_UNAIDED = 8.0
# Sums of this many terms, with results of this few elements, are too much work for one thread and too little for two.
# In f32 kernels are faster than ATen all the same if threads share this many columns, or rows of this few columns.
_MANY_TERMS = 4096
_FEW_ELEMENTS = 1024
_SHARED = 64
_FEW_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Library:
    """ATen's contractions compared with the kernels of a machine. Methods return a reason; an empty one means no."""

    machine: Machine

    def prefers_type(self, dtype: DType) -> str:
        """Why ATen should multiply in a narrow type: it uses units that kernels do not use, faster than their peak."""
        library = self.machine.product.of(dtype).one
        if dtype is DType.F32 or library < self.machine.flops.of(dtype).one:
            return ""
        return f"ATen reaches {library:.0f} operations per nanosecond in {dtype.value}, which kernels do not"

    def lacks_type(self, dtype: DType) -> str:
        """Why ATen should compute nothing in this type: it has no instructions for it, and converts each element."""
        library = self.machine.product.of(dtype).one
        if _UNAIDED * library > self.machine.flops.of(dtype).one:
            return ""
        return f"ATen reaches {library:.2g} operations per nanosecond in {dtype.value}"

    def prefers_product(self, left: View, right: View, dtype: DType) -> str:
        """Why ATen should multiply these (..., m, k) and (..., k, n). Symbolic sizes are assumed to be large."""
        (m, k), n = left.shape[-2:], right.shape[-1]
        if ONE not in (m, n, k):
            transposed = left.strides[-1] != ONE and left.strides[-2] == ONE
            if self.machine.isa.name == AVX2.isa.name and transposed and not nonnegative(as_expr(FEW_ROWS) - m):
                return _TRANSPOSED
            innermost = any(one == other == ONE for one, other in zip(left.strides, right.strides[:-2], strict=False))
            looped = innermost and nonnegative(MIN_REUSE * (m + n) - m * n)
            alone = len(right.shape) == 2 or dtype is not DType.F32
            if ONE not in right.strides[-2:] and alone and not looped:
                return _STRIDED
        rows = product(left.shape[:-1])
        few = nonnegative(as_expr(_FEW_ELEMENTS) - rows * n)
        few_columns = nonnegative(rows - _SHARED) and nonnegative(as_expr(_FEW_COLUMNS) - n)
        shared = dtype is DType.F32 and (nonnegative(n - _SHARED) or few_columns)
        return _LONG if nonnegative(k - _MANY_TERMS) and few and not shared else ""

    def attention_times(self, heads: Heads) -> tuple[float, float]:
        """Nanoseconds of an attention on one thread: of the kernel and of ATen's fused one."""
        return heads.kernel_time(self.machine), heads.library_time(self.machine)


REFERENCE = Library(AVX2)
"""ATen compared with kernels on a machine that has not been measured."""
