"""Horizontal fusion: kernels that do not feed each other share their loops."""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.ir.decision import Decision, DecisionLog
from pellucid.ir.index import Expr, product
from pellucid.ir.nodes import Kernel
from pellucid.machine.work import estimated_bytes
from pellucid.options import Options
from pellucid.schedule.fusion_graph import FusionGraph, Group, survivor
from pellucid.schedule.pair import merge_groups, refusal

# A pair is considered only if few nodes are between the two: results that are kept longer occupy memory.
_WINDOW = 32
_CANDIDATES = 3

# With fewer points than this, starting a kernel costs more than its work, whatever it reads.
_TINY = 1024

# A shared buffer must be at least 1 / `_SHARED_PART` of the bytes that the smaller kernel accesses.
_SHARED_PART = 4


def fuse_horizontally(graph: FusionGraph, options: Options, log: DecisionLog) -> None:
    """Merge each kernel with the nearest earlier ones that load the same elements, store to the same buffer, or are
    also tiny.

    Before: `a = x.sum(-1)`, `b = x.amax(-1)` in two kernels. After: one kernel that loads `x` once.
    """
    neighbours = _Neighbours(graph.partitioned)
    for group in graph.groups():
        if not isinstance(group.node, Kernel) or group.merged_into is not None or not graph.concerns(group.node):
            continue
        for other in list(neighbours.of(group)):
            group, other = survivor(group), survivor(other)
            same_buffer = not graph.partitioned.isdisjoint(other.written) and not graph.partitioned.isdisjoint(
                group.written
            )
            if other is group or (not same_buffer and (other in group.before or other in group.after)):
                continue
            subject = (other.parts[-1], group.parts[-1])
            shared = not set(other.read).isdisjoint(group.read)
            merged = merge_groups(graph, other, group, options)
            if isinstance(merged, Group):
                otherwise = "they store parts of the same buffer" if same_buffer else "both are tiny"
                why = "they load the same elements" if shared else otherwise
                log.add(Decision("fuse.horizontal", subject, True, why))
            elif shared:
                log.add(refusal(subject, merged, (("direction", "horizontal"),)))
        neighbours.add(survivor(group))


class _Neighbours:
    """The kernels seen so far, by loaded buffers, by partitioned buffers that they store, and by number of points."""

    def __init__(self, partitioned: frozenset[str]) -> None:
        self._partitioned = partitioned
        self._writers: dict[str, list[Group]] = {}
        self._readers: dict[str, list[Group]] = {}
        self._tiny: dict[Expr, list[Group]] = {}

    def add(self, group: Group) -> None:
        for buffer in group.read:
            self._readers.setdefault(buffer, []).append(group)
        for buffer in self._partitioned.intersection(group.written):
            self._writers.setdefault(buffer, []).append(group)
        self._tiny.setdefault(_points(group.kernel), []).append(group)

    def of(self, group: Group) -> Iterator[Group]:
        """Kernels that might share the loops of `group`, each once."""
        points = _points(group.kernel)
        found: dict[Group, None] = {}
        for buffer in self._partitioned.intersection(group.written):
            found.update(dict.fromkeys(map(survivor, reversed(self._writers.get(buffer, [])))))
        for buffer in group.read:
            for other in reversed(self._readers.get(buffer, [])[-_CANDIDATES:]):
                other = survivor(other)
                if group.rank - other.rank <= _WINDOW and _worth_sharing(buffer, group.kernel, other.kernel):
                    found[other] = None
        if points.value is not None and points.value <= _TINY:
            near = (survivor(other) for other in reversed(self._tiny.get(points, [])[-_CANDIDATES:]))
            found.update(dict.fromkeys(other for other in near if group.rank - other.rank <= _WINDOW))
        found.pop(group, None)
        return iter(found)


def _points(kernel: Kernel) -> Expr:
    return product(axis.extent for axis in kernel.space)


def _worth_sharing(buffer: str, one: Kernel, other: Kernel) -> bool:
    """True if `buffer` is a large part of the memory that the smaller of two kernels accesses."""
    sizes = {param.name: estimated_bytes(param) for param in (*one.params, *other.params)}
    smaller = min(sum(sizes[param.name] for param in kernel.params) for kernel in (one, other))
    return sizes[buffer] * _SHARED_PART >= smaller
