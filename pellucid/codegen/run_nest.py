"""An interpreter of loop nests: it runs them point by point, vector by vector, as the generated C++ does.

Lines have the semantics of `ir/interp.py`. This finds errors of a nest without a compiler: a point that is missing or
reduced twice, a value that is read before it is computed, iterations that depend on one another.
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

    Raises IndexError if an index check fails, InternalError if the nest is invalid.
    """
    runner = _Runner(nest, memory_of(nest.name, nest.params, buffers, symbols), symbols, backwards)
    runner.items(nest.body)


@dataclass(slots=True)
class _Points:
    """Points of a reduction: their indices in the flattened reduced axes, and their values, along dimension 0."""

    indices: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])

    def take(self, other: _Points) -> None:
        """Move the points of `other` to these."""
        self.indices += other.indices
        self.values += other.values
        other.indices, other.values = [], []


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of an axis that a parallel iteration, or an iteration of a loop over blocks, covers."""

    axis: str
    first: int
    last: int


class _Runner:
    """Runs one nest. Accumulators collect the points themselves; `Finish` reduces them in their order."""

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
        """Set the current positions along an axis."""
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
        """The first position along an axis: of its current loop step, or of the chosen piece outside of that loop."""
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
                self.scratch[line.out][self.point()] = values[line.out]
            case Recall():
                if self.point() not in self.scratch[line.out]:
                    raise fault(self.frame, line, "recalls what was not kept")
                values[line.out] = self.scratch[line.out][self.point()]
            case _:
                assert_never(step)

    def point(self) -> tuple[int, ...]:
        """The current positions of all enclosing loops."""
        return tuple(self.first(axis) for axis in self.axes if axis in self.fixed)

    def put(self, line: Line) -> None:
        assert isinstance(line.rhs, Store)
        value = self.frame.values[line.rhs.arg]
        if line.out in self.tile:
            self.squares[line.out][self.first(self.tile[line.out])] = value
        else:
            store(self.frame, line, value)

    def call(self, call: Call) -> None:
        """Run the lines at all points of the iteration; elements of the local buffer that they do not store are NaN."""
        points = dict(self.frame.points)
        for axis in self.axes:
            if axis not in self.fixed:
                part = next((part for part, piece in self.pieces.items() if piece.axis == axis), Part.WHOLE)
                points[axis] = positions(self.axes, axis, *self.range(axis, part))
        self.memory[BLOCK] = torch.full([call.size], torch.nan)
        run_lines(replace(self.frame, points=points, values={}), call.lines)

    # ------------------------------------------------------------------------------------------ squares

    def in_row(self, axis: str, row: int) -> Frame:
        """The current points, with `axis` at one row of a square."""
        return replace(self.frame, points={**self.frame.points, axis: positions(self.axes, axis, row, row + 1)})

    def row(self, line: Line, axis: str, row: int) -> Tensor:
        """A row of a square, without its mask; elements that the mask excludes may be out of bounds."""
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
        """The key of a sum's blocks: if vectors are summed abreast, each of them has its own blocks."""
        return self.first(str(self.nest.vector)) if self.abreast[line.out] else 0

    def accumulate(self, line: Line) -> None:
        assert isinstance(line.rhs, Reduce)
        points, index = self.frame.points, torch.zeros([1] * len(self.axes), dtype=torch.int64)
        for axis in self.axes:
            if axis in line.rhs.axes:
                index = index * self.extents[axis] + points[axis]
        dims, value = self.dims(line.rhs), self.frame.values[line.rhs.arg]
        shape = [points[self.axes[dim]].numel() if dim in dims else size for dim, size in enumerate(value.shape)]
        collected = self.sums[line.out]
        collected.indices.append(index.flatten())
        collected.values.append(value.expand(shape).movedim(dims, [*range(len(dims))]).flatten(0, len(dims) - 1))

    def reduced(self, line: Line) -> Tensor:
        """The value of a reduction; each of its points must have been collected once."""
        assert isinstance(line.rhs, Reduce)
        points = self.collected(line)
        total = math.prod(self.extents[axis] for axis in line.rhs.axes)
        indices = torch.cat([torch.zeros(0, dtype=torch.int64), *points.indices])
        order = indices.argsort()
        if not torch.equal(indices[order], torch.arange(total)):
            raise fault(self.frame, line, f"reduces {indices.numel()} points, not each of {total} once")
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
        """The value of a prefix sum: the reduction of all points from the first to this one, in order."""
        assert isinstance(line.rhs, Reduce)
        points, (dim,) = self.sums[line.out], self.dims(line.rhs)
        if not torch.equal(torch.cat(points.indices), torch.arange(len(points.indices))):
            raise fault(self.frame, line, "a prefix sum does not add its points in order")
        return reduce_dims(line.rhs.op, torch.cat(points.values), [0]).squeeze(0).unsqueeze(dim)

    def collected(self, line: Line) -> _Points:
        """The points collected so far: those of closed blocks, if the reduction has blocks."""
        if line.out not in self.abreast:
            return self.sums[line.out]
        if line.out in self.sums and self.sums[line.out].indices:
            raise fault(self.frame, line, "its last block was not closed")
        return self.blocks[line.out].get(self.column(line), _Points())

    def dims(self, rhs: Reduce) -> list[int]:
        """The dimensions of the reduced axes."""
        return [dim for dim, axis in enumerate(self.axes) if axis in rhs.axes]


def _cut(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """The range in pieces of `step`; the last one may be shorter."""
    for at in range(first, last, step):
        yield at, min(at + step, last)
