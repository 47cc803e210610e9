"""The ATen graphs of a program, with the arguments of their calls, and running them eagerly."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from pellucid.capture.fx import attribute_of
from pellucid.capture.sizes import fake_inputs
from pellucid.capture.torch_compat import capture_with_aot, fake_graph, trace_function
from pellucid.kit.programs.calls import OperatorMode, returns_view
from pellucid.kit.programs.case import Case, copied

GraphCompiler: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]

LATER = 2
LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph as AOTAutograd passes it to a compiler.

    name: `forward_0`. kind: `inference`, `forward` or `backward`. inputs: of its first call, for its placeholders.
    later: the inputs of calls with other sizes, at most `LATER`.
    """

    name: str
    kind: str
    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    later: tuple[tuple[Any, ...], ...] = ()

    @property
    def calls(self) -> int:
        """The number of operator calls."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)


def through_aot(
    compiler: Callable[[str], GraphCompiler],
    decompositions: dict[Any, Callable[..., Any]],
    joint: Callable[[torch.fx.GraphModule], torch.fx.GraphModule] = lambda graph: graph,
) -> Callable[..., Any]:
    """A backend for `torch.compile` behind AOTAutograd; `compiler(kind)` compiles each graph.

    joint: a pass on the joint graph of forward and backward, before it is partitioned.
    """

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture_with_aot(
            module,
            inputs,
            forward=compiler("forward"),
            backward=compiler("backward"),
            inference=compiler("inference"),
            decompositions=decompositions,
            joint=joint,
        )

    return backend


class Recorder:
    """Replaces a compiler: graphs run eagerly, and are recorded with the arguments of their first call.

    keep: called with each graph; by default it is appended to `graphs`.
    """

    def __init__(self, keep: Callable[[Graph], None] | None = None) -> None:
        self.graphs: list[Graph] = []
        self._keep = keep or self.graphs.append
        self._count = 0

    def compiler(self, kind: str) -> GraphCompiler:
        def compile_graph(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            name = f"{kind}_{self._count}"
            self._count += 1
            kept, called = twin(module), set()

            def run(args: list[Any]) -> list[Any]:
                sizes = tuple(each if isinstance(each, int) else getattr(each, "shape", None) for each in args)
                if sizes not in called and len(called) <= LATER:
                    self._called(Graph(name, kind, kept, tuple(copied(args))), bool(called))
                    called.add(sizes)
                return list(interpret(module, args))

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    def _called(self, graph: Graph, again: bool) -> None:
        """Record a graph at its first call; again: add the arguments of a later call."""
        if not again:
            self._keep(graph)
        for position, kept in enumerate(self.graphs if again else ()):
            if kept.module is graph.module:
                self.graphs[position] = replace(kept, later=(*kept.later, graph.inputs))


def twin(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph over the same tensors."""
    return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


def interpret(
    module: torch.fx.GraphModule, inputs: Sequence[Any], see: Callable[[torch.fx.Node, Any], Any] | None = None
) -> Sequence[Any]:
    """The results of a graph that runs eagerly. Inputs that the graph mutates are changed.

    see: called with each call and its result; its return value replaces the result.
    """

    class Interpreter(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            return see(n, result) if see is not None and n.op == "call_function" else result

    with torch.no_grad():
        result = Interpreter(module).run(*inputs, enable_io_processing=False)
    return result if isinstance(result, list | tuple) else (result,)


def values_of(
    module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: Callable[[torch.fx.Node], bool] = lambda node: True
) -> dict[str, Any]:
    """Eager's result of each wanted call by its name, as it was when it was computed. See `interpret`."""
    found: dict[str, Any] = {}
    changes = any(mutates(node) or _is_foreign(node) for node in calls_of(module))

    def keep(node: torch.fx.Node, value: Any) -> Any:
        if wanted(node):
            found[node.name] = copied(value) if changes else value
        return value

    torch.manual_seed(0)
    interpret(module, inputs, keep)
    return found


def in_float64(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with float32, bfloat16 and float16 replaced by float64 in conversions, factories and constants."""
    wide = twin(module)
    for node in wide.graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), wider)  # type: ignore[misc]
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            holder = wide.get_submodule(owner)
            value = getattr(holder, leaf)
            if isinstance(value, torch.Tensor):
                delattr(holder, leaf)
                holder.register_buffer(leaf, widened(value.detach()))
    wide.recompile()
    return wide


class InFloat64(OperatorMode):
    """Like `in_float64`, for code that runs in this context on `widened` inputs. Random numbers keep their dtypes."""

    def call(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            args, kwargs = map_aggregate((args, kwargs), wider)  # type: ignore[misc]
        return func(*args, **kwargs)


def wider(value: Any) -> Any:
    """float64 for a narrower float dtype; any other value unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def widened(tree: Any) -> Any:
    """Copies of all tensors of a tree, floats converted to float64."""

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copied(leaf).to(torch.float64) if leaf.dtype in LOW else copied(leaf)

    return pytree.tree_map(widen, tree)


def case_in(case: Case, dtype: torch.dtype) -> Case:
    """A program on the same numbers in float32 or float64: copies of its parameters, buffers and arguments."""
    fresh = case.fresh()
    fn = fresh.fn
    if isinstance(fn, torch.nn.Module):
        fn = fn.double() if dtype is torch.float64 else fn.float()

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return Case(case.name, fn, *pytree.tree_map(convert, (fresh.args, dict(fresh.kwargs))))


def is_random(node: torch.fx.Node) -> bool:
    """Whether a call draws random numbers, which would differ in float64. Inductor's own operators have no tag."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "inductor_" in str(node.target)


def rebound(module: torch.fx.GraphModule, inputs: Sequence[Any], mode: Any = None) -> torch.fx.GraphModule:
    """A copy of the graph whose nodes have the sizes and dtypes that follow from these (static) inputs as metadata.

    mode: the fake tensor mode, if the inputs are fake tensors already.
    """
    return fake_graph(twin(module), inputs, mode)


def cut(
    module: torch.fx.GraphModule,
    names: Collection[str],
    values: Mapping[str, Any],
    first: Iterable[torch.fx.Node] = (),
    results: Collection[str] = (),
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Some calls of a graph as a separate graph, and its inputs: operands computed outside, by name in `values`.

    first: nodes of the graph that become inputs before the others, used or not. results: calls whose results, tensors,
    it returns; by default the tensors without users, and those with users outside. Raises KeyError if a value is
    missing.
    """
    made = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[Any] = []
    nodes = [node for node in calls_of(module) if node.name in names]
    for each in dict.fromkeys((*first, *needed_by(nodes))):
        inputs.append(attribute_of(module, each) if each.op == "get_attr" else values[each.name])
        known[each] = made.placeholder(each.name)
        known[each].meta = dict(each.meta)
    for node in nodes:
        known[node] = made.node_copy(node, known.__getitem__)
    returned = [node for node in nodes if node.name in results] or [
        node
        for node in nodes
        if isinstance(values[node.name], torch.Tensor)
        and (not node.users or any(user.name not in names for user in node.users))
    ]
    made.output(tuple(known[node] for node in returned))
    return torch.fx.GraphModule(torch.nn.Module(), made), inputs


def size_inputs(module: torch.fx.GraphModule, calls: Sequence[torch.fx.Node] | None = None) -> list[torch.fx.Node]:
    """The inputs of a graph that are symbolic sizes: all of them, or those that these calls depend on."""
    found = [
        node for node in module.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)
    ]
    if calls is None:
        return found
    values = [node.meta.get("val") for node in (*needed_by(calls), *calls)]
    wanted = {each for value in values if value is not None for each in free_symbols(value)}
    return [node for node in found if free_symbols(node.meta["val"]) & wanted]


def needed_by(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The operands of these calls that other nodes compute, in the order of their use."""
    inside = set(nodes)
    return list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside))


def graph_of(module: torch.nn.Module, inputs: list[Any], kind: str, sizes: Mapping[str, Any] | None) -> Graph:
    """A graph to compile, traced from a module. sizes: the symbolic sizes of the inputs, see `capture.sizes`."""
    static = {"symbols": {}, "inputs": [None] * len(inputs)}
    mode, fakes = fake_inputs(_bound_sizes(sizes or static, inputs), inputs)
    return Graph("graph", kind, trace_function(module, fakes, mode), tuple(inputs))


def _bound_sizes(sizes: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """The sizes with the values of their symbols for these inputs."""
    symbols = dict(sizes["symbols"])
    for form, value in zip(sizes["inputs"], inputs, strict=True):
        formulas = [form] if isinstance(value, int) else form["size"] if isinstance(form, dict) else []
        numbers = [value] if isinstance(value, int) else value.shape if isinstance(value, torch.Tensor) else []
        symbols.update({name: number for name, number in zip(formulas, numbers, strict=False) if name in symbols})
    return {**sizes, "symbols": symbols}


def calls_of(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The nodes that call an operator, in order."""
    return (node for node in module.graph.nodes if node.op == "call_function")


def mutates(call: torch.fx.Node) -> bool:
    """Whether an operator mutates an argument."""
    return getattr(getattr(call.target, "_schema", None), "is_mutable", False)


def is_view(call: torch.fx.Node) -> bool:
    """Whether a call computes no new tensor: it returns a view, selects one of several results, or computes sizes."""
    return getattr(call.target, "_schema", None) is None or returns_view(call.target)


def _is_foreign(call: torch.fx.Node) -> bool:
    """Whether a call's effects are unknown, as it has no schema."""
    return not hasattr(call.target, "_schema") and call.target is not operator.getitem


def writes(call: torch.fx.Node, operand: torch.fx.Node) -> bool:
    """Whether a call of an operator changes this operand."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return False
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {**dict(zip((a.name for a in schema.arguments), call.args, strict=False)), **call.kwargs}
    return any(given.get(name) is operand for name in written)


def results_of(module: torch.fx.GraphModule) -> list[str]:
    """The names of the nodes that a graph returns, by position; empty for values that are not nodes."""
    returned = module.graph.output_node().args[0]
    items = returned if isinstance(returned, list | tuple) else [returned]
    return [node.name if isinstance(node, torch.fx.Node) else "" for node in items]


def writers_of(module: torch.fx.GraphModule) -> dict[int, str]:
    """The last operator that writes to an input, by the input's position."""
    found: dict[int, str] = {}
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        writers = sorted(user for user in node.users if writes(user, node))
        if writers:
            found[position] = writers[-1].name
    return found
