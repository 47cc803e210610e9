"""Decompose a graph that was captured for one backend as another backend decomposes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_arg

from pellucid.capture.fx import attribute_of
from pellucid.capture.torch_compat import decomposed_call
from pellucid.kit.programs.graphs import Graph, calls_of, twin


def decomposed(graph: Graph, table: Mapping[Any, Callable[..., Any]]) -> Graph:
    """A copy of the graph with each operator of the table replaced by its decomposition.

    Nodes that compute the same as before keep their names, so that results can be compared with the original graph's.
    """
    if not any(node.target in table for node in calls_of(graph.module)):
        return graph
    module = twin(graph.module)
    for node in list(calls_of(module)):
        if node.target in table:
            _replace(module, node, table)
    module.graph.lint()
    module.recompile()
    return replace(graph, module=module)


def _replace(module: torch.fx.GraphModule, node: torch.fx.Node, table: Mapping[Any, Callable[..., Any]]) -> None:
    part = decomposed_call(node, table)
    if [each.target for each in calls_of(part)] == [node.target]:
        return  # its decomposition does not cover these arguments
    known = dict(zip(part.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    fresh: set[torch.fx.Node] = set()
    result: Any = None
    with module.graph.inserting_before(node):
        for each in part.graph.nodes:
            if each.op == "get_attr":
                name = f"{node.name}_{each.target}"
                module.register_buffer(name, attribute_of(part, each))
                known[each] = module.graph.get_attr(name)
            elif each.op == "call_function":
                known[each] = module.graph.node_copy(each, known.__getitem__)
            elif each.op == "output":
                result = map_arg(each.args[0], known.__getitem__)
            if each.op in ("get_attr", "call_function"):
                known[each].meta = {**node.meta, **_about_the_result(each)}
                fresh.add(known[each])
    if isinstance(result, torch.fx.Node):
        _substitute(result, node, fresh)
        return
    for item in list(node.users):  # the operator has several results
        assert item.target is operator.getitem
        _substitute(result[item.args[1]], item, fresh)
    module.graph.erase_node(node)


def _about_the_result(node: torch.fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}


def _substitute(made: torch.fx.Node, node: torch.fx.Node, fresh: set[torch.fx.Node]) -> None:
    """Replace a node by `made`, which also takes its name if it is in `fresh` and has not been renamed."""
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    if made in fresh:
        made.name = node.name
        fresh.discard(made)
