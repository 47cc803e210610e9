"""Times of compiled graphs: while a clock is on, each run of a graph records the begin and end of each of its steps.

Pellucid's runtime times its own graphs. Inductor's are timed around the calls of its generated module, see
`inductor/timing.py`. All times are nanoseconds of `time.perf_counter_ns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pellucid.errors import UserError
from pellucid.executable import INSTANCES, Sized
from pellucid.kit.subjects.facts import StepFacts
from pellucid.kit.subjects.pellucid_facts import facts_of
from pellucid.native import timeline
from pellucid.native.counters import Counter
from pellucid.native.timeline import CallTime, RunTime, Span


class Timed(NamedTuple):
    """A step of a run."""

    facts: StepFacts
    time: CallTime


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of a compiled graph by a thread. steps: in order; fewer than in the graph if the run failed."""

    graph: str
    span: Span
    steps: tuple[Timed, ...]


Facts: TypeAlias = "tuple[StepFacts | None, ...]"


@dataclass
class Clock:
    """runs: those that ended while it was on, ordered by begin; available once it is off.

    lost: the number of missing runs, because the buffer was full, or the graph was freed before its facts were read.
    """

    runs: list[TimedRun] = field(default_factory=list)
    lost: int = 0
    _facts: dict[int, Facts] = field(default_factory=dict)  # by the number of the instance

    def add(self, run: TimedRun) -> None:
        """Add a run that was not timed by Pellucid's runtime."""
        self.runs.append(run)


_on: list[Clock] = []


def running_clock() -> Clock | None:
    """The clock that is on, if any."""
    return _on[0] if _on else None


@contextmanager
def clock(again: Clock | None = None, counters: Sequence[Counter] = ()) -> Iterator[Clock]:
    """Time all runs of this process in this context. again: a clock to add them to. counters: see `timeline.start`.

    Raises UserError if a clock is on already.
    """
    if _on:
        raise UserError("a profile is being taken already", hint="take one after the other")
    made = again or Clock()
    alive = dict(INSTANCES)  # they may be freed before the end
    _on.append(made)
    timeline.start(counters)
    try:
        yield made
    finally:
        _on.clear()
        taken = timeline.stop()
        _decode(made, taken, {**alive, **INSTANCES})
        made.runs.sort(key=lambda run: run.span.begin)


def _decode(made: Clock, taken: timeline.Timeline, instances: dict[int, Sized]) -> None:
    """Add the runs that the runtime has timed."""
    made.lost += taken.lost
    for run in taken:
        sized = instances.get(run.plan)
        if sized is None:
            made.lost += 1
            continue
        if run.plan not in made._facts:
            made._facts[run.plan] = facts_of(sized)
        made.runs.append(TimedRun(sized.plan.name, run.span, _steps(run, made._facts[run.plan])))


def _steps(run: RunTime, facts: Sequence[StepFacts | None]) -> tuple[Timed, ...]:
    """The steps of a run, without the calls of probes."""
    return tuple(Timed(fact, time) for fact, time in zip(facts, run.calls, strict=False) if fact is not None)
