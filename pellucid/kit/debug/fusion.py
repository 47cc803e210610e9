"""Find the single fusion that makes a graph wrong, by a binary search over the number of fusions allowed."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.kit.judge.graph import judge_graph
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.subjects.base import Subject


@dataclass(frozen=True, slots=True)
class Fused:
    """The two groups of FX nodes whose fusion causes the fault. number: of the fusion, out of `count` in the graph."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    number: int
    count: int


def wrong_fusion(graph: Graph, subject: Subject) -> Fused | None:
    """The first fusion that makes the results of a graph wrong; without it and later ones they are right.

    None where the subject does not report its fusions, or the fault does not depend on them.
    """
    count = len(subject.compile(graph).fusions())
    if not count or not _is_wrong(graph, subject.fusing(count)) or _is_wrong(graph, subject.fusing(0)):
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_wrong(graph, subject.fusing(middle)) else (middle, high)
    last = subject.fusing(high).compile(graph).fusions()[high - 1]
    return Fused(last.first.nodes, last.second.nodes, high, count)


def _is_wrong(graph: Graph, subject: Subject) -> bool:
    return any(output.verdict.bad for output in judge_graph(graph, subject))
