"""Windows whose taps lie several pixels apart, as several windows whose taps are neighbours.

Pixels of an image whose places differ by no multiple of that distance never meet in a sum: those of equal remainder are
a smaller image, a phase, and its convolution has the same weights.
"""

from __future__ import annotations

from collections.abc import Collection

from pellucid.codegen.names import map_indices
from pellucid.ir.index import Atom, Expr, Var, const, var
from pellucid.ir.nodes import Axis, Kernel, Line


def in_phases(kernel: Kernel, axes: Collection[str], count: int) -> Kernel | None:
    """`kernel` with an axis of `count` phases around each of `axes`; None where a phase would have more points.

    before: `for i0 < 28, i1 < 3: load x[128*i0 + 256*i1]`
    after:  `for i0_phase < 2, i0 < 14, i1 < 3: load x[128*i0_phase + 256*i0 + 256*i1]`
    """
    extents = [kernel.ranges[name].value for name in axes]
    if any(extent is None or extent % count for extent in extents):
        return None
    points = {name: const(extent // count) for name, extent in zip(axes, extents, strict=True) if extent is not None}
    space: list[Axis] = []
    for axis in kernel.space:
        split = axis.name in points
        space += [Axis(_phase(axis.name), const(count)), Axis(axis.name, points[axis.name])] if split else [axis]
    places: dict[Atom, Expr] = {Var(name): var(_phase(name)) + var(name) * count for name in axes}

    def moved(line: Line) -> Line:
        return Line(line.out, map_indices(line.rhs, lambda index: index.substitute(places)), line.dtype, line.origin)

    return Kernel(kernel.name, kernel.params, tuple(space), tuple(map(moved, kernel.body)))


def _phase(axis: str) -> str:
    return f"{axis}_phase"
