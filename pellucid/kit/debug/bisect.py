"""Which component of a backend is to blame: the first whose use makes a program fail, and what in it.

A backend has a ladder (`Subject.ladder`): ways to run a program from eager on, each with one more component. The
search keeps a rung that is good and a higher one that is bad, and halves what lies between. What is to blame within
the component, see `culprit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.check import Checked, Culprit, check_target, isolated
from pellucid.kit.debug.culprit import find_culprit, operators_in, run_as_far, stand_on
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.process.child import SECONDS, Failure, Worker
from pellucid.kit.process.forks import Forks
from pellucid.kit.runs.target import Request, subject_for
from pellucid.kit.shown import Shown

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Tried:
    """One rung and what became of the program there. other: it failed, but not in the way that is looked for."""

    component: str
    verdict: Verdict
    other: bool = False


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
    request: Request,
    seconds: float = SECONDS,
    memory: int = 0,
    tell: Callable[[str], None] = print,
    start: Callable[[int], Worker | Forks] = Worker,
) -> Bisected:
    """Find the component that makes a program fail; every attempt runs in a process of its own.

    seconds, memory (bytes): what an attempt may take. tell: is given a line before each attempt. start: makes what the
    attempts run in, of the memory. Raises UserError as `check_isolated` does.
    """
    with start(memory) as worker:
        tried: list[Tried] = []

        def run(number: int | None, name: str) -> Checked:
            tell(f"trying {name}")
            return isolated(worker, check_rung, request, number, seconds=seconds, backend=request.backend)

        whole = run(None, "all of it")
        tried.append(Tried("all of it", whole.verdict))
        if whole.good:
            return Bisected(request.backend, NOTHING, None, whole, tuple(tried))
        if not whole.verdict.bad:
            why = next(output.judgement.why for output in whole.outputs if output.verdict is Verdict.UNSURE)
            raise NotJudged(f"{request.target} cannot be judged: {why}", hint="give it other inputs")
        names = worker.call(rung_names, request, seconds=seconds)
        if isinstance(names, Failure):
            raise UserError(f"the backend {request.backend} cannot be taken apart: {names}")
        low, high, worst, where = -1, len(names) - 1, whole, None
        while high - low > 1:
            middle = (low + high) // 2
            found = run(middle, names[middle])
            same = found.verdict.bad and same_failure(whole, found)
            tried.append(Tried(names[middle], found.verdict, found.verdict.bad and not same))
            low, high, worst, where = (low, middle, found, middle) if same else (middle, high, worst, where)
        culprit = worst.step
        if culprit is not None and worst.failure is not None:
            culprit = narrowed(worker, request, where, culprit, worst.failure.kind, seconds)
        if culprit is None:
            answer = worker.call(find_culprit, request, high, seconds=seconds)
            culprit = answer if isinstance(answer, Culprit) else None
    return Bisected(request.backend, names[high], culprit, whole, tuple(tried))


def narrowed(
    worker: Worker | Forks, request: Request, number: int | None, culprit: Culprit, kind: str, seconds: float
) -> Culprit:
    """The operator at which a kernel of several ends that does not return, as the kernel where that cannot be told.

    The kernel is run as far as each of them, by halving. kind: of its failure.
    """
    inside = worker.call(operators_in, request, number, culprit.kernel, seconds=seconds)
    if isinstance(inside, Failure) or len(inside) < 2:
        return culprit

    def fails(at: int) -> bool:
        found = worker.call(run_as_far, request, number, culprit.kernel, at, seconds=seconds)
        return isinstance(found, Failure) and found.kind == kind

    low, high = -1, len(inside) - 1
    if not fails(high):
        return culprit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return replace(culprit, fx_nodes=inside[high].fx_nodes, user_lines=inside[high].user_lines)


def same_failure(one: Checked, other: Checked) -> bool:
    """Whether two bad runs fail in the same way, in the same place: an output, an exception, a step, where known."""
    if one.verdict is not other.verdict:
        return False
    if one.failure is None or other.failure is None:
        bad = [{each.name for each in found.outputs if each.verdict.bad} for found in (one, other)]
        return not bad[0] or not bad[1] or not bad[0].isdisjoint(bad[1])
    if one.verdict is Verdict.ERROR and one.failure.what != other.failure.what:
        return False
    nodes = [found.step.fx_nodes if found.step else () for found in (one, other)]
    return not nodes[0] or not nodes[1] or not set(nodes[0]).isdisjoint(nodes[1])


# ------------------------------------------------------------------------------------------------ in the worker


def rung_names(request: Request) -> list[str]:
    """The components of a backend, from the front."""
    return [rung.component for rung in subject_for(request).ladder()]


def check_rung(request: Request, number: int | None) -> Checked:
    """`check` on a rung of the ladder; None: the backend as it is."""
    return check_target(request, stand_on(subject_for(request), number, request))
