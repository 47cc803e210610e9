"""Capture a program into a run, and replay a run: here, on another machine, or with another backend.

`capture` takes two passes in worker processes: first the graphs with their inputs in eager mode, then what the backend
compiles each to. So a program whose compiled code crashes is captured as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pellucid.capture.fx import origin_of
from pellucid.errors import UserError
from pellucid.ir.origin import merge
from pellucid.kit.debug.check import Checked, check_request, isolated
from pellucid.kit.debug.frontend import listening, starting
from pellucid.kit.debug.match import annotated
from pellucid.kit.judge.judge import Output, Verdict, judge, kind_of, near, worst
from pellucid.kit.process.child import SECONDS, Failure, Worker, pass_on
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, interpret
from pellucid.kit.runs.run import Run, open_run, run_of, save_graph, split_run
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Compiled, Probe, Step, Subject
from pellucid.kit.subjects.clock import clock
from pellucid.trace.folder import RunWriter, check_free
from pellucid.trace.fx_programs import Constants, runnable
from pellucid.trace.schema import TENSORS

_TIMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class Saved:
    """A graph in a run. calls: the number of operator calls. verdict: on compiled code, run on the saved inputs.
    failure: how compiling or running it failed, if it did. seconds: of each stage of compilation, in order.
    """

    name: str
    calls: int
    verdict: Verdict
    failure: Failure | None = None
    seconds: tuple[tuple[str, float], ...] = ()


class _OfGraphs(Shown):
    """Results for several graphs, each with a verdict."""

    __slots__ = ()
    graphs: Any

    @property
    def verdict(self) -> Verdict:
        """The worst of the graphs."""
        return worst([graph.verdict for graph in self.graphs])

    @property
    def good(self) -> bool:
        return self.verdict.good


@dataclass(frozen=True, slots=True)
class CapturedRun(_OfGraphs):
    """graphs: in the order of their first calls. kernels: the number of distinct ones. megabytes: of saved tensors."""

    folder: str
    backend: str
    graphs: tuple[Saved, ...]
    kernels: int
    megabytes: float


def capture(
    request: Request, folder: Path, *, intermediates: bool = False, seconds: float = SECONDS, memory: int = 0
) -> CapturedRun:
    """Write a program's graphs, their inputs, and what the backend compiles them to into a new run.

    intermediates: save every result that compiled code stores in memory, not only those that a graph returns.
    seconds, memory (bytes): limits of each step of the capture. Raises UserError for a program that fails in eager
    mode, and for a graph that cannot be saved.
    """
    fresh = request.target != str(folder)  # else a script has already been captured into it
    if fresh:
        check_free(folder)
    with Worker(memory) as worker:
        if fresh:
            refused, hint = f"{request.target} cannot be captured", "see `pellucid check`"
            worker.ask(save_graphs, request, str(folder), seconds=seconds, refused=refused, hint=hint)
        return _complete(worker, request, open_run(folder, request.libraries), intermediates, seconds)


def _complete(worker: Worker, request: Request, run: Run, intermediates: bool, seconds: float) -> CapturedRun:
    """Add what the backend of the request compiles the graphs of a run to."""
    saved: list[Saved] = []
    for name in run.names:
        part = replace(request, target=f"{run.folder}:{name}")
        checked = isolated(worker, check_request, part, seconds=seconds, backend=request.backend)
        ended = worker.call(save_compiled, part, intermediates, checked.failure is None, seconds=seconds)
        failure = checked.failure or (ended if isinstance(ended, Failure) else None)
        verdict = checked.verdict if checked.failure or failure is None else Verdict(failure.kind)
        took: tuple[tuple[str, float], ...] = () if isinstance(ended, Failure) else tuple(ended)
        saved.append(Saved(name, len(run.calls(name)), verdict, failure, took))
        result = {"verdict": verdict.value, "failure": str(failure or "")}
        stages = [{"name": stage, "seconds": round(each, 6)} for stage, each in took]
        RunWriter(run.folder).note_compiled(name, {**result, "stages": stages})
    size = sum(path.stat().st_size for path in (run.folder / TENSORS).glob("*.safetensors"))
    symbols = {row["symbol"] for row in run.table("kernels.csv") if row["symbol"]}
    return CapturedRun(str(run.folder), request.backend, tuple(saved), len(symbols), round(size / 1e6, 3))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replayed graph of a run.

    checked: compiled code compared with eager, here. before: the verdict in the run; empty where it has none. moved:
    results, of `eager` or `compiled`, that differ from those in the run by more than rounding. recorded: whether the
    run has results.
    """

    graph: str
    checked: Checked
    before: str
    moved: tuple[Output, ...] = ()
    recorded: bool = True

    @property
    def verdict(self) -> Verdict:
        return self.checked.verdict


@dataclass(frozen=True, slots=True)
class Replay(_OfGraphs):
    """backend: the one used here. captured_by: the backend of the run."""

    folder: str
    backend: str
    captured_by: str
    graphs: tuple[Replayed, ...]


def replay(request: Request, seconds: float = SECONDS, memory: int = 0) -> Replay:
    """Replay the graphs of a run on their saved inputs, eagerly and compiled; compare with each other and the run.

    request.target: the run, or `RUN:GRAPH`. seconds, memory (bytes): limits for one graph.
    """
    folder, one = split_run(request.target) or (Path(request.target), "")
    run = open_run(folder, request.libraries)
    replayed: list[Replayed] = []
    with Worker(memory) as worker:
        for name in [one] if one else run.names:
            part = replace(request, target=f"{folder}:{name}")
            checked = isolated(worker, check_request, part, seconds=seconds, backend=request.backend)
            moved = worker.call(moved_results, part, checked.failure is None, seconds=seconds)
            if isinstance(moved, Failure):
                pass_on(moved)
                moved = None
            before = run.about["compiled"].get(name, {}).get("verdict", "")
            replayed.append(Replayed(name, checked, before, tuple(moved or ()), moved is not None))
    return Replay(str(folder), request.backend, run.about["backend"], tuple(replayed))


# ------------------------------------------------------------------------------------------------ in the worker


def save_graphs(request: Request, folder: str) -> int:
    """Capture the graphs of a program and write them; returns how many. Raises UserError when there are none."""
    with listening() as refusals, starting(request.backend, request.options) as starts:
        graphs, _ = captured(request)
    if not graphs:
        raise UserError(f"no graph was captured from {request.target}: nothing in it can be compiled")
    about = {"backend": request.backend, "options": request.options, "target": request.target}
    writer = RunWriter.create(Path(folder), **about)
    for graph in graphs:
        save_graph(writer, graph)
    writer.add_user_source(merge(origin_of(node) for graph in graphs for node in graph.module.graph.nodes).users)
    writer.note(refusals=[asdict(each) for each in refusals], starts=[asdict(each) for each in starts])
    return len(graphs)


def save_compiled(request: Request, intermediates: bool, runs: bool) -> Sequence[tuple[str, float]]:
    """Write what a backend compiles one graph of a run to: programs, kernels, decisions, and (if it runs) results.

    Returns the seconds of each stage.
    """
    (graph,), subject = captured(request)
    run = run_of(request.target, request.libraries)
    assert run is not None
    writer, compiled = RunWriter(run.folder), subject.compile(graph)
    _save_programs(writer, graph, compiled, request)
    times: Mapping[str, float] = {}
    if runs:
        watch = _Watch(intermediates)
        results = _seeded(lambda inputs: compiled.run(inputs, watch), graph)
        eager = _seeded(lambda inputs: interpret(graph.module, inputs), graph)
        writer.add_numbers(graph.name, {"eager": eager, "compiled": results, "intermediates": watch.values})
        times = step_times(subject, graph)
    writer.add_sources({step.symbol: annotated(step) for step in compiled.steps if step.generated})
    writer.add_rows("kernels.csv", [_kernel_row(graph, step, times) for step in compiled.steps])
    writer.add_rows("decisions.csv", ({**row, "graph": graph.name} for row in compiled.decisions()))
    return tuple(compiled.seconds.items())


def _save_programs(writer: RunWriter, graph: Graph, compiled: Compiled, request: Request) -> None:
    """Write the graph after each stage of the backend, as text and as runnable programs, with their constants."""
    constants = Constants()
    about = (graph.kind, constants, request.backend, request.options)
    texts = {
        "fx_graph_runnable.py": runnable(graph.module, f"Captured FX graph of {graph.name}.", *about),
        "fx_graph_transformed.py": runnable(compiled.graph, f"Transformed FX graph of {graph.name}.", *about),
        **compiled.texts(constants),
    }
    writer.add_texts(graph.name, {file: text for file, text in texts.items() if text})
    writer.add_values(graph.name, constants=constants.tensors)


def moved_results(request: Request, compiled: bool) -> list[Output] | None:
    """The results that differ between a run and here: eager's and, if it runs, those of compiled code.

    None: the run has no results of the graph.
    """
    (graph,), subject = captured(request)
    run = run_of(request.target, request.libraries)
    then = run.numbers(graph.name) if run is not None else None
    if then is None:
        return None
    now = {"eager": _seeded(lambda inputs: interpret(graph.module, inputs), graph)}
    if compiled:
        now["compiled"] = _seeded(subject.compile(graph).run, graph)
    found: list[Output] = []
    for how, results in now.items():
        for number, (a, b) in enumerate(zip(results, then[how], strict=True)):
            if isinstance(a, torch.Tensor) and not near(a, b):
                truth = b.double() if b.is_floating_point() else b
                found.append(Output(f"{how}: output {number}", *kind_of(a), judge(a, b, truth)))
    return found


def _seeded(run: Callable[[list[Any]], Sequence[Any]], graph: Graph) -> list[Any]:
    """The results of a graph on copies of its inputs, with seeded random numbers."""
    torch.manual_seed(0)
    return list(run(list(copied(graph.inputs))))


def _kernel_row(graph: Graph, step: Step, times: Mapping[str, float]) -> dict[str, Any]:
    return {
        "graph": graph.name,
        "kernel": step.name,
        "symbol": step.symbol,
        "op": step.op,
        "fx_nodes": " ".join(step.origin.nodes),
        "user_lines": " ".join(map(str, step.origin.users)),
        "ir_ops": " ".join(step.ops),
        **step.facts,
        "seconds": f"{times[step.name]:.3g}" if step.name in times else "",
    }


@dataclass(slots=True)
class _Watch(Probe):
    """Saves the results that steps store in memory."""

    intermediates: bool
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        if self.intermediates:
            self.values.update({name: value.detach().clone() for name, value in values.items()})


def step_times(subject: Subject, graph: Graph) -> dict[str, float]:
    """Seconds of each step, the median of `_TIMED_RUNS` runs, from the timers of the compiled graph."""
    run = subject.timed(graph)
    with torch.no_grad():  # Inductor's library calls write to `out`, which autograd rejects for parameters
        run(list(copied(graph.inputs)))
        with clock() as taken:
            for _ in range(_TIMED_RUNS):
                run(list(copied(graph.inputs)))
    found: dict[str, list[int]] = {}
    for step in (step for each in taken.runs for step in each.steps):
        found.setdefault(step.facts.step, []).append(step.time.end - step.time.begin)
    return {name: median(each) * 1e-9 for name, each in found.items()}
