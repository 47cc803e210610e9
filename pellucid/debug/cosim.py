"""Cosimulation: every intermediate result of a compiled graph beside eager's, and the first that is wrong.

Two modes. `complete`: after each step its results are compared and then replaced by eager's, so that every step works
on eager's numbers; all wrong steps are found, each for a fault of its own. `live`: nothing is replaced; what is seen
is what the program does, and the first wrong step is the cause of the later ones.

Compiled code can also be compared with other compiled code (`Against`): another backend, other options, or the numbers
in a run. Where the two differ, float64 says which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import map_aggregate, map_arg

from pellucid.capture.graph import attribute_of, origin_of
from pellucid.debug.case import Case, copied
from pellucid.debug.check import Request, graphs_for, subject_for
from pellucid.debug.child import SECONDS, Failure, Marker, Worker, pass_on
from pellucid.debug.graphs import Graph, calls_of, in_float64, interpret, is_random, widened, wider
from pellucid.debug.judge import Judgement, Verdict, judge, worst
from pellucid.debug.run import Run, open_run, split_run, write_table
from pellucid.debug.subject import Compiled, Probe, Step, Subject
from pellucid.debug.subjects import subject_of
from pellucid.debug.tensors import TensorStore
from pellucid.errors import UserError

COMPLETE, LIVE = "complete", "live"

# Results that are this close to eager's, in roundings of their type on the scale of the tensor, need no float64.
_CLOSE_ROUNDINGS = 64.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a step beside eager's.

    graph: its name. kernel: the step, or `result` for what the graph returns. position: of the step. fx_node: whose
    result it is. user_line: `file:line` of the node.
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


@dataclass(frozen=True, slots=True)
class Cosimulated:
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
        return next((each for each in self.differences if not each.verdict.good), None)


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
        saved = run.read("numbers.json").get(graph.name)
        if saved is None:
            raise UserError(f"{run.folder} has no numbers of graph {graph.name}", hint="capture the same program")
        numbers = TensorStore(run.folder).load(saved)
        results = {f"output {n}": value for n, value in enumerate(numbers["compiled"])}
        return {**numbers["intermediates"], **results}

    return Against(f"the run {run.folder}", values)


@dataclass(frozen=True, slots=True)
class Other:
    """What to compare with in a worker process. name: a backend, or the folder of a run; options: of a backend."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, request: Request) -> Against:
        found = split_run(self.name)
        if found is not None:
            return other_run(open_run(found[0], request.libraries))
        return other_subject(subject_of(self.name, self.options))


def cosim_isolated(
    request: Request, mode: str = COMPLETE, seconds: float = SECONDS, memory: int = 0, other: Other | None = None
) -> Cosimulated:
    """The same for the program of a request in a process of its own.

    Raises UserError for a target that does not exist, fails in eager mode, or does not return when it is compiled.
    """
    with Worker(memory) as worker:
        found = worker.call("pellucid.debug.cosim:cosim_request", request, mode, other, seconds=seconds)
    if not isinstance(found, Failure):
        return found
    pass_on(found)
    raise UserError(f"{request.target} cannot be cosimulated: {found}", hint="look at it with `pellucid check` first")


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

    other: results of other code to compare with. seen: is filled with the results of this code.
    """

    def __init__(
        self,
        graph: Graph,
        compiled: Compiled,
        mode: str,
        marker: Probe | None,
        other: Mapping[str, torch.Tensor] | None = None,
        seen: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.graph, self.compiled, self.mode = graph, compiled, mode
        self.other, self.seen = other, seen
        self.marker = marker or Probe()
        self.nodes = {node.name: node for node in compiled.graph.graph.nodes}
        wanted = {name for step in compiled.steps for name in step.values}
        self.unseen = sum(not _is_view(node) for node in calls_of(compiled.graph)) - len(wanted)
        self.reference = _Reference(compiled.graph, graph.inputs, wanted)
        self.differences: list[Difference] = []
        self.positions = {step.name: position for position, step in enumerate(compiled.steps)}
        self.exact: Mapping[str, torch.Tensor] | None = None

    def run(self) -> list[Difference]:
        inputs = list(copied(self.graph.inputs))
        torch.manual_seed(0)
        results = self.compiled.run(inputs, self)
        expected = zip(results, self.reference.results, self.reference.result_nodes, strict=True)
        for position, (actual, eager, node) in enumerate(expected):
            if isinstance(actual, torch.Tensor) and isinstance(eager, torch.Tensor):
                if self.seen is not None:
                    self.seen[f"output {position}"] = actual.clone()
                name = node or f"output {position}"
                self._compare("result", name, node, actual, eager, f"output {position}")
        return self.differences

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
            if self.mode == COMPLETE and actual.shape == eager.shape and actual.dtype == eager.dtype:
                actual.copy_(eager)

    def _compare(self, kernel: str, name: str, node: str, actual: torch.Tensor, eager: torch.Tensor, key: str) -> None:
        if self.other is None:
            found = self._judge(node, actual, eager)
        elif key in self.other:
            found = self._judge_both(node, actual, eager, self.other[key])
        else:
            return  # a part of a kernel there
        users = origin_of(self.nodes[node]).users if node in self.nodes else ()
        line = str(users[-1]) if users else ""
        position = self.positions.get(kernel, len(self.positions))
        self.differences.append(Difference(self.graph.name, kernel, position, name, line, found))

    def _judge(self, node: str, actual: torch.Tensor, eager: torch.Tensor) -> Judgement:
        found = close(actual, eager)
        if found is not None:
            return found
        exact = self._exact(node) if node else None
        return judge(actual, eager, eager if exact is None else exact)

    def _judge_both(self, node: str, actual: torch.Tensor, eager: torch.Tensor, other: torch.Tensor) -> Judgement:
        """The difference from other code: no more than rounding, unless one of the two is wrong."""
        found = close(actual, other)
        if found is not None:
            return found
        ours, theirs = self._judge(node, actual, eager), self._judge(node, other, eager)
        if not ours.verdict.good:
            return ours
        return theirs if theirs.verdict.good else replace(theirs, why=f"the other one is wrong: {theirs.why}")

    def _exact(self, name: str) -> torch.Tensor | None:
        """The value in float64: from eager's results of earlier steps, or for the live mode from the inputs."""
        if self.mode == COMPLETE:
            return self.reference.local_float64(name)
        if self.exact is None:
            self.exact = self.reference.float64()
        return self.exact.get(name)


def close(actual: torch.Tensor, eager: torch.Tensor) -> Judgement | None:
    """The judgement on results that are equal, or so near that float64 need not be asked; None for all others."""
    if actual.shape != eager.shape or actual.dtype != eager.dtype:
        return None
    if torch.equal(actual, eager):
        return Judgement(Verdict.OK)
    if not eager.is_floating_point():
        return None
    difference = (actual.to(torch.float32) - eager.to(torch.float32)).abs().max().item() if eager.numel() else 0.0
    scale = eager.to(torch.float32).square().mean().sqrt().item()
    bound = _CLOSE_ROUNDINGS * torch.finfo(eager.dtype).eps * scale
    if not difference <= bound:  # also for NaN
        return None
    return Judgement(Verdict.ROUNDING, "", difference / scale, bound / scale, difference)


class _Reference:
    """Eager's results of a graph, op by op."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: set[str]) -> None:
        self.module, self.inputs = module, inputs
        self.values: dict[str, torch.Tensor] = {}
        self.random: dict[str, Any] = {}
        output = next(iter(reversed(module.graph.nodes)))
        returned = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
        self.result_nodes = [node.name if isinstance(node, torch.fx.Node) else "" for node in returned]

        def keep(node: torch.fx.Node, value: Any) -> Any:
            if is_random(node):
                self.random[node.name] = copied(value)
            if node.name in wanted and isinstance(value, torch.Tensor):
                self.values[node.name] = value.clone() if _is_changed(node) else value
            return value

        torch.manual_seed(0)
        self.results = interpret(module, copied(inputs), keep)

    def float64(self) -> dict[str, torch.Tensor]:
        """All wanted values from the inputs on; random numbers are those that eager drew."""
        found: dict[str, torch.Tensor] = {}

        def keep(node: torch.fx.Node, value: Any) -> Any:
            value = widened(self.random[node.name]) if node.name in self.random else value
            if isinstance(value, torch.Tensor):
                found[node.name] = value
            return value

        interpret(in_float64(self.module), widened(list(self.inputs)), keep)
        return found

    def local_float64(self, name: str) -> torch.Tensor | None:
        """One value from eager's earlier ones: only what lies between them and it is computed in float64.

        None when an operator in between has no float64.
        """
        nodes = {node.name: node for node in self.module.graph.nodes}
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, self.inputs, strict=True))
        known: dict[torch.fx.Node, Any] = {}
        try:
            with torch.no_grad():
                for node in _needed(nodes[name], {*self.values, *self.random} - {name}):
                    known[node] = self._wide(node, given, known, name)
        except Exception:
            return None
        value = known[nodes[name]]
        return value if isinstance(value, torch.Tensor) else None

    def _wide(
        self, node: torch.fx.Node, given: Mapping[torch.fx.Node, Any], known: Mapping[torch.fx.Node, Any], name: str
    ) -> Any:
        """The value of a node in float64, if the values that it needs are known."""
        if node in given:
            return widened(given[node])
        if node.op == "get_attr":
            return widened(attribute_of(self.module, node))
        if node.name in self.random:
            return widened(self.random[node.name])
        if node.name in self.values and node.name != name:
            return widened(self.values[node.name])
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        args, kwargs = map_aggregate((args, kwargs), wider)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _needed(node: torch.fx.Node, known: set[str]) -> list[torch.fx.Node]:
    """What has to be computed for a node, in order, itself the last; nothing behind what is known by name."""
    order: dict[torch.fx.Node, None] = {}
    stack: list[tuple[torch.fx.Node, bool]] = [(node, False)]
    while stack:
        each, ready = stack.pop()
        if ready or each.name in known:
            order[each] = None
        elif each not in order:
            stack.append((each, True))
            stack += [(other, False) for other in each.all_input_nodes]
    return list(order)


def _is_changed(node: torch.fx.Node) -> bool:
    """Whether an operator that works in place may change the result of a node later."""
    return any(getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in node.users)


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # getitem, arithmetic of sizes
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
