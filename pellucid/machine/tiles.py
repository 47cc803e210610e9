"""Tiles: accesses that are strided along the vector axis are done in squares, transposed in registers.

If `o[300*i + j] = x[i + 200*j]` has its vectors along j, a load of x would gather. Instead W rows of W elements are
read along i and transposed, which yields vectors along j for W points of i. A strided store does the reverse: W vectors
are collected, transposed, and written as rows. In a kernel with reductions the rows are those of W kept points, and
squares follow one another along the innermost reduced axis, in each sweep that needs them.

Strides of two to four elements need no squares: the lanes are picked from as many adjacent registers.

Code generation uses `tiling`; the scheduler asks for `strided_cost`, the cost of the strided accesses that remain,
before it fuses accesses that no loop order makes contiguous.
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

# Rows of a square: each takes a register during the transposition; AVX-512 has 32.
SQUARES = (16, 32)

GATHER_COST = 3.0
"""Instructions for each lane of a gather or scatter."""
MAX_SHORT_STRIDE = 4
"""Maximum stride, in elements, of accesses whose lanes are picked from adjacent registers."""
SHORT_STRIDE_COST = 0.5
"""Instructions for each lane of such an access."""
INTERLEAVED_COST = 0.25
"""Instructions for each lane of a strided store if the elements between its lanes are stored with it."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """axis: the accesses `lines` are contiguous along it, and strided along the vector axis; None for no tiles."""

    axis: str | None = None
    lines: frozenset[str] = frozenset()


def tiling(kernel: Kernel, vector: str | None, width: int, machine: Machine) -> Tiling:
    """The tiles of a kernel with `width` lanes along `vector`, a kept axis; of all axes the one with most accesses.

    A masked load reads the whole square, as far as it is inside the buffer, and selects afterwards. Hence the kernel
    must not write to the buffer, and its size must be known.
    """
    if vector is None or vector in kernel.reduced or width > max(SQUARES) or _scatters(kernel):
        return Tiling()
    if estimate(kernel.ranges[vector]) < width // 2:
        return Tiling()  # most of each square would be empty, and its stores masked
    params = {param.name: param for param in kernel.params}
    everywhere = frozenset(axis.name for axis in kernel.space)
    # In a kernel with reductions, squares are in its sweeps, along the innermost loop.
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
                # A store in place would come after the loads of later points, a store with `join` reads memory itself,
                # and a store that does not depend on all axes is executed once only.
                fits = buffer not in loaded and not join and depends[line.out] == everywhere
                fits = fits and not interleaved_axis(kernel, line, vector)
            case _:
                continue
        # A row wider than two registers, a square in more than four parts, gains nothing.
        fits = fits and width * params[buffer].dtype.itemsize <= 2 * machine.isa.register_bytes
        if fits and _is_strided(index, vector):
            for other in along:
                if index.coefficient(other) == ONE and estimate(kernel.ranges[other]) >= width // 2:
                    found.setdefault(other, []).append(line.out)
    best = max(found, key=lambda name: len(found[name]), default=None)
    return Tiling(best, frozenset(found[best] if best else ()))


def _scatters(kernel: Kernel) -> bool:
    return any(store.index.vals() for _, store in kernel.stores())


def _is_strided(index: Expr, vector: str) -> bool:
    step = index.coefficient(vector)
    return not index.vals() and step is not None and step.value not in (0, 1)


def is_short_stride(step: Expr | None) -> bool:
    """Whether lanes with this stride are picked from adjacent registers."""
    return step is not None and step.value is not None and 1 < step.value <= MAX_SHORT_STRIDE


def interleaved_axis(kernel: Kernel, line: Line, vector: str) -> str | None:
    """The axis along which a strided store fills the gaps between its lanes, so that whole registers can be stored.

    Before: `store b[2*i0 + i1], v3` with lanes along `i0`, and two points of `i1`. After: `i1`.
    """
    assert isinstance(line.rhs, Store)
    index, step = line.rhs.index, line.rhs.index.coefficient(vector)
    if line.rhs.join or index.vals() or step is None or not is_short_stride(step):
        return None
    if sum(touches(other, line.rhs.buffer) for other in kernel.body) > 1:
        return None  # the elements are written after the loop over the axis, not where the store is
    kept = (axis for axis in kernel.space if axis.name not in kernel.reduced and axis.extent == step)
    return next((axis.name for axis in kept if index.coefficient(axis.name) == ONE), None)


def interleaved_stores(kernel: Kernel, line: Line, vector: str) -> tuple[Line, ...]:
    """The stores that together fill the gaps between their lanes, in order; none if one is missing.

    Before: `store b[2*i0], v3` and `store b[2*i0 + 1], v4` with lanes along `i0`.
    """
    assert isinstance(line.rhs, Store)
    store, step = line.rhs, line.rhs.index.coefficient(vector)
    if (
        step is None
        or step.value is None
        or not is_short_stride(step)
        or any(load.buffer == store.buffer for _, load in kernel.loads())
    ):
        return ()
    found: dict[int, Line] = {}
    for other, each in kernel.stores():
        offset = (each.index - store.index).value if each.buffer == store.buffer else None
        if offset is not None and abs(offset) < step.value and not each.join and not each.index.vals():
            found[offset] = other
    whole = len(found) == step.value and max(found) - min(found) == step.value - 1
    return tuple(found[offset] for offset in sorted(found)) if whole else ()


def touches(line: Line, buffer: str) -> bool:
    """Whether the line loads from the buffer or stores to it."""
    return isinstance(line.rhs, Load | Store) and line.rhs.buffer == buffer


def tile_decisions(kernel: Kernel, tiles: Tiling) -> tuple[Decision, ...]:
    """One decision for each access that is done in squares."""
    found: list[Decision] = []
    for line in kernel.body:
        if line.out in tiles.lines and isinstance(line.rhs, Load | Store):
            what = "read" if isinstance(line.rhs, Load) else "written"
            why = f"it is contiguous along {tiles.axis}: squares are {what} along that axis and transposed in registers"
            found.append(Decision("codegen.tile", (kernel.name, line.rhs.buffer), True, why))
    return tuple(found)


# ------------------------------------------------------------------------------- the strided accesses that remain


def strided_cost(kernel: Kernel, machine: Machine) -> float:
    """Nanoseconds by which strided accesses exceed contiguous ones, along the cheapest vector axis.

    kernel: in canonical form. A strided access touches a cache line for each element, or a part of a line if the stride
    is short, in the nearest cache that holds the lines of a whole loop over the vector axis until the next such loop.
    Axes of few points are not considered, since their vectors would be mostly empty.
    """
    long = [axis.name for axis in kernel.space if estimate(axis.extent) >= machine.lanes // 2]
    axes = long or [axis.name for axis in kernel.space]
    return min((_strided_cost_along(kernel, name, machine) for name in axes), default=0.0)


def strided_along_all_axes(kernel: Kernel) -> bool:
    """True if each axis has a strided access: a quick test that spares most kernels the call of `strided_cost`."""
    indices = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Load | Store)]
    for axis in reversed(kernel.space):
        contiguous = ((Var(axis.name),), 1)
        if all(axis.name not in index.vars() or contiguous in index.terms for index in indices):
            return False
    return True


def _loops_around(kernel: Kernel, index: Expr) -> frozenset[str]:
    """The axes for each point of which an access runs: a reduction's sweep is repeated for every kept point."""
    if index.vars().isdisjoint(kernel.reduced):
        return index.vars()
    return index.vars().union(axis.name for axis in kernel.space if axis.name not in kernel.reduced)


def _strided_cost_along(kernel: Kernel, axis: str, machine: Machine) -> float:
    """Like `strided_cost`, with vectors along `axis`. Accesses to the same cache lines share the cost of these."""
    tiles = tiling(kernel, axis, machine.lanes, machine).lines
    unused: dict[tuple[object, ...], int] = {}  # bytes of each touched line that no access needs
    points: dict[tuple[object, ...], int] = {}
    spent = 0.0
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.out not in tiles and _is_strided(line.rhs.index, axis):
            index, step = line.rhs.index, line.rhs.index.coefficient(axis)
            count = math.prod(max(1, estimate(kernel.ranges[name])) for name in _loops_around(kernel, index))
            lane_cost = SHORT_STRIDE_COST if is_short_stride(step) else GATHER_COST
            spent += issuing(machine, lane_cost * count, machine.cores)
            each = LINE if step is None else min(LINE, abs(estimate(step)) * line.dtype.itemsize)
            begin = index.at_zero
            position = begin if begin.value is None else begin.value * line.dtype.itemsize // each
            lines = type(line.rhs), line.rhs.buffer, index - begin, position
            points[lines] = count
            unused[lines] = unused.get(lines, each) - line.dtype.itemsize
    held = LINE * max(1, estimate(kernel.ranges[axis]))
    for lines, rest in unused.items():
        wasted = max(0, rest) * points[lines]
        # A line that is written in part is read first.
        spent += moving(machine, wasted, wasted if lines[0] is Store else 0, held, machine.cores)
    return spent
