"""The meaning of a loop nest as a program: it runs point by point, vector by vector, as the C++ made of it does.

Lines mean what `ir/interp.py` says. What is wrong with a nest shows here without a compiler: a point that is left out
or counted twice, a value that is read before it is there, iterations that are not independent of one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from typing_extensions import assert_never

from pellucid.codegen.nest import (
    BLOCK,
    Accumulate,
    Advance,
    Call,
    CloseBlock,
    Define,
    FillTile,
    Finish,
    Item,
    Keep,
    Kind,
    Loop,
    Nest,
    Parallel,
    Part,
    Put,
    Recall,
    Scratch,
    Start,
    StartBlocks,
    StartTile,
    Step,
    WriteTile,
    steps_of,
)
from pellucid.errors import InternalError
from pellucid.ir.interp import (
    Frame,
    fault,
    index_of,
    memory_of,
    positions,
    reduce_dims,
    run_lines,
    size_of,
    store,
    value_of,
)
from pellucid.ir.nodes import Line, Load, Reduce, Store
from pellucid.ir.types import TORCH_DTYPES

Tensor = torch.Tensor


def run_nest(nest: Nest, buffers: Mapping[str, Tensor], symbols: Mapping[str, int], *, backwards: bool = False) -> None:
    """Run `nest` on flat tensors, one per parameter. backwards: the last parallel iteration first.

    Raises IndexError where an index check fails, InternalError where the nest does what none may do.
    """
    runner = _Runner(nest, memory_of(nest.name, nest.params, buffers, symbols), symbols, backwards)
    runner.items(nest.body)


@dataclass(slots=True)
class _Points:
    """Points of a reduction: their places in the reduced axes seen as one, and their values, along dimension 0."""

    places: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])

    def take(self, other: _Points) -> None:
        """Add the points of `other`, which has none then."""
        self.places += other.places
        self.values += other.values
        other.places, other.values = [], []


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of an axis that an iteration, or one turn of a loop over blocks, has."""

    axis: str
    first: int
    last: int


class _Runner:
    """Runs one nest. What an accumulator collects are the points themselves; `Finish` reduces them in their order."""

    def __init__(self, nest: Nest, memory: dict[str, Tensor], symbols: Mapping[str, int], backwards: bool) -> None:
        self.nest, self.backwards = nest, backwards
        self.axes = [axis.name for axis in nest.space]
        self.extents = {axis.name: size_of(axis.extent, symbols) for axis in nest.space}
        steps = list(steps_of(nest.body))
        self.lines = {step.line.out: step.line for step in steps}
        self.tile = {step.line.out: step.axis for step in steps if isinstance(step, FillTile | StartTile)}
        self.abreast = {step.line.out: step.abreast for step in steps if isinstance(step, StartBlocks)}
        self.pieces: dict[Part, _Piece] = {}
        self.fixed: set[str] = set()
        self.sums: dict[str, _Points] = {}
        self.blocks: dict[str, dict[int, _Points]] = {}
        self.squares: dict[str, dict[int, Tensor]] = {}
        self.scratch: dict[str, dict[tuple[int, ...], Tensor]] = {}
        self.memory, self.symbols = memory, dict(symbols)
        points = {axis: positions(self.axes, axis, 0, 1) for axis in self.axes}
        self.frame = Frame(nest.name, self.memory, self.symbols, points, {})

    # ------------------------------------------------------------------------------------------ loops

    def items(self, items: Iterable[Item]) -> None:
        for item in items:
            match item:
                case Parallel():
                    self.parallel(item)
                case Loop(Kind.BLOCKS):
                    for first, last in _cut(0, self.extents[item.axis], item.step):
                        self.choose(Part.BLOCK, _Piece(item.axis, first, last))
                        self.items(item.body)
                case Loop():
                    for first, last in _cut(*self.range(item.axis, item.part), item.step):
                        self.fix(item.axis, first, last)
                        self.items(item.body)
                    self.fixed.discard(item.axis)
                case _:
                    self.step(item)

    def parallel(self, loop: Parallel) -> None:
        iterations = range(math.prod(size_of(counter.count, self.symbols) for counter in loop.counters))
        for iteration in reversed(iterations) if self.backwards else iterations:
            rest = iteration
            for counter in reversed(loop.counters):
                rest, mine = divmod(rest, size_of(counter.count, self.symbols))
                step = size_of(counter.step, self.symbols)
                first, last = mine * step, min((mine + 1) * step, self.extents[counter.axis])
                if counter.part is Part.WHOLE:
                    self.fix(counter.axis, first, last)
                else:
                    self.choose(counter.part, _Piece(counter.axis, first, last))
            self.items(loop.body)

    def fix(self, axis: str, first: int, last: int) -> None:
        """From here on, these are the positions along an axis."""
        self.fixed.add(axis)
        self.frame.points[axis] = positions(self.axes, axis, first, last)

    def choose(self, part: Part, piece: _Piece) -> None:
        self.pieces[part] = piece
        self.symbols |= {part.first: piece.first, part.last: piece.last}

    def range(self, axis: str, part: Part) -> tuple[int, int]:
        """The first point of a part of an axis, and the one after its last."""
        if part is Part.WHOLE:
            return 0, self.extents[axis]
        piece = self.pieces[part]
        if piece.axis != axis:
            raise InternalError(f"nest {self.nest.name}: {part.value} is a piece of {piece.axis}, not of {axis}")
        return piece.first, piece.last

    def first(self, axis: str) -> int:
        """The first position along an axis: of its loop, or where only a piece of it is chosen so far, of that."""
        if axis in self.fixed:
            return int(self.frame.points[axis].flatten()[0])
        return next(piece.first for piece in self.pieces.values() if piece.axis == axis)

    # ------------------------------------------------------------------------------------------ steps

    def step(self, step: Step) -> None:
        line, values = step.line, self.frame.values
        match step:
            case Define():
                values[line.out] = self.from_square(line) if line.out in self.tile else value_of(self.frame, line)
            case Put(line, once):
                if all(self.first(axis) == 0 for axis in once):
                    self.put(line)
            case Call():
                self.call(step)
            case FillTile(line, axis):
                self.squares[line.out] = {at: self.row(line, axis, at) for at in range(*self.range(axis, Part.BLOCK))}
            case StartTile():
                self.squares[line.out] = {}
            case WriteTile(line, axis):
                self.write_square(line, axis)
            case Start():
                self.sums[line.out] = _Points()
            case StartBlocks():
                self.blocks[line.out] = {}
            case Accumulate():
                self.accumulate(line)
            case Advance():
                self.accumulate(line)
                values[line.out] = self.so_far(line)
            case CloseBlock():
                self.blocks[line.out].setdefault(self.column(line), _Points()).take(self.sums[line.out])
            case Finish():
                values[line.out] = self.reduced(line)
            case Scratch():
                self.scratch[line.out] = {}
            case Keep():
                self.scratch[line.out][self.place()] = values[line.out]
            case Recall():
                if self.place() not in self.scratch[line.out]:
                    raise fault(self.frame, line, "recalls what was not kept")
                values[line.out] = self.scratch[line.out][self.place()]
            case _:
                assert_never(step)

    def place(self) -> tuple[int, ...]:
        """Where this is, in all loops around it."""
        return tuple(self.first(axis) for axis in self.axes if axis in self.fixed)

    def put(self, line: Line) -> None:
        assert isinstance(line.rhs, Store)
        value = self.frame.values[line.rhs.arg]
        if line.out in self.tile:
            self.squares[line.out][self.first(self.tile[line.out])] = value
        else:
            store(self.frame, line, value)

    def call(self, call: Call) -> None:
        """The lines at all points of the iteration; its memory holds NaN where they store nothing."""
        points = dict(self.frame.points)
        for axis in self.axes:
            if axis not in self.fixed:
                part = next((part for part, piece in self.pieces.items() if piece.axis == axis), Part.WHOLE)
                points[axis] = positions(self.axes, axis, *self.range(axis, part))
        self.memory[BLOCK] = torch.full([call.size], torch.nan)
        run_lines(replace(self.frame, points=points, values={}), call.lines)

    # ------------------------------------------------------------------------------------------ squares

    def in_row(self, axis: str, row: int) -> Frame:
        """The same points, in a row of a square."""
        return replace(self.frame, points={**self.frame.points, axis: positions(self.axes, axis, row, row + 1)})

    def row(self, line: Line, axis: str, row: int) -> Tensor:
        """A vector of a square as it lies in memory; what a mask will hide may lie outside."""
        assert isinstance(line.rhs, Load)
        index, memory = index_of(self.in_row(axis, row), line.rhs.index), self.memory[line.rhs.buffer]
        inside = (index >= 0) & (index < memory.numel())
        if line.rhs.mask is None and not bool(inside.all()):
            raise fault(self.frame, line, f"a square reaches outside of {memory.numel()} elements")
        return memory[torch.where(inside, index, 0).flatten()].reshape(index.shape).to(TORCH_DTYPES[line.dtype])

    def from_square(self, line: Line) -> Tensor:
        """The value of a load whose square was read."""
        assert isinstance(line.rhs, Load)
        row = self.squares[line.out][self.first(self.tile[line.out])]
        if line.rhs.mask is None:
            return row
        return torch.where(self.frame.values[line.rhs.mask], row, torch.full_like(row, line.rhs.other))

    def write_square(self, line: Line, axis: str) -> None:
        rows, wanted = self.squares[line.out], range(*self.range(axis, Part.BLOCK))
        if rows.keys() != set(wanted):
            raise fault(self.frame, line, f"its square has {len(rows)} of {len(wanted)} rows")
        for row, value in rows.items():
            store(self.in_row(axis, row), line, value)

    # ------------------------------------------------------------------------------------------ reductions

    def column(self, line: Line) -> int:
        """Which blocks of a sum these are: of sums that advance abreast, each vector has its own."""
        return self.first(str(self.nest.vector)) if self.abreast[line.out] else 0

    def accumulate(self, line: Line) -> None:
        assert isinstance(line.rhs, Reduce)
        points, place = self.frame.points, torch.zeros([1] * len(self.axes), dtype=torch.int64)
        for axis in self.axes:
            if axis in line.rhs.axes:
                place = place * self.extents[axis] + points[axis]
        dims, value = self.dims(line.rhs), self.frame.values[line.rhs.arg]
        shape = [points[self.axes[dim]].numel() if dim in dims else size for dim, size in enumerate(value.shape)]
        collected = self.sums[line.out]
        collected.places.append(place.flatten())
        collected.values.append(value.expand(shape).movedim(dims, [*range(len(dims))]).flatten(0, len(dims) - 1))

    def reduced(self, line: Line) -> Tensor:
        """The value of a reduction, of points that are all there, once each."""
        assert isinstance(line.rhs, Reduce)
        points = self.collected(line)
        total = math.prod(self.extents[axis] for axis in line.rhs.axes)
        places = torch.cat([torch.zeros(0, dtype=torch.int64), *points.places])
        order = places.argsort()
        if not torch.equal(places[order], torch.arange(total)):
            raise fault(self.frame, line, f"reduces {places.numel()} points, not each of {total} once")
        dims = self.dims(line.rhs)
        nothing = torch.zeros(
            [0] + [1] * (len(self.axes) - len(dims)), dtype=TORCH_DTYPES[self.lines[line.rhs.arg].dtype]
        )
        values = torch.cat(points.values)[order] if points.values else nothing
        result = reduce_dims(line.rhs.op, values, [0]).squeeze(0)
        for dim in dims:
            result = result.unsqueeze(dim)
        return result

    def so_far(self, line: Line) -> Tensor:
        """The value of a prefix sum: of all points from the first to this one, in their order."""
        assert isinstance(line.rhs, Reduce)
        points, (dim,) = self.sums[line.out], self.dims(line.rhs)
        if not torch.equal(torch.cat(points.places), torch.arange(len(points.places))):
            raise fault(self.frame, line, "a prefix sum takes points in another order than theirs")
        return reduce_dims(line.rhs.op, torch.cat(points.values), [0]).squeeze(0).unsqueeze(dim)

    def collected(self, line: Line) -> _Points:
        """The points of a reduction so far: those of its closed blocks, if it has blocks."""
        if line.out not in self.abreast:
            return self.sums[line.out]
        if line.out in self.sums and self.sums[line.out].places:
            raise fault(self.frame, line, "its last block was not closed")
        return self.blocks[line.out].get(self.column(line), _Points())

    def dims(self, rhs: Reduce) -> list[int]:
        """The dimensions of the axes that are reduced."""
        return [dim for dim, axis in enumerate(self.axes) if axis in rhs.axes]


def _cut(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """The range in pieces of `step`, of which the last one may be shorter."""
    for at in range(first, last, step):
        yield at, min(at + step, last)
