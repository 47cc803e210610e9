"""A loop nest as a value: in which loops, and in which order, the lines of a kernel run.

It prints and parses (`nest_text.py`), is checked (`verify_nest.py`) and runs (`run_nest.py`); `loops.py` makes it of a
plan. What it leaves open is how a step is written: with which instructions, past the caches or not.
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
    """The points of an axis that a loop walks over."""

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
    """An axis of the flattened parallel loop: `extent` points, by pieces of `step` if `part` is not the whole axis."""

    axis: str
    extent: Expr
    step: Expr = ONE
    part: Part = Part.WHOLE

    @property
    def count(self) -> Expr:
        """How many iterations it has."""
        return chunks(self.extent, self.step)


# ------------------------------------------------------------------------------------------------ steps


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

    function: `contract` or `attend`. line: the sum, or the widest store: what it is about. size: floats of memory that
    an iteration has under the name `BLOCK`, for lines after it to read; 0 if they store into buffers alone.
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
    """Declare what collects the closed blocks of a pairwise sum: one, or one for each of so many vectors `abreast`."""

    line: Line
    abreast: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add one point (or one vector of points) to the accumulator."""

    line: Line


@dataclass(frozen=True, slots=True)
class Advance:
    """The same, and take out what the accumulator has so far: the value of a prefix sum at this point."""

    line: Line


@dataclass(frozen=True, slots=True)
class CloseBlock:
    """End a block of a pairwise sum: the accumulator begins anew."""

    line: Line


@dataclass(frozen=True, slots=True)
class Finish:
    """Take the value of a reduction out of its accumulator, or out of its blocks."""

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


# ------------------------------------------------------------------------------------------------ loops


class Kind(Enum):
    """What a loop iterates over."""

    SERIAL = "for"
    VECTOR = "vector"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over one axis: point by point, by steps of a vector, or by blocks of `step` points.

    A loop inside of that over blocks walks over one of them.
    """

    kind: Kind
    axis: str
    body: tuple[Item, ...]
    step: int = 1
    part: Part = Part.WHOLE


@dataclass(frozen=True, slots=True)
class Parallel:
    """The iterations that threads share: those of all `counters`, flattened, the last one fastest."""

    counters: tuple[Counter, ...]
    body: tuple[Item, ...]


Tiled: TypeAlias = "FillTile | StartTile | WriteTile"
Sum: TypeAlias = "Start | StartBlocks | Accumulate | Advance | CloseBlock | Finish"
Step: TypeAlias = "Define | Put | Tiled | Call | Sum | Scratch | Keep | Recall"
Item: TypeAlias = "Step | Loop | Parallel"


@dataclass(frozen=True, slots=True)
class Nest:
    """A kernel as it runs: what is the same for every point, then the parallel loop.

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
    """All that stands in loops, however deep, without the loops."""
    for item in items:
        if isinstance(item, Loop | Parallel):
            yield from steps_of(item.body)
        else:
            yield item
