"""Where temporaries lie in the arena: buffers that are alive at the same time never overlap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pellucid.errors import InternalError
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Program, View
from pellucid.schedule.deps import reads, writes

ALIGNMENT = 64  # bytes: a cache line, and the widest vector

_MANY = 2000  # with more temporaries than this, placing by size takes too long


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offsets of temporaries in an arena of `arena_bytes`.

    lower_bound: the most bytes that are alive at once; no plan is smaller.
    """

    offsets: Mapping[str, int]
    arena_bytes: int
    lower_bound: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `size` bytes, alive from the node at `first` to the node at `last`, both included."""

    buffer: str
    first: int
    last: int
    size: int

    def meets(self, other: Lifetime) -> bool:
        """True if both are alive at some node."""
        return self.first <= other.last and other.first <= self.last


def plan_memory(program: Program, sizes: Callable[[Expr], int], leave_out: Collection[str] = ()) -> MemoryPlan:
    """Lay out all temporaries but those of `leave_out`.

    sizes: the number that a size expression has in this call.

    Before: `t0` (nodes 0 to 1), `t1` (1 to 2), `t2` (2 to 3), 64 bytes each.
    After: `t0` at 0, `t1` at 64, `t2` at 0; 128 bytes.
    """
    lives = lifetimes(program, sizes, leave_out)
    # Placing large buffers first is near-optimal for most graphs, placing in order of birth for chains.
    orders = [sorted(lives, key=lambda life: (life.first, -life.size, life.buffer))]
    if len(lives) <= _MANY:
        orders.append(sorted(lives, key=lambda life: (-life.size, life.first, life.buffer)))
    offsets, arena_bytes = min((_place(order) for order in orders), key=lambda plan: plan[1])
    return MemoryPlan(offsets, arena_bytes, _peak(lives))


def lifetimes(program: Program, sizes: Callable[[Expr], int], leave_out: Collection[str] = ()) -> list[Lifetime]:
    """The lifetime of each temporary in the order of the nodes, with sizes rounded up to whole cache lines."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(program.nodes):
        for buffer in (*reads(node), *writes(node)):
            first.setdefault(buffer, position)
            last[buffer] = position
    for view in program.outputs:
        if isinstance(view, View):
            last[view.buffer] = len(program.nodes)
    return [
        Lifetime(b.name, first[b.name], last[b.name], _aligned(sizes(b.numel) * b.dtype.itemsize))
        for b in program.buffers
        if b.role == "temp" and b.name in first and b.name not in leave_out
    ]


def check_memory_plan(
    program: Program, sizes: Callable[[Expr], int], plan: MemoryPlan, leave_out: Collection[str] = ()
) -> None:
    """Raise InternalError unless every temporary lies aligned in the arena, away from all that live with it."""
    lives = lifetimes(program, sizes, leave_out)
    if {life.buffer for life in lives} != set(plan.offsets):
        raise InternalError("the memory plan does not cover the temporaries of the program")
    active: list[Lifetime] = []
    for life in sorted(lives, key=lambda life: life.first):
        start = plan.offsets[life.buffer]
        if start % ALIGNMENT or start < 0 or start + life.size > plan.arena_bytes:
            raise InternalError(f"buffer {life.buffer} lies badly: offset {start}, {life.size} bytes")
        active = [other for other in active if other.last >= life.first]
        for other in active:
            base = plan.offsets[other.buffer]
            if start < base + other.size and base < start + life.size:
                raise InternalError(f"buffers {life.buffer} and {other.buffer} overlap while both are alive")
        active.append(life)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _place(order: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Offsets for `order`, each buffer in the tightest gap among those placed before that live with it."""
    by_birth = all(one.first <= other.first for one, other in pairwise(order))
    offsets: dict[str, int] = {}
    placed: list[tuple[int, Lifetime]] = []
    end = 0
    for life in order:
        if by_birth:  # what is dead now does not come back
            placed = [(start, other) for start, other in placed if other.last >= life.first]
        offset = _tightest_gap(life, placed)
        offsets[life.buffer] = offset
        placed.append((offset, life))
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
