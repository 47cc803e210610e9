"""Bisect the components of a backend: find the first whose use makes a program fail, and the culprit in it.

A backend has a ladder (`Subject.ladder`): ways to run a program, from eager upwards, each with one more component. The
binary search maintains a good rung and a higher bad one. See `culprit` for the search within the component.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.check import Checked, Culprit, check_target, isolated
from pellucid.kit.debug.culprit import find_culprit, operators_in, run_up_to, select_rung
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.process.child import SECONDS, Failure, Worker
from pellucid.kit.process.forks import Forks
from pellucid.kit.runs.target import Request, subject_for
from pellucid.kit.shown import Shown

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Tried:
    """The verdict on the program at one rung. other: it failed, but not in the way that is searched for."""

    component: str
    verdict: Verdict
    other: bool = False


@dataclass(frozen=True, slots=True)
class Bisected(Shown):
    """component: at fault; `nothing` where the program is good. culprit: the step in it, if it could be determined.

    checked: the program under the whole backend. tried: the rungs that were run, in order.
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
    """Find the component that makes a program fail; attempts run in worker processes.

    seconds, memory (bytes): limits of an attempt. tell: is called with a line of text before each attempt. start:
    creates the worker, given the memory limit. Raises UserError as `check_isolated` does.
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
            raise NotJudged(f"{request.target} cannot be judged: {why}", hint="use other inputs")
        names = worker.call(rung_names, request, seconds=seconds)
        if isinstance(names, Failure):
            raise UserError(f"the backend {request.backend} cannot be split into components: {names}")
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
    """Narrow a kernel that does not return down to one of its operators; the kernel itself if that is impossible.

    A binary search runs the kernel up to one of its operators each time. kind: of its failure.
    """
    inside = worker.call(operators_in, request, number, culprit.kernel, seconds=seconds)
    if isinstance(inside, Failure) or len(inside) < 2:
        return culprit

    def fails(at: int) -> bool:
        found = worker.call(run_up_to, request, number, culprit.kernel, at, seconds=seconds)
        return isinstance(found, Failure) and found.kind == kind

    low, high = -1, len(inside) - 1
    if not fails(high):
        return culprit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return replace(culprit, fx_nodes=inside[high].fx_nodes, user_lines=inside[high].user_lines)


def same_failure(one: Checked, other: Checked) -> bool:
    """Whether two bad runs have the same verdict and, where known, an output, exception or FX node in common."""
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
    """The components of a backend, in order."""
    return [rung.component for rung in subject_for(request).ladder()]


def check_rung(request: Request, number: int | None) -> Checked:
    """`check` on a rung of the ladder; None: the whole backend."""
    return check_target(request, select_rung(subject_for(request), number, request))
