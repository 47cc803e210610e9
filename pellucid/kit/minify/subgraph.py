"""Parts of a captured graph as graphs of their own, and what a subject makes of them."""

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
    """Calls that cannot stand alone, or not with these inputs."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Some calls of a captured graph.

    graph: its name. names: of the calls, in graph order. changes: what was done to the inputs, in order; inputs are
    numbered as the calls need them first:
    `size A to B` (every dimension of A elements keeps its first B), `dtype A to B`, `input J as I` (where I stands for
    J), `ones in I`, `zeros in I`, `integers in I` (rounded).
    """

    graph: str
    names: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def changed(self, *changes: str) -> Subgraph:
        """The same with more changes."""
        return replace(self, changes=(*self.changes, *changes))


@dataclass(frozen=True, slots=True)
class Input:
    """What is known of an input of a part. number: in the changes. plain: all its elements are the same."""

    number: int
    shape: tuple[int, ...]
    dtype: str
    plain: bool


class Workshop:
    """The captured graphs of a program in this process, and what eager computes in them."""

    def __init__(self, request: Request) -> None:
        graphs, self.subject = captured(request)
        self.graphs = {graph.name: graph for graph in graphs}
        self._values: dict[str, dict[str, Any]] = {}

    def values(self, name: str) -> dict[str, Any]:
        """Eager's result of every node of a graph, its inputs included, as they were when they came to be."""
        if name not in self._values:
            graph = self.graphs[name]
            placeholders = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
            given = dict(zip(placeholders, graph.inputs, strict=True))
            self._values[name] = given | values_of(graph.module, copied(graph.inputs))
        return self._values[name]

    def names(self, name: str) -> tuple[str, ...]:
        """The calls of a graph, in order."""
        return tuple(node.name for node in calls_of(self.graphs[name].module))

    def units(self, name: str, among: Sequence[str], alike: bool = True) -> list[Subgraph]:
        """Each call alone, in the order of `among`; one that returns several tensors with the calls that take them out.

        alike: keep also those that are the same as one before, but for the numbers they compute with.
        """
        nodes = {node.name: node for node in calls_of(self.graphs[name].module)}
        found: dict[tuple[str, ...], None] = {}
        seen: set[str] = set()
        for node in (nodes[each] for each in among if each in nodes):
            base = node
            while _takes_out(base) and isinstance(base.args[0], torch.fx.Node):
                base = base.args[0]
            members = {base.name, *(user.name for user in base.users if _takes_out(user))}
            unit = tuple(each for each in nodes if each in members)
            text = self._described(name, base)
            if unit and unit not in found and (alike or text not in seen):
                found[unit] = None
            seen.add(text)
        return [Subgraph(name, unit) for unit in found]

    def around(self, name: str, names: Sequence[str], reach: int) -> Subgraph:
        """The part with what stands up to `reach` calls before or after it in the graph."""
        every = self.names(name)
        at = [position for position, each in enumerate(every) if each in set(names)]
        near = {p for position in at for p in range(position - reach, position + reach + 1)}
        return Subgraph(name, tuple(each for position, each in enumerate(every) if position in near))

    def before(self, name: str, names: Sequence[str], steps: int) -> tuple[str, ...]:
        """The calls on which others depend, through that many calls at most, the nearest first."""
        nodes = {node.name: node for node in calls_of(self.graphs[name].module)}
        found: dict[str, None] = {}
        last = [each for each in names if each in nodes]
        for _ in range(steps):
            last = [n.name for each in last for n in nodes[each].all_input_nodes if n.name in nodes]
            last = [each for each in dict.fromkeys(last) if each not in found and each not in names]
            found |= dict.fromkeys(last)
        return tuple(found)

    def operators(self, name: str, names: Sequence[str]) -> tuple[str, ...]:
        """What the calls call, each once."""
        chosen = set(names)
        return tuple(sorted({str(n.target) for n in calls_of(self.graphs[name].module) if n.name in chosen}))

    def inputs(self, part: Subgraph) -> list[Input]:
        """The tensors that a part takes."""
        _, numbered = self._cut(part)
        return [
            Input(number, tuple(each.shape), str(each.dtype).removeprefix("torch."), _is_plain(each))
            for number, each in numbered.items()
            if isinstance(each, torch.Tensor)
        ]

    def cut(self, part: Subgraph) -> Graph:
        """The part as a graph: what it needs from outside are inputs; what nobody in it needs is returned as well."""
        return side_by_side([self.bare(part)], self.symbolic(part))

    def bare(self, part: Subgraph) -> Graph:
        """The same whose nodes do not know their sizes and types yet, see `side_by_side`."""
        module, inputs = self._cut(part)
        return Graph(part.graph, self.graphs[part.graph].kind, module, tuple(inputs.values()))

    def symbolic(self, part: Subgraph) -> bool:
        """Whether the part keeps the symbols for sizes with which it was captured."""
        module = self.graphs[part.graph].module
        return bool(size_inputs(module)) and not any(each.startswith("dtype") for each in part.changes)

    def _described(self, name: str, node: torch.fx.Node) -> str:
        """A call in words: two calls of which they are the same differ by the numbers they compute with at most."""
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
        module, given = cut(whole.module, chosen, self.values(part.graph), sizes)
        for node, value in zip(module.graph.find_nodes(op="placeholder"), given, strict=True):
            if not isinstance(value, torch.Tensor | int | float | bool):
                raise NotAGraph(f"{node.name} is no tensor")
        inputs = _changed(module.graph, list(copied(given)), part.changes)
        if part.changes:
            module.recompile()
        return module, inputs


def _takes_out(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _is_plain(value: torch.Tensor) -> bool:
    return not value.numel() or bool((value == value.flatten()[0]).all())


# ------------------------------------------------------------------------------------------------ changes


def _changed(graph: torch.fx.Graph, given: list[Any], changes: Sequence[str]) -> dict[int, Any]:
    """Apply changes to a graph and its inputs; returns what is left of these, by number."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = dict(enumerate(given))
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
    """Change what is written into the calls of a graph."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tuple(change(each) for each in node.args)
            node.kwargs = {name: change(each) for name, each in node.kwargs.items()}


def _resized(value: Any, old: int, new: int) -> Any:
    """Sizes stand in lists; a number alone means something else."""
    if isinstance(value, list | tuple):
        return [new if type(each) is int and each == old else _resized(each, old, new) for each in value]
    return value


def narrowed(value: Any, old: int, new: int) -> Any:
    """A value with `new` where it has a size of `old`."""
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
    """The part with no dimension longer than a limit, for each limit."""
    sizes = sorted({size for each in inputs for size in each.shape}, reverse=True)
    for limit in limits:
        changes = [f"size {size} to {limit}" for size in sizes if size > limit]
        if changes:
            yield part.changed(*changes)


def single_sizes(part: Subgraph, inputs: Sequence[Input]) -> list[str]:
    """Changes that make all dimensions of one size 1."""
    return [f"size {size} to 1" for size in sorted({size for each in inputs for size in each.shape if size > 1})]


def plainer_types(inputs: Sequence[Input]) -> list[str]:
    """Changes that make every float of another type float32."""
    names = [str(dtype).removeprefix("torch.") for dtype in _FLOATS]
    return [f"dtype {name} to float32" for name in names if any(each.dtype == name for each in inputs)]


def merged_inputs(inputs: Sequence[Input]) -> list[str]:
    """Changes that put the first input of a shape and type in the place of the others."""
    first: dict[Any, int] = {}
    found: list[str] = []
    for each in inputs:
        kept = first.setdefault((each.shape, each.dtype), each.number)
        if kept != each.number:
            found.append(f"input {each.number} as {kept}")
    return found


# ------------------------------------------------------------------------------------------------ judging


def side_by_side(graphs: Sequence[Graph], symbolic: bool) -> Graph:
    """Graphs as one that does what all of them do. symbolic: the sizes that their nodes know already are kept.

    Raises NotAGraph when sizes or types do not fit.
    """
    made = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, graph in enumerate(graphs):
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                known[node] = made.placeholder(node.name if len(graphs) == 1 else f"part{number}_{node.name}")
                known[node].meta = dict(node.meta)
    results: list[torch.fx.Node] = []
    for graph in graphs:
        for node in calls_of(graph.module):
            known[node] = made.node_copy(node, known.__getitem__)
        results += [known[node] for node in graph.module.graph.output_node().args[0]]  # type: ignore[union-attr]
    made.output(tuple(results))
    inputs = tuple(each for graph in graphs for each in graph.inputs)
    module = torch.fx.GraphModule(torch.nn.Module(), made)
    try:
        module = module if symbolic else rebound(module, inputs)
    except Exception as error:
        raise NotAGraph(str(error)) from error
    return Graph(graphs[0].name, graphs[0].kind, module, inputs)


class EagerPart:
    """What eager makes of a graph, and as much of what float64 and other draws make of it as has to be known.

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
        """How many results it has."""
        return len(self.graph.module.graph.output_node().args[0])  # type: ignore[arg-type]

    def fresh(self) -> list[Any]:
        """Copies of the inputs."""
        return list(copied(self.graph.inputs))

    def worst(self, actual: Sequence[Any]) -> Judgement | None:
        """What is wrong with results of compiled code, by the first that is; None if they are good."""
        eager = self._expected.eager
        results = {name: value for name, value in outputs(actual).items() if name in eager}
        if all(close(value, eager[name]) is not None for name, value in results.items()):
            return None
        found = (self._expected.judge(name, value) for name, value in results.items())
        return next((each for each in found if not each.verdict.good), None)


def shape_key(graph: Graph) -> str:
    """What compiled code depends on: the calls, and the sizes, strides and types of the inputs."""
    kinds = [
        f"{tuple(each.shape)}{each.stride()}{each.dtype}" if isinstance(each, torch.Tensor) else repr(each)
        for each in graph.inputs
    ]
    calls = [f"{node.name}={node.target}{node.args}{node.kwargs}" for node in graph.module.graph.nodes]
    return "\n".join((*kinds, *calls))
