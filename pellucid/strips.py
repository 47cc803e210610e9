"""Chains of kernels that run strip by strip: some iterations of each in turn, so that the results of one are still in
a near cache when the next one reads them. An intermediate buffer then needs only a sliding window, not its full size.

Before: `a` writes all of t0, `b` reads it and writes all of t1, `c` reads that.
After: each thread, for its part of the result of `c`: some rows of `a`, then the rows of `b` and of `c` that these
allow, and so on. Rows of `a` that two threads need are computed by both.

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

# The fraction of the L2 cache that windows, and data that each strip rereads, may take; and for the shortest strips.
_SHARE, _MAX_SHARE = 0.5, 0.75
# The strip that represents all strips of a part begins at this fraction of the part: it is unlikely to be at the border
# of an image.
_SAMPLE_POSITION = 0.382
# A strip that reads at least this fraction of a buffer, such as weights, rereads all of it.
_ALL = 0.9
# How many more calls are tried once a chain is too large for the L2 cache.
_TRIES = 2
_RULE = "plan.strips"
# Maximum calls of a chain, runs of calls in all strips, and iterations of a kernel: all are enumerated.
_MAX_CALLS, _MAX_RUNS, _MAX_ITERATIONS = 24, 1 << 13, 1 << 18
# A chain must save this many times its cost: the estimate ignores other data that competes for the caches.
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Window:
    """Memory of `nbytes` in each part, for the range of a buffer that is live at one time."""

    buffer: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The calls from `first` to `last`, run strip by strip.

    parts: the steps of each thread, as triples: a call, counted from `first`, with its first iteration and one past its
    last; or ~ the number of a window, with the first byte of its buffer that it holds from then on, and how many bytes
    from there are already computed and are moved with the window.
    """

    first: int
    last: int
    windows: tuple[Window, ...]
    parts: tuple[tuple[int, ...], ...]

    def window_bytes(self, window: Window) -> int:
        """Bytes of a window in all parts."""
        return window.nbytes * len(self.parts)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A call that may be part of a chain. Its kernel has `extent` iterations, on at most `threads` threads.

    loads, stores: the elements of each buffer that its iterations access. itemsizes: bytes of an element, by buffer.
    """

    name: str
    extent: int
    threads: int
    work: Work
    loads: Mapping[str, Reach]
    stores: Mapping[str, Reach]
    itemsizes: Mapping[str, int]

    def bytes_read(self, name: str, iterations: tuple[int, int]) -> int:
        """Bytes from the first to the last element of a buffer that some iterations read."""
        first, last = self.loads[name].over(*iterations)
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
    """Which calls of a scheduled program run strip by strip; and its kernels, without streaming stores to buffers that
    are in windows.
    """
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
    windowed = {window.buffer for chain in chains for window in chain.windows}
    cached = {name: kernel.streamed & windowed for name, kernel in kernels.items()}
    why = "it is read soon, in the same strip"
    refused = [Decision("codegen.stream", (name, each), False, why) for name in cached for each in sorted(cached[name])]
    changed = {name: unstreamed(kernel, cached[name]) if cached[name] else kernel for name, kernel in kernels.items()}
    return chains, changed, (*decisions, *refused)


def _find_chains(
    stages: Sequence[_Stage | None], temporaries: Mapping[str, _Temporary], machine: Machine
) -> tuple[tuple[Chain, ...], tuple[Decision, ...]]:
    """The chains to run, and the decisions. stages: one for each call, None for a call that cannot be in a chain.
    temporaries: buffers that may have windows.
    """
    candidates: list[_Candidate] = []
    refusals: dict[int, Decision] = {}
    for begin, first in enumerate(stages):
        if first is not None and any(_is_far(name, first, temporaries, machine) for name in first.stores):
            found, refusal = _candidates(begin, stages, temporaries, machine)
            candidates += found
            if not found:
                refusals[begin] = Decision(_RULE, (first.name,), False, refusal)
    chosen, impossible = _choose(candidates, len(stages))
    chains = tuple(chain for _, chain in chosen)
    decisions = (*(each.decision(chain) for each, chain in chosen), *(each.decision(None) for each in impossible))
    inside = {call for chain in chains for call in range(chain.first, chain.last)}
    return chains, (*decisions, *(refusal for begin, refusal in refusals.items() if begin not in inside))


def _stage_of(kernel: Kernel, compiled: CppKernel, machine: Machine) -> _Stage | None:
    """A kernel as part of a chain; None if it cannot be: its sizes or the elements that it accesses are not known, it
    has index checks, or calls choose between several variants of it.
    """
    extent = compiled.extent.value or 0
    if compiled.symbols or compiled.checks or compiled.others or not 0 < extent <= _MAX_ITERATIONS:
        return None
    reaches = compiled.reaches
    if reaches is None or reaches.loads.keys() & reaches.stores.keys():
        return None
    params = compiled.computes.params
    return _Stage(
        name=kernel.name,
        extent=extent,
        threads=max(1, min(machine.cores, extent // max(1, compiled.grain))),
        work=kernel_work(kernel, compiled.plan.steps),
        loads={compiled.params[number]: reach for number, reach in reaches.loads.items()},
        stores={compiled.params[number]: reach for number, reach in reaches.stores.items()},
        itemsizes={name: param.dtype.itemsize for name, param in zip(compiled.params, params, strict=True)},
    )


# ------------------------------------------------------------------------------------------------ choosing


def _best(candidates: Sequence[_Candidate], calls: int) -> list[_Candidate]:
    """The candidates with no call in common that save the most time together."""
    by_last: dict[int, list[_Candidate]] = {}
    for candidate in candidates:
        by_last.setdefault(candidate.last, []).append(candidate)
    gains, chosen = [0.0], [list[_Candidate]()]  # entry k: for the calls before k
    for call in range(calls):
        gains.append(gains[-1])
        chosen.append(chosen[-1])
        for candidate in by_last.get(call, ()):
            if gains[candidate.begin] + candidate.gain > gains[-1]:
                gains[-1] = gains[candidate.begin] + candidate.gain
                chosen[-1] = [*chosen[candidate.begin], candidate]
    return chosen[-1]


def _choose(candidates: Sequence[_Candidate], calls: int) -> tuple[list[tuple[_Candidate, Chain]], list[_Candidate]]:
    """The best candidates that can run in strips, with their chains; and better ones that cannot."""
    impossible: list[_Candidate] = []
    while True:
        chosen = [(each, each.chain()) for each in _best(candidates, calls)]
        failed = {id(each) for each, chain in chosen if chain is None}
        if not failed:
            return [(each, chain) for each, chain in chosen if chain is not None], impossible
        impossible += [each for each in candidates if id(each) in failed]
        candidates = [each for each in candidates if id(each) not in failed]


def _candidates(
    begin: int, stages: Sequence[_Stage | None], temporaries: Mapping[str, _Temporary], machine: Machine
) -> tuple[list[_Candidate], str]:
    """The chains that begin at a call and save time; and why the shortest one does not."""
    first = stages[begin]
    assert first is not None
    found: list[_Candidate] = []
    members, refusals, too_large = [first], list[str](), 0
    for stage in stages[begin + 1 : begin + _MAX_CALLS]:
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
        return "the next call is no kernel, or the elements that each of its iterations accesses are not known"
    if any(name in other.loads or name in other.stores for name in stage.stores for other in members):
        return f"{stage.name} overwrites a buffer that calls before it use"
    return ""


def _is_far(name: str, producer: _Stage, temporaries: Mapping[str, _Temporary], machine: Machine) -> bool:
    """Whether a buffer has been evicted from the L2 caches when its producer ends."""
    return name in temporaries and machine.level(producer.work.working_set, producer.threads) not in _near(machine)


def _near(machine: Machine) -> Sequence[object]:
    return machine.levels[: machine.levels.index(machine.own_level) + 1]


class _NoChain(Exception):
    """Why calls cannot be a chain. too_large: even the shortest strips do not fit into the L2 cache."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible chain: of `members`, from the call `begin` on, with `strips` strips in each part.

    inside: buffers that no other call uses. gain: nanoseconds that it saves. passed: bytes that its calls pass to each
    other.
    """

    begin: int
    members: tuple[_Stage, ...]
    inside: Mapping[str, _Temporary]
    strips: int
    gain: float
    passed: int

    @property
    def last(self) -> int:
        return self.begin + len(self.members) - 1

    @property
    def threads(self) -> int:
        return min(stage.threads for stage in self.members)

    def part(self, number: int) -> tuple[int, int]:
        """The iterations of the last call that a thread computes."""
        extent = self.members[-1].extent
        return extent * number // self.threads, extent * (number + 1) // self.threads

    def chain(self) -> Chain | None:
        """The chain; None if a later strip needs iterations before those of the first one."""
        walks: list[_Walk] = []
        for number in range(self.threads):
            walk = _walk(self, *self.part(number))
            if walk is None:
                return None
            walks.append(walk)
        sizes = {name: buffer.itemsize for name, buffer in self.inside.items()}
        needed = {name: max(_window_bytes(walk.ranges[name], size) for walk in walks) for name, size in sizes.items()}
        windows = tuple(Window(name, nbytes) for name, nbytes in needed.items())
        return Chain(self.begin, self.last, windows, tuple(tuple(_steps(walk, windows, sizes)) for walk in walks))

    def decision(self, chain: Chain | None) -> Decision:
        names = tuple(stage.name for stage in self.members)
        if chain is None:
            return Decision(_RULE, names, False, "some strip needs iterations before those of the first strip")
        nbytes = sum(window.nbytes for window in chain.windows)
        why = (
            f"the {self.passed} bytes that they pass to each other do not fit into the L2 cache, and the {nbytes} "
            f"bytes of them that are live in one of {self.strips} strips do"
        )
        facts = (("strips", self.strips), ("estimated_ns", round(self.gain)))
        return Decision(_RULE, names, True, why, facts)


def _candidate(
    begin: int, members: tuple[_Stage, ...], temporaries: Mapping[str, _Temporary], machine: Machine
) -> _Candidate:
    """A chain of these calls with the fewest strips whose windows fit into the L2 cache. Raises _NoChain."""
    last = begin + len(members) - 1
    written = [name for stage in members for name in stage.stores if name in temporaries]
    inside = {name: temporaries[name] for name in written if temporaries[name].within(begin, last)}
    if not inside or members[-1].stores.keys() & inside.keys():
        raise _NoChain("later calls read their results")
    candidate = _Candidate(begin, members, inside, 1, 0.0, 0)
    extra = _extra_time(candidate, machine)
    strips = _fewest_strips(candidate, machine)
    saved, passed = _saved(candidate, machine)
    cost = _MARGIN * (extra + len(members) * strips * machine.call)
    if saved <= cost:
        raise _NoChain(f"it would save {saved:.0f} ns of memory traffic, and cost {cost:.0f} ns of computing and calls")
    return replace(candidate, strips=strips, gain=saved - cost, passed=passed)


def _needed(members: Sequence[_Stage], of_last: tuple[int, int]) -> list[tuple[int, int] | None]:
    """The iterations of each call that some iterations of the last one need; None where there are none."""
    wanted: dict[str, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = []
    for stage in reversed(members):
        iterations = _producing(stage, wanted) if found else of_last
        found.append(iterations)
        if iterations is not None:
            _add_loads(stage, iterations, wanted)
    return found[::-1]


def _add_loads(stage: _Stage, iterations: tuple[int, int], wanted: dict[str, tuple[int, int]]) -> None:
    """Add the ranges of buffers that some iterations of a call read."""
    for name, reach in stage.loads.items():
        low, high = reach.over(*iterations)
        known = wanted.get(name, (low, high))
        wanted[name] = min(low, known[0]), max(high, known[1])


def _producing(stage: _Stage, wanted: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """The iterations that write the wanted ranges of buffers; None if none does."""
    ranges: list[tuple[int, int]] = []
    for name, reach in stage.stores.items():
        if name in wanted and wanted[name][0] <= wanted[name][1]:
            low, high = wanted[name]
            ranges.append((int(reach.last.searchsorted(low)), int(reach.first.searchsorted(high, "right"))))
    if not ranges:
        return None
    begin, end = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    return (begin, end) if begin < end else None


def _extra_time(candidate: _Candidate, machine: Machine) -> float:
    """Nanoseconds that calls take longer in the chain: where several threads compute the same iterations, and where the
    chain has fewer threads than a call has alone. Raises _NoChain if the chain is impossible.

    Each buffer must be written in ascending order, and one that calls outside the chain read must be written once.
    """
    members, threads = candidate.members, candidate.threads
    parts = [_needed(members, candidate.part(number)) for number in range(threads)]
    extra = 0.0
    for number, stage in enumerate(members):
        of_parts = [part[number] for part in parts]
        ranges = [each for each in of_parts if each is not None]
        if len(ranges) < len(of_parts):
            raise _NoChain(f"{stage.name} computes nothing that some part of {members[-1].name} needs")
        if stage is not members[-1] and not all(reach.advances for reach in stage.stores.values()):
            raise _NoChain(f"{stage.name} does not write its results in ascending order")
        if not stage.stores.keys() <= candidate.inside.keys() and not _cover(ranges, stage.extent):
            raise _NoChain(f"later calls read results of {stage.name}, some of which two threads would compute")
        share = max(end - begin for begin, end in ranges) * threads / stage.extent
        alone = time(stage.work, machine, stage.threads).nanoseconds
        extra += max(0.0, share * time(stage.work, machine, threads).nanoseconds - alone)
    return extra


def _cover(ranges: Sequence[tuple[int, int]], extent: int) -> bool:
    """Whether ranges cover each of `extent` iterations exactly once."""
    ends = [0, *(end for _, end in ranges)]
    return ends[-1] == extent and all(begin == end for (begin, _), end in zip(ranges, ends, strict=False))


def _saved(candidate: _Candidate, machine: Machine) -> tuple[float, int]:
    """Nanoseconds to move buffers between calls, of those that do not fit into the L2 caches; and their bytes.

    A store reads its cache line, unless that is in a near cache, and writes it back.
    """
    nanoseconds, passed, near = 0.0, 0, _near(machine)
    for name, buffer in candidate.inside.items():
        nbytes = buffer.numel * buffer.itemsize
        readers = [stage for stage in candidate.members if name in stage.loads]
        producer = next(stage for stage in candidate.members if name in stage.stores)
        level = machine.level(max(producer.work.working_set, nbytes), producer.threads)
        if level not in near:
            nanoseconds += (2 + len(readers)) * nbytes / level.read.of(candidate.threads)
            passed += nbytes
    return nanoseconds, passed


def _fewest_strips(candidate: _Candidate, machine: Machine) -> int:
    """The fewest strips of a part for which windows, and data that each strip rereads, fit into the L2 cache.

    Raises _NoChain if even those of the shortest strips do not fit.
    """
    begin, end = candidate.part(0)
    most, needed = min(end - begin, _MAX_RUNS // (candidate.threads * len(candidate.members))), 0
    for strips in (*(1 << k for k in range(most.bit_length())), most):
        length = -(-(end - begin) // strips)
        first = begin + int((end - begin - length) * _SAMPLE_POSITION)
        needed = _bytes_needed(candidate, (first, first + length))
        if needed <= _SHARE * machine.own_cache:
            return strips
    if needed <= _MAX_SHARE * machine.own_cache:
        return most
    why = f"each of {most} strips of a thread's part needs {needed} bytes, more than {_MAX_SHARE} of the L2 cache"
    raise _NoChain(why, too_large=True)


def _bytes_needed(candidate: _Candidate, of_last: tuple[int, int]) -> int:
    """Bytes of windows for a strip, and of the other buffers that it reads."""
    needed: dict[str, int] = {}
    for stage, iterations in zip(candidate.members, _needed(candidate.members, of_last), strict=True):
        for name in stage.loads if iterations else ():
            assert iterations is not None
            nbytes, whole = stage.bytes_read(name, iterations), stage.bytes_read(name, (0, stage.extent))
            if name not in candidate.inside and nbytes < _ALL * whole:  # planes: a strip reads a part of each
                nbytes = min(nbytes, whole * (iterations[1] - iterations[0]) // stage.extent)
            needed[name] = max(nbytes, needed.get(name, 0))
    return sum(needed.values())


# ------------------------------------------------------------------------------------------------ strips


@dataclass(frozen=True, slots=True)
class _Walk:
    """A part, strip by strip. runs: for each strip, the iterations of each call. ranges: for each buffer and strip, the
    first element that this or a later strip accesses, and the last one that is written so far.
    """

    runs: Sequence[Sequence[tuple[int, int]]]
    ranges: Mapping[str, Sequence[tuple[int, int]]]


def _walk(candidate: _Candidate, begin: int, end: int) -> _Walk | None:
    """Divide a part into strips; None if a strip needs iterations before those of the first one."""
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
            needed = (share[0], share[1]) if number == len(members) - 1 else _producing(stage, wanted)
            start = done[number]
            if needed is None or needed[0] >= needed[1]:
                runs.append((start or 0, start or 0))
                continue
            if start is None:
                start = started[number] = needed[0]
            if needed[0] < started[number]:
                return None
            done[number] = max(start, needed[1])
            runs.append((start, max(start, needed[1])))
            if start < needed[1]:
                _add_loads(stage, (start, needed[1]), wanted)
        strips.append(runs[::-1])
    return _Walk(strips, {name: _live_ranges(name, members, strips) for name in candidate.inside})


def _live_ranges(
    name: str, members: Sequence[_Stage], runs: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """The ranges of one buffer, see `_Walk`."""
    lows: list[int] = []
    highs: list[int] = []
    for strip in runs:
        ends = [
            reach.over(*iterations)
            for stage, iterations in zip(members, strip, strict=True)
            for reaches in (stage.loads, stage.stores)
            for reach in ([reaches[name]] if name in reaches and iterations[0] < iterations[1] else [])
        ]
        lows.append(min((low for low, _ in ends), default=1 << 62))
        highs.append(max((high for _, high in ends), default=-1))
    needed = list(accumulate(reversed(lows), min))[::-1]
    return list(zip(needed, accumulate(highs, max), strict=True))


def _window_bytes(ranges: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Bytes of a window that holds each of these ranges in turn."""
    longest = max(high - low + 1 for low, high in ranges)
    return -(-longest * itemsize // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def _steps(walk: _Walk, windows: Sequence[Window], itemsizes: Mapping[str, int]) -> Iterator[int]:
    """The steps of a thread, see `Chain.parts`."""
    begins: dict[str, int] = {}
    for strip, runs in enumerate(walk.runs):
        for number, window in enumerate(windows):
            itemsize, ranges = itemsizes[window.buffer], walk.ranges[window.buffer]
            low, high = ranges[strip]
            if high < low or (high + 1) * itemsize <= begins.get(window.buffer, -1 << 62) + window.nbytes:
                continue
            begin = low * itemsize // ALIGNMENT * ALIGNMENT
            written = (ranges[strip - 1][1] + 1) * itemsize if window.buffer in begins else 0
            begins[window.buffer] = begin
            yield from (~number, begin, max(0, written - begin))
        for number, (first, end) in enumerate(runs):
            if first < end:
                yield from (number, first, end)
