"""Rewriting lines of kernel bodies: new names for values, new coordinates for axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from typing_extensions import assert_never

from pellucid.ir.index import ZERO, Atom, Expr, Val, Var, val, var
from pellucid.ir.nodes import (
    Axis,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Param,
    Reduce,
    Rhs,
    Store,
    operands,
)
from pellucid.ir.origin import merge


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A change of names and coordinates.

    values: new names of values, and of lines.
    axes: each changed axis as an expression over the new axes.
    pieces: the new axes that a reduced axis becomes, outermost first.
    ranges: extents of the new axes.
    """

    values: Mapping[str, str] = field(default_factory=dict[str, str])
    axes: Mapping[str, Expr] = field(default_factory=dict[str, Expr])
    pieces: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    ranges: Mapping[str, Expr] = field(default_factory=dict[str, Expr])

    def index(self, index: Expr) -> Expr:
        """`index` in the new names and coordinates."""
        if index.value is not None:
            return index
        mapping: dict[Atom, Expr] = {Var(name): form for name, form in self.axes.items()}
        for name in index.vals():
            if name in self.values:
                mapping[Val(name)] = val(self.values[name])
        return index.substitute(mapping, self.ranges)

    def line(self, line: Line) -> Line:
        """`line` in the new names and coordinates; the same object when nothing changes."""
        rhs, out = self.rhs(line.rhs), self.values.get(line.out, line.out)
        return line if rhs is line.rhs and out == line.out else Line(out, rhs, line.dtype, line.origin)

    def rhs(self, rhs: Rhs) -> Rhs:
        """The right-hand side of a line in the new names and coordinates."""
        rename = self.values.get
        match rhs:
            case Const():
                return rhs
            case IndexValue(index):
                return IndexValue(self.index(index)) if self.axes or index.vals() else rhs
            case CheckIndex(arg):
                return replace(rhs, arg=rename(arg, arg)) if arg in self.values else rhs
            case Load(buffer, index, mask, other):
                if not self.axes and mask not in self.values and not index.vals():
                    return rhs
                return Load(buffer, self.index(index), None if mask is None else rename(mask, mask), other)
            case Compute(op, args):
                if not any(arg in self.values for arg in args):
                    return rhs
                return Compute(op, tuple([rename(arg, arg) for arg in args]))
            case Reduce(op, arg, axes):
                new_axes = tuple([piece for axis in axes for piece in self.pieces.get(axis, (axis,))])
                return rhs if new_axes == axes and arg not in self.values else Reduce(op, rename(arg, arg), new_axes)
            case Store(buffer, index, arg, join):
                if not self.axes and arg not in self.values and not index.vals():
                    return rhs
                return Store(buffer, self.index(index), rename(arg, arg), join)
            case _:
                assert_never(rhs)

    def lines(self, body: Iterable[Line]) -> tuple[Line, ...]:
        """All lines of `body`, rewritten."""
        return tuple([self.line(line) for line in body]) if self.values or self.axes else tuple(body)


def index_of(rhs: Rhs) -> Expr | None:
    """The index expression of a line that has one."""
    return rhs.index if isinstance(rhs, IndexValue | Load | Store) else None


def indices(body: Iterable[Line]) -> Iterator[Expr]:
    """Every index expression of `body`."""
    for line in body:
        index = index_of(line.rhs)
        if index is not None:
            yield index


def make_kernel(name: str, space: Iterable[Axis], body: Iterable[Line], params: Mapping[str, Param]) -> Kernel:
    """A kernel whose parameters are the buffers that `body` touches, in order of first use."""
    body = tuple(body)
    used = dict.fromkeys(line.rhs.buffer for line in body if isinstance(line.rhs, Load | Store))
    return Kernel(name, tuple([params[buffer] for buffer in used]), tuple(space), body)


def row_major(axes: Iterable[Axis]) -> Expr:
    """The position among all points of `axes`, the last axis running fastest."""
    position = ZERO
    for axis in axes:
        position = position * axis.extent + var(axis.name)
    return position


def unique_name(stem: str, taken: set[str]) -> str:
    """`stem`, with a number if it is taken; the result is added to `taken`."""
    name, number = stem, 0
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def live_lines(body: Iterable[Line], dead_stores: frozenset[str] = frozenset()) -> tuple[Line, ...]:
    """The lines that the stores of `body` need, without stores into `dead_stores`.

    The origin of a removed store is added to the stored value, so that no FX node is lost.
    """
    needed: set[str] = set()
    inherited: dict[str, list[Line]] = {}
    kept: list[Line] = []
    for line in reversed(tuple(body)):
        match line.rhs:
            case Store(buffer, _, arg) if buffer in dead_stores:
                inherited.setdefault(arg, []).append(line)
                continue
            case Store():
                pass
            case _ if line.out not in needed:
                continue
            case _:
                pass
        needed.update(operands(line.rhs))
        heirs = inherited.get(line.out, ())
        origin = merge([line.origin, *(heir.origin for heir in heirs)]) if heirs else line.origin
        kept.append(line if origin == line.origin else replace(line, origin=origin))
    return tuple(reversed(kept))
