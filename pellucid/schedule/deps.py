"""Dependencies between nodes: the order that buffers and side effects impose on a program."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.ir.analysis import reads, writes
from pellucid.ir.nodes import Extern, Node


def dependencies(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """For each node, the positions of earlier nodes that it must follow, nearest last.

    A node follows the last writer of the buffers that it reads or writes, and all readers of the old contents. Ordered
    externs follow each other. Transitive dependencies are omitted where that costs nothing, so the total length is
    linear in the size of the program.
    """
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    ordered: int | None = None
    result: list[tuple[int, ...]] = []
    for position, node in enumerate(nodes):
        before: set[int] = set()
        read, written = reads(node), writes(node)
        before.update(writer[buffer] for buffer in (*read, *written) if buffer in writer)
        for buffer in written:
            before.update(readers.pop(buffer, ()))
            writer[buffer] = position
        for buffer in read:
            if buffer not in written:
                readers.setdefault(buffer, []).append(position)
        if isinstance(node, Extern) and node.ordered:
            if ordered is not None:
                before.add(ordered)
            ordered = position
        result.append(tuple(sorted(before)))
    return result
