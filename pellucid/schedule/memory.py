"""Memory planning: temporaries get an offset in the arena, where buffers that are live at once never overlap, or reuse
the memory of arguments that no later node reads.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import TypeAlias

from pellucid.errors import InternalError
from pellucid.ir.analysis import reads, writes
from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Kernel, Load, Node, Reduce, Store, View, operands
from pellucid.ir.types import ALIGNMENT, DType

# Placing by size compares temporaries that are live in the same stretch of `_STRETCH` nodes. It gives up after
# `_MAX_COMPARISONS`, which take some tenths of a second.
_STRETCH = 32
_MAX_COMPARISONS = 1_000_000

MIN_DONATED_BYTES = 1 << 20
"""Minimum size of an argument whose memory is reused: tracking a smaller one would cost more than it saves."""


Span: TypeAlias = tuple[int, int]
"""The positions of the first and the last node that use a buffer; results are used after the last node."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offsets of temporaries in an arena of `arena_bytes`.

    lower_bound: the maximum of bytes that are live in it at once; no plan is smaller. donors: for each other temporary
    the argument whose memory it reuses. in_place: for temporaries that overwrite one of their inputs, that input.
    """

    offsets: Mapping[str, int]
    arena_bytes: int
    lower_bound: int
    donors: Mapping[str, str] = field(default_factory=dict[str, str])
    in_place: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes`, live from the node at `first` to the node at `last`, both included."""

    buffer: str
    first: int
    last: int
    nbytes: int

    @property
    def size(self) -> int:
        """The bytes that it occupies: whole cache lines."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    def overlaps(self, other: Lifetime) -> bool:
        """True if both are live at some node."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class DonatedArgument:
    """An argument of `nbytes` that may be overwritten after the node at `last` has read it.

    in_place: buffers that this node itself may write there, see `can_run_in_place`.
    """

    buffer: str
    last: int
    nbytes: int
    in_place: frozenset[str]


def plan_memory(
    lives: Sequence[Lifetime], donated: Sequence[DonatedArgument] = (), in_place: Mapping[str, str] | None = None
) -> MemoryPlan:
    """Plan the memory of buffers. donated: arguments that they may overwrite. in_place: see `find_in_place`.

    Before: `t0` (nodes 0 to 1), `t1` (1 to 2), `t2` (2 to 3), 64 bytes each.
    After: `t0` at 0, `t1` at 64, `t2` at 0; 128 bytes.
    """
    first = _first_of_each(in_place or {})
    plan = _lay_out(_joined(lives, first), donated)
    offsets = {life.buffer: plan.offsets.get(first.get(life.buffer, life.buffer)) for life in lives}
    donors = {life.buffer: plan.donors.get(first.get(life.buffer, life.buffer)) for life in lives}
    return replace(
        plan,
        offsets={name: offset for name, offset in offsets.items() if offset is not None},
        donors={name: home for name, home in donors.items() if home is not None},
        in_place=in_place or {},
    )


def _first_of_each(in_place: Mapping[str, str]) -> dict[str, str]:
    """For each temporary that overwrites another one, the first temporary of that chain."""
    found: dict[str, str] = {}
    for target, source in in_place.items():  # in the order in which they are computed
        found[target] = found.get(source, source)
    return found


def _joined(lives: Sequence[Lifetime], first: Mapping[str, str]) -> list[Lifetime]:
    """One lifetime for all buffers that share memory, under the name of the first."""
    found: dict[str, Lifetime] = {}
    for life in sorted(lives, key=lambda life: (life.first, life.last)):
        name = first.get(life.buffer, life.buffer)
        begin = found.get(name, life)
        found[name] = Lifetime(name, begin.first, max(begin.last, life.last), max(begin.nbytes, life.nbytes))
    return list(found.values())


def _lay_out(lives: Sequence[Lifetime], donated: Sequence[DonatedArgument]) -> MemoryPlan:
    donors = _reuse_arguments(lives, donated)
    lives = [life for life in lives if life.buffer not in donors]
    # Placing large buffers first is near-optimal for most graphs, placing in order of definition for chains.
    bound = _peak(lives)
    offsets, arena_bytes = _place_by_definition(sorted(lives, key=lambda life: (life.first, -life.size, life.buffer)))
    if arena_bytes > bound:
        other = _place_by_size(sorted(lives, key=lambda life: (-life.size, life.first, life.buffer)))
        if other is not None and other[1] < arena_bytes:
            offsets, arena_bytes = other
    return MemoryPlan(offsets, arena_bytes, bound, donors)


def _reuse_arguments(lives: Sequence[Lifetime], donated: Sequence[DonatedArgument]) -> dict[str, str]:
    """The argument that a buffer reuses, by buffer; the largest argument gets the largest buffers that fit."""
    order = sorted(
        (life for life in lives if life.nbytes >= MIN_DONATED_BYTES), key=lambda life: (-life.nbytes, life.first)
    )
    donors: dict[str, str] = {}
    for argument in sorted(donated, key=lambda argument: (-argument.nbytes, argument.buffer)):
        placed: list[Lifetime] = []
        for life in order:
            if life.buffer in donors or life.nbytes > argument.nbytes or any(map(life.overlaps, placed)):
                continue
            if life.first > argument.last or (life.first == argument.last and life.buffer in argument.in_place):
                placed.append(life)
                donors[life.buffer] = argument.buffer
    return donors


def donations(nodes: Sequence[Node], used: Mapping[str, Span], donated: Iterable[str]) -> dict[str, frozenset[str]]:
    """Donated arguments that may be overwritten, each with the buffers that its last reader may already write there.

    used: the spans of buffers. An argument that is written or returned stays the caller's.
    """
    written = {name for node in nodes for name in writes(node)}
    last = {name: nodes[used[name][1]] for name in donated if name in used and used[name][1] < len(nodes)}
    return {
        name: frozenset(target for target in writes(node) if can_run_in_place(node, name, target))
        for name, node in last.items()
        if name not in written
    }


def find_in_place(
    nodes: Sequence[Node], used: Mapping[str, Span], kinds: Mapping[str, tuple[Expr, DType]]
) -> dict[str, str]:
    """For each temporary that may overwrite one of its inputs that input, in the order in which they are computed.

    used: the spans of buffers. kinds: size and type of each temporary, which must be equal.
    """
    found: dict[str, str] = {}
    for position, node in enumerate(nodes):
        ending = [name for name in reads(node) if name in kinds and used[name][1] == position]
        for target in writes(node):
            if target not in kinds or used[target][0] != position:
                continue
            source = next((s for s in ending if kinds[s] == kinds[target] and can_run_in_place(node, s, target)), None)
            if source is not None:
                ending.remove(source)
                found[target] = source
    return found


def can_run_in_place(node: Node, source: str, target: str) -> bool:
    """Whether `target` may overwrite `source`: each point reads the element that it stores, only for that store.

    An element that goes into a reduction, or into another store, may be read again later. The epilogue of a contraction
    is computed block by block, after all operands of the block's sums have been read.
    """
    if not isinstance(node, Kernel) or mixes_reduction_axes(node):
        return False
    indices = {load.index for _, load in node.loads() if load.buffer == source}
    indices |= {store.index for _, store in node.stores() if store.buffer == target}
    dependent: set[str] = set()
    for line in node.body:
        if isinstance(line.rhs, Load) and line.rhs.buffer == source:
            dependent.add(line.out)
        elif not dependent.isdisjoint(operands(line.rhs)):
            dependent.add(line.out)
            if isinstance(line.rhs, Reduce) or (isinstance(line.rhs, Store) and line.rhs.buffer != target):
                return False
    itemsizes = {param.dtype.itemsize for param in node.params if param.name in (source, target)}
    return len(indices) == len(itemsizes) == 1 and not any(index.vals() for index in indices)


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
    """Raise InternalError unless every buffer in the arena is aligned and overlaps no buffer that is live with it.

    Buffers that reuse arguments are not checked.
    """
    lives = [life for life in lives if life.buffer not in plan.donors]
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
                raise InternalError(f"buffers {life.buffer} and {other.buffer} overlap while both are live")
        active.append(life)


def _place_by_definition(order: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets for `order`, which is by first node, so that memory is free once the last use of a buffer has passed.

    Each buffer is placed in the smallest gap between live ones that holds it, the first of equal ones, or at the end.
    """
    offsets: dict[str, int] = {}
    gaps = _Gaps()
    live: list[tuple[int, int, int]] = []  # a heap of (last node, start, stop)
    end = 0
    for life in order:
        while live and live[0][0] < life.first:
            _, start, stop = heappop(live)
            gaps.free(start, stop)
        offset = gaps.take(life.size)
        offsets[life.buffer] = offset
        heappush(live, (life.last, offset, offset + life.size))
        end = max(end, offset + life.size)
    return offsets, end


class _Gaps:
    """Free memory below `end`, the end of allocated memory; gaps are indexed by size, by start and by stop."""

    def __init__(self) -> None:
        self.end = 0
        self._by_size: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}  # from the start of a gap to its stop
        self._stops: dict[int, int] = {}

    def take(self, size: int) -> int:
        """Allocate `size` bytes and return their start."""
        position = bisect_left(self._by_size, (size, 0))
        if size == 0 or position == len(self._by_size):
            start = self.end if size else 0
            self.end = max(self.end, start + size)
            return start
        width, start = self._by_size[position]
        self._remove(start, start + width)
        if width > size:
            self._add(start + size, start + width)
        return start

    def free(self, start: int, stop: int) -> None:
        """Free memory that `take` allocated."""
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
    """Offsets for `order`, each buffer in the tightest gap between the buffers placed before that are live with it.

    None if too many buffers are live at once for too long to compare them all.
    """
    offsets: dict[str, int] = {}
    placed: dict[int, list[Lifetime]] = {}  # by stretch of nodes
    end, comparisons = 0, 0
    for life in order:
        stretches = range(life.first // _STRETCH, life.last // _STRETCH + 1)
        comparisons += sum([1 + len(placed.get(stretch, ())) for stretch in stretches])
        if comparisons > _MAX_COMPARISONS:
            return None
        near = {other.buffer: other for stretch in stretches for other in placed.get(stretch, ())}
        offsets[life.buffer] = offset = _tightest_gap(life, [(offsets[name], near[name]) for name in near])
        for stretch in stretches:
            placed.setdefault(stretch, []).append(life)
        end = max(end, offset + life.size)
    return offsets, end


def _tightest_gap(life: Lifetime, placed: Iterable[tuple[int, Lifetime]]) -> int:
    """The start of the smallest gap that holds `life`, or the end of all buffers that are live with it."""
    neighbours = sorted((start, start + other.size) for start, other in placed if other.overlaps(life))
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
    live, peak = 0, 0
    for position in sorted(changes):
        live += changes[position]
        peak = max(peak, live)
    return peak
