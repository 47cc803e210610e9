"""What a kernel moves and computes at given sizes: different elements that it touches, and operations on floats.

Counts, not estimates: windows that overlap count their elements once. Where an index depends on values nobody can know
it before they are there, and each point counts as one element, up to the size of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, TypeAlias, cast

import torch

from pellucid.ir.attention import share_of_scores
from pellucid.ir.index import Expr, Sym, Val, Var
from pellucid.ir.nodes import Compute, Kernel, Line, Load, Reduce, Store, axes_of
from pellucid.ir.prefix import as_run

Strides: TypeAlias = Sequence[tuple[int, int]]
"""Steps through memory: (stride, how many places), in elements. Their sums are the elements that an access touches."""

LINE = 64
"""Bytes of a line of the cache."""

_NOT_ARITHMETIC = frozenset(("where", "cast", "round_bf16", "round_f16"))
_MOST_POINTS = 1 << 22  # that are listed one by one, where there is no formula


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of different elements, by buffer, that a call loads and stores; and its operations on floats.

    fetched: bytes of the lines of the cache that these elements lie in, more than those of elements that lie apart.
    rows: by buffer that is indexed by values, how many places these choose, as far as they lie apart.

    An operation is an operator of the loop language at one point, or one step of a reduction; `fma` counts as two.
    """

    loaded: Mapping[str, int]
    stored: Mapping[str, int]
    fetched: int
    rows: Mapping[str, int]
    flops: int


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store. start: the least element. strides: None where the index is not a sum of multiples of axes, with
    the elements themselves in `listed`, if there are not too many. points: how often it happens.
    """

    start: int
    strides: tuple[tuple[int, int], ...] | None
    points: int
    listed: Any = None

    @property
    def end(self) -> int:
        """One past the greatest element, of an access with strides."""
        return self.start + sum(abs(stride) * (extent - 1) for stride, extent in self.strides or ()) + 1


def traffic(kernel: Kernel, size: Callable[[Expr], int]) -> Traffic:
    """The traffic of one call of `kernel`. size: the number that a size expression stands for."""
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
            for found in _moved(line.rhs, loads, stores):
                found.setdefault(line.rhs.buffer, {})[index] = access
    flops = sum(flops_of(line) * _points(worked(line, scopes), extents) for line in kernel.body)
    flops = int(flops * share_of_scores(kernel, size))
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


def places(strides: Strides) -> int:
    """How many different sums there are of one multiple of each stride.

    >>> places([(4, 3), (1, 4)])  # a dense matrix of 3 x 4
    12
    >>> places([(1, 10), (1, 3)])  # windows of 3 that overlap
    12
    >>> places([(0, 5), (1, 4)])  # four elements, read five times
    4
    """
    steps = sorted((abs(stride), extent) for stride, extent in strides if stride and extent > 1)
    if any(extent == 0 for _, extent in strides):
        return 0
    count, span, step = 1, 0, 0  # so far: `count` places from 0 to `span`, all of them multiples of `step`
    for stride, extent in steps:
        dense = span == step * (count - 1)
        step = gcd(step, stride)
        if stride > span:  # blocks that lie apart
            count *= extent
            span += stride * (extent - 1)
        else:  # blocks that overlap: exact where they are dense, and end where the next one goes on
            span += stride * (extent - 1)
            filled = span // step + 1
            count = filled if dense else min(count * extent, filled)
    return count


def tensor_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes of the different elements of a tensor: one that is expanded counts what it was made from."""
    return places(list(zip(strides, shape, strict=True))) * itemsize


def worked(line: Line, scopes: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The axes at each point of which the work of a line is done; a reduction works at each point of its argument."""
    match line.rhs:
        case Reduce(_, arg, axes):
            return scopes[arg] | frozenset(axes)
        case _:
            return scopes[line.out]


def flops_of(line: Line) -> int:
    """Operations on floats at one point."""
    match line.rhs:
        case Compute(op):
            return (2 if op == "fma" else 1) if line.dtype.is_float and op not in _NOT_ARITHMETIC else 0
        case Reduce() | Store(join="add" | "mul" | "maximum" | "minimum"):
            return int(line.dtype.is_float)
        case _:
            return 0


def fetched_bytes(accesses: Sequence[Access], moved: int, numel: int, itemsize: int) -> int:
    """Bytes of the lines of the cache that accesses to a buffer touch, at the least. moved: of their elements.

    Of several, the one that touches most lines counts: they may touch the same ones.
    """
    lines = max((_lines(each.strides, itemsize) for each in accesses if each.strides is not None), default=0)
    return max(moved, min(lines * LINE, numel * itemsize))


def _lines(strides: Strides, itemsize: int) -> int:
    """Steps of less than a line stay in the lines that they span; larger ones reach others."""
    apart = [(abs(stride) * itemsize // LINE, extent) for stride, extent in strides if abs(stride) * itemsize >= LINE]
    near = sum(abs(stride) * itemsize * (extent - 1) for stride, extent in strides if abs(stride) * itemsize < LINE)
    return places([*apart, (1, -(-(near + itemsize) // LINE))])


def _rows(kernel: Kernel, scopes: Mapping[str, frozenset[str]], extents: Mapping[str, int]) -> dict[str, int]:
    """The points of accesses whose index depends on values, but for the axes along which it goes on from there."""
    found: dict[str, int] = {}
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.rhs.index.vals():
            apart = scopes[line.out] - set(line.rhs.index.vars())
            found[line.rhs.buffer] = max(found.get(line.rhs.buffer, 0), _points(apart, extents))
    return found


_Found: TypeAlias = dict[str, dict[Expr, Access]]


def _moved(rhs: Load | Store, loads: _Found, stores: _Found) -> tuple[_Found, ...]:
    """What an access adds to: a store that joins reads as well."""
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
    if points > _MOST_POINTS:
        return Access(0, None, points)
    return Access(0, None, points, _listed(index, axes, extents, size))


def _listed(index: Expr, axes: Sequence[str], extents: Mapping[str, int], size: Callable[[Expr], int]) -> torch.Tensor:
    """The elements of an access, one by one."""
    counters = {
        name: torch.arange(extents[name]).reshape([-1 if other == name else 1 for other in axes]) for name in axes
    }

    def value(atom: Sym | Var | Val) -> Any:
        return counters[atom.name] if isinstance(atom, Var) else size(Expr({(atom,): 1}))

    found: Any = index.evaluate(value)
    return torch.unique(torch.as_tensor(found))  # pyright: ignore


def _bytes(accesses: _Found, sizes: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    return {name: different(list(found.values()), sizes[name][0]) * sizes[name][1] for name, found in accesses.items()}


def different(accesses: Sequence[Access], numel: int) -> int:
    """How many elements of a buffer of `numel` accesses touch together."""
    return min(numel, _alone(accesses[0]) if len(accesses) == 1 else _together(accesses, numel))


def _together(accesses: Sequence[Access], numel: int) -> int:
    if numel <= _MOST_POINTS and all(each.strides is not None or each.listed is not None for each in accesses):
        touched = torch.zeros(numel, dtype=torch.bool)
        for each in accesses:
            _mark(touched, each)
        return int(touched.sum())
    if all(each.strides is not None for each in accesses):  # too large to mark: those that lie apart add up
        found, reached = 0, 0
        for each in sorted(accesses, key=lambda access: access.start):
            found += max(0, _alone(each) - max(0, reached - each.start))
            reached = max(reached, each.end)
        return found
    return sum(map(_alone, accesses))


def _alone(access: Access) -> int:
    if access.strides is not None:
        return places(access.strides)
    return access.points if access.listed is None else len(access.listed)


def _mark(touched: torch.Tensor, access: Access) -> None:
    """Mark the elements of an access; those outside the buffer are named by a masked load, and never touched."""
    if access.strides is None:
        touched[access.listed[(access.listed >= 0) & (access.listed < len(touched))]] = True
        return
    found = torch.zeros(access.end - access.start, dtype=torch.bool)
    found[0] = True
    for stride, extent in access.strides:
        done = 1
        while done < extent:  # twice as many at a time
            shift = abs(stride) * min(done, extent - done)
            found[shift:] |= found[: len(found) - shift].clone()
            done += min(done, extent - done)
    begin, end = max(0, access.start), min(len(touched), access.end)
    if begin < end:
        touched[begin:end] |= found[begin - access.start : end - access.start]


def _points(axes: Iterable[str], extents: Mapping[str, int]) -> int:
    return prod(extents[name] for name in axes)
