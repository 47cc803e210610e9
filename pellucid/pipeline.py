"""The compiler: one list of stages, and the only code that runs, times, verifies and records one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch

from pellucid.background import InBackground
from pellucid.capture.attention import fuse_attention, fuse_joint_attention
from pellucid.capture.chunk import in_chunks
from pellucid.capture.complex_numbers import in_parts
from pellucid.capture.flex_attention import without_flex_attention
from pellucid.capture.fold import fold_scales, frozen_nodes
from pellucid.capture.fx import decide, decided_jointly
from pellucid.capture.keep import computed_again, keep_less, kept
from pellucid.capture.layout import channels_last, lay_out_joint
from pellucid.capture.outline import Outline, Segment, outline_text, with_compiled_graphs
from pellucid.capture.resize import expand_resizes
from pellucid.capture.row_layout import joint_rows_first, rows_first
from pellucid.capture.split import split
from pellucid.capture.torch_compat import artifact_logger, donated_of, parameters_of, real_tensors
from pellucid.capture.transform import transform
from pellucid.capture.verify_views import verify_views
from pellucid.codegen import CppKernel, Roles, compete, functions_of, generate, generate_all, packings_of
from pellucid.codegen.verify_nest import verify_nest
from pellucid.description import Probe
from pellucid.errors import BUGS, PellucidError, bug
from pellucid.executable import Executable, Name, LazyProgram
from pellucid.execution_plan import ExecutionPlan, plan_execution
from pellucid.frozen import Frozen
from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Extern, Kernel, Program, View
from pellucid.ir.printer import print_program
from pellucid.ir.verify import verify_program
from pellucid.lower import NotHeld, has_loops, lower, tensors_of
from pellucid.machine import AVX2, Machine
from pellucid.machine.library import Library
from pellucid.native.build import BuildReport, build, is_built
from pellucid.native.machine import machine_for
from pellucid.native.panels import Packer
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.freeze import split_frozen, with_inputs
from pellucid.schedule.in_place import change_in_place
from pellucid.schedule.pad import pad
from pellucid.segments import Segments
from pellucid.strips import Chain, in_strips
from pellucid.trace.output_code import output_code
from pellucid.trace.record import GraphRecord, StageTime
from pellucid.trace.store import Recorded, add_decision, log_structured, write_run

EMPTY = Program((), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Unit:
    """The state of one graph during compilation; each stage fills in its results.

    name: unique in the process, `inference_0`. kind: `inference`, `forward` or `backward`.
    machine: the target of compilation.
    frozen: the part that depends on parameters alone, for a program whose parameters are prepared once.
    captured, graph: the FX graph before and after our own passes.
    lowered, scheduled: the program before and after fusion. values: the view that holds the value of an FX node.
    kernels: C++ by the name of the IR kernel; equal kernels have one `CppKernel.name`.
    chains: calls that run strip by strip. plan: what a call does.
    program: the compiled program. executable: `program`, or `Frozen` around it, which prepares its parameters.
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
    chains: tuple[Chain, ...] = ()
    plan: ExecutionPlan | None = None
    addresses: Mapping[str, int] = field(default_factory=dict)
    built: BuildReport | None = None
    program: Executable | None = None
    executable: Run | None = None
    machine: Machine = AVX2
    frozen: Preparation | None = None
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class Preparation:
    """The program that runs before the first call of another one, and again when parameters have changed.

    names: of the frozen arguments. results: names of the results of `before`, among the inputs of the main program.
    """

    before: Unit
    names: tuple[str, ...]
    results: tuple[str, ...]


Watch: TypeAlias = "Callable[[Unit], Mapping[str, Probe]]"
"""Returns the probes that run before and after the nodes of a program, by node name. Used by the kit."""

Run: TypeAlias = "Callable[[list[Any]], list[Any]]"
"""A compiled graph: called with the list of its arguments, which it empties."""

Step: TypeAlias = tuple[Unit, tuple[Decision, ...]]


def joint_passes(joint: torch.fx.GraphModule, options: Options) -> torch.fx.GraphModule:
    """Forward and backward as one graph, after our own passes on it."""
    machine = machine_for(options.machine)
    joint, split_complex = in_parts(joint)
    for node, decision in split_complex:
        decide(node, decision)
    joint = fuse_joint_attention(joint, machine) if options.contract else joint
    joint = lay_out_joint(joint, has_loops, Library(machine))
    expand_resizes(joint.graph)
    joint = joint_rows_first(joint, has_loops)
    for node, decision in in_chunks(joint) if options.chunk else ():
        decide(node, decision)
    return keep_less(joint, machine, has_loops) if options.recompute else joint


def graph_passes(
    captured: torch.fx.GraphModule, kind: str, options: Options
) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """A captured graph after our own passes on it; see `Unit` for its kind."""
    graph, split_complex = in_parts(captured)
    graph, decisions = transform(graph)
    decisions = tuple(decision for _, decision in split_complex) + decisions
    if kind == "forward":
        return graph, decisions + decided_jointly(captured.graph) + kept(captured.graph)
    if kind == "backward":
        return graph, decisions + computed_again(captured.graph)
    machine = machine_for(options.machine)
    chunked = tuple(decision for _, decision in (in_chunks(graph) if options.chunk else ()))
    fused = fuse_attention(graph, machine) if options.contract else ()
    if any(decision.ok for decision in fused):
        graph, _ = transform(graph)  # removes copies that have no users any more
    frozen = frozen_nodes(graph) if options.freeze else ()
    graph, laid_out = channels_last(graph, has_loops, Library(machine), frozen=frozen)
    if expand_resizes(graph.graph):
        graph, _ = transform(graph)  # axes of the same sizes have the same weights
    graph, relaid = rows_first(graph, has_loops)
    return graph, decisions + chunked + fused + laid_out + relaid


def _transform(unit: Unit, options: Options) -> Step:
    graph, decisions = graph_passes(unit.captured, unit.kind, options)
    if options.freeze and unit.kind == "inference":
        decisions += fold_scales(graph)
    return replace(unit, graph=graph), decisions


def _lower(unit: Unit, options: Options) -> Step:
    lowered = lower(unit.graph, contract=options.contract, library=Library(unit.machine))
    return replace(unit, lowered=lowered.program, constants=lowered.constants, values=lowered.values), lowered.decisions


def _freeze(unit: Unit, options: Options) -> Step:
    """Split off what depends on parameters alone, and plan it; both programs are built and loaded later."""
    names = parameters_of(unit.graph) if options.freeze and unit.kind == "inference" else ()
    if not names:
        return unit, _why_not_frozen(unit, options)
    parts, decisions = split_frozen(unit.lowered, names, len(unit.constants))
    before = replace(unit, name=Name(f"{unit.name}_frozen"), lowered=parts.before, watch=None)
    for stage in (_schedule, _codegen, _strips, _plan):
        before, _ = stage(before, options)
    return replace(unit, lowered=parts.main, frozen=Preparation(before, names, parts.made)), decisions


def _why_not_frozen(unit: Unit, options: Options) -> tuple[Decision, ...]:
    if not options.freeze:
        return ()
    training = "parameters change while a model is trained"
    why = "none of the arguments is a parameter or a buffer" if unit.kind == "inference" else training
    return (Decision("freeze.before", (unit.name,), False, why),)


def _schedule(unit: Unit, options: Options) -> Step:
    program, values, decisions = unit.lowered, unit.values, list[Decision]()
    if options.reuse_memory:
        program, values, decisions = change_in_place(program, values)
    program, scheduled = schedule(program, options, unit.machine)
    decisions += scheduled
    if options.pad:
        program, values, padded = pad(program, values, unit.machine)
        decisions += padded
    return replace(unit, scheduled=program, values=values), tuple(decisions)


def _codegen(unit: Unit, options: Options) -> Step:
    nodes = [node for node in unit.scheduled.nodes if isinstance(node, Kernel)]
    constant = frozenset((*unit.frozen.names, *unit.frozen.results)) if unit.frozen else frozenset[str]()
    read = {name for node in unit.scheduled.nodes for name in reads(node)}
    unread = frozenset(buffer.name for buffer in unit.scheduled.buffers if buffer.name not in read)
    written = frozenset(name for node in nodes for name in writes(node))
    inputs = frozenset(buffer.name for buffer in unit.scheduled.buffers if buffer.role == "input")
    roles = Roles(constant, unread, written, inputs)
    kernels = {node.name: generate(node, options, unit.machine, roles) for node in nodes}

    def all_of(node: Kernel) -> Iterator[CppKernel]:
        return generate_all(node, options, unit.machine, roles)

    kernels, competing = compete(kernels, nodes, all_of, options.variants, unit.machine)
    decisions = (*(decision for kernel in kernels.values() for decision in kernel.decisions), *competing)
    panels = {packing.panels: packing.numel for packing in packings_of(kernels)}
    scheduled = with_inputs(unit.scheduled, panels, len(unit.constants))
    return replace(unit, scheduled=scheduled, kernels=kernels), decisions


def _strips(unit: Unit, options: Options) -> Step:
    if not (options.strips and options.reuse_memory):
        return unit, ()
    chains, kernels, decisions = in_strips(unit.scheduled, unit.kernels, unit.machine)
    return replace(unit, chains=chains, kernels=kernels), decisions


def _plan(unit: Unit, options: Options) -> Step:
    values = (*tensors_of(unit.graph), *unit.values.values())
    plan = plan_execution(
        unit.scheduled,
        unit.kernels,
        name=unit.name,
        values=values,
        reuse=options.reuse_memory,
        donated=donated_of(unit.graph),
        chains=unit.chains,
    )
    return replace(unit, plan=plan), ()


def _sources(unit: Unit) -> dict[str, str]:
    units = (unit, unit.frozen.before) if unit.frozen else (unit,)
    return {each.name: each.source for part in units for each in functions_of(part.kernels)}


def _build(unit: Unit, options: Options) -> Step:
    addresses, report = build(_sources(unit), yielding=options.background)
    return replace(unit, addresses=addresses, built=report), ()


def _load(unit: Unit, options: Options) -> Step:
    if unit.frozen:
        before, _ = _load(replace(unit.frozen.before, addresses=unit.addresses), options)
        unit = replace(unit, frozen=replace(unit.frozen, before=before))
    assert unit.plan is not None
    executable = Executable(
        unit.plan,
        LazyProgram((unit.scheduled, unit.kernels)),
        unit.addresses,
        unit.constants,
        unit.watch(unit) if unit.watch else {},
        # Dynamo guards arguments; saved tensors pass through hooks, which may have packed and unpacked them.
        checked=tensors_of(unit.graph) if unit.kind == "backward" else (),
        parameters=parameters_of(unit.graph) if unit.kind == "inference" and not unit.frozen else (),
    )
    whole = _prepared(unit, executable) if unit.frozen else executable
    return replace(unit, program=executable, executable=whole), executable.choices.decisions


def _prepared(unit: Unit, main: Executable) -> Frozen:
    frozen = unit.frozen
    assert frozen is not None and frozen.before.executable is not None
    position = {name: number for number, name in enumerate(unit.scheduled.inputs) if name}
    packings = packings_of(unit.kernels)
    packers = [Packer(each.name, each.source, each.numel, position[each.buffer]) for each in packings]
    used = {*frozen.before.scheduled.inputs, *(each.buffer for each in packings)}
    watched = [position[name] for name in frozen.names if name in used]
    read = {name for kernel in unit.kernels.values() for name in kernel.params}
    read |= {name for node in unit.scheduled.nodes if isinstance(node, Extern) for name in reads(node)}
    unread = [number for number, name in enumerate(frozen.results) if name not in read]
    return Frozen(main, frozen.before.executable, watched, packers, unit.addresses, unread, unit.name)


Stages: TypeAlias = "tuple[tuple[str, Callable[[Unit, Options], Step]], ...]"

PLANNING: Stages = (
    ("transform", _transform),
    ("lower", _lower),
    ("freeze", _freeze),
    ("schedule", _schedule),
    ("codegen", _codegen),
    ("strips", _strips),
    ("plan", _plan),
)
BUILDING: Stages = (("build", _build), ("load", _load))
"""Stages that wait for the C++ compiler; they may run in the background."""

_numbers = itertools.count()


def new_name(kind: str) -> Name:
    """A name for a compiled graph, unique in this process."""
    return Name(f"{kind}_{next(_numbers)}")


def compile_graph(
    graph: torch.fx.GraphModule,
    kind: str,
    options: Options,
    watch: Watch | None = None,
    earlier: Sequence[tuple[str, float]] = (),
    decided: tuple[Decision, ...] = (),
) -> tuple[Run, GraphRecord]:
    """Compile `graph`: as one program, or in segments around operators that no program can contain (`capture.split`).

    watch: builds the probes of each program. earlier, decided: times of earlier steps in seconds, and their decisions;
    for the record. With `options.trace` a run folder is written for each program, and for each graph that was split.
    """
    graph, computed = without_flex_attention(graph, contract=options.contract)
    decided = (*decided, *computed)
    refused: dict[str, str] = {}
    before = tuple(StageTime(*each) for each in earlier)
    while True:
        start = perf_counter()
        outline = split(graph, refused)
        try:
            if outline is None:
                return _compile_program(graph, kind, options, watch, before, decided)
            times = (*before, StageTime("split", perf_counter() - start))
            return _compile_segments(graph, outline, kind, options, watch, times, decided)
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
    decided: tuple[Decision, ...],
) -> tuple[Run, GraphRecord]:
    """Compile the segments, and the graphs that higher-order operators call."""
    name = new_name(kind)
    parts: list[GraphRecord] = []
    if options.background:
        options = replace(options, background=False)
        why = "its programs pass each other tensors in planned layouts, which PyTorch's operators need not follow"
        decided = (*decided, Decision("build.background", (name,), False, why))

    def compiled(part: torch.fx.GraphModule) -> Any:
        executable, record = compile_graph(part, kind, options, watch)
        parts.append(record)
        return executable

    outline = replace(outline, steps=tuple(with_compiled_graphs(step, compiled) for step in outline.steps))
    segments = [step for step in outline.steps if isinstance(step, Segment)]
    executables: dict[str, Run] = {}
    for segment in segments:
        assert segment.graph is not None
        executables[segment.name], record = _compile_program(segment.graph, kind, options, watch)
        parts.append(record)
    unit = Unit(name, kind, captured=graph, graph=graph)
    record = _record(
        unit, decided + outline.decisions, times[-1:], options, None, times[:-1], outline_text(outline), tuple(parts)
    )
    return _recorded(Segments(outline, executables, name), record), record


def _compile_program(
    graph: torch.fx.GraphModule,
    kind: str,
    options: Options,
    watch: Watch | None,
    earlier: tuple[StageTime, ...] = (),
    decided: tuple[Decision, ...] = (),
) -> tuple[Run, GraphRecord]:
    """Run every stage on `graph`. With `options.trace` the run folder is written even when a stage fails."""
    unit = Unit(new_name(kind), kind, captured=graph, graph=graph, watch=watch)
    unit = replace(unit, machine=machine_for(options.machine))
    decisions = list(decided)
    times: list[StageTime] = []

    def run_stages(stages: Stages) -> None:
        nonlocal unit
        for name, stage in stages:
            start = perf_counter()
            unit, made = _run_stage(name, stage, unit, options)
            times.append(StageTime(name, perf_counter() - start))
            decisions.extend(made)
            if options.verify:
                _verify(name, unit)

    try:
        run_stages(PLANNING)
        waits = _why_foreground(unit, options)
        if options.background:
            decisions.append(Decision("build.background", (unit.name,), not waits, waits or _MEANWHILE))
        if waits:
            run_stages(BUILDING)
    except NotHeld:
        raise  # the graph will be split
    except Exception as error:
        record = _record(unit, decisions, times, options, error, earlier)
        if isinstance(error, PellucidError):
            error.record = record
        raise
    record = _record(unit, decisions, times, options, None, earlier)
    if not waits:
        return InBackground(graph, partial(_finish, unit, options, record), unit.name), record
    assert unit.executable is not None
    if record.folder is not None:
        for each in (unit, *([unit.frozen.before] if unit.frozen else [])):
            assert each.program is not None
            each.program.choices.report = partial(add_decision, record, record.folder)
    return _recorded(unit.executable, record), record


def _run_stage(name: str, stage: Callable[[Unit, Options], Step], unit: Unit, options: Options) -> Step:
    """Run one stage; an internal error in it is reported with the name of the stage."""
    try:
        return stage(unit, options)
    except BUGS as error:
        raise bug(f"stage {name}", error) from error


_MEANWHILE = "until its kernels are built, PyTorch's operators compute its calls"


def _why_foreground(unit: Unit, options: Options) -> str:
    """Why the kernels of a program are built before its first call; empty if they are built in the background."""
    if not options.background:
        return "the option `background` is off"
    if options.trace or unit.watch:
        return "a trace or a probe inspects the compiled program"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are requested, and PyTorch's operators round differently than kernels"
    return "all kernels are in the store" if is_built(_sources(unit)) else ""


def _finish(unit: Unit, options: Options, record: GraphRecord) -> Run:
    """Build and load a program, in the background."""
    try:
        for name, stage in BUILDING:
            unit, _ = _run_stage(name, stage, unit, options)
    except PellucidError as error:
        error.record = record
        raise
    assert unit.executable is not None
    return unit.executable


def _recorded(run: Run, record: GraphRecord) -> Run:
    """`run`; with a run folder, also writes the arguments of its first call there."""
    return run if record.folder is None else Recorded(run, record.folder)


def _verify(stage: str, unit: Unit) -> None:
    if stage == "transform":
        verify_views(unit.graph.graph)
    if stage == "lower":
        verify_program(unit.lowered)
    if stage == "schedule":
        verify_program(unit.scheduled)
    if stage == "codegen":
        for kernel in unit.kernels.values():
            for each in kernel.variants:
                verify_nest(each.nest)


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
    record = _record_of(unit, decisions, times, error, earlier, outline, parts)
    _log(record)
    log_structured(record, options)
    if not options.trace:
        return record
    with real_tensors():  # constants of the graph are written too
        return replace(record, folder=write_run(record, options))


def _record_of(
    unit: Unit,
    decisions: Sequence[Decision] = (),
    times: Sequence[StageTime] = (),
    error: Exception | None = None,
    earlier: tuple[StageTime, ...] = (),
    outline: str = "",
    parts: tuple[GraphRecord, ...] = (),
) -> GraphRecord:
    return GraphRecord(
        name=unit.name,
        kind=unit.kind,
        captured=unit.captured,
        graph=unit.graph,
        lowered=unit.lowered,
        scheduled=unit.scheduled,
        kernels=dict(unit.kernels),
        plan=unit.plan,
        constants=unit.constants,
        values=unit.values,
        built=unit.built,
        decisions=tuple(decisions),
        stages=tuple(times),
        error=error,
        outline=outline,
        parts=parts,
        earlier=earlier,
        before=_record_of(unit.frozen.before) if unit.frozen else None,
    )


ARTIFACTS: Mapping[str, Callable[[GraphRecord], str]] = {
    "ir_pre_fusion": lambda record: print_program(record.lowered),
    "ir_post_fusion": lambda record: print_program(record.scheduled),
    "output_code": lambda record: record.outline or (output_code(record) if record.plan else ""),
    "fusion": lambda record: "\n".join(str(d) for d in record.decisions if d.rule.startswith("fuse")),
    "perf_hints": lambda record: "\n".join(str(d) for d in record.decisions if d.rule.startswith("codegen.")),
    "schedule": lambda record: "\n".join(f"{t.name}: {t.seconds:.3f} s" for t in (*record.earlier, *record.stages)),
}
"""The artifacts that `TORCH_LOGS` can enable, under the names that TorchInductor uses."""


def _log(record: GraphRecord) -> None:
    for name, make in ARTIFACTS.items():
        logger = artifact_logger(name)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s of %s:\n%s", name, record.name, make(record))
