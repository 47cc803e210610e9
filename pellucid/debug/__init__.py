"""The debugging kit: what is wrong with a compiled program, where, and the smallest proof.

Its tools work on any backend of `torch.compile`, through a `Subject`; they know most of Pellucid and of TorchInductor.
`check(fn, args)` compares; `Program(fn, args)` has all of the commands as methods; `replay` and `diff` take runs.
"""

from pellucid.debug.api import Program
from pellucid.debug.capture import replay
from pellucid.debug.check import Checked, Culprit, Request, check
from pellucid.debug.diff import diff
from pellucid.debug.judge import Judgement, Output, Verdict
from pellucid.debug.run import open_run

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
