"""The compiler: one list of stages, and the only code that runs, times, verifies and records one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeAlias

import torch

from pellucid.capture.layout import channels_last, laid_out_jointly, lay_out_joint
from pellucid.capture.outline import Outline, Segment, outline_text, with_compiled_graphs
from pellucid.capture.split import split
from pellucid.capture.torch_compat import artifact_logger
from pellucid.capture.transform import transform
from pellucid.codegen import CppKernel, generate
from pellucid.errors import PellucidError
from pellucid.executable import Executable, Probe
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Kernel, Program, View
from pellucid.ir.printer import print_program
from pellucid.ir.verify import verify_program
from pellucid.lower import NotHeld, has_loops, lower, tensors_of
from pellucid.native.build import BuildReport, build
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.segments import Segments
from pellucid.trace.output_code import output_code
from pellucid.trace.record import GraphRecord, StageTime
from pellucid.trace.store import Recorded, log_structured, write_run

EMPTY = Program((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Unit:
    """One graph on its way through the compiler; each stage fills in what it makes.

    name: unique in the process, `inference_0`. kind: `inference`, `forward` or `backward`.
    captured, graph: the FX graph before and after our own passes.
    lowered, scheduled: the program before and after fusion. values: where it puts what an FX node computes.
    kernels: C++ by the name of the IR kernel; equal kernels have one `CppKernel.name`.
    """

    name: str
    kind: str
    captured: torch.fx.GraphModule
    graph: torch.fx.GraphModule
    lowered: Program = EMPTY
    scheduled: Program = EMPTY
    constants: tuple[torch.Tensor, ...] = ()
    values: Mapping[str, View] = field(default_factory=dict)
    kernels: Mapping[str, CppKernel] = field(default_factory=dict)
    addresses: Mapping[str, int] = field(default_factory=dict)
    built: BuildReport | None = None
    executable: Executable | None = None
    watch: Watch | None = None


Watch: TypeAlias = "Callable[[Unit], Mapping[str, Probe]]"
"""What shall happen before and after the nodes of a program, by their names, while it runs: for the kit."""

Run: TypeAlias = "Callable[[list[Any]], list[Any]]"
"""A compiled graph: a function of the list of its arguments, which it empties."""

Step: TypeAlias = tuple[Unit, tuple[Decision, ...]]


def joint_passes(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Forward and backward as one graph, after our own passes on it."""
    return lay_out_joint(joint, has_loops)


def graph_passes(captured: torch.fx.GraphModule, kind: str) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """A captured graph after our own passes on it; see `Unit` for its kind."""
    graph, decisions = transform(captured)
    if kind != "inference":
        return graph, decisions + laid_out_jointly(captured.graph)
    graph, laid_out = channels_last(graph, has_loops)
    return graph, decisions + laid_out


def _transform(unit: Unit, options: Options) -> Step:
    graph, decisions = graph_passes(unit.captured, unit.kind)
    return replace(unit, graph=graph), decisions


def _lower(unit: Unit, options: Options) -> Step:
    lowered = lower(unit.graph)
    return replace(unit, lowered=lowered.program, constants=lowered.constants, values=lowered.values), lowered.decisions


def _schedule(unit: Unit, options: Options) -> Step:
    program, decisions = schedule(unit.lowered, options)
    return replace(unit, scheduled=program), tuple(decisions)


def _codegen(unit: Unit, options: Options) -> Step:
    kernels = {node.name: generate(node, options) for node in unit.scheduled.nodes if isinstance(node, Kernel)}
    return replace(unit, kernels=kernels), tuple(d for kernel in kernels.values() for d in kernel.decisions)


def _build(unit: Unit, options: Options) -> Step:
    addresses, report = build({kernel.name: kernel.source for kernel in unit.kernels.values()})
    return replace(unit, addresses=addresses, built=report), ()


def _load(unit: Unit, options: Options) -> Step:
    probes = unit.watch(unit) if unit.watch else {}
    inputs = tensors_of(unit.graph)
    executable = Executable(
        unit.scheduled,
        unit.kernels,
        unit.addresses,
        unit.constants,
        probes,
        reuse=options.reuse_memory,
        # Dynamo guards arguments; what forward saved comes by way of hooks, which may have packed and unpacked it.
        checked=inputs if unit.kind == "backward" else (),
        name=unit.name,
        values=(*inputs, *unit.values.values()),
    )
    return replace(unit, executable=executable), ()


STAGES: tuple[tuple[str, Callable[[Unit, Options], Step]], ...] = (
    ("transform", _transform),
    ("lower", _lower),
    ("schedule", _schedule),
    ("codegen", _codegen),
    ("build", _build),
    ("load", _load),
)

_numbers = itertools.count()


def compile_graph(
    graph: torch.fx.GraphModule,
    kind: str,
    options: Options,
    watch: Watch | None = None,
    earlier: Sequence[tuple[str, float]] = (),
) -> tuple[Run, GraphRecord]:
    """Compile `graph`: as one program, or in segments around what no program holds, see `capture.split`.

    watch: makes the probes of each program. earlier: what was done before, in seconds, for the record. With
    `options.trace` a run folder is written for each program, and for each graph that was split.
    """
    refused: dict[str, str] = {}
    before = tuple(StageTime(*each) for each in earlier)
    while True:
        start = perf_counter()
        outline = split(graph, refused)
        try:
            if outline is None:
                return _compile_program(graph, kind, options, watch, before)
            times = (*before, StageTime("split", perf_counter() - start))
            return _compile_segments(graph, outline, kind, options, watch, times)
        except NotHeld as refusal:
            if refusal.node in refused:
                raise
            refused[refusal.node] = refusal.message


def _compile_segments(
    graph: torch.fx.GraphModule,
    outline: Outline,
    kind: str,
    options: Options,
    watch: Watch | None,
    times: tuple[StageTime, ...],
) -> tuple[Run, GraphRecord]:
    """Compile the segments, and the graphs that higher-order operators call."""
    name = f"{kind}_{next(_numbers)}"
    parts: list[GraphRecord] = []

    def compiled(part: torch.fx.GraphModule) -> Any:
        executable, record = compile_graph(part, kind, options, watch)
        parts.append(record)
        return executable

    outline = replace(outline, steps=tuple(with_compiled_graphs(step, compiled) for step in outline.steps))
    segments = [step for step in outline.steps if isinstance(step, Segment)]
    executables: dict[str, Run] = {}
    for segment in segments:
        executables[segment.name], record = _compile_program(segment.graph, kind, options, watch)
        parts.append(record)
    unit = Unit(name, kind, captured=graph, graph=graph)
    record = _record(
        unit, outline.decisions, times[-1:], options, None, times[:-1], outline_text(outline), tuple(parts)
    )
    return _recorded(Segments(outline, executables, name), record), record


def _compile_program(
    graph: torch.fx.GraphModule,
    kind: str,
    options: Options,
    watch: Watch | None,
    earlier: tuple[StageTime, ...] = (),
) -> tuple[Run, GraphRecord]:
    """Run every stage on `graph`. With `options.trace` the run folder is written even when a stage fails."""
    unit = Unit(f"{kind}_{next(_numbers)}", kind, captured=graph, graph=graph, watch=watch)
    decisions: list[Decision] = []
    times: list[StageTime] = []
    try:
        for name, stage in STAGES:
            start = perf_counter()
            unit, made = stage(unit, options)
            times.append(StageTime(name, perf_counter() - start))
            decisions += made
            if options.verify:
                _verify(name, unit)
    except NotHeld:
        raise  # the graph will be split
    except Exception as error:
        record = _record(unit, decisions, times, options, error, earlier)
        if isinstance(error, PellucidError):
            error.record = record
        raise
    assert unit.executable is not None
    record = _record(unit, decisions, times, options, None, earlier)
    return _recorded(unit.executable, record), record


def _recorded(run: Run, record: GraphRecord) -> Run:
    """The same, with the arguments of its first call going to the run folder if there is one."""
    return run if record.folder is None else Recorded(run, record.folder)


def _verify(stage: str, unit: Unit) -> None:
    if stage == "lower":
        verify_program(unit.lowered)
    if stage == "schedule":
        verify_program(unit.scheduled)


def _record(
    unit: Unit,
    decisions: Sequence[Decision],
    times: Sequence[StageTime],
    options: Options,
    error: Exception | None,
    earlier: tuple[StageTime, ...] = (),
    outline: str = "",
    parts: tuple[GraphRecord, ...] = (),
) -> GraphRecord:
    record = GraphRecord(
        name=unit.name,
        kind=unit.kind,
        captured=unit.captured,
        graph=unit.graph,
        lowered=unit.lowered,
        scheduled=unit.scheduled,
        kernels=dict(unit.kernels),
        constants=unit.constants,
        values=unit.values,
        built=unit.built,
        decisions=tuple(decisions),
        stages=tuple(times),
        error=error,
        outline=outline,
        parts=parts,
        earlier=earlier,
    )
    _log(record)
    log_structured(record, options)
    return replace(record, folder=write_run(record, options)) if options.trace else record


def _log(record: GraphRecord) -> None:
    """Print the artifacts that `TORCH_LOGS` asks for, under the names that TorchInductor's have."""
    artifacts: dict[str, Callable[[], str]] = {
        "ir_pre_fusion": lambda: print_program(record.lowered),
        "ir_post_fusion": lambda: print_program(record.scheduled),
        "output_code": lambda: record.outline or output_code(record),
        "fusion": lambda: "\n".join(str(d) for d in record.decisions if d.rule.startswith("fuse")),
        "perf_hints": lambda: "\n".join(str(d) for d in record.decisions if d.rule.startswith("codegen.")),
        "schedule": lambda: "\n".join(f"{t.name}: {t.seconds:.3f} s" for t in (*record.earlier, *record.stages)),
    }
    for name, make in artifacts.items():
        logger = artifact_logger(name)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s of %s:\n%s", name, record.name, make())
