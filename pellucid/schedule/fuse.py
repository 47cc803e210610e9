"""Fusion of a whole program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pellucid.ir.decision import Decision, DecisionLog
from pellucid.ir.nodes import Kernel, Program
from pellucid.machine import Machine
from pellucid.options import Options
from pellucid.schedule.fusion_graph import FusionGraph
from pellucid.schedule.horizontal import fuse_horizontally
from pellucid.schedule.naming import name_kernels
from pellucid.schedule.vertical import fuse_vertically


def fuse(
    program: Program, options: Options, machine: Machine, partitioned: Collection[str] = ()
) -> tuple[Program, list[Decision]]:
    """Merge kernels where that is legal and pays: along data flow first, then horizontally.

    partitioned: see `FusionGraph`.

    Before: one kernel per operator. After: about one kernel per sequence of operators between library calls.
    """
    graph, log = FusionGraph(program, machine, partitioned), DecisionLog()
    fuse_vertically(graph, options, log)
    fuse_horizontally(graph, options, log)
    groups = graph.groups()
    for group in groups:
        if len(group.parts) > 1:
            group.node = _stamped(group.kernel)
    nodes, named = name_kernels(groups)
    return replace(program, nodes=nodes, buffers=tuple(graph.buffers.values())), [*log, *named]


def _stamped(kernel: Kernel) -> Kernel:
    """`kernel` with this step in the origin of every line."""
    return replace(kernel, body=tuple([replace(line, origin=line.origin.step("fuse")) for line in kernel.body]))
