"""Which component of a backend is to blame: the first whose use makes a program fail, and what in it.

A backend has a ladder (`Subject.ladder`): ways to run a program from eager on, each with one more component. The
search keeps a rung that is good and a higher one that is bad, and halves what lies between. What is to blame within
the component, see `culprit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.check import Checked, Culprit, Request, check_target, isolated, subject_for
from pellucid.kit.debug.culprit import find_culprit, stand_on
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.process.child import SECONDS, Failure, Worker
from pellucid.kit.shown import Shown

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Tried:
    """One rung and what became of the program there."""

    component: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bisected(Shown):
    """component: to blame; `nothing` where the program is good. culprit: what in it, as far as that can be told.

    checked: the program under the whole backend. tried: the rungs that were run, in that order.
    """

    backend: str
    component: str
    culprit: Culprit | None
    checked: Checked
    tried: tuple[Tried, ...]

    @property
    def good(self) -> bool:
        return self.component == NOTHING


def bisect(
    request: Request, seconds: float = SECONDS, memory: int = 0, tell: Callable[[str], None] = print
) -> Bisected:
    """Find the component that makes a program fail; every attempt runs in a process of its own.

    seconds, memory (bytes): what an attempt may take. tell: is given a line before each attempt. Raises UserError as
    `check_isolated` does.
    """
    with Worker(memory) as worker:
        tried: list[Tried] = []

        def run(number: int | None, name: str) -> Checked:
            tell(f"trying {name}")
            found = isolated(worker, check_rung, request, number, seconds=seconds, backend=request.backend)
            tried.append(Tried(name, found.verdict))
            return found

        whole = run(None, "all of it")
        if whole.good:
            return Bisected(request.backend, NOTHING, None, whole, tuple(tried))
        if not whole.verdict.bad:
            why = next(output.judgement.why for output in whole.outputs if output.verdict is Verdict.UNSURE)
            raise NotJudged(f"{request.target} cannot be judged: {why}", hint="give it other inputs")
        names = worker.call(rung_names, request, seconds=seconds)
        if isinstance(names, Failure):
            raise UserError(f"the backend {request.backend} cannot be taken apart: {names}")
        low, high, worst = -1, len(names) - 1, whole
        while high - low > 1:
            middle = (low + high) // 2
            found = run(middle, names[middle])
            low, high, worst = (low, middle, found) if found.verdict.bad else (middle, high, worst)
        culprit = worst.step
        if culprit is None:
            answer = worker.call(find_culprit, request, high, seconds=seconds)
            culprit = answer if isinstance(answer, Culprit) else None
    return Bisected(request.backend, names[high], culprit, whole, tuple(tried))


# ------------------------------------------------------------------------------------------------ in the worker


def rung_names(request: Request) -> list[str]:
    """The components of a backend, from the front."""
    return [rung.component for rung in subject_for(request).ladder()]


def check_rung(request: Request, number: int | None) -> Checked:
    """`check` on a rung of the ladder; None: the backend as it is."""
    return check_target(request, stand_on(subject_for(request), number, request))
