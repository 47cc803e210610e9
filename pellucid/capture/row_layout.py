"""Sums of rows and columns: what is made of both lies row by row, where norms and products read rows.

Eager gives the result of an element-wise operator the order of its first operand. So a model that begins with a
transposed view, as of an image's pixels, carries that order through all of its residual additions.
"""

from __future__ import annotations

import torch

from pellucid.capture.fx import decide, reachable
from pellucid.capture.relayout import (
    ReadsElements,
    Refused,
    Relayout,
    check_graph,
    result_strides,
    sizes_depend_on_data,
    whole_operands,
)
from pellucid.capture.torch_compat import elementwise_strides, without_guards
from pellucid.capture.transform import aliases
from pellucid.ir.decision import Decision

aten = torch.ops.aten

_RULE = "transform.rows"
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_READ_ROWS = (
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    *(getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")),
)


def rows_first(
    graph_module: torch.fx.GraphModule, reads_elements: ReadsElements
) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """The graph with such sums lying row by row, or as it is; see the top of this file.

    reads_elements: see `Relayout`. Results of the graph have eager's strides.

    Before: `add(%columns, %rows)`, whose strides are those of `%columns`.
    After: `add(clone(%columns, memory_format=contiguous_format), %rows)`. The copy becomes a part of the addition.
    """
    graph = graph_module.graph
    with without_guards(graph):
        mixed = () if sizes_depend_on_data(graph) else tuple(node.name for node in graph.nodes if _mixed(node))
        if not mixed:
            return graph_module, ()
        try:
            check_graph(graph)
            relayout = _RowsFirst(graph_module, reads_elements)
            result = relayout.run()
        except Refused as refusal:
            return graph_module, (Decision(_RULE, mixed, False, str(refusal)),)
    if not relayout.turned:
        return graph_module, ()
    why = "rows are added to what eager keeps column by column, and norms or products read rows of the sums"
    return result, (Decision(_RULE, tuple(relayout.turned), True, why),)


def joint_rows_first(graph_module: torch.fx.GraphModule, reads_elements: ReadsElements) -> torch.fx.GraphModule:
    """The same for forward and backward as one graph. The decision stays with the first of the sums."""
    result, decisions = rows_first(graph_module, reads_elements)
    for decision in decisions:
        decide(next(node for node in result.graph.nodes if node.name in decision.subject), decision)
    return result


class _RowsFirst(Relayout):
    """Turns operands of sums. turned: the names of these sums."""

    def __init__(self, graph_module: torch.fx.GraphModule, reads_elements: ReadsElements) -> None:
        super().__init__(graph_module, reads_elements)
        self.turned: list[str] = []

    def lay_out(self, copy: torch.fx.Node, node: torch.fx.Node) -> bool:
        if not _mixed(copy) or not _rows_are_read(node):
            return False
        columns = {each for each in whole_operands(copy) if not _by_rows(each.meta["val"])}
        self.move(copy, [k for k, arg in enumerate(copy.args) if arg in columns], torch.contiguous_format)
        self.turned.append(node.name)
        return True

    def restored(self, value: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """A copy whose dimensions follow one another in memory as eager has them."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return super().restored(value, node)
        stride = node.meta["val"].stride()
        order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
        back = [order.index(dim) for dim in range(len(stride))]
        copy = self.called(aten.permute.default, value, node, order)
        copy = self.called(aten.clone.default, copy, node, memory_format=torch.contiguous_format)
        copy = self.called(aten.permute.default, copy, node, back)
        return copy if result_strides(copy) == result_strides(node) else super().restored(value, node)


def _mixed(node: torch.fx.Node) -> bool:
    """True for an element-wise call on rows and columns whose result lies by columns."""
    values = [each.meta["val"] for each in whole_operands(node)]
    if len(values) < 2 or not 2 <= values[0].dim() <= 3 or len({*map(_by_rows, values)}) == 1:
        return False
    return elementwise_strides(*values)[-1] != 1


def _by_rows(tensor: torch.Tensor) -> bool:
    return bool(tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def _rows_are_read(node: torch.fx.Node) -> bool:
    """Whether norms or products read what element-wise calls make of a result, and no convolution does."""
    passed = reachable([node], lambda each: [user for user in each.users if _passes(user)])
    readers = {user.target for each in passed for user in each.users}
    return not readers.isdisjoint(_READ_ROWS) and readers.isdisjoint(_CONVOLUTIONS)


def _passes(node: torch.fx.Node) -> bool:
    """True for a call that goes element by element, or moves elements at most."""
    return bool(whole_operands(node)) or aliases(node) or node.target is aten.clone.default
