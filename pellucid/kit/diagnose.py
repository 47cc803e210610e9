"""What is wrong with a program, on one page: runs the tools that earlier results call for, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pellucid.errors import PellucidError, UserError
from pellucid.kit.debug.bisect import Bisected, bisect
from pellucid.kit.debug.check import Checked, Culprit, check_isolated
from pellucid.kit.debug.cosim import Cosimulated, cosim_isolated
from pellucid.kit.debug.reasons import Reasons, reasons
from pellucid.kit.debug.simulation import COMPLETE, Difference
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.minify.minify import Minified, minify
from pellucid.kit.process.child import SECONDS
from pellucid.kit.runs.target import Request
from pellucid.kit.shown import Shown

BUDGET = 120.0
MIN_SECONDS = 5.0
"""The time that a tool needs at least; none is started with less left."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """A tool of the kit that was run, the seconds that it took, and its result in a few words."""

    tool: str
    seconds: float
    found: str


@dataclass(frozen=True, slots=True)
class Diagnosis(Shown):
    """Everything found out within the budget; results of tools that were not run or found nothing are None.

    bisected: the component at fault. divergence: the first wrong result. reasons: why the program does not compile, or
    what was not compiled, fused or vectorised of a correct one. minified: the smallest graph that fails, and its
    program.
    """

    target: str
    backend: str
    checked: Checked
    bisected: Bisected | None = None
    divergence: Difference | None = None
    reasons: Reasons | None = None
    minified: Minified | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def good(self) -> bool:
        return self.checked.good

    @property
    def verdict(self) -> Verdict:
        return self.checked.verdict

    @property
    def culprit(self) -> Culprit | None:
        """The step at fault."""
        return self.checked.step or (self.bisected.culprit if self.bisected is not None else None)

    @property
    def kernel(self) -> str:
        """The kernel at fault, or the library operator; empty if unknown."""
        if self.reasons is not None and self.reasons.refused:
            return self.reasons.kernel
        if self.culprit is not None:
            return self.culprit.kernel or self.culprit.op
        return self.divergence.kernel if self.divergence is not None and self.divergence.graph else ""

    @property
    def fx_nodes(self) -> tuple[str, ...]:
        """The operators at fault, by their names in the graph: only one if it could be determined."""
        if self.reasons is not None and self.reasons.refused:
            return tuple(filter(None, (self.reasons.fx_node,)))
        if self.divergence is not None:
            return (self.divergence.operator,)
        return self.culprit.fx_nodes if self.culprit is not None else ()

    @property
    def user_lines(self) -> tuple[str, ...]:
        """The user's lines (`file:line`) that call these operators."""
        if self.reasons is not None and self.reasons.refused:
            return tuple(filter(None, (self.reasons.user_line,)))
        if self.divergence is not None and self.divergence.operator_line:
            return (self.divergence.operator_line,)
        return self.culprit.user_lines if self.culprit is not None else ()


def diagnose(
    request: Request,
    folder: Path,
    budget: float = BUDGET,
    seconds: float = SECONDS,
    memory: int = 0,
    tell: Callable[[str], None] = print,
) -> Diagnosis:
    """Find out what is wrong with a program, from the verdict to a standalone program that shows the failure.

    folder: for that program. budget: seconds after which no further tool is started. seconds: until a run of the
    program counts as hanging, at most the budget. memory: bytes that each process may use. tell: called with a line of
    progress. Raises UserError and NotJudged as `check_isolated` does.
    """
    work = _Work(request, folder, time.monotonic() + budget, min(seconds, budget), memory, tell)
    found = work.blame()
    checked = found.checked if isinstance(found, Bisected) else found
    bisected = found if isinstance(found, Bisected) and not found.good else None
    divergence = work.diverging() if checked.verdict is Verdict.WRONG else None
    why = work.reasons() if checked.good or checked.verdict is Verdict.ERROR else None
    smallest = work.smallest() if checked.verdict.bad else None
    return Diagnosis(request.target, request.backend, checked, bisected, divergence, why, smallest, tuple(work.stages))


@dataclass(slots=True)
class _Work:
    request: Request
    folder: Path
    until: float
    seconds: float
    memory: int
    tell: Callable[[str], None]
    stages: list[Stage] = field(default_factory=list)

    def left(self) -> float:
        return self.until - time.monotonic()

    def limit(self) -> float:
        """The time limit of one process, in seconds."""
        return min(self.seconds, max(round(self.left()), MIN_SECONDS))

    def run(self, tool: str, work: Callable[[], T], found: Callable[[T], str]) -> T | None:
        """The result of a tool; None if it fails, or if no time is left for it."""
        if self.left() < MIN_SECONDS:
            self.stages.append(Stage(tool, 0.0, "not run: no time left"))
            return None
        self.tell(tool)
        started = time.monotonic()
        try:
            result = work()
        except PellucidError as error:
            why = "stopped: no time left" if self.left() < MIN_SECONDS else f"failed: {error.message}"
            self.stages.append(Stage(tool, time.monotonic() - started, why))
            return None
        self.stages.append(Stage(tool, time.monotonic() - started, found(result)))
        return result

    def blame(self) -> Bisected | Checked:
        """The verdict and the component at fault; only the verdict for a backend that cannot be bisected."""
        started = time.monotonic()

        def tell(step: str) -> None:
            self.tell(f"check and bisect: {step}")

        try:
            found: Bisected | Checked = bisect(self.request, self.seconds, self.memory, tell)
            blamed = f"at fault: {found.component}" if isinstance(found, Bisected) and not found.good else ""
        except UserError as error:
            found = check_isolated(self.request, self.seconds, self.memory)
            blamed = error.message if found.verdict.bad else ""
        verdict = found.checked.verdict if isinstance(found, Bisected) else found.verdict
        says = f"{verdict.value}; {blamed}" if blamed else verdict.value
        self.stages.append(Stage("check and bisect", time.monotonic() - started, says))
        return found

    def diverging(self) -> Difference | None:
        def says(found: Cosimulated) -> str:
            first = found.first_divergence
            return f"the first wrong operator: {first.operator}" if first is not None else "no result is wrong"

        found = self.run("cosim", lambda: cosim_isolated(self.request, COMPLETE, self.limit(), self.memory), says)
        return found.first_divergence if found is not None else None

    def reasons(self) -> Reasons | None:
        def says(found: Reasons) -> str:
            if found.refused:
                return f"the C++ compiler refused {found.kernel}"
            return found.cause if found.failure is not None else f"{len(found.refusals)} missed optimisations"

        return self.run("explain", lambda: reasons(self.request, self.limit(), self.memory), says)

    def smallest(self) -> Minified | None:
        def says(found: Minified) -> str:
            if found.good:
                return "none of its graphs fails on its own"
            more = "" if found.finished else "; stopped: no time left"
            return f"reduced from {found.nodes_before} to {found.nodes_after} nodes{more}"

        def work() -> Minified:
            budget = max(self.left(), MIN_SECONDS)
            return minify(self.request, self.folder, budget=budget, seconds=self.limit(), memory=self.memory)

        return self.run("minify", work, says)
