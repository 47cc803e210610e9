"""The invariants of a loop nest: one `check_*` function each, as in `ir/verify.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
    Step,
    WriteTile,
)
from pellucid.errors import InternalError
from pellucid.ir.index import ONE
from pellucid.ir.nodes import IndexValue, Load, Reduce, Store, operands

_S = TypeVar("_S", bound=Step, covariant=True)


def verify_nest(nest: Nest) -> None:
    """Raise InternalError if `nest` violates an invariant."""
    places = list(_places(nest.body, (), ()))
    for check in NEST_CHECKS:
        check(nest, places)


@dataclass(frozen=True, slots=True)
class Place(Generic[_S]):
    """A step, the loops around it, and its position in each of their bodies."""

    step: _S
    loops: tuple[Loop | Parallel, ...]
    at: tuple[int, ...]

    @property
    def fixed(self) -> frozenset[str]:
        """The axes along which the loops have selected a point, or a vector of points."""
        return frozenset(axis for loop in self.loops for axis, part in _chosen(loop) if part is Part.WHOLE)

    @property
    def pieces(self) -> dict[Part, str]:
        """The axes of which the loops have selected a piece."""
        return {part: axis for loop in self.loops for axis, part in _chosen(loop) if part is not Part.WHOLE}

    def sees(self, other: Place[Any]) -> bool:
        """Whether `other` dominates this step: it precedes it, and all its loops are around this step too."""
        return other.at < self.at and other.at[:-1] == self.at[: len(other.at) - 1]


def _chosen(loop: Loop | Parallel) -> Iterator[tuple[str, Part]]:
    """The axes of which a loop selects a piece, or, with `Part.WHOLE`, a point."""
    if isinstance(loop, Parallel):
        yield from ((counter.axis, counter.part) for counter in loop.counters)
    else:
        yield loop.axis, Part.BLOCK if loop.kind is Kind.BLOCKS else Part.WHOLE


def _places(items: Sequence[Item], loops: tuple[Loop | Parallel, ...], at: tuple[int, ...]) -> Iterator[Place[Step]]:
    for position, item in enumerate(items):
        if isinstance(item, Loop | Parallel):
            yield from _places(item.body, (*loops, item), (*at, position))
        else:
            yield Place(item, loops, (*at, position))


def check_loops(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """One parallel loop, outermost; no nested loops over one axis; loops over a piece are inside of its selection."""
    if [isinstance(item, Parallel) for item in nest.body].count(True) != 1:
        raise _error(nest, "has not one parallel loop")
    for place in places:
        for depth, loop in enumerate(place.loops):
            problem = _loop_problem(nest, loop, Place(place.step, place.loops[:depth], place.at))
            if problem:
                raise _error(nest, problem)


def _loop_problem(nest: Nest, loop: Loop | Parallel, around: Place[Step]) -> str:
    """What is wrong with a loop inside of `around`; empty if it is valid."""
    if isinstance(loop, Parallel):
        return "has a parallel loop inside another loop" if around.loops else ""
    if loop.axis not in nest.ranges:
        return f"walks over {loop.axis}, which is not an axis"
    if loop.axis in around.fixed:
        return f"walks over {loop.axis} inside a loop over it"
    if loop.part is not Part.WHOLE and around.pieces.get(loop.part) != loop.axis:
        return f"walks over {loop.part.value} of {loop.axis}, of which no loop chose a piece"
    if loop.part is Part.WHOLE and loop.axis in around.pieces.values():
        return f"walks over all of {loop.axis} inside a loop over its pieces"
    if loop.kind is not Kind.BLOCKS and (loop.kind is Kind.VECTOR) != (loop.axis == nest.vector):
        return f"walks over {loop.axis} by {loop.kind.value}, and its vectors are along {nest.vector}"
    return ""


def check_axes(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """A line is in loops over all axes that its index names; a call may iterate over the others itself."""
    for place in places:
        call = place.step if isinstance(place.step, Call) else None
        lines = call.lines if call else [place.step.line] if isinstance(place.step, Define | Put) else []
        known = {*(nest.ranges if call else place.fixed), *(name for part in place.pieces for name in part.ends)}
        for line in lines:
            match line.rhs:
                case IndexValue(index) | Load(_, index) | Store(_, index) if index.vars() - known:
                    raise _error(nest, f"{', '.join(sorted(index.vars() - known))} is not known", place)
                case _:
                    pass


def check_values(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """A line reads only values computed before it, at the same point."""
    defined = [place for place in places if isinstance(place.step, Define | Advance | Finish | Recall)]
    for place in places:
        if isinstance(place.step, Define | Put | Accumulate | Advance):
            known = {each.step.line.out for each in defined if place.sees(each)}
            if missing := set(operands(place.step.line.rhs)) - known:
                raise _error(nest, f"reads {', '.join(sorted(missing))}, which is not known", place)


def check_reductions(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """Between the start of a reduction and its accumulation are loops over exactly its axes; then it is finished."""
    for place in _of(places, Accumulate):
        assert isinstance(place.step.line.rhs, Reduce)
        out, axes = place.step.line.out, frozenset(place.step.line.rhs.axes)
        starts = [each for each in _of(places, Start, out) if place.sees(each)]
        blocks = [each for each in _of(places, StartBlocks, out) if place.sees(each)]
        if not starts:
            raise _error(nest, "adds to an accumulator that was not started", place)
        first = blocks[-1] if blocks else starts[-1]
        abreast = isinstance(first.step, StartBlocks) and bool(first.step.abreast)
        at_once = frozenset({nest.vector} if abreast and nest.vector else ())
        if place.fixed - first.fixed - at_once != axes:
            raise _error(nest, f"adds in loops over {', '.join(sorted(place.fixed - first.fixed)) or 'nothing'}", place)
        if blocks and not any(_closes(each, place) for each in _of(places, CloseBlock, out)):
            raise _error(nest, "adds to a block that is not closed", place)
        finishes = [each for each in _of(places, Finish, out) if each.sees(first) and each.at > place.at]
        if [each.fixed for each in finishes] != [first.fixed | at_once]:
            raise _error(nest, "adds to a reduction that is not finished once, where it was started", place)


def check_prefixes(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """Between the start of a prefix sum and its accumulation is one serial loop, over all of its axis."""
    for place in _of(places, Advance):
        assert isinstance(place.step.line.rhs, Reduce)
        starts = [each for each in _of(places, Start, place.step.line.out) if place.sees(each)]
        between = place.loops[len(starts[-1].loops) :] if starts else ()
        if [(loop.kind, loop.axis) for loop in between if isinstance(loop, Loop)] != [
            (Kind.SERIAL, axis) for axis in place.step.line.rhs.axes
        ]:
            raise _error(nest, "is not started before the loop over its axis", place)


def _closes(end: Place[Any], place: Place[Any]) -> bool:
    """Whether `end` closes the block that `place` adds to: after it, in the same iteration of the loop over blocks."""
    around = [loop.kind for loop in end.loops if isinstance(loop, Loop)]
    return Kind.BLOCKS in around and end.at > place.at and end.at[:-1] == place.at[: len(end.at) - 1]


def check_scratch(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """A recalled value has been kept before, in a declared scratch row, at the same point."""
    for place in (*_of(places, Keep), *_of(places, Recall)):
        rows = [each for each in _of(places, Scratch, place.step.line.out) if place.sees(each)]
        if not rows:
            raise _error(nest, "has no scratch row", place)
        kept = [each for each in _of(places, Keep, place.step.line.out) if each.sees(rows[-1]) and each.at < place.at]
        if isinstance(place.step, Recall) and not any(each.fixed == place.fixed for each in kept):
            raise _error(nest, "recalls what was not kept", place)


def check_squares(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """Squares are read or opened before the loop over their rows, a block of an axis, and written after it."""
    squares = (*_of(places, FillTile), *_of(places, StartTile))
    axes = {place.step.line.out: place.step.axis for place in squares}
    for place in (*squares, *_of(places, WriteTile)):
        if place.pieces.get(Part.BLOCK) != place.step.axis or place.step.axis in place.fixed:
            raise _error(nest, f"is not in a loop over blocks of {place.step.axis}", place)
    for place in (*_of(places, Define), *_of(places, Put)):
        out = place.step.line.out
        around = [each for each in squares if each.step.line.out == out and place.sees(each)]
        if out in axes and not (around and axes[out] in place.fixed - around[-1].fixed):
            raise _error(nest, f"is not in a loop over the rows of its square, along {axes[out]}", place)
    for place in _of(places, WriteTile):
        rows = [each for each in _of(places, Put, place.step.line.out) if each.at < place.at]
        if not any(place.sees(each) for each in _of(places, StartTile, place.step.line.out)) or not rows:
            raise _error(nest, "writes a square that was not opened and filled", place)
    for place in _of(places, StartTile):
        if not any(each.sees(place) for each in _of(places, WriteTile, place.step.line.out)):
            raise _error(nest, "opens a square that is not written", place)


def check_stores(nest: Nest, places: Sequence[Place[Step]]) -> None:
    """Each store runs once for each point of its index, and is not repeated in loops on which it does not depend."""
    scopes = _scopes(nest, places)
    puts = _of(places, Put)
    called = [line.out for place in _of(places, Call) for line in place.step.lines if isinstance(line.rhs, Store)]
    names = [*(place.step.line.out for place in puts), *called]
    if len(set(names)) != len(names):
        raise _error(nest, "has a store twice")
    for place in puts:
        assert isinstance(place.step.line.rhs, Store)
        store = place.step.line.rhs
        lost = [axis for axis in scopes[store.arg] - store.index.vars() if nest.ranges[axis] != ONE]
        if lost and not store.index.vals():
            raise _error(nest, f"stores what varies along {', '.join(sorted(lost))}, where its index does not", place)
        around = place.fixed | frozenset(place.pieces.values())
        needed = scopes[place.step.line.out] | (around if store.join and store.index.vals() else frozenset())
        if around - needed != frozenset(place.step.once):
            again = ", ".join(sorted(around - needed)) or "nothing"
            raise _error(nest, f"does not depend on {again}, and is stored once along {place.step.once}", place)


def _scopes(nest: Nest, places: Sequence[Place[Step]]) -> dict[str, frozenset[str]]:
    """The axes that each line depends on."""
    scopes: dict[str, frozenset[str]] = {}
    for place in places:
        line = place.step.line
        if isinstance(place.step, Define | Put | Accumulate | Advance):
            scope = frozenset[str]().union(*(scopes[name] for name in operands(line.rhs)))
            match line.rhs:
                case IndexValue(index) | Load(_, index) | Store(_, index):
                    scope |= index.vars() & nest.ranges.keys()
                case Reduce(_, _, axes) if isinstance(place.step, Accumulate):
                    scope -= frozenset(axes)
                case _:
                    pass
            scopes[line.out] = scope
    return scopes


NEST_CHECKS = (
    check_loops,
    check_axes,
    check_values,
    check_reductions,
    check_prefixes,
    check_scratch,
    check_squares,
    check_stores,
)


def _of(places: Sequence[Place[Step]], kind: type[_S], out: str | None = None) -> list[Place[_S]]:
    """The steps of a kind; of the line `out` only, if given."""
    return [
        Place(each.step, each.loops, each.at)
        for each in places
        if isinstance(each.step, kind) and out in (None, each.step.line.out)
    ]


def _error(nest: Nest, problem: str, place: Place[Any] | None = None) -> InternalError:
    if place is None:
        return InternalError(f"nest {nest.name} {problem}", hint="this is a bug of the compiler")
    what = f"{type(place.step).__name__} of {place.step.line.out}"
    return InternalError(f"nest {nest.name}, {what}: {problem}", hint="this is a bug of the compiler")
