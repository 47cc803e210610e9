"""Which parts of its operands are needed for a part of a call's result, along one dimension; which calls are linear."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

_VIEWS = ("view", "_unsafe_view", "reshape")
_REDUCTIONS = ("sum", "amax", "amin", "mean", "argmax", "argmin")
_SAME_SIZES = ("_softmax", "_log_softmax", "gather", "scatter")
# Element-wise calls (with broadcasting) in addition to those that PyTorch tags as pointwise.
_ELEMENTWISE = ("expand", "full", "full_like", "clone", "_to_copy", "detach", "alias", "where", "masked_fill")

# Calls that are linear in the first argument; in one of two; jointly in these arguments, the others of them being zero.
_LINEAR_IN_FIRST = frozenset(
    "neg.default expand.default clone.default _to_copy.default detach.default alias.default view.default "
    "_unsafe_view.default reshape.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims t.default "
    "transpose.int permute.default slice.Tensor sum.default sum.dim_IntList mean.default mean.dim div.Tensor "
    "div.Scalar mul.Scalar gather.default".split()
)
_LINEAR_IN_ONE = ("mul.Tensor", "mm.default")
_LINEAR_IN_ALL = {
    "add.Tensor": (0, 1), "sub.Tensor": (0, 1), "where.self": (1, 2), "scatter.src": (0, 3), "scatter.value": (0, 3),
    "slice_scatter.default": (0, 1),
}  # fmt: skip
# Floating-point types, whose values can be scaled: integers overflow or are truncated.
_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = ("full", "scalar_tensor", "full_like")


class NotInParts(Exception):
    """A part of the result needs all of an operand, or a rule is missing; the text says which."""


def _operator(node: Node) -> str:
    """The name of the ATen operator that a node calls, without its overload; empty for other calls."""
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" else ""


def shape_of(node: Node) -> tuple[int, ...]:
    """The sizes of the tensor that a node returns; empty if it returns no tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def operands_along(node: Node, dim: int) -> list[tuple[Node, int | None]]:
    """For each operand, its dimension that corresponds to `dim` of the result; None if every part needs all of it.

    Raises `NotInParts` where a part of the result cannot be computed from such parts.
    """
    name, args, rank = _operator(node), node.args, len(shape_of(node))
    tensors = node.all_input_nodes
    if not all(isinstance(each.meta.get("val"), torch.Tensor) for each in tensors):
        raise NotInParts(f"{node.name} reads a number that is not known when it is compiled")
    match name:
        case "mm" | "addmm":
            *bias, left, right = map(_node, args)
            product = [(left, 0), (right, None)] if dim == 0 else [(left, None), (right, 1)]
            return [*((each, _broadcast(each, node, dim)) for each in bias), *product]
        case "t":
            return [(tensors[0], 1 - dim)]
        case "transpose":
            swapped = [cast(int, each) % rank for each in args[1:3]]
            return [(tensors[0], swapped[1 - swapped.index(dim)] if dim in swapped else dim)]
        case "permute":
            return [(tensors[0], cast(Sequence[int], args[1])[dim] % rank)]
        case "unsqueeze" if args[1] % rank != dim:  # type: ignore[operator]
            return [(tensors[0], dim - (dim > args[1] % rank))]  # type: ignore[operator]
        case "squeeze" if (kept := _kept(node)) is not None and len(kept) == rank:
            return [(tensors[0], kept[dim])]
        case _ if name in _VIEWS and dim == _outermost(shape_of(node)):
            return [(tensors[0], _outermost(shape_of(tensors[0])))]
        case "slice" | "slice_scatter" if _argument(node, "dim", 0) % rank != dim:
            return [(each, dim) for each in tensors]
        case _ if name in _REDUCTIONS and (kept := _kept(node)) is not None and kept[dim] is not None:
            return [(tensors[0], kept[dim])]
        case _ if name in _SAME_SIZES and args[1] % rank != dim:  # type: ignore[operator]
            if all(shape_of(each)[dim] == shape_of(node)[dim] for each in tensors):
                return [(each, dim) for each in tensors]
        case _ if name in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return [(each, _broadcast(each, node, dim)) for each in tensors]
    raise NotInParts(f"{node.name} ({name or node.target}) is not computed from parts of rows")


def summed(node: Node, dims: dict[Node, int]) -> list[tuple[Node, int | None]] | None:
    """Like `operands_along`, for a call that sums over all parts; None for others. dims: those of operands in parts."""
    name, args = _operator(node), node.args
    if name == "mm" and (dims.get(_node(args[0])) == 1 or dims.get(_node(args[1])) == 0):
        return [(_node(args[0]), 1), (_node(args[1]), 0)]
    if name == "sum":
        x = _node(args[0])
        kept = _kept(node)
        if kept is None or dims[x] not in kept:
            return [(x, dims[x])]
    return None


def resized(node: Node, dim: int, size: int) -> tuple[Any, ...]:
    """The arguments of a call, changed so that its result has `size` elements along `dim`."""
    shape = [size if number == dim else each for number, each in enumerate(shape_of(node))]
    name = _operator(node)
    if name == "full":
        return shape, *node.args[1:]
    return (node.args[0], shape) if name in ("expand", *_VIEWS) else node.args


def is_linear(node: Node, variable: Collection[Node]) -> bool:
    """Whether a call reads some of `variable` and its result scales with them: f(s * x) = s * f(x)."""
    given = [k for k, each in enumerate(node.args) if not set(_nodes(each)).isdisjoint(variable)]
    value = node.meta.get("val")
    if not given or not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
        return False
    name = str(node.target).removeprefix("aten.")
    if name in _LINEAR_IN_FIRST:
        return given == [0]
    if name in _LINEAR_IN_ONE:
        return len(given) == 1
    positions = _LINEAR_IN_ALL.get(name, ())
    return set(given) <= set(positions) and all(_is_zero(node.args[k]) for k in positions if k not in given)


def _is_zero(value: Any) -> bool:
    """Whether a value is known to be zero everywhere."""
    if not isinstance(value, Node):
        return isinstance(value, int | float) and value == 0
    name = _operator(value)
    if name in ("expand", "view", "_unsafe_view", "unsqueeze", "clone", "_to_copy"):
        return _is_zero(value.args[0])
    if name in ("zeros", "zeros_like"):
        return True
    return name in _NUMBERS and _is_zero(value.args[0 if name == "scalar_tensor" else 1])


def _kept(node: Node) -> list[int | None] | None:
    """For each dimension of a reduction's result, the operand's, None for a reduced one; None if all are reduced."""
    rank = len(shape_of(_node(node.args[0])))
    given = node.args[1] if len(node.args) > 1 else ()
    reduced = {each % rank for each in ([given] if isinstance(given, int) else given or ())}  # type: ignore[union-attr,operator]
    if not reduced:
        return None
    if len(node.args) > 2 and node.args[2]:
        return [None if each in reduced else each for each in range(rank)]
    return [each for each in range(rank) if each not in reduced]


def _outermost(shape: tuple[int, ...]) -> int | None:
    """The first dimension with more than one element: all views of a tensor have the same parts along it."""
    return next((dim for dim, size in enumerate(shape) if size != 1), None)


def _broadcast(operand: Node, node: Node, dim: int) -> int | None:
    """The dimension of an operand that is broadcast to `dim` of the result; None if it has only one element there."""
    own = dim - (len(shape_of(node)) - len(shape_of(operand)))
    return None if own < 0 or shape_of(operand)[own] == 1 else own


def _argument(node: Node, name: str, default: Any) -> Any:
    """The argument of that name, passed by position or by keyword."""
    schema = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    position = schema.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(value, lambda each: found.append(each))
    return found
