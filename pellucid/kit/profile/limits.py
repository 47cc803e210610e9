"""How close a step comes to the limits of this machine, and why it stays below."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.ir.types import DType
from pellucid.kit.subjects.facts import StepFacts
from pellucid.machine import Estimate, Machine, Work, time
from pellucid.native.machine import machine_here
from pellucid.options import make_options

REACHED = 70
"""Percent of its limit from which on a step needs no explanation."""

_MIN_SHARE = 0.03  # of a step's time: reasons that cost less are omitted
_REST = 0.1  # of a step's time: a larger unexplained rest is reported


def known_machine() -> tuple[Machine, str]:
    """The machine that times are compared with, and the source of its figures, in words."""
    machine, measured = machine_here(make_options().machine)
    if measured:
        return machine, f"{machine.name}, as measured by `pellucid doctor`"
    return machine, f"the {machine.name}, not this machine: run `pellucid doctor` to measure it"


def limit_of(facts: StepFacts, machine: Machine) -> Estimate | None:
    """The minimum and the expected time of a step; None if the bytes that it moves are unknown.

    A library call of unknown FLOPs is assumed to only move bytes, one of unknown threads to use all of PyTorch's.
    """
    if facts.loaded is None or facts.stored is None:
        return None
    return time(_work(facts, facts.loaded, facts.stored), machine, _threads(facts))


def why_below(
    facts: StepFacts, limit: Estimate, nanoseconds: float, imbalance: float, machine: Machine
) -> tuple[str, ...]:
    """Why a step that took `nanoseconds` is below `REACHED` percent of its limit; empty where it is not.

    The most expensive reason comes first. Each has its maximum share of the time: of work that overlaps, the longer
    part counts. The last one is the rest: work that is not modelled, and interference.
    imbalance: the share of time that its threads wait for the slowest one.
    """
    if round(100 * limit.bound / nanoseconds) >= REACHED:
        return ()
    left, reasons = nanoseconds - limit.bound, list[str]()
    for cost, what in sorted(_reasons(facts, limit, nanoseconds, imbalance, machine), reverse=True):
        taken = min(cost, left)
        if taken >= _MIN_SHARE * nanoseconds:
            reasons.append(f"{taken / nanoseconds:.0%} {what}")
            left -= taken
    if left >= _REST * nanoseconds:
        reasons.append(f"{left / nanoseconds:.0%} {', '.join(_uncounted(facts, limit))}, interference")
    return tuple(reasons)


def _reasons(
    facts: StepFacts, limit: Estimate, nanoseconds: float, imbalance: float, machine: Machine
) -> Iterator[tuple[float, str]]:
    """Nanoseconds above the limit, and what takes them."""
    moves = limit.limit not in ("compute", "overhead")
    if limit.computing > limit.bound:
        yield limit.computing - limit.bound, _computing(facts)
    unused = max(0.0, (facts.fetched or 0) / facts.nbytes - 1) if facts.nbytes else 0.0
    yield limit.least * unused, "fetching partly used cache lines"
    extra, level = limit.fetching - limit.least if moves else limit.fetching, _farthest(facts, machine)
    yield extra, f"fetching {'all of it ' if level == limit.limit else ''}from {level}"
    if limit.limit != "overhead":
        yield limit.overhead, "call overhead and thread synchronisation"
    yield imbalance * nanoseconds, "waiting for its slowest thread"


def _computing(facts: StepFacts) -> str:
    if facts.kind != "kernel":
        return "the library being slower than the peak"
    return f"computing without vectors ({facts.scalar})" if facts.scalar else "issuing vector instructions"


def _uncounted(facts: StepFacts, limit: Estimate) -> tuple[str, ...]:
    """What a step does that the model does not count."""
    scalar = (_computing(facts),) if facts.scalar and limit.computing <= limit.bound else ()
    return facts.uncounted + scalar or (
        "work that is not modelled" if facts.kind == "kernel" else "work of the library",
    )


def _farthest(facts: StepFacts, machine: Machine) -> str:
    """The cache level, or memory, that holds the bytes with the largest reuse distance."""
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
