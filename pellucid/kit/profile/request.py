"""`pellucid profile`: a TARGET in a separate process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.measure import BUDGET, EAGER, Program, program_of, program_of_graphs, take
from pellucid.kit.profile.python import check_callgraph, write_callgraph
from pellucid.kit.profile.result import Comparison, Profile
from pellucid.kit.profile.saved import saved_profile
from pellucid.kit.profile.trace import write_trace
from pellucid.kit.programs.case import load_case
from pellucid.kit.runs.run import open_run, split_run
from pellucid.kit.runs.target import Request, subject_for
from pellucid.kit.subjects.base import Subject
from pellucid.kit.subjects.registry import subject_of


def profile_target(
    request: Request,
    against: str = "",
    trace: Path | None = None,
    callgraph: Path | None = None,
    budget: float = BUDGET,
    seconds: float = SECONDS,
    memory: int = 0,
) -> Profile | Comparison:
    """Profile a TARGET, or compare it with another backend's profile, or with the one in a run.

    against: `eager`, the name of a backend, or a folder that `profile -o` wrote to. trace: where to write a Chrome
    trace; callgraph: where to write cProfile's data, see `write_callgraph`. budget: seconds of calls. seconds, memory
    (bytes): limits of the process. Raises UserError for a target that does not exist, and for one that fails.
    """
    saved = saved_profile(Path(against)) if against and Path(against).is_dir() else None
    refused, hint = f"{request.target} cannot be profiled", "see `pellucid check`"
    others = [] if saved or not against else [against]
    if callgraph:
        check_callgraph(callgraph)
    files = str(trace.absolute()) if trace else "", str(callgraph.absolute()) if callgraph else ""
    with Worker(memory) as worker:
        found: list[Profile] = worker.ask(
            take_request, request, others, budget, *files, seconds=seconds, refused=refused, hint=hint
        )
    theirs = saved or (found[1] if len(found) > 1 else None)
    return found[0] if theirs is None else compare(found[0], theirs, Path(against).resolve().name if saved else "")


def take_request(
    request: Request, against: Sequence[str], budget: float, trace: str = "", callgraph: str = ""
) -> list[Profile]:
    """The profile of a request followed by those of the backends `against`, taken in this process."""
    own = None if request.backend == EAGER else subject_for(request)
    others = [None if name == EAGER else subject_of(name) for name in against]
    programs = [_program(request, subject) for subject in (own, *others)]
    found = take(programs, request.target, budget)
    if trace:
        write_trace(Path(trace), programs[0].clock.runs, programs[0].calls)
    if callgraph and programs[0].python is not None:
        write_callgraph(programs[0].python, Path(callgraph))
    return found


def _program(request: Request, subject: Subject | None) -> Program:
    found = split_run(request.target)
    if found is None:
        return program_of(load_case(request.target), subject, request.backward, request.dynamic)
    return program_of_graphs(open_run(found[0], request.libraries).graphs(found[1]), subject)
