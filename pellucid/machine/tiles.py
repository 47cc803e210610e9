"""Tiles: accesses that stride along the vector axis are made square by square, transposed in registers.

Where `o[300*i + j] = x[i + 200*j]` has its vectors along j, a load of x would gather. Instead W rows of W elements are
read along i and transposed, which makes vectors along j for W points of i. A store that strides is the same backwards:
W vectors are collected, transposed, and written as rows. In a kernel that reduces, the rows are those of W kept points,
and the squares follow one another along the innermost reduced axis, in each sweep that needs them.

Elements two to four apart need no squares: lanes are taken from each of as many neighbouring registers.

Code generation makes the squares; the scheduler asks what they leave, before it puts accesses into one kernel that no
order of its loops makes contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, Var
from pellucid.ir.nodes import Kernel, Line, Load, Store, axes_of
from pellucid.ir.traffic import LINE
from pellucid.machine.cost import issuing, moving
from pellucid.machine.model import Machine
from pellucid.machine.work import estimate

# Rows of the squares: as many as the registers they are transposed in, of which AVX-512 has 32, or half of that.
SQUARES = (16, 32)

GATHER_COST = 3.0
"""Instructions for each lane of a vector whose elements lie apart in memory."""
MOST_APART = 4
"""Elements from one lane to the next of accesses that are made of neighbouring registers, from each of which lanes are
taken."""
NEAR_COST = 0.5
"""Instructions for each lane of these."""
WOVEN_COST = 0.25
"""The same of stores whose registers hold what lies between the lanes as well."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """axis: along which the accesses `lines` are contiguous, while the vector axis strides; None for no tiles."""

    axis: str | None = None
    lines: frozenset[str] = frozenset()


def tiling(kernel: Kernel, vector: str | None, width: int, machine: Machine) -> Tiling:
    """The tiles of a kernel with `width` lanes along `vector`, a kept axis: as many accesses as one axis serves.

    A masked load reads the whole square, as far as that lies in the buffer, and chooses afterwards. So nobody may
    write to the buffer meanwhile, and its size must be known.
    """
    if vector is None or vector in kernel.reduced or width > max(SQUARES) or _scatters(kernel):
        return Tiling()
    if estimate(kernel.ranges[vector]) < width // 2:
        return Tiling()  # most of each square would be empty, and its stores masked
    params = {param.name: param for param in kernel.params}
    everywhere = frozenset(axis.name for axis in kernel.space)
    # Squares of a kernel that reduces lie in its sweeps, whose innermost loop is this.
    along = kernel.reduced[-1:] or tuple(axis.name for axis in kernel.space if axis.name != vector)
    depends = axes_of(kernel)
    loaded = {load.buffer for _, load in kernel.loads()}
    stored = {store.buffer for _, store in kernel.stores()}
    found: dict[str, list[str]] = {}
    for line in kernel.body:
        match line.rhs:
            case Load(buffer, index, mask):
                fits = mask is None or (buffer not in stored and params[buffer].numel.value is not None)
            case Store(buffer, index, _, join):
                # A store in place would come after the loads of other points, and one that joins reads memory itself;
                # one that misses an axis is done once.
                fits = buffer not in loaded and not join and depends[line.out] == everywhere
                fits = fits and not woven(kernel, line, vector)
            case _:
                continue
        # A square in more than four parts gains nothing.
        fits = fits and width * params[buffer].dtype.itemsize <= 2 * machine.isa.register_bytes
        if fits and _strides(index, vector):
            for other in along:
                if index.coefficient(other) == ONE and estimate(kernel.ranges[other]) >= width // 2:
                    found.setdefault(other, []).append(line.out)
    best = max(found, key=lambda name: len(found[name]), default=None)
    return Tiling(best, frozenset(found[best] if best else ()))


def _scatters(kernel: Kernel) -> bool:
    return any(store.index.vals() for _, store in kernel.stores())


def _strides(index: Expr, vector: str) -> bool:
    step = index.coefficient(vector)
    return not index.vals() and step is not None and step.value not in (0, 1)


def is_near(step: Expr | None) -> bool:
    """Whether lanes so many elements apart are taken from neighbouring registers."""
    return step is not None and step.value is not None and 1 < step.value <= MOST_APART


def woven(kernel: Kernel, line: Line, vector: str) -> str | None:
    """The axis along which a store writes all elements between its lanes, so that whole registers hold them.

    Before: `store b[2*i0 + i1], v3` with lanes along `i0`, and two points of `i1`. After: `i1`.
    """
    assert isinstance(line.rhs, Store)
    index, step = line.rhs.index, line.rhs.index.coefficient(vector)
    if line.rhs.join or index.vals() or step is None or not is_near(step):
        return None
    if sum(touches(other, line.rhs.buffer) for other in kernel.body) > 1:
        return None  # they are written later than where the store is
    kept = (axis for axis in kernel.space if axis.name not in kernel.reduced and axis.extent == step)
    return next((axis.name for axis in kept if index.coefficient(axis.name) == ONE), None)


def joined(kernel: Kernel, line: Line, vector: str) -> tuple[Line, ...]:
    """The stores that together write all elements between their lanes, in order; none if one is missing.

    Before: `store b[2*i0], v3` and `store b[2*i0 + 1], v4` with lanes along `i0`.
    """
    assert isinstance(line.rhs, Store)
    store, step = line.rhs, line.rhs.index.coefficient(vector)
    if (
        step is None
        or step.value is None
        or not is_near(step)
        or any(load.buffer == store.buffer for _, load in kernel.loads())
    ):
        return ()
    found: dict[int, Line] = {}
    for other, each in kernel.stores():
        apart = (each.index - store.index).value if each.buffer == store.buffer else None
        if apart is not None and abs(apart) < step.value and not each.join and not each.index.vals():
            found[apart] = other
    whole = len(found) == step.value and max(found) - min(found) == step.value - 1
    return tuple(found[apart] for apart in sorted(found)) if whole else ()


def touches(line: Line, buffer: str) -> bool:
    """Whether it loads from the buffer, or stores there."""
    return isinstance(line.rhs, Load | Store) and line.rhs.buffer == buffer


def told(kernel: Kernel, tiles: Tiling) -> tuple[Decision, ...]:
    """One decision for each access that is made in squares."""
    found: list[Decision] = []
    for line in kernel.body:
        if line.out in tiles.lines and isinstance(line.rhs, Load | Store):
            what = "read" if isinstance(line.rhs, Load) else "written"
            why = f"it is contiguous along {tiles.axis}: squares are {what} along that axis and transposed in registers"
            found.append(Decision("codegen.tile", (kernel.name, line.rhs.buffer), True, why))
    return tuple(found)


# ------------------------------------------------------------------------------------------- what strides all the same


def striding(kernel: Kernel, machine: Machine) -> float:
    """Nanoseconds that accesses take beyond contiguous ones, along the vector axis for which these are fewest.

    kernel: in canonical form. An access that strides touches a cache line for each element, or a part of one where the
    stride is short, in the nearest cache that holds the lines of one loop over the vector axis until the next one.
    Vectors along an axis of few points would be mostly empty.
    """
    long = [axis.name for axis in kernel.space if estimate(axis.extent) >= machine.lanes // 2]
    axes = long or [axis.name for axis in kernel.space]
    return min((_striding_along(kernel, name, machine) for name in axes), default=0.0)


def strides_somewhere(kernel: Kernel) -> bool:
    """True if along each axis some access strides: a quick look that keeps most kernels from being priced."""
    indices = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Load | Store)]
    for axis in reversed(kernel.space):
        neighbours = ((Var(axis.name),), 1)
        if all(axis.name not in index.vars() or neighbours in index.terms for index in indices):
            return False
    return True


def _loops_around(kernel: Kernel, index: Expr) -> frozenset[str]:
    """The axes for each point of which an access is made: a sweep that reduces runs anew for all that is kept."""
    if index.vars().isdisjoint(kernel.reduced):
        return index.vars()
    return index.vars().union(axis.name for axis in kernel.space if axis.name not in kernel.reduced)


def _striding_along(kernel: Kernel, axis: str, machine: Machine) -> float:
    """The same along one axis. Of a cache line that several accesses touch, each has a part of its own."""
    tiles = tiling(kernel, axis, machine.lanes, machine).lines
    idle: dict[tuple[object, ...], int] = {}
    points: dict[tuple[object, ...], int] = {}
    spent = 0.0
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.out not in tiles and _strides(line.rhs.index, axis):
            index, step = line.rhs.index, line.rhs.index.coefficient(axis)
            count = math.prod(max(1, estimate(kernel.ranges[name])) for name in _loops_around(kernel, index))
            spent += issuing(machine, (NEAR_COST if is_near(step) else GATHER_COST) * count, machine.cores)
            each = LINE if step is None else min(LINE, abs(estimate(step)) * line.dtype.itemsize)
            begin = index.at_zero
            place = begin if begin.value is None else begin.value * line.dtype.itemsize // each
            lines = type(line.rhs), line.rhs.buffer, index - begin, place
            points[lines] = count
            idle[lines] = idle.get(lines, each) - line.dtype.itemsize
    held = LINE * max(1, estimate(kernel.ranges[axis]))
    for lines, rest in idle.items():
        vain = max(0, rest) * points[lines]
        # A line of which a part is written is read before.
        spent += moving(machine, vain, vain if lines[0] is Store else 0, held, machine.cores)
    return spent
