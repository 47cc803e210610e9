"""Turn a kernel and its plan into an explicit loop nest: which line is in which loop, in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pellucid.codegen.nest import (
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
    WriteTile,
)
from pellucid.codegen.plan import PAIRWISE_BLOCK, ROWS_ABREAST, SHORT_SUM, Plan
from pellucid.codegen.sweeps import Sweep
from pellucid.ir.nodes import Axis, Line, Reduce, Store, axes_of, operands


def nest(plan: Plan) -> Nest:
    """The loop nest of a plan: loop-invariant lines, then the parallel loop.

    Lines over kept axes are in the outermost loop where their operands are known; lines that depend on a reduction come
    after its sweep. Stores come last in their loop, so that no load of the same point follows them.
    """
    kernel, space = plan.kernel, plan.kernel.space
    if plan.blocks is not None:
        space = (*space, *(Axis(name, plan.blocks.ranges[name]) for name in plan.blocks.inner))
    body = (Parallel(plan.counters, (_attend(plan),)),) if plan.rows is not None else _Builder(plan).function()
    vector = None if plan.rows is not None else plan.vector
    return Nest(kernel.name, kernel.params, space, vector, plan.width if vector else 1, body)


def _attend(plan: Plan) -> Call:
    scopes = axes_of(plan.kernel)
    widest = max((line for line, _ in plan.kernel.stores()), key=lambda line: len(scopes[line.out]))
    return Call("attend", widest, plan.called, 0)


class _Builder:
    """Builds the nest of one plan. Levels: 0 is the function, 1 the parallel loop, then one per axis `inside` it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.depends = axes_of(plan.kernel)
        self.lines = {line.out: line for line in plan.kernel.body}
        self.reduced = frozenset(plan.reduced)
        around = (*plan.colliding, plan.inner, *plan.whole, plan.outer_tile)
        self.inside = tuple(axis for axis in around if axis is not None)
        self.innermost = 1 + len(self.inside)
        prefix = plan.prefix
        # The prefix sum by the name of its total, which an `Advance` computes inside the loop.
        self.growing = {} if prefix is None else {prefix.total.out: prefix}
        self.level = self._levels()

    def _levels(self) -> dict[str, int]:
        """The level of each line that does not run in a sweep."""
        level: dict[str, int] = {}
        for line in self.plan.kernel.body:
            axes = self.depends[line.out]
            if axes & self.reduced:
                continue
            own = max((2 + k for k, axis in enumerate(self.inside) if axis in axes), default=1 if axes else 0)
            if isinstance(line.rhs, Reduce) or line.out in self.growing:
                own = self.innermost
            elif isinstance(line.rhs, Store):
                own = max(own, 1)
            below = (level.get(name, 0) for name in operands(line.rhs) if not self.depends[name] & self.reduced)
            level[line.out] = max([own, *below])
        return level

    def function(self) -> tuple[Item, ...]:
        blocks, counters = self.plan.blocks, self.plan.counters
        if blocks is None:
            return (*self._defines(0, 0), Parallel(counters, self._level_body(1)))
        total = blocks.contraction.total
        if blocks.stored:
            return (Parallel(counters, (Call("contract", total, self.plan.called, 0),)),)
        block = Call("contract", total, self.plan.called, blocks.height * blocks.stride)
        return (*self._defines(0, 0), Parallel(counters, (block, *self._level_body(1))))

    def _level_body(self, level: int) -> tuple[Item, ...]:
        """The body of one of the loops over kept axes."""
        if level == self.innermost:
            return self._kept_point(level)
        if self.plan.abreast:
            return self._abreast(level)
        axis = self.inside[level - 1]
        tiled = level + 1 == self.innermost and axis == self.plan.tile
        opened, closed = self._squares(self.lines if tiled else ())
        kind = Kind.VECTOR if axis == self.plan.vector else Kind.SERIAL
        part = next((part for part, (name, _) in self.plan.pieces.items() if name == axis), Part.WHOLE)
        loop = Loop(kind, axis, self._level_body(level + 1), self._step(kind), part)
        opened += [Start(prefix.total) for prefix in self.growing.values() if prefix.axis == axis]
        return (*self._defines(level, 0), *opened, loop, *closed, *self._puts(level))

    def _squares(self, names: Iterable[str]) -> tuple[list[Item], list[Item]]:
        """The steps for the squares of the lines `names` before a block of the tile axis, and after it."""
        squares = [line for line in self.plan.kernel.body if line.out in self.plan.tiled.intersection(names)]
        axis = str(self.plan.tile)
        opened = [StartTile(line, axis) if isinstance(line.rhs, Store) else FillTile(line, axis) for line in squares]
        return [*opened], [WriteTile(line, axis) for line in squares if isinstance(line.rhs, Store)]

    def _step(self, kind: Kind) -> int:
        return self.plan.width if kind is Kind.VECTOR else 1

    def _kept_point(self, level: int) -> tuple[Item, ...]:
        """The body at one point (or vector) of all kept axes: the sweeps, and the lines between them."""
        items: list[Item] = [Scratch(self.lines[name]) for sweep in self.plan.sweeps.order for name in sweep.keep]
        items += self._defines(level, 0)
        for number, sweep in enumerate(self.plan.sweeps.order):
            reductions = self._reductions(sweep)
            items += self._starts(reductions)
            items += self._sweep(sweep, 0)
            items += [Finish(line) for line in reductions]
            items += self._defines(level, number + 1)
        return (*items, *self._puts(level))

    def _reductions(self, sweep: Sweep) -> list[Line]:
        return [self.lines[name] for name in sweep.lines if isinstance(self.lines[name].rhs, Reduce)]

    def _starts(self, reductions: Iterable[Line]) -> list[Item]:
        items: list[Item] = []
        for line in reductions:
            items += [Start(line), StartBlocks(line, 0)] if line.out in self.plan.pairwise else [Start(line)]
        return items

    def _abreast(self, level: int) -> tuple[Item, ...]:
        """A chunk whose vectors are summed side by side: each block of the reduced axis runs over all of them."""
        axis, sweep = self.inside[level - 1], self.plan.sweeps.order[0]
        sums = self._reductions(sweep)
        before, known = self._defines(level, 0), self._defines(level + 1, 0)
        (blocks,) = self._sweep(sweep, 0)
        assert isinstance(blocks, Loop) and blocks.kind is Kind.BLOCKS
        some = (*known, *map(Start, sums), *blocks.body)
        rest = (*known, *map(Finish, sums), *self._defines(level + 1, 1), *self._puts(level + 1))
        abreast, vectors = [Loop(Kind.VECTOR, axis, body, self.plan.width, Part.CHUNK) for body in (some, rest)]
        return (
            *before,
            *(StartBlocks(line, self.plan.abreast) for line in sums),
            replace(blocks, body=(abreast,), step=ROWS_ABREAST),
            vectors,
            *self._puts(level),
        )

    def _defines(self, level: int, depth: int) -> list[Item]:
        return [
            self._define(line)
            for line in self.plan.kernel.body
            if self.level.get(line.out) == level
            and self.plan.sweeps.depth[line.out] == depth
            and not isinstance(line.rhs, Reduce | Store)
        ]

    def _define(self, line: Line) -> Item:
        return Advance(self.growing[line.out].total) if line.out in self.growing else Define(line)

    def _puts(self, level: int) -> list[Item]:
        pieces = {axis for axis, _ in self.plan.pieces.values()}
        around = (*self.plan.outer, *(axis for k, axis in enumerate(self.inside) if k < level - 1 or axis in pieces))
        return [self._put(line, around) for line, _ in self.plan.kernel.stores() if self.level.get(line.out) == level]

    def _put(self, line: Line, around: Iterable[str]) -> Put:
        return Put(line, tuple(axis for axis in around if axis not in self.depends[line.out]))

    # ------------------------------------------------------------------------------------------ sweeps

    def _sweep(self, sweep: Sweep, depth: int) -> list[Item]:
        """Loops over the reduced axes from `depth` on; each line is in the outermost one that knows its operands."""
        axes = self.plan.reduced
        last = depth == len(axes) - 1
        body: list[Item] = []
        puts: list[Item] = []
        around = (*self.plan.outer, *((self.plan.inner,) if self.plan.inner else ()), *axes[: depth + 1])
        for name in sorted((*sweep.recall, *sweep.lines), key=list(self.lines).index):
            line = self.lines[name]
            if isinstance(line.rhs, Reduce):
                body += [Accumulate(line)] if last else []
            elif self._depth(sweep, name) != depth:
                continue
            elif isinstance(line.rhs, Store):
                puts.append(self._put(line, around))
            elif name in sweep.recall:
                body.append(Recall(line))
            else:
                body.append(Define(line))
                body += [Keep(line)] if name in sweep.keep else []
        if not last:
            body += self._sweep(sweep, depth + 1)
        return self._loop(sweep, depth, [*body, *puts])

    def _depth(self, sweep: Sweep, name: str) -> int:
        """The depth of a line's loop: that of its innermost axis, or deeper if an operand is only known there."""
        axes = self.plan.reduced
        own = max((axes.index(axis) for axis in self.depends[name] & self.reduced), default=0)
        if name in sweep.recall:
            return own
        inside = [each for each in operands(self.lines[name].rhs) if self.depends[each] & self.reduced]
        return max([own, *(self._depth(sweep, each) for each in inside)])

    def _loop(self, sweep: Sweep, depth: int, body: list[Item]) -> list[Item]:
        """The loop over one reduced axis, in blocks if it has tiled accesses or the blocks of pairwise sums."""
        axis = self.plan.reduced[depth]
        kind = Kind.VECTOR if axis == self.plan.vector else Kind.SERIAL
        sums = [self.lines[name] for name in sweep.lines if name in self.plan.pairwise]
        closing: list[Item] = [CloseBlock(line) for line in sums]
        opened, closed = self._squares(sweep.lines if axis == self.plan.tile else ())
        ends = bool(sums) and depth == self._block_depth()
        if not ends and not opened:
            return [Loop(kind, axis, tuple(body), self._step(kind))]
        block = self.plan.tile_step if opened else self._block(depth) * self._step(kind)
        inside = Loop(kind, axis, tuple(body), self._step(kind), Part.BLOCK)
        return [Loop(Kind.BLOCKS, axis, (*opened, inside, *closed, *(closing if ends else ())), block)]

    def _block_depth(self) -> int:
        """The innermost loop that, with those inside it, has too many steps for a single accumulator."""
        total: int | None = 1
        for depth in range(len(self.plan.reduced) - 1, -1, -1):
            steps = self._steps(depth)
            total = None if steps is None else total * steps
            if total is None or total > SHORT_SUM:
                return depth
        return 0

    def _block(self, depth: int) -> int:
        """Steps of the loop at `depth` in one block."""
        inside = 1
        for deeper in range(depth + 1, len(self.plan.reduced)):
            inside *= self._steps(deeper) or 1
        return max(1, PAIRWISE_BLOCK // inside)

    def _steps(self, depth: int) -> int | None:
        axis = self.plan.reduced[depth]
        extent = self.plan.extent_of(axis).value
        if extent is None:
            return None
        return -(-extent // self.plan.width) if axis == self.plan.vector else extent
