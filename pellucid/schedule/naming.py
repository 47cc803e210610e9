"""Descriptive names for merged kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Kernel, Node
from pellucid.schedule.fusion_graph import Group

_MAX_LENGTH = 48


def name_kernels(groups: Iterable[Group]) -> tuple[tuple[Node, ...], list[Decision]]:
    """The nodes of `groups` with unique names, and for each merged kernel a decision that lists its parts.

    Before: a kernel merged from `add_4`, `mul_5` and `relu_6`. After: `add_mul_relu_0`.
    """
    nodes: list[Node] = []
    decisions: list[Decision] = []
    groups = list(groups)
    taken = {group.node.name for group in groups if len(group.parts) == 1}
    numbers: dict[str, int] = {}
    for group in groups:
        node = group.node
        if isinstance(node, Kernel) and len(group.parts) > 1:
            node = replace(node, name=_unique(merged_name(group.parts), taken, numbers))
            facts = (("kernels", len(group.parts)), ("lines", len(node.body)), ("buffers", len(node.params)))
            why = f"{len(group.parts)} kernels became one"
            decisions.append(Decision("fuse.kernel", (node.name, *group.parts), True, why, facts))
        nodes.append(node)
    return tuple(nodes), decisions


def merged_name(parts: Iterable[str]) -> str:
    """The operators of `parts`, without repeated neighbours, abbreviated in the middle if there are many.

    >>> merged_name(["add_1", "mul_2", "mul_3", "relu_4"])
    'add_mul_relu'
    """
    words: list[str] = []
    for part in parts:
        word = re.sub(r"(_\d+)+$", "", part)
        if not words or words[-1] != word:
            words.append(word)
    if len("_".join(words)) <= _MAX_LENGTH:
        return "_".join(words)
    head, tail = words[:3], words[-2:]
    return f"{'_'.join(head)}_etc_{'_'.join(tail)}"[: _MAX_LENGTH + 12].rstrip("_")


def _unique(name: str, taken: set[str], numbers: dict[str, int]) -> str:
    """`name` with the next free number."""
    while (candidate := f"{name}_{numbers.get(name, 0)}") in taken:
        numbers[name] = numbers.get(name, 0) + 1
    numbers[name] = numbers.get(name, 0) + 1
    return candidate
