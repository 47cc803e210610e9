"""Parts of a captured graph as graphs of their own, and programs that show their failure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template

from pellucid.capture.graph import attribute_of
from pellucid.debug.case import copied
from pellucid.debug.check import Request, captured
from pellucid.debug.child import Marker
from pellucid.debug.graphs import Graph, calls_of, in_float64, interpret, is_random, rebound, widened
from pellucid.debug.judge import DRAWS, Verdict, judge, worst
from pellucid.debug.subject import Subject

# Numbers of an input that are written into a program; more are kept in a file beside it.
_LITERAL = 64


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Some calls of a captured graph.

    graph: its name. names: of the calls, in graph order. changes: what was done to the inputs, in order: `size A to B`
    (all dimensions of A elements keep their first B), `ones in I`, `zeros in I`, `integers in I` (rounded).
    """

    graph: str
    names: tuple[str, ...]
    changes: tuple[str, ...] = ()


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
            found: dict[str, Any] = dict(zip(placeholders, graph.inputs, strict=True))

            def keep(node: torch.fx.Node, value: Any) -> Any:
                found[node.name] = copied(value)
                return value

            torch.manual_seed(0)
            interpret(graph.module, copied(graph.inputs), keep)
            self._values[name] = found
        return self._values[name]

    def cut(self, part: Subgraph) -> Graph:
        """The part as a graph: what it needs from outside are inputs; what nobody in it needs is returned as well."""
        whole = self.graphs[part.graph]
        chosen = set(part.names)
        nodes = [node for node in calls_of(whole.module) if node.name in chosen]
        values = self.values(part.graph)
        made = torch.fx.Graph()
        known: dict[torch.fx.Node, torch.fx.Node] = {}
        inputs: list[Any] = []
        for node in nodes:
            for each in node.all_input_nodes:
                if each in known or each.name in chosen:
                    continue
                if each.op == "get_attr":
                    value = attribute_of(whole.module, each)
                else:
                    value = values[each.name]
                if not isinstance(value, torch.Tensor | int | float | bool):
                    raise NotAGraph(f"{each.name} is no tensor")
                known[each] = made.placeholder(each.name)
                inputs.append(copied(value))
            known[node] = made.node_copy(node, known.__getitem__)
        inner = {each for node in nodes for each in node.all_input_nodes}
        returned = [node for node in nodes if node not in inner or any(user.name not in chosen for user in node.users)]
        made.output(tuple(known[node] for node in returned if isinstance(values[node.name], torch.Tensor)))
        inputs = _changed(inputs, part.changes)
        module = torch.fx.GraphModule(torch.nn.Module(), made)
        return Graph(part.graph, whole.kind, rebound(module, inputs), tuple(inputs))


class NotAGraph(ValueError):
    """Calls that cannot stand alone, or not with these inputs."""


_workshops: dict[str, Workshop] = {}


def workshop(request: Request) -> Workshop:
    """The one of this process; a request is captured once."""
    key = repr(request)
    if key not in _workshops:
        _workshops.clear()
        _workshops[key] = Workshop(request)
    return _workshops[key]


def _changed(inputs: list[Any], changes: Sequence[str]) -> list[Any]:
    for change in changes:
        kind, *words = change.split()
        if kind == "size":
            old, new = int(words[0]), int(words[2])
            inputs = [_narrowed(each, old, new) for each in inputs]
        else:
            number = int(words[-1])
            inputs[number] = _plain(kind, inputs[number])
    return inputs


def _narrowed(value: Any, old: int, new: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return new if value == old and not isinstance(value, bool) else value
    for dim, size in enumerate(value.shape):
        if size == old:
            value = value.narrow(dim, 0, new)
    return value.clone() if value.is_contiguous() else copied(value)


def _plain(kind: str, value: torch.Tensor) -> torch.Tensor:
    match kind:
        case "ones":
            return torch.ones_like(value)
        case "zeros":
            return torch.zeros_like(value)
        case _:
            return value.round().clamp(-9, 9) if value.is_floating_point() else value


def simpler(part: Subgraph, shapes: Sequence[tuple[int, ...] | None], plain: Sequence[bool]) -> Iterator[Subgraph]:
    """The part with one change more to its inputs: halved dimensions first, the largest first; then plain numbers.

    shapes: of the inputs, None for what is no tensor. plain: which of them are plain already.
    """
    sizes = sorted({size for shape in shapes for size in shape or () if size > 1}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((1, size // 2, size - 1)):
            if 0 < smaller < size:
                yield replace(part, changes=(*part.changes, f"size {size} to {smaller}"))
    for number, shape in enumerate(shapes):
        if shape is not None and not plain[number] and not any(c.endswith(f" in {number}") for c in part.changes):
            for kind in ("ones", "zeros", "integers"):
                yield replace(part, changes=(*part.changes, f"{kind} in {number}"))


def compare(graph: Graph, subject: Subject) -> Verdict:
    """What a subject makes of a graph, beside eager. Raises NotAGraph when eager cannot run it, else what compiled code
    raises.
    """
    try:
        torch.manual_seed(0)
        eager = interpret(graph.module, copied(graph.inputs))
        exact = _in_float64(graph, eager)
        draws = [interpret(graph.module, _nudged(graph.inputs, seed)) for seed in range(DRAWS)]
    except Exception as error:
        raise NotAGraph(str(error)) from error
    torch.manual_seed(0)
    actual = subject.compile(graph).run(list(copied(graph.inputs)), Marker())
    verdicts = [
        judge(a, e, x, [draw[number] for draw in draws]).verdict
        for number, (a, e, x) in enumerate(zip(actual, eager, exact, strict=True))
        if isinstance(e, torch.Tensor)
    ]
    return worst(verdicts)


def _in_float64(graph: Graph, eager: Sequence[Any]) -> Sequence[Any]:
    if any(is_random(node) for node in calls_of(graph.module)):
        return eager
    try:
        return interpret(in_float64(graph.module), widened(list(graph.inputs)))
    except Exception:  # an operator without float64
        return eager


def _nudged(inputs: Sequence[Any], seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    moved = copied(list(inputs))
    for value in moved:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() and value.is_contiguous():
            towards = torch.where(torch.rand(value.shape, generator=generator) < 0.5, -math.inf, math.inf)
            if value.dtype is not torch.float64:
                value.copy_(torch.nextafter(value, towards.to(value.dtype)))
    return moved


_REPRO = Template('''\
"""{{ title }}

Runs the graph eagerly and compiled, and compares; exits with 1 when they differ. Needs torch and the backend.
"""

import sys
from pathlib import Path

import torch
from torch import device, inf, nan  # noqa: F401


class Graph(torch.nn.Module):
{{ code }}

def make_inputs():
{%- if stored %}
    return list(torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True))
{%- else %}
    return [
{%- for text in inputs %}
        {{ text }},
{%- endfor %}
    ]
{%- endif %}


def make():
    return Graph(), tuple(make_inputs())


if __name__ == "__main__":
    with torch.no_grad():
        expected = Graph()(*make_inputs())
        actual = torch.compile(Graph(), backend={{ backend }}{{ options }})(*make_inputs())
    bad = 0
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        same = torch.allclose(a, e, rtol=1e-3, atol=1e-4, equal_nan=True) and a.dtype == e.dtype
        print(f"output {position}: {'the same' if same else 'different'}, {tuple(e.shape)} {e.dtype}")
        bad += not same
    sys.exit(bad > 0)
''', keep_trailing_newline=True)  # fmt: skip


def write_repro(request: Request, part: Subgraph, folder: str, title: str) -> str:
    """Write `repro.py`, and `inputs.pt` where the numbers are many; returns the text of the graph."""
    graph = workshop(request).cut(part)
    code = "".join(f"    {line}\n" if line.strip() else "\n" for line in graph.module.code.strip().splitlines())
    stored = sum(each.numel() for each in graph.inputs if isinstance(each, torch.Tensor)) > _LITERAL
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if stored:
        torch.save(list(graph.inputs), place / "inputs.pt")
    text = _REPRO.render(
        title=title,
        code=code,
        stored=stored,
        inputs=[_literal(each) for each in graph.inputs],
        backend=repr(request.backend),
        options=f", options={dict(request.options)!r}" if request.options else "",
    )
    (place / "repro.py").write_text(text)
    return graph.module.code.strip()


def _literal(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    if value.is_contiguous() or not value.numel():
        return text
    return f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype}).copy_({text})"
