"""Dead code elimination: nodes, stores and lines whose results are unused, and kernels without points."""

from __future__ import annotations

from dataclasses import replace

from pellucid.ir.analysis import reads, writes
from pellucid.ir.index import ZERO
from pellucid.ir.nodes import Extern, Kernel, Node, Program, View
from pellucid.schedule.rewrite import live_lines, make_kernel


def remove_dead(program: Program) -> Program:
    """Keep nodes that reach an output or the caller's memory, or have a side effect; drop unused buffers.

    Before: `b = x + 1` (kernel 1), `c = x * 2` (kernel 2), `return c`. After: kernel 2 alone, and no buffer `b`.
    """
    needed = {view.buffer for view in program.outputs if isinstance(view, View)}
    needed |= {buffer.name for buffer in program.buffers if buffer.role != "temp"}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        live = _live_part(node, needed)
        if live is not None:
            needed.update(reads(live))
            kept.append(live)
    kept.reverse()
    touched = needed | {buffer for node in kept for buffer in writes(node)}
    buffers = tuple(buffer for buffer in program.buffers if buffer.name in touched)
    return replace(program, nodes=tuple(kept), buffers=buffers)


def _live_part(node: Node, needed: set[str]) -> Node | None:
    """The part of `node` that writes the buffers `needed`, or None."""
    match node:
        case Extern():
            return node if node.ordered or node.mutates or needed.intersection(writes(node)) else None
        case Kernel():
            if any(axis.extent == ZERO and axis.name not in node.reduced for axis in node.space):
                return None  # what it would store has no elements, whether or not an index names the axis
            dead = frozenset(writes(node)) - needed
            body = live_lines(node.body, dead)
            if len(body) == len(node.body):
                return node
            params = {param.name: param for param in node.params}
            return make_kernel(node.name, node.space, body, params) if body else None
