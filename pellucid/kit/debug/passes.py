"""Check that a backend's graph passes preserve semantics: compare the results of nodes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pellucid.kit.judge.judge import near
from pellucid.kit.judge.vary import change_in_place
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, is_random, mutates, values_of


def first_changed(graph: Graph, passed: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The first operators whose results graph passes changed, operators that they removed first.

    Else the first operator whose side effect they dropped; empty where nothing changed.
    """
    nodes = {node.name: node for node in graph.module.graph.nodes if node.op == "call_function"}
    remaining = {node.name for node in passed.graph.nodes}
    inputs = copied(graph.inputs)
    for _ in range(2):  # the second time with other values in the same memory, as a pass may have folded the first
        before = values_of(graph.module, copied(inputs), lambda node: not is_random(node))
        after = values_of(passed, inputs, lambda node: not is_random(node))
        for name, value in after.items():
            if name in before and not agree(value, before[name]):
                return _unexplained(_with_removed(nodes[name], remaining), before, list(after.values())) or [
                    nodes[name]
                ]
        if not change_in_place(inputs):
            break
    effects = (node for node in nodes.values() if mutates(node))
    dropped = next((node for node in effects if node.name not in remaining), None)
    return [] if dropped is None else [dropped]


def _with_removed(node: torch.fx.Node, remaining: set[str]) -> list[torch.fx.Node]:
    """A node and the removed nodes that it depends on through removed nodes, in graph order."""
    found: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        found.add(each)
        pending += [arg for arg in each.all_input_nodes if arg.name not in remaining and arg not in found]
    return sorted(found)


def _unexplained(removed: list[torch.fx.Node], before: Mapping[str, Any], after: Sequence[Any]) -> list[torch.fx.Node]:
    """The removed nodes whose result, and that of every user, no node has after the passes.

    A product that was fused with the sum that reads it is removed, but the sum's result still exists.
    """
    explained: set[torch.fx.Node] = set()
    for node in reversed(removed):
        if not explained.isdisjoint(node.users) or any(_equal(before.get(node.name), value) for value in after):
            explained.add(node)
    return [node for node in removed if node not in explained]


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether both are tensors of the same shape and type, and equal up to rounding."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and near(ours, theirs)


def agree(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal up to rounding, that of intermediate values included."""
    return all(near(a, b) for a, b in zip(_tensors_of(ours), _tensors_of(theirs), strict=False))


def _tensors_of(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]
