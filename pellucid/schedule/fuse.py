"""Fusion of a whole program."""

from __future__ import annotations

from dataclasses import replace

from pellucid.ir.decision import Decision, DecisionLog
from pellucid.ir.nodes import Program
from pellucid.options import Options
from pellucid.schedule.graph import FusionGraph
from pellucid.schedule.horizontal import fuse_horizontally
from pellucid.schedule.naming import name_kernels
from pellucid.schedule.vertical import fuse_vertically


def fuse(program: Program, options: Options) -> tuple[Program, list[Decision]]:
    """Merge kernels where that is legal and pays: along data flow first, then side by side.

    Before: one kernel per operator. After: one kernel per stretch of operators between library calls.
    """
    graph, log = FusionGraph(program), DecisionLog()
    fuse_vertically(graph, options, log)
    fuse_horizontally(graph, options, log)
    groups = graph.groups()
    nodes, named = name_kernels(groups)
    for decision in named:
        log.add(decision)
    return replace(program, nodes=nodes), list(log)
