"""What each kernel implements: IR operators, FX nodes in order, user lines; and its C++ annotated with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.capture.fx import origin_of
from pellucid.codegen.linemap import annotate_source
from pellucid.ir.origin import merge
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Step, Subject


@dataclass(frozen=True, slots=True)
class Matched:
    """A kernel of a compiled graph.

    symbol: its C++ function; equal kernels share it. ir_ops: in the order of the C++. fx_nodes: in graph order, as
    `name = operator`. user_lines: `file:line`. annotated: the C++, each line with its nodes and user lines. glue: the
    number of lines that belong to no operator (loops, braces). lines: the number of lines.
    """

    graph: str
    kernel: str
    symbol: str
    ir_ops: tuple[str, ...]
    fx_nodes: tuple[str, ...]
    user_lines: tuple[str, ...]
    annotated: str
    lines: int
    glue: int


@dataclass(frozen=True, slots=True)
class Matches(Shown):
    """kernels: of all graphs. calls: library calls as graph, call and operator."""

    backend: str
    kernels: tuple[Matched, ...]
    calls: tuple[tuple[str, str, str], ...]

    @property
    def good(self) -> bool:
        """Whether FX nodes are known for every kernel."""
        return all(kernel.fx_nodes for kernel in self.kernels)


def match(request: Request, seconds: float = SECONDS, memory: int = 0) -> Matches:
    """Compile a program in a separate process, and match its kernels with its graphs."""
    refused, hint = f"{request.target} does not compile", "see `pellucid explain`"
    with Worker(memory) as worker:
        return worker.ask(match_request, request, seconds=seconds, refused=refused, hint=hint)


def match_request(request: Request) -> Matches:
    """Like `match`, in this process."""
    graphs, subject = captured(request)
    return match_graphs(graphs, subject)


def match_graphs(graphs: list[Graph], subject: Subject) -> Matches:
    """Match the kernels of captured graphs."""
    kernels: list[Matched] = []
    calls: list[tuple[str, str, str]] = []
    for graph in graphs:
        compiled = subject.compile(graph)
        order = {node.name: (position, node) for position, node in enumerate(compiled.graph.graph.nodes)}
        for step in compiled.steps:
            if not step.generated:
                calls.append((graph.name, step.name, step.op))
                continue
            nodes = sorted({name for name in step.origin.nodes if name in order}, key=lambda name: order[name][0])
            kernels.append(_matched(graph.name, step, [order[name][1] for name in nodes]))
    return Matches(subject.name, tuple(kernels), tuple(calls))


def _matched(graph: str, step: Step, nodes: list[torch.fx.Node]) -> Matched:
    return Matched(
        graph=graph,
        kernel=step.name,
        symbol=step.symbol,
        ir_ops=step.ops,
        fx_nodes=tuple(f"{node.name} = {node.target}" for node in nodes),
        user_lines=tuple(map(str, merge(map(origin_of, nodes)).users)),
        annotated=annotated(step),
        lines=len(step.lines),
        glue=sum(origin.is_glue for origin in step.lines),
    )


def annotated(step: Step) -> str:
    """The C++ of a kernel, each line annotated with its nodes and user lines."""
    return annotate_source(step.source, step.lines) if step.lines else step.source
