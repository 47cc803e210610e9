"""Images that are computed as several smaller ones, one after the other.

Phases (dilated convolutions): two pixels are terms of the same sum only if their positions differ by a multiple of the
dilation. The pixels with the same remainder form an image whose taps are adjacent. Pieces: parts of a line, each short
enough for a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from pellucid.codegen.names import map_indices
from pellucid.ir.index import ONE, Atom, Expr, Var, const, exact_div, var
from pellucid.ir.nodes import Axis, Kernel, Line


def in_phases(kernel: Kernel, axes: Collection[str], count: int) -> Kernel | None:
    """`kernel` with an axis of `count` phases around each of `axes`; None if phases would differ in size.

    before: `for i0 < 28, i1 < 3: load x[128*i0 + 256*i1]`
    after:  `for i0_phase < 2, i0 < 14, i1 < 3: load x[128*i0_phase + 256*i0 + 256*i1]`
    """
    if any(extent is None or extent % count for extent in (kernel.ranges[name].value for name in axes)):
        return None
    return _split(kernel, axes, count, phases=True)


def in_pieces(kernel: Kernel, axis: str, count: int) -> Kernel:
    """`kernel` with an axis of `count` pieces around `axis`, whose extent `count` divides.

    before: `for i0 < 28, i1 < 3: load x[128*i0 + 128*i1]`
    after:  `for i0_piece < 2, i0 < 14, i1 < 3: load x[1792*i0_piece + 128*i0 + 128*i1]`
    """
    return _split(kernel, (axis,), count, phases=False)


def _split(kernel: Kernel, axes: Collection[str], count: int, *, phases: bool) -> Kernel:
    space: list[Axis] = []
    positions: dict[Atom, Expr] = {}
    for axis in kernel.space:
        if axis.name not in axes:
            space.append(axis)
            continue
        points = exact_div(axis.extent, const(count))
        assert points is not None
        part = Axis(f"{axis.name}_{'phase' if phases else 'piece'}", const(count))
        space += [part, Axis(axis.name, points)]
        of_part, of_point = (ONE, part.extent) if phases else (points, ONE)
        positions[Var(axis.name)] = var(part.name) * of_part + var(axis.name) * of_point

    def moved(line: Line) -> Line:
        return Line(line.out, map_indices(line.rhs, lambda index: index.substitute(positions)), line.dtype, line.origin)

    return Kernel(kernel.name, kernel.params, tuple(space), tuple(map(moved, kernel.body)))
