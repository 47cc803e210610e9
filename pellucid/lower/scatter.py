"""Lowers writes to indices from tensors: scatter, index_put, index_add, and the gradients of lookups.

A general scatter is two kernels: a copy of the tensor that is written to, and a kernel over the written values whose
store's index depends on the index tensor. Writes to the same element happen in order, so results are the same in
every run and for every number of threads; where eager does not define which of several values remains, the last one
does. Where a slice has at most one written element, one kernel over the result selects old or new values instead, also
for written slices; but not where an input is changed, which is then done in place (`schedule/in_place.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.capture.torch_compat import expr_of, fake_mode_of
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr, Mod, as_expr, floordiv, nonnegative, of_atom
from pellucid.ir.nodes import View
from pellucid.ir.ops import identity_of
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import KernelBuilder, Value, broadcast_index
from pellucid.lower.pointwise import check_fits
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments, op_name
from pellucid.lower.registry import NotLowered, rule
from pellucid.lower.shapes import check_ranks, checked_position, inside, is_view

# The IR's join for each reduction of `scatter_reduce` and `scatter`.
_JOINS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "maximum", "amin": "minimum"}
# Operators whose result is their first argument except for some elements.
_CHANGES = frozenset(
    "index_add index_copy index_fill scatter scatter_add scatter_reduce index_put unsafe_index_put slice_scatter"
    " select_scatter diagonal_scatter".split()
)


def _copied(graph: ProgramBuilder, node: torch.fx.Node, x: TensorRef) -> TensorRef:
    """A new buffer for the result of `node` with the elements of `x`."""
    result = graph.new(node.meta["val"], op_name(node))
    graph.copy(node, x, result)
    return result


def _changes_input(node: torch.fx.Node) -> bool:
    """Whether the result of an operator on an input, or on part of it, is written back to that input."""
    source: Any = node
    while source.op == "call_function" and (is_view(source) or op_name(source) in _CHANGES):
        source = source.args[0]
    stack = [node] if source.op == "placeholder" else []
    seen = set(stack)
    while stack:
        for user in stack.pop().users:
            if user.target is torch.ops.aten.copy_.default and user.args[0] is source:
                return True
            if op_name(user) in _CHANGES and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _constant(graph: ProgramBuilder, node: torch.fx.Node, number: float) -> TensorRef:
    """A new buffer for the result of `node`, filled with `number`."""
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    kernel.store(result.view, result.dtype, kernel.index, kernel.const(number, result.dtype))
    graph.emit(kernel)
    return result


def _check_join(join: str, dtype: DType) -> None:
    if join and dtype is DType.BOOL:
        raise NotLowered("joining bool elements")


# ------------------------------------------------------------------------------------- along one dimension


@rule("embedding_dense_backward.default")
def embedding_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The rows of the gradient, summed for each row of the table."""
    given = arguments(node, graph)
    grad, indices = given["grad_output"], given["indices"]
    if given["scale_grad_by_freq"]:
        raise NotLowered("gradients that are divided by the number of lookups of a row")
    result = _constant(graph, node, 0)
    kernel = graph.kernel(node, grad.shape)
    row = checked_position(graph, kernel, indices, kernel.index[:-1], result, 0, wrap=False)
    value = kernel.load(grad.view, grad.dtype, kernel.index)
    padding = given["padding_idx"]
    if not isinstance(padding, int) or padding >= 0:
        looked_up = kernel.load(indices.view, indices.dtype, kernel.index[:-1]).to(DType.I64)
        value = kernel.where(looked_up.op("eq", kernel.size_value(as_expr(padding), DType.I64)), 0, value)
    kernel.store(result.view, result.dtype, (row, kernel.index[-1]), value, join="add")
    graph.emit(kernel)
    return result


@rule("index_add.default", "index_copy.default", "index_fill.int_Scalar", "index_fill.int_Tensor")
def index_along(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Write whole slices along a dimension, one for each element of a vector of positions."""
    given = arguments(node, graph)
    x, indices = given["self"], given["index"]
    join = "add" if op_name(node) == "index_add" else ""
    _check_join(join, x.dtype)
    source = given["source"] if "source" in given else given["value"]
    check_ranks(op_name(node), x, source if op_name(node) == "index_add" else None)
    dim = given["dim"] % len(x.shape)
    count = indices.shape[0] if indices.shape else ONE
    alpha = given.get("alpha", 1)
    for number in (source, alpha):
        if not isinstance(number, TensorRef):
            check_fits(number, x.dtype)
    result = _copied(graph, node, x)
    kernel = graph.kernel(node, (*x.shape[:dim], count, *x.shape[dim + 1 :]))
    at = (kernel.index[dim],) if indices.shape else ()
    position = checked_position(graph, kernel, indices, at, x, dim, wrap=op_name(node) == "index_fill")
    value = _source(kernel, source, x.dtype, kernel.index if isinstance(source, TensorRef) and source.shape else ())
    if alpha != 1:
        value = value * kernel.const(alpha, x.dtype)
    index = tuple(position if d == dim else i for d, i in enumerate(kernel.index))
    kernel.store(result.view, result.dtype, index, value, join=join)
    graph.emit(kernel)
    return result


@rule("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add.default",
      "scatter_reduce.two")  # fmt: skip
def scatter(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Write one element along a dimension for each element of a tensor of positions."""
    given = arguments(node, graph)
    x, indices = given["self"], given["index"]
    source = given["src"] if "src" in given else given["value"]
    reduction = given.get("reduce", "sum" if op_name(node) == "scatter_add" else "")
    if reduction == "mean":
        raise NotLowered("the mean of scattered elements")
    join = _JOINS[reduction] if reduction else ""
    _check_join(join, x.dtype)
    check_ranks("scatter", x, indices, source)
    if not isinstance(source, TensorRef):
        check_fits(source, x.dtype)
    dim = given["dim"] % len(x.shape)
    overwrite = not given.get("include_self", True)
    whole = all(d == dim or i == n for d, (i, n) in enumerate(zip(indices.shape, x.shape, strict=True)))
    if _by_selection(graph, node, whole and indices.shape[dim] == ONE and x.shape[dim] != ZERO and not overwrite):

        def found(kernel: KernelBuilder) -> tuple[Value, Value]:
            at = tuple(ZERO if d == dim else i for d, i in enumerate(kernel.index))
            wanted = kernel.load(indices.view, indices.dtype, at)
            return kernel.check_index(wanted, x.shape[dim], dim, wrap=False), _source(kernel, source, x.dtype, at)

        return _select(graph, node, x, dim, join, found)
    result = _copied(graph, node, x)
    if overwrite:
        _scatter_into(graph, node, result, indices, identity_of(join, x.dtype), dim, "")
    _scatter_into(graph, node, result, indices, source, dim, join)
    return result


def _by_selection(graph: ProgramBuilder, node: torch.fx.Node, single: bool) -> bool:
    """Whether a scatter is computed by a selection for each element: where each row has exactly one index.

    Then the result is written once, as the copy that a scatter begins with would be, and is fused with its readers.
    """
    why = "one index per row: each element is the written value if the index is its own, else the old value"
    if not single:
        why = "there is not exactly one index per row: values are written to a copy, in order"
    elif _changes_input(node):
        single, why = False, "an input changes: values are written in place"
    return graph.decide(Decision("lower.scatter", (node.name,), single, why)).ok


def _select(
    graph: ProgramBuilder,
    node: torch.fx.Node,
    x: TensorRef,
    dim: int,
    join: str,
    found: Callable[[KernelBuilder], tuple[Value, Value]],
) -> Result:
    """One written element per row along `dim`: result = where(position == index, value, x).

    found: the index and the value for the row of a point.
    """
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    wanted, new = found(kernel)
    old = kernel.load(x.view, x.dtype, kernel.index)
    new = old.op(join, new) if join else new
    kernel.store(
        result.view,
        result.dtype,
        kernel.index,
        kernel.where(kernel.position(kernel.index[dim]).op("eq", wanted), new, old),
    )
    graph.emit(kernel)
    return result


def _scatter_into(
    graph: ProgramBuilder, node: torch.fx.Node, result: TensorRef, indices: TensorRef, source: Any, dim: int, join: str
) -> None:
    kernel = graph.kernel(node, indices.shape)
    position = checked_position(graph, kernel, indices, kernel.index, result, dim, wrap=False)
    value = _source(kernel, source, result.dtype, kernel.index)
    index = tuple(position if d == dim else i for d, i in enumerate(kernel.index))
    kernel.store(result.view, result.dtype, index, value, join=join)
    graph.emit(kernel)


def _source(kernel: KernelBuilder, source: TensorRef | float, dtype: DType, index: Sequence[Expr]) -> Value:
    """The written value at `index`: an element of a tensor, or a number."""
    if isinstance(source, TensorRef):
        return kernel.load(source.view, source.dtype, index).to(dtype)
    return kernel.const(source, dtype)


# --------------------------------------------------------------------------------- along several dimensions


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """`x[i, j, :, k] = values`: index tensors are broadcast together, and values to the shape that they select."""
    given = arguments(node, graph)
    x, values = given["self"], given["values"]
    indices: list[TensorRef | None] = list(given["indices"])
    join = "add" if given["accumulate"] else ""
    _check_join(join, x.dtype)
    if any(index is not None and index.dtype in (DType.BOOL, DType.U8) for index in indices):
        return _masked_put(graph, node, x, indices, values, join)
    indices += [None] * (len(x.shape) - len(indices))
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if not indexed:
        raise NotLowered("index_put without an index")
    shared = _broadcast_shape([index.shape for index in indices if index is not None])
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    first = indexed[0] if adjacent else 0
    rest = [extent for extent, index in zip(x.shape, indices, strict=True) if index is None]
    kernel = graph.kernel(node, (*rest[:first], *shared, *rest[first:]))
    coordinates = kernel.index[first : first + len(shared)]
    others = iter([*kernel.index[:first], *kernel.index[first + len(shared) :]])
    index: list[Expr] = []
    for d, given_index in enumerate(indices):
        if given_index is None:
            index.append(next(others))
        else:
            at = broadcast_index(given_index.shape, coordinates)
            index.append(checked_position(graph, kernel, given_index, at, x, d, wrap=True))
    row = _row_of(kernel, index, x)
    if _by_selection(graph, node, row is not None):
        assert row is not None
        dim, chosen = row.dim, indices[row.dim]
        assert chosen is not None

        def found(kernel: KernelBuilder) -> tuple[Value, Value]:
            at = row.point(kernel)
            place = broadcast_index(chosen.shape, at[first : first + len(shared)])
            wanted = kernel.check_index(kernel.load(chosen.view, chosen.dtype, place), x.shape[dim], dim, wrap=True)
            return wanted, kernel.load(values.view, values.dtype, broadcast_index(values.shape, at)).to(x.dtype)

        return _select(graph, node, x, dim, join, found)
    result = _copied(graph, node, x)
    value = kernel.load(values.view, values.dtype, broadcast_index(values.shape, kernel.index))
    kernel.store(result.view, result.dtype, index, value, join=join)
    graph.emit(kernel)
    return result


@dataclass(frozen=True, slots=True)
class _Row:
    """The rows of a tensor along `dim`, if a scatter has exactly one point for each.

    counted: for each dimension of the scatter's space, the dimension of the tensor that it runs over, if any.
    """

    dim: int
    counted: tuple[int | None, ...]

    def point(self, kernel: KernelBuilder) -> tuple[Expr, ...]:
        """The scatter's point for the row that contains the current point of `kernel`, which is over the tensor."""
        return tuple(ZERO if dim is None else kernel.index[dim] for dim in self.counted)


def _row_of(kernel: KernelBuilder, index: Sequence[Expr], x: TensorRef) -> _Row | None:
    """The rows, if a single index depends on values and each other index runs over its whole dimension."""
    dims = [d for d, each in enumerate(index) if each.vals()]
    if len(dims) != 1 or x.shape[dims[0]] == ZERO:
        return None
    others = [d for d, extent in enumerate(x.shape) if d != dims[0] and extent != ONE]
    counts = {index[d]: d for d in others}
    counted = tuple(counts.get(i) if i != ZERO else None for i in kernel.index)
    through = [d for d, extent in zip(counted, kernel.shape, strict=True) if d is not None and extent == x.shape[d]]
    return _Row(dims[0], counted) if sorted(through) == others and len(others) == len(kernel.space) else None


def _broadcast_shape(shapes: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
    """The shape of tensors of these shapes broadcast together."""
    rank = max(len(shape) for shape in shapes)
    padded = [(*([ONE] * (rank - len(shape))), *shape) for shape in shapes]
    return tuple(next((extent for extent in extents if extent != ONE), ONE) for extents in zip(*padded, strict=True))


def _masked_put(
    graph: ProgramBuilder,
    node: torch.fx.Node,
    x: TensorRef,
    indices: Sequence[TensorRef | None],
    values: TensorRef,
    join: str,
) -> Result:
    """`x[mask] = number`: a selection for each element."""
    masks = [(d, index) for d, index in enumerate(indices) if index is not None]
    dim, mask = masks[0]
    if len(masks) > 1 or mask.dtype is not DType.BOOL or any(extent != ONE for extent in values.shape):
        raise NotLowered("indexing by a mask: the number of elements that it selects depends on the data")
    if mask.shape != x.shape[dim : dim + len(mask.shape)]:
        raise NotLowered("indexing by a mask of another shape: ATen reports the error")
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    chosen = kernel.load(mask.view, mask.dtype, kernel.index[dim : dim + len(mask.shape)])
    old = kernel.load(x.view, x.dtype, kernel.index)
    new = kernel.load(values.view, values.dtype, (ZERO,) * len(values.shape)).to(x.dtype)
    new = old.op(join, new) if join else new
    kernel.store(result.view, result.dtype, kernel.index, kernel.where(chosen, new, old))
    graph.emit(kernel)
    return result


# ------------------------------------------------------------------------------------------------ into views


def _write_part(
    graph: ProgramBuilder,
    node: torch.fx.Node,
    result: TensorRef,
    source: TensorRef,
    strides: tuple[Expr, ...],
    offset: Expr,
) -> TensorRef:
    """Write `source` to the view of `result` with this offset and these strides; return `result`."""
    part = View(result.view.buffer, source.shape, strides, offset)
    kernel = graph.kernel(node, source.shape)
    value = kernel.load(source.view, source.dtype, kernel.index).to(result.dtype)
    kernel.store(part, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


@rule("slice_scatter.default")
def slice_scatter(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """A selection for each element: the source's inside the slice, else the old one."""
    given = arguments(node, graph)
    x, source = given["self"], given["src"]
    dim, step = given["dim"] % len(x.shape), given["step"]
    start = _start_of_slice(node, dim)
    if _changes_input(node):
        result = _copied(graph, node, x)
        steps = result.view.strides
        strides = (*steps[:dim], steps[dim] * step, *steps[dim + 1 :])
        return _write_part(graph, node, result, source, strides, steps[dim] * start)
    result = graph.new(node.meta["val"], "slice_scatter")
    kernel = graph.kernel(node, result.shape)
    position = kernel.index[dim]
    end = start + (source.shape[dim] - 1) * step + 1 if step != 1 else start + source.shape[dim]
    mask = inside(kernel, position, start, end, x.shape[dim])
    index = position - start
    if step != 1:
        hit = kernel.position(of_atom(Mod(index, ONE * step))).op("eq", 0)
        mask = hit if mask is None else mask & hit
        index = floordiv(index, ONE * step)
    value = kernel.load(
        source.view, source.dtype, tuple(index if d == dim else i for d, i in enumerate(kernel.index)), mask
    ).to(result.dtype)
    if mask is not None:
        value = kernel.where(mask, value, kernel.load(x.view, x.dtype, kernel.index))
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


def _start_of_slice(node: torch.fx.Node, dim: int) -> Expr:
    """The start of a slice, with PyTorch's handling of symbolic bounds that count from the end, or are past it."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    bounds = (values.get("start"), values.get("end"), values.get("step", 1))
    numbers = [number.meta["val"] if isinstance(number, torch.fx.Node) else number for number in bounds]
    with fake_mode_of(node.graph) or nullcontext():
        line = torch.empty(node.meta["val"].shape[dim], device="meta")
        return expr_of(torch.ops.aten.slice.Tensor(line, 0, *numbers).storage_offset())


@rule("select_scatter.default")
def select_scatter(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """A selection for each element: the source's at one position, else the old one."""
    given = arguments(node, graph)
    x, source = given["self"], given["src"]
    dim, chosen = given["dim"] % len(x.shape), as_expr(given["index"])
    if not nonnegative(chosen):
        chosen = chosen + x.shape[dim]
        if not nonnegative(chosen):
            raise NotLowered("a dynamic position that may count from the end")
    if _changes_input(node):
        result = _copied(graph, node, x)
        steps = result.view.strides
        return _write_part(graph, node, result, source, steps[:dim] + steps[dim + 1 :], steps[dim] * chosen)
    result = graph.new(node.meta["val"], "select_scatter")
    kernel = graph.kernel(node, result.shape)
    here = kernel.position(kernel.index[dim]).op("eq", kernel.size_value(chosen, DType.I64))
    index = kernel.index[:dim] + kernel.index[dim + 1 :]
    new = kernel.load(source.view, source.dtype, index).to(result.dtype)
    old = kernel.load(x.view, x.dtype, kernel.index)
    kernel.store(result.view, result.dtype, kernel.index, kernel.where(here, new, old))
    graph.emit(kernel)
    return result


@rule("diagonal_scatter.default")
def diagonal_scatter(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """A copy, and then the source written to its diagonal."""
    given = arguments(node, graph)
    x, source, offset = given["self"], given["src"], given["offset"]
    if isinstance(offset, Expr):
        raise NotLowered("a diagonal at a dynamic offset")
    first, second = given["dim1"] % len(x.shape), given["dim2"] % len(x.shape)
    result = _copied(graph, node, x)
    steps = result.view.strides
    others = tuple(step for d, step in enumerate(steps) if d not in (first, second))
    start = steps[second] * offset if offset >= 0 else steps[first] * -offset
    return _write_part(graph, node, result, source, (*others, steps[first] + steps[second]), start)
