"""Lowers matrix products to kernels: sums of products in f32, compiled by `codegen/contraction.py`.

ATen is called for those that it computes faster.
"""

from __future__ import annotations

import torch

from pellucid.ir.contraction import DTYPES
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import broadcast_index
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_WHAT = "matrix multiplication"
_OTHER = f"{_WHAT}: kernels compute it in f32, bf16 and f16, ATen's BLAS in other types"
_SCALED = f"{_WHAT}: the factors `beta` and `alpha` are known only at run time"
_OFF = f"{_WHAT}: ATen's BLAS computes it, because the option `contract` is off"


@rule("mm.default", "bmm.default")
def product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    return _lower(graph, node, given["self"], given["mat2"], None, 1, 1)


@rule("addmm.default", "baddbmm.default")
def added_product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """beta * self + alpha * (left @ right); with beta = 0 self is not read."""
    given = arguments(node, graph)
    left, right = (given[name] for name in (("batch1", "batch2") if "batch1" in given else ("mat1", "mat2")))
    if not all(isinstance(given[name], int | float) for name in ("beta", "alpha")):
        raise NotLowered(_SCALED)
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
    check_types(graph, left, right, *([added] if added else []))
    _check_speed(graph, left, right)
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
        position = (*batch, row, column)
        start = kernel.load(added.view, added.dtype, broadcast_index(added.shape, position))
        value = value + (start if beta == 1 else start * beta)
    kernel.store(result.view, result.dtype, (*batch, row, column), value)
    graph.emit(kernel)
    return result


def check_types(graph: ProgramBuilder, *operands: TensorRef) -> None:
    """Leave to ATen types that kernels do not multiply, or multiply more slowly."""
    if not graph.contract:
        raise NotLowered(_OFF)
    if operands[0].dtype not in DTYPES or len({each.dtype for each in operands}) > 1:
        raise NotLowered(_OTHER)
    check_rate(graph, operands[0].dtype, _WHAT)


def check_rate(graph: ProgramBuilder, dtype: DType, what: str) -> None:
    """Leave to ATen a type that it multiplies faster."""
    reason = graph.library.prefers_type(dtype)
    if reason:
        raise NotLowered(f"{what}: {reason}")


def _check_speed(graph: ProgramBuilder, left: TensorRef, right: TensorRef) -> None:
    """Leave to ATen a product that it computes faster."""
    reason = graph.library.prefers_product(left.view, right.view, left.dtype)
    if reason:
        raise NotLowered(f"{_WHAT}: {reason}")
