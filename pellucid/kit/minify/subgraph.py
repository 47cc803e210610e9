"""Parts of a captured graph as separate graphs, and the judgement on their compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from pellucid.kit.judge.graph import expected_of, outputs
from pellucid.kit.judge.judge import Judgement, close
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, cut, rebound, size_inputs, values_of
from pellucid.kit.runs.target import Request, captured

_FLOATS = (torch.float64, torch.bfloat16, torch.float16)


class NotAGraph(ValueError):
    """Calls that do not form a graph that runs, or not with these inputs."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Some calls of a captured graph.

    graph: its name. names: of the calls, in graph order. changes: applied to the inputs, in order; inputs are numbered
    by first use: `size A to B` (every dimension of size A keeps its first B elements), `dtype A to B`, `input J as I`
    (I replaces J), `ones in I`, `zeros in I`, `integers in I` (rounded).
    """

    graph: str
    names: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def changed(self, *changes: str) -> Subgraph:
        """The part with more changes."""
        return replace(self, changes=(*self.changes, *changes))


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor input of a part. number: its number in the changes. plain: all its elements are equal."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    plain: bool


class CapturedGraphs:
    """The captured graphs of a program in this process, and their values in eager mode."""

    def __init__(self, request: Request) -> None:
        graphs, self.subject = captured(request)
        self.graphs = {graph.name: graph for graph in graphs}
        self._values: dict[str, dict[str, Any]] = {}

    def values(self, name: str) -> dict[str, Any]:
        """Eager's result of every node of a graph, including inputs, before any later in-place change."""
        if name not in self._values:
            graph = self.graphs[name]
            placeholders = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
            inputs = dict(zip(placeholders, graph.inputs, strict=True))
            self._values[name] = inputs | values_of(graph.module, copied(graph.inputs))
        return self._values[name]

    def names(self, name: str) -> tuple[str, ...]:
        """The calls of a graph, in order."""
        return tuple(node.name for node in calls_of(self.graphs[name].module))

    def units(self, name: str, among: Sequence[str], duplicates: bool = True) -> list[Subgraph]:
        """Each call alone, in the order of `among`; a call that returns several tensors together with its `getitem`s.

        duplicates: keep calls that differ from an earlier one only by the values of their tensors.
        """
        nodes = {node.name: node for node in calls_of(self.graphs[name].module)}
        found: dict[tuple[str, ...], None] = {}
        seen: set[str] = set()
        for node in (nodes[each] for each in among if each in nodes):
            base = node
            while _is_getitem(base) and isinstance(base.args[0], torch.fx.Node):
                base = base.args[0]
            members = {base.name, *(user.name for user in base.users if _is_getitem(user))}
            unit = tuple(each for each in nodes if each in members)
            text = self._signature(name, base)
            if unit and unit not in found and (duplicates or text not in seen):
                found[unit] = None
            seen.add(text)
        return [Subgraph(name, unit) for unit in found]

    def around(self, name: str, names: Sequence[str], reach: int) -> Subgraph:
        """The part with up to `reach` calls before and after each of its calls in the graph."""
        every = self.names(name)
        at = [position for position, each in enumerate(every) if each in set(names)]
        near = {p for position in at for p in range(position - reach, position + reach + 1)}
        return Subgraph(name, tuple(each for position, each in enumerate(every) if position in near))

    def before(self, name: str, names: Sequence[str], steps: int) -> tuple[str, ...]:
        """The calls that `names` depend on through at most `steps` edges, the nearest first."""
        nodes = {node.name: node for node in calls_of(self.graphs[name].module)}
        found: dict[str, None] = {}
        last = [each for each in names if each in nodes]
        for _ in range(steps):
            last = [n.name for each in last for n in nodes[each].all_input_nodes if n.name in nodes]
            last = [each for each in dict.fromkeys(last) if each not in found and each not in names]
            found |= dict.fromkeys(last)
        return tuple(found)

    def operators(self, name: str, names: Sequence[str]) -> tuple[str, ...]:
        """The distinct operators of the calls."""
        chosen = set(names)
        return tuple(sorted({str(n.target) for n in calls_of(self.graphs[name].module) if n.name in chosen}))

    def inputs(self, part: Subgraph) -> list[Input]:
        """The tensor inputs of a part."""
        _, numbered = self._cut(part)
        return [
            Input(number, tuple(each.shape), str(each.dtype).removeprefix("torch."), _is_plain(each))
            for number, each in numbered.items()
            if isinstance(each, torch.Tensor)
        ]

    def cut(self, part: Subgraph) -> Graph:
        """The part as a graph: outside values become inputs; values that no call in it reads are returned as well."""
        return side_by_side([self.bare(part)], self.symbolic(part))

    def bare(self, part: Subgraph) -> Graph:
        """Like `cut`, but without the sizes and types of nodes, see `side_by_side`."""
        module, inputs = self._cut(part)
        return Graph(part.graph, self.graphs[part.graph].kind, module, tuple(inputs.values()))

    def symbolic(self, part: Subgraph) -> bool:
        """Whether the part keeps the symbolic sizes with which it was captured."""
        module = self.graphs[part.graph].module
        return bool(size_inputs(module)) and not any(each.startswith("dtype") for each in part.changes)

    def _signature(self, name: str, node: torch.fx.Node) -> str:
        """A call as text: calls with the same text differ at most by the values of their tensors."""
        values = self.values(name)

        def text(each: Any) -> Any:
            value = values[each.name] if isinstance(each, torch.fx.Node) else each
            return f"{tuple(value.shape)}{value.stride()}{value.dtype}" if isinstance(value, torch.Tensor) else value

        return f"{node.target}{map_aggregate((node.args, node.kwargs), text)}"

    def _cut(self, part: Subgraph) -> tuple[torch.fx.GraphModule, dict[int, Any]]:
        """The module, and its inputs by their numbers."""
        whole, chosen = self.graphs[part.graph], set(part.names)
        nodes = [node for node in calls_of(whole.module) if node.name in chosen]
        sizes = size_inputs(whole.module, nodes) if self.symbolic(part) else []
        module, values = cut(whole.module, chosen, self.values(part.graph), sizes)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
            if not isinstance(value, torch.Tensor | int | float | bool):
                raise NotAGraph(f"{node.name} is not a tensor or number")
        inputs = _changed(module.graph, list(copied(values)), part.changes)
        if part.changes:
            module.recompile()
        return module, inputs


def _is_getitem(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_plain(value: torch.Tensor) -> bool:
    return not value.numel() or bool((value == value.flatten()[0]).all())


# ------------------------------------------------------------------------------------------------ changes


def _changed(graph: torch.fx.Graph, values: list[Any], changes: Sequence[str]) -> dict[int, Any]:
    """Apply changes to a graph and its inputs; returns the remaining inputs by number."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = dict(enumerate(values))
    for change in changes:
        kind, *words = change.split()
        match kind:
            case "size":
                old, new = int(words[0]), int(words[2])
                inputs = {number: narrowed(each, old, new) for number, each in inputs.items()}
                _rewrite(graph, lambda each, old=old, new=new: _resized(each, old, new))
            case "dtype":
                before, after = getattr(torch, words[0]), getattr(torch, words[2])
                inputs = {number: _converted(each, before, after) for number, each in inputs.items()}
                _rewrite(graph, lambda each, a=before, b=after: map_aggregate(each, lambda x: b if x is a else x))
            case "input":
                placeholders[int(words[0])].replace_all_uses_with(placeholders[int(words[2])])
                graph.erase_node(placeholders[int(words[0])])
                del inputs[int(words[0])]
            case _:
                number = int(words[-1])
                inputs[number] = _plain(kind, inputs[number])
    return inputs


def _rewrite(graph: torch.fx.Graph, change: Callable[[Any], Any]) -> None:
    """Change the constant arguments of the calls of a graph."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tuple(change(each) for each in node.args)
            node.kwargs = {name: change(each) for name, each in node.kwargs.items()}


def _resized(value: Any, old: int, new: int) -> Any:
    """Replace a size in lists of sizes; a number outside of a list is something else."""
    if isinstance(value, list | tuple):
        return [new if type(each) is int and each == old else _resized(each, old, new) for each in value]
    return value


def narrowed(value: Any, old: int, new: int) -> Any:
    """A value whose dimensions of size `old` are narrowed to `new`."""
    if not isinstance(value, torch.Tensor):
        return new if value == old and type(value) is int else value
    small = value
    for dim, size in enumerate(value.shape):
        if size == old:
            small = small.narrow(dim, 0, new)
    if small is value:
        return value
    return (
        small.clone(memory_format=torch.contiguous_format)
        if value.is_contiguous()
        else torch.empty_like(small).copy_(small)
    )


def _converted(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return value.to(new) if isinstance(value, torch.Tensor) and value.dtype is old else value


def _plain(kind: str, value: torch.Tensor) -> torch.Tensor:
    match kind:
        case "ones":
            return value.clone().fill_(1)
        case "zeros":
            return value.clone().fill_(0)
        case _:
            return value.round().clamp(-9, 9) if value.is_floating_point() else value


def smaller_sizes(part: Subgraph, inputs: Sequence[Input], limits: Sequence[int]) -> Iterator[Subgraph]:
    """For each limit, the part with no dimension above it."""
    sizes = sorted({size for each in inputs for size in each.shape}, reverse=True)
    for limit in limits:
        changes = [f"size {size} to {limit}" for size in sizes if size > limit]
        if changes:
            yield part.changed(*changes)


def single_sizes(part: Subgraph, inputs: Sequence[Input]) -> list[str]:
    """For each size, the change of its dimensions to 1."""
    return [f"size {size} to 1" for size in sorted({size for each in inputs for size in each.shape if size > 1})]


def simpler_types(inputs: Sequence[Input]) -> list[str]:
    """Changes that convert every other floating-point type to float32."""
    names = [str(dtype).removeprefix("torch.") for dtype in _FLOATS]
    return [f"dtype {name} to float32" for name in names if any(each.dtype == name for each in inputs)]


def merged_inputs(inputs: Sequence[Input]) -> list[str]:
    """Changes that replace inputs of equal shape and type by the first of them."""
    first: dict[Any, int] = {}
    found: list[str] = []
    for each in inputs:
        number = first.setdefault((each.shape, each.dtype), each.number)
        if number != each.number:
            found.append(f"input {each.number} as {number}")
    return found


# ------------------------------------------------------------------------------------------------ judging


def side_by_side(graphs: Sequence[Graph], symbolic: bool) -> Graph:
    """Combine graphs into one that computes all of them. symbolic: keep the sizes that their nodes have already.

    Raises NotAGraph when sizes or types do not match.
    """
    combined = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, graph in enumerate(graphs):
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                known[node] = combined.placeholder(node.name if len(graphs) == 1 else f"part{number}_{node.name}")
                known[node].meta = dict(node.meta)
    results: list[torch.fx.Node] = []
    for graph in graphs:
        for node in calls_of(graph.module):
            known[node] = combined.node_copy(node, known.__getitem__)
        results += [known[node] for node in graph.module.graph.output_node().args[0]]  # type: ignore[union-attr]
    combined.output(tuple(results))
    inputs = tuple(each for graph in graphs for each in graph.inputs)
    module = torch.fx.GraphModule(torch.nn.Module(), combined)
    try:
        module = module if symbolic else rebound(module, inputs)
    except Exception as error:
        raise NotAGraph(str(error)) from error
    return Graph(graphs[0].name, graphs[0].kind, module, inputs)


class EagerPart:
    """Eager's results of a part, and those in float64 and for other inputs, computed when needed.

    Raises NotAGraph when eager cannot run it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        try:
            self._expected = expected_of(graph)
        except Exception as error:
            raise NotAGraph(str(error)) from error

    @property
    def count(self) -> int:
        """The number of results."""
        return len(self.graph.module.graph.output_node().args[0])  # type: ignore[arg-type]

    def fresh(self) -> list[Any]:
        """Copies of the inputs."""
        return list(copied(self.graph.inputs))

    def worst(self, actual: Sequence[Any]) -> Judgement | None:
        """The judgement on the first wrong result of compiled code; None if all are good."""
        eager = self._expected.eager
        results = {name: value for name, value in outputs(actual).items() if name in eager}
        if all(close(value, eager[name]) is not None for name, value in results.items()):
            return None
        found = (self._expected.judge(name, value) for name, value in results.items())
        return next((each for each in found if not each.verdict.good), None)


def shape_key(graph: Graph) -> str:
    """A key for compiled code: the calls, and the sizes, strides and types of the inputs."""
    kinds = [
        f"{tuple(each.shape)}{each.stride()}{each.dtype}" if isinstance(each, torch.Tensor) else repr(each)
        for each in graph.inputs
    ]
    calls = [f"{node.name}={node.target}{node.args}{node.kwargs}" for node in graph.module.graph.nodes]
    return "\n".join((*kinds, *calls))
