"""The interface of a backend under test, a "subject": every tool of the kit uses subjects only."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pellucid.errors import UserError
from pellucid.ir.origin import Origin
from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import Graph, GraphCompiler, Recorder, interpret, through_aot
from pellucid.kit.subjects.refusals import Refusal, Refused
from pellucid.trace.fx_programs import Constants

Near: TypeAlias = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether a tensor differs from another by rounding only."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call that a compiled graph makes: of a generated kernel, or of a library operator.

    name: unique in the graph. op: the operator of a library call, as the dispatcher names it; empty for a kernel.
    reason: why a library call is not compiled. ops: operators of the loop language, in the order of a kernel's C++.
    origin: the FX nodes that it implements, in graph order, and their user lines.
    reads, writes: names of buffers. values: the FX nodes whose whole result is in memory after this call.
    symbol: the C++ function, shared by equal kernels. source: its C++. lines: the origin of each of its lines.
    facts: further facts about a kernel that the subject reports, by column of `kernels.csv`.
    """

    name: str
    op: str
    origin: Origin
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    symbol: str = ""
    source: str = ""
    lines: tuple[Origin, ...] = ()
    reason: str = ""
    ops: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generated(self) -> bool:
        return not self.op

    @property
    def fingerprint(self) -> str:
        """A hash of a kernel's C++ without its name: equal kernels of different graphs have the same fingerprint."""
        return hashlib.sha256(self.source.replace(self.symbol, "kernel").encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Fusion:
    """Two parts of a graph that became one kernel, each by the nodes that it computes."""

    first: Origin
    second: Origin


def refusal(kind: str, subject: tuple[str, ...], cause: str, origin: Origin, category: str = "") -> Refusal:
    """A refusal with the nodes and the user line of its origin."""
    return Refusal(kind, subject, cause, origin.nodes, str(origin.users[-1]) if origin.users else "", category)


class Probe:
    """Hooks around the steps of a run, which do nothing by default."""

    @property
    def observes(self) -> bool:
        """Whether it inspects the results of steps. If not, several steps may run together, after `before` of each."""
        return type(self).after is not Probe.after

    def before(self, step: Step) -> None:
        """Called before the step."""

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        """Called after the step with live tensors, the results of `step.values`; it may write to but not keep them."""


class Compiled(ABC):
    """A graph that a subject compiled.

    graph: the FX graph whose nodes the steps name: the original graph after the subject's own graph passes.
    steps: in execution order; empty if the subject does not report them. seconds: the time of each stage of
    compilation, in order, as far as the subject reports it.
    """

    graph: torch.fx.GraphModule
    steps: tuple[Step, ...]
    seconds: Mapping[str, float] = MappingProxyType({})

    def texts(self, constants: Constants) -> Mapping[str, str]:
        """The subject's output for the graph, by names of `schema.GRAPH_FILES`. constants: of the run's programs."""
        return {}

    def decisions(self) -> Iterator[Mapping[str, Any]]:
        """Rows of `decisions.csv`, without the column `graph`."""
        for each in self.refusals():
            yield {
                "rule": each.kind,
                "subject": " ".join(each.subject),
                "ok": 0,
                "why": each.cause,
                "fx_nodes": " ".join(each.fx_nodes),
                "user_lines": each.user_line,
            }

    def refusals(self) -> Iterator[Refusal]:
        """What was not fused, not vectorised and not compiled, and why, as far as the subject reports it."""
        for step in {step.name: step for step in self.steps}.values():  # a step may be listed once per result
            if step.op:
                yield refusal("fallback", (step.op,), step.reason or "a library call", step.origin)

    @abstractmethod
    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        """The graph's results. Inputs that the graph mutates are changed."""

    def fusions(self) -> Sequence[Fusion]:
        """The fusions that were made, in order; none if the subject does not report them."""
        return ()

    def wrong_scalar(self, node: str, inputs: Sequence[Any], near: Near) -> str:
        """The first scalar operator of an FX node's lowering whose value does not follow from its operands.

        Empty if there is none, or if the subject does not report them. near: compares with the expected value.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to run a program that uses part of a backend.

    component: the component that it adds to the rung below. subject: runs it. threads: torch's; 0 for its default.
    """

    component: str
    subject: Subject
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Subject(ABC):
    """A backend of `torch.compile` with its options."""

    options: Mapping[str, Any] = field(default_factory=dict)

    # How strict its requirements on graphs are: if two subjects compile the same graph, the one with more captures it.
    demands = 0

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend when it is called, without caches that could hide changes of the backend."""

    @abstractmethod
    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        """A backend for `torch.compile` that captures graphs as this one does; `compiler(kind)` compiles each.

        decompose: decompose operators as the backend does; else they stay as the user called them.
        """

    @abstractmethod
    def compile(self, graph: Graph) -> Compiled:
        """Compile one graph for inputs like its own. Raises what the backend raises."""

    def timed(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        """One graph compiled as a function of a list of arguments, which records its runs while a `clock` is on.

        A backend that does not report its steps records nothing. Raises what the backend raises.
        """
        return self.callable(graph)

    def clocked(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend; its graphs record their runs while a `clock` is on."""
        return self.wrap(fn, dynamic)

    def watched(self, fn: Callable[..., Any], probe: Probe, dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend, with `probe` around each step of its graphs."""

        def compiler(kind: str) -> GraphCompiler:
            def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
                compiled = self.compile(Graph(kind, kind, module, tuple(inputs)))

                def run(args: list[Any]) -> list[Any]:
                    given = list(args)
                    args.clear()
                    return list(compiled.run(given, probe))

                run._boxed_call = True  # type: ignore[attr-defined]
                return run

            return compile_graph

        return torch.compile(fn, backend=self.capturing(compiler), dynamic=dynamic)

    def warm_up(self) -> None:  # noqa: B027
        """Do in advance what every compilation of this process and its forks needs, if that starts no threads."""

    def keep_kernels(self, folder: Path) -> None:  # noqa: B027
        """From now on cache kernels of this process and its forks in a private folder, so that none is compiled twice.

        For a process that is about to compile many similar graphs.
        """

    def sanitized(self) -> Subject:
        """This subject with its kernels built for the sanitizers, for a process set up by `process.sanitizer`, and with
        separate memory for each buffer. Raises UserError for a backend whose kernels the kit does not build.
        """
        raise UserError(f"the kernels of {self.name} cannot be sanitized", hint="use pellucid or inductor")

    def refused(self, error: BaseException) -> Refused | None:
        """The kernel that the C++ compiler rejected, if that is why `compile` raised `error`."""
        return None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """The backend's decompositions during capture, by ATen operator."""
        return {}

    def passed(self, graph: Graph) -> torch.fx.GraphModule:
        """A graph after the backend's own passes; `graph` stays unchanged."""
        return graph.module

    def callable(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        """A graph compiled without hooks around its steps, for timing."""
        return self.compile(graph).run

    def fusing(self, most: int) -> Subject:
        """This subject limited to the first `most` fusions of a graph, if it reports `Compiled.fusions`."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def ladder(self) -> tuple[Rung, ...]:
        """Ways to run a program, from eager to the whole backend, each with one more component of it."""

    def graphs(self, case: Case, *, backward: bool = False, dynamic: bool | None = None) -> list[Graph]:
        """The graphs that are captured of a program, in the order of their first calls, which run eagerly."""
        recorder = Recorder()
        torch._dynamo.reset()
        fresh = case.fresh()
        with torch.set_grad_enabled(backward):
            result = torch.compile(fresh.fn, backend=self.capturing(recorder.compiler), dynamic=dynamic)(
                *fresh.args, **fresh.kwargs
            )
            if backward:
                loss_of(result).backward()
        torch._dynamo.reset()
        return recorder.graphs


@dataclass(frozen=True, slots=True)
class Partial(Subject):
    """A part of a backend, which `compile` defines; `wrap` uses `compile`."""

    base: Subject = None  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return self.base.name

    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        return self.watched(fn, Probe(), dynamic)

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        return self.base.capturing(compiler, decompose)

    def refused(self, error: BaseException) -> Refused | None:
        return self.base.refused(error)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return self.base.decompositions()

    def passed(self, graph: Graph) -> torch.fx.GraphModule:
        return self.base.passed(graph)

    def ladder(self) -> tuple[Rung, ...]:
        return self.base.ladder()


@dataclass(frozen=True, slots=True)
class Captured(Partial):
    """The graphs that a backend captures, run eagerly."""

    def compile(self, graph: Graph) -> Compiled:
        return Interpreted(graph.module)


@dataclass(frozen=True, slots=True)
class Undecomposed(Captured):
    """Like `Captured`, without decomposing the operators that the user called."""

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        return self.base.capturing(compiler, decompose=False)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}


@dataclass(frozen=True, slots=True)
class AsTraced(Captured):
    """Like `Captured`, without the backend's passes on the joint graph of forward and backward."""

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        return through_aot(compiler, dict(self.decompositions()) if decompose else {})


@dataclass(frozen=True, slots=True)
class Passed(Partial):
    """The graphs after a backend's own passes, run eagerly."""

    def compile(self, graph: Graph) -> Compiled:
        return Interpreted(self.passed(graph))


class Interpreted(Compiled):
    """A graph that runs eagerly, operator by operator."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.graph, self.steps = module, ()

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        return interpret(self.graph, inputs)


def loss_of(result: Any) -> torch.Tensor:
    """A scalar to differentiate: the loss that a model returns, else a weighted sum of all results with gradients.

    The weights are random, because a plain sum of softmax results, say, has no gradient, and equal on every call.
    """
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    total = [_weighted(leaf) for leaf in leaves if leaf.requires_grad and leaf.numel()]
    if not total:
        raise ValueError("nothing that the program returns requires a gradient")
    return torch.stack(total).sum()


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    real = torch.view_as_real(tensor).sum(-1) if tensor.is_complex() else tensor
    return (real.double() * weights).sum()


class Watched:
    """A graph compiled by a subject. ran: the `Step.fingerprint`s of the kernels of its last call."""

    def __init__(self, graph: Graph, subject: Subject) -> None:
        self.ran: set[str] = set()
        self._compiled = subject.compile(graph)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        ran = self.ran = set()

        class RecordKernels(Probe):
            def before(self, step: Step) -> None:
                ran.update([step.fingerprint] if step.generated else ())

        return self._compiled.run(list(inputs), RecordKernels())
