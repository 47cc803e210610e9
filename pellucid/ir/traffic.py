"""Memory traffic and work of a kernel at given sizes: distinct elements that it accesses, floating-point operations.

Exact counts where possible: overlapping windows count their elements once. An index that depends on values is unknown
before execution, so each point counts as one element, up to the size of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, TypeAlias, cast

import torch

from pellucid.ir.attention import visible_share
from pellucid.ir.index import Expr, Sym, Val, Var
from pellucid.ir.nodes import Compute, Kernel, Line, Load, Reduce, Store, axes_of
from pellucid.ir.prefix import as_run

Strides: TypeAlias = Sequence[tuple[int, int]]
"""Axes of an access: (stride, extent), in elements. The sums of their offsets are the elements that it accesses."""

LINE = 64
"""Bytes of a cache line."""

_NOT_ARITHMETIC = frozenset(("where", "cast", "round_bf16", "round_f16"))
_MAX_LISTED_POINTS = 1 << 22  # enumerated one by one, for indices that are not affine


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of distinct elements, by buffer, that a call loads and stores; and its floating-point operations.

    fetched: bytes of the cache lines that contain these elements: more than those of the elements where these are not
    adjacent. rows: by buffer that is indexed by values, the number of positions that these select, counting each cache
    line at most once.

    An operation is an operator of the loop language at one point, or one step of a reduction; `fma` counts as two.
    """

    loaded: Mapping[str, int]
    stored: Mapping[str, int]
    fetched: int
    rows: Mapping[str, int]
    flops: int


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store. start: the lowest element. strides: None where the index is not affine; then the elements are in
    `listed`, unless there are too many. points: how often it is executed.
    """

    start: int
    strides: tuple[tuple[int, int], ...] | None
    points: int
    listed: Any = None

    @property
    def end(self) -> int:
        """One past the highest element, of an access with strides."""
        return self.start + sum(abs(stride) * (extent - 1) for stride, extent in self.strides or ()) + 1


def traffic(kernel: Kernel, size: Callable[[Expr], int]) -> Traffic:
    """The traffic of one call of `kernel`. size: evaluates a size expression."""
    kernel = as_run(kernel)
    extents = {axis.name: size(axis.extent) for axis in kernel.space}
    scopes = axes_of(kernel)
    sizes = {param.name: (size(param.numel), param.dtype.itemsize) for param in kernel.params}
    loads: _Found = {}
    stores: _Found = {}
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store):
            index = line.rhs.index
            access = _access(index, extents, scopes[line.out], size)
            for found in _touched(line.rhs, loads, stores):
                found.setdefault(line.rhs.buffer, {})[index] = access
    flops = sum(flops_of(line) * _points(work_axes(line, scopes), extents) for line in kernel.body)
    flops = int(flops * visible_share(kernel, size))
    loaded, stored = _bytes(loads, sizes), _bytes(stores, sizes)
    fetched = sum(
        fetched_bytes(list(each.values()), moved[name], *sizes[name])
        for found, moved in ((loads, loaded), (stores, stored))
        for name, each in found.items()
    )
    rows = {
        name: min(count, -(-max(loaded.get(name, 0), stored.get(name, 0)) // LINE))
        for name, count in _rows(kernel, scopes, extents).items()
    }
    return Traffic(loaded, stored, fetched, rows, flops)


def distinct_offsets(strides: Strides) -> int:
    """The number of distinct sums of one multiple of each stride, the factor being less than its extent.

    >>> distinct_offsets([(4, 3), (1, 4)])  # a dense matrix of 3 x 4
    12
    >>> distinct_offsets([(1, 10), (1, 3)])  # windows of 3 that overlap
    12
    >>> distinct_offsets([(0, 5), (1, 4)])  # four elements, read five times
    4
    """
    steps = sorted((abs(stride), extent) for stride, extent in strides if stride and extent > 1)
    if any(extent == 0 for _, extent in strides):
        return 0
    count, span, step = 1, 0, 0  # so far: `count` offsets from 0 to `span`, all of them multiples of `step`
    for stride, extent in steps:
        dense = span == step * (count - 1)
        step = gcd(step, stride)
        if stride > span:  # disjoint blocks
            count *= extent
            span += stride * (extent - 1)
        else:  # overlapping blocks: exact where they are dense
            span += stride * (extent - 1)
            filled = span // step + 1
            count = filled if dense else min(count * extent, filled)
    return count


def tensor_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes of the distinct elements of a tensor: an expanded tensor counts the elements that it repeats once."""
    return distinct_offsets(list(zip(strides, shape, strict=True))) * itemsize


def work_axes(line: Line, scopes: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The axes that a line is executed over; a reduction is executed at each point of its argument."""
    match line.rhs:
        case Reduce(_, arg, axes):
            return scopes[arg] | frozenset(axes)
        case _:
            return scopes[line.out]


def flops_of(line: Line) -> int:
    """Floating-point operations at one point."""
    match line.rhs:
        case Compute(op):
            return (2 if op == "fma" else 1) if line.dtype.is_float and op not in _NOT_ARITHMETIC else 0
        case Reduce() | Store(join="add" | "mul" | "maximum" | "minimum"):
            return int(line.dtype.is_float)
        case _:
            return 0


def fetched_bytes(accesses: Sequence[Access], moved: int, numel: int, itemsize: int) -> int:
    """A lower bound of the bytes of cache lines that accesses to a buffer touch. moved: bytes of their elements.

    Only the access that touches most lines is counted: the others may touch the same lines.
    """
    lines = max((_lines(each.strides, itemsize) for each in accesses if each.strides is not None), default=0)
    return max(moved, min(lines * LINE, numel * itemsize))


def _lines(strides: Strides, itemsize: int) -> int:
    """Strides below a line touch the lines that they span; larger ones skip lines."""
    far = [(abs(stride) * itemsize // LINE, extent) for stride, extent in strides if abs(stride) * itemsize >= LINE]
    near = sum(abs(stride) * itemsize * (extent - 1) for stride, extent in strides if abs(stride) * itemsize < LINE)
    return distinct_offsets([*far, (1, -(-(near + itemsize) // LINE))])


def _rows(kernel: Kernel, scopes: Mapping[str, frozenset[str]], extents: Mapping[str, int]) -> dict[str, int]:
    """By buffer, the points of accesses whose index depends on values, without the axes that occur in the index."""
    found: dict[str, int] = {}
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.rhs.index.vals():
            choosing = scopes[line.out] - set(line.rhs.index.vars())
            found[line.rhs.buffer] = max(found.get(line.rhs.buffer, 0), _points(choosing, extents))
    return found


_Found: TypeAlias = dict[str, dict[Expr, Access]]


def _touched(rhs: Load | Store, loads: _Found, stores: _Found) -> tuple[_Found, ...]:
    """The accesses that `rhs` belongs to: a store that joins also loads."""
    return (loads,) if isinstance(rhs, Load) else (loads, stores) if rhs.join else (stores,)


def _access(index: Expr, extents: Mapping[str, int], scope: Iterable[str], size: Callable[[Expr], int]) -> Access:
    points = _points(scope, extents)
    if index.vals() or not points:
        return Access(0, None, points)
    axes = sorted(index.vars())
    linear = {name: index.coefficient(name) for name in axes}
    rest = index
    for name in axes:
        rest = rest.without(name)
    affine = all(found is not None and not found.vars() for found in linear.values())
    if affine:
        steps = tuple((size(cast(Expr, linear[name])), extents[name]) for name in axes)
        lowest = size(rest) + sum(min(0, stride * (extent - 1)) for stride, extent in steps)
        return Access(lowest, steps, points)
    if points > _MAX_LISTED_POINTS:
        return Access(0, None, points)
    return Access(0, None, points, _listed(index, axes, extents, size))


def _listed(index: Expr, axes: Sequence[str], extents: Mapping[str, int], size: Callable[[Expr], int]) -> torch.Tensor:
    """All elements of an access, sorted."""
    counters = {
        name: torch.arange(extents[name]).reshape([-1 if other == name else 1 for other in axes]) for name in axes
    }

    def value(atom: Sym | Var | Val) -> Any:
        return counters[atom.name] if isinstance(atom, Var) else size(Expr({(atom,): 1}))

    found: Any = index.evaluate(value)
    return torch.unique(torch.as_tensor(found))  # pyright: ignore


def _bytes(accesses: _Found, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {
        name: distinct_elements(list(found.values()), sizes[name][0]) * sizes[name][1]
        for name, found in accesses.items()
    }


def distinct_elements(accesses: Sequence[Access], numel: int) -> int:
    """The number of elements of a buffer of `numel` that the accesses touch together."""
    return min(numel, _elements_of_one(accesses[0]) if len(accesses) == 1 else _elements_of_all(accesses, numel))


def _elements_of_all(accesses: Sequence[Access], numel: int) -> int:
    if numel <= _MAX_LISTED_POINTS and all(each.strides is not None or each.listed is not None for each in accesses):
        touched = torch.zeros(numel, dtype=torch.bool)
        for each in accesses:
            _mark(touched, each)
        return int(touched.sum())
    if all(each.strides is not None for each in accesses):  # too large to mark: disjoint ranges add up
        found, reached = 0, 0
        for each in sorted(accesses, key=lambda access: access.start):
            found += max(0, _elements_of_one(each) - max(0, reached - each.start))
            reached = max(reached, each.end)
        return found
    return sum(map(_elements_of_one, accesses))


def _elements_of_one(access: Access) -> int:
    if access.strides is not None:
        return distinct_offsets(access.strides)
    return access.points if access.listed is None else len(access.listed)


def _mark(touched: torch.Tensor, access: Access) -> None:
    """Mark the elements of an access; those outside the buffer belong to a masked load, and are never accessed."""
    if access.strides is None:
        touched[access.listed[(access.listed >= 0) & (access.listed < len(touched))]] = True
        return
    found = torch.zeros(access.end - access.start, dtype=torch.bool)
    found[0] = True
    for stride, extent in access.strides:
        done = 1
        while done < extent:  # doubles each time
            shift = abs(stride) * min(done, extent - done)
            found[shift:] |= found[: len(found) - shift].clone()
            done += min(done, extent - done)
    begin, end = max(0, access.start), min(len(touched), access.end)
    if begin < end:
        touched[begin:end] |= found[begin - access.start : end - access.start]


def _points(axes: Iterable[str], extents: Mapping[str, int]) -> int:
    return prod(extents[name] for name in axes)
