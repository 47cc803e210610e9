"""Turn a kernel and its plan into an explicit loop nest: which line stands in which loop, in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from pellucid.codegen.plan import PAIRWISE_BLOCK, ROWS_ABREAST, SHORT_SUM, Plan
from pellucid.codegen.sweeps import Sweep
from pellucid.ir.nodes import Line, Reduce, Store, axes_of, operands


@dataclass(frozen=True, slots=True)
class Define:
    """Compute a value."""

    line: Line


@dataclass(frozen=True, slots=True)
class Put:
    """Store a value, at the first point only of each axis in `once`: loops around it that it does not depend on."""

    line: Line
    once: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FillTile:
    """Read a square of the buffer of a load and transpose it, see `Plan.tile`."""

    line: Line


@dataclass(frozen=True, slots=True)
class StartTile:
    """Declare the square in which the vectors of a store are collected, see `Plan.tile`."""

    line: Line


@dataclass(frozen=True, slots=True)
class WriteTile:
    """Transpose what a store has collected and write it."""

    line: Line


@dataclass(frozen=True, slots=True)
class FillBlock:
    """Compute a block of the sums of a contraction, see `Plan.blocks`."""

    line: Line


@dataclass(frozen=True, slots=True)
class Attend:
    """Compute some rows of an attention, or gradients of it, see `Plan.rows`."""

    line: Line


@dataclass(frozen=True, slots=True)
class Start:
    """Declare the accumulator of a reduction."""

    line: Line


@dataclass(frozen=True, slots=True)
class StartBlocks:
    """Declare what collects the closed blocks of a pairwise sum: one, or one for each vector of `Plan.abreast`."""

    line: Line


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add one point (or one vector of points) to the accumulator."""

    line: Line


@dataclass(frozen=True, slots=True)
class CloseBlock:
    """End a block of a pairwise sum."""

    line: Line


@dataclass(frozen=True, slots=True)
class Finish:
    """Take the value of a reduction out of its accumulator."""

    line: Line


@dataclass(frozen=True, slots=True)
class Scratch:
    """Declare the scratch row of a value that a later sweep needs again."""

    line: Line


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a value to its scratch row."""

    line: Line


@dataclass(frozen=True, slots=True)
class Recall:
    """Read a value back from its scratch row."""

    line: Line


class Kind(Enum):
    """What a loop iterates over."""

    PARALLEL = "the flattened outer axes and chunks of the inner axis: the iterations that threads share"
    SERIAL = "one axis, point by point"
    VECTOR = "one axis, by steps of a vector"
    BLOCKS = "one axis, by blocks; the loop inside walks over one block"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop. `axis` is empty for the parallel one; `block` is the number of points of a block."""

    kind: Kind
    axis: str
    body: tuple[Item, ...]
    block: int = 0
    blocked: bool = field(default=False)


Tiled: TypeAlias = "FillTile | StartTile | WriteTile | FillBlock | Attend"
Sum: TypeAlias = "Start | StartBlocks | Accumulate | CloseBlock | Finish"
Item: TypeAlias = "Define | Put | Tiled | Sum | Scratch | Keep | Recall | Loop"


def nest(plan: Plan) -> tuple[Item, ...]:
    """The function's body: what is the same for every point, then the parallel loop.

    Kept lines stand at the outermost loop where all they depend on is known; lines that depend on a reduction stand
    after its sweep. Stores come last in their loop, so that no load of the same point follows them.
    """
    if plan.rows is not None:
        widest = max(plan.kernel.stores(), key=lambda each: len(axes_of(plan.kernel)[each[0].out]))
        return (Loop(Kind.PARALLEL, "", (Attend(widest[0]),)),)
    return _Builder(plan).function()


class _Builder:
    """Builds the nest of one plan. Levels: 0 the function, 1 the parallel loop, then one for each axis `inside` it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.depends = axes_of(plan.kernel)
        self.lines = {line.out: line for line in plan.kernel.body}
        self.reduced = frozenset(plan.reduced)
        around = (*plan.colliding, plan.inner, *plan.whole, plan.outer_tile)
        self.inside = tuple(axis for axis in around if axis is not None)
        self.innermost = 1 + len(self.inside)
        self.level = self._levels()

    def _levels(self) -> dict[str, int]:
        """The level of each line that does not run in a sweep."""
        level: dict[str, int] = {}
        for line in self.plan.kernel.body:
            axes = self.depends[line.out]
            if axes & self.reduced:
                continue
            own = max((2 + k for k, axis in enumerate(self.inside) if axis in axes), default=1 if axes else 0)
            if isinstance(line.rhs, Reduce):
                own = self.innermost
            elif isinstance(line.rhs, Store):
                own = max(own, 1)
            below = (level.get(name, 0) for name in operands(line.rhs) if not self.depends[name] & self.reduced)
            level[line.out] = max([own, *below])
        return level

    def function(self) -> tuple[Item, ...]:
        blocks = self.plan.blocks
        block = [FillBlock(self.lines[blocks.contraction.total.out])] if blocks else []
        rest = () if blocks and blocks.stored else self._level_body(1)
        return (*self._defines(0, 0), Loop(Kind.PARALLEL, "", (*block, *rest)))

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
        blocked = tiled or (axis == self.plan.inner and self.plan.chunk > 0)
        loop = Loop(kind, axis, self._level_body(level + 1), blocked=blocked)
        return (*self._defines(level, 0), *opened, loop, *closed, *self._puts(level))

    def _squares(self, names: Iterable[str]) -> tuple[list[Item], list[Item]]:
        """What happens to the squares of the lines `names` before a block of the tile, and after it."""
        squares = [line for line in self.plan.kernel.body if line.out in self.plan.tiled.intersection(names)]
        opened: list[Item] = [StartTile(line) if isinstance(line.rhs, Store) else FillTile(line) for line in squares]
        return opened, [WriteTile(line) for line in squares if isinstance(line.rhs, Store)]

    def _kept_point(self, level: int) -> tuple[Item, ...]:
        """What happens at one point (or vector) of all kept axes: the sweeps, and the kept lines between them."""
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
            items += [Start(line), StartBlocks(line)] if line.out in self.plan.pairwise else [Start(line)]
        return items

    def _abreast(self, level: int) -> tuple[Item, ...]:
        """A chunk whose sums advance side by side: each block of the reduced axis goes over all its vectors."""
        axis, sweep = self.inside[level - 1], self.plan.sweeps.order[0]
        sums = self._reductions(sweep)
        before, known = self._defines(level, 0), self._defines(level + 1, 0)
        (blocks,) = self._sweep(sweep, 0)
        assert isinstance(blocks, Loop) and blocks.kind is Kind.BLOCKS
        some = Loop(Kind.VECTOR, axis, (*known, *map(Start, sums), *blocks.body), blocked=True)
        rest = (*known, *map(Finish, sums), *self._defines(level + 1, 1), *self._puts(level + 1))
        return (
            *before,
            *map(StartBlocks, sums),
            replace(blocks, body=(some,), block=ROWS_ABREAST),
            Loop(Kind.VECTOR, axis, rest, blocked=True),
            *self._puts(level),
        )

    def _defines(self, level: int, depth: int) -> list[Item]:
        return [
            Define(line)
            for line in self.plan.kernel.body
            if self.level.get(line.out) == level
            and self.plan.sweeps.depth[line.out] == depth
            and not isinstance(line.rhs, Reduce | Store)
        ]

    def _puts(self, level: int) -> list[Item]:
        blocks = {self.plan.outer_tile, self.plan.inner if self.plan.chunk else None} - {None}
        around = (*self.plan.outer, *(axis for k, axis in enumerate(self.inside) if k < level - 1 or axis in blocks))
        return [self._put(line, around) for line, _ in self.plan.kernel.stores() if self.level.get(line.out) == level]

    def _put(self, line: Line, around: Iterable[str]) -> Put:
        return Put(line, tuple(axis for axis in around if axis not in self.depends[line.out]))

    # ------------------------------------------------------------------------------------------ sweeps

    def _sweep(self, sweep: Sweep, depth: int) -> list[Item]:
        """Loops over the reduced axes from `depth` on; each line stands in the outermost that knows all it needs."""
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
        """The loop of a line: that of its own axes, or deeper if an operand is only known there."""
        axes = self.plan.reduced
        own = max((axes.index(axis) for axis in self.depends[name] & self.reduced), default=0)
        if name in sweep.recall:
            return own
        inside = [each for each in operands(self.lines[name].rhs) if self.depends[each] & self.reduced]
        return max([own, *(self._depth(sweep, each) for each in inside)])

    def _loop(self, sweep: Sweep, depth: int, body: list[Item]) -> list[Item]:
        """The loop over one reduced axis, in blocks where these are squares of tiles, or end those of pairwise sums."""
        axis = self.plan.reduced[depth]
        vector = axis == self.plan.vector
        kind = Kind.VECTOR if vector else Kind.SERIAL
        sums = [self.lines[name] for name in sweep.lines if name in self.plan.pairwise]
        closing: list[Item] = [CloseBlock(line) for line in sums]
        opened, closed = self._squares(sweep.lines if axis == self.plan.tile else ())
        ends = bool(sums) and depth == self._block_depth()
        if not ends and not opened:
            return [Loop(kind, axis, tuple(body))]
        block = self.plan.tile_step if opened else self._block(depth) * (self.plan.width if vector else 1)
        inside = (*opened, Loop(kind, axis, tuple(body), blocked=True), *closed, *(closing if ends else ()))
        return [Loop(Kind.BLOCKS, axis, inside, block=block)]

    def _block_depth(self) -> int:
        """The innermost loop that, with those inside it, makes too many steps for one accumulator."""
        total: int | None = 1
        for depth in range(len(self.plan.reduced) - 1, -1, -1):
            steps = self._steps(depth)
            total = None if steps is None else total * steps
            if total is None or total > SHORT_SUM:
                return depth
        return 0

    def _block(self, depth: int) -> int:
        """Steps of the loop at `depth` that make one block."""
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
