"""Tiles: accesses that stride along the vector axis are made square by square, transposed in registers.

Where `o[300*i + j] = x[i + 200*j]` has its vectors along j, a load of x would gather. Instead W rows of W elements are
read along i and transposed, which makes vectors along j for W points of i. A store that strides is the same backwards:
W vectors are collected, transposed, and written as rows. In a kernel that reduces, the rows are those of W kept points, and
the squares follow one another along the innermost reduced axis, in each sweep that needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.codegen.collisions import scatters
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr
from pellucid.ir.nodes import Kernel, Load, Store, axes_of
from pellucid.machine import Machine
from pellucid.machine.work import estimate

# Rows of the squares: as many as the registers they are transposed in, of which AVX-512 has 32, or half of that.
SQUARES = (16, 32)


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
    if vector is None or vector in kernel.reduced or width > max(SQUARES) or scatters(kernel):
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
