"""Interleave the timing of several calls, so that disturbances of the machine affect all of them equally.

In each round every subject has one slot; the order rotates from round to round. A slot is two untimed calls, which
bring the subject's data back into the caches (the second is still up to a tenth slower than later ones), followed by as
many timed calls as fill it.
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
"""Makes the given number of timed calls, after `UNTIMED` untimed ones."""


def interleave(
    runners: Mapping[str, Runner],
    budget: float,
    *,
    baseline: str | None = None,
    on_round: Callable[[float], None] = lambda done: None,
) -> dict[str, list[Slot]]:
    """Let `runners` time their calls for about `budget` seconds; returns the slots of each, one per round.

    Stops early once every ratio to `baseline` (by default the first one) is known to within 0.5 %. Makes at least
    `MIN_ROUNDS` rounds, even if they take longer than the budget. `on_round` is called with the fraction done.
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
    """Time `count` calls in this process, after `UNTIMED` untimed ones."""
    for _ in range(UNTIMED):
        call()
    faults = _minor_faults()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    return Slot(seconds / count, (_minor_faults() - faults) / count)


def _calls_per_slot(runner: Runner) -> int:
    """The number of calls that fill a slot; the calls made to measure it also warm up the subject."""
    runner(1)
    return max(1, min(10_000, math.ceil(SLOT_SECONDS / max(runner(1).seconds, 1e-7))))


def _settled(slots: Mapping[str, list[Slot]], baseline: str) -> bool:
    """Whether each ratio's uncertainty is small; checked every fourth round."""
    if len(slots[baseline]) % 4:
        return False
    base = [s.seconds for s in slots[baseline]]
    others = [name for name in slots if name != baseline]
    return bool(others) and all(
        pairwise_ratio(base, [s.seconds for s in slots[name]]).uncertainty < SETTLED for name in others
    )


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
