"""How far a step is from what this machine can do, and why."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.ir.types import DType
from pellucid.kit.subjects.facts import StepFacts
from pellucid.machine import Estimate, Machine, Work, time
from pellucid.native.machine import machine_here
from pellucid.options import make_options

REACHED = 70
"""Percent of its limit: a step that reaches as many needs no explanation."""

_LEAST = 0.03  # of a step's time: what takes less explains nothing
_REST = 0.1  # of a step's time: what is left unexplained is said


def known_machine() -> tuple[Machine, str]:
    """The machine that times are held against, and where its figures are from, in words."""
    machine, measured = machine_here(make_options().machine)
    if measured:
        return machine, f"{machine.name}, as `pellucid doctor` measured it"
    return machine, f"the {machine.name}, not this one: `pellucid doctor` measures it"


def limit_of(facts: StepFacts, machine: Machine) -> Estimate | None:
    """What a step takes at the least, and is expected to take; None where nobody knows what it moves.

    A library call whose operations nobody knows only moves. One whose threads nobody knows has all of PyTorch's.
    """
    if facts.loaded is None or facts.stored is None:
        return None
    return time(_work(facts, facts.loaded, facts.stored), machine, _threads(facts))


def why_below(
    facts: StepFacts, limit: Estimate, nanoseconds: float, imbalance: float, machine: Machine
) -> tuple[str, ...]:
    """Why a step that took so long is below `REACHED` percent of its limit; empty where it is not.

    What costs most comes first. Each reason has its share of the time, at the most: what a processor does at once
    counts for the longer. The last one is all that is left: work that nothing counts, and what disturbed the step.
    imbalance: the share that its threads wait for the last of them.
    """
    if round(100 * limit.bound / nanoseconds) >= REACHED:
        return ()
    left, said = nanoseconds - limit.bound, list[str]()
    for cost, what in sorted(_reasons(facts, limit, nanoseconds, imbalance, machine), reverse=True):
        taken = min(cost, left)
        if taken >= _LEAST * nanoseconds:
            said.append(f"{taken / nanoseconds:.0%} {what}")
            left -= taken
    if left >= _REST * nanoseconds:
        said.append(f"{left / nanoseconds:.0%} {', '.join(_uncounted(facts, limit))}, being disturbed")
    return tuple(said)


def _reasons(
    facts: StepFacts, limit: Estimate, nanoseconds: float, imbalance: float, machine: Machine
) -> Iterator[tuple[float, str]]:
    """Nanoseconds beyond the limit, and what takes them."""
    moves = limit.limit not in ("compute", "overhead")
    if limit.computing > limit.bound:
        yield limit.computing - limit.bound, _computing(facts)
    apart = max(0.0, (facts.fetched or 0) / facts.nbytes - 1) if facts.nbytes else 0.0
    yield limit.least * apart, "fetching lines of the cache of which it needs a part"
    beyond, level = limit.fetching - limit.least if moves else limit.fetching, _farthest(facts, machine)
    yield beyond, f"fetching {'all of it ' if level == limit.limit else ''}from {level}"
    if limit.limit != "overhead":
        yield limit.overhead, "being called, and threads meeting"
    yield imbalance * nanoseconds, "waiting for the last of its threads"


def _computing(facts: StepFacts) -> str:
    if facts.kind != "kernel":
        return "what the library is slower at this"
    return f"computing without vectors ({facts.scalar})" if facts.scalar else "issuing vector instructions"


def _uncounted(facts: StepFacts, limit: Estimate) -> tuple[str, ...]:
    """What a step does that is in no figure."""
    scalar = (_computing(facts),) if facts.scalar and limit.computing <= limit.bound else ()
    return facts.uncounted + scalar or (
        "work that nothing counts" if facts.kind == "kernel" else "work of the library",
    )


def _farthest(facts: StepFacts, machine: Machine) -> str:
    """The level that its bytes come from, those that were touched longest ago."""
    reach = max((part.distance for part in facts.parts), default=0)
    return machine.level(max(reach, _touched(facts)), _threads(facts)).name


def _work(facts: StepFacts, loaded: int, stored: int) -> Work:
    return Work(
        loaded,
        stored,
        _touched(facts),
        facts.flops or 0,
        next((dtype for dtype in DType if dtype.value == facts.dtype), DType.F32),
        facts.instructions,
        facts.kind,
        facts.parts,
    )


def _touched(facts: StepFacts) -> int:
    return facts.nbytes or 0 if facts.touched is None else facts.touched


def _threads(facts: StepFacts) -> int:
    return facts.threads or torch.get_num_threads()
