"""The order in which nodes run: the graph's own, or the one in which every node runs as late as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Buffer, Node, Program
from pellucid.machine.work import estimated_bytes
from pellucid.schedule.deps import dependencies


def order(program: Program) -> tuple[Program, list[Decision]]:
    """Choose the order of nodes that needs less memory for temporaries; the given one if equal.

    Before: `a = f(x)`, `b = g(x)`, `c = h(b)`, `d = a + c`: `a` is live while `b` and `c` are computed.
    After: `b`, `c`, `a`, `d`.
    """
    late = late_order(dependencies(program.nodes))
    reordered = [program.nodes[position] for position in late]
    now, then = (peak_bytes(nodes, program.buffers) for nodes in (program.nodes, reordered))
    facts = (("peak_given", now), ("peak_late", then))
    if then >= now:
        why = "computing each result as late as possible would not save memory"
        return program, [Decision("order.late", ("program",), False, why, facts)]
    why = "computing each result as late as possible saves memory"
    return replace(program, nodes=tuple(reordered)), [Decision("order.late", ("program",), True, why, facts)]


def late_order(before: Sequence[Sequence[int]]) -> list[int]:
    """Positions in an order in which each node follows its inputs and directly precedes its first user.

    The nearest input of a node is visited first: it usually has the longer chain of inputs, during which results of
    shorter ones would stay live.

    before: for each node, the nodes that it must follow.
    """
    used = {earlier for needed in before for earlier in needed}
    result: list[int] = []
    done: set[int] = set()
    for sink in (position for position in range(len(before)) if position not in used):
        stack = [(sink, reversed(before[sink]))]
        while stack:
            position, needed = stack[-1]
            following = next((earlier for earlier in needed if earlier not in done), None)
            if following is not None:
                stack.append((following, reversed(before[following])))
                continue
            stack.pop()
            if position not in done:
                done.add(position)
                result.append(position)
    return result


def peak_bytes(nodes: Sequence[Node], buffers: Sequence[Buffer]) -> int:
    """The maximum of bytes of temporaries that are live at once when `nodes` run in this order, by estimated sizes."""
    size = {b.name: estimated_bytes(b) for b in buffers if b.role == "temp"}
    last: dict[str, int] = {}
    for position, node in enumerate(nodes):
        last.update(dict.fromkeys((*reads(node), *writes(node)), position))
    live, peak = 0, 0
    defined: set[str] = set()
    for position, node in enumerate(nodes):
        touched = [buffer for buffer in dict.fromkeys((*reads(node), *writes(node))) if buffer in size]
        live += sum(size[buffer] for buffer in touched if buffer not in defined)
        defined.update(touched)
        peak = max(peak, live)
        live -= sum(size[buffer] for buffer in touched if last[buffer] == position)
    return peak
