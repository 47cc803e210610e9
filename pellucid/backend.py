"""`torch.compile(model, backend="pellucid")`: the function that Dynamo calls with each graph it captures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pellucid.capture.decompositions import decompositions
from pellucid.capture.torch_compat import capture_with_aot
from pellucid.errors import UserError
from pellucid.executable import Executable
from pellucid.ir.nodes import Extern, Kernel
from pellucid.native.build import warm_up
from pellucid.options import Options, make_options
from pellucid.pipeline import compile_graph


@dataclass(frozen=True, slots=True)
class Compilation:
    """What became of one graph.

    nodes: calls in the FX graph. kernels: generated kernels that one call of the graph runs; distinct: how many of
    them differ. fallbacks: calls of ATen. seconds: time in Pellucid's own stages, by stage.
    """

    name: str
    kind: str
    nodes: int
    kernels: int
    distinct: int
    fallbacks: int
    seconds: Mapping[str, float]


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
    settings = make_options(options)
    warm_up()
    return capture_with_aot(
        graph,
        example_inputs,
        forward=partial(_compile, kind="forward", options=settings),
        backward=partial(_compile, kind="backward", options=settings),
        inference=partial(_compile, kind="inference", options=settings),
        decompositions=decompositions(),
    )


def _compile(graph: torch.fx.GraphModule, _inputs: Sequence[Any], *, kind: str, options: Options) -> Executable:
    executable, record = compile_graph(graph, kind, options)
    nodes = record.scheduled.nodes
    _compilations.append(
        Compilation(
            name=record.name,
            kind=kind,
            nodes=sum(node.op == "call_function" for node in graph.graph.nodes),
            kernels=sum(isinstance(node, Kernel) for node in nodes),
            distinct=len({kernel.name for kernel in record.kernels.values()}),
            fallbacks=sum(isinstance(node, Extern) for node in nodes),
            seconds={time.name: time.seconds for time in record.stages},
        )
    )
    return executable
