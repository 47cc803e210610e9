"""The memory layout of tensors, from sizes and strides that hold in every call."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.ir.index import ONE, ZERO, Expr
from pellucid.ir.nodes import View


def is_dense(view: View, order: Sequence[int]) -> bool:
    """True if a tensor is dense with its dimensions in this order, the last one innermost."""
    expected = ONE
    for dim in reversed(order):
        if view.shape[dim] != ONE and view.strides[dim] != expected:
            return False
        expected = expected * view.shape[dim]
    return True


def reshaped(view: View, shape: Sequence[Expr]) -> tuple[Expr, ...] | None:
    """The strides of `view` reshaped to `shape`; None unless, in every call, this needs no copy.

    Adjacent dimensions with matching strides form runs of evenly spaced elements; the dimensions of `shape` must split
    each run exactly.
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
    """(elements, stride) of the runs of a tensor, the innermost one first."""
    runs: list[tuple[Expr, Expr]] = []
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if runs and (extent == ONE or stride == runs[-1][0] * runs[-1][1]):
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    return runs or [(ONE, ZERO)]
