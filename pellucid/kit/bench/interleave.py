"""Timing calls side by side, so that whatever disturbs the machine disturbs all of them alike.

A round gives each subject one slot, and the order rotates from round to round. A slot is two calls that are not
timed, which bring the subject's own data back into the caches (the second is still up to a tenth slower than those
after it), and then as many timed calls as fill it.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pellucid.kit.stats import pairwise_ratio, uncollected

MIN_ROUNDS = 5
MAX_ROUNDS = 500
SLOT_SECONDS = 0.02
UNTIMED = 2
SETTLED = 0.005


@dataclass(frozen=True, slots=True)
class Slot:
    """Means per call over one slot: wall seconds, and minor page faults of the whole process."""

    seconds: float
    faults: float


Runner: TypeAlias = Callable[[int], Slot]
"""Makes so many timed calls, after `UNTIMED` that are not."""


def interleave(
    runners: Mapping[str, Runner],
    budget: float,
    *,
    baseline: str | None = None,
    on_round: Callable[[float], None] = lambda done: None,
) -> dict[str, list[Slot]]:
    """Let `runners` time their calls for about `budget` seconds; returns the slots of each, one per round.

    Stops early once every ratio to `baseline` (the first one by default) is known to half a per cent. Makes
    at least `MIN_ROUNDS` rounds, also when they take longer than the budget. `on_round` hears the fraction
    done.
    """
    names = list(runners)
    baseline = baseline or names[0]
    counts = {name: _calls_per_slot(runners[name]) for name in names}
    slots: dict[str, list[Slot]] = {name: [] for name in names}
    start = time.perf_counter()
    with uncollected():
        for turn in range(MAX_ROUNDS):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                slots[name].append(runners[name](counts[name]))
            spent = time.perf_counter() - start
            on_round(min(1.0, max(spent / budget, (turn + 1) / MAX_ROUNDS)))
            if turn + 1 >= MIN_ROUNDS and (spent >= budget or _settled(slots, baseline)):
                break
    on_round(1.0)
    return slots


def run_slot(call: Callable[[], object], count: int) -> Slot:
    """Time so many calls in this process, after `UNTIMED` that are not."""
    for _ in range(UNTIMED):
        call()
    faults = _minor_faults()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    return Slot(seconds / count, (_minor_faults() - faults) / count)


def _calls_per_slot(runner: Runner) -> int:
    """How many calls fill a slot; the calls made to find out also warm the subject up."""
    runner(1)
    return max(1, min(10_000, math.ceil(SLOT_SECONDS / max(runner(1).seconds, 1e-7))))


def _settled(slots: Mapping[str, list[Slot]], baseline: str) -> bool:
    """Whether each ratio's uncertainty is small; a round in four is enough to ask."""
    if len(slots[baseline]) % 4:
        return False
    base = [s.seconds for s in slots[baseline]]
    others = [name for name in slots if name != baseline]
    return bool(others) and all(
        pairwise_ratio(base, [s.seconds for s in slots[name]]).uncertainty < SETTLED for name in others
    )


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
