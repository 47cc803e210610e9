"""FX graphs as files that are safe to read from untrusted sources: nodes as JSON, operators by name.

Reading one creates a graph of PyTorch's operators and of listed functions on numbers. It imports nothing, and every
name in generated code is checked to be an identifier; so an untrusted graph can compute, and nothing else.
"""

# pyright: basic

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.capture.fx import origin_of
from pellucid.capture.operators import KNOWN_NAMESPACES
from pellucid.errors import UserError
from pellucid.trace.values import decode, encode

_REFUSED = frozenset({"aten.from_file", "aten.save"})  # these touch files
_HIGHER_ORDER = frozenset(
    f"higher_order.{name}"
    for name in ("cond", "while_loop", "scan", "associative_scan", "flex_attention", "flex_attention_backward")
)

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"{module.__name__.lstrip('_')}.{name}": getattr(module, name)
    for module, names in (
        (operator, "add sub mul floordiv truediv mod pow neg abs pos eq ne lt le gt ge and_ or_ not_ getitem"),
        (math, "ceil floor trunc sqrt"),
        (torch, "sym_max sym_min sym_float sym_int sym_not sym_ite sym_sum"),
    )
    for name in names.split()
}  # fmt: skip
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def graph_to_json(module: torch.fx.GraphModule, save: Callable[[Mapping[str, torch.Tensor]], Any]) -> dict[str, Any]:
    """A graph as JSON. save: maps its tensor attributes, by name, to JSON.

    Raises UserError for a graph that calls anything but PyTorch's operators and listed functions.
    """
    tensors: dict[str, torch.Tensor] = {}
    return {"nodes": _nodes(module, tensors, ""), "attributes": save(tensors)}


def graph_from_json(
    saved: Mapping[str, Any], load: Callable[[Any], Mapping[str, torch.Tensor]], libraries: frozenset[str] = frozenset()
) -> torch.fx.GraphModule:
    """The graph from JSON that `graph_to_json` wrote. libraries: whose operators it may call in addition to PyTorch's.

    Raises UserError for anything that could do more than compute.
    """
    return _Reader(load(saved["attributes"]), libraries).module(saved["nodes"], "")


# ------------------------------------------------------------------------------------------------ to JSON


def _nodes(module: torch.fx.GraphModule, tensors: dict[str, torch.Tensor], prefix: str) -> list[dict[str, Any]]:
    return [_node(module, node, tensors, prefix) for node in module.graph.nodes]


def _node(module: torch.fx.GraphModule, node: torch.fx.Node, tensors: dict[str, torch.Tensor], prefix: str) -> Any:
    def no_tensor(value: torch.Tensor) -> Any:
        raise UserError(f"{node.name} has a tensor among its arguments", hint="make it an input of the program")

    saved: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": node.target if isinstance(node.target, str) else _named(node),
        "args": encode(node.args, no_tensor, lambda other: other.name),
        "kwargs": encode(node.kwargs, no_tensor, lambda other: other.name),
    }
    if node.op == "get_attr":
        value: Any = operator.attrgetter(str(node.target))(module)
        path = f"{prefix}{node.target}"
        if isinstance(value, torch.fx.GraphModule):
            saved["graph"] = _nodes(value, tensors, f"{path}.")
        else:
            tensors[path] = value
    saved |= _original(node)
    users = origin_of(node).users
    if users:
        saved["users"] = [[line.file, line.line, line.code, line.module] for line in users[-1:]]
    return saved


def _original(node: torch.fx.Node) -> dict[str, str]:
    """The operator that was decomposed into the node: Inductor names its kernels after these."""
    original = node.meta.get("original_aten")
    if not isinstance(original, torch._ops.OpOverload) or original.namespace not in KNOWN_NAMESPACES:
        return {}
    return {"original": _operator_name(original)}


def _operator_name(operator: torch._ops.OpOverload) -> str:
    return f"{operator.namespace}.{operator._schema.name.partition('::')[2]}.{operator._overloadname}"


def _named(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _operator_name(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if target in _NAMES:
        return _NAMES[target]
    raise UserError(
        f"{node.name} calls {target}, which is no operator of PyTorch", hint="make it a custom operator (torch.library)"
    )


# ------------------------------------------------------------------------------------------------ from JSON


@dataclass(slots=True)
class _Reader:
    """Builds a module from saved nodes. tensors: its attributes and those of nested graphs, by path."""

    tensors: Mapping[str, torch.Tensor]
    libraries: frozenset[str]

    def module(self, nodes: Sequence[Mapping[str, Any]], prefix: str) -> torch.fx.GraphModule:
        root, graph = torch.nn.Module(), torch.fx.Graph()
        known: dict[str, torch.fx.Node] = {}
        for saved in nodes:
            name = _identifier(saved["name"])
            args, kwargs = (decode(saved[part], _no_tensor, known.__getitem__) for part in ("args", "kwargs"))
            if not isinstance(args, tuple) or not isinstance(kwargs, dict):
                raise UserError(f"the run's node {name} has no arguments")
            for key in kwargs:
                _identifier(key)
            if saved["op"] == "output":
                made = graph.output(args[0])
            else:
                target = self._target(root, name, saved, prefix)
                made = graph.create_node(saved["op"], target, args, kwargs, name)
            if made.name != name:
                raise UserError(f"the run has two nodes {name}, or one whose name means something else")
            users = saved.get("users", ())
            made.meta["stack_trace"] = "\n".join(_frames(users))
            made.meta["nn_module_stack"] = {"": _module(users)}
            if "original" in saved:
                made.meta["original_aten"] = _operator(saved["original"], frozenset())
            known[name] = made
        return torch.fx.GraphModule(root, graph)

    def _target(self, root: torch.nn.Module, name: str, saved: Mapping[str, Any], prefix: str) -> Any:
        match saved["op"]:
            case "placeholder":
                return name
            case "call_function":
                return _operator(saved["target"], self.libraries)
            case "get_attr":
                attribute = f"attribute_{name}"
                self._attach(root, attribute, saved, f"{prefix}{saved['target']}")
                return attribute
            case kind:
                raise UserError(f"the run's node {name} is of an unknown kind {kind!r}")

    def _attach(self, root: torch.nn.Module, attribute: str, saved: Mapping[str, Any], path: str) -> None:
        if "graph" in saved:
            setattr(root, attribute, self.module(saved["graph"], f"{path}."))
        elif path in self.tensors:
            root.register_buffer(attribute, self.tensors[path])
        else:
            raise UserError(f"the run lacks the tensor {path}", hint="copy the whole folder")


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"the run has a node with an impossible name: {name!r:.60}")
    return name


def _no_tensor(_described: Any) -> Any:
    raise UserError("the run has a tensor among the arguments of a node")


def _operator(name: str, libraries: frozenset[str]) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = str(name).partition(".")
    op, _, overload = rest.rpartition(".")
    if name in _HIGHER_ORDER:
        return getattr(torch.ops.higher_order, rest)
    # Operators of other libraries can do anything, so the reader of a run lists the libraries that it may call.
    if namespace not in KNOWN_NAMESPACES | libraries or f"{namespace}.{op}" in _REFUSED:
        raise UserError(
            f"the run calls {name}, an operator that may do more than compute",
            hint=f"if you trust the library {namespace}, import it and read the run with libraries={{{namespace!r}}}",
        )
    found = getattr(getattr(getattr(torch.ops, namespace), op, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise UserError(f"the run calls {name}, which this PyTorch does not have", hint="use the PyTorch in run.json")
    return found


def _frames(users: Any) -> Iterator[str]:
    """User lines as PyTorch writes them, sanitized: they become comments of generated code, which they must not end."""
    for file, line, code, *_ in users:
        file, code = ("".join(c if c.isprintable() and c not in '"\\' else "?" for c in str(s)) for s in (file, code))
        yield f'  File "{file}", line {int(line)}, in forward\n    {code}'


def _module(users: Any) -> tuple[str, str]:
    """The path of the module that ran the innermost line, and its class if there is no line; both empty in runs of
    earlier versions.
    """
    _, line, code, *module = users[-1] if users else ("", 0, "")
    path, kind = ("".join(filter(str.isprintable, str(each))) for each in ("".join(map(str, module)), code))
    return path, "" if line else kind
