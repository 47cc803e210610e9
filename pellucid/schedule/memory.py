"""Where temporaries lie: in the arena, where buffers that are alive at the same time never overlap, or in the memory of
arguments that nobody reads any more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TypeAlias

from pellucid.errors import InternalError
from pellucid.ir.analysis import reads, writes
from pellucid.ir.attention import reduces_in_turn
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Kernel, Load, Node, Reduce, Store, View, operands
from pellucid.ir.types import ALIGNMENT, DType

# Placing by size compares temporaries that live in the same stretch of so many nodes, and gives up after so many looks,
# which take some tenths of a second.
_STRETCH = 32
_MOST_LOOKS = 1_000_000

WORTH_TAKING = 1 << 20
"""Bytes from which on an argument's memory is taken over: smaller ones would cost more to look after than they save."""


Span: TypeAlias = tuple[int, int]
"""The positions of the first and the last node that use a buffer; results are used after the last node."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offsets of temporaries in an arena of `arena_bytes`.

    lower_bound: the most bytes that are alive in it at once; no plan is smaller. homes: the arguments whose memory the
    other temporaries take over. in_place: temporaries that lie where the one does of which they are made.
    """

    offsets: Mapping[str, int]
    arena_bytes: int
    lower_bound: int
    homes: Mapping[str, str] = field(default_factory=dict[str, str])
    in_place: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes`, alive from the node at `first` to the node at `last`, both included."""

    buffer: str
    first: int
    last: int
    nbytes: int

    @property
    def size(self) -> int:
        """The bytes that it takes up: whole cache lines."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def meets(self, other: Lifetime) -> bool:
        """True if both are alive at some node."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Room:
    """An argument of `nbytes` that may be overwritten once the node at `last` has read it.

    in_place: buffers that this node may write there while it reads, see `happens_in_place`.
    """

    buffer: str
    last: int
    nbytes: int
    in_place: frozenset[str]


def plan_memory(
    lives: Sequence[Lifetime], rooms: Sequence[Room] = (), in_place: Mapping[str, str] | None = None
) -> MemoryPlan:
    """Lay out buffers. rooms: of arguments that they may overwrite. in_place: see `made_in_place`.

    Before: `t0` (nodes 0 to 1), `t1` (1 to 2), `t2` (2 to 3), 64 bytes each.
    After: `t0` at 0, `t1` at 64, `t2` at 0; 128 bytes.
    """
    first = _first_of_each(in_place or {})
    plan = _lay_out(_joined(lives, first), rooms)
    offsets = {life.buffer: plan.offsets.get(first.get(life.buffer, life.buffer)) for life in lives}
    homes = {life.buffer: plan.homes.get(first.get(life.buffer, life.buffer)) for life in lives}
    return replace(
        plan,
        offsets={name: offset for name, offset in offsets.items() if offset is not None},
        homes={name: home for name, home in homes.items() if home is not None},
        in_place=in_place or {},
    )


def _first_of_each(in_place: Mapping[str, str]) -> dict[str, str]:
    """For each temporary that is made in the place of another the first one that lies there."""
    found: dict[str, str] = {}
    for target, source in in_place.items():  # in the order in which they are made
        found[target] = found.get(source, source)
    return found


def _joined(lives: Sequence[Lifetime], first: Mapping[str, str]) -> list[Lifetime]:
    """One lifetime for all that lie in the same place, under the name of the first."""
    found: dict[str, Lifetime] = {}
    for life in sorted(lives, key=lambda life: (life.first, life.last)):
        name = first.get(life.buffer, life.buffer)
        begin = found.get(name, life)
        found[name] = Lifetime(name, begin.first, max(begin.last, life.last), max(begin.nbytes, life.nbytes))
    return list(found.values())


def _lay_out(lives: Sequence[Lifetime], rooms: Sequence[Room]) -> MemoryPlan:
    homes = _take_over(lives, rooms)
    lives = [life for life in lives if life.buffer not in homes]
    # Placing large buffers first is near-optimal for most graphs, placing in order of birth for chains.
    bound = _peak(lives)
    offsets, arena_bytes = _place_by_birth(sorted(lives, key=lambda life: (life.first, -life.size, life.buffer)))
    if arena_bytes > bound:
        other = _place_by_size(sorted(lives, key=lambda life: (-life.size, life.first, life.buffer)))
        if other is not None and other[1] < arena_bytes:
            offsets, arena_bytes = other
    return MemoryPlan(offsets, arena_bytes, bound, homes)


def _take_over(lives: Sequence[Lifetime], rooms: Sequence[Room]) -> dict[str, str]:
    """The buffers that lie in arguments: in the largest of these the largest ones that fit, and so on."""
    order = sorted((life for life in lives if life.nbytes >= WORTH_TAKING), key=lambda life: (-life.nbytes, life.first))
    homes: dict[str, str] = {}
    for room in sorted(rooms, key=lambda room: (-room.nbytes, room.buffer)):
        living: list[Lifetime] = []
        for life in order:
            if life.buffer in homes or life.nbytes > room.nbytes or any(map(life.meets, living)):
                continue
            if life.first > room.last or (life.first == room.last and life.buffer in room.in_place):
                living.append(life)
                homes[life.buffer] = room.buffer
    return homes


def donations(nodes: Sequence[Node], used: Mapping[str, Span], donated: Iterable[str]) -> dict[str, frozenset[str]]:
    """Donated arguments that may be overwritten, each with what the node that reads it last may write there already.

    used: the spans of buffers. What is written or returned is the caller's.
    """
    written = {name for node in nodes for name in writes(node)}
    last = {name: nodes[used[name][1]] for name in donated if name in used and used[name][1] < len(nodes)}
    return {
        name: frozenset(target for target in writes(node) if happens_in_place(node, name, target))
        for name, node in last.items()
        if name not in written
    }


def made_in_place(
    nodes: Sequence[Node], used: Mapping[str, Span], kinds: Mapping[str, tuple[Expr, DType]]
) -> dict[str, str]:
    """Temporaries that may lie where others do, of which they are made, in the order in which they are made.

    used: the spans of buffers. kinds: size and type of each temporary; both must have the same.
    """
    found: dict[str, str] = {}
    for position, node in enumerate(nodes):
        ends = [name for name in reads(node) if name in kinds and used[name][1] == position]
        for target in writes(node):
            if target not in kinds or used[target][0] != position:
                continue
            source = next((s for s in ends if kinds[s] == kinds[target] and happens_in_place(node, s, target)), None)
            if source is not None:
                ends.remove(source)
                found[target] = source
    return found


def happens_in_place(node: Node, source: str, target: str) -> bool:
    """Whether `target` may lie where `source` does: a point that stores there has read it, for that alone.

    What goes into a reduction, or into another store, may be read again later. What follows a contraction is computed
    block by block, when all that goes into the sums of the block has been read.
    """
    if not isinstance(node, Kernel) or reduces_in_turn(node):
        return False
    places = {load.index for _, load in node.loads() if load.buffer == source}
    places |= {store.index for _, store in node.stores() if store.buffer == target}
    made: set[str] = set()
    for line in node.body:
        if isinstance(line.rhs, Load) and line.rhs.buffer == source:
            made.add(line.out)
        elif not made.isdisjoint(operands(line.rhs)):
            made.add(line.out)
            if isinstance(line.rhs, Reduce) or (isinstance(line.rhs, Store) and line.rhs.buffer != target):
                return False
    itemsizes = {param.dtype.itemsize for param in node.params if param.name in (source, target)}
    return len(places) == len(itemsizes) == 1 and not any(place.vals() for place in places)


def spans(used: Iterable[Sequence[str]], results: Iterable[View | Expr | None]) -> dict[str, Span]:
    """The span of each buffer that a node uses. used: buffers, node by node. results: of the program."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    end = 0
    for position, buffers in enumerate(used):
        end = position + 1
        for buffer in buffers:
            first.setdefault(buffer, position)
            last[buffer] = position
    for view in results:
        if isinstance(view, View):
            last[view.buffer] = end
    return {name: (begin, last[name]) for name, begin in first.items()}


def check_memory_plan(lives: Sequence[Lifetime], plan: MemoryPlan) -> None:
    """Raise InternalError unless every buffer lies aligned in the arena, away from all that live with it.

    Those that lie in arguments are not looked at.
    """
    lives = [life for life in lives if life.buffer not in plan.homes]
    if {life.buffer for life in lives} != set(plan.offsets):
        raise InternalError("the memory plan does not cover the temporaries of the program")
    active: list[Lifetime] = []
    for life in sorted(lives, key=lambda life: life.first):
        start = plan.offsets[life.buffer]
        if start % ALIGNMENT or start < 0 or start + life.size > plan.arena_bytes:
            raise InternalError(f"buffer {life.buffer} is misplaced: offset {start}, {life.size} bytes")
        active = [other for other in active if other.last >= life.first]
        for other in active:
            if plan.in_place.get(life.buffer) == other.buffer and other.last == life.first:
                continue
            base = plan.offsets[other.buffer]
            if start < base + other.size and base < start + life.size:
                raise InternalError(f"buffers {life.buffer} and {other.buffer} overlap while both are alive")
        active.append(life)


def _place_by_birth(order: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets for `order`, which is by first node: what is dead does not come back, so its memory is free for good.

    Each buffer takes the smallest gap between living ones that holds it, the first of equals, or the end.
    """
    offsets: dict[str, int] = {}
    gaps = _Gaps()
    living: list[tuple[int, int, int]] = []  # a heap of (last node, start, stop)
    end = 0
    for life in order:
        while living and living[0][0] < life.first:
            _, start, stop = heappop(living)
            gaps.give_back(start, stop)
        offset = gaps.take(life.size)
        offsets[life.buffer] = offset
        heappush(living, (life.last, offset, offset + life.size))
        end = max(end, offset + life.size)
    return offsets, end


class _Gaps:
    """Free memory below `end`, the end of what is taken; a gap is known by its size and by either of its ends."""

    def __init__(self) -> None:
        self.end = 0
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}  # from the start of a gap to its stop
        self._stops: dict[int, int] = {}

    def take(self, size: int) -> int:
        """The start of `size` bytes that are taken now."""
        place = bisect_left(self._by_size, (size, 0))
        if size == 0 or place == len(self._by_size):
            start = self.end if size else 0
            self.end = max(self.end, start + size)
            return start
        width, start = self._by_size[place]
        self._remove(start, start + width)
        if width > size:
            self._add(start + size, start + width)
        return start

    def give_back(self, start: int, stop: int) -> None:
        """Free what `take` gave."""
        if start == stop:
            return
        if start in self._stops:
            low = self._stops[start]
            self._remove(low, start)
            start = low
        if stop in self._starts:
            high = self._starts[stop]
            self._remove(stop, high)
            stop = high
        if stop == self.end:
            self.end = start
        else:
            self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        self._starts[start], self._stops[stop] = stop, start
        insort(self._by_size, (stop - start, start))

    def _remove(self, start: int, stop: int) -> None:
        del self._starts[start], self._stops[stop]
        del self._by_size[bisect_left(self._by_size, (stop - start, start))]


def _place_by_size(order: Sequence[Lifetime]) -> tuple[dict[str, int], int] | None:
    """Offsets for `order`, each buffer in the tightest gap among those placed before that live with it.

    None when too many live together for too long to compare them all.
    """
    offsets: dict[str, int] = {}
    placed: dict[int, list[Lifetime]] = {}  # by stretch of nodes
    end, looks = 0, 0
    for life in order:
        stretches = range(life.first // _STRETCH, life.last // _STRETCH + 1)
        looks += sum([1 + len(placed.get(stretch, ())) for stretch in stretches])
        if looks > _MOST_LOOKS:
            return None
        near = {other.buffer: other for stretch in stretches for other in placed.get(stretch, ())}
        offsets[life.buffer] = offset = _tightest_gap(life, [(offsets[name], near[name]) for name in near])
        for stretch in stretches:
            placed.setdefault(stretch, []).append(life)
        end = max(end, offset + life.size)
    return offsets, end


def _tightest_gap(life: Lifetime, placed: Iterable[tuple[int, Lifetime]]) -> int:
    """The start of the smallest gap that holds `life`, or the end of all that live with it."""
    neighbours = sorted((start, start + other.size) for start, other in placed if other.meets(life))
    best, best_gap, free = None, 0, 0
    for start, stop in neighbours:
        gap = start - free
        if gap >= life.size and (best is None or gap < best_gap):
            best, best_gap = free, gap
        free = max(free, stop)
    return free if best is None else best


def _peak(lives: Iterable[Lifetime]) -> int:
    changes: dict[int, int] = {}
    for life in lives:
        changes[life.first] = changes.get(life.first, 0) + life.size
        changes[life.last + 1] = changes.get(life.last + 1, 0) - life.size
    alive, peak = 0, 0
    for position in sorted(changes):
        alive += changes[position]
        peak = max(peak, alive)
    return peak
