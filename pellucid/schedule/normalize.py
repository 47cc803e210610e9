"""The form of kernels that fusion expects: value names unique in the program, no avoidable floor-div and mod."""

from __future__ import annotations

from dataclasses import replace

from pellucid.ir.index import ONE, Expr, FloorDiv, Mod, Var, exact_div, var
from pellucid.ir.nodes import Axis, Kernel, Program
from pellucid.schedule.rewrite import Rewrite, indices


def normalize(program: Program) -> Program:
    """Every kernel with unique value names and split axes.

    Before: `k1: v0 = load A[(i0 // 64) + 12*(i0 % 64)]` over `i0: 768`.
    After: `1:v0 = load A[i0.1 + 12*i0.0]` over `i0.1: 12, i0.0: 64`.
    """
    nodes = [
        split_axes(unique_values(node, position)) if isinstance(node, Kernel) else node
        for position, node in enumerate(program.nodes)
    ]
    return replace(program, nodes=tuple(nodes))


def unique_values(kernel: Kernel, position: int) -> Kernel:
    """`kernel` with value names that no other kernel of the program has."""
    names = {line.out: f"{position}:{line.out}" for line in kernel.body}
    return replace(kernel, body=Rewrite(values=names).lines(kernel.body))


def split_axes(kernel: Kernel) -> Kernel:
    """Split each axis whose extent a divisor in an index divides, so that the index is affine in the pieces."""
    while (found := _divided_axis(kernel)) is not None:
        kernel = _split(kernel, *found)
    return kernel


def _divided_axis(kernel: Kernel) -> tuple[Axis, Expr, Expr] | None:
    """An axis, and its (outer, inner) extents, that occurs alone under a floor-div or mod that divides its extent."""
    ranges = kernel.ranges
    for index in indices(kernel.body):
        if all(len(monomial) == 1 and isinstance(monomial[0], Var) for monomial, _ in index.terms if monomial):
            continue
        for atom in sorted(index.atoms(), key=repr):
            if isinstance(atom, FloorDiv | Mod) and len(atom.num.terms) == 1:
                axis = next((a for a in kernel.space if atom.num == var(a.name)), None)
                outer = exact_div(ranges[axis.name], atom.den) if axis else None
                if axis and outer is not None and outer != ONE and atom.den != ONE:
                    return axis, outer, atom.den
    return None


def _split(kernel: Kernel, axis: Axis, outer: Expr, inner: Expr) -> Kernel:
    names = {a.name for a in kernel.space}
    high, low = f"{axis.name}.1", f"{axis.name}.0"
    while high in names or low in names:
        high, low = f"{high}'", f"{low}'"
    pair = (Axis(high, outer), Axis(low, inner))
    space = tuple(piece for a in kernel.space for piece in (pair if a.name == axis.name else (a,)))
    rewrite = Rewrite(
        axes={axis.name: var(high) * inner + var(low)},
        pieces={axis.name: (high, low)},
        ranges={a.name: a.extent for a in space},
    )
    return replace(kernel, space=space, body=rewrite.lines(kernel.body))
