"""Find the culprit within a component: an operator or a kernel, and the user's line.

Where a backend has steps, cosimulation finds the first wrong one; where it fails to compile, the failure names it. The
components before the graphs are compared with the user's program, the graph passes with the graphs.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace

import torch

from pellucid.ir.origin import merge
from pellucid.kit.debug.check import Culprit, step_of
from pellucid.kit.debug.cosim import Cosimulated, cosim_graphs
from pellucid.kit.debug.explain import explain
from pellucid.kit.debug.fusion import wrong_fusion
from pellucid.kit.debug.passes import first_changed
from pellucid.kit.debug.simulation import COMPLETE, LIVE, PASSES
from pellucid.kit.debug.user_program import first_at_stage, stage_names
from pellucid.kit.debug.zoom import prefixes
from pellucid.kit.process.child import chain_of
from pellucid.kit.programs.case import load_case
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.run import split_run
from pellucid.kit.runs.target import Request, graphs_for, subject_for
from pellucid.kit.subjects.base import Compiled, Rung, Subject
from pellucid.kit.subjects.marker import Marker

FUSION = "fusion"
_THREADS = torch.get_num_threads()


def find_step(request: Request, name: str, report: str, number: int | None = None) -> Culprit | None:
    """The step of this name on a rung (None: the whole backend), without running its graphs. report: see `step_of`."""
    subject = select_rung(subject_for(request), number, request)
    graphs = graphs_for(request, subject)
    return next((step for graph in graphs if (step := step_of(subject, graph, name, report)) is not None), None)


def operators_in(request: Request, number: int | None, name: str) -> list[Culprit]:
    """The operators in a step of a rung, in order, for a step that cannot be run."""
    subject = select_rung(subject_for(request), number, request)
    return [Culprit.of(graph.name, "", node) for graph, node, _ in _prefixes(request, subject, name)]


def run_up_to(request: Request, number: int | None, name: str, at: int) -> None:
    """Run the part of a step that computes the value of its operator number `at`."""
    subject = select_rung(subject_for(request), number, request)
    _, _, part = _prefixes(request, subject, name)[at]
    subject.compile(part).run(part.inputs)


def _prefixes(request: Request, subject: Subject, name: str) -> list[tuple[Graph, torch.fx.Node, Graph]]:
    for graph in graphs_for(request, subject):
        compiled = subject.compile(graph)
        for step in compiled.steps:
            if step.name == name:
                return [(graph, node, part) for node, part in prefixes(graph, compiled, step, subject)]
    return []


def select_rung(subject: Subject, number: int | None, request: Request) -> Subject:
    """The backend up to a rung of its ladder, with the rung's number of threads set; None: the whole backend."""
    rung = Rung("", subject) if number is None else subject.ladder()[number]
    torch.set_num_threads(rung.threads or request.threads or _THREADS)
    return rung.subject


def find_culprit(request: Request, number: int) -> Culprit | None:
    """The culprit within the component of a rung; None where it cannot be determined.

    A rung without steps is inspected through the next one above it that has steps.
    """
    subject = subject_for(request)
    rungs = subject.ladder()
    component = rungs[number].component
    if component in stage_names(subject):
        return wrong_before_graphs(request, subject, component)
    if component == PASSES:
        return wrong_pass(request, rungs[number].subject)
    for at in range(number, len(rungs)):
        part = select_rung(subject, at, request)
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
                return _with_fusion(first, part, graphs) if rungs[number].component == FUSION else first
        return None
    return None


def _first_of(found: Cosimulated, subject: Subject, graphs: Sequence[Graph]) -> Culprit | None:
    first = found.first_divergence
    if first is None:
        return None
    if first.inner is None:
        for graph in graphs:
            step = step_of(subject, graph, first.kernel) if graph.name == first.graph else None
            if step is not None:
                return step
    lines = (first.operator_line,) if first.operator_line else ()
    return Culprit(first.graph, first.kernel, "", (first.operator,), lines, inside=first.inner)


def _with_fusion(culprit: Culprit, subject: Subject, graphs: Sequence[Graph]) -> Culprit:
    """The culprit with the fusion that causes the fault, if one does."""
    graph = next(graph for graph in graphs if graph.name == culprit.graph)
    fused = wrong_fusion(graph, subject)
    if fused is None:
        return culprit
    return replace(culprit, fx_nodes=tuple(dict.fromkeys((*fused.first, *fused.second))), fused=fused)


def refused_part(subject: Subject, graph: Graph, error: BaseException) -> Culprit | None:
    """The part that a backend could not compile: named by the C++ compiler's error, else the node being compiled."""
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


def wrong_before_graphs(request: Request, subject: Subject, component: str) -> Culprit | None:
    """The first wrong operator of the program after a component; None for a run, which begins with its graphs."""
    if split_run(request.target) is not None:
        return None
    found = first_at_stage(component, load_case(request.target), subject, request.backward, request.dynamic)
    return None if found is None else Culprit.called(found.op, found.user_line)


def wrong_pass(request: Request, subject: Subject) -> Culprit | None:
    """The first operator whose result the backend's passes changed, or whose side effect they dropped."""
    for graph in graphs_for(request, subject):
        try:
            passed = subject.passed(graph)
        except Exception as error:
            return refused_part(subject, graph, error)
        found = _changed(graph, passed)
        if found is not None:
            return found
    return None


def _changed(graph: Graph, passed: torch.fx.GraphModule) -> Culprit | None:
    nodes = first_changed(graph, passed)
    return Culprit.of(graph.name, str(nodes[0].target), nodes[0]) if nodes else None
