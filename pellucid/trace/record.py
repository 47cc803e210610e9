"""All that the pipeline records about one compiled graph, for writing, printing and queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.codegen import CppKernel
from pellucid.execution_plan import ExecutionPlan
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Program, View
from pellucid.native.build import BuildReport


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of one stage, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One graph after its last stage, or after the stage that failed with `error`.

    captured: the FX graph from AOTAutograd; graph: the same after Pellucid's own FX passes.
    values: where the programs store the tensor that an FX node computes, by the node's name.
    kernels: generated C++ by the name of the IR kernel. plan: the steps of a call; None if an earlier stage has failed.
    outline: how a graph that was split is run; such a graph has no program itself. parts: the records of its segments.
    earlier: stages before Pellucid's, if known: Dynamo, AOTAutograd.
    before: the program that depends only on parameters, run before the first call: its results and panels are
    additional arguments. folder: of the graph in its run, if it is traced.
    """

    name: str
    kind: str
    captured: torch.fx.GraphModule
    graph: torch.fx.GraphModule
    lowered: Program
    scheduled: Program
    kernels: Mapping[str, CppKernel]
    plan: ExecutionPlan | None
    constants: tuple[torch.Tensor, ...]
    values: Mapping[str, View]
    built: BuildReport | None
    decisions: tuple[Decision, ...]
    stages: tuple[StageTime, ...]
    error: Exception | None
    outline: str = ""
    parts: tuple[GraphRecord, ...] = ()
    earlier: tuple[StageTime, ...] = ()
    folder: Path | None = None
    before: GraphRecord | None = None

    @property
    def programs(self) -> tuple[GraphRecord, ...]:
        """The records of all programs that make up the graph: itself, if it was not split."""
        if not self.parts:
            return () if self.outline else (self,)
        return tuple(program for part in self.parts for program in part.programs)

    @property
    def seconds(self) -> dict[str, float]:
        """Time in each stage, including that of the parts."""
        total: dict[str, float] = {}
        for time in self.stages:
            total[time.name] = total.get(time.name, 0.0) + time.seconds
        for part in self.parts:
            for name, seconds in part.seconds.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    @property
    def eager(self) -> tuple[tuple[str, Decision], ...]:
        """The calls that Python makes between programs, as decisions, each with the name of its graph."""
        own = tuple((self.name, each) for each in self.decisions if each.rule == "split.eager")
        return own + tuple(each for part in self.parts for each in part.eager)
