"""What is to blame within a component: an operator or a kernel, and the user's line.

Where a backend has steps, cosimulation finds the first wrong one; where it cannot compile, the failure says where. For
the components before there are steps, each operator is taken for itself: as Dynamo captured it, as its decomposition
computes it, as it is after graph passes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.capture.graph import origin_of
from pellucid.ir.origin import merge
from pellucid.kit.debug.check import Culprit, Request, check_case, graphs_for, named_tensors, step_of, subject_for
from pellucid.kit.debug.cosim import COMPLETE, LIVE, Cosimulated, cosim_graphs
from pellucid.kit.debug.passes import agree, first_changed, tensors_of
from pellucid.kit.process.child import NOT_THE_USERS, chain_of
from pellucid.kit.programs.case import copied, load_case
from pellucid.kit.programs.graphs import Graph, interpret, is_random
from pellucid.kit.runs.run import split_run
from pellucid.kit.subjects.base import AsTraced, Compiled, Rung, Subject, Undecomposed
from pellucid.kit.subjects.explain import explain
from pellucid.kit.subjects.marker import Marker

_THREADS = torch.get_num_threads()


def find_step(request: Request, name: str, number: int | None = None) -> Culprit | None:
    """The step of this name on a rung (None: the backend as it is), whose graphs are not run."""
    subject = stand_on(subject_for(request), number, request)
    graphs = graphs_for(request, subject)
    return next((step for graph in graphs if (step := step_of(subject, graph, name)) is not None), None)


def stand_on(subject: Subject, number: int | None, request: Request) -> Subject:
    """The backend as far as a rung of its ladder; None: as it is."""
    rung = Rung("", subject) if number is None else subject.ladder()[number]
    torch.set_num_threads(rung.threads or request.threads or _THREADS)
    return rung.subject


def find_culprit(request: Request, number: int) -> Culprit | None:
    """What is wrong within the component of a rung; None where that cannot be told.

    A rung that has no steps to look at is judged by the next one above it that has.
    """
    subject = subject_for(request)
    rungs = subject.ladder()
    if rungs[number].component in _BEFORE_STEPS:
        return _BEFORE_STEPS[rungs[number].component](request, rungs[number].subject)
    for at in range(number, len(rungs)):
        part = stand_on(subject, at, request)
        graphs = graphs_for(request, part)
        compiled: list[Compiled] = []
        for graph in graphs:
            try:
                compiled.append(part.compile(graph))
            except Exception as error:
                return refused_part(part, graph, error)
        if not any(each.steps for each in compiled):
            continue
        for mode in (COMPLETE, LIVE):
            first = _first_of(cosim_graphs(graphs, part, mode, Marker()), part, graphs)
            if first is not None:
                return first
        return None
    return None


def _first_of(found: Cosimulated, subject: Subject, graphs: Sequence[Graph]) -> Culprit | None:
    first = found.first_divergence
    if first is None:
        return None
    for graph in graphs:
        step = step_of(subject, graph, first.kernel) if graph.name == first.graph else None
        if step is not None:
            return step
    return Culprit(first.graph, first.kernel, "", (first.fx_node,), (first.user_line,) if first.user_line else ())


def refused_part(subject: Subject, graph: Graph, error: BaseException) -> Culprit | None:
    """What a backend could not compile: what a C++ compiler complains of, else the node that was worked on."""
    refused = subject.refused(error)
    if refused is not None:
        why = explain(refused)
        if why.fx_node:
            users = (why.user_line,) if why.user_line else ()
            return Culprit(graph.name, why.kernel, "", tuple(why.fx_node.split(", ")), users)
        whole = merge(value.origin for value in refused.values.values())
        return Culprit(graph.name, why.kernel, "", whole.nodes, tuple(map(str, whole.users)))
    for each in chain_of(error):
        for frame, _ in reversed(list(traceback.walk_tb(each.__traceback__))):
            node = next((value for value in frame.f_locals.values() if isinstance(value, torch.fx.Node)), None)
            if node is not None:
                return Culprit.of(graph.name, str(node.target), node)
    return None


def wrong_capture(request: Request, subject: Subject) -> Culprit | None:
    """The first operator of eager's that Dynamo's graphs do not call, or call with another result."""
    if split_run(request.target) is not None:
        return None  # a run begins behind Dynamo
    case, captured = load_case(request.target), Calls()

    def backend(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with captured:
                return module(*args)

        return run

    eager, fresh, again = Calls(), case.fresh(), case.fresh()
    with torch.set_grad_enabled(request.backward):
        with eager:
            fresh()
        torch.compile(again.fn, backend=backend, dynamic=request.dynamic)(*again.args, **again.kwargs)
    for position, call in enumerate(eager.made):
        other = captured.made[position] if position < len(captured.made) else None
        if other is None or other.op != call.op or not agree(other.result, call.result):
            return call.culprit("eager")
    return None


def wrong_output(request: Request, subject: Subject) -> Culprit | None:
    """The operator of eager's that made the first output that is wrong: no step of the backend is known yet."""
    if split_run(request.target) is not None:
        return None  # what eager called is not in a run
    case = load_case(request.target)
    found = check_case(case, subject, request.backward, request.dynamic)
    bad = [name for output in found.outputs if not output.verdict.good for name in output.name.split(" and ")]
    calls, fresh = Calls(), case.fresh()
    with torch.set_grad_enabled(request.backward), calls:
        outputs = dict(named_tensors(fresh(), "output"))
    for output in (outputs[name] for name in bad if name in outputs):
        made = [call for call in calls.made if any(_is_same(output, tensor) for tensor in tensors_of(call.live))]
        if made:
            return made[-1].culprit("eager")
    return None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that eager called: its result as it was, and as it is; the user's line."""

    op: str
    result: Any
    live: Any
    line: str

    def culprit(self, graph: str) -> Culprit:
        return Culprit(graph, "", self.op, (self.op.partition("::")[2],), (self.line,) if self.line else ())


class Calls(TorchDispatchMode):
    """Notes the operators that are called while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(NOT_THE_USERS)]
        line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        self.made.append(Call(func._schema.name, copied(result), result, line))
        return result


def wrong_pass(request: Request, subject: Subject) -> Culprit | None:
    """The first operator that has another result after the backend's passes, or of which they lost the effect."""
    for graph in graphs_for(request, subject):
        try:
            passed = subject.passed(graph)
        except Exception as error:
            return refused_part(subject, graph, error)
        found = _changed(graph, passed)
        if found is not None:
            return found
    return None


def wrong_layout(request: Request, subject: Subject) -> Culprit | None:
    """The first operator of a forward graph that has another result where the backend lays both halves out."""
    pairs = zip(graphs_for(request, AsTraced({}, subject)), graphs_for(request, subject), strict=True)
    found = (_changed(before, after.module) for before, after in pairs if before.kind == "forward")
    return next(filter(None, found), None) or wrong_output(request, subject)


def _changed(graph: Graph, passed: torch.fx.GraphModule) -> Culprit | None:
    nodes = first_changed(graph, passed)
    if not nodes:
        return None
    users = [str(user) for node in nodes for user in origin_of(node).users]
    names = tuple(node.name for node in nodes)
    return Culprit(graph.name, "", str(nodes[-1].target), names, tuple(dict.fromkeys(users)))


def wrong_decomposition(request: Request, subject: Subject) -> Culprit | None:
    """The first operator whose decomposition does not compute what the operator does, on the program's own numbers."""
    for graph in graphs_for(request, Undecomposed({}, subject)):
        node = _first_unlike(graph, subject.decompositions())
        if node is not None:
            return Culprit.of(graph.name, str(node.target), node)
    return None


def _first_unlike(graph: Graph, table: Mapping[Any, Callable[..., Any]]) -> torch.fx.Node | None:
    wrong: list[torch.fx.Node] = []
    inputs = copied(graph.inputs)
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    values: dict[torch.fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))

    def compare(node: torch.fx.Node, value: Any) -> Any:
        values[node] = value
        if node.target in table and not wrong and not is_random(node):
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            again = table[node.target](*copied(args), **copied(kwargs))
            wrong.extend([node] * (not agree(again, value)))
        return value

    interpret(graph.module, inputs, compare)
    return wrong[0] if wrong else None


# Components whose parts are no steps of a compiled graph: how to find what is wrong in them.
_BEFORE_STEPS: Mapping[str, Callable[[Request, Subject], Culprit | None]] = {
    "dynamo": wrong_capture,
    "aotautograd": wrong_output,
    "joint graph": wrong_output,
    "decompositions": wrong_decomposition,
    "layout": wrong_layout,
    "graph passes": wrong_pass,
}
