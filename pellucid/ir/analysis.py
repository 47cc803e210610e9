"""What nodes read, write and call, and how deeply the reductions of a kernel are nested. Scopes: `nodes.axes_of`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pellucid.ir.nodes import Arg, Extern, Kernel, Node, Reduce, View, memoized, operands


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


def operator_of(name: str) -> Any:
    """The dispatcher's operator for `aten::addmm.out`."""
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def may_alias_arguments(node: Node) -> bool:
    """Whether the results of a call may share memory with its arguments, according to its schema."""
    if not isinstance(node, Extern) or node.out:
        return False
    return any(result.alias_info is not None for result in operator_of(node.op)._schema.returns)


def arguments_of(node: Extern) -> Iterator[Arg]:
    """The arguments of a call, with lists flattened."""

    def flat(arguments: Sequence[Arg]) -> Iterator[Arg]:
        for argument in arguments:
            if isinstance(argument, tuple):
                yield from flat(argument)
            else:
                yield argument

    yield from flat((*node.args, *(value for _, value in node.kwargs)))


@memoized
def depth_of(kernel: Kernel) -> Mapping[str, int]:
    """For each line the number of nested reductions that it depends on, a reduction counting itself."""
    depth: dict[str, int] = {}
    for line in kernel.body:
        deepest = max((depth[name] for name in operands(line.rhs)), default=0)
        depth[line.out] = deepest + isinstance(line.rhs, Reduce)
    return depth
