"""Check the components before the graphs, with the user's program as the reference of the graphs captured from it.

Eager's ATen calls, forward and backward, are recorded with the user's lines. Then the program is transformed up to a
stage (Dynamo, AOTAutograd, the joint graph and its partitioner, decompositions, layout) and run eagerly, and each call
of the stage is joined to eager's by its provenance: the operator that the user called, from which it may have been
decomposed, and the line. A joined result is compared and replaced by eager's, so that each operator works on eager's
values. At fault are the first of eager's calls that has no right result in the last stage, and the first stage in which
it has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils import _pytree as pytree

from pellucid.kit.debug.check import Outcome, call_producing, called, check_repeatable, compare, expected_outcome
from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import Judgement, close
from pellucid.kit.judge.vary import InPlace, changed, overlapping
from pellucid.kit.programs.calls import Call, Calls, Observed, draws, in_backward, line_of, op_of, returns_view
from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import GraphCompiler, calls_of, interpret, widened, wider
from pellucid.kit.subjects.base import Captured, Subject


@dataclass(frozen=True, slots=True)
class Faulty:
    """The first operator of the user's program that is wrong after a stage before the graphs.

    stage: the component, as `bisect` names it. op: of ATen. user_line: `file:line`.
    """

    stage: str
    op: str
    user_line: str
    judgement: Judgement


def first_before_graphs(
    case: Case, subject: Subject, backward: bool = False, dynamic: bool | None = None
) -> Faulty | None:
    """The first wrong operator of the graphs that a backend receives, compared with the program; None if none is wrong.

    Raises what the program raises in eager mode, and NotJudged when its results differ from call to call.
    """
    user, stages = UserProgram(case, backward), _stages(subject)
    found = user.first_wrong(stages[-1], dynamic)
    if found is None:
        return None
    check_repeatable(user.outcome.tensors, called(case.fresh(), backward).tensors)
    good, bad = -1, len(stages) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        earlier = user.first_wrong(stages[middle], dynamic)
        good, bad, found = (good, middle, earlier) if earlier is not None else (middle, bad, found)
    return found


def stage_names(subject: Subject) -> list[str]:
    """The components before the graphs, in order."""
    return [stage.component for stage in _stages(subject)]


def first_at_stage(
    component: str, case: Case, subject: Subject, backward: bool = False, dynamic: bool | None = None
) -> Faulty | None:
    """The first wrong operator of the program after one stage."""
    stage = next(each for each in _stages(subject) if each.component == component)
    return UserProgram(case, backward).first_wrong(stage, dynamic)


# ------------------------------------------------------------------------------------------------ eager


@dataclass(eq=False, slots=True)
class _Result:
    """A tensor that eager's call at a position returned."""

    position: int
    number: int
    call: Call

    @property
    def value(self) -> torch.Tensor:
        return self.call.results[self.number]

    @property
    def key(self) -> tuple[Any, ...]:
        return _key(self.call.op, self.value, self.call.backward)


class UserProgram:
    """The program in eager mode: its calls and its outcome."""

    def __init__(self, case: Case, backward: bool) -> None:
        self.case, self.backward = case, backward
        self.recorder = Calls()
        fresh = case.fresh()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.recorder:
                return fresh.fn(*args, **kwargs)

        self.outcome = called(fresh, backward, recorded, self.recorder)

    @property
    def calls(self) -> Sequence[Call]:
        return self.recorder.made

    def first_wrong(self, stage: Stage, dynamic: bool | None) -> Faulty | None:
        """Compare a stage with eager: the first of eager's calls that is wrong in it."""
        join, fresh = Join(self.calls, whole=stage.whole), self.case.fresh()
        torch._dynamo.reset()
        try:
            call, around_backward = stage.run(fresh.fn, join, dynamic)
            outcome = called(fresh, self.backward, call, around_backward)
        finally:
            torch._dynamo.reset()
        found = join.first_wrong()
        if found is None:
            found = self._wrong_result(outcome)
        return None if found is None else Faulty(stage.component, found[0].op, found[0].line, found[1])

    def _wrong_result(self, outcome: Outcome) -> tuple[Call, Judgement] | None:
        """The first wrong output of the program although each call is right, for example if outputs were swapped."""
        eager = self.outcome.tensors
        nearly = Expected(eager, lambda _: {}, lambda _: {})
        if all(output.verdict.good for output in compare(outcome, self.outcome, nearly)):
            return None
        for output in compare(outcome, self.outcome, expected_outcome(self.case, self.backward, eager, 1)):
            if output.verdict.bad:
                producer = call_producing(output, eager, self.recorder)
                if producer is not None:
                    return producer, output.judgement
        return None


# ------------------------------------------------------------------------------------------------ joining


class Join:
    """Joins the calls of a stage to eager's. whole: the stage decomposes no operator, so that each has its result."""

    def __init__(self, calls: Sequence[Call], whole: bool) -> None:
        self.calls, self._whole = calls, whole
        self.open: dict[tuple[Any, ...], list[_Result]] = {}  # eager's results that are not joined yet
        self._joined: set[tuple[int, int]] = set()
        self._mismatches: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
        for position, call in enumerate(calls):
            for number, value in enumerate(call.results):
                if isinstance(value, torch.Tensor) and value.layout is torch.strided and not _computes_nothing(call):
                    result = _Result(position, number, call)
                    self.open.setdefault(result.key, []).append(result)

    def match(self, op: str, line: str, value: Any, *, view: bool, backward: bool) -> None:
        """Join a stage's result of an operator at a line to eager's, and overwrite it by eager's unless it is a view.

        backward: it was computed in the backward pass.
        """
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return
        key = _key(op, value, backward)
        candidates = [each for each in self.open.get(key, ()) if _same_line(line, each.call.line)]
        found = next((each for each in candidates if draws(each.call.func) or close(value, each.value)), None)
        if found is None:
            found = next((each for each in candidates[:1] if self._judge(each, value).verdict.good), None)
        if found is None:
            if candidates:
                self._mismatches.setdefault(key, []).append((line, value.clone()))
            return
        self.open[key].remove(found)
        self._joined.add((found.position, found.number))
        if not view and not overlapping(value) and not torch.equal(value, found.value):
            value.copy_(found.value)

    def first_wrong(self) -> tuple[Call, Judgement] | None:
        """The first of eager's calls with a wrong result, where its arguments were right."""
        missing: set[int] = set()
        for result in sorted((each for some in self.open.values() for each in some), key=lambda each: each.position):
            call = result.call
            mismatches = self._mismatches.get(result.key, [])
            at = next((n for n, (line, _) in enumerate(mismatches) if _same_line(line, call.line)), None)
            if at is None or not call.line or self._depends_on_random(call, missing):
                missing.add(result.position)
                continue
            found = self._judge(result, mismatches.pop(at)[1])
            if found.verdict.bad:
                dropped = self._first_dropped(call, missing) if self._whole else None
                return dropped or call, found
        return None

    def _judge(self, result: _Result, actual: torch.Tensor) -> Judgement:
        """Judge a stage's result by what eager and float64 compute from the joined results that it depends on."""
        eager = result.value
        found = close(actual, eager)
        if found is not None:
            return found

        def exactly(change: InPlace) -> dict[str, torch.Tensor]:
            return named(self._recomputed(result, lambda value: widened(changed(value, change)), wider))

        def eagerly(change: InPlace) -> dict[str, torch.Tensor]:
            return named(self._recomputed(result, lambda value: changed(value, change), lambda each: each))

        def named(value: torch.Tensor | None) -> dict[str, torch.Tensor]:
            return {} if value is None else {"": value}

        return Expected({"": eager}, exactly, eagerly).judge("", actual)

    def _recomputed(
        self, result: _Result, change: Callable[[Any], Any], constant: Callable[[Any], Any]
    ) -> torch.Tensor | None:
        """A result recomputed from changed joined results. None when an operator in between does not accept them."""
        values: dict[int, list[Any]] = {}
        pending = [result.position]
        try:
            while pending:
                call = self.calls[pending[-1]]
                sources = {at: source for at, source in call.sources.items() if not self._is_given(*source)}
                needed = [position for position, _ in sources.values() if position not in values]
                if needed:
                    pending += needed
                    continue

                def tensor(at: int, value: torch.Tensor, sources: Any = sources) -> Any:
                    return values[sources[at][0]][sources[at][1]] if at in sources else change(value)

                values[pending.pop()] = call.again(tensor, constant)
        except Exception:
            return None
        return values[result.position][result.number]

    def _is_given(self, position: int, number: int) -> bool:
        """Whether a stage reads eager's result: it was joined, and is no view of a result that was not."""
        call = self.calls[position]
        if returns_view(call.func):
            return all(self._is_given(*source) for source in call.sources.values())
        return (position, number) in self._joined or draws(call.func) or "empty" in call.op

    def _missing_before(self, call: Call, missing: set[int]) -> list[int]:
        """The calls without a result in the stage on which `call` depends directly or through such calls, in order."""
        found: set[int] = set()
        pending = [call]
        while pending:
            fresh = [at for at, _ in pending.pop().sources.values() if at in missing and at not in found]
            found |= set(fresh)
            pending += [self.calls[at] for at in fresh]
        return sorted(found)

    def _depends_on_random(self, call: Call, missing: set[int]) -> bool:
        """Whether a call depends on random numbers that the stage draws in another way."""
        return any(draws(self.calls[at].func) for at in self._missing_before(call, missing))

    def _first_dropped(self, call: Call, missing: set[int]) -> Call | None:
        """The first call on which `call` depends and that the stage has dropped."""
        before = (self.calls[at] for at in self._missing_before(call, missing))
        return next((each for each in before if each.sources and not returns_view(each.func)), None)


def _key(op: str, value: torch.Tensor, backward: bool) -> tuple[Any, ...]:
    return op, tuple(value.shape), value.dtype, backward


def _same_line(a: str, b: str) -> bool:
    """Whether two calls may come from the same line, which may be unknown, and in a graph names the module as well."""
    return not a or not b or a.partition(" (")[0] == b.partition(" (")[0]


def _computes_nothing(call: Call) -> bool:
    """Whether a call only allocates memory or aliases a tensor."""
    return "empty" in call.op or call.op in ("detach", "alias")


# ------------------------------------------------------------------------------------------------ stages


@dataclass(frozen=True, slots=True)
class Stage:
    """A way to run the program eagerly after the components up to one.

    run: of a function, returns the callable to run, and the context manager for the backward pass. whole: see `Join`.
    """

    component: str
    run: Callable[[Callable[..., Any], Join, bool | None], tuple[Callable[..., Any], Any]]
    whole: bool


def _stages(subject: Subject) -> list[Stage]:
    """The stages before the graphs that a backend compiles, in order; the last produce those graphs."""
    found = [Stage("dynamo", _as_dynamo_captures, True), Stage("aotautograd", _as_aot_traces, True)]
    for rung in subject.ladder():
        if isinstance(rung.subject, Captured):
            found.append(Stage(rung.component, _AsCaptured(rung.subject), not rung.subject.decompositions()))
    return found


class _Joining(Observed):
    """Joins the results of each call that is made."""

    def __init__(self, join: Join, *, unknown: bool = False) -> None:
        super().__init__(unknown=unknown)
        self._join = join

    def after(self, func: Any, line: str, made: Any, result: Any) -> None:
        for each in pytree.tree_leaves(result):
            self._join.match(op_of(func), line, each, view=returns_view(func), backward=in_backward())


def _as_dynamo_captures(
    fn: Callable[..., Any], join: Join, dynamic: bool | None
) -> tuple[Callable[..., Any], Observed]:
    mode = _Joining(join)

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            mode.node = n
            return super().run_node(n)

    def backend(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mode:
                return Noting(module).run(*args, enable_io_processing=False)

        return run

    return torch.compile(fn, backend=backend, dynamic=dynamic), mode


def _as_aot_traces(fn: Callable[..., Any], join: Join, dynamic: bool | None) -> tuple[Callable[..., Any], Observed]:
    mode = _Joining(join, unknown=True)  # its graphs run as Python

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = lookup_backend("aot_eager")(module, list(inputs))

        def run(*args: Any) -> Any:
            with mode:
                return traced(*args)

        return run

    return torch.compile(fn, backend=backend, dynamic=dynamic), mode


@dataclass(frozen=True, slots=True)
class _AsCaptured:
    """Runs a program through the graphs that a subject captures."""

    subject: Subject

    def __call__(self, fn: Callable[..., Any], join: Join, dynamic: bool | None) -> tuple[Callable[..., Any], Any]:
        forward: set[tuple[Any, ...]] = set()

        def compiler(kind: str) -> GraphCompiler:
            def compile_graph(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
                parts = _parts(module)
                ends = dict(_ends(parts, forward if kind == "backward" else set()))
                forward.update(part for node, part in parts.items() if not _is_gradient(node))

                def see(node: torch.fx.Node, value: Any) -> Any:
                    if node in ends:
                        view, backward = returns_view(node.target), _is_gradient(node)
                        for each in pytree.tree_leaves(value):
                            join.match(ends[node], line_of(node), each, view=view, backward=backward)
                    return value

                def run(args: list[Any]) -> list[Any]:
                    return list(interpret(module, args, see))

                run._boxed_call = True  # type: ignore[attr-defined]
                return run

            return compile_graph

        return torch.compile(fn, backend=self.subject.capturing(compiler), dynamic=dynamic), nullcontext()


def _parts(module: torch.fx.GraphModule) -> dict[torch.fx.Node, tuple[Any, ...]]:
    """For each node, the user's operator that it is part of, and what distinguishes calls of that operator."""
    found: dict[torch.fx.Node, tuple[Any, ...]] = {}
    for node in calls_of(module):
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, torch.fx.Node) and source in found:
            found[node] = found[source]
            continue
        original = node.meta.get("original_aten") or node.target
        made = tuple(each.name for each in node.meta.get("from_node") or ())
        call = (node.name,) if original is node.target else (node.meta.get("seq_nr"), made)
        found[node] = (op_of(original), *call)
    return found


def _ends(
    parts: Mapping[torch.fx.Node, tuple[Any, ...]], forward: Collection[tuple[Any, ...]]
) -> Iterator[tuple[torch.fx.Node, str]]:
    """The nodes that compute the result of a user's operator, with that operator: no other node of it reads them.

    forward: parts of the forward graph, some of which a backward graph recomputes. A part of a gradient that the
    forward graph computes is excluded.
    """
    backward = bool(forward)
    for node, part in parts.items():
        if part in forward or not node.all_input_nodes or (_is_gradient(node) and not backward):
            continue
        if all(parts.get(user) != part for user in node.users):
            yield node, part[0]


def _is_gradient(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward"))
