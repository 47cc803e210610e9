"""The order in which nodes run: the graph's own, or the one in which every node waits until it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Buffer, Node, Program
from pellucid.machine.work import estimated_bytes
from pellucid.schedule.deps import dependencies


def order(program: Program) -> tuple[Program, list[Decision]]:
    """Put the nodes into the order that needs less memory for temporaries; stay with the given one if equal.

    Before: `a = f(x)`, `b = g(x)`, `c = h(b)`, `d = a + c`: `a` waits while `b` and `c` are made.
    After: `b`, `c`, `a`, `d`.
    """
    late = late_order(dependencies(program.nodes))
    reordered = [program.nodes[position] for position in late]
    now, then = (peak_bytes(nodes, program.buffers) for nodes in (program.nodes, reordered))
    facts = (("peak_given", now), ("peak_late", then))
    if then >= now:
        why = "making each result as late as possible would not save memory"
        return program, [Decision("order.late", ("program",), False, why, facts)]
    why = "making each result as late as possible saves memory"
    return replace(program, nodes=tuple(reordered)), [Decision("order.late", ("program",), True, why, facts)]


def late_order(before: Sequence[Sequence[int]]) -> list[int]:
    """Positions in an order in which each node follows what it needs and comes right before its first user.

    What a node needs last is made first: that mostly has the longer way behind it, and others need not wait for it.

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
    """The most bytes of temporaries that are alive at once when `nodes` run in this order, by estimated sizes."""
    size = {b.name: estimated_bytes(b) for b in buffers if b.role == "temp"}
    last: dict[str, int] = {}
    for position, node in enumerate(nodes):
        last.update(dict.fromkeys((*reads(node), *writes(node)), position))
    alive, peak = 0, 0
    born: set[str] = set()
    for position, node in enumerate(nodes):
        touched = [buffer for buffer in dict.fromkeys((*reads(node), *writes(node))) if buffer in size]
        alive += sum(size[buffer] for buffer in touched if buffer not in born)
        born.update(touched)
        peak = max(peak, alive)
        alive -= sum(size[buffer] for buffer in touched if last[buffer] == position)
    return peak
