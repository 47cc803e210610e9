"""Try a graph, or parts of it, in a fork: how it fails, in which step, and which calls are suspects."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.errors import StoreError, ToolchainError
from pellucid.kit.debug.explain import explain
from pellucid.kit.debug.simulation import COMPLETE, LIVE, first_wrong
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.minify.subgraph import CapturedGraphs, EagerPart, NotAGraph, Subgraph, shape_key, side_by_side
from pellucid.kit.process.child import Failure, failure_of, pass_on, raise_if_nothing_compiles
from pellucid.kit.programs.graphs import Graph, calls_of
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.base import Compiled, Step
from pellucid.kit.subjects.marker import Marker

COMPILE, RUN = "compile", "run"


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a failure, which a smaller graph has to have in common with the original.

    verdict: as in `check`. what: the exception's type or the signal; empty for wrong results. phase: `compile` or
    `run`; empty for wrong results, and where it is unknown. operators: of the suspect calls; empty where there are
    none.
    """

    verdict: str
    what: str = ""
    phase: str = ""
    operators: tuple[str, ...] = ()

    def same(self, other: Kind) -> bool:
        """Whether another failure is of this kind. One operator in common is enough."""
        if (self.verdict, self.what, self.phase) != (other.verdict, other.what, other.phase):
            return False
        return not (self.operators and other.operators) or not set(self.operators).isdisjoint(other.operators)

    def __str__(self) -> str:
        during = f" in {self.phase}" if self.phase else ""
        return f"{self.verdict} ({self.what}{during})" if self.what else self.verdict


GOOD = Kind("good")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a trial. nodes: the suspect calls, the most likely first. tolerance: see `repro.How`."""

    kind: Kind
    nodes: tuple[str, ...] = ()
    tolerance: float = 0.0


_captured: CapturedGraphs | None = None
_compiled: dict[str, Compiled | Exception] = {}


def capture_graphs(request: Request) -> CapturedGraphs:
    """Capture the graphs of a program, for this process and its forks."""
    global _captured
    _captured = CapturedGraphs(request)
    _compiled.clear()
    return _captured


def captured_graphs() -> CapturedGraphs:
    """The graphs that `capture_graphs` captured."""
    assert _captured is not None
    return _captured


class Noted(Marker):
    """Notes the phase, the step and the calls that it implements, to be read if the process dies."""

    def phase(self, name: str) -> None:
        self.note(name)

    def before(self, step: Step) -> None:
        self.note("\n".join((RUN, step.name, *step.origin.nodes)))

    def after(self, step: Step, values: Mapping[str, Any]) -> None:
        self.note(RUN)


def found_of(failure: Failure) -> Found:
    """The result of a trial that failed. The last name of a note at maximum length may be truncated, and is ignored.

    Raises ToolchainError and StoreError where nothing compiles: all parts would fail in the same way.
    """
    if failure.what in (ToolchainError.__name__, StoreError.__name__):
        pass_on(failure)
    phase, _, rest = failure.step.partition("\n")
    nodes = tuple(rest.split("\n")[1:])
    operators: tuple[str, ...] = ()
    if nodes and _captured is not None:
        operators = tuple(sorted({name for graph in _captured.graphs for name in _captured.operators(graph, nodes)}))
    return Found(Kind(failure.kind, failure.what, phase, operators), nodes)


# ------------------------------------------------------------------------------------------------ in a fork


def try_whole(name: str) -> Found:
    """How a whole graph fails, and the suspect calls. Crashes or hangs if the graph does."""
    graph, noted = captured_graphs().graphs[name], Noted()
    noted.phase(COMPILE)
    try:
        compiled = captured_graphs().subject.compile(graph)
    except Exception as error:
        return _rejected(error, graph)
    noted.phase(RUN)
    for mode in (COMPLETE, LIVE):
        try:
            wrong = first_wrong(graph, compiled, mode, noted)
        except Exception as error:
            return Found(_kind(failure_of(error), RUN))
        if wrong is not None:
            steps = [step for step in compiled.steps if step.name == wrong.kernel]
            nodes = tuple(dict.fromkeys(node for step in steps for node in step.origin.nodes)) or (wrong.fx_node,)
            return Found(Kind(Verdict.WRONG.value, operators=captured_graphs().operators(name, nodes)), nodes)
    return Found(GOOD)


def _rejected(error: Exception, graph: Graph) -> Found:
    """The result for an exception of the compiler: the calls of the kernel that it rejected, the one at fault first."""
    raise_if_nothing_compiles(error)
    refused = captured_graphs().subject.refused(error)
    if refused is None:
        return Found(_kind(failure_of(error), COMPILE), _mentioned(str(error), graph))
    blamed = explain(refused).fx_node.split(", ")
    every = [node for value in refused.values.values() for node in value.origin.nodes]
    own = [name for line in refused.source.splitlines() for name in _defined(refused.values, line)]
    nodes = tuple(node for node in dict.fromkeys((*blamed, *own)) if node in every)
    operators = captured_graphs().operators(graph.name, nodes)
    return Found(Kind("error", failure_of(error).what, COMPILE, operators), nodes)


def _mentioned(text: str, graph: Graph) -> tuple[str, ...]:
    """The calls whose operators a message names, else those whose names occur in it, possibly by chance."""
    words = set(re.findall(r"[\w.]+", text))
    calls = list(calls_of(graph.module))
    named = [node.name for node in calls if str(node.target) in words]
    return tuple(named or [node.name for node in calls if node.name in words])


def _defined(values: Mapping[str, Any], line: str) -> Iterator[str]:
    """The calls that a line of a kernel implements."""
    for text, value in values.items():
        if text in line:
            yield from value.origin.nodes


def _kind(failure: Failure, phase: str) -> Kind:
    return Kind(failure.kind, failure.what, phase)


def try_parts(parts: Sequence[Subgraph]) -> Found | tuple[Found, ...]:
    """Compile parts as one graph: a result for each part if the graph runs, else one for all.

    A part that is not a valid graph, or that eager cannot run, is good.
    """
    noted = Noted()
    noted.phase("eager")
    references = [_reference(part) for part in parts]
    able = [each for each in references if each is not None]
    if not able:
        return tuple(Found(GOOD) for _ in parts)
    try:
        graph = side_by_side([each.graph for each in able], captured_graphs().symbolic(parts[0]))
    except NotAGraph:
        return (Found(GOOD),) if len(parts) == 1 else Found(GOOD)
    phase = COMPILE
    noted.phase(phase)
    try:
        compiled = _compile(graph)
        phase = RUN
        noted.phase(phase)
        torch.manual_seed(0)
        results = compiled.run([each for one in able for each in one.fresh()], noted)
    except Exception as error:
        nodes = _rejected(error, graph).nodes if phase == COMPILE else ()
        return Found(_with_operators(_kind(failure_of(error), phase), parts), nodes)
    return tuple(_judged(references, results, parts))


def _reference(part: Subgraph) -> EagerPart | None:
    """Eager's results of a part; None where it cannot run it."""
    try:
        return EagerPart(captured_graphs().bare(part))
    except NotAGraph:
        return None


def _with_operators(kind: Kind, parts: Sequence[Subgraph]) -> Kind:
    """A kind with the operators of parts added."""
    operators = tuple(sorted({op for part in parts for op in captured_graphs().operators(part.graph, part.names)}))
    return Kind(kind.verdict, kind.what, kind.phase, operators)


def _compile(graph: Graph) -> Compiled:
    key = shape_key(graph)
    if key not in _compiled:
        try:
            _compiled[key] = captured_graphs().subject.compile(graph)
        except Exception as error:
            _compiled[key] = error
    compiled = _compiled[key]
    if isinstance(compiled, Exception):
        raise compiled
    return compiled


def _judged(
    references: Sequence[EagerPart | None], results: Sequence[Any], parts: Sequence[Subgraph]
) -> Iterator[Found]:
    at = 0
    for reference, part in zip(references, parts, strict=True):
        if reference is None:
            yield Found(GOOD)
            continue
        own = results[at : at + reference.count]
        at += reference.count
        worst = reference.worst(own)
        if worst is None:
            yield Found(GOOD)
            continue
        between = worst.max_error * math.sqrt(worst.allowed / worst.error) if worst.error else 0.0
        kind = _with_operators(Kind(worst.verdict.value), [part])
        yield Found(kind, part.names, between if math.isfinite(between) else 0.0)


def run_program(program: str) -> Found:
    """How a program fails when run as `python PROGRAM`."""
    noted = Noted()
    noted.phase(RUN)
    torch._dynamo.reset()
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return Found(Kind(Verdict.WRONG.value) if end.code == 1 else GOOD)
    except Exception as error:
        return Found(_kind(failure_of(error), COMPILE))
    return Found(GOOD)
