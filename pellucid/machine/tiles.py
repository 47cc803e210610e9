"""Tiles: accesses that stride along the vector axis are made square by square, transposed in registers.

Where `o[300*i + j] = x[i + 200*j]` has its vectors along j, a load of x would gather. Instead W rows of W elements are
read along i and transposed, which makes vectors along j for W points of i. A store that strides is the same backwards:
W vectors are collected, transposed, and written as rows. In a kernel that reduces, the rows are those of W kept points,
and the squares follow one another along the innermost reduced axis, in each sweep that needs them.

Code generation makes the squares; the scheduler asks what they leave, before it puts accesses into one kernel that no
order of its loops makes contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """
    lanes = machine.lanes
    prices = (
        sum(_apart(kernel, line, axis.name, machine) for line in _striding(kernel, axis.name, lanes, machine))
        for axis in kernel.space
    )
    return min(prices, default=0.0)


def strides_somewhere(kernel: Kernel) -> bool:
    """True if along each axis some access strides: a quick look that keeps most kernels from being priced."""
    indices = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Load | Store)]
    for axis in reversed(kernel.space):
        neighbours = ((Var(axis.name),), 1)
        if all(axis.name not in index.vars() or neighbours in index.terms for index in indices):
            return False
    return True


def _striding(kernel: Kernel, axis: str, lanes: int, machine: Machine) -> Iterator[Line]:
    tiles = tiling(kernel, axis, lanes, machine).lines
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.out not in tiles and _strides(line.rhs.index, axis):
            yield line


def _apart(kernel: Kernel, line: Line, axis: str, machine: Machine) -> float:
    assert isinstance(line.rhs, Load | Store)
    points = 1
    for name in line.rhs.index.vars():
        points *= max(1, estimate(kernel.ranges[name]))
    step = line.rhs.index.coefficient(axis)
    each = LINE if step is None else min(LINE, abs(estimate(step)) * line.dtype.itemsize)
    lines = LINE * max(1, estimate(kernel.ranges[axis]))
    # A line is read before a part of it is written.
    written = each * points if isinstance(line.rhs, Store) else 0
    threads = machine.cores
    return issuing(machine, GATHER_COST * points, threads) + moving(machine, each * points, written, lines, threads)
