"""Lowers operators that move elements: views, concatenation, padding, indexing; and that create them: full, arange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from pellucid.ir.derived import Float
from pellucid.ir.index import ONE, ZERO, Expr, Mod, as_expr, in_range, of_atom, val
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import KernelBuilder, Value, broadcast_index, offset_of
from pellucid.lower.pointwise import check_fits
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments, op_name
from pellucid.lower.registry import NotLowered, rule

# Views that change values: their tensors have a flag instead of other elements, or resolve such a flag.
_LAZY = ("aten._conj.default", "aten._neg_view.default", "aten.resolve_conj.default")


def is_view(node: torch.fx.Node) -> bool:
    """True if the operator's results are declared to be views of its first argument, with the same elements."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if str(target) == "aten._unsafe_view.default":
        return True
    if str(target) in _LAZY:
        return False
    returns = target._schema.returns
    return (
        bool(returns)
        and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)
        and _keeps_dtype(node)
    )


def _keeps_dtype(node: torch.fx.Node) -> bool:
    source, result = node.args[0], node.meta.get("val")
    results = result if isinstance(result, list | tuple) else [result]
    return (
        isinstance(source, torch.fx.Node)
        and isinstance(source.meta.get("val"), torch.Tensor)
        and all(isinstance(r, torch.Tensor) and r.dtype == source.meta["val"].dtype for r in results)
    )


def lower_view(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """All view operators: the same buffer with the sizes and strides of eager's result."""
    base: TensorRef = graph.value(node.args[0])
    meta = node.meta["val"]
    if isinstance(meta, list | tuple):
        return tuple(graph.alias(base, item) for item in meta)
    return graph.alias(base, meta)


@rule("full.default", "scalar_tensor.default", "full_like.default", "empty.memory_format", "empty_strided.default",
      "empty_like.default", "empty_permuted.default", floats=True)  # fmt: skip
def full(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """A constant. Memory that eager leaves uninitialised is 0 here, so that runs can be compared."""
    deterministic: Any = torch.utils.deterministic
    filled = torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory
    if filled and op_name(node).startswith("empty"):
        raise NotLowered("eager fills uninitialised memory while deterministic algorithms are enabled")
    given = arguments(node, graph)
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    fill = given.get("fill_value", given.get("s", 0))
    if isinstance(fill, Float):
        value = kernel.load(graph.float_ref(fill).view, DType.F64, ())
    else:
        check_fits(fill, result.dtype)
        value = kernel.const(fill, result.dtype)
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


@rule("arange.default", "arange.start", "arange.start_step", "iota.default")
def arange(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """start + i * step; floats are computed in eager's accumulation type."""
    given = arguments(node, graph)
    start, step = given.get("start", 0), given.get("step", 1)
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    position = kernel.index[0]
    if result.dtype.is_float:
        accumulate = DType.F64
        value = kernel.position(position).to(accumulate) * kernel.const(step, accumulate)
        value = value + kernel.const(start, accumulate)
    else:
        value = kernel.position(as_expr(start) + position * as_expr(step))
        graph.counters[result.view.buffer] = as_expr(start), as_expr(step)
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


def inside(kernel: KernelBuilder, position: Expr, low: Expr, high: Expr, extent: Expr) -> Value | None:
    """The condition `low <= position < high`, where `0 <= position < extent` is known; None if it always holds."""
    conditions: list[Value] = []
    if low != ZERO:
        conditions.append(kernel.position(position) >= kernel.size_value(low, DType.I64))
    if high != extent:
        conditions.append(kernel.position(position) < kernel.size_value(high, DType.I64))
    return reduce(lambda a, b: a & b, conditions) if conditions else None


def _moved(
    graph: ProgramBuilder, kernel: KernelBuilder, result: TensorRef, source: TensorRef, index: Sequence[Expr]
) -> TensorRef:
    """Finish a kernel that stores the element of `source` at `index`."""
    kernel.store(result.view, result.dtype, kernel.index, kernel.load(source.view, source.dtype, index))
    graph.emit(kernel)
    return result


@rule("cat.default")
def cat(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """One kernel that loads each element from the tensor whose part of the dimension contains it."""
    given = arguments(node, graph)
    # A tensor of shape (0,) is skipped by eager whatever the others' rank is.
    tensors = [t for t in given["tensors"] if len(t.shape) != 1 or t.shape[0] != ZERO]
    result = graph.new(node.meta["val"], "cat")
    if len(tensors) > 16:
        raise NotLowered(f"cat of {len(tensors)} tensors: a masked load of each would cost more than it saves")
    kernel = graph.kernel(node, result.shape)
    dim = given["dim"] % len(result.shape)
    pieces: list[tuple[Value | None, Value]] = []
    start = ZERO
    for tensor in tensors:
        end = start + tensor.shape[dim]
        mask = inside(kernel, kernel.index[dim], start, end, result.shape[dim])
        index = tuple(i - start if d == dim else i for d, i in enumerate(kernel.index))
        piece = kernel.load(tensor.view, tensor.dtype, index, mask)
        pieces.append((mask, piece if tensor.dtype is result.dtype else kernel.convert(piece, result.dtype)))
        start = end
    value = pieces[-1][1] if pieces else kernel.const(0, result.dtype)
    for mask, piece in reversed(pieces[:-1]):
        value = piece if mask is None else kernel.where(mask, piece, value)
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


@rule("constant_pad_nd.default")
def constant_pad(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    x: TensorRef = given["self"]
    check_fits(given["value"], x.dtype)
    result = graph.new(node.meta["val"], "pad")
    kernel = graph.kernel(node, result.shape)
    padding = [as_expr(p) for p in given["pad"]]
    before = {len(x.shape) - 1 - k: padding[2 * k] for k in range(len(padding) // 2)}
    masks: list[Value] = []
    index = list(kernel.index)
    for dim, low in before.items():
        mask = inside(kernel, index[dim], low, low + x.shape[dim], result.shape[dim])
        masks += [] if mask is None else [mask]
        index[dim] = index[dim] - low
    mask = reduce(lambda a, b: a & b, masks) if masks else None
    value = kernel.load(x.view, x.dtype, index, mask, given["value"])
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


@rule("flip.default")
def flip(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    x: TensorRef = given["self"]
    dims = {d % len(x.shape) for d in given["dims"]} if x.shape else set()
    result = graph.new(node.meta["val"], "flip")
    kernel = graph.kernel(node, result.shape)
    index = tuple(x.shape[d] - 1 - i if d in dims and x.shape[d] != ONE else i for d, i in enumerate(kernel.index))
    return _moved(graph, kernel, result, x, index)


@rule("repeat.default")
def repeat(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Coordinates modulo the size of the repeated tensor."""
    x: TensorRef = graph.value(node.args[0])
    result = graph.new(node.meta["val"], "repeat")
    kernel = graph.kernel(node, result.shape)
    lead = len(result.shape) - len(x.shape)
    index = tuple(
        i if extent == whole else ZERO if extent == ONE else of_atom(Mod(i, extent))
        for i, extent, whole in zip(kernel.index[lead:], x.shape, result.shape[lead:], strict=True)
    )
    return _moved(graph, kernel, result, x, index)


# Indexing by tensors.


def checked_position(
    graph: ProgramBuilder,
    kernel: KernelBuilder,
    index: TensorRef,
    at: Sequence[Expr],
    x: TensorRef,
    dim: int,
    *,
    wrap: bool,
) -> Expr:
    """The element of an index tensor, checked to be inside dimension `dim` of `x`, as an index expression.

    An element of an `arange` is known, and is neither loaded nor checked.
    """
    if index.dtype not in (DType.I64, DType.I32):
        raise NotLowered(f"ATen accepts no indices of {index.dtype.value}: it reports the error")
    for i, extent in zip(kernel.index, kernel.shape, strict=True):
        if extent == ZERO:
            return i  # nothing is looked up, so nothing can be out of range
    if index.view.buffer in graph.counters:
        start, step = graph.counters[index.view.buffer]
        position = start + step * offset_of(index.view, at)
        if in_range(position, x.shape[dim], kernel.ranges):
            return position
    loaded = kernel.load(index.view, index.dtype, at)
    return val(kernel.check_index(loaded, x.shape[dim], dim, wrap=wrap).name)


def check_ranks(what: str, x: TensorRef, *others: object) -> None:
    """Leave to ATen operators along a dimension of `x` with tensors of other ranks: zero-dim and empty ones."""
    for each in (x, *others):
        if isinstance(each, TensorRef) and (not each.shape or len(each.shape) != len(x.shape)):
            raise NotLowered(f"{what} of tensors of ranks {len(x.shape)} and {len(each.shape)}")


@rule("embedding.default")
def embedding(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    weight, indices = graph.value(node.args[0]), graph.value(node.args[1])
    result = graph.new(node.meta["val"], "embedding")
    kernel = graph.kernel(node, result.shape)
    row = checked_position(graph, kernel, indices, kernel.index[:-1], weight, 0, wrap=False)
    return _moved(graph, kernel, result, weight, (row, kernel.index[-1]))


@rule("index_select.default")
def index_select(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    x, indices = given["self"], given["index"]
    if not x.shape:
        raise NotLowered("index_select of a zero-dimensional tensor")
    dim = given["dim"] % len(x.shape)
    result = graph.new(node.meta["val"], "index_select")
    kernel = graph.kernel(node, result.shape)
    at = (kernel.index[dim],) if indices.shape else ()
    position = checked_position(graph, kernel, indices, at, x, dim, wrap=False)
    index = tuple(position if d == dim else i for d, i in enumerate(kernel.index))
    return _moved(graph, kernel, result, x, index)


@rule("gather.default")
def gather(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    x, indices = given["self"], given["index"]
    check_ranks("gather", x, indices)
    dim = given["dim"] % len(x.shape)
    result = graph.new(node.meta["val"], "gather")
    kernel = graph.kernel(node, result.shape)
    position = checked_position(graph, kernel, indices, kernel.index, x, dim, wrap=False)
    index = tuple(position if d == dim else i for d, i in enumerate(kernel.index))
    return _moved(graph, kernel, result, x, index)


@rule("index.Tensor")
def index_tensor(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """`x[i, j, :, k]`: index tensors are broadcast together; if they are not adjacent, their dimensions come first."""
    x: TensorRef = graph.value(node.args[0])
    given: list[TensorRef | None] = list(graph.value(node.args[1]))
    given += [None] * (len(x.shape) - len(given))
    if any(index is not None and index.dtype in (DType.BOOL, DType.U8) for index in given):
        raise NotLowered("indexing by a mask: the size of the result depends on the data")
    result = graph.new(node.meta["val"], "index")
    kernel = graph.kernel(node, result.shape)
    indexed = [d for d, index in enumerate(given) if index is not None]
    rank = max((len(given[d].shape) for d in indexed), default=0)  # type: ignore[union-attr]
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed))) if indexed else True
    first = indexed[0] if indexed and adjacent else 0
    shared = kernel.index[first : first + rank]
    others = iter([*kernel.index[:first], *kernel.index[first + rank :]])
    coordinates: list[Expr] = []
    for d, index in enumerate(given):
        if index is None:
            coordinates.append(next(others))
        else:
            at = broadcast_index(index.shape, shared)
            coordinates.append(checked_position(graph, kernel, index, at, x, d, wrap=True))
    return _moved(graph, kernel, result, x, coordinates)
