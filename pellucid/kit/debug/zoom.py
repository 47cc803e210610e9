"""Find the first operator inside a kernel whose value is wrong.

Cosimulation compares values in memory, but a kernel's inner values are not stored. So the operators between the stored
values and a wrong result are compiled once more, as a graph that returns the value of each of them, and run on the same
inputs; each value is compared with what eager computes from the values before it.

A kernel that stores more is another kernel, and the fault may not occur in it. Then a larger part of the graph is
searched: the kernels since the last library call, which may share a loop with it, then the whole graph. If storing a
value hides the fault, nothing more is stored: of the kernels that each end with one of the operators, the shortest
wrong one ends with the operator at fault.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pellucid.capture.fx import origin_of
from pellucid.kit.judge.judge import Judgement, near
from pellucid.kit.judge.reference import Reference, needed_for
from pellucid.kit.programs.graphs import Graph, calls_of, cut, is_view, size_inputs
from pellucid.kit.subjects.base import Compiled, Step, Subject

Look: TypeAlias = Callable[[Graph, Compiled], Iterable[tuple[str, Judgement]]]
"""Judges the values of a compiled graph, by FX node, each against what eager computes from the values before it."""

ALONE, KERNELS, GRAPH, SHORTEST = "its inner values", "the kernels before it", "the whole graph", "the shortest part"


@dataclass(frozen=True, slots=True)
class Inner:
    """The first wrong operator inside a kernel.

    fx_node, user_line: of the operator. scalar: the wrong loop-language operator in it, where the subject reports it.
    values: the number of inner values compared. seen_in: the part of the graph in which the fault still occurred.
    judgement: on its value.
    """

    fx_node: str
    user_line: str
    scalar: str
    values: int
    seen_in: str
    judgement: Judgement


def zoom(
    graph: Graph, compiled: Compiled, node: str, known: Mapping[str, Any], subject: Subject, look: Look
) -> Inner | None:
    """Search the kernel that computes the wrong result `node` of a compiled graph.

    graph: with the inputs on which the result is wrong. known: right values in memory by FX node. None: the fault does
    not occur in any part that was tried, the parts do not compile alone, or a library call is wrong.
    """
    kernel = _Kernel(graph, compiled, known, subject, look)
    if kernel.is_library_call(node):
        return None
    for part, seen_in in kernel.parts(node):
        found = kernel.first_wrong(part, seen_in)
        if found is not None:
            return found if kernel.is_wrong_alone(part, found.fx_node) else kernel.shortest(node) or found
    return kernel.shortest(node)


def prefixes(graph: Graph, compiled: Compiled, step: Step, subject: Subject) -> Sequence[tuple[torch.fx.Node, Graph]]:
    """The operators inside a step in order, each with the part of the step that computes its value, as a graph.

    The inputs are eager's values, because the step cannot be run.
    """
    stored = {name for each in compiled.steps for name in each.values}
    kernel = _Kernel(graph, compiled, Reference(compiled.graph, graph.inputs, stored).values, subject, lambda *_: ())
    recomputed = set(step.values)
    inner = kernel.part(sorted(recomputed), recomputed).inner
    return [
        (kernel.nodes[name], kernel.graph_of(_Part(kernel.part([name], recomputed).calls, (name,)))) for name in inner
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """Calls to compile as a separate graph. inner: those whose values it returns, in graph order."""

    calls: tuple[str, ...]
    inner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A part that was compiled and judged. wrong: the wrong ones of its inner values."""

    graph: Graph
    compiled: Compiled
    judged: Mapping[str, Judgement]
    wrong: tuple[str, ...]


class _Kernel:
    """The graph around a kernel, and the known values in it."""

    def __init__(
        self, graph: Graph, compiled: Compiled, known: Mapping[str, Any], subject: Subject, look: Look
    ) -> None:
        self.graph, self.module, self.steps = graph, compiled.graph, compiled.steps
        self.subject, self.look = subject, look
        self.placeholders = list(self.module.graph.find_nodes(op="placeholder"))
        self.known = known
        self.values = {**dict(zip((each.name for each in self.placeholders), graph.inputs, strict=True)), **known}
        self.nodes = {each.name: each for each in self.module.graph.nodes}

    def is_library_call(self, node: str) -> bool:
        """Whether a library call computes a result from known operands; a preceding kernel may not store them all."""
        called = all(step.op for step in self.steps if node in step.values)
        return called and len(self.part([node], {node}).inner) == 1

    def parts(self, node: str) -> Iterator[tuple[_Part, str]]:
        """Parts that compute a result: from values in memory, from results of library calls, and the whole graph."""
        alone = self.part([node], {node})
        yield alone, ALONE
        results = [each for step in self.steps if node in step.values for each in step.values] or [node]
        by_kernels = {name for step in self.steps if step.generated for name in step.values}
        whole = self.part(results, {*results, *by_kernels})
        if whole.calls != alone.calls:
            yield whole, KERNELS
        returned = [each.name for each in self.module.graph.output_node().all_input_nodes if each.op == "call_function"]
        every = self.part([*returned, node], set(self.known))
        if every.calls != whole.calls:
            wanted = {*whole.inner, *returned}
            yield _Part(every.calls, tuple(each for each in every.inner if each in wanted)), GRAPH

    def first_wrong(self, part: _Part, seen_in: str) -> Inner | None:
        """The first wrong value of a part; None where all are right, or the part cannot be compiled alone."""
        run = self._run(part)
        if run is None or not run.wrong:
            return None
        name = run.wrong[0]
        call = _producer(self.nodes[name])
        line = ([*map(str, origin_of(call).users), ""])[0]
        scalar = ""
        with suppress(Exception):  # optional: the operator is known anyway
            scalar = run.compiled.wrong_scalar(call.name, run.graph.inputs, near)
        return Inner(call.name, line, scalar, len(part.inner), seen_in, run.judged[name])

    def is_wrong_alone(self, part: _Part, call: str) -> bool:
        """Whether a wrong value of a part is also wrong when the part ends with it.

        Otherwise it is wrong because of the other values stored in the same loops.
        """
        ends = tuple(each for each in part.inner if _producer(self.nodes[each]).name == call)
        needed = {each.name for end in ends for each in needed_for(self.nodes[end], ())}
        run = self._run(_Part(tuple(each for each in part.calls if each in needed), ends))
        return run is not None and bool(run.wrong)

    def _run(self, part: _Part) -> _Run | None:
        try:
            graph = self.graph_of(part)
            compiled = self.subject.compile(graph)
            judged = dict(reversed([*self.look(graph, compiled)]))  # the first judgement on each
        except Exception:
            return None
        wrong = tuple(name for name in part.inner if name in judged and judged[name].verdict.bad)
        return _Run(graph, compiled, judged, wrong)

    def shortest(self, node: str) -> Inner | None:
        """The first wrong value before a result, found by bisection without storing additional values."""
        inner = self.part([node], {node}).inner

        def tried(at: int) -> Inner | None:
            return self.first_wrong(_Part(self.part([inner[at]], {node}).calls, (inner[at],)), SHORTEST)

        low, high = -1, len(inner) - 1
        found = tried(high) if high > 0 else None
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            shorter = tried(middle)
            low, high, found = (low, middle, shorter) if shorter is not None else (middle, high, found)
        return found

    def part(self, results: Sequence[str], recomputed: Set[str]) -> _Part:
        """The calls that compute results from known values. recomputed: nodes whose known values are not used."""
        have = {self.nodes[name] for name in self.values.keys() - recomputed if name in self.nodes}
        needed = {each for name in results for each in needed_for(self.nodes[name], have) if each not in have}
        calls = [each for each in calls_of(self.module) if each in needed]
        tensors = [each for each in calls if isinstance(each.meta.get("val"), torch.Tensor)]
        inner = [each.name for each in tensors if not is_view(_producer(each))]
        return _Part(tuple(each.name for each in calls), tuple(inner))

    def graph_of(self, part: _Part) -> Graph:
        """A part with the inputs that it needs, with the strides that they have in the graph."""
        every = self.placeholders if len(part.calls) == len([*calls_of(self.module)]) else size_inputs(self.module)
        module, inputs = cut(self.module, part.calls, self.values, every, part.inner)
        fresh = module.graph.find_nodes(op="placeholder")
        strided = tuple(
            _with_strides_of(value, node.meta.get("val")) for node, value in zip(fresh, inputs, strict=True)
        )
        return Graph(self.graph.name, self.graph.kind, module, strided)


def _producer(node: torch.fx.Node) -> torch.fx.Node:
    """The operator that computes the value of a node: the source of a `getitem`, else the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def _with_strides_of(value: Any, like: Any) -> Any:
    """A value with the strides that the graph was compiled for; a backend's may differ from eager's."""
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    sizes, strides = tuple(like.shape), like.stride()
    if not all(type(each) is int for each in (*sizes, *strides)) or value.stride() == strides:
        return value
    return torch.empty_strided(sizes, strides, dtype=value.dtype).copy_(value)
