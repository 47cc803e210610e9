"""Capturing a program into a run, and running a run again: here, elsewhere, or by another backend.

`capture` takes two passes, each in a process that may die: the graphs with their inputs as eager calls them, then what
the backend makes of each, so that a program which kills its process is captured as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pellucid.codegen.linemap import annotate_source
from pellucid.errors import UserError
from pellucid.kit.debug.check import Checked, Request, captured, check_request, isolated
from pellucid.kit.debug.frontend import listening
from pellucid.kit.judge.judge import Output, Verdict, judge, kind_of, near, worst
from pellucid.kit.process.child import SECONDS, Failure, Worker, pass_on
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, interpret
from pellucid.kit.runs.run import Run, RunWriter, open_run, run_of, split_run, write_json, write_table
from pellucid.kit.runs.tensors import FOLDER
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Compiled, Probe, Step

KERNEL_COLUMNS = ("graph", "kernel", "symbol", "op", "fx_nodes", "user_lines", "ir_ops", "seconds")
DECISION_COLUMNS = ("graph", "kind", "subject", "cause", "fx_nodes", "user_line")
_TIMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class Saved:
    """A graph in a run. calls: of operators. verdict: compiled code beside eager, on the saved inputs. failure: how
    compiling or running it ended, if otherwise than by returning.
    """

    name: str
    calls: int
    verdict: Verdict
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CapturedRun(Shown):
    """graphs: in the order of their first calls. kernels: the different ones. megabytes: of tensors in the folder."""

    folder: str
    backend: str
    graphs: tuple[Saved, ...]
    kernels: int
    megabytes: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the graphs."""
        return worst([graph.verdict for graph in self.graphs])

    @property
    def good(self) -> bool:
        return self.verdict.good


def capture(
    request: Request, folder: Path, *, intermediates: bool = False, seconds: float = SECONDS, memory: int = 0
) -> CapturedRun:
    """Write a program's graphs, their inputs, and what the backend makes of them into a new run.

    intermediates: save every result that compiled code leaves in memory, not only those that a graph returns.
    seconds, memory (bytes): what each step of the work may take. Raises UserError for a program that fails in eager
    mode, and for a graph that cannot be saved.
    """
    with Worker(memory) as worker:
        if request.target != str(folder):  # a script was captured into it
            refused, hint = f"{request.target} cannot be captured", "see `pellucid check`"
            worker.ask(save_graphs, request, str(folder), seconds=seconds, refused=refused, hint=hint)
        return _complete(worker, request, open_run(folder, request.libraries), intermediates, seconds)


def _complete(worker: Worker, request: Request, run: Run, intermediates: bool, seconds: float) -> CapturedRun:
    """Add to the graphs of a run what the backend of the request makes of them."""
    saved: list[Saved] = []
    for name in run.names:
        part = replace(request, target=f"{run.folder}:{name}")
        checked = isolated(worker, check_request, part, seconds=seconds, backend=request.backend)
        ended = worker.call(save_compiled, part, intermediates, checked.failure is None, seconds=seconds)
        failure = checked.failure or (ended if isinstance(ended, Failure) else None)
        nodes = run.read(f"graphs/{name}.json")["nodes"]
        calls = sum(node["op"] == "call_function" for node in nodes)
        verdict = checked.verdict if checked.failure or failure is None else Verdict(failure.kind)
        saved.append(Saved(name, calls, verdict, failure))
    results = {each.name: {"verdict": each.verdict.value, "failure": str(each.failure or "")} for each in saved}
    write_json(run.folder / "run.json", {**run.about, "results": results})
    size = sum(path.stat().st_size for path in (run.folder / FOLDER).glob("*.safetensors"))
    symbols = {row["symbol"] for row in run.table("kernels.csv") if row["symbol"]}
    return CapturedRun(str(run.folder), request.backend, tuple(saved), len(symbols), round(size / 1e6, 3))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A graph of a run, run again.

    checked: compiled code beside eager, here. before: the verdict in the run; empty where it has none. moved: results
    that differ from those in the run by more than rounding, by what made them: `eager` or `compiled`.
    recorded: whether the run has any.
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
class Replay(Shown):
    """backend: that ran it here. captured_by: that of the run."""

    folder: str
    backend: str
    captured_by: str
    graphs: tuple[Replayed, ...]

    @property
    def verdict(self) -> Verdict:
        return worst([graph.verdict for graph in self.graphs])

    @property
    def good(self) -> bool:
        return self.verdict.good


def replay(request: Request, seconds: float = SECONDS, memory: int = 0) -> Replay:
    """Run the graphs of a run on their saved inputs, eagerly and compiled, and compare: with each other and the run.

    request.target: the run, or `RUN:GRAPH`. seconds, memory (bytes): what one graph may take.
    """
    found = split_run(request.target)
    if found is None:
        raise UserError(
            f"{request.target} is no folder of a run", hint="make one with `pellucid capture TARGET -o FOLDER`"
        )
    folder, one = found
    run = open_run(folder, request.libraries)
    results, replayed = run.about.get("results", {}), []
    with Worker(memory) as worker:
        for name in [one] if one else run.names:
            part = replace(request, target=f"{folder}:{name}")
            checked = isolated(worker, check_request, part, seconds=seconds, backend=request.backend)
            moved = worker.call(moved_results, part, checked.failure is None, seconds=seconds)
            if isinstance(moved, Failure):
                pass_on(moved)
                moved = None
            before = results.get(name, {}).get("verdict", "")
            replayed.append(Replayed(name, checked, before, tuple(moved or ()), moved is not None))
    return Replay(str(folder), request.backend, run.about["backend"], tuple(replayed))


# ------------------------------------------------------------------------------------------------ in the worker


def save_graphs(request: Request, folder: str) -> int:
    """Capture the graphs of a program and write them; returns how many. Raises UserError when there are none."""
    with listening() as refusals:
        graphs, _ = captured(request)
    if not graphs:
        raise UserError(f"{request.target} becomes no graph: nothing in it can be compiled")
    writer = RunWriter(Path(folder), backend=request.backend, options=request.options, target=request.target)
    for graph in graphs:
        writer.add(graph)
    writer.note(refusals=[asdict(each) for each in refusals])
    return len(graphs)


def save_compiled(request: Request, intermediates: bool, runs: bool) -> None:
    """Write what a backend makes of one graph of a run: its plan, kernels, decisions, and (if it runs) numbers."""
    (graph,), subject = captured(request)
    run = run_of(request.target, request.libraries)
    assert run is not None
    compiled = subject.compile(graph)
    _save_text(run, graph, compiled)
    times: Mapping[str, float] = {}
    if runs:
        watch = _Watch(intermediates)
        results = _seeded(lambda inputs: compiled.run(inputs, watch), graph)
        eager = _seeded(lambda inputs: interpret(graph.module, inputs), graph)
        run.add_numbers(graph.name, {"eager": eager, "compiled": results, "intermediates": watch.values})
        times = _times(compiled, graph)
    _add_rows(run, "kernels.csv", KERNEL_COLUMNS, [_kernel_row(graph, step, times) for step in compiled.steps])
    refusals = [(graph.name, each.kind, " ".join(each.subject), each.cause, " ".join(each.fx_nodes), each.user_line)
                for each in compiled.refusals()]  # fmt: skip
    _add_rows(run, "decisions.csv", DECISION_COLUMNS, refusals)


def moved_results(request: Request, compiled: bool) -> list[Output] | None:
    """What differs between the numbers in a run and those here: eager's, and if it runs those of compiled code.

    None: the run has no numbers of the graph.
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
    """What a graph returns on copies of its inputs; its random numbers are the same each time."""
    torch.manual_seed(0)
    return list(run(list(copied(graph.inputs))))


def _save_text(run: Run, graph: Graph, compiled: Compiled) -> None:
    for folder in ("plans", "kernels"):
        (run.folder / folder).mkdir(exist_ok=True)
    if compiled.plan:
        (run.folder / "plans" / f"{graph.name}.txt").write_text(compiled.plan, encoding="utf-8")
    for step in compiled.steps:
        if step.generated:
            text = annotate_source(step.source, step.lines) if step.lines else step.source
            (run.folder / "kernels" / f"{step.symbol}.cpp").write_text(text, encoding="utf-8")


def _kernel_row(graph: Graph, step: Step, times: Mapping[str, float]) -> tuple[Any, ...]:
    users = " ".join(map(str, step.origin.users))
    seconds = f"{times[step.name]:.3g}" if step.name in times else ""
    nodes, ops = " ".join(step.origin.nodes), " ".join(step.ops)
    return graph.name, step.name, step.symbol, step.op, nodes, users, ops, seconds


def _add_rows(run: Run, file: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    before = [tuple(row.values()) for row in run.table(file)]
    write_table(run.folder / file, columns, [*before, *rows])


@dataclass(slots=True)
class _Watch(Probe):
    """Keeps what steps leave in memory."""

    intermediates: bool
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        if self.intermediates:
            self.values.update({name: value.detach().clone() for name, value in values.items()})


@dataclass(slots=True)
class _Clock(Probe):
    """Seconds of each step, run after run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    _since: float = 0.0

    def before(self, step: Step) -> None:
        self._since = time.perf_counter()

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        self.seconds.setdefault(step.name, []).append(time.perf_counter() - self._since)


def _times(compiled: Compiled, graph: Graph) -> dict[str, float]:
    clock = _Clock()
    for _ in range(_TIMED_RUNS):
        compiled.run(list(copied(graph.inputs)), clock)
    return {name: median(each) for name, each in clock.seconds.items()}
