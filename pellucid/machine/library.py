"""What ATen computes faster than kernels do, by the machine model and by measurements: such calls are not lowered.

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
_LONG = "few rows and columns leave threads idle, ATen's BLAS shares out the terms"

BETWEEN = 9
"""Matrices whose elements lie between those of others, as where the batch is the last dimension of both operands, are
multiplied by vectors along the batch if an element that is fetched takes part in fewer products than this."""
# How much less than their own peak kernels can expect of a type that ATen computes without instructions for it.
_UNAIDED = 8.0
# Terms of a sum, and elements of a result, that are too much for one thread and too little for two. In f32 threads are
# ahead of ATen all the same where they share out so many columns, or rows of so few columns.
_MANY_TERMS = 4096
_FEW_ELEMENTS = 1024
_SHARED = 64
_FEW_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Library:
    """ATen's contractions, next to the kernels of a machine. A reason to prefer ATen's is empty where there is none."""

    machine: Machine

    def prefers_type(self, dtype: DType) -> str:
        """Why not to multiply in a narrow type: ATen uses units that kernels do not, faster than their peak."""
        library = self.machine.product.of(dtype).one
        if dtype is DType.F32 or library < self.machine.flops.of(dtype).one:
            return ""
        return f"ATen reaches {library:.0f} operations per nanosecond in {dtype.value}, which kernels do not"

    def lacks_type(self, dtype: DType) -> str:
        """Why nothing in this type should be left to ATen: it has no instructions for it, and converts each number."""
        library = self.machine.product.of(dtype).one
        if _UNAIDED * library > self.machine.flops.of(dtype).one:
            return ""
        return f"ATen reaches {library:.2g} operations per nanosecond in {dtype.value}"

    def prefers_product(self, left: View, right: View, dtype: DType) -> str:
        """Why not to multiply these (..., m, k) and (..., k, n). Symbols count as large where that is in doubt."""
        (m, k), n = left.shape[-2:], right.shape[-1]
        if ONE not in (m, n, k):
            transposed = left.strides[-1] != ONE and left.strides[-2] == ONE
            if self.machine.isa.name == AVX2.isa.name and transposed and not nonnegative(as_expr(FEW_ROWS) - m):
                return _TRANSPOSED
            between = any(one == other == ONE for one, other in zip(left.strides, right.strides[:-2], strict=False))
            looped = between and nonnegative(BETWEEN * (m + n) - m * n)
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
"""ATen next to kernels for a machine that nobody has measured."""
