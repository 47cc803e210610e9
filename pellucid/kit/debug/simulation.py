"""Compare a run of one compiled graph with eager: the results of each step, of the graph, and of a second run.

There are two modes. `complete`: after each step its results are compared and then replaced by eager's, so that every
step works on eager's values; all wrong steps are found, each for a fault of its own. `live`: nothing is replaced; the
program runs as it does without observation, and a result that is not close to eager's is compared with what eager
computes from the live results before it: a step is blamed neither for accumulated rounding nor for the fault of an
earlier step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from pellucid.capture.fx import origin_of
from pellucid.capture.torch_compat import results_of_user
from pellucid.kit.debug.check import meaningful_strides
from pellucid.kit.debug.passes import first_changed
from pellucid.kit.debug.zoom import Inner, zoom
from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import Judgement, Verdict, close, judge, near
from pellucid.kit.judge.reference import Reference
from pellucid.kit.judge.vary import change_in_place, overlapping
from pellucid.kit.programs.calls import line_of
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, is_random, is_view, writers_of
from pellucid.kit.subjects.base import Compiled, Probe, Step, Subject

COMPLETE, LIVE = "complete", "live"

PASSES = "graph passes"


@dataclass(frozen=True, slots=True)
class Unobserved:
    """An FX node whose result was never stored in memory. user_line: `file:line`."""

    fx_node: str
    user_line: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A result of a step compared with eager's.

    graph: its name. kernel: the step, `result` for a result of the graph, or `graph passes` where the transformed graph
    is already wrong. position: of the step. fx_node: whose result it is. user_line: `file:line` of the node.
    unobserved: of a wrong result, the nodes inside kernels that it was computed from, back to the last observed
    results: any of them may be at fault.
    inner: the operator at fault inside the kernel. opened: whether it was searched for; if it was and inner is None,
    the fault does not occur when inner values are stored.
    Where the captured graphs are already wrong, graph is empty, kernel is the component at fault, and fx_node the
    operator that the user's program called.
    """

    graph: str
    kernel: str
    position: int
    fx_node: str
    user_line: str
    judgement: Judgement
    unobserved: tuple[Unobserved, ...] = ()
    inner: Inner | None = None
    opened: bool = False

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def operator(self) -> str:
        """The FX node of the operator at fault, as far as that is known."""
        return self.inner.fx_node if self.inner else self.fx_node

    @property
    def operator_line(self) -> str:
        """The user line of `operator`."""
        return self.inner.user_line if self.inner else self.user_line

    @property
    def max_error(self) -> float:
        return self.judgement.max_error

    @property
    def ulp(self) -> float | None:
        return self.judgement.ulp


def first_wrong(graph: Graph, compiled: Compiled, mode: str, marker: Probe) -> Difference | None:
    """The first wrong result of a compiled graph; the run stops there."""
    simulation = Simulation(graph, compiled, mode, marker, stop=True)
    with suppress(_Stop):
        simulation.run()
    return next((each for each in simulation.differences if each.verdict.bad), None)


class _Stop(Exception):
    """Stops a run."""


def simulate(graph: Graph, compiled: Compiled, mode: str, marker: Probe | None = None) -> list[Difference]:
    """The results of a compiled graph, compared with eager's."""
    return Simulation(graph, compiled, mode, marker).run()


class Simulation(Probe):
    """One graph: eager's results, and those of compiled code.

    other: results of other code to compare with. seen: is filled with the results of this code. stop: stop at the first
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
        self.unseen = sum(not is_view(node) for node in calls_of(compiled.graph)) - len(wanted)
        self.reference = Reference(compiled.graph, graph.inputs, wanted)
        self.differences: list[Difference] = []
        self.together = {name: set(step.values) for step in compiled.steps for name in step.values}
        self.positions = {step.name: position for position, step in enumerate(compiled.steps)}
        self.known: dict[str, torch.Tensor] = {}  # what later steps read: eager's results, or the live ones

    def run(self) -> list[Difference]:
        inputs = list(copied(self.graph.inputs))
        self._round(inputs)
        if self.other is not None or self.seen is not None:  # these are of one call with the graph's own inputs
            return self.differences
        if self._good():
            before = Reference(self.graph.module, self.graph.inputs, set())
            self.differences += self._passes(before)
            self.differences += self._misplaced(before) if self._good() else ()
            del before
        if self._good() and self._change(inputs):
            seen = len(self.differences)
            self._round(inputs)
            self.differences[seen:] = [each for each in self.differences[seen:] if not each.verdict.good]
        return self.differences

    def opened(self, found: Sequence[Difference], subject: Subject) -> list[Difference]:
        """The same differences, with the operator at fault added to the first wrong one, if a step computed it."""
        at = next((at for at, each in enumerate(found) if each.verdict.bad), None)
        steps = {step.name: step for step in self.compiled.steps}
        step = steps.get(found[at].kernel) if at is not None else None
        if at is None or step is None:
            return list(found)
        graph = replace(self.graph, inputs=tuple(self.reference.inputs))
        known = {**self.reference.drawn(), **self.known}

        def look(graph: Graph, compiled: Compiled) -> Iterator[tuple[str, Judgement]]:
            return ((each.fx_node, each.judgement) for each in simulate(graph, compiled, LIVE, self.marker))

        inner = zoom(graph, self.compiled, found[at].fx_node, known, subject, look)
        return [
            *found[:at],
            replace(found[at], inner=inner, opened=step.generated or inner is not None),
            *found[at + 1 :],
        ]

    def _good(self) -> bool:
        return all(each.verdict.good for each in self.differences)

    def _passes(self, before: Reference) -> Iterator[Difference]:
        """Compare the graph before and after its passes: the steps were compared with the graph after them."""
        random = _random_calls(self.graph.module)
        if random != _random_calls(self.compiled.graph):
            return  # their random numbers differ
        after = self.reference
        writers = writers_of(self.graph.module)
        changed = [
            (after.final_inputs[position], before.final_inputs[position], name) for position, name in writers.items()
        ]
        pairs = [*zip(after.results, before.results, before.result_nodes, strict=True), *changed]
        expected = Expected({name: theirs for _, theirs, name in pairs}, before.exactly, before.eagerly)
        for mine, theirs, name in pairs:
            if not name or not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
                continue
            found = close(mine, theirs)
            if random and found is None:  # float64 would draw other numbers
                found = Judgement(Verdict.ROUNDING) if near(mine, theirs) else judge(mine, theirs, theirs)
            found = found or expected.judge(name, mine)
            nodes = [] if found.verdict.good else first_changed(self.graph, self.compiled.graph)
            if nodes:
                line = line_of(nodes[0])
                yield Difference(self.graph.name, PASSES, len(self.positions), nodes[0].name, line, found)
                return

    def _misplaced(self, before: Reference) -> Iterator[Difference]:
        """The user's results with other strides than eager's, or that share memory with another one or an input.

        before: the graph before passes. A result may also have the strides that it was captured with.
        """
        nodes = {node.name: node for node in self.graph.module.graph.nodes}
        eager, inputs = _layouts([*before.final_inputs, *before.results]), len(before.final_inputs)
        users = [inputs + position for position in results_of_user(self.graph.module)]
        for position in users:
            node = nodes.get(before.result_nodes[position - inputs])
            mine, theirs = self.layouts[position], eager[position]
            if node is None or mine is None or theirs is None:
                continue
            (strides, owner), (eager_strides, eager_owner) = mine, theirs
            why = ""
            if strides != eager_strides and strides != meaningful_strides(node.meta["val"]):
                why = f"strides {strides}, eager's are {eager_strides}"
            elif owner != eager_owner == position and (owner < inputs or owner in users):
                what = f"input {owner}" if owner < inputs else f"output {owner - inputs}"
                why = f"it shares memory with {what}, but not in eager"
            if why:
                found, users = Judgement(Verdict.WRONG, why, misplaced=True), origin_of(node).users
                line = str(users[-1]) if users else ""
                kernel = next((step.name for step in self.compiled.steps if node.name in step.values), "result")
                at = self.positions.get(kernel, len(self.positions))
                yield Difference(self.graph.name, kernel, at, node.name, line, found)

    def _change(self, inputs: list[Any]) -> bool:
        """Write other values into the inputs, to find values that the program has cached. False: that is not possible.

        An operator that fails on them in eager mode is no fault of the compiled program.
        """
        with torch.no_grad():
            for mine, original in zip(inputs, self.graph.inputs, strict=True):
                if isinstance(mine, torch.Tensor) and not overlapping(mine):
                    mine.copy_(original)
        try:
            if not change_in_place(inputs):
                return False
            wanted = set(self.reference.values)
            del self.reference, self.known  # free their memory for the second round
            self.reference = Reference(self.compiled.graph, copied(inputs), wanted)
        except Exception:
            return False
        return True

    def _round(self, inputs: list[Any]) -> None:
        self.known = self.reference.values if self.mode == COMPLETE else {}
        torch.manual_seed(0)
        results = self.compiled.run(inputs, self)
        self.layouts = _layouts([*inputs, *results])
        expected = zip(results, self.reference.results, self.reference.result_nodes, strict=True)
        for position, (actual, eager, node) in enumerate(expected):
            if isinstance(actual, torch.Tensor) and isinstance(eager, torch.Tensor):
                if self.seen is not None:
                    self.seen[f"output {position}"] = actual.clone()
                name = node or f"output {position}"
                self._compare("result", name, node, actual, eager, f"output {position}")
        for position, writer in writers_of(self.compiled.graph).items():
            if isinstance(inputs[position], torch.Tensor):
                self._compare("result", writer, writer, inputs[position], self.reference.final_inputs[position], writer)

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
        observed: Collection[str] = self.known
        if self.other is None or key not in self.other:  # computed inside a kernel there
            found = self._judge(node, actual, eager, self.known)
        else:
            found, ours = self._judge_both(node, actual, eager, self.other[key])
            observed = self.known if ours else self.other
        line = line_of(self.nodes[node]) if node in self.nodes else ""
        position = self.positions.get(kernel, len(self.positions))
        inside = self._unobserved(node, observed) if found.verdict.bad else ()
        self.differences.append(Difference(self.graph.name, kernel, position, name, line, found, inside))
        if self.stop and found.verdict.bad:
            raise _Stop

    def _unobserved(self, node: str, observed: Collection[str]) -> tuple[Unobserved, ...]:
        if node not in self.nodes:
            return ()
        nodes = self.reference.between(node, observed)
        return tuple(Unobserved(each.name, line_of(each)) for each in nodes if not is_view(each))

    def _judge(
        self, node: str, actual: torch.Tensor, eager: torch.Tensor, known: Mapping[str, torch.Tensor]
    ) -> Judgement:
        """Judge the result of a node.

        known: the results that it was computed from, by FX node. Results of the same kernel are excluded: inside it,
        they need not be rounded to the type that they are stored in.
        """
        found = close(actual, eager)
        if found is not None or not node:
            return found or judge(actual, eager, eager)
        known = {name: value for name, value in known.items() if name not in self.together.get(node, ())}
        if self.mode == LIVE:
            here = self.reference.local(node, known)
            eager = eager if here is None else here
            found = close(actual, eager)
            if found is not None:
                return found
        return self.reference.expected(node, known, eager).judge(node, actual)

    def _judge_both(
        self, node: str, actual: torch.Tensor, eager: torch.Tensor, other: torch.Tensor
    ) -> tuple[Judgement, bool]:
        """Judge the difference from other code: rounding, unless one of the two is wrong; and whether it is ours."""
        found = close(actual, other)
        if found is not None:
            return found, True
        assert self.other is not None
        theirs_known = self.known if self.mode == COMPLETE else self.other
        ours, theirs = self._judge(node, actual, eager, self.known), self._judge(node, other, eager, theirs_known)
        if not ours.verdict.good:
            return ours, True
        return theirs if theirs.verdict.good else replace(theirs, why=f"the other result is wrong: {theirs.why}"), False


def _layouts(values: Sequence[Any]) -> list[tuple[tuple[int, ...], int] | None]:
    """For each tensor with elements, its meaningful strides and the position of the first tensor in the same memory."""
    first: dict[int, int] = {}
    return [
        (
            meaningful_strides(value),
            first.setdefault(value.untyped_storage().data_ptr(), position),
        )
        if isinstance(value, torch.Tensor) and value.numel()
        else None
        for position, value in enumerate(values)
    ]


def _random_calls(module: torch.fx.GraphModule) -> list[Any]:
    """The operators that draw random numbers, in order."""
    return [node.target for node in calls_of(module) if is_random(node)]
