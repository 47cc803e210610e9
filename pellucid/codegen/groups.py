"""Convolutions of several groups (`native/kernel/groups.h`), and gradients of their weights (`tap_gradients.h`).

A kernel has an axis of groups and one of the outputs of a group. The columns of a block are outputs of several groups,
which are adjacent in memory: so both axes are joined to one, and all else is as with a single group.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.codegen.blocks import Groups
from pellucid.codegen.names import map_indices
from pellucid.ir.contraction import find_contraction, find_groups
from pellucid.ir.index import ZERO, Atom, Expr, Var, const, floordiv, var
from pellucid.ir.nodes import Axis, Kernel, Line
from pellucid.machine import Machine


@dataclass(frozen=True, slots=True)
class Joined:
    """kernel: with one axis of columns. of_first: the same, except that each group reads the image of the first one."""

    kernel: Kernel
    of_first: Kernel
    groups: Groups | None


def join_groups(kernel: Kernel, machine: Machine) -> Joined:
    """`kernel` with one axis of columns in place of groups and their outputs; unchanged if it has no such axes.

    before:   `for i0 < 9, i1 < 32, i2 < 4, i3 < 8: load x[256*i0 + 8*i1 + i3], load w[32*i1 + 8*i2 + i3]`
    after:    `for i0 < 9, i2 < 128, i3 < 8: load x[256*i0 + 8*(i2 // 4) + i3], load w[8*i2 + i3]`
    of_first: `for i0 < 9, i2 < 128, i3 < 8: load x[256*i0 + i3], load w[8*i2 + i3]`
    """
    contraction = find_contraction(kernel)
    groups = contraction and find_groups(kernel, contraction)
    if not groups:
        return Joined(kernel, kernel, None)
    found, (count, outputs, channels) = groups
    (group,) = found.batch
    (column,) = found.columns or found.batch

    def joined(line: Line, image: Expr) -> Line:
        is_image = line.out == found.left.out
        if column == group and not is_image:
            return line
        position: dict[Atom, Expr] = {Var(group): image if is_image else ZERO}
        rhs = map_indices(line.rhs, lambda index: index.substitute(position))
        return Line(line.out, rhs, line.dtype, line.origin)

    columns = Axis(column, const(count * outputs))
    rest = [axis for axis in kernel.space if axis.name == column or axis.name != group]
    space = tuple(columns if axis.name == column else axis for axis in rest)
    together = max(1, min(machine.lanes // outputs, machine.lanes // channels))
    whole, of_first = (
        Kernel(kernel.name, kernel.params, space, tuple(joined(line, image) for line in kernel.body))
        for image in (floordiv(var(column), outputs), ZERO)
    )
    return Joined(whole, of_first, Groups(found.left.out, found.groups_are_rows, count, outputs, channels, together))
