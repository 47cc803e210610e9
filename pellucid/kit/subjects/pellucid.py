"""Pellucid as a subject."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pellucid.backend import compile_fx
from pellucid.capture.decompositions import decompositions
from pellucid.capture.fx import origin_of
from pellucid.codegen import CppKernel
from pellucid.description import Probe as NodeProbe
from pellucid.execution_plan import Call, ExecutionPlan, Launch, Place, read_by, written_by
from pellucid.ir.decision import Decision
from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Compute, Extern, Kernel, Program, Reduce, View
from pellucid.ir.origin import GLUE, merge
from pellucid.ir.printer import print_program
from pellucid.ir.types import TORCH_DTYPES
from pellucid.kit.programs.graphs import Graph, GraphCompiler, calls_of, is_view, through_aot
from pellucid.kit.subjects.base import (
    AsTraced,
    Captured,
    Compiled,
    Fusion,
    Interpreted,
    Near,
    Partial,
    Passed,
    Probe,
    Rung,
    Step,
    Subject,
    Undecomposed,
    refusal,
)
from pellucid.kit.subjects.lines import wrong_scalar
from pellucid.kit.subjects.plain import front_rungs
from pellucid.kit.subjects.refusals import BY_PYTHON, CPP_NAMES, DEFINITION, Refusal, Refused, Value, kind_of
from pellucid.lower import NotHeld, lower
from pellucid.native.build import KernelCompileError
from pellucid.options import make_options
from pellucid.pipeline import Unit, compile_graph, graph_passes, joint_passes
from pellucid.schedule import schedule
from pellucid.trace.fx_programs import Constants
from pellucid.trace.record import GraphRecord
from pellucid.trace.store import decision_rows, kernel_facts, texts_of
from pellucid.trace.store import origin_of as origin_of_node

_FUSIONS = ("fuse.vertical", "fuse.inline", "fuse.horizontal")
_RANDOM = ("rand", "bernoulli", "dropout", "normal_", "uniform_", "multinomial", "exponential_")


@dataclass(frozen=True, slots=True)
class Pellucid(Subject):
    """This package's own compiler; `options` are those of `pellucid.options.Options`."""

    demands = 1  # graphs of any ATen operators

    @property
    def name(self) -> str:
        return "pellucid"

    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        return torch.compile(fn, backend=partial(compile_fx, options=dict(self.options)), dynamic=dynamic)

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        if not decompose:
            return through_aot(compiler, {})
        return through_aot(compiler, decompositions(), partial(joint_passes, options=make_options(self.options)))

    def compile(self, graph: Graph) -> PellucidCompiled:
        return PellucidCompiled(graph, self.options)

    def callable(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        return compile_graph(graph.module, graph.kind, make_options(self.options))[0]

    def sanitized(self) -> Subject:
        return Pellucid({**self.options, "reuse_memory": False})  # compiler flags are in the environment

    def refused(self, error: BaseException) -> Refused | None:
        if not isinstance(error, KernelCompileError) or error.record is None:
            return None
        variants = (each for kernel in error.record.kernels.values() for each in kernel.variants)
        kernel = next(each for each in variants if each.name == error.kernel)
        return Refused(error.kernel, kernel.source, error.line, error.detail, error.output, dict(_values(kernel)))

    def fusing(self, most: int) -> Pellucid:
        return Pellucid({**self.options, **({"max_fusions": most} if most else {"fusion": False})})

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return decompositions()

    def passed(self, graph: Graph) -> torch.fx.GraphModule:
        return graph_passes(graph.module, graph.kind, make_options(self.options))[0]

    def ladder(self) -> tuple[Rung, ...]:
        off = ("fusion", "vectorize", "reuse_memory", "strips", "freeze", "pad")
        simplest = {**self.options, **dict.fromkeys(off, False)}
        steps: list[Rung] = []
        for component, more in (
            ("codegen", {}),
            ("memory plan", {"reuse_memory": True}),
            ("vectorisation", {"vectorize": True}),
            ("fusion", {"fusion": True}),
            *([("strips", {"strips": True})] if make_options(self.options).strips else []),
            *([("padding", {"pad": True})] if make_options(self.options).pad else []),
            *([("freezing", {"freeze": True})] if make_options(self.options).freeze else []),
        ):
            simplest = {**simplest, **more}
            steps.append(Rung(component, Pellucid(simplest), threads=1))
        return (
            *front_rungs(),
            Rung("joint graph", Undecomposed({}, self)),
            Rung("decompositions", AsTraced({}, self)),
            Rung("layout", Captured({}, self)),
            Rung("graph passes", Passed({}, self)),
            Rung("lowering", Lowered({}, self)),
            Rung("scheduling", Lowered({}, self, scheduled=True)),
            *steps,
            Rung("threads", self),
        )


@dataclass(frozen=True, slots=True)
class Lowered(Partial):
    """Graphs lowered to the loop language, one kernel for each operator, and executed by its interpreter.

    scheduled: ordered, and with long reductions split, but without fusion. Graphs that cannot be lowered run eagerly.
    """

    scheduled: bool = False

    def compile(self, graph: Graph) -> Compiled:
        passed = self.passed(graph)
        try:
            lowered = lower(passed, contract=False)
        except NotHeld:
            return Interpreted(passed)
        program = schedule(lowered.program, make_options({"fusion": False}))[0] if self.scheduled else lowered.program
        return _LoweredCompiled(passed, program, lowered.constants)


class _LoweredCompiled(Compiled):
    def __init__(self, graph: torch.fx.GraphModule, program: Program, constants: Sequence[torch.Tensor]) -> None:
        self.graph, self.steps = graph, ()
        self._program, self._constants = program, constants

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        return run_program(self._program, [*inputs, *self._constants])


class PellucidCompiled(Compiled):
    """A graph that Pellucid compiled, with a hook around each call of its programs."""

    def __init__(self, graph: Graph, options: Mapping[str, Any]) -> None:
        self._probe = Probe()
        self._steps: dict[str, Step] = {}
        self._options = make_options(options)
        executable, record = compile_graph(graph.module, graph.kind, self._options, self._watch)
        self._executable = executable
        self.record: GraphRecord = record
        self.graph = record.graph
        self.steps = tuple(self._steps.values())
        self.seconds = record.seconds

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        self._probe = probe or Probe()
        with torch.no_grad():
            return self._executable(list(inputs))

    def texts(self, constants: Constants) -> Mapping[str, str]:
        programs = self.record.programs
        if programs == (self.record,):
            return {
                name: make() for name, make in texts_of(self.record, constants).items() if not name.startswith("fx_")
            }
        return {
            "ir_pre_fusion.txt": "\n".join(print_program(each.lowered) for each in programs),
            "ir_post_fusion.txt": "\n".join(print_program(each.scheduled) for each in programs),
            "segments.txt": self.record.outline + "\n",
        }

    def decisions(self) -> Iterator[Mapping[str, Any]]:
        split = () if self.record in self.record.programs else decision_rows(self.record)
        return itertools.chain(split, *map(decision_rows, self.record.programs))

    def fusions(self) -> Sequence[Fusion]:
        if self.record.outline:
            return ()  # each segment has its own
        origins = {node.name: origin_of_node(node) for node in self.record.lowered.nodes}
        pairs = [each.subject for each in self.record.decisions if each.ok and each.rule in _FUSIONS]
        return tuple(Fusion(*(origins.get(name, GLUE) for name in pair)) for pair in pairs)

    def wrong_scalar(self, node: str, inputs: Sequence[Any], near: Near) -> str:
        if self.record.outline:
            return ""
        return wrong_scalar(self.record.scheduled, self.record.constants, inputs, node, self._options, near)

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        yield from _called_by_python(self.record)
        for record in self.record.programs:
            origins = {node.name: origin_of_node(node) for node in (*record.lowered.nodes, *record.scheduled.nodes)}
            for decision in record.decisions:
                kind = kind_of(decision.rule)
                if kind in ("fusion", "vectorisation") and not decision.ok:  # `super` reports the fallbacks of steps
                    origin = merge(origins[name] for name in decision.subject if name in origins)
                    yield refusal(kind, decision.subject, decision.why, origin, _category(decision))

    def _watch(self, unit: Unit) -> dict[str, NodeProbe]:
        """The probes of a program's nodes; called once per program while the graph is compiled."""
        assert unit.plan is not None
        complete = _completed(unit.plan, unit.values, _changes(unit.graph))
        kernels = {node.name: node for node in unit.scheduled.nodes if isinstance(node, Kernel)}
        probes: dict[str, NodeProbe] = {}
        for call in unit.plan.calls:
            nodes = complete[call.name]
            step = _step(call, tuple(nodes), kernels, unit.kernels)
            self._steps[f"{unit.name}.{call.name}"] = step
            probes[call.name] = NodeProbe(
                before=partial(self._before, step),
                views=tuple(unit.values[name] for name in nodes),
                after=partial(self._after, step),
                observes=lambda: self._probe.observes,
            )
        return probes

    def _before(self, step: Step) -> None:
        self._probe.before(step)

    def _after(self, step: Step, *tensors: torch.Tensor) -> None:
        self._probe.after(step, dict(zip(step.values, tensors, strict=True)) if self._probe.observes else {})


def _category(decision: Decision) -> str:
    """What prevented a fusion. A call that draws random numbers is never fused, as no other draws the same."""
    category = str(dict(decision.facts).get("category", ""))
    return "random-seed" if category == "extern" and any(op in decision.why for op in _RANDOM) else category


def _called_by_python(record: GraphRecord) -> Iterator[Refusal]:
    """The calls that no program contains, in a graph that was split."""
    if record.outline:
        origins = {node.name: origin_of(node) for node in record.graph.graph.nodes}
        for decision in record.decisions:
            yield refusal(BY_PYTHON, decision.subject, decision.why, merge(origins[name] for name in decision.subject))
    for part in record.parts:
        yield from _called_by_python(part)


def _values(kernel: CppKernel) -> Iterator[tuple[str, Value]]:
    """The variables of a kernel by their defining text."""
    body = {line.out: line for line in kernel.plan.kernel.body}
    for text, origin in zip(kernel.source.splitlines(), kernel.line_map, strict=True):
        found = DEFINITION.match(text)
        line = body.get(found["name"]) if found else None
        if found and line is not None:
            op = line.rhs.op if isinstance(line.rhs, Compute | Reduce) else type(line.rhs).__name__.lower()
            yield f"{found['name']} = {found['value']}", Value(op, CPP_NAMES[TORCH_DTYPES[line.dtype]], origin)


def _step(
    call: Call, values: tuple[str, ...], kernels: Mapping[str, Kernel], compiled: Mapping[str, CppKernel]
) -> Step:
    match call:
        case Launch():
            node, kernel = kernels[call.name], compiled[call.name]
            return Step(
                name=call.name,
                op="",
                origin=origin_of_node(node),
                reads=call.reads,
                writes=call.writes,
                values=values,
                symbol=kernel.name,
                source=kernel.source,
                lines=tuple(kernel.line_map),
                facts=kernel_facts(node, kernel),
                ops=tuple(line.rhs.op for line in node.body if isinstance(line.rhs, Compute | Reduce)),
            )
        case Extern():
            written = written_by(call)
            read = tuple(sorted(set(read_by(call)) - set(written)))
            return Step(call.name, call.op, call.origin, read, written, values, reason=call.reason)


def _changes(graph: torch.fx.GraphModule) -> frozenset[str]:
    """The calls that compute new values; those that only copy one into an input do not."""
    return frozenset(
        node.name for node in calls_of(graph) if not is_view(node) and node.target is not torch.ops.aten.copy_.default
    )


def _completed(plan: ExecutionPlan, values: Mapping[str, View], changes: Collection[str]) -> dict[str, list[str]]:
    """By node, the FX nodes whose result is in memory after it ran, but not before.

    A result may be stored in parts, as a concatenation is: it is complete after the last node that writes its buffer,
    before the buffer is changed in place. Views of an earlier result are not listed again. The buffer of an input holds
    the last in-place change of it.
    """
    inputs = {buffer.name for buffer in plan.buffers if buffer.place is Place.ARGUMENT}
    owner: dict[str, str] = {}
    for name, view in values.items():
        if view.buffer not in inputs:
            owner.setdefault(view.buffer, name)
        elif name in changes:
            owner[view.buffer] = name
    writers: dict[str, str] = {}
    for call in plan.calls:
        for buffer in written_by(call):
            writers[buffer] = call.name
    complete: dict[str, list[str]] = {call.name: [] for call in plan.calls}
    for buffer, name in owner.items():
        if buffer in writers:
            complete[writers[buffer]].append(name)
    return complete
