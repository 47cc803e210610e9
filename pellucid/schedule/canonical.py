"""The canonical form of a kernel, so that equivalent kernels are equal up to names of buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pellucid.ir.index import ZERO, Expr, var
from pellucid.ir.nodes import Axis, Kernel, Line, Load, Reduce, Store
from pellucid.ir.ops import REDUCTIONS
from pellucid.machine.work import estimate
from pellucid.schedule.rewrite import Rewrite, indices


def canonical_kernel(kernel: Kernel) -> Kernel:
    """`kernel` with as few axes as possible, in canonical order, and with canonical names.

    Kept axes precede reduced ones, and outer ones (of large stride) inner ones. Axes that every index traverses as one
    are merged.

    Before: `load A[512*b + j]`, `store B[512*b + j]` over `j: 512, b: 8`. After: `A[i0]`, `B[i0]` over `i0: 4096`.
    """
    space, forms = _merge_axes(_ordered_space(kernel), indices(kernel.body), frozenset(kernel.reduced))
    return _renamed(kernel, space, forms)


def _ordered_space(kernel: Kernel) -> list[Axis]:
    """The axes that the body uses, kept ones first, each group by decreasing stride."""
    used: set[str] = set(kernel.reduced)
    for index in indices(kernel.body):
        used |= index.vars()
    if any(store.join and store.index.vals() for _, store in kernel.stores()):
        used |= kernel.ranges.keys()  # it runs at each point
    reduced = set(kernel.reduced)
    kept = [axis for axis in kernel.space if axis.name in used - reduced]
    folded = [axis for axis in kernel.space if axis.name in reduced]
    stores = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Store)]
    loads = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Load)]
    if any(isinstance(line.rhs, Reduce) and not REDUCTIONS[line.rhs.op].combine for line in kernel.body):
        return [*_by_stride(kept, stores), *folded]  # argmax counts along the reduced axes in the given order
    return [*_by_stride(kept, stores), *_by_stride(folded, [*stores, *loads])]


def _by_stride(axes: list[Axis], candidates: list[Expr]) -> list[Axis]:
    """`axes` by decreasing stride in the first of the index expressions that depend on most of them."""
    if len(axes) < 2 or not candidates:
        return axes
    names = {axis.name for axis in axes}
    index = max(candidates, key=lambda index: len(index.vars() & names))

    def stride(axis: Axis) -> int:
        coefficient = index.coefficient(axis.name)
        return 0 if coefficient is None or coefficient.vals() or coefficient.vars() else estimate(coefficient)

    return sorted(axes, key=stride, reverse=True)


def _merge_axes(
    space: list[Axis], body_indices: Iterable[Expr], reduced: frozenset[str]
) -> tuple[list[Axis], dict[str, Expr]]:
    """The axes after merging neighbours wherever every index allows it, and the old axes in terms of the new ones.

    `a*stride_a + b*stride_b` with `stride_a == extent_b * stride_b` is `stride_b` times one longer axis, which
    takes the name of `b`.
    """
    found = list(dict.fromkeys(body_indices))
    strides = {axis.name: [index.coefficient(axis.name) for index in found] for axis in space}
    forms: dict[str, Expr] = {}
    result: list[Axis] = []
    for axis in reversed(space):
        inner = result[-1] if result else None
        if inner is not None and (axis.name in reduced) == (inner.name in reduced):
            joined = [None if s is None else s * inner.extent for s in strides[inner.name]]
            if None not in joined and joined == strides[axis.name]:
                result[-1] = Axis(inner.name, axis.extent * inner.extent)
                forms[axis.name] = ZERO
                continue
        result.append(axis)
    return result[::-1], forms


def _renamed(kernel: Kernel, space: list[Axis], forms: dict[str, Expr]) -> Kernel:
    """`kernel` over `space`, with axes `i0, i1, ...`, values `v0, v1, ...` and stores `st0, st1, ...`."""
    names = {axis.name: f"i{number}" for number, axis in enumerate(space)}
    axes = {**forms, **{name: var(new) for name, new in names.items() if name != new}}
    pieces = {**dict.fromkeys(forms, tuple[str, ...]()), **{name: (new,) for name, new in names.items()}}
    values: dict[str, str] = {}
    counts = {"v": 0, "st": 0}
    for line in kernel.body:
        kind = "st" if isinstance(line.rhs, Store) else "v"
        values[line.out] = f"{kind}{counts[kind]}"
        counts[kind] += 1
    new_space = tuple(Axis(names[axis.name], axis.extent) for axis in space)
    rewrite = Rewrite(values, axes, pieces, {axis.name: axis.extent for axis in new_space})
    order = {axis.name: number for number, axis in enumerate(new_space)}
    body = [rewrite.line(line) for line in kernel.body]
    return replace(kernel, space=new_space, body=tuple(_sorted_axes(line, order) for line in body))


def _sorted_axes(line: Line, order: dict[str, int]) -> Line:
    """List the axes of a reduction in the order of the space."""
    if not isinstance(line.rhs, Reduce):
        return line
    axes = tuple(sorted(line.rhs.axes, key=lambda name: order[name]))
    return line if axes == line.rhs.axes else replace(line, rhs=replace(line.rhs, axes=axes))
