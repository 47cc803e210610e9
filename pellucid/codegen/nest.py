"""A loop nest as a value: in which loops, and in which order, the lines of a kernel run.

It is built from a plan (`loops.py`), printed and parsed (`nest_text.py`), verified (`verify_nest.py`) and interpreted
(`run_nest.py`). It does not say how a step is implemented: with which instructions, or past the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from pellucid.ir.index import ONE, Expr, chunks
from pellucid.ir.nodes import Axis, Line, Param

BLOCK = "block"
"""The name of the memory that a `Call` fills, in the lines that read it."""


class Part(Enum):
    """The points of an axis that a loop iterates over."""

    WHOLE = ""
    CHUNK = "lo..hi"
    PIECE = "start..stop"
    BLOCK = "from..to"

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of `first` and `last`; none for the whole axis."""
        return (self.first, self.last) if self.value else ()

    @property
    def first(self) -> str:
        """The name of its first point."""
        return self.value.partition("..")[0]

    @property
    def last(self) -> str:
        """The name of the point after its last one."""
        return self.value.partition("..")[2]


@dataclass(frozen=True, slots=True)
class Counter:
    """An axis of the flattened parallel loop: `extent` points, in pieces of `step` if `part` is not the whole axis."""

    axis: str
    extent: Expr
    step: Expr = ONE
    part: Part = Part.WHOLE

    @property
    def count(self) -> Expr:
        """Its number of iterations."""
        return chunks(self.extent, self.step)


# ------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True, slots=True)
class Define:
    """Compute a value."""

    line: Line


@dataclass(frozen=True, slots=True)
class Put:
    """Store a value; only at the first point of the axes in `once`: loops around it on which it does not depend."""

    line: Line
    once: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FillTile:
    """Read a square of the buffer of a load, a vector for each point of a block of `axis`, and transpose it."""

    line: Line
    axis: str


@dataclass(frozen=True, slots=True)
class StartTile:
    """Declare the square in which the vectors of a store are collected, one for each point of a block of `axis`."""

    line: Line
    axis: str


@dataclass(frozen=True, slots=True)
class WriteTile:
    """Transpose what a store has collected and write it."""

    line: Line
    axis: str


@dataclass(frozen=True, slots=True)
class Call:
    """Let a function of `native/kernel/` evaluate `lines` at all points of a parallel iteration.

    function: `contract` or `attend`. line: the main line, the sum or the widest store. size: floats of the local buffer
    `BLOCK` of an iteration, which later lines read; 0 if the call only stores to the kernel's buffers.
    """

    function: str
    line: Line
    lines: tuple[Line, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Start:
    """Declare the accumulator of a reduction."""

    line: Line


@dataclass(frozen=True, slots=True)
class StartBlocks:
    """Declare the collector of closed blocks of a pairwise sum: a single one, or one for each of `abreast` vectors."""

    line: Line
    abreast: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add one point (or one vector of points) to the accumulator."""

    line: Line


@dataclass(frozen=True, slots=True)
class Advance:
    """Like `Accumulate`, and read the accumulator: the value of a prefix sum at this point."""

    line: Line


@dataclass(frozen=True, slots=True)
class CloseBlock:
    """End a block of a pairwise sum and reset the accumulator."""

    line: Line


@dataclass(frozen=True, slots=True)
class Finish:
    """Read the value of a reduction from its accumulator, or from its blocks."""

    line: Line


@dataclass(frozen=True, slots=True)
class Scratch:
    """Declare the scratch row of a value that a later sweep reads again."""

    line: Line


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a value to its scratch row."""

    line: Line


@dataclass(frozen=True, slots=True)
class Recall:
    """Read a value back from its scratch row."""

    line: Line


# ------------------------------------------------------------------------------------------------ loops


class Kind(Enum):
    """What a loop iterates over."""

    SERIAL = "for"
    VECTOR = "vector"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over one axis: point by point, by steps of a vector, or by blocks of `step` points.

    A loop inside a loop over blocks iterates over one block.
    """

    kind: Kind
    axis: str
    body: tuple[Item, ...]
    step: int = 1
    part: Part = Part.WHOLE


@dataclass(frozen=True, slots=True)
class Parallel:
    """The loop whose iterations are distributed over threads: all `counters`, flattened, the last one fastest."""

    counters: tuple[Counter, ...]
    body: tuple[Item, ...]


Tiled: TypeAlias = "FillTile | StartTile | WriteTile"
Sum: TypeAlias = "Start | StartBlocks | Accumulate | Advance | CloseBlock | Finish"
Step: TypeAlias = "Define | Put | Tiled | Call | Sum | Scratch | Keep | Recall"
Item: TypeAlias = "Step | Loop | Parallel"


@dataclass(frozen=True, slots=True)
class Nest:
    """A kernel as it runs: loop-invariant steps, then the parallel loop.

    vector: the axis whose loops make steps of `width` lanes; None for scalar code.
    """

    name: str
    params: tuple[Param, ...]
    space: tuple[Axis, ...]
    vector: str | None
    width: int
    body: tuple[Item, ...]

    @property
    def ranges(self) -> dict[str, Expr]:
        """Extent of each axis by name."""
        return {axis.name: axis.extent for axis in self.space}


def map_lines(items: Iterable[Item], change: Callable[[Line], Line]) -> tuple[Item, ...]:
    """The same steps with `change` applied to their lines."""

    def changed(item: Item) -> Item:
        match item:
            case Loop() | Parallel():
                return replace(item, body=map_lines(item.body, change))
            case Call():
                return replace(item, line=change(item.line), lines=tuple(map(change, item.lines)))
            case _:
                return replace(item, line=change(item.line))

    return tuple(map(changed, items))


def steps_of(items: Iterable[Item]) -> Iterator[Step]:
    """All steps, at any depth, without the loops."""
    for item in items:
        if isinstance(item, Loop | Parallel):
            yield from steps_of(item.body)
        else:
            yield item
