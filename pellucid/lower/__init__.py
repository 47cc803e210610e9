"""FX graph to loop IR: each node becomes kernels, a view, or a call of ATen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.capture.graph import DTYPES, dtype_of, shape_of
from pellucid.capture.torch_compat import expr_of, is_symbolic, symbol_of
from pellucid.errors import PellucidError, UnsupportedError
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Program
from pellucid.lower import pointwise, reduce, shapes  # noqa: F401  (their rules register themselves)
from pellucid.lower.extern import CHOSEN, call_of, fallback_reason, lower_conjugate, lower_effect, lower_extern
from pellucid.lower.graph import GraphBuilder, Result, overlaps_itself
from pellucid.lower.registry import RULES, NotLowered, overload_name
from pellucid.lower.shapes import is_view, lower_view

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program, and the tensors of the graph itself: they follow the caller's arguments in `program.inputs`."""

    program: Program
    constants: tuple[torch.Tensor, ...]
    decisions: tuple[Decision, ...]


def lower(graph_module: torch.fx.GraphModule) -> Lowered:
    """Lower every node in order.

    Before: `%add = aten.add.Tensor(%x, %y)`. After: a kernel with `v2: f32 = add v0, v1` over add's shape.
    """
    graph = GraphBuilder()
    _bind_inputs(graph, graph_module)
    outputs: tuple[Result, ...] = ()
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            graph.bind(node, _lower_call(graph, node))
        elif node.op == "output":
            returned = graph.value(node.args[0])
            outputs = returned if isinstance(returned, tuple) else (returned,)
    program = graph.finish(outputs)
    return Lowered(program, tuple(graph.constants.values()), tuple(graph.decisions))


def _bind_inputs(graph: GraphBuilder, graph_module: torch.fx.GraphModule) -> None:
    """Arguments of the graph first, then its own tensors, in the order in which the program expects them."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                _check_tensor(node.name, value)
                graph.bind(node, graph.add_input(node.name, value))
            elif is_symbolic(value):
                graph.bind(node, _bind_symbol(graph, value))
            else:
                graph.add_unused_input()
                graph.bind(node, value)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph_module, str(node.target))
            if isinstance(value, torch.Tensor):
                _check_tensor(node.name, value)
                graph.bind(node, graph.add_constant(node.name, value))


def _bind_symbol(graph: GraphBuilder, value: torch.SymInt) -> Result:
    if not isinstance(value, torch.SymInt):
        raise UnsupportedError(f"an argument of type {type(value).__name__}", hint="pass it as a tensor")
    name = symbol_of(value)
    if name is None:
        graph.add_unused_input()
    else:
        graph.add_symbol(name)
    return expr_of(value)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"input {name} lives on {tensor.device}", hint="Pellucid compiles for CPUs only")
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(f"input {name} has layout {tensor.layout} and dtype {tensor.dtype}")


def _lower_call(graph: GraphBuilder, node: torch.fx.Node) -> Result:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return expr_of(value)
    if getattr(node.target, "__name__", "") == "getitem":
        return graph.value(node.args[0])[node.args[1]]
    try:
        if is_view(node):
            return lower_view(graph, node)
        return _lower_operator(graph, node)
    except PellucidError as error:
        error.context.setdefault("fx node", node.format_node())
        raise type(error)(error.message, hint=error.hint, context=error.context) from None


def _lower_operator(graph: GraphBuilder, node: torch.fx.Node) -> Result:
    if node.target is torch.ops.higher_order.with_effects:
        return lower_effect(graph, node)
    name = overload_name(node)
    if name == "_conj.default":
        return lower_conjugate(graph, node)
    if name not in RULES or name in CHOSEN:
        return lower_extern(graph, call_of(node), fallback_reason(node))
    try:
        _check_layout(node)
        return RULES[name](graph, node)
    except NotLowered as refusal:
        return lower_extern(graph, call_of(node), str(refusal))


def _check_layout(node: torch.fx.Node) -> None:
    """Refuse results that a kernel cannot write: complex numbers, and layouts with overlapping elements."""
    meta = node.meta.get("val")
    for item in meta if isinstance(meta, list | tuple) else [meta]:
        if not isinstance(item, torch.Tensor):
            continue
        if dtype_of(item).is_opaque:
            raise NotLowered(f"{item.dtype} is left to ATen")
        if overlaps_itself(item):
            raise NotLowered(f"the result of shape {shape_of(item)} overlaps itself")
