"""Explain the compile error of a program, or else every optimisation that its backend did not apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pellucid.kit.debug.explain import Explanation, explain
from pellucid.kit.debug.frontend import GRAPH_BREAK, RECOMPILATION, listening, starting
from pellucid.kit.process.child import SECONDS, Failure, Worker, failure_of, pass_on, raise_if_nothing_compiles
from pellucid.kit.runs.run import run_of
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.refusals import BY_PYTHON, Refusal
from pellucid.native.trials import VARIANT
from pellucid.reuse import Start

KINDS = ("fusion", "vectorisation", "fallback", BY_PYTHON, GRAPH_BREAK, RECOMPILATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons(Shown, Explanation):
    """The compile error explained, with empty fields where there was none.

    failure: how compilation failed, if not because of a kernel. refusals: what was not done in the graphs that
    compiled. starts: whether the store has the program's compiled graphs. variants: for kernels with several variants,
    which one runs, or that calls will determine it.
    """

    backend: str
    failure: Failure | None = None
    refusals: tuple[Refusal, ...] = ()
    starts: tuple[Start, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the C++ compiler rejected a kernel."""
        return bool(self.kernel)

    @property
    def good(self) -> bool:
        return not self.refused and self.failure is None


def reasons(request: Request, seconds: float = SECONDS, memory: int = 0) -> Reasons:
    """Compile a program in a separate process, and report what failed or was not done."""
    with Worker(memory) as worker:
        found = worker.call(find_reasons, request, seconds=seconds)
    if not isinstance(found, Failure):
        return found
    pass_on(found)
    return Reasons(backend=request.backend, cause=str(found), failure=found)


def find_reasons(request: Request) -> Reasons:
    """Like `reasons`, in this process."""
    with listening() as refusals, starting(request.backend, request.options) as starts:
        graphs, subject = captured(request)
    saved = _about(request)
    refusals += [
        Refusal(each["kind"], tuple(each["subject"]), each["cause"], (), each["user_line"])
        for each in saved.get("refusals", [])
    ]
    starts += [Start(**each) for each in saved.get("starts", [])]
    variants: list[str] = []
    for graph in graphs:
        try:
            with torch.no_grad():
                compiled = subject.compile(graph)
            refusals += compiled.refusals()
            variants += (each["why"] for each in compiled.decisions() if each["rule"] == VARIANT)
        except Exception as error:
            raise_if_nothing_compiles(error)
            refused = subject.refused(error)
            found = {"backend": subject.name, "refusals": tuple(refusals), "starts": tuple(starts)}
            if refused is not None:
                return Reasons(**asdict(explain(refused)), **found)
            failure = failure_of(error)
            return Reasons(cause=str(failure), failure=failure, **found)
    return Reasons(backend=subject.name, refusals=tuple(refusals), starts=tuple(starts), variants=tuple(variants))


def _about(request: Request) -> Mapping[str, Any]:
    """The metadata of a run, which includes what the front end did during capture."""
    run = run_of(request.target, request.libraries)
    return {} if run is None else run.about
