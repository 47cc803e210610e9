"""Chains of kernels that run strip by strip: some iterations of each in turn, so that what one makes is still in a near
cache when the next one reads it. It then needs no place for all of it, but a window that moves along.

Before: `a` makes all of t0, `b` reads it and makes all of t1, `c` reads that.
After: each thread, for its part of what `c` makes: some rows of `a`, the rows of `b` and then of `c` that these allow;
and so on. Rows of `a` that two threads need are computed by both.

Depth-first execution, or line buffering, of what Halide calls producers and consumers (Ragan-Kelley et al., PLDI 2013,
"sliding window"); here on the iterations of finished kernels, whose order and bits it does not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pellucid.codegen import CppKernel, unstreamed
from pellucid.codegen.reach import Reach
from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Kernel, Program
from pellucid.ir.types import ALIGNMENT
from pellucid.machine import Machine, Work, kernel_work, time
from pellucid.schedule.memory import spans

# The part of the second cache that windows, and what each strip reads again, may take; and of the shortest strips.
_SHARE, _MOST_SHARE = 0.5, 0.75
# What stands for all strips of a part is one that begins here: no border of images, as few parts have so many.
_SOMEWHERE = 0.382
# A strip that reads so much of a buffer reads all of it again, such as weights.
_ALL = 0.9
# So many calls more are tried once a chain is too large for the second cache.
_TRIES = 2
_RULE = "plan.strips"
# Calls of a chain, runs of calls in all strips, and iterations of a kernel, at most: they are listed.
_MOST_CALLS, _MOST_RUNS, _MOST_ITERATIONS = 24, 1 << 13, 1 << 18
# A chain must save so many times what it costs: its price knows nothing of what else comes and goes in the caches.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Window:
    """Room of `nbytes` in each part for the stretch of a buffer that is needed at once."""

    buffer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The calls from `first` to `last`, made strip by strip.

    parts: what each thread does, as triples: a call, counted from `first`, with its first iteration and one past its
    last; or ~ the number of a window with the first byte of its buffer that it holds from then on, and how many bytes,
    from that on, are there already and move along.
    """

    first: int
    last: int
    windows: tuple[Window, ...]
    parts: tuple[tuple[int, ...], ...]

    def room(self, window: Window) -> int:
        """Bytes of a window in all parts."""
        return window.nbytes * len(self.parts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A call that may be part of a chain. Its kernel has `extent` iterations, on so many `threads` at most.

    loads, stores: what its iterations touch of each buffer. itemsizes: bytes of its elements.
    """

    name: str
    extent: int
    threads: int
    work: Work
    loads: Mapping[str, Reach]
    stores: Mapping[str, Reach]
    itemsizes: Mapping[str, int]

    def hull(self, name: str, mine: tuple[int, int]) -> int:
        """Bytes from the first to the last element of a buffer that some iterations read."""
        first, last = self.loads[name].over(*mine)
        return (last - first + 1) * self.itemsizes[name]


@dataclass(frozen=True, slots=True)
class _Temporary:
    """A buffer that a chain may keep in a window: first, last are the calls that use it."""

    itemsize: int
    numel: int
    first: int
    last: int

    def within(self, first: int, last: int) -> bool:
        """Whether no other calls use it."""
        return first <= self.first and self.last <= last


def in_strips(
    program: Program, kernels: Mapping[str, CppKernel], machine: Machine
) -> tuple[tuple[Chain, ...], Mapping[str, CppKernel], tuple[Decision, ...]]:
    """Which calls of a scheduled program run strip by strip; and its kernels: none writes past the caches what is in a
    window."""
    if program.symbols:
        return (), kernels, ()
    nodes = program.nodes
    stages = [_stage_of(node, kernels[node.name], machine) if isinstance(node, Kernel) else None for node in nodes]
    used = spans([(*reads(node), *writes(node)) for node in nodes], program.outputs)
    temporaries = {
        buffer.name: _Temporary(buffer.dtype.itemsize, buffer.numel.value, *used[buffer.name])
        for buffer in program.buffers
        if buffer.role == "temp" and buffer.name in used and buffer.numel.value is not None
    }
    chains, decisions = _find_chains(stages, temporaries, machine)
    inside = {window.buffer for chain in chains for window in chain.windows}
    near = {name: kernel.streamed & inside for name, kernel in kernels.items()}
    why = "it is read at once, in the same strip"
    kept = [Decision("codegen.stream", (name, each), False, why) for name in near for each in sorted(near[name])]
    changed = {name: unstreamed(kernel, near[name]) if near[name] else kernel for name, kernel in kernels.items()}
    return chains, changed, (*decisions, *kept)


def _find_chains(
    stages: Sequence[_Stage | None], temporaries: Mapping[str, _Temporary], machine: Machine
) -> tuple[tuple[Chain, ...], tuple[Decision, ...]]:
    """The same for stages, one for each call, None where that is none, and buffers that may have windows."""
    candidates: list[_Candidate] = []
    refusals: dict[int, Decision] = {}
    for begin, first in enumerate(stages):
        if first is not None and any(_is_far(name, first, temporaries, machine) for name in first.stores):
            found, refusal = _candidates(begin, stages, temporaries, machine)
            candidates += found
            if not found:
                refusals[begin] = Decision(_RULE, (first.name,), False, refusal)
    walked, impossible = _walked_through(candidates, len(stages))
    chains = tuple(chain for _, chain in walked)
    chosen = (*(each.decision(chain) for each, chain in walked), *(each.decision(None) for each in impossible))
    inside = {call for chain in chains for call in range(chain.first, chain.last)}
    return chains, (*chosen, *(refusal for begin, refusal in refusals.items() if begin not in inside))


def _stage_of(kernel: Kernel, compiled: CppKernel, machine: Machine) -> _Stage | None:
    """A kernel as part of a chain; None if it cannot be: its sizes, what it touches or how it fails are not known, or
    calls choose between several ways to do it."""
    extent = compiled.extent.value or 0
    if compiled.symbols or compiled.checks or compiled.others or not 0 < extent <= _MOST_ITERATIONS:
        return None
    found = compiled.reaches
    if found is None or found.loads.keys() & found.stores.keys():
        return None
    params = compiled.computes.params
    return _Stage(
        name=kernel.name,
        extent=extent,
        threads=max(1, min(machine.cores, extent // max(1, compiled.grain))),
        work=kernel_work(kernel, compiled.plan.steps),
        loads={compiled.params[number]: reach for number, reach in found.loads.items()},
        stores={compiled.params[number]: reach for number, reach in found.stores.items()},
        itemsizes={name: param.dtype.itemsize for name, param in zip(compiled.params, params, strict=True)},
    )


# ------------------------------------------------------------------------------------------------ choosing


def _best(candidates: Sequence[_Candidate], calls: int) -> list[_Candidate]:
    """Those of them that have no call in common and save most together."""
    by_last: dict[int, list[_Candidate]] = {}
    for candidate in candidates:
        by_last.setdefault(candidate.last, []).append(candidate)
    gains, chosen = [0.0], [list[_Candidate]()]  # of the calls before each
    for call in range(calls):
        gains.append(gains[-1])
        chosen.append(chosen[-1])
        for candidate in by_last.get(call, ()):
            if gains[candidate.begin] + candidate.gain > gains[-1]:
                gains[-1] = gains[candidate.begin] + candidate.gain
                chosen[-1] = [*chosen[candidate.begin], candidate]
    return chosen[-1]


def _walked_through(
    candidates: Sequence[_Candidate], calls: int
) -> tuple[list[tuple[_Candidate, Chain]], list[_Candidate]]:
    """The best of them, with their chains; and those that were better, but whose strips do not follow one another."""
    impossible: list[_Candidate] = []
    while True:
        walked = [(each, each.chain()) for each in _best(candidates, calls)]
        failed = {id(each) for each, chain in walked if chain is None}
        if not failed:
            return [(each, chain) for each, chain in walked if chain is not None], impossible
        impossible += [each for each in candidates if id(each) in failed]
        candidates = [each for each in candidates if id(each) not in failed]


def _candidates(
    begin: int, stages: Sequence[_Stage | None], temporaries: Mapping[str, _Temporary], machine: Machine
) -> tuple[list[_Candidate], str]:
    """The chains from a call on that save time; and why the shortest is none."""
    first = stages[begin]
    assert first is not None
    found: list[_Candidate] = []
    members, refusals, too_large = [first], list[str](), 0
    for stage in stages[begin + 1 : begin + _MOST_CALLS]:
        refusal = _cannot_follow(members, stage)
        if refusal or stage is None or too_large > _TRIES:
            refusals.append(refusal)
            break
        members.append(stage)
        try:
            found.append(_candidate(begin, tuple(members), temporaries, machine))
            too_large = 0
        except _NoChain as why:
            refusals.append(str(why))
            too_large += why.too_large
    return found, next(iter(refusals), "no kernel follows")


def _cannot_follow(members: Sequence[_Stage], stage: _Stage | None) -> str:
    """Why a call cannot be part of the chain that ends before it; empty if it can."""
    if stage is None:
        return "what follows is no kernel, or one of which it is not known beforehand what each iteration touches"
    if any(name in other.loads or name in other.stores for name in stage.stores for other in members):
        return f"{stage.name} overwrites what calls before it have to do with"
    return ""


def _is_far(name: str, maker: _Stage, temporaries: Mapping[str, _Temporary], machine: Machine) -> bool:
    """Whether a buffer, once it is made, no longer is in the second caches."""
    return name in temporaries and machine.level(maker.work.working_set, maker.threads) not in _near(machine)


def _near(machine: Machine) -> Sequence[object]:
    return machine.levels[: machine.levels.index(machine.own_level) + 1]


class _NoChain(Exception):
    """Why calls cannot be a chain. too_large: the second cache does not hold what even the shortest strips need."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A chain that is possible: of `members`, from the call `begin` on, in `strips` of each part.

    inside: buffers that nothing else uses. gain: nanoseconds that it saves. handed: bytes that its calls hand on.
    """

    begin: int
    members: tuple[_Stage, ...]
    inside: Mapping[str, _Temporary]
    strips: int
    gain: float
    handed: int

    @property
    def last(self) -> int:
        return self.begin + len(self.members) - 1

    @property
    def threads(self) -> int:
        return min(stage.threads for stage in self.members)

    def part(self, number: int) -> tuple[int, int]:
        """The iterations of the last call that are a thread's."""
        extent = self.members[-1].extent
        return extent * number // self.threads, extent * (number + 1) // self.threads

    def chain(self) -> Chain | None:
        """The chain; None if its strips do not follow one another."""
        walks: list[_Walk] = []
        for number in range(self.threads):
            walk = _walked(self, *self.part(number))
            if walk is None:
                return None
            walks.append(walk)
        sizes = {name: buffer.itemsize for name, buffer in self.inside.items()}
        rooms = {name: max(_room(walk.stretches[name], size) for walk in walks) for name, size in sizes.items()}
        windows = tuple(Window(name, nbytes) for name, nbytes in rooms.items())
        return Chain(self.begin, self.last, windows, tuple(tuple(_steps(walk, windows, sizes)) for walk in walks))

    def decision(self, chain: Chain | None) -> Decision:
        names = tuple(stage.name for stage in self.members)
        if chain is None:
            return Decision(_RULE, names, False, "some strip needs what would have to be made before the first one")
        room = sum(window.nbytes for window in chain.windows)
        why = (
            f"the second cache does not hold the {self.handed} bytes that they hand on, and holds the {room} bytes of "
            f"it that are needed at once in one of {self.strips} strips"
        )
        facts = (("strips", self.strips), ("estimated_ns", round(self.gain)))
        return Decision(_RULE, names, True, why, facts)


def _candidate(
    begin: int, members: tuple[_Stage, ...], temporaries: Mapping[str, _Temporary], machine: Machine
) -> _Candidate:
    """A chain of these calls with the fewest strips whose windows the second cache holds. Raises _NoChain."""
    last = begin + len(members) - 1
    made = [name for stage in members for name in stage.stores if name in temporaries]
    inside = {name: temporaries[name] for name in made if temporaries[name].within(begin, last)}
    if not inside or members[-1].stores.keys() & inside.keys():
        raise _NoChain("later calls need what these make")
    candidate = _Candidate(begin, members, inside, 1, 0.0, 0)
    again = _again(candidate, machine)
    strips = _fewest_strips(candidate, machine)
    saved, handed = _saved(candidate, machine)
    cost = _MARGIN * (again + len(members) * strips * machine.call)
    if saved <= cost:
        raise _NoChain(f"it would save {saved:.0f} ns of moving bytes, and cost {cost:.0f} ns of computing and calling")
    return replace(candidate, strips=strips, gain=saved - cost, handed=handed)


def _needed(members: Sequence[_Stage], of_last: tuple[int, int]) -> list[tuple[int, int] | None]:
    """The iterations of each call that some of the last one need; None where that is none."""
    wanted: dict[str, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = []
    for stage in reversed(members):
        mine = _makers(stage, wanted) if found else of_last
        found.append(mine)
        if mine is not None:
            _note_loads(stage, mine, wanted)
    return found[::-1]


def _note_loads(stage: _Stage, mine: tuple[int, int], wanted: dict[str, tuple[int, int]]) -> None:
    """Add the stretches of buffers that some iterations of a call read."""
    for name, reach in stage.loads.items():
        low, high = reach.over(*mine)
        known = wanted.get(name, (low, high))
        wanted[name] = min(low, known[0]), max(high, known[1])


def _makers(stage: _Stage, wanted: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The iterations that make stretches of buffers; None if none does."""
    ranges: list[tuple[int, int]] = []
    for name, reach in stage.stores.items():
        if name in wanted and wanted[name][0] <= wanted[name][1]:
            low, high = wanted[name]
            ranges.append((int(reach.last.searchsorted(low)), int(reach.first.searchsorted(high, "right"))))
    if not ranges:
        return None
    begin, end = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    return (begin, end) if begin < end else None


def _again(candidate: _Candidate, machine: Machine) -> float:
    """Nanoseconds that calls take longer: for what several threads compute, and where a chain has fewer threads than
    they have alone. Raises _NoChain if it cannot be.

    Each buffer must be made in its order, and what others read as well must be made once.
    """
    members, threads = candidate.members, candidate.threads
    parts = [_needed(members, candidate.part(number)) for number in range(threads)]
    extra = 0.0
    for number, stage in enumerate(members):
        mine = [part[number] for part in parts]
        ranges = [each for each in mine if each is not None]
        if len(ranges) < len(mine):
            raise _NoChain(f"{stage.name} makes nothing that a part of {members[-1].name} needs")
        if stage is not members[-1] and not all(reach.advances for reach in stage.stores.values()):
            raise _NoChain(f"{stage.name} does not make its results in their order")
        if not stage.stores.keys() <= candidate.inside.keys() and not _cover(ranges, stage.extent):
            raise _NoChain(f"later calls need what {stage.name} makes, and threads would make some of it twice")
        share = max(end - begin for begin, end in ranges) * threads / stage.extent
        alone = time(stage.work, machine, stage.threads).nanoseconds
        extra += max(0.0, share * time(stage.work, machine, threads).nanoseconds - alone)
    return extra


def _cover(ranges: Sequence[tuple[int, int]], extent: int) -> bool:
    """Whether they are all of so many iterations, each once."""
    ends = [0, *(end for _, end in ranges)]
    return ends[-1] == extent and all(begin == end for (begin, _), end in zip(ranges, ends, strict=False))


def _saved(candidate: _Candidate, machine: Machine) -> tuple[float, int]:
    """Nanoseconds to move what calls hand on, where that lies beyond the second caches; and the bytes of that.

    A store reads the line that it writes to, unless that is near, and writes it back.
    """
    nanoseconds, handed, near = 0.0, 0, _near(machine)
    for name, buffer in candidate.inside.items():
        nbytes = buffer.numel * buffer.itemsize
        readers = [stage for stage in candidate.members if name in stage.loads]
        maker = next(stage for stage in candidate.members if name in stage.stores)
        level = machine.level(max(maker.work.working_set, nbytes), maker.threads)
        if level not in near:
            nanoseconds += (2 + len(readers)) * nbytes / level.read.of(candidate.threads)
            handed += nbytes
    return nanoseconds, handed


def _fewest_strips(candidate: _Candidate, machine: Machine) -> int:
    """In how many strips of a part the second cache holds the windows, and what each strip reads again.

    Raises _NoChain if it does not hold those of the shortest.
    """
    begin, end = candidate.part(0)
    most, held = min(end - begin, _MOST_RUNS // (candidate.threads * len(candidate.members))), 0
    for strips in (*(1 << k for k in range(most.bit_length())), most):
        length = -(-(end - begin) // strips)
        first = begin + int((end - begin - length) * _SOMEWHERE)
        held = _held(candidate, (first, first + length))
        if held <= _SHARE * machine.own_cache:
            return strips
    if held <= _MOST_SHARE * machine.own_cache:
        return most
    why = f"of {most} strips of a thread's part each needs {held} bytes, more than {_MOST_SHARE} of the second cache"
    raise _NoChain(why, too_large=True)


def _held(candidate: _Candidate, of_last: tuple[int, int]) -> int:
    """Bytes of windows for a strip, and of what it reads else."""
    held: dict[str, int] = {}
    for stage, mine in zip(candidate.members, _needed(candidate.members, of_last), strict=True):
        for name in stage.loads if mine else ():
            assert mine is not None
            nbytes, whole = stage.hull(name, mine), stage.hull(name, (0, stage.extent))
            if name not in candidate.inside and nbytes < _ALL * whole:  # planes, of which a strip reads a part each
                nbytes = min(nbytes, whole * (mine[1] - mine[0]) // stage.extent)
            held[name] = max(nbytes, held.get(name, 0))
    return sum(held.values())


# ------------------------------------------------------------------------------------------------ strips


@dataclass(frozen=True, slots=True)
class _Walk:
    """A part, strip by strip. runs: of each strip, the iterations of each call. stretches: of each buffer and strip the
    first element that this or a later strip touches, and the last one that is made."""

    runs: Sequence[Sequence[tuple[int, int]]]
    stretches: Mapping[str, Sequence[tuple[int, int]]]


def _walked(candidate: _Candidate, begin: int, end: int) -> _Walk | None:
    """None if a strip needs what would have to be made before the first one."""
    members = candidate.members
    done: list[int | None] = [None] * len(members)
    started: list[int] = [0] * len(members)
    strips: list[list[tuple[int, int]]] = []
    for strip in range(candidate.strips):
        share = [begin + (end - begin) * (strip + k) // candidate.strips for k in (0, 1)]
        wanted: dict[str, tuple[int, int]] = {}
        runs: list[tuple[int, int]] = []
        for number in reversed(range(len(members))):
            stage = members[number]
            mine = (share[0], share[1]) if number == len(members) - 1 else _makers(stage, wanted)
            start = done[number]
            if mine is None or mine[0] >= mine[1]:
                runs.append((start or 0, start or 0))
                continue
            if start is None:
                start = started[number] = mine[0]
            if mine[0] < started[number]:
                return None
            done[number] = max(start, mine[1])
            runs.append((start, max(start, mine[1])))
            if start < mine[1]:
                _note_loads(stage, (start, mine[1]), wanted)
        strips.append(runs[::-1])
    return _Walk(strips, {name: _stretches(name, members, strips) for name in candidate.inside})


def _stretches(
    name: str, members: Sequence[_Stage], runs: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """Of each strip, see `_Walk`."""
    lows: list[int] = []
    highs: list[int] = []
    for strip in runs:
        ends = [
            reach.over(*mine)
            for stage, mine in zip(members, strip, strict=True)
            for found in (stage.loads, stage.stores)
            for reach in ([found[name]] if name in found and mine[0] < mine[1] else [])
        ]
        lows.append(min((low for low, _ in ends), default=1 << 62))
        highs.append(max((high for _, high in ends), default=-1))
    needed = list(accumulate(reversed(lows), min))[::-1]
    return list(zip(needed, accumulate(highs, max), strict=True))


def _room(stretches: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Bytes of a window over these."""
    longest = max(high - low + 1 for low, high in stretches)
    return -(-longest * itemsize // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def _steps(walk: _Walk, windows: Sequence[Window], itemsizes: Mapping[str, int]) -> Iterator[int]:
    """What a thread does, see `Chain.parts`."""
    begins: dict[str, int] = {}
    for strip, runs in enumerate(walk.runs):
        for number, window in enumerate(windows):
            itemsize, stretches = itemsizes[window.buffer], walk.stretches[window.buffer]
            low, high = stretches[strip]
            if high < low or (high + 1) * itemsize <= begins.get(window.buffer, -1 << 62) + window.nbytes:
                continue
            begin = low * itemsize // ALIGNMENT * ALIGNMENT
            made = (stretches[strip - 1][1] + 1) * itemsize if window.buffer in begins else 0
            begins[window.buffer] = begin
            yield from (~number, begin, max(0, made - begin))
        for number, (first, end) in enumerate(runs):
            if first < end:
                yield from (number, first, end)
