"""Any backend of `torch.compile` as a subject, which compiles and runs but reports nothing about its internals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import Graph, GraphCompiler, twin
from pellucid.kit.subjects.base import Compiled, Probe, Rung, Subject


@dataclass(frozen=True, slots=True)
class Plain(Subject):
    """The backend registered as `backend`."""

    backend: str = "aot_eager"

    @property
    def name(self) -> str:
        return self.backend

    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        options = dict(self.options) if self.options else None
        return torch.compile(fn, backend=self.backend, dynamic=dynamic, options=options)

    def watched(self, fn: Callable[..., Any], probe: Probe, dynamic: bool | None = None) -> Callable[..., Any]:
        return self.wrap(fn, dynamic)  # there are no steps to watch

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        """Captures Dynamo's graphs: before autograd, with the functions that the user called."""

        def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            run = compiler("forward")(module, inputs)
            return lambda *args: run(list(args))

        return backend

    def compile(self, graph: Graph) -> Compiled:
        return _PlainCompiled(graph, lookup_backend(self.backend))

    def graphs(self, case: Case, *, backward: bool = False, dynamic: bool | None = None) -> list[Graph]:
        return Subject.graphs(self, case, backward=False, dynamic=dynamic)

    def ladder(self) -> tuple[Rung, ...]:
        return (*front_rungs(), Rung("backend", self))


def front_rungs() -> tuple[Rung, ...]:
    """The rungs before any backend."""
    return Rung("dynamo", Plain(backend="eager")), Rung("aotautograd", Plain(backend="aot_eager"))


class _PlainCompiled(Compiled):
    def __init__(self, graph: Graph, backend: Callable[..., Any]) -> None:
        self.graph, self.steps = graph.module, ()
        self._run = backend(twin(graph.module), list(graph.inputs))  # it may change the graph

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        with torch.no_grad():
            return self._run(*inputs)
