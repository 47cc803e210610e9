"""Verifies what lowering assumes: views in a captured graph have the strides and offsets their operators define."""

from __future__ import annotations

import operator

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.relayout import Numbers, in_every_call, sizes_depend_on_data
from pellucid.capture.torch_compat import quiet_fake_tensors, stride_of, without_guards
from pellucid.capture.transform import aliases
from pellucid.errors import InternalError
from pellucid.ir.index import Expr


def verify_views(graph: torch.fx.Graph) -> None:
    """Raise InternalError unless sizes, strides and offset of each view follow from its argument's.

    Lowering uses the strides and offset captured for a view. A pass that replaces its argument must keep the storage
    offset, or views read other elements. Graphs whose sizes depend on data are not checked: these cannot be compared.
    """
    if sizes_depend_on_data(graph):
        return
    with without_guards(graph):
        for node in graph.nodes:
            if aliases(node) and node.target is not operator.getitem and not node.target._schema.is_mutable:
                _verify_view(node)


def _verify_view(node: torch.fx.Node) -> None:
    captured = [_position_in_memory(each) for each in pytree.tree_leaves(node.meta["val"])]
    args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda each: each.meta["val"], (node.args, node.kwargs))
    try:
        with quiet_fake_tensors(), torch.no_grad():
            found = [_position_in_memory(each) for each in pytree.tree_leaves(node.target(*args, **kwargs))]  # type: ignore[operator]
    except (RuntimeError, ValueError) as error:
        raise InternalError(f"{node.format_node()}: its argument has no such view: {error}") from error
    if found != captured:
        what = "sizes, strides and offset"
        raise InternalError(f"{node.format_node()}: {what} captured as {captured}; of its argument they are {found}")


def _position_in_memory(value: torch.Tensor) -> tuple[Numbers, Numbers, int | Expr]:
    (start,) = in_every_call((value.storage_offset(),))
    return in_every_call(value.shape), in_every_call(value.stride(), stride_of), start
