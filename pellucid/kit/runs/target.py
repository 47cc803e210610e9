"""Requests: a program or a run, a backend, and how to run it; and the graphs of a request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pellucid.kit.process.child import Worker, failure_of, not_judged
from pellucid.kit.process.sanitizer import variables
from pellucid.kit.programs.case import Case, load_case, load_case_file
from pellucid.kit.programs.decompose import decomposed
from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.run import open_run, split_run
from pellucid.kit.subjects.base import Subject, loss_of
from pellucid.kit.subjects.registry import subject_of


@dataclass(frozen=True, slots=True)
class Request:
    """What to inspect in a worker process.

    target: `FILE.py:NAME`, or a run (`RUN` or `RUN:GRAPH`). threads: torch's; 0 for its default. libraries: those
    whose operators the graphs of a run may call in addition to PyTorch's. sanitize: run the kernels under sanitizers.
    """

    target: str
    backend: str = "pellucid"
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0
    backward: bool = False
    dynamic: bool | None = None
    fuzz: int = 0
    libraries: tuple[str, ...] = ()
    sanitize: bool = False

    def worker(self, memory: int = 0) -> Worker:
        """The process to inspect it in. memory: bytes that it may use. Raises ToolchainError if sanitizers are needed
        and the compiler has none."""
        return Worker(memory, variables() if self.sanitize else None)


def subject_for(request: Request) -> Subject:
    """The backend of a request. Also sets torch's number of threads."""
    if request.threads:
        torch.set_num_threads(request.threads)
    if split_run(request.target) is None:
        load_case_file(request.target)  # it may register the backend
    subject = subject_of(request.backend, request.options)
    if not request.sanitize:
        return subject
    os.environ.pop("LD_PRELOAD", None)  # compilers need not run under the sanitizers
    return subject.sanitized()


def graphs_for(request: Request, subject: Subject) -> list[Graph]:
    """The graphs that a subject captures of a request's program, or those of its run, decomposed for the subject."""
    found = split_run(request.target)
    if found is not None:
        run = open_run(found[0], request.libraries)
        table = {} if run.about["backend"] == subject.name else subject.decompositions()
        return [decomposed(graph, table) for graph in run.graphs(found[1])]
    case = load_case(request.target)
    try:
        return subject.graphs(case, backward=request.backward, dynamic=request.dynamic)
    except Exception:
        _run_eagerly(case, request)
        raise


def captured(request: Request) -> tuple[list[Graph], Subject]:
    """The graphs of a request, and its backend."""
    subject = subject_for(request)
    return graphs_for(request, subject), subject


def _run_eagerly(case: Case, request: Request) -> None:
    """Raise NotJudged for a program that fails without a compiler too."""
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(request.backward):
            result = case.fresh()()
            if request.backward:
                loss_of(result).backward()
    except Exception as error:
        raise not_judged(f"{request.target} fails in eager mode", failure_of(error)) from error
