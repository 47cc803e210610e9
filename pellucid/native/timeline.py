"""Times of the runs of compiled graphs, taken by the native runtime between `start` and `stop`.

All times are nanoseconds of the clock of `time.perf_counter_ns`; threads are numbered by the operating system.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from pellucid.native.counters import Counter, words_of
from pellucid.native.loader import library
from pellucid.native.words import RUN_HEAD


class Span(NamedTuple):
    """What a thread did from `begin` to `end`."""

    thread: int
    begin: int
    end: int


class CallTime(NamedTuple):
    """A call of a plan, which begins when the previous one ends. shares: of the threads, for a kernel that several
    threads ran; else none. Consecutive brief calls that were timed together divide that time in proportion to their
    times in runs that timed them alone.

    counts: of the counters passed to `start`, in the calling thread.
    """

    begin: int
    end: int
    shares: tuple[Span, ...]
    counts: tuple[int, ...] = ()


class RunTime(NamedTuple):
    """A run of the instance whose number is `plan`. calls: all, or the completed ones if the run failed."""

    plan: int
    span: Span
    calls: tuple[CallTime, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The runs that ended between a start and a stop. lost: how many more did not fit into memory.

    words: as timeline.h writes them. A tick takes `rate` nanoseconds; tick number `ticks` was at time `nanoseconds`.
    """

    words: array[int]
    lost: int
    nanoseconds: int
    ticks: int
    rate: float

    def __iter__(self) -> Iterator[RunTime]:
        alone = self._alone()
        for plan, thread, (begin, first, end), ends, shares, counted in self._runs():
            times = [self._time(each) for each in (first, *_filled(first, ends, alone[plan]))]
            by_call: dict[int, list[Span]] = {}
            for i in range(0, len(shares), 4):
                call, worker, since, until = shares[i : i + 4]
                by_call.setdefault(call, []).append(Span(worker, self._time(since), self._time(until)))
            counts = _counts(counted, len(ends))
            timed = tuple(
                CallTime(since, until, tuple(by_call.get(i, ())), counts[i] if counts else ())
                for i, (since, until) in enumerate(pairwise(times))
            )
            yield RunTime(plan, Span(thread, self._time(begin), self._time(end)), timed)

    def _runs(self) -> Iterator[_Run]:
        words, at = self.words, 0
        while at < len(words):
            plan, thread, begin, first, end, calls, shares, counted = words[at : at + RUN_HEAD]
            at += RUN_HEAD
            ends = words[at : at + calls]
            at += calls
            after = at + 4 * shares
            yield _Run(plan, thread, (begin, first, end), ends, words[at:after], words[after : after + counted])
            at = after + counted

    def _alone(self) -> dict[int, list[float]]:
        """By plan, the median ticks of each call in the runs that timed it alone."""
        taken: dict[int, list[list[int]]] = {}
        for run in self._runs():
            known = taken.setdefault(run.plan, [])
            known += ([] for _ in range(len(run.ends) - len(known)))
            for times, since, until in zip(known, (run.times[1], *run.ends), run.ends, strict=False):
                if since and until:
                    times.append(until - since)
        return {plan: [median(times) if times else 1 for times in known] for plan, known in taken.items()}

    def _time(self, ticks: int) -> int:
        return self.nanoseconds + round((ticks - self.ticks) * self.rate)


class _Run(NamedTuple):
    """A run, in ticks. times: begin, begin of the first call, end. ends: of the calls, 0 if the clock was not read."""

    plan: int
    thread: int
    times: tuple[int, int, int]
    ends: array[int]
    shares: array[int]
    counted: array[int]


def _counts(counted: array[int], calls: int) -> list[tuple[int, ...]]:
    """The counts of each call, from the values of the counters before and after it."""
    each = len(counted) // (calls + 1)
    known = [counted[i * each : (i + 1) * each] for i in range(calls + 1)] if each else []
    return [tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in pairwise(known)]


def _filled(begin: int, ends: Sequence[int], alone: Sequence[float]) -> Iterator[int]:
    """The ends of calls: calls that were timed together divide that time in proportion to their times alone. In a run
    that failed, calls after the last one with a time are left out.
    """
    together: list[float] = []
    for end, ticks in zip(ends, alone, strict=False):
        together.append(ticks)
        if end:
            rate = (end - begin) / (sum(together) or 1)
            yield from (begin + round(rate * elapsed) for elapsed in list(accumulate(together))[:-1])
            yield end
            begin = end
            together.clear()


def start(counters: Sequence[Counter] = ()) -> None:
    """Start to time every run of a compiled graph, in all threads of the process.

    counters: read around each call too, which adds a microsecond to its time: use them for counts, not for times.
    """
    library().pellucid_timeline_start(words_of(counters), len(counters))


def stop() -> Timeline:
    """Stop timing, and return the runs that have ended since `start`."""
    size = ctypes.c_int64()
    address = library().pellucid_timeline_stop(ctypes.byref(size))
    words = array("q")
    words.frombytes(ctypes.string_at(address, 8 * size.value))
    began, first, ended, last, lost = words[:5]
    rate = (ended - began) / (last - first) if last > first else 1.0
    return Timeline(words[5:], lost, began, first, rate)
