"""Slow fusions: fused kernels compared with the kernels of their operators without fusion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.stats import Summary, summarise, uncollected
from pellucid.kit.subjects.base import Compiled, Subject
from pellucid.kit.subjects.clock import Clock, clock

_ROUNDS = 9  # of one call each; the first is a warm-up


def slow_fusions(graph: Graph, subject: Subject, compiled: Compiled) -> Iterator[dict[str, Any]]:
    """Compare fused kernels with their unfused parts; none where the backend cannot disable fusion.

    A part is an unfused kernel whose FX nodes are all nodes of the fused one. Fused kernels with nodes that no part
    implements, for example after a decomposition, are omitted.
    """
    try:
        unfused = subject.fusing(0)
    except NotImplementedError:
        return
    fused, single = _times(graph, subject, unfused)
    nodes = {step.name: frozenset(step.origin.nodes) for step in compiled.steps if step.generated}
    parts = {name: origin for name, (origin, _) in single.items() if origin}
    for name, (_, taken) in fused.items():
        within = [part for part, origin in parts.items() if origin <= nodes.get(name, frozenset())]
        covered = frozenset[str]().union(*(parts[part] for part in within))
        if len(within) < 2 or covered != nodes[name]:
            continue
        others = [single[part][1] for part in within]
        whole = sum(each.median for each in others)
        spread = taken.spread + sum(each.spread * each.median for each in others) / max(1e-9, whole)
        ratio = taken.median / whole if whole else 0.0
        yield {
            "kernel": name,
            "parts": len(within),
            "fused_microseconds": f"{taken.median * 1e-3:.2f}",
            "parts_microseconds": f"{whole * 1e-3:.2f}",
            "ratio": f"{ratio:.3f}",
            "spread": f"{spread:.3f}",
            "slow": int(ratio > 1 + spread),
        }


def _times(graph: Graph, *subjects: Subject) -> list[dict[str, tuple[frozenset[str], Summary]]]:
    """For each subject, the FX nodes and nanoseconds of each kernel; the subjects are called in turn."""
    with torch.no_grad():
        runs = [subject.timed(graph) for subject in subjects]
        clocks = [Clock() for _ in subjects]
        with uncollected():
            for turn in range(_ROUNDS):
                for run, taken in zip(runs, clocks, strict=True):
                    with clock(taken if turn else None):
                        run(list(copied(graph.inputs)))
    return [_of(taken) for taken in clocks]


def _of(taken: Clock) -> dict[str, tuple[frozenset[str], Summary]]:
    found: dict[str, list[int]] = {}
    nodes: dict[str, frozenset[str]] = {}
    for step in (step for run in taken.runs for step in run.steps):
        if step.facts.kind == "kernel":
            found.setdefault(step.facts.step, []).append(step.time.end - step.time.begin)
            nodes[step.facts.step] = frozenset(step.facts.origin.nodes)
    return {name: (nodes[name], summarise(times)) for name, times in found.items()}
