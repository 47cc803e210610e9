"""Why Inductor did not fuse two loops, in the categories of Pellucid's own refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

_BY_TEXT = {
    "intermediate nodes": "cycle",
    "create cycle": "cycle",
    "must go before": "cycle",
    "extern": "extern",
    "is nop": "extern",
    "exceeds max fusion": "size-limit",
    "too_many_reads_and_writes": "size-limit",
    "peak memory": "cost",
    "score_fusion": "cost",
    "beneficial": "cost",
    "register spilling": "cost",
    "prologue": "template",
    "epilogue": "template",
    "foreach": "foreach",
    "device mismatch": "different-devices",
    "buf layouts": "different-layouts",
    "disabled": "forbidden",
    "must not be fused": "forbidden",
}
"""The category by a part of Inductor's reason; all other reasons concern accesses, which are inspected."""

_RANK = (
    "random-seed", "indirect", "mutation", "extern", "different-numel", "broadcast", "different-offset",
    "different-loop-orders",
)  # fmt: skip


def category_of(first: str, second: str, reason: str) -> str:
    """What prevented the fusion of two nodes of the graph that is being scheduled, by their names."""
    known = next((category for text, category in _BY_TEXT.items() if text in reason), "")
    if known:
        return known
    known_nodes = V.graph.scheduler.name_to_fused_node  # by each name that is part of a fused node's name
    one, other = (known_nodes[name.partition("_")[0]] for name in (first, second))
    found = set(_mismatches(one, other))
    return next((category for category in _RANK if category in found), "no-shared-data")


def _mismatches(first: Any, second: Any) -> Iterator[str]:
    """How the accesses of two nodes differ, for each buffer that both touch."""
    ours, theirs = ({dep.name: dep for dep in node.read_writes.reads_and_writes()} for node in (first, second))
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if isinstance(one, WeakDep) or isinstance(other, WeakDep):
            yield "mutation"
        elif not isinstance(one, MemoryDep) or not isinstance(other, MemoryDep):
            yield "extern"  # the whole buffer, accessed by something that is not a loop
        elif one.is_indirect() or other.is_indirect():
            yield "indirect"
        elif one.index.is_number and other.index.is_number and one.index != other.index:
            yield "random-seed"  # a single element, a different one for each node
        elif one.get_numel() != other.get_numel():
            yield "different-numel"
        elif sympy_product(one.size) != sympy_product(other.size):
            yield "broadcast"
        elif one.get_offset() != other.get_offset():
            yield "different-offset"
        elif one.normalize() != other.normalize():
            yield "different-loop-orders"
