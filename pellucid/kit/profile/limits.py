"""How far a step is from what this machine can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.ir.types import DType
from pellucid.kit.subjects.facts import StepFacts
from pellucid.machine import Machine, Work, time
from pellucid.native.machine import machine_here
from pellucid.options import make_options


@dataclass(frozen=True, slots=True)
class Limit:
    """name: what binds it. bound, estimate: nanoseconds that it takes at the least, and that the model expects."""

    name: str
    bound: float
    estimate: float


def known_machine() -> tuple[Machine, str]:
    """The machine that times are held against, and where its figures are from, in words."""
    machine, measured = machine_here(make_options().machine)
    if measured:
        return machine, f"{machine.name}, as `pellucid doctor` measured it"
    return machine, f"the {machine.name}, not this one: `pellucid doctor` measures it"


def limit_of(facts: StepFacts, machine: Machine) -> Limit | None:
    """None where nobody knows what the step moves.

    A library call whose operations nobody knows only moves. One whose threads nobody knows has all of PyTorch's.
    """
    if facts.loaded is None or facts.stored is None:
        return None
    work = Work(
        facts.loaded,
        facts.stored,
        facts.loaded + facts.stored if facts.touched is None else facts.touched,
        facts.flops or 0,
        next((dtype for dtype in DType if dtype.value == facts.dtype), DType.F32),
        facts.instructions,
        facts.kind,
        facts.parts,
    )
    found = time(work, machine, facts.threads or torch.get_num_threads())
    return Limit(found.limit, found.bound, found.nanoseconds)
