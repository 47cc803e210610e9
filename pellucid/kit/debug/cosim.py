"""Cosimulation: every intermediate result of a compiled graph beside eager's, and the first that is wrong.

Two modes. `complete`: after each step its results are compared and then replaced by eager's, so that every step works
on eager's numbers; all wrong steps are found, each for a fault of its own. `live`: nothing is replaced; what is seen
is what the program does, and a result that is not near eager's is compared with what eager makes of the live results
before it: so neither roundings that added up nor the fault of an earlier step are held against a step.

Compiled code can also be compared with other compiled code (`Against`): another backend, other options, or the numbers
in a run. Where the two differ, float64 says which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pellucid.capture.graph import origin_of
from pellucid.errors import UserError
from pellucid.kit.debug.check import Request, graphs_for, subject_for
from pellucid.kit.debug.passes import first_changed
from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import DRAWS, Judgement, Verdict, close, judge, near, worst
from pellucid.kit.judge.reference import Reference
from pellucid.kit.judge.vary import change_in_place, overlapping
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.programs.case import Case, copied
from pellucid.kit.programs.graphs import Graph, calls_of, is_random, writers_of
from pellucid.kit.runs.run import Run, run_of, write_table
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Compiled, Probe, Step, Subject
from pellucid.kit.subjects.marker import Marker
from pellucid.kit.subjects.registry import subject_of

COMPLETE, LIVE = "complete", "live"

PASSES = "graph passes"


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a step beside eager's.

    graph: its name. kernel: the step, `result` for what the graph returns, or `graph passes` where already the graph
    that was compiled is wrong. position: of the step. fx_node: whose result it is. user_line: `file:line` of the node.
    """

    graph: str
    kernel: str
    position: int
    fx_node: str
    user_line: str
    judgement: Judgement

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def max_error(self) -> float:
        return self.judgement.max_error

    @property
    def ulp(self) -> float | None:
        return self.judgement.ulp


@dataclass(frozen=True, slots=True)
class Cosimulated(Shown):
    """All results that could be compared, in the order in which they came to be. unseen: FX nodes whose results never
    lay in memory: they are parts of kernels. against: what they were compared with."""

    backend: str
    mode: str
    verdict: Verdict
    differences: tuple[Difference, ...]
    unseen: int
    against: str = "eager"

    @property
    def good(self) -> bool:
        return self.verdict.good

    @property
    def first_divergence(self) -> Difference | None:
        """The first result that is wrong."""
        return next((each for each in self.differences if each.verdict.bad), None)


def cosim_case(
    case: Case, subject: Subject, mode: str = COMPLETE, *, backward: bool = False, dynamic: bool | None = None
) -> Cosimulated:
    """Cosimulate every graph of a program, each on the inputs that eager gave to it."""
    return cosim_graphs(subject.graphs(case, backward=backward, dynamic=dynamic), subject, mode)


@dataclass(frozen=True, slots=True)
class Against:
    """Other compiled code. values: by FX node, or `output N`, its results of a graph in a mode.

    subject: what computes them here; None for a run.
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
    """The same for graphs that were captured before. marker: is told of each step too."""
    found: list[Difference] = []
    unseen = 0
    for graph in graphs:
        other = against.values(graph, mode) if against is not None else None
        simulation = _Simulation(graph, subject.compile(graph), mode, marker, other=other)
        found += simulation.run()
        unseen += simulation.unseen
    made = Cosimulated(subject.name, mode, worst([each.verdict for each in found]), tuple(found), unseen)
    return made if against is None else replace(made, against=against.name)


def first_wrong(graph: Graph, compiled: Compiled, mode: str, marker: Probe) -> Difference | None:
    """The first wrong result of a graph that was compiled before; what comes after it is not run."""
    simulation = _Simulation(graph, compiled, mode, marker, stop=True)
    with suppress(_Enough):
        simulation.run()
    return next((each for each in simulation.differences if each.verdict.bad), None)


class _Enough(Exception):
    """Ends a run."""


def simulate(graph: Graph, compiled: Compiled, mode: str, marker: Probe | None = None) -> list[Difference]:
    """The results of a graph that was compiled before."""
    return _Simulation(graph, compiled, mode, marker).run()


def other_subject(subject: Subject) -> Against:
    """What another backend, or the same with other options, makes of the same graphs."""

    def values(graph: Graph, mode: str) -> Mapping[str, torch.Tensor]:
        simulation = _Simulation(graph, subject.compile(graph), mode, None, seen={})
        simulation.run()
        return simulation.seen or {}

    settings = "".join(f", {name}={value!r}" for name, value in subject.options.items())
    return Against(f"{subject.name}{settings}", values, subject)


def other_run(run: Run) -> Against:
    """The numbers that compiled code left in a run, on its machine and by its version."""

    def values(graph: Graph, mode: str) -> Mapping[str, torch.Tensor]:
        numbers = run.numbers(graph.name)
        if numbers is None:
            raise UserError(f"{run.folder} has no numbers of graph {graph.name}", hint="capture the same program")
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
    """The same for the program of a request in a process of its own.

    Raises UserError for a target that does not exist, fails in eager mode, or does not return when it is compiled.
    """
    refused, hint = f"{request.target} cannot be cosimulated", "look at it with `pellucid check` first"
    with Worker(memory) as worker:
        return worker.ask(cosim_request, request, mode, other, seconds=seconds, refused=refused, hint=hint)


def cosim_request(request: Request, mode: str, other: Other | None = None) -> Cosimulated:
    """In a worker process."""
    subject = subject_for(request)
    against = other.open(request) if other is not None else None
    both = [subject] if against is None or against.subject is None else [subject, against.subject]
    graphs = graphs_for(request, max(both, key=lambda each: each.demands))
    return cosim_graphs(graphs, subject, mode, Marker(), against)


PLACE = ("graph", "position", "kernel", "fx_node", "user_line")
NUMBERS = ("verdict", "error", "allowed", "max_error", "ulp", "why")


def write_csv(found: Cosimulated, folder: Path) -> None:
    """Write every comparison into `cosim.csv` of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        [*(getattr(each, name) for name in PLACE), *(getattr(each.judgement, name) for name in NUMBERS)]
        for each in found.differences
    ]
    write_table(folder / "cosim.csv", (*PLACE, *NUMBERS), rows)


class _Simulation(Probe):
    """One graph: eager's results, and what becomes of them in compiled code.

    other: results of other code to compare with. seen: is filled with the results of this code. stop: at the first
    wrong result.
    """

    def __init__(
        self,
        graph: Graph,
        compiled: Compiled,
        mode: str,
        marker: Probe | None,
        other: Mapping[str, torch.Tensor] | None = None,
        seen: dict[str, torch.Tensor] | None = None,
        stop: bool = False,
    ) -> None:
        self.graph, self.compiled, self.mode = graph, compiled, mode
        self.other, self.seen, self.stop = other, seen, stop
        self.marker = marker or Probe()
        self.nodes = {node.name: node for node in compiled.graph.graph.nodes}
        wanted = {name for step in compiled.steps for name in step.values}
        self.unseen = sum(not _is_view(node) for node in calls_of(compiled.graph)) - len(wanted)
        self.reference = Reference(compiled.graph, graph.inputs, wanted)
        self.differences: list[Difference] = []
        self.positions = {step.name: position for position, step in enumerate(compiled.steps)}
        self.known: dict[str, torch.Tensor] = {}  # what later steps work on: eager's results, or the live ones

    def run(self) -> list[Difference]:
        inputs = list(copied(self.graph.inputs))
        self._round(inputs)
        if self.other is not None or self.seen is not None:  # of one call with the graph's own inputs
            return self.differences
        self.differences += self._passes() if self._good() else ()
        if self._good() and self._change(inputs):
            seen = len(self.differences)
            self._round(inputs)
            self.differences[seen:] = [each for each in self.differences[seen:] if not each.verdict.good]
        return self.differences

    def _good(self) -> bool:
        return all(each.verdict.good for each in self.differences)

    def _passes(self) -> Iterator[Difference]:
        """What is wrong with the passes on the graph: what they returned is what the steps were compared with."""
        random = _random_calls(self.graph.module)
        if random != _random_calls(self.compiled.graph):
            return  # not the same numbers
        before, after = Reference(self.graph.module, self.graph.inputs, set()), self.reference
        writers = writers_of(self.graph.module)
        changed = [(after.given[position], before.given[position], name) for position, name in writers.items()]
        pairs = [*zip(after.results, before.results, before.result_nodes, strict=True), *changed]
        expected = Expected({name: given for _, given, name in pairs}, before.float64, before.draw)
        for mine, given, name in pairs:
            if not name or not isinstance(mine, torch.Tensor) or not isinstance(given, torch.Tensor):
                continue
            found = close(mine, given)
            if random and found is None:  # float64 would draw other numbers
                found = Judgement(Verdict.ROUNDING) if near(mine, given) else judge(mine, given, given)
            found = found or expected.judge(name, mine)
            nodes = [] if found.verdict.good else first_changed(self.graph, self.compiled.graph)
            if nodes:
                line = str(([*origin_of(nodes[0]).users, ""])[0])
                yield Difference(self.graph.name, PASSES, len(self.positions), nodes[0].name, line, found)
                return

    def _change(self, inputs: list[Any]) -> bool:
        """Other values in the same memory: what the program has kept of the old ones shows now. False: no such values.

        An operator that eager cannot call with them is no fault of the compiled program.
        """
        with torch.no_grad():
            for mine, given in zip(inputs, self.graph.inputs, strict=True):
                if isinstance(mine, torch.Tensor) and not overlapping(mine):
                    mine.copy_(given)
        try:
            if not change_in_place(inputs):
                return False
            wanted = set(self.reference.values)
            del self.reference, self.known  # the memory of the first round is for the second
            self.reference = Reference(self.compiled.graph, copied(inputs), wanted)
        except Exception:
            return False
        return True

    def _round(self, inputs: list[Any]) -> None:
        self.known = self.reference.values if self.mode == COMPLETE else {}
        torch.manual_seed(0)
        results = self.compiled.run(inputs, self)
        expected = zip(results, self.reference.results, self.reference.result_nodes, strict=True)
        for position, (actual, eager, node) in enumerate(expected):
            if isinstance(actual, torch.Tensor) and isinstance(eager, torch.Tensor):
                if self.seen is not None:
                    self.seen[f"output {position}"] = actual.clone()
                name = node or f"output {position}"
                self._compare("result", name, node, actual, eager, f"output {position}")
        for position, writer in writers_of(self.compiled.graph).items():
            if isinstance(inputs[position], torch.Tensor):
                self._compare("result", writer, writer, inputs[position], self.reference.given[position], writer)

    def before(self, step: Step) -> None:
        self.marker.before(step)

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        self.marker.after(step, values)
        for name, actual in values.items():
            eager = self.reference.values.get(name)
            if eager is None:
                continue
            if self.seen is not None:
                self.seen[name] = actual.clone()
            self._compare(step.name, name, name, actual, eager, name)
            if self.mode == LIVE:
                self.known[name] = self.reference.replaced(name, actual)
            elif actual.shape == eager.shape and actual.dtype == eager.dtype:
                actual.copy_(eager)

    def _compare(self, kernel: str, name: str, node: str, actual: torch.Tensor, eager: torch.Tensor, key: str) -> None:
        if self.other is None:
            found = self._judge(node, actual, eager, self.known)
        elif key in self.other:
            found = self._judge_both(node, actual, eager, self.other[key])
        else:
            return  # a part of a kernel there
        users = origin_of(self.nodes[node]).users if node in self.nodes else ()
        line = str(users[-1]) if users else ""
        position = self.positions.get(kernel, len(self.positions))
        self.differences.append(Difference(self.graph.name, kernel, position, name, line, found))
        if self.stop and found.verdict.bad:
            raise _Enough

    def _judge(
        self, node: str, actual: torch.Tensor, eager: torch.Tensor, known: Mapping[str, torch.Tensor]
    ) -> Judgement:
        """known: the results that this one was made of, by FX node."""
        found = close(actual, eager)
        if found is not None or not node:
            return found or judge(actual, eager, eager)
        if self.mode == LIVE:
            here = self.reference.local(node, known)
            eager = eager if here is None else here
            found = close(actual, eager)
            if found is not None:
                return found
        exact = self.reference.local_float64(node, known)
        exact = eager if exact is None else exact
        found = judge(actual, eager, exact)
        if found.verdict.good:
            return found
        draws = (self.reference.local_draw(node, seed, known) for seed in range(DRAWS))
        return judge(actual, eager, exact, [draw for draw in draws if draw is not None])

    def _judge_both(self, node: str, actual: torch.Tensor, eager: torch.Tensor, other: torch.Tensor) -> Judgement:
        """The difference from other code: no more than rounding, unless one of the two is wrong."""
        found = close(actual, other)
        if found is not None:
            return found
        assert self.other is not None
        theirs_known = self.known if self.mode == COMPLETE else self.other
        ours, theirs = self._judge(node, actual, eager, self.known), self._judge(node, other, eager, theirs_known)
        if not ours.verdict.good:
            return ours
        return theirs if theirs.verdict.good else replace(theirs, why=f"the other one is wrong: {theirs.why}")


def _random_calls(module: torch.fx.GraphModule) -> list[Any]:
    """The operators that draw random numbers, in order."""
    return [node.target for node in calls_of(module) if is_random(node)]


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # getitem, arithmetic of sizes
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
