"""How tensors lie in memory, by sizes and strides that hold in every call."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.ir.index import ONE, ZERO, Expr
from pellucid.ir.nodes import View


def lies(view: View, order: Sequence[int]) -> bool:
    """True if a tensor is dense with its dimensions in this order, the last one innermost."""
    expected = ONE
    for dim in reversed(order):
        if view.shape[dim] != ONE and view.strides[dim] != expected:
            return False
        expected = expected * view.shape[dim]
    return True


def reshaped(view: View, shape: Sequence[Expr]) -> tuple[Expr, ...] | None:
    """The strides of a view of `view` that has another shape; None where elements do not lie evenly in every call.

    Dimensions that follow one another evenly are runs of elements, each of which dimensions of the view share out.
    """
    found: list[Expr] = []
    left = [*shape]
    for points, step in _runs(view):
        count = ONE
        while left and (count != points or left[-1] == ONE):
            found.insert(0, count * step)
            count = count * left.pop()
        if count != points:
            return None
    return None if left else tuple(found)


def _runs(view: View) -> list[tuple[Expr, Expr]]:
    """(elements, step) of the runs of a tensor, the last one first."""
    runs: list[tuple[Expr, Expr]] = []
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if runs and (extent == ONE or stride == runs[-1][0] * runs[-1][1]):
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    return runs or [(ONE, ZERO)]
