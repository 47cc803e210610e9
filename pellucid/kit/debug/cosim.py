"""Cosimulation: compare every intermediate result of a compiled graph with eager's, and find the first wrong one.

The graphs themselves are first compared with the program that they were captured from (`user_program`).

Compiled code can also be compared with other compiled code (`Against`): another backend, other options, or the results
saved in a run. Where the two differ, float64 decides which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pellucid.errors import UserError
from pellucid.kit.debug.simulation import COMPLETE, Difference, Simulation
from pellucid.kit.debug.user_program import first_before_graphs
from pellucid.kit.judge.judge import Verdict, worst
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.programs.case import Case, load_case
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.run import Run, run_of, split_run, write_table
from pellucid.kit.runs.target import Request, graphs_for, subject_for
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Probe, Subject
from pellucid.kit.subjects.marker import Marker
from pellucid.kit.subjects.registry import subject_of


@dataclass(frozen=True, slots=True)
class Cosimulated(Shown):
    """All results that could be compared, in the order in which they were computed.

    unseen: the number of FX nodes whose results were never stored in memory, inside kernels. against: what the results
    were compared with.
    """

    backend: str
    mode: str
    verdict: Verdict
    differences: tuple[Difference, ...]
    unseen: int
    against: str = "eager"

    @property
    def good(self) -> bool:
        return self.verdict.good

    def with_first(self, first: Difference | None) -> Cosimulated:
        """The same with another result in front."""
        if first is None:
            return self
        return replace(self, verdict=worst([first.verdict, self.verdict]), differences=(first, *self.differences))

    @property
    def first_divergence(self) -> Difference | None:
        """The first result that is wrong."""
        return next((each for each in self.differences if each.verdict.bad), None)


def cosim_case(
    case: Case, subject: Subject, mode: str = COMPLETE, *, backward: bool = False, dynamic: bool | None = None
) -> Cosimulated:
    """Cosimulate every graph of a program on its inputs in eager mode, and compare the graphs with the program."""
    before = before_graphs(case, subject, backward, dynamic)
    found = cosim_graphs(subject.graphs(case, backward=backward, dynamic=dynamic), subject, mode)
    return found.with_first(before)


def before_graphs(case: Case, subject: Subject, backward: bool, dynamic: bool | None) -> Difference | None:
    """The first operator of the program whose result in the captured graphs is wrong, before they are compiled."""
    found = first_before_graphs(case, subject, backward, dynamic)
    return None if found is None else Difference("", found.stage, -1, found.op, found.user_line, found.judgement)


@dataclass(frozen=True, slots=True)
class Against:
    """Other compiled code. values: returns its results for a graph in a mode, by FX node or `output N`.

    subject: the backend that computes them here; None for a run.
    """

    name: str
    values: Callable[[Graph, str], Mapping[str, torch.Tensor]]
    subject: Subject | None = None


def cosim_graphs(
    graphs: Sequence[Graph],
    subject: Subject,
    mode: str = COMPLETE,
    marker: Probe | None = None,
    against: Against | None = None,
) -> Cosimulated:
    """Cosimulate captured graphs. marker: is called around each step too."""
    found: list[Difference] = []
    unseen = 0
    for graph in graphs:
        other = against.values(graph, mode) if against is not None else None
        compiled = subject.compile(graph)
        for inputs in (graph.inputs, *(graph.later if against is None else ())):
            simulation = Simulation(replace(graph, inputs=inputs), compiled, mode, marker, other=other)
            seen = simulation.run()
            healthy = all(not each.verdict.bad for each in found)
            seen = simulation.opened(seen, subject) if healthy and against is None else seen
            found += seen if inputs is graph.inputs else [each for each in seen if not each.verdict.good]
            unseen += simulation.unseen if inputs is graph.inputs else 0
    made = Cosimulated(subject.name, mode, worst([each.verdict for each in found]), tuple(found), unseen)
    return made if against is None else replace(made, against=against.name)


def other_subject(subject: Subject) -> Against:
    """The results of another backend, or of the same with other options, for the same graphs."""

    def values(graph: Graph, mode: str) -> Mapping[str, torch.Tensor]:
        simulation = Simulation(graph, subject.compile(graph), mode, None, seen={})
        simulation.run()
        return simulation.seen or {}

    settings = "".join(f", {name}={value!r}" for name, value in subject.options.items())
    return Against(f"{subject.name}{settings}", values, subject)


def other_run(run: Run) -> Against:
    """The results of compiled code saved in a run, from its machine and version."""

    def values(graph: Graph, mode: str) -> Mapping[str, torch.Tensor]:
        numbers = run.numbers(graph.name)
        if numbers is None:
            raise UserError(f"{run.folder} has no results of graph {graph.name}", hint="capture the same program")
        results = {f"output {n}": value for n, value in enumerate(numbers["compiled"])}
        return {**numbers["intermediates"], **results}

    return Against(f"the run {run.folder}", values)


@dataclass(frozen=True, slots=True)
class Other:
    """What to compare with in a worker process. name: a backend, or the folder of a run; options: of a backend."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, request: Request) -> Against:
        run = run_of(self.name, request.libraries)
        return other_run(run) if run is not None else other_subject(subject_of(self.name, self.options))


def cosim_isolated(
    request: Request, mode: str = COMPLETE, seconds: float = SECONDS, memory: int = 0, other: Other | None = None
) -> Cosimulated:
    """Cosimulate the program of a request in a separate process.

    Raises UserError for a target that does not exist, fails in eager mode, or does not return when it is compiled.
    """
    refused, hint = f"{request.target} cannot be cosimulated", "run `pellucid check` on it first"
    with Worker(memory) as worker:
        return worker.ask(cosim_request, request, mode, other, seconds=seconds, refused=refused, hint=hint)


def cosim_request(request: Request, mode: str, other: Other | None = None) -> Cosimulated:
    """Cosimulate the program of a request in this process."""
    subject = subject_for(request)
    against = other.open(request) if other is not None else None
    both = [subject] if against is None or against.subject is None else [subject, against.subject]
    graphs = graphs_for(request, max(both, key=lambda each: each.demands))
    found = cosim_graphs(graphs, subject, mode, Marker(), against)
    if against is not None or split_run(request.target) is not None:  # a run begins with its graphs
        return found
    return found.with_first(before_graphs(load_case(request.target), subject, request.backward, request.dynamic))


LOCATION = ("graph", "position", "kernel", "fx_node", "user_line", "operator", "operator_line")
JUDGEMENT = ("verdict", "error", "allowed", "max_error", "ulp", "why")


def write_csv(found: Cosimulated, folder: Path) -> None:
    """Write every comparison into `cosim.csv` of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        [*(getattr(each, name) for name in LOCATION), *(getattr(each.judgement, name) for name in JUDGEMENT)]
        for each in found.differences
    ]
    write_table(folder / "cosim.csv", (*LOCATION, *JUDGEMENT), rows)
