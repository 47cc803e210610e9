"""`torch.compile(model, backend="pellucid")`: the function that Dynamo calls with each graph it captures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from pellucid.background import wait_for_builds
from pellucid.capture.decompositions import decompositions
from pellucid.capture.torch_compat import capture_with_aot, debug_folder, dynamo_seconds, repro_after
from pellucid.errors import UserError, warn
from pellucid.ir.nodes import Extern, Kernel
from pellucid.native.instance import event_name
from pellucid.native.trials import variants
from pellucid.native.warm_up import warm_up
from pellucid.options import Options, make_options
from pellucid.pipeline import compile_graph, joint_passes
from pellucid.reuse import Found, Start, last_starts, look_up, uncollected, witness

__all__ = [
    "Compilation",
    "Fallback",
    "compile_fx",
    "last_compilations",
    "last_starts",
    "variants",
    "wait_for_builds",
]


@dataclass(frozen=True, slots=True)
class Fallback:
    """A call that is not compiled: its program, its name, the operator, and why."""

    program: str
    call: str
    op: str
    reason: str

    @property
    def name(self) -> str:
        """Its name in profiles."""
        return event_name(self.program, self.call)


@dataclass(frozen=True, slots=True)
class Compilation:
    """The result of compiling one graph.

    nodes: calls in the FX graph. kernels: generated kernels that one call of the graph runs; distinct: how many of
    them differ. calls: those of ATen, and those that Python executes between the parts of a graph that was split.
    seconds: time in Pellucid's own stages, by stage. reused: an earlier process compiled it; then there are no stages.
    """

    name: str
    kind: str
    nodes: int
    kernels: int
    distinct: int
    calls: tuple[Fallback, ...]
    seconds: Mapping[str, float]
    reused: bool = False

    @property
    def fallbacks(self) -> int:
        """How many calls are not compiled."""
        return len(self.calls)


_compilations: deque[Compilation] = deque(maxlen=1000)


def last_compilations() -> list[Compilation]:
    """The graphs compiled by this process, oldest first (the last 1000)."""
    return list(_compilations)


def compile_fx(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; returns a function of the same arguments.

    options: see `pellucid.options.Options`. Raises `UserError` for an unknown option or mode.
    """
    if mode not in (None, "default"):
        raise UserError(f"mode {mode!r} is not supported", hint="leave mode out, and set options={...} instead")
    settings = _settings(options)
    warm_up()
    with uncollected():
        start, found = look_up(graph, example_inputs, settings)
        if isinstance(found, Found):
            _compilations.extend(replace(each, seconds={}, reused=True) for each in found.notes)
            return found.run
        notes: list[Compilation] = []
        job = _Job(settings, start, _Clock.started(), notes)
        compilers = {kind: partial(_compile, kind=kind, job=job) for kind in ("forward", "backward", "inference")}
        seen = witness(found, example_inputs, notes) if found else None
        run = capture_with_aot(
            graph,
            example_inputs,
            **(seen.compilers(**compilers) if seen else compilers),
            decompositions=decompositions(),
            joint=partial(joint_passes, options=settings),
        )
        if seen:
            seen.captured()
    job.clock.running = False
    return run


@dataclass(frozen=True, slots=True)
class _Job:
    """A Dynamo graph that is being compiled. done: the results of its graphs so far."""

    options: Options
    start: Start
    clock: _Clock
    done: list[Compilation]


def _settings(options: Mapping[str, object] | None) -> Options:
    """The options, combined with PyTorch's own debugging variables."""
    settings = make_options(options)
    folder = debug_folder()
    if repro_after() == "aot":
        warn("TORCHDYNAMO_REPRO_AFTER=aot does nothing here; `pellucid minify` finds the smallest graph that fails")
    return replace(settings, trace=str(folder / "pellucid")) if folder and not settings.trace else settings


@dataclass(slots=True)
class _Clock:
    """Measures the times of Dynamo, up to `started`, and of AOTAutograd, between the compilations of its graphs.

    running: until AOTAutograd is done; graphs that it compiles later, at the first backward pass, have no times.
    """

    since: float
    done: tuple[tuple[str, float], ...] = ()
    running: bool = True

    @classmethod
    def started(cls) -> _Clock:
        seconds = dynamo_seconds()
        return cls(perf_counter(), () if seconds is None else (("dynamo", seconds),))

    def lap(self) -> tuple[tuple[str, float], ...]:
        """The steps since the last `resume`, with their seconds."""
        done, self.done = self.done, ()
        return (*done, ("aotautograd", perf_counter() - self.since)) if self.running else ()

    def resume(self) -> None:
        """Start to time AOTAutograd again, after a graph was compiled."""
        self.since = perf_counter()


def _compile(graph: torch.fx.GraphModule, _inputs: Sequence[Any], *, kind: str, job: _Job) -> Callable[..., Any]:
    executable, record = compile_graph(graph, kind, job.options, None, job.clock.lap(), (job.start.decision,))
    job.clock.resume()
    nodes = [(program.name, node) for program in record.programs for node in program.scheduled.nodes]
    compilation = Compilation(
        name=record.name,
        kind=kind,
        nodes=sum(node.op == "call_function" for node in graph.graph.nodes),
        kernels=sum(isinstance(node, Kernel) for _, node in nodes),
        distinct=len({kernel.name for program in record.programs for kernel in program.kernels.values()}),
        calls=(
            *(
                Fallback(program, node.name, node.op, node.reason)
                for program, node in nodes
                if isinstance(node, Extern)
            ),
            *(
                Fallback(program, each.subject[0], str(dict(each.facts)["op"]), each.why)
                for program, each in record.eager
            ),
        ),
        seconds=record.seconds,
    )
    job.done.append(compilation)
    _compilations.append(compilation)
    return executable


def __getattr__(name: str) -> Callable[..., Any]:
    """`looked_up`, the entry point of `torch.compile(backend="pellucid")`: `compile_fx`, after starting a first build.

    Dynamo takes seconds to capture a graph, and so does filling an empty store: in parallel they take half the time.
    """
    if name != "looked_up":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warm_up()
    return compile_fx
