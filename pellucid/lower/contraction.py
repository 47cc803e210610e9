"""Matrix products as kernels: a sum of products in f32, which `codegen/contraction.py` knows how to run.

ATen keeps those that it computes faster. The bounds were measured on an AMD EPYC (Zen 4), two threads.
"""

from __future__ import annotations

import torch

from pellucid.ir.contraction import DTYPES
from pellucid.ir.index import ONE, as_expr, nonnegative
from pellucid.ir.index import product as product_of
from pellucid.ir.nodes import View
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import broadcast_index
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule
from pellucid.machine import AVX2, Machine
from pellucid.machine.kernels import FEW_ROWS

_OTHER = "matrix multiplication: kernels compute it in f32, bf16 and f16, ATen's BLAS in other types"
_TRANSPOSED = "matrix multiplication: with AVX2, ATen's BLAS is faster where columns of the left operand lie in memory"
_STRIDED = "matrix multiplication: neither rows nor columns of the right operand lie in memory, ATen copies it first"
_LONG = "matrix multiplication: few rows and columns leave threads idle, ATen's BLAS shares out the terms"
_OFF = "matrix multiplication: ATen's BLAS computes it, as the option `contract` asks"

# Terms of a sum, and elements of a result, that are too much for one thread and too little for two.
_MANY_TERMS = 4096
_FEW_ELEMENTS = 1024


@rule("mm.default", "bmm.default")
def product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    return _lower(graph, node, given["self"], given["mat2"], None, 1, 1)


@rule("addmm.default", "baddbmm.default")
def added_product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """beta * self + alpha * (left @ right); with beta = 0 nothing is read of self."""
    given = arguments(node, graph)
    left, right = (given[name] for name in (("batch1", "batch2") if "batch1" in given else ("mat1", "mat2")))
    return _lower(graph, node, left, right, given["self"], given["beta"], given["alpha"])


def _lower(
    graph: ProgramBuilder,
    node: torch.fx.Node,
    left: TensorRef,
    right: TensorRef,
    added: TensorRef | None,
    beta: float,
    alpha: float,
) -> Result:
    """One kernel over the result's dimensions and the summed one.

    Before: `%mm = aten.mm(%x, %w)`. After: `v3: f32 = sum v2 over i2` with `v2: f32 = mul v0, v1`.
    """
    if not graph.contract:
        raise NotLowered(_OFF)
    if left.dtype not in DTYPES or {right.dtype, (added or left).dtype} != {left.dtype}:
        raise NotLowered(_OTHER)
    check_rate(graph.machine, left.dtype, "matrix multiplication")
    _check_speed(left.view, right.view, graph.machine)
    result = graph.new(node.meta["val"], "product")
    kernel = graph.kernel(node, (*result.shape, left.shape[-1]))
    *batch, row, column, term = kernel.index
    terms = kernel.load(left.view, left.dtype, (*batch, row, term)) * kernel.load(
        right.view, right.dtype, (*batch, term, column)
    )
    value = kernel.reduce("sum", terms, (len(kernel.index) - 1,))
    if alpha != 1:
        value = value * alpha
    if added is not None and beta != 0:
        place = (*batch, row, column)
        start = kernel.load(added.view, added.dtype, broadcast_index(added.shape, place))
        value = value + (start if beta == 1 else start * beta)
    kernel.store(result.view, result.dtype, (*batch, row, column), value)
    graph.emit(kernel)
    return result


def check_rate(machine: Machine, dtype: DType, what: str) -> None:
    """Leave to ATen a narrow type that it multiplies by units that kernels do not use: faster than their peak."""
    library = machine.product.of(dtype).one
    if dtype is not DType.F32 and library >= machine.flops.of(dtype).one:
        raise NotLowered(
            f"{what}: ATen reaches {library:.0f} operations per nanosecond in {dtype.value}, which kernels do not"
        )


def _check_speed(left: View, right: View, machine: Machine) -> None:
    """Leave to ATen what it computes faster. Sizes that are symbols count as large where that is in doubt."""
    (m, k), n = left.shape[-2:], right.shape[-1]
    elements = product_of((*left.shape[:-1], n))
    if ONE not in (m, n, k):
        transposed = left.strides[-1] != ONE and left.strides[-2] == ONE
        if machine.isa.name == AVX2.isa.name and transposed and not nonnegative(as_expr(FEW_ROWS) - m):
            raise NotLowered(_TRANSPOSED)
        if ONE not in right.strides[-2:]:
            raise NotLowered(_STRIDED)
    if nonnegative(k - _MANY_TERMS) and nonnegative(as_expr(_FEW_ELEMENTS) - elements):
        raise NotLowered(_LONG)
