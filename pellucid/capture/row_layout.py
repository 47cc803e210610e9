"""Makes element-wise results of row-major and column-major operands row-major, where norms and products read rows.

In eager mode the result of an element-wise operator has the dimension order of its first operand. So a model that
begins with a transposed view, as of an image's pixels, carries that order through all of its residual additions.
"""

from __future__ import annotations

import torch

from pellucid.capture.fx import decide, reachable
from pellucid.capture.relayout import (
    ReadsElements,
    Refused,
    Relayout,
    check_graph,
    elementwise_operands,
    result_strides,
    sizes_depend_on_data,
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
    """The graph with such sums row-major, or unchanged; see the top of this file.

    reads_elements: see `Relayout`. Results of the graph have eager's strides.

    Before: `add(%columns, %rows)`, whose strides are those of `%columns`.
    After: `add(clone(%columns, memory_format=contiguous_format), %rows)`. The copy becomes a part of the addition.
    """
    graph = graph_module.graph
    with without_guards(graph):
        mixed = () if sizes_depend_on_data(graph) else tuple(node.name for node in graph.nodes if _is_mixed(node))
        if not mixed:
            return graph_module, ()
        try:
            check_graph(graph)
            relayout = _RowsFirst(graph_module, reads_elements)
            result = relayout.run()
        except Refused as refusal:
            return graph_module, (Decision(_RULE, mixed, False, str(refusal)),)
    if not relayout.changed:
        return graph_module, ()
    why = "row-major tensors are added to column-major ones, and norms or products read rows of the sums"
    return result, (Decision(_RULE, tuple(relayout.changed), True, why),)


def joint_rows_first(graph_module: torch.fx.GraphModule, reads_elements: ReadsElements) -> torch.fx.GraphModule:
    """Like `rows_first`, for a joint graph. The decision is attached to the first of the sums."""
    result, decisions = rows_first(graph_module, reads_elements)
    for decision in decisions:
        decide(next(node for node in result.graph.nodes if node.name in decision.subject), decision)
    return result


class _RowsFirst(Relayout):
    """Makes operands of sums row-major. changed: the names of these sums."""

    def __init__(self, graph_module: torch.fx.GraphModule, reads_elements: ReadsElements) -> None:
        super().__init__(graph_module, reads_elements)
        self.changed: list[str] = []

    def lay_out(self, copy: torch.fx.Node, node: torch.fx.Node) -> bool:
        if not _is_mixed(copy) or not _rows_are_read(node):
            return False
        columns = {each for each in elementwise_operands(copy) if not _is_row_major(each.meta["val"])}
        self.relayout_arguments(copy, [k for k, arg in enumerate(copy.args) if arg in columns], torch.contiguous_format)
        self.changed.append(node.name)
        return True

    def restored(self, value: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """A copy whose dimensions have the same order in memory as in eager mode."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return super().restored(value, node)
        stride = node.meta["val"].stride()
        order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
        back = [order.index(dim) for dim in range(len(stride))]
        copy = self.called(aten.permute.default, value, node, order)
        copy = self.called(aten.clone.default, copy, node, memory_format=torch.contiguous_format)
        copy = self.called(aten.permute.default, copy, node, back)
        return copy if result_strides(copy) == result_strides(node) else super().restored(value, node)


def _is_mixed(node: torch.fx.Node) -> bool:
    """True for an element-wise call on row-major and column-major operands whose result is column-major."""
    values = [each.meta["val"] for each in elementwise_operands(node)]
    if len(values) < 2 or not 2 <= values[0].dim() <= 3 or len({*map(_is_row_major, values)}) == 1:
        return False
    return elementwise_strides(*values)[-1] != 1


def _is_row_major(tensor: torch.Tensor) -> bool:
    return bool(tensor.stride(-1) == 1 or tensor.shape[-1] == 1)


def _rows_are_read(node: torch.fx.Node) -> bool:
    """Whether norms or products, but no convolutions, read a result, directly or through element-wise calls."""
    reached = reachable([node], lambda each: [user for user in each.users if _keeps_layout(user)])
    readers = {user.target for each in reached for user in each.users}
    return not readers.isdisjoint(_READ_ROWS) and readers.isdisjoint(_CONVOLUTIONS)


def _keeps_layout(node: torch.fx.Node) -> bool:
    """True for an element-wise call, a view or a copy."""
    return bool(elementwise_operands(node)) or aliases(node) or node.target is aten.clone.default
