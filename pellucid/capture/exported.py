"""Reads a program from `torch.export` as a graph like Dynamo's: sizes, parameters and tensors are its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec
from torch.utils._sympy.numbers import int_oo

from pellucid.capture.inputs import (
    ConstantInput,
    Input,
    Inputs,
    Size,
    SizeInput,
    TensorInput,
    is_tensor_subclass,
    symbols_of,
)
from pellucid.capture.torch_compat import elementwise_strides, fake_mode_of, graph_module_of, is_symbolic, tree_leaves
from pellucid.errors import UserError


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is the same in every call."""

    value: object


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported program.

    graph: its arguments are the values of `symbols`, then `fixed`, then the `inputs` that are no constants.
    fixed: parameters, buffers and constants, each once. results: for each the position in the graph's results, or a
    constant. example: the values of the symbols at export. changed: positions of the graph's arguments that it may
    write to. guards: raises AssertionError for arguments for which the program is not valid.
    """

    graph: torch.fx.GraphModule
    symbols: tuple[sympy.Symbol, ...]
    fixed: tuple[torch.Tensor, ...]
    inputs: Inputs
    results: tuple[int | Constant, ...]
    example: Mapping[sympy.Symbol, int]
    changed: tuple[int, ...]
    guards: Callable[..., None] | None


_FIXED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def read_exported(program: ExportedProgram) -> Exported:
    """Read an exported program, functional or not. Raises UserError for unsupported inputs and results."""
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        if spec.kind not in (*_FIXED, *_CHANGES, InputKind.USER_INPUT, OutputKind.USER_OUTPUT):
            what = spec.kind.name.lower().replace("_", " ")
            raise UserError(f"the exported program has {spec.arg.name}, a {what}", hint="use torch.compile instead")
    return _Reader(program).read()


class _Reader:
    """Copies the graph of a program node by node."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.inputs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self.graph = torch.fx.Graph()
        self.copies: dict[torch.fx.Node, Any] = {}
        self.fixed: dict[int, tuple[torch.Tensor, torch.fx.Node]] = {}  # by identity: tied weights are one argument
        self.results: list[int | Constant] = []

    def read(self) -> Exported:
        nodes = list(self.program.graph_module.graph.nodes)
        specs = [(node, self.inputs[node.name]) for node in nodes if node.op == "placeholder"]
        inputs = tuple(_input_of(node, spec) for node, spec in specs if spec.kind is InputKind.USER_INPUT)
        symbols = symbols_of(inputs)
        for symbol in symbols:
            self.graph.placeholder(str(symbol))
        copy: dict[str, Callable[[torch.fx.Node], Any]] = {"placeholder": self._argument, "output": self._output}
        for node in nodes:
            self.copies[node] = copy.get(node.op, self._call)(node)
        module = graph_module_of(self.program.graph_module, self.graph)
        _mark(module, {node for _, node in self.fixed.values()})
        fixed = tuple(tensor for tensor, _ in self.fixed.values())
        ranges = {symbol: _range(self.program.range_constraints.get(symbol)) for symbol in symbols}
        return Exported(
            module,
            symbols,
            fixed,
            Inputs(inputs, ranges),
            tuple(self.results),
            example=_example(self.program.graph, symbols),
            changed=_changed(self.graph),
            guards=_guards(self.program) if symbols else None,
        )

    def _call(self, node: torch.fx.Node) -> torch.fx.Node:
        """A copy without the fake result: the program is compiled with another shape environment."""
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        copy.meta = {key: value for key, value in node.meta.items() if key not in ("val", "unbacked_bindings")}
        return copy

    def _argument(self, node: torch.fx.Node) -> Any:
        spec = self.inputs[node.name]
        if isinstance(spec.arg, ConstantArgument):
            return spec.arg.value
        if spec.kind is InputKind.USER_INPUT:
            return self.graph.node_copy(node)
        tensor = self._tensor(spec)
        if id(tensor) not in self.fixed:
            self.fixed[id(tensor)] = tensor, self.graph.node_copy(node)
        return self.fixed[id(tensor)][1]

    def _tensor(self, spec: InputSpec) -> torch.Tensor:
        state, name = self.program.state_dict, str(spec.target)
        found = state[name] if name in state else self.program.constants[name]
        assert isinstance(found, torch.Tensor)
        if is_tensor_subclass(found) or found.device.type != "cpu" or found.layout is not torch.strided:
            what = f"{name} of the exported program is a {type(found).__name__} on {found.device} of {found.layout}"
            raise UserError(what, hint="export a program whose parameters are plain tensors on the CPU")
        return found

    def _output(self, node: torch.fx.Node) -> None:
        """Add the output. Changed values that a functional program returns are written to the arguments instead."""
        values: list[torch.fx.Node] = []
        returned: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        for value, spec in zip(returned, self.program.graph_signature.output_specs, strict=True):
            made = self.copies[value] if isinstance(value, torch.fx.Node) else value
            if not isinstance(made, torch.fx.Node):
                self.results.append(Constant(made))
            elif spec.kind in _CHANGES:
                self.graph.call_function(torch.ops.aten.copy_.default, (self._changed_by(spec), made))
            else:
                self.results.append(len(values))
                values.append(made)
        self.graph.output(tuple(values))

    def _changed_by(self, result: OutputSpec) -> torch.fx.Node:
        """The argument that a result of a functional program is written to."""
        names = [name for name, spec in self.inputs.items() if result.target in (name, spec.target)]
        return next(copy for node, copy in self.copies.items() if node.name in names)


def _input_of(node: torch.fx.Node, spec: InputSpec) -> Input:
    value = node.meta.get("val")
    if isinstance(spec.arg, ConstantArgument):
        return ConstantInput(node.name, spec.arg.value)
    if isinstance(value, torch.Tensor):
        shape, strides = (tuple(map(_expression, sizes)) for sizes in (value.shape, elementwise_strides(value)))
        return TensorInput(node.name, value.dtype, shape, strides)
    if isinstance(value, torch.SymInt):
        return SizeInput(node.name, (_expression(value),))
    raise UserError(f"the exported program takes {node.name}, a {type(value).__name__}", hint="use torch.compile")


def _expression(size: int | torch.SymInt) -> Size:
    return size.node.expr if is_symbolic(size) else sympy.Integer(int(size))


def _example(graph: torch.fx.Graph, symbols: Sequence[sympy.Symbol]) -> dict[sympy.Symbol, int]:
    known = fake_mode_of(graph).shape_env.backed_var_to_val if symbols else {}
    return {symbol: int(known.get(symbol, 2)) for symbol in symbols}


def _mark(module: torch.fx.GraphModule, fixed: set[torch.fx.Node]) -> None:
    """Add the metadata that AOTAutograd expects of Dynamo's graphs: the arguments that are the same in every call."""
    module.meta["dynamo_compile_id"] = None
    module._param_name_to_source = {}  # type: ignore[assignment]
    for node in module.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None  # type: ignore[attr-defined]
        node.meta = {"tensor_dict": {"_dynamo_static_input_type": "unguarded"}} if node in fixed else {}


def _guards(program: ExportedProgram) -> Callable[..., None] | None:
    """The checks of the program's own module on its arguments, in addition to ranges: relations between sizes."""
    found = getattr(program.module(), "_guards_fn", None)
    return None if found is None else found.forward


def _changed(graph: torch.fx.Graph) -> tuple[int, ...]:
    """The positions of arguments that the graph writes to, directly or through views."""
    found: set[str] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for number, argument in enumerate(schema.arguments if schema else ()):
            if argument.is_write:
                value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                found |= {each.name for each in _with_viewed(value)}
    given = graph.find_nodes(op="placeholder")
    return tuple(number for number, node in enumerate(given) if node.name in found)


def _with_viewed(value: Any) -> list[torch.fx.Node]:
    """The nodes in an argument of a call, and all nodes that these may be views of."""
    found: list[torch.fx.Node] = []
    work = [each for each in tree_leaves(value) if isinstance(each, torch.fx.Node)]
    while work:
        node = work.pop()
        found.append(node)
        if node.op == "call_function" and _may_be_view(node.target):
            work += node.all_input_nodes
    return found


def _may_be_view(function: Any) -> bool:
    """Whether a result may share memory with an argument: schemas of composite operators do not declare it."""
    if not isinstance(function, torch._ops.OpOverload):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return composite or any(each.alias_info for each in function._schema.returns)


def _range(known: Any) -> tuple[int, int]:
    """The minimum and maximum of a size: PyTorch's default minimum of 2 stands for 0."""
    lower, upper = (0, int_oo) if known is None else (known.lower, known.upper)
    return (0 if lower == 2 else int(lower)), (sys.maxsize if upper == int_oo else int(upper))
