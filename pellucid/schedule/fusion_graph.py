"""The graph that fusion works on: nodes that merge, in an order that remains topological.

Two nodes may merge if no path leads from one to the other through a third. To check this, and to keep the order
topological, only nodes between the two in the order are inspected (the incremental algorithm of Pearce and Kelly).
Fusion mostly merges neighbours, so this is near-linear for a whole program; a search that exceeds a fixed budget is
abandoned, and the merge refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field

from pellucid.ir.analysis import reads, writes
from pellucid.ir.nodes import Buffer, Kernel, Node, Program
from pellucid.machine import Machine
from pellucid.schedule.deps import dependencies
from pellucid.schedule.match_axes import Mismatch

_SEARCH_BUDGET = 1000  # edges visited for one merge


@dataclass(slots=True, eq=False)
class Group:
    """A node of the graph: an extern, or a kernel that other kernels may have been merged into.

    rank: position in the order; smaller ranks run earlier.
    parts: names of the nodes that were merged into it, in program order.
    read, written: buffers that it reads and writes.
    merged_into: the group that replaces this one.
    """

    node: Node
    rank: int
    parts: tuple[str, ...]
    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    before: dict[Group, None] = field(default_factory=dict["Group", None])
    after: dict[Group, None] = field(default_factory=dict["Group", None])
    merged_into: Group | None = None

    @property
    def kernel(self) -> Kernel:
        assert isinstance(self.node, Kernel)
        return self.node


def survivor(group: Group) -> Group:
    """The group that `group` is part of now."""
    while group.merged_into is not None:
        if group.merged_into.merged_into is not None:
            group.merged_into = group.merged_into.merged_into
        group = group.merged_into
    return group


@dataclass(frozen=True, slots=True)
class Joint:
    """A legal merge of two groups: the groups that must move before and after the merged one."""

    first: Group
    second: Group
    ahead: tuple[Group, ...]
    behind: tuple[Group, ...]


class FusionGraph:
    """The nodes of a program, their order, the readers and writers of each buffer, and the target machine.

    partitioned: buffers that several nodes write, each its own elements; if there are any, only their writers are
    merged with others. fusions: number so far.
    """

    def __init__(self, program: Program, machine: Machine, partitioned: Collection[str] = ()) -> None:
        self.program = program
        self.machine = machine
        self.partitioned = frozenset(partitioned)
        self._count = 0
        self.fusions = 0
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.readers: dict[str, dict[Group, None]] = {}
        self.writers: dict[str, list[int]] = {}
        self._members = [Group(node, position, (node.name,)) for position, node in enumerate(program.nodes)]
        self._positions = {node.name: position for position, node in enumerate(program.nodes)}
        for position, earlier in enumerate(dependencies(program.nodes)):
            for other in earlier:
                self._link(self._members[other], self._members[position])
            self._enter(self._members[position], program.nodes[position])
            for buffer in self._members[position].written:
                self.writers.setdefault(buffer, []).append(position)

    def concerns(self, node: Node) -> bool:
        """Whether fusion considers `node`."""
        return not self.partitioned or not self.partitioned.isdisjoint(writes(node))

    def group(self, position: int) -> Group:
        """The group that the node at `position` of the program belongs to."""
        found = self._members[position] = survivor(self._members[position])
        return found

    def groups(self) -> list[Group]:
        """All groups, in an order in which they can run."""
        alive = [group for group in self._members if group.merged_into is None]
        return sorted(dict.fromkeys(alive), key=lambda group: group.rank)

    def last_writer(self, buffer: str, position: int) -> int | None:
        """Position of the last writer of `buffer` before the node at `position`; None if that is the caller."""
        writers = self.writers.get(buffer, [])
        before = bisect_left(writers, position)
        return writers[before - 1] if before else None

    def producer(self, buffer: str, position: int) -> Group | None:
        """The group of the last writer."""
        writer = self.last_writer(buffer, position)
        return None if writer is None else self.group(writer)

    def is_changed(self, buffer: str, *groups: Group) -> bool:
        """True if a node writes `buffer` that does not precede all nodes of these groups."""
        writers = self.writers.get(buffer)
        return bool(writers) and any(self._positions[part] <= writers[-1] for group in groups for part in group.parts)

    def needed_outside(self, buffer: str, *inside: Group) -> bool:
        """True if `buffer` is used outside the groups `inside`, by a reader or by the caller."""
        if self.buffers[buffer].role != "temp":
            return True
        return any(reader not in inside for reader in self.readers.get(buffer, ()))

    # Merging.

    def joint(self, one: Group, other: Group) -> Joint | Mismatch:
        """Whether two groups may become one."""
        first, second = (one, other) if one.rank < other.rank else (other, one)
        budget = [_SEARCH_BUDGET]
        ahead = _between(first, second, budget, forward=False)
        if isinstance(ahead, Mismatch):
            return ahead
        behind = _between(first, second, budget, forward=True)
        if isinstance(behind, Mismatch):
            return behind
        return Joint(first, second, tuple(sorted(ahead, key=_rank)), tuple(sorted(behind, key=_rank)))

    def merge(self, joint: Joint, kernel: Kernel) -> Group:
        """Replace both groups of `joint` by `kernel`."""
        self.fusions += 1
        moved = (*joint.ahead, joint.first, joint.second, *joint.behind)
        ranks = sorted(group.rank for group in moved)
        parts = (*joint.first.parts, *joint.second.parts)
        keep, drop = joint.second, joint.first
        if len(drop.before) + len(drop.after) > len(keep.before) + len(keep.after):
            keep, drop = drop, keep
        self._leave(keep)
        self._leave(drop)
        self._redirect(drop, keep)
        keep.parts = parts
        self._enter(keep, kernel)
        # One of the two ranks becomes free.
        for group, rank in zip((*joint.ahead, keep), ranks, strict=False):
            group.rank = rank
        for group, rank in zip(reversed(joint.behind), reversed(ranks), strict=False):
            group.rank = rank
        return keep

    def inline(self, group: Group, kernel: Kernel, producer: Group, position: int) -> None:
        """Replace the body of `group` by `kernel`, which computes the values that it loaded from `producer`.

        position: of the group's node in the program, which determines the writers that the new loads depend on.
        """
        self.fusions += 1
        old = set(group.read)
        self._leave(group)
        self._enter(group, kernel)
        touched = {*group.read, *group.written}
        if touched.isdisjoint(producer.written) and touched.isdisjoint(producer.read):
            del group.before[producer], producer.after[group]
        for buffer in group.read:
            source = None if buffer in old else self.producer(buffer, position)
            if source is not None:
                self._link(source, group)

    def store_more(self, group: Group, kernel: Kernel, buffers: tuple[Buffer, ...]) -> None:
        """Replace the body of `group` by `kernel`, which also stores these new buffers."""
        self._leave(group)
        self._enter(group, kernel)
        for buffer in buffers:
            self.buffers[buffer.name] = buffer
            self.writers[buffer.name] = [self._members.index(group)]

    def fresh(self) -> int:
        """A number that no other call returns."""
        self._count += 1
        return self._count

    def _redirect(self, drop: Group, keep: Group) -> None:
        drop.merged_into = keep
        for other in drop.before:
            del other.after[drop]
            if other is not keep:
                self._link(other, keep)
        for other in drop.after:
            del other.before[drop]
            if other is not keep:
                self._link(keep, other)
        drop.before, drop.after = {}, {}

    def _link(self, earlier: Group, later: Group) -> None:
        earlier.after[later] = None
        later.before[earlier] = None

    def _enter(self, group: Group, node: Node) -> None:
        group.node, group.read, group.written = node, reads(node), writes(node)
        for buffer in group.read:
            self.readers.setdefault(buffer, {})[group] = None

    def _leave(self, group: Group) -> None:
        for buffer in group.read:
            del self.readers[buffer][group]


def _rank(group: Group) -> int:
    return group.rank


def _between(first: Group, second: Group, budget: list[int], *, forward: bool) -> dict[Group, None] | Mismatch:
    """Groups between the two in the order that follow `first` (or precede `second`), none of them on a path."""
    start, end = (first, second) if forward else (second, first)
    found: dict[Group, None] = {}
    stack = [start]
    while stack:
        group = stack.pop()
        for other in group.after if forward else group.before:
            budget[0] -= 1
            if budget[0] < 0:
                return Mismatch("search-limit", "too many nodes are between them to search for a cycle")
            if other is end and group is not start:
                return Mismatch("cycle", "a node between them needs the first and is needed by the second")
            if first.rank < other.rank < second.rank and other not in found:
                found[other] = None
                stack.append(other)
    return found
