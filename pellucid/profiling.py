"""`with pellucid.profile() as p:` times the compiled graphs that run in the block, wherever they are called from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from torch._dynamo.utils import counters

from pellucid.backend import wait_for_builds
from pellucid.errors import UserError
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.measure import BUDGET, advised, program_of, take
from pellucid.kit.profile.process import Watch
from pellucid.kit.profile.result import BLOCK, Comparison, Profile
from pellucid.kit.profile.rows import Call, profile_of
from pellucid.kit.profile.trace import write_trace
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.clock import Clock, clock
from pellucid.kit.subjects.registry import subject_of

__all__ = ["Comparison", "Profile", "compare", "profile", "profile_of_function"]


class profile:
    """Times the graphs that Pellucid compiled while a block runs, in all threads; `print` shows where the time went.

    After the block `result` is the `Profile`: the whole block counts as one call. An exception passes through; the
    profile then covers the calls before it. Raises UserError inside another profile, and if the result is read before
    the block has ended.

        with pellucid.profile() as p:
            model(x)
        print(p)
        p.trace("trace.json")
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._clock = Clock()
        self._watch = Watch()
        self._begin = 0
        self._graphs = 0
        self._calls: list[Call] = []
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """The profile of the block."""
        if self._result is None:
            raise UserError("the profile is not finished", hint="read it after the `with` block")
        return self._result

    def __enter__(self) -> profile:
        wait_for_builds()
        self._stack.enter_context(self._watch.calling())
        self._stack.enter_context(self._watch.counting(1))
        self._stack.enter_context(clock(self._clock))
        self._graphs = counters["stats"]["unique_graphs"]
        self._begin = perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls = [Call(self._begin, perf_counter_ns())]
        self._stack.close()
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        process, notes = self._watch.seen(), list[str]()
        compiled = counters["stats"]["unique_graphs"] - self._graphs
        if compiled > 0:
            notes.append(f"graphs were compiled in the block: {compiled}; run it again for the time of calls alone")
            process = replace(process, page_faults=0.0)  # of compiling
        found = profile_of(self._clock, self._calls, backend="pellucid", target=BLOCK, notes=notes, failure=failure)
        self._result = advised(replace(found, process=process))

    def __str__(self) -> str:
        return str(self.result)

    def _repr_html_(self) -> str:
        return self.result._repr_html_()

    def trace(self, file: str | Path) -> None:
        """Write the block as a Chrome/Perfetto trace."""
        _ = self.result  # raises UserError if there is none
        write_trace(Path(file), self._clock.runs, self._calls)


def profile_of_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str = "pellucid",
    options: Mapping[str, Any] | None = None,
    backward: bool = False,
    dynamic: bool | None = None,
    budget: float = BUDGET,
) -> Profile:
    """The profile of `fn(*args, **kwargs)` compiled by a backend, or run in `eager` mode, on copies of its inputs.

    backward: with gradients. budget: seconds of calls. Raises UserError for a function that fails.
    """
    case = Case.of(fn, args, kwargs)
    subject = None if backend == "eager" else subject_of(backend, options)
    return take([program_of(case, subject, backward, dynamic)], case.name, budget)[0]
