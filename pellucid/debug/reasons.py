"""Why: the compile error of a program, or else all that its backend did not do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.debug.check import Request, captured
from pellucid.debug.child import SECONDS, Failure, Worker, failure_of, pass_on
from pellucid.debug.explain import Explanation, Refusal, explain
from pellucid.debug.frontend import GRAPH_BREAK, RECOMPILATION, listening
from pellucid.debug.run import open_run, split_run

KINDS = ("fusion", "vectorisation", "fallback", GRAPH_BREAK, RECOMPILATION)


@dataclass(frozen=True, slots=True)
class Reasons:
    """error: the compile error explained, if there was one; failure: how compilation ended otherwise than well, if
    that was no kernel's fault. refusals: what was not done in the graphs that compiled.
    """

    backend: str
    error: Explanation | None
    failure: Failure | None
    refusals: tuple[Refusal, ...]

    @property
    def good(self) -> bool:
        return self.error is None and self.failure is None


def reasons(request: Request, seconds: float = SECONDS, memory: int = 0) -> Reasons:
    """Compile a program, in a process of its own, and tell what went wrong or was not done."""
    with Worker(memory) as worker:
        found = worker.call("pellucid.debug.reasons:find_reasons", request, seconds=seconds)
    if not isinstance(found, Failure):
        return found
    pass_on(found)
    return Reasons(request.backend, None, found, ())


def find_reasons(request: Request) -> Reasons:
    """The same in this process."""
    with listening() as refusals:
        graphs, subject = captured(request)
    refusals += _captured_refusals(request)
    for graph in graphs:
        try:
            with torch.no_grad():
                refusals += subject.compile(graph).refusals()
        except Exception as error:
            refused = subject.refused(error)
            if refused is not None:
                return Reasons(subject.name, explain(refused), None, tuple(refusals))
            return Reasons(subject.name, None, failure_of(error), tuple(refusals))
    return Reasons(subject.name, None, None, tuple(refusals))


def _captured_refusals(request: Request) -> list[Refusal]:
    """What the front end did while a run was captured."""
    found = split_run(request.target)
    saved = open_run(found[0], request.libraries).about.get("refusals", []) if found is not None else []
    return [Refusal(each["kind"], tuple(each["subject"]), each["cause"], (), each["user_line"]) for each in saved]
