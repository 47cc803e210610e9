"""The debugging kit: what is wrong with a compiled program, where, and the smallest example of it.

Its tools work on any backend of `torch.compile`, through a `Subject`; they know most of Pellucid and of TorchInductor.
`check(fn, args)` compares; `Program(fn, args)` has all of the commands as methods, for a function in this process:
`fn(*args, **kwargs)`; `replay` and `diff` take runs.

Methods that need other processes work on a run, into which the program is captured: a function cannot be sent to
another process, its graphs can. Dynamo, AOTAutograd and decompositions, which run before that, can only be examined by
the commands. Each method raises UserError for a program that cannot be captured, and the exceptions of `fn` in eager
mode.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.kit import diagnose as _diagnose
from pellucid.kit.debug import bisect as _bisect
from pellucid.kit.debug import capture as _capture
from pellucid.kit.debug import reasons as _reasons
from pellucid.kit.debug import testgen as _testgen
from pellucid.kit.debug.capture import replay
from pellucid.kit.debug.check import Checked, Culprit, check, check_case
from pellucid.kit.debug.cosim import Cosimulated, cosim_case
from pellucid.kit.debug.diff import diff
from pellucid.kit.debug.match import Matches, match_graphs
from pellucid.kit.debug.simulation import COMPLETE
from pellucid.kit.judge.judge import Judgement, Output, Verdict
from pellucid.kit.minify import minify as _minify
from pellucid.kit.programs.case import Case
from pellucid.kit.runs.run import open_run, save_graph
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.base import Subject
from pellucid.kit.subjects.registry import subject_of
from pellucid.trace.folder import RunWriter

__all__ = [
    "Checked",
    "Culprit",
    "Judgement",
    "Output",
    "Program",
    "Request",
    "Verdict",
    "check",
    "diff",
    "open_run",
    "replay",
]


@dataclass(frozen=True)
class Program:
    """A function or module with its arguments, and how it is compiled.

    backward: include gradients and the backward graph. dynamic: as for `torch.compile`.
    """

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "pellucid"
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = False
    dynamic: bool | None = None

    @property
    def case(self) -> Case:
        return Case.of(self.fn, self.args, self.kwargs)

    @property
    def subject(self) -> Subject:
        return subject_of(self.backend, self.options)

    def check(self, fuzz: int = 0) -> Checked:
        """Compare it with eager mode, in this process: a crash of the code ends it. See `pellucid check`."""
        return check_case(self.case, self.subject, self.backward, self.dynamic, fuzz)

    def cosim(self, mode: str = COMPLETE) -> Cosimulated:
        """Compare every intermediate result, in this process. See `pellucid cosim`."""
        return cosim_case(self.case, self.subject, mode, backward=self.backward, dynamic=self.dynamic)

    def match(self) -> Matches:
        """What each kernel implements. See `pellucid match`."""
        subject = self.subject
        return match_graphs(subject.graphs(self.case, backward=self.backward, dynamic=self.dynamic), subject)

    def explain(self) -> _reasons.Reasons:
        """Why it does not compile, or which optimisations were not done. See `pellucid explain`."""
        with self._run() as request:
            return _reasons.reasons(request)

    def bisect(self, tell: Callable[[str], None] = print) -> _bisect.Bisected:
        """The component after graph capture that causes the fault. See `pellucid bisect`."""
        with self._run() as request:
            return _bisect.bisect(request, tell=tell)

    def diagnose(self, folder: str | Path, **settings: Any) -> _diagnose.Diagnosis:
        """Everything that can be determined about it, within a time budget. See `pellucid diagnose`."""
        with self._run() as request:
            return _diagnose.diagnose(request, Path(folder), **settings)

    def minify(self, folder: str | Path, **settings: Any) -> _minify.Minified:
        """Write the smallest program that fails into a folder. See `pellucid minify` and `minify.Settings`."""
        with self._run() as request:
            return _minify.minify(request, Path(folder), **settings)

    def testgen(self, folder: str | Path, kernels: Sequence[str] = ()) -> _testgen.Tests:
        """Write a test for each kernel into a folder. See `pellucid testgen`."""
        with self._run() as request:
            return _testgen.testgen(request, Path(folder), kernels)

    def capture(self, folder: str | Path, *, intermediates: bool = False) -> _capture.CapturedRun:
        """Write its graphs and their compiled form into a new folder. See `pellucid capture`."""
        self._write(Path(folder))
        return _capture.capture(self._request(Path(folder)), Path(folder), intermediates=intermediates)

    @contextmanager
    def _run(self) -> Iterator[Request]:
        with tempfile.TemporaryDirectory(prefix="pellucid-run-") as folder:
            self._write(Path(folder) / "run")
            yield self._request(Path(folder) / "run")

    def _write(self, folder: Path) -> None:
        writer = RunWriter.create(folder, backend=self.backend, options=self.options, target=self.case.name)
        for graph in self.subject.graphs(self.case, backward=self.backward, dynamic=self.dynamic):
            save_graph(writer, graph)

    def _request(self, folder: Path) -> Request:
        return Request(str(folder), self.backend, self.options)
