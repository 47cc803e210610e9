"""Where convolutions gain from it, activations lie channels-last from the first convolution on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.torch_compat import fake_mode_of, is_symbolic
from pellucid.capture.transform import aliases
from pellucid.ir.decision import Decision

aten = torch.ops.aten
_RULE = "transform.channels-last"
_VIEWS = (aten.view.default, aten._unsafe_view.default)
# Calls whose meaning depends on how their argument lies in memory.
_BY_STRIDES = (aten.as_strided.default, aten.as_strided_.default, aten.set_.source_Tensor, aten.resize_.default)


def channels_last(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """The graph with the inputs of its convolutions channels-last, or as it is, with the reason.

    Strides are not written into FX graphs, they follow from the inputs': so one copy before the first convolution lays
    out all that comes after it, and results get eager's strides back at the end. Depthwise convolutions take about half
    the time this way, while dense ones pay for another order of their weights: the more frequent kind decides.

    Before: `convolution(%x, %w, ...)`. After: `clone(%x, memory_format=channels_last)`, and the convolution of that.
    """
    nodes = [node for node in graph_module.graph.nodes if _is_planar_convolution(node)]
    if not nodes:
        return graph_module, ()
    depthwise = sum(_is_depthwise(node) for node in nodes)
    dense = sum(not _is_depthwise(node) and _taps(node) > 1 for node in nodes)
    counts = f"{depthwise} depthwise convolutions and {dense} dense ones of more than one tap"
    refusal = None if depthwise > dense else counts
    refusal = refusal or _obstacle(graph_module.graph)
    if refusal is None:
        try:
            return _Relayout(graph_module).run(), (Decision(_RULE, ("convolutions",), True, counts),)
        except _Refused as found:
            refusal = str(found)
    return graph_module, (Decision(_RULE, ("convolutions",), False, refusal),)


class _Refused(Exception):
    """The graph cannot be laid out anew; the text says why."""


def _is_planar_convolution(node: torch.fx.Node) -> bool:
    return node.target is aten.convolution.default and len(_shape(node, 0)) == 4 and not node.args[6]


def _shape(node: torch.fx.Node, position: int) -> tuple[int, ...]:
    """The sizes of an argument."""
    argument = node.args[position]
    assert isinstance(argument, torch.fx.Node)
    return tuple(argument.meta["val"].shape)


def _is_depthwise(node: torch.fx.Node) -> bool:
    channels = _shape(node, 0)[1]
    return channels > 1 and bool(node.args[8] == channels)


def _taps(node: torch.fx.Node) -> int:
    """How many pixels one output pixel depends on."""
    return math.prod(_shape(node, 1)[2:])


def _obstacle(graph: torch.fx.Graph) -> str | None:
    for node in graph.nodes:
        if node.target in _BY_STRIDES:
            return f"{node.name} depends on how its argument lies in memory"
        value = node.meta.get("val")
        if node.op == "placeholder" and any(
            map(is_symbolic, value.shape if isinstance(value, torch.Tensor) else [value])
        ):
            return "the sizes are symbolic"
    return None


class _Relayout:
    """Copies a graph, computing anew the fake tensors of all nodes."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._module = graph_module
        self._graph = torch.fx.Graph()
        self._new: dict[torch.fx.Node, torch.fx.Node] = {}
        self._clones: dict[tuple[torch.fx.Node, torch.memory_format], torch.fx.Node] = {}
        self._fake_mode = fake_mode_of(graph_module.graph)

    def run(self) -> torch.fx.GraphModule:
        for node in self._module.graph.nodes:
            if node.op == "call_function":
                self._new[node] = self._call(node)
            elif node.op == "output":
                restored = pytree.tree_map_only(torch.fx.Node, self._restored, node.args[0])
                self._graph.output(restored).meta.update(node.meta)
            else:
                self._new[node] = self._graph.node_copy(node)
        return torch.fx.GraphModule(self._module, self._graph)

    def _call(self, node: torch.fx.Node) -> torch.fx.Node:
        copy = self._graph.node_copy(node, lambda argument: self._new[argument])
        if _is_planar_convolution(node):
            with self._graph.inserting_before(copy):
                copy.args = (self._laid_out(copy.args[0], copy, torch.channels_last), *copy.args[1:])
        try:
            copy.meta["val"] = self._evaluate(copy)
        except RuntimeError:
            if node.target not in _VIEWS:
                raise _Refused(f"{node.name} does not take a channels-last argument") from None
            with self._graph.inserting_before(copy):
                copy.args = (self._laid_out(copy.args[0], copy, torch.contiguous_format), *copy.args[1:])
            copy.meta["val"] = self._evaluate(copy)
        return copy

    def _laid_out(self, value: Any, user: torch.fx.Node, layout: torch.memory_format) -> torch.fx.Node:
        """`value` in memory as `layout` says, made by a copy on behalf of `user` unless it lies so already."""
        if value.meta["val"].is_contiguous(memory_format=layout):
            return value
        if (value, layout) not in self._clones:
            clone = self._graph.call_function(aten.clone.default, (value,), {"memory_format": layout})
            clone.meta.update(user.meta)
            clone.meta["val"] = self._evaluate(clone)
            self._clones[value, layout] = clone
        return self._clones[value, layout]

    def _evaluate(self, node: torch.fx.Node) -> Any:
        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
        with self._fake_mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _restored(self, node: torch.fx.Node) -> torch.fx.Node:
        """The new counterpart of a result, with the strides that eager gives it; of a view, the base is copied."""
        new, expected = self._new[node], node.meta.get("val")
        if not isinstance(expected, torch.Tensor) or new.meta["val"].stride() == expected.stride():
            return new
        if expected.is_contiguous():
            return self._laid_out(new, node, torch.contiguous_format)
        if not aliases(node) or not isinstance(node.args[0], torch.fx.Node):
            raise _Refused(f"the result {node.name} must have the strides {tuple(expected.stride())}")
        base = self._restored(node.args[0])
        view = self._graph.node_copy(node, lambda argument: base if argument is node.args[0] else self._new[argument])
        view.meta["val"] = self._evaluate(view)
        return view
