"""Simplify the iteration space of a kernel: fewer, longer axes, and no avoidable division in an index.

None of this changes what the kernel computes.
"""

from __future__ import annotations

from collections.abc import Mapping

from pellucid.codegen.names import indices, map_indices
from pellucid.ir.index import ZERO, Atom, Expr, FloorDiv, Mod, Var, const, exact_div, var
from pellucid.ir.nodes import Axis, Compute, Const, Kernel, Line, Load, Reduce, Rhs, Store, axes_of
from pellucid.machine.work import estimate


def simplify(kernel: Kernel, lanes: int) -> Kernel:
    """Drop axes that need no loop, split axes under a division, reverse axes that are read backwards, merge axes that
    every index treats as one, sort axes by stride.

    before: `for i0 < 16384, i1 < 512: load x[512*i0 + i1]`
    after:  `for i0 < 8388608: load x[i0]`
    """
    return sort(merge(reverse(split(drop_unused(drop_unit(drop_empty(kernel))), lanes))))


def drop_empty(kernel: Kernel) -> Kernel:
    """Drop axes of extent 0: lines that depend on them never run, and reductions over them are constant.

    before: `for i0 < 4, i1 < 0: a = load x[i0 + i1]; b = sum a over i1; store y[i0], b`
    after:  `for i0 < 4: b = 0.0; store y[i0], b`
    """
    empty = {axis.name for axis in kernel.space if axis.extent == ZERO}
    if not empty:
        return kernel
    depends = axes_of(kernel)
    body: list[Line] = []
    for line in kernel.body:
        if isinstance(line.rhs, Reduce) and not empty.isdisjoint(line.rhs.axes):
            body.append(Line(line.out, Const(_IDENTITY[line.rhs.op]), line.dtype, line.origin))
        elif empty.isdisjoint(depends[line.out]):
            body.append(line)
    space = tuple(axis for axis in kernel.space if axis.name not in empty)
    return Kernel(kernel.name, kernel.params, space, tuple(body))


# Lowering produces none of the last four over an empty axis.
_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "max": 0, "min": 0, "argmax": 0, "argmin": 0}


def drop_unit(kernel: Kernel) -> Kernel:
    """Drop axes of extent 1."""
    unit = [axis.name for axis in kernel.space if axis.extent == const(1)]
    space = tuple(axis for axis in kernel.space if axis.name not in unit)
    return _substitute(kernel, space, {Var(name): ZERO for name in unit}, {name: () for name in unit})


def drop_unused(kernel: Kernel) -> Kernel:
    """Drop axes that no line depends on or reduces over."""
    used = set(kernel.reduced).union(*axes_of(kernel).values())
    return Kernel(kernel.name, kernel.params, tuple(axis for axis in kernel.space if axis.name in used), kernel.body)


def split(kernel: Kernel, lanes: int) -> Kernel:
    """Split each axis i that occurs as `i // c` or `i % c` into `c*outer + inner`, if c divides its extent.

    Pieces shorter than a vector would gain nothing and are not split off.

    before: `for i0 < 512: load x[(i0 // 64)]`
    after:  `for i0o < 8, i0i < 64: load x[i0o]`
    """
    for _ in range(8):
        for name, size in _split_candidates(kernel, lanes):
            tried = _split_axis(kernel, name, size)
            if _divisions(tried) < _divisions(kernel):
                kernel = tried
                break
        else:
            return kernel
    return kernel


def reverse(kernel: Kernel) -> Kernel:
    """Reverse kept axes with an access of stride -1 and none of stride 1, since vectors need stride 1.

    before: `for i0 < 8, i1 < 4: store y[4*i0 + i1], load x[8*i1 + 7 - i0]`
    after:  `for i0 < 8, i1 < 4: store y[28 - 4*i0 + i1], load x[8*i1 + i0]`
    """
    if any(store.index.vals() for _, store in kernel.stores()):
        return kernel  # colliding points are stored in order
    accesses = [line.rhs.index for line in kernel.body if isinstance(line.rhs, Load | Store)]
    for axis in kernel.space:
        steps = [step.value for index in accesses if (step := index.coefficient(axis.name)) is not None]
        if axis.name not in kernel.reduced and -1 in steps and 1 not in steps:
            kernel = _substitute(kernel, kernel.space, {Var(axis.name): axis.extent - 1 - var(axis.name)}, {})
    return kernel


def merge(kernel: Kernel) -> Kernel:
    """Merge pairs of axes that every index treats as one: outer stride = inner stride * inner extent.

    A reduced and a kept axis are never merged. The order of the axes matters for argmax and scatters, so there only
    adjacent axes are merged.
    """
    while True:
        for outer in kernel.space:
            for inner in kernel.space:
                if outer is not inner and _mergeable(kernel, outer, inner):
                    kernel = _merge_pair(kernel, outer, inner)
                    break
            else:
                continue
            break
        else:
            return kernel


def sort(kernel: Kernel) -> Kernel:
    """Kept axes first, by decreasing stride; then the reduced ones, likewise."""
    if any(isinstance(line.rhs, Reduce) and line.rhs.op in ("argmax", "argmin") for line in kernel.body):
        return kernel
    if any(store.index.vals() for _, store in kernel.stores()):
        return kernel  # colliding points are stored in the order of the space
    steps = {axis.name: _step(kernel, axis.name) for axis in kernel.space}
    reduced = kernel.reduced
    space = sorted(kernel.space, key=lambda axis: (axis.name in reduced, -steps[axis.name]))
    return Kernel(kernel.name, kernel.params, tuple(space), kernel.body)


def _step(kernel: Kernel, name: str) -> int:
    """The maximum stride along the axis: of stores, or of loads if no store depends on it."""
    stores = [store.index for _, store in kernel.stores() if name in store.index.vars()]
    loads = [load.index for _, load in kernel.loads() if name in load.index.vars()]
    longest = 0
    for index in stores or loads:
        step = index.coefficient(name)
        size = 1 << 40 if step is None else estimate(step)
        longest = max(longest, abs(size))
    return longest


def _mergeable(kernel: Kernel, outer: Axis, inner: Axis) -> bool:
    reduced = kernel.reduced
    if (outer.name in reduced) != (inner.name in reduced):
        return False
    names = [axis.name for axis in kernel.space]
    ordered = any(isinstance(line.rhs, Reduce) and line.rhs.op in ("argmax", "argmin") for line in kernel.body)
    ordered = (ordered and outer.name in reduced) or any(store.index.vals() for _, store in kernel.stores())
    if ordered and names.index(outer.name) + 1 != names.index(inner.name):
        return False
    for index in indices(kernel):
        long, short = index.coefficient(outer.name), index.coefficient(inner.name)
        if long is None or short is None or long != short * inner.extent:
            return False
    return True


def _merge_pair(kernel: Kernel, outer: Axis, inner: Axis) -> Kernel:
    merged = Axis(inner.name, outer.extent * inner.extent)
    space = tuple(merged if axis is inner else axis for axis in kernel.space if axis is not outer)
    return _substitute(kernel, space, {Var(outer.name): ZERO}, {outer.name: ()})


def _split_candidates(kernel: Kernel, lanes: int) -> list[tuple[str, Expr]]:
    """(axis, size of the inner piece) for each division of an axis."""
    found: list[tuple[str, Expr]] = []
    ranges = kernel.ranges
    for index in indices(kernel):
        for atom in sorted(index.atoms(), key=repr):
            if not isinstance(atom, FloorDiv | Mod):
                continue
            for name in sorted(atom.num.vars()):
                step = atom.num.coefficient(name)
                size = None if step is None else exact_div(atom.den, step)
                fits = size is not None and size != ranges[name] and exact_div(ranges[name], size) is not None
                if size is not None and fits and (size.value is None or size.value >= lanes):
                    found.append((name, size))
    return found


def _split_axis(kernel: Kernel, name: str, size: Expr) -> Kernel:
    outer, inner = f"{name}o", f"{name}i"
    space: list[Axis] = []
    for axis in kernel.space:
        if axis.name == name:
            pieces = exact_div(axis.extent, size)
            assert pieces is not None
            space += [Axis(outer, pieces), Axis(inner, size)]
        else:
            space.append(axis)
    return _substitute(kernel, tuple(space), {Var(name): var(outer) * size + var(inner)}, {name: (outer, inner)})


def _divisions(kernel: Kernel) -> int:
    return sum(isinstance(atom, FloorDiv | Mod) for index in indices(kernel) for atom in index.atoms())


def _substitute(
    kernel: Kernel, space: tuple[Axis, ...], mapping: Mapping[Atom, Expr], renamed: Mapping[str, tuple[str, ...]]
) -> Kernel:
    """The kernel over `space`; `renamed` says which axes stand for an old one in reductions."""
    ranges = {axis.name: axis.extent for axis in space}

    def change(rhs: Rhs) -> Rhs:
        if isinstance(rhs, Reduce):
            axes = tuple(new for old in rhs.axes for new in renamed.get(old, (old,)))
            return Reduce(rhs.op, rhs.arg, axes) if axes else _of_one(rhs)
        return map_indices(rhs, lambda index: index.substitute(mapping, ranges))

    body = tuple(Line(line.out, change(line.rhs), line.dtype, line.origin) for line in kernel.body)
    return Kernel(kernel.name, kernel.params, space, body)


def _of_one(reduction: Reduce) -> Rhs:
    """A reduction over a single element: the element itself, or its position."""
    return Const(0) if reduction.op in ("argmax", "argmin") else Compute("cast", (reduction.arg,))
