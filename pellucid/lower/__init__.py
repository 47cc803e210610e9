"""Lowers an FX graph to loop IR: each node becomes kernels, a view, or a call of ATen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pellucid.capture.fx import DTYPES, attribute_of, derived_sizes, dtype_of, origin_of, shape_of, whole
from pellucid.capture.torch_compat import is_symbolic
from pellucid.errors import BUGS, PellucidError, UnsupportedError, bug
from pellucid.ir.decision import Decision
from pellucid.ir.derived import Float
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Program, View

# Importing these modules registers their rules.
from pellucid.lower import (  # noqa: F401
    attention,
    contraction,
    convolution,
    convolution_backward,
    grouped,
    pointwise,
    pool,
    random,
    reduce,
    scatter,
    shapes,
)
from pellucid.lower.extern import (
    LEFT_TO_ATEN,
    extern_call,
    fallback_reason,
    lower_conjugate,
    lower_effect,
    lower_extern,
)
from pellucid.lower.program_builder import ProgramBuilder, Result, overlaps_itself
from pellucid.lower.registry import RULES, TAKES_FLOATS, NotLowered, overload_name
from pellucid.lower.shapes import is_view, lower_view
from pellucid.lower.unsigned import check_unsigned
from pellucid.machine.library import REFERENCE, Library

__all__ = ["Lowered", "NotHeld", "has_loops", "lower", "tensors_of"]


class NotHeld(UnsupportedError):
    """No program can contain the call of this node, by name: it is made from Python."""

    def __init__(self, node: str, error: UnsupportedError) -> None:
        super().__init__(error.message, hint=error.hint, context=error.context)
        self.node = node


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program, and the graph's own tensors, which follow the caller's arguments in `program.inputs`.

    values: the view that holds the tensor that an FX node computes, by the node's name.
    """

    program: Program
    constants: tuple[torch.Tensor, ...]
    values: Mapping[str, View]
    decisions: tuple[Decision, ...]


def has_loops(node: torch.fx.Node) -> bool:
    """True if a call is lowered to a view, or to loops that work with any strides of its arguments.

    Where a rule does not apply, ATen is called, which accepts any layout too, except for pooling of volumes.
    """
    name = overload_name(node)
    return is_view(node) or (name in RULES and not any(word in name for word in ("pool3d", "attention")))


def lower(graph_module: torch.fx.GraphModule, *, contract: bool = True, library: Library = REFERENCE) -> Lowered:
    """Lower every node in order; matrix products, convolutions and attention call ATen unless `contract`.

    library: the speed of ATen, which is called where it is faster than kernels on this machine.

    Before: `%add = aten.add.Tensor(%x, %y)`. After: a kernel with `v2: f32 = add v0, v1` over add's shape.
    """
    graph = ProgramBuilder(derived_sizes(graph_module), contract=contract, library=library)
    _bind_inputs(graph, graph_module)
    outputs: tuple[Result, ...] = ()
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            graph.bind(node, _lower_call(graph, node))
        elif node.op == "output":
            returned = graph.value(node.args[0])
            outputs = returned if isinstance(returned, tuple) else (returned,)
    program = graph.finish(outputs)
    return Lowered(program, tuple(graph.constants.values()), graph.computed(), tuple(graph.decisions))


def tensors_of(graph_module: torch.fx.GraphModule) -> tuple[View, ...]:
    """The tensors among a graph's arguments, with their layouts at capture."""
    given = {node.name: node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")}
    return tuple(whole(name, value) for name, value in given.items() if isinstance(value, torch.Tensor))


def _bind_inputs(graph: ProgramBuilder, graph_module: torch.fx.GraphModule) -> None:
    """Bind the arguments of the graph, then its own tensors, in the order that the program expects."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                _check_tensor(node.name, value)
                graph.bind(node, graph.add_input(node.name, value))
            elif is_symbolic(value):
                graph.bind(node, _bind_number(graph, value))
            else:
                graph.add_unused_input()
                graph.bind(node, value)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = attribute_of(graph_module, node)
            if isinstance(value, torch.Tensor):
                _check_tensor(node.name, value)
                graph.bind(node, graph.add_constant(node.name, value))


def _bind_number(graph: ProgramBuilder, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Result:
    number = graph.number(value)
    match number:
        case Expr():
            graph.add_symbol(number)
        case Float(name):
            graph.add_float(name)
        case _:
            graph.add_unused_input()
    return number


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"input {name} is on {tensor.device}", hint="Pellucid compiles for CPUs only")
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(f"input {name} has layout {tensor.layout} and dtype {tensor.dtype}")


def _lower_call(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    value = node.meta.get("val")
    if is_symbolic(value):
        return graph.number(value)
    if isinstance(value, bool | int | float) and not isinstance(node.target, torch._ops.OpOverload):
        return value
    if getattr(node.target, "__name__", "") == "getitem":
        return graph.value(node.args[0])[node.args[1]]
    try:
        if is_view(node):
            return lower_view(graph, node)
        return _lower_operator(graph, node)
    except PellucidError as error:
        error.context = _where(node) | error.context
        if isinstance(error, UnsupportedError):
            raise NotHeld(node.name, error) from None
        raise type(error)(error.message, hint=error.hint, context=error.context) from None
    except BUGS as error:
        raise bug(f"lowering {node.name}", error, _where(node)) from error


def _where(node: torch.fx.Node) -> dict[str, object]:
    """The call and the user's line, for errors."""
    where: dict[str, object] = {"fx node": node.format_node()}
    for line in origin_of(node).users[-1:]:
        where["user line"] = str(line)
    return where


def _lower_operator(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    if node.target is torch.ops.higher_order.with_effects:
        return lower_effect(graph, node)
    name = overload_name(node)
    if name == "_conj.default":
        return lower_conjugate(graph, node)
    if name not in RULES or name in LEFT_TO_ATEN:
        return lower_extern(graph, extern_call(node), fallback_reason(node))
    try:
        _check_layout(node)
        check_unsigned(name, node)
        floats = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.SymFloat)]
        if floats and name not in TAKES_FLOATS:
            raise NotLowered("its rule does not support floats that depend on sizes")
        return RULES[name](graph, node)
    except NotLowered as refusal:
        return lower_extern(graph, extern_call(node), str(refusal))


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
