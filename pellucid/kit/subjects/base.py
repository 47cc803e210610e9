"""A backend under test, behind one interface: every tool of the kit speaks to subjects only."""

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
    """One call that a compiled graph makes: a generated kernel, or an operator of a library.

    name: unique in the graph. op: of a library call, as the dispatcher names it; empty for a kernel.
    reason: why a library call is not compiled. ops: of the loop language, in the order of a kernel's C++.
    origin: the FX nodes that it implements, in graph order, and their user lines.
    reads, writes: names of buffers. values: the FX nodes whose whole result lies in memory once this call is done.
    symbol: the C++ function; equal kernels share it. source: its C++. lines: where each line of that comes from.
    facts: what the subject tells of a kernel beside this, by column of `kernels.csv`.
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
        """Of the C++ of a kernel, whatever its name: the same kernel in another graph has the same."""
        return hashlib.sha256(self.source.replace(self.symbol, "kernel").encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Fusion:
    """Two parts of a graph that became one kernel: what each computes."""

    first: Origin
    second: Origin


def refusal(kind: str, subject: tuple[str, ...], cause: str, origin: Origin, category: str = "") -> Refusal:
    """One thing that was not done, with where it comes from."""
    return Refusal(kind, subject, cause, origin.nodes, str(origin.users[-1]) if origin.users else "", category)


class Probe:
    """What happens around the steps of a run. By default nothing."""

    @property
    def observes(self) -> bool:
        """Whether it looks at what steps have made. Else several may run together, after `before` of all of them."""
        return type(self).after is not Probe.after

    def before(self, step: Step) -> None:
        """Called before the step."""

    def after(self, step: Step, values: Mapping[str, torch.Tensor]) -> None:
        """Called after the step with live tensors: the results of `step.values`. They may be written to, not kept."""


class Compiled(ABC):
    """A graph that a subject compiled.

    graph: the FX graph whose nodes the steps name: the given one after the subject's own graph passes.
    steps: in the order in which they run; empty where the subject does not tell. seconds: that each stage of
    compilation took, in order, as far as the subject tells.
    """

    graph: torch.fx.GraphModule
    steps: tuple[Step, ...]
    seconds: Mapping[str, float] = MappingProxyType({})

    def texts(self, constants: Constants) -> Mapping[str, str]:
        """What the subject made of the graph, by names of `schema.GRAPH_FILES`. constants: of the run's programs."""
        return {}

    def decisions(self) -> Iterator[Mapping[str, Any]]:
        """Rows of `decisions.csv`, but for the graph."""
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
        """What was not fused, not vectorised and not compiled, and why, as far as the subject tells."""
        for step in {step.name: step for step in self.steps}.values():  # one may stand for several results
            if step.op:
                yield refusal("fallback", (step.op,), step.reason or "a call of a library", step.origin)

    @abstractmethod
    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        """What the graph returns. The inputs are changed where the graph mutates them."""

    def fusions(self) -> Sequence[Fusion]:
        """The fusions that were made, in their order; none where the subject does not tell."""
        return ()

    def wrong_scalar(self, node: str, inputs: Sequence[Any], near: Near) -> str:
        """Of the scalar operators that an FX node became, the first whose value is not near what its operands make.

        Empty where none is, or where the subject does not tell.
        """
        return ""


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to run a program that uses part of a backend.

    component: what it adds to the rung below it. subject: how. threads: torch's; 0 for its own choice.
    """

    component: str
    subject: Subject
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Subject(ABC):
    """A backend of `torch.compile` with its options."""

    options: Mapping[str, Any] = field(default_factory=dict)

    # How much it wants of the graphs that it compiles: where two are to compile the same, the greater captures it.
    demands = 0

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend when it is called. No cache hides what this version of the backend does."""

    @abstractmethod
    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        """A backend for `torch.compile` that captures graphs as this one does; `compiler` of a kind gets each.

        decompose: break operators up as the backend does; else they stay as the user called them.
        """

    @abstractmethod
    def compile(self, graph: Graph) -> Compiled:
        """Compile one graph for inputs like its own. Raises what the backend raises."""

    def timed(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        """One graph compiled, for a list of its arguments, which notes its runs while a `clock` is on.

        A backend that does not tell its steps notes nothing. Raises what the backend raises.
        """
        return self.callable(graph)

    def clocked(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        """`fn` compiled by this backend, whose graphs note their runs while a `clock` is on."""
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
        """Do once what every compilation of this process and of its forks needs, as far as that starts no threads."""

    def keep_kernels(self, folder: Path) -> None:  # noqa: B027
        """From now on this process and its forks keep kernels in a folder that they alone use, and compile none twice.

        For a process that is about to compile many graphs that are much alike.
        """

    def sanitized(self) -> Subject:
        """The same with its kernels built for the sanitizers, in a process of theirs (`process.sanitizer`), and with
        memory of its own for each buffer. Raises UserError for a backend whose kernels the kit does not build.
        """
        raise UserError(f"the kernels of {self.name} cannot be sanitized", hint="take pellucid or inductor")

    def refused(self, error: BaseException) -> Refused | None:
        """The kernel that the C++ compiler refused, if that is what `error`, raised by `compile`, says."""
        return None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """By ATen operator, what the backend replaces it with while it captures."""
        return {}

    def passed(self, graph: Graph) -> torch.fx.GraphModule:
        """A graph after the backend's own passes; the given one stays as it is."""
        return graph.module

    def callable(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        """A graph compiled, with nothing around its steps: for timing."""
        return self.compile(graph).run

    def fusing(self, most: int) -> Subject:
        """The same with the first so many fusions of a graph, no more. Where `Compiled.fusions` tells them."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def ladder(self) -> tuple[Rung, ...]:
        """Ways to run a program from eager to this backend as it is, each with one more component of it."""

    def graphs(self, case: Case, *, backward: bool = False, dynamic: bool | None = None) -> list[Graph]:
        """The graphs that a program becomes, in the order of their first calls, which are made eagerly."""
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
    """A backend of which only a part is used: `wrap` goes through `compile`, which says what part."""

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
    """The graphs as a backend captures them, run eagerly."""

    def compile(self, graph: Graph) -> Compiled:
        return Interpreted(graph.module)


@dataclass(frozen=True, slots=True)
class Undecomposed(Captured):
    """The same with the operators that the user called, none of them decomposed."""

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        return self.base.capturing(compiler, decompose=False)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}


@dataclass(frozen=True, slots=True)
class AsTraced(Captured):
    """The same without what the backend does to forward and backward while they are one graph."""

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
    """A number to differentiate: the loss that a model returns, else all floating-point results, weighted at random.

    The weights are the same on every call: a sum of a softmax's results, say, has no gradient at all.
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
    """A graph compiled by a subject. ran: the kernels of its last call, by `Step.fingerprint`."""

    def __init__(self, graph: Graph, subject: Subject) -> None:
        self.ran: set[str] = set()
        self._compiled = subject.compile(graph)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        ran = self.ran = set()

        class Noted(Probe):
            def before(self, step: Step) -> None:
                ran.update([step.fingerprint] if step.generated else ())

        return self._compiled.run(list(inputs), Noted())
