"""Lowers grouped products: rows are sorted by group, and each group has a matrix of its own, like a layer of experts.

One kernel computes the group of each row. In the product it selects the matrix for the row, and in the gradient of the
matrices, a sum over rows, the matrix that a row contributes to; `codegen/contraction.py` compiles both.
"""

from __future__ import annotations

import torch

from pellucid.ir.index import Expr, val
from pellucid.ir.nodes import View
from pellucid.ir.types import DType
from pellucid.lower.contraction import check_types
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_FORM = "grouped products: kernels compute groups of rows, and sums over groups of rows; ATen the other forms"


@rule("_grouped_mm.default")
def grouped_product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """`self[rows, terms] @ mat2[group][terms, columns]`, or for each group `self[rows, terms] @ mat2[terms, columns]`.

    Group `g` ends before row (in the second form, term) `offs[g]`, where the next one begins. Rows after the last
    group, which ATen leaves undefined, are 0.
    """
    given = arguments(node, graph)
    left, right, ends = given["self"], given["mat2"], given["offs"]
    ranks = len(left.shape), len(right.shape)
    if ends is None or given["bias"] is not None or ranks not in ((2, 3), (2, 2)):
        raise NotLowered(_FORM)
    _check(graph, left, right, ends)
    meta = node.meta["val"]
    groups = _groups_of(graph, node, ends, left.shape[0 if ranks == (2, 3) else 1])
    product = _rows_by_matrix if ranks == (2, 3) else _sums_of_groups
    return product(graph, node, left, right, groups, meta)


@rule("transformers::grouped_mm_fallback.default")
def expert_product(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The operator of the package `transformers`, of any type: `input[rows, terms] @ weight[group][terms, columns]`."""
    given = arguments(node, graph)
    rows, weight, ends = given["input"], given["weight"], given["offs"]
    _check(graph, rows, weight, ends)
    groups = _groups_of(graph, node, ends, rows.shape[0])
    return _rows_by_matrix(graph, node, rows, weight, groups, node.meta["val"])


@rule("transformers::grouped_mm_fallback_backward.default")
def expert_product_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The gradients of `input` and `weight`."""
    given, (of_input, of_weight) = arguments(node, graph), node.meta["val"]
    rows, weight, ends, grad = given["input"], given["weight"], given["offs"], given["grad_output"]
    _check(graph, grad, weight, ends)
    groups = _groups_of(graph, node, ends, rows.shape[0])
    return (
        _rows_by_matrix(graph, node, grad, _transposed(weight), groups, of_input),
        _sums_of_groups(graph, node, _transposed(rows), grad, groups, of_weight),
    )


def _check(graph: ProgramBuilder, left: TensorRef, right: TensorRef, ends: TensorRef) -> None:
    """Leave to ATen types that kernels do not multiply, and unknown numbers of groups."""
    check_types(graph, left, right)
    if not ends.shape[0].value:
        raise NotLowered("grouped products: the number of groups is not known")


def _transposed(matrix: TensorRef) -> TensorRef:
    """A view with the last two dimensions transposed."""
    (*batch, row, column), (*steps, one, other) = matrix.view.shape, matrix.view.strides
    view = View(matrix.view.buffer, (*batch, column, row), (*steps, other, one), matrix.view.offset)
    return TensorRef(view, matrix.dtype)


def _groups_of(graph: ProgramBuilder, node: torch.fx.Node, ends: TensorRef, rows: Expr) -> TensorRef:
    """The index of each row's group: the number of groups that end before it."""
    kernel = graph.kernel(node, (rows, *ends.shape))
    row, group = kernel.index
    ended = kernel.load(ends.view, ends.dtype, (group,)).to(DType.I64) <= kernel.position(row)
    groups = graph.temporary((rows,), DType.I64, "groups")
    kernel.store(groups.view, groups.dtype, (row,), kernel.reduce("sum", ended.to(DType.I64), (1,)))
    graph.emit(kernel)
    return groups


def _rows_by_matrix(
    graph: ProgramBuilder, node: torch.fx.Node, left: TensorRef, right: TensorRef, groups: TensorRef, meta: torch.Tensor
) -> TensorRef:
    """Each row times the matrix of its group."""
    result = graph.new(meta, "product")
    kernel = graph.kernel(node, (*result.shape, left.shape[1]))
    row, column, term = kernel.index
    group = kernel.load(groups.view, groups.dtype, (row,))
    known = group < kernel.size_value(right.shape[0], DType.I64)
    matrix = kernel.load(right.view, right.dtype, (val(group.name), term, column), known)
    terms = kernel.load(left.view, left.dtype, (row, term), known) * matrix
    kernel.store(result.view, result.dtype, (row, column), kernel.reduce("sum", terms, (2,)))
    graph.emit(kernel)
    return result


def _sums_of_groups(
    graph: ProgramBuilder, node: torch.fx.Node, left: TensorRef, right: TensorRef, groups: TensorRef, meta: torch.Tensor
) -> TensorRef:
    """A product for each group, over its terms."""
    result = graph.new(meta, "product")
    kernel = graph.kernel(node, (*result.shape, left.shape[1]))
    group, row, column, term = kernel.index
    belongs = kernel.load(groups.view, groups.dtype, (term,)).op("eq", kernel.position(group))
    terms = kernel.load(left.view, left.dtype, (row, term), belongs) * kernel.load(
        right.view, right.dtype, (term, column), belongs
    )
    kernel.store(result.view, result.dtype, (group, row, column), kernel.reduce("sum", terms, (3,)))
    graph.emit(kernel)
    return result
