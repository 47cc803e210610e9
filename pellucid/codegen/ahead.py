"""Loads that are asked for before they are needed, in kernels that go square by square.

The rows of a square lie in different pages, sixteen or thirty-two of each tensor, which is more than processors follow
by themselves; and what is computed for one square fills their windows, so that the loads of the next one start late.
A load that is contiguous along the vector axis therefore also fetches what the square after the next one needs.
"""

from __future__ import annotations

from math import prod

from pellucid.codegen.vector import VectorChoice
from pellucid.ir.decision import Decision
from pellucid.ir.index import Atom, Expr, Var, var
from pellucid.ir.nodes import Kernel
from pellucid.machine import Machine, kernel_work
from pellucid.machine.work import estimate

SQUARES_AHEAD = 2
# Instructions for each vector from which on a square fills the window: less is copying, of which several squares fit
# in it, and where fetching beyond the ends of chunks only adds to what is moved.
WINDOW_WORK = 12


def fetched_ahead(
    kernel: Kernel, choice: VectorChoice, near: frozenset[str], steps: float, machine: Machine
) -> tuple[dict[str, Expr], tuple[Decision, ...]]:
    """The loads of a tiled kernel that fetch ahead, with the index of what they fetch; and why.

    near: loads and stores whose lanes lie side by side. steps: vector instructions of the whole kernel.
    """
    tile, width = choice.tiles.axis, choice.width
    if tile is None or choice.axis is None:
        return {}, ()
    # Square follows square along this axis.
    along = tile if tile in kernel.reduced else choice.axis
    moved = kernel_work(kernel, 0).working_set
    vectors = max(1, prod(estimate(axis.extent) for axis in kernel.space)) / width
    if moved <= machine.own_caches or (along != tile and steps / vectors < WINDOW_WORK):
        return {}, ()
    later: dict[Atom, Expr] = {Var(along): var(along) + SQUARES_AHEAD * width}
    ahead = {
        line.out: load.index.substitute(later)
        for line, load in kernel.loads()
        if line.out in near - choice.tiles.lines and {along, tile} <= load.index.vars() and not load.index.vals()
    }
    why = f"its rows lie apart, and the second caches do not hold the {moved} bytes of all: fetched two squares ahead"
    return ahead, tuple(Decision("codegen.ahead", (kernel.name, name), True, why) for name in ahead)
