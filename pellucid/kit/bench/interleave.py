"""Timing calls side by side, so that whatever disturbs the machine disturbs all of them alike.

A round gives each subject one slot, and the order rotates from round to round. A slot is one call that is not
timed, which brings the subject's own data back into the caches, and then as many timed calls as fill it.
"""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pellucid.kit.bench.stats import pairwise_ratio

Call = Callable[[], object]

MIN_ROUNDS = 5
MAX_ROUNDS = 500
SLOT_SECONDS = 0.02
SETTLED = 0.005


@dataclass(frozen=True, slots=True)
class Slot:
    """Means per call over one slot: wall seconds, and minor page faults of the whole process."""

    seconds: float
    faults: float


def interleave(
    calls: Mapping[str, Call],
    budget: float,
    *,
    baseline: str | None = None,
    on_round: Callable[[float], None] = lambda done: None,
) -> dict[str, list[Slot]]:
    """Time `calls` for about `budget` seconds; returns the slots of each, one per round.

    Stops early once every ratio to `baseline` (the first one by default) is known to half a per cent. Makes
    at least `MIN_ROUNDS` rounds, also when they take longer than the budget. `on_round` hears the fraction
    done.
    """
    names = list(calls)
    baseline = baseline or names[0]
    counts = {name: _calls_per_slot(calls[name]) for name in names}
    slots: dict[str, list[Slot]] = {name: [] for name in names}
    start = time.perf_counter()
    with _without_garbage_collection():
        for turn in range(MAX_ROUNDS):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                slots[name].append(_run_slot(calls[name], counts[name]))
            spent = time.perf_counter() - start
            on_round(min(1.0, max(spent / budget, (turn + 1) / MAX_ROUNDS)))
            if turn + 1 >= MIN_ROUNDS and (spent >= budget or _settled(slots, baseline)):
                break
    on_round(1.0)
    return slots


def _run_slot(call: Call, count: int) -> Slot:
    call()
    faults = _minor_faults()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    return Slot(seconds / count, (_minor_faults() - faults) / count)


def _calls_per_slot(call: Call) -> int:
    """How many calls fill a slot; the calls made to find out also warm the subject up."""
    for _ in range(2):
        call()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return max(1, min(10_000, math.ceil(SLOT_SECONDS / max(seconds, 1e-7))))


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


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
