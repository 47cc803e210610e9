"""What the pipeline knows about one compiled graph, ready to be written, shown or queried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pellucid.codegen import CppKernel
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Program
from pellucid.native.build import BuildReport


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of one stage, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One graph after its last stage, or after the stage that failed with `error`.

    captured: the FX graph as AOTAutograd gave it; graph: the same after Pellucid's own FX passes.
    kernels: generated C++ by the name of the IR kernel.
    """

    name: str
    kind: str
    captured: torch.fx.GraphModule
    graph: torch.fx.GraphModule
    lowered: Program
    scheduled: Program
    kernels: Mapping[str, CppKernel]
    constants: tuple[torch.Tensor, ...]
    built: BuildReport | None
    decisions: tuple[Decision, ...]
    stages: tuple[StageTime, ...]
    error: Exception | None
