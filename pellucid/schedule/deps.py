"""Who must run before whom: the order that buffers and effects impose on the nodes of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pellucid.ir.nodes import Arg, Extern, Kernel, Node, View


def reads(node: Node) -> tuple[str, ...]:
    """Buffers whose contents `node` reads, each once, in order of first use."""
    match node:
        case Kernel():
            return tuple(dict.fromkeys(load.buffer for _, load in node.loads()))
        case Extern():
            views = (each for each in arguments_of(node) if isinstance(each, View))
            return tuple(dict.fromkeys(view.buffer for view in views))


def writes(node: Node) -> tuple[str, ...]:
    """Buffers that `node` writes, wholly or in part, each once."""
    match node:
        case Kernel():
            return tuple(dict.fromkeys(store.buffer for _, store in node.stores()))
        case Extern():
            outputs = (view.buffer for view in node.outputs if view is not None)
            return tuple(dict.fromkeys((*outputs, *node.mutates)))


def dependencies(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """For each node, the positions of earlier nodes that it must follow, nearest last.

    A node follows the last writer of what it reads, the last writer of what it writes, and everyone who has read
    the old contents. Ordered externs follow each other. What this implies through other nodes is left out where
    that is free, so the total length is linear in the size of the program.
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


def arguments_of(node: Extern) -> Iterator[Arg]:
    """The arguments of a call, those in lists one by one."""

    def flat(arguments: Sequence[Arg]) -> Iterator[Arg]:
        for argument in arguments:
            if isinstance(argument, tuple):
                yield from flat(argument)
            else:
                yield argument

    yield from flat((*node.args, *(value for _, value in node.kwargs)))
