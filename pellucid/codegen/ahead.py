"""Software prefetching in kernels that are tiled in squares.

The rows of a square are in different pages, sixteen or thirty-two of each tensor: more streams than hardware
prefetchers follow. The computation of one square fills the out-of-order window, so the loads of the next one start
late. A load that is contiguous along the vector axis therefore also prefetches the data of the square after the next.
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
# Instructions per vector from which on one square fills the out-of-order window. With fewer the kernel mostly copies:
# several squares fit in the window, and fetching past the ends of chunks only adds memory traffic.
WINDOW_WORK = 12


def fetched_ahead(
    kernel: Kernel, choice: VectorChoice, contiguous: frozenset[str], steps: float, machine: Machine
) -> tuple[dict[str, Expr], tuple[Decision, ...]]:
    """The loads of a tiled kernel that prefetch, with the index of what they fetch, and the decisions.

    contiguous: loads and stores of adjacent elements. steps: vector instructions of the whole kernel.
    """
    tile, width = choice.tiles.axis, choice.width
    if tile is None or choice.axis is None:
        return {}, ()
    # Consecutive squares follow one another along this axis.
    along = tile if tile in kernel.reduced else choice.axis
    moved = kernel_work(kernel, 0).working_set
    vectors = max(1, prod(estimate(axis.extent) for axis in kernel.space)) / width
    if moved <= machine.own_caches or (along != tile and steps / vectors < WINDOW_WORK):
        return {}, ()
    later: dict[Atom, Expr] = {Var(along): var(along) + SQUARES_AHEAD * width}
    ahead = {
        line.out: load.index.substitute(later)
        for line, load in kernel.loads()
        if line.out in contiguous - choice.tiles.lines and {along, tile} <= load.index.vars() and not load.index.vals()
    }
    why = f"its rows are not adjacent, and all its {moved} bytes exceed the L2 caches: prefetched two squares ahead"
    return ahead, tuple(Decision("codegen.ahead", (kernel.name, name), True, why) for name in ahead)
