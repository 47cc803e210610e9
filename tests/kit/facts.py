"""What a program's steps move and compute, for tests of profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pellucid.kit.subjects.clock import clock
from pellucid.kit.subjects.facts import StepFacts
from pellucid.kit.subjects.registry import subject_of


def facts_of(fn: Callable[..., Any], *args: Any, backend: str = "pellucid") -> list[StepFacts]:
    """The facts of the steps of a program, of the first run after those that compile it."""
    torch._dynamo.reset()
    timed = subject_of(backend).clocked(fn)
    with torch.no_grad():
        for _ in range(2):
            timed(*args)
        with clock() as taken:
            timed(*args)
    (run,) = taken.runs
    return [step.facts for step in run.steps]
