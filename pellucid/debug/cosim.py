"""Cosimulation: every intermediate result of a compiled graph beside eager's, and the first that is wrong.

Two modes. `complete`: after each step its results are compared and then replaced by eager's, so that every step works
on eager's numbers; all wrong steps are found, each for a fault of its own. `live`: nothing is replaced; what is seen
is what the program does, and the first wrong step is the cause of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate, map_arg

from pellucid.capture.graph import attribute_of, origin_of
from pellucid.debug.case import Case, copied
from pellucid.debug.check import Request, captured
from pellucid.debug.child import SECONDS, Failure, Marker, Worker, pass_on
from pellucid.debug.graphs import Graph, calls_of, in_float64, interpret, is_random, widened, wider
from pellucid.debug.judge import Judgement, Verdict, judge, worst
from pellucid.debug.subject import Compiled, Probe, Step, Subject
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
    lay in memory: they are parts of kernels."""

    backend: str
    mode: str
    verdict: Verdict
    differences: tuple[Difference, ...]
    unseen: int

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


def cosim_graphs(
    graphs: Sequence[Graph], subject: Subject, mode: str = COMPLETE, marker: Probe | None = None
) -> Cosimulated:
    """The same for graphs that were captured before. marker: is told of each step too."""
    found: list[Difference] = []
    unseen = 0
    for graph in graphs:
        simulation = _Simulation(graph, subject.compile(graph), mode, marker)
        found += simulation.run()
        unseen += simulation.unseen
    return Cosimulated(subject.name, mode, worst([each.verdict for each in found]), tuple(found), unseen)


def first_wrong(graph: Graph, compiled: Compiled, mode: str, marker: Probe) -> Difference | None:
    """The first wrong result of a graph that was compiled before; what comes after it is not run."""
    simulation = _Simulation(graph, compiled, mode, marker, stop=True)
    try:
        simulation.run()
    except _Enough:
        return simulation.differences[-1]
    return None


class _Enough(Exception):
    """Ends a run."""


def cosim_isolated(request: Request, mode: str = COMPLETE, seconds: float = SECONDS, memory: int = 0) -> Cosimulated:
    """The same for `FILE.py:NAME` in a process of its own.

    Raises UserError for a target that does not exist, fails in eager mode, or does not return when it is compiled.
    """
    with Worker(memory) as worker:
        found = worker.call("pellucid.debug.cosim:cosim_request", request, mode, seconds=seconds)
    if not isinstance(found, Failure):
        return found
    pass_on(found)
    raise UserError(f"{request.target} cannot be cosimulated: {found}", hint="look at it with `pellucid check` first")


def cosim_request(request: Request, mode: str) -> Cosimulated:
    """In a worker process."""
    graphs, subject = captured(request)
    return cosim_graphs(graphs, subject, mode, Marker())


class _Simulation(Probe):
    """One graph: eager's results, and what becomes of them in compiled code. stop: at the first wrong result."""

    def __init__(self, graph: Graph, compiled: Compiled, mode: str, marker: Probe | None, stop: bool = False) -> None:
        self.graph, self.compiled, self.mode, self.stop = graph, compiled, mode, stop
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
                self._compare("result", f"{node}" if node else f"output {position}", node, actual, eager)
        return self.differences

    def before(self, step: Step) -> None:
        self.marker.before(step)

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        self.marker.after(step, values)
        for name, actual in values.items():
            eager = self.reference.values.get(name)
            if eager is None:
                continue
            self._compare(step.name, name, name, actual, eager)
            if self.mode == COMPLETE and actual.shape == eager.shape and actual.dtype == eager.dtype:
                actual.copy_(eager)

    def _compare(self, kernel: str, name: str, node: str, actual: torch.Tensor, eager: torch.Tensor) -> None:
        found = close(actual, eager)
        if found is None:
            exact = self._exact(node) if node else eager
            found = judge(actual, eager, eager if exact is None else exact)
        users = origin_of(self.nodes[node]).users if node in self.nodes else ()
        line = str(users[-1]) if users else ""
        position = self.positions.get(kernel, len(self.positions))
        self.differences.append(Difference(self.graph.name, kernel, position, name, line, found))
        if self.stop and not found.verdict.good:
            raise _Enough

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
