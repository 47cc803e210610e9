"""Scatters: stores at an index that depends on values, and the axes along which their points may collide.

Colliding points must be stored one after the other, or the result would depend on the number of threads. So a kernel
that scatters runs its colliding axes as loops inside the parallel one, which distributes the other axes over threads.
For the sum of rows `store add y[256*v + i1], g` these are the columns: each thread adds its columns of all rows.
"""

from __future__ import annotations

from itertools import pairwise

from pellucid.ir.index import Expr, Val, nonnegative, var
from pellucid.ir.nodes import CheckIndex, Kernel, Store, axes_of
from pellucid.machine.work import estimate


def colliding(kernel: Kernel) -> tuple[str, ...]:
    """The axes along which two points may store the same element, in space order; none if nothing is scattered."""
    depends = axes_of(kernel)
    found: set[str] = set()
    for line, store in kernel.stores():
        if store.index.vals():
            found |= depends[line.out] - (store.index.vars() if _is_radix(kernel, store) else frozenset())
    return tuple(axis.name for axis in kernel.space if axis.name in found)


def _is_radix(kernel: Kernel, store: Store) -> bool:
    """True if the index is a mixed-radix number whose digits are the axes and checked values, so points are distinct.

    That holds if the weight of each digit is at least the next smaller weight times the extent of that digit.
    """
    digits = _digits(kernel, store.index)
    if digits is None:
        return False
    digits.sort(key=lambda digit: -estimate(digit[0]))
    return all(nonnegative(weight - less * extent) for (weight, _), (less, extent) in pairwise(digits))


def _digits(kernel: Kernel, index: Expr) -> list[tuple[Expr, Expr]] | None:
    """(weight, extent) of each axis and each value in `index`; None if it is not a sum of these."""
    sizes = {line.out: line.rhs.size for line in kernel.body if isinstance(line.rhs, CheckIndex)}
    if not sizes.keys() >= index.vals():
        return None
    values = {f"@{name}": sizes[name] for name in index.vals()}
    index = index.substitute({Val(name): var(f"@{name}") for name in index.vals()})
    digits: list[tuple[Expr, Expr]] = []
    for name in sorted(index.vars()):
        weight = index.coefficient(name)
        if weight is None or weight.vars() or not nonnegative(weight - 1):
            return None
        digits.append((weight, values[name] if name in values else kernel.ranges[name]))
    return digits
