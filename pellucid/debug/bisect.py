"""Which component of a backend is to blame: the first whose use makes a program fail, and what in it.

A backend has a ladder (`Subject.ladder`): ways to run a program from eager on, each with one more component. The
search keeps a rung that is good and a higher one that is bad, and halves what lies between. What is to blame within
the component, an operator or a kernel, is then found by taking each decomposition for itself, by cosimulation, or from
the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from pellucid.debug.case import copied
from pellucid.debug.check import Checked, Culprit, Request, check_target, graphs_for, isolated, step_of, subject_for
from pellucid.debug.child import SECONDS, Failure, Marker, Worker
from pellucid.debug.cosim import COMPLETE, LIVE, Cosimulated, cosim_graphs
from pellucid.debug.graphs import Graph, interpret, is_random
from pellucid.debug.judge import Verdict, judge
from pellucid.debug.plain import Undecomposed
from pellucid.debug.subject import Rung, Subject
from pellucid.errors import UserError

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Tried:
    """One rung and what became of the program there."""

    component: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bisected:
    """component: to blame; `nothing` where the program is good. culprit: what in it, as far as that can be told.

    checked: the program under the whole backend. tried: the rungs that were run, in that order.
    """

    backend: str
    component: str
    culprit: Culprit | None
    checked: Checked
    tried: tuple[Tried, ...]

    @property
    def good(self) -> bool:
        return self.component == NOTHING


def bisect(
    request: Request, seconds: float = SECONDS, memory: int = 0, tell: Callable[[str], None] = print
) -> Bisected:
    """Find the component that makes a program fail; every attempt runs in a process of its own.

    seconds, memory (bytes): what an attempt may take. tell: is given a line for each attempt. Raises UserError as
    `check_isolated` does.
    """
    with Worker(memory) as worker:
        tried: list[Tried] = []

        def run(number: int | None, name: str) -> Checked:
            function = "pellucid.debug.bisect:check_rung"
            found = isolated(worker, function, request, number, seconds=seconds, backend=request.backend)
            tried.append(Tried(name, found.verdict))
            tell(f"{name}: {found.verdict}")
            return found

        whole = run(None, "all of it")
        if whole.good:
            return Bisected(request.backend, NOTHING, None, whole, tuple(tried))
        names = worker.call("pellucid.debug.bisect:rung_names", request, seconds=seconds)
        if isinstance(names, Failure):
            raise UserError(f"the backend {request.backend} cannot be taken apart: {names}")
        low, high, worst = -1, len(names) - 1, whole
        while high - low > 1:
            middle = (low + high) // 2
            found = run(middle, names[middle])
            low, high, worst = (middle, high, worst) if found.good else (low, middle, found)
        culprit = worst.step
        if culprit is None:
            answer = worker.call("pellucid.debug.bisect:find_culprit", request, high, seconds=seconds)
            culprit = answer if isinstance(answer, Culprit) else None
    return Bisected(request.backend, names[high], culprit, whole, tuple(tried))


# ------------------------------------------------------------------------------------------------ in the worker


def rung_names(request: Request) -> list[str]:
    """The components of a backend, from the front."""
    return [rung.component for rung in subject_for(request).ladder()]


def check_rung(request: Request, number: int | None) -> Checked:
    """`check` on a rung of the ladder; None: the backend as it is."""
    subject = subject_for(request)
    return check_target(request, subject if number is None else _stand_on(subject.ladder()[number]))


def _stand_on(rung: Rung) -> Subject:
    if rung.threads:
        torch.set_num_threads(rung.threads)
    return rung.subject


def find_culprit(request: Request, number: int) -> Culprit | None:
    """What is wrong within the component of a rung; None where that cannot be told.

    A rung that has no steps to look at is judged by the next one above it that has.
    """
    rungs = subject_for(request).ladder()[number:]
    if rungs[0].component == "decompositions":
        return wrong_decomposition(rungs[0].subject, request)
    for rung in rungs:
        subject = _stand_on(rung)
        graphs = graphs_for(request, subject)
        if not any(subject.compile(graph).steps for graph in graphs):
            continue
        for mode in (COMPLETE, LIVE):
            first = _first_of(cosim_graphs(graphs, subject, mode, Marker()), subject, graphs)
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


def wrong_decomposition(subject: Subject, request: Request) -> Culprit | None:
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
            wrong.extend([node] * (not _agree(again, value)))
        return value

    interpret(graph.module, inputs, compare)
    return wrong[0] if wrong else None


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether what a decomposition returns is the operator's result, up to rounding."""
    pairs = zip(_flat(ours), _flat(theirs), strict=False)
    return all(judge(a, b, b.double() if b.is_floating_point() else b).error < 1e-2 for a, b in pairs)


def _flat(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]
