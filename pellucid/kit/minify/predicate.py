"""A user's command as the predicate on candidates."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from pellucid.errors import UserError
from pellucid.kit.minify.repro import How, write_repro
from pellucid.kit.minify.subgraph import CapturedGraphs, EagerPart, NotAGraph, Subgraph
from pellucid.kit.minify.trial import GOOD, Found, Kind

ACCEPTED = Kind("accepted", "the command")

# Exit codes of a shell: the command cannot be executed, or is not found.
_NO_COMMAND = (126, 127)


class Predicate:
    """A shell command, run with the path of a candidate's program appended as its last argument.

    It exits with 0 when the program shows the wanted failure, else with another code: as for C-Reduce, C-Vise and
    llvm-reduce, and the opposite of `git bisect run`.
    """

    def __init__(self, command: str, captured: CapturedGraphs, how: How, seconds: float) -> None:
        self.command, self.captured, self.how, self.seconds = command, captured, how, seconds

    def found(self, part: Subgraph) -> Found:
        """Whether the command accepts a part."""
        try:
            graph = self.captured.cut(part)
            EagerPart(graph)
        except NotAGraph:
            return Found(GOOD)
        with tempfile.TemporaryDirectory(prefix="pellucid-candidate-") as folder:
            program, _ = write_repro(graph, self.how, Path(folder), "A candidate.")
            return Found(ACCEPTED if self.holds(program) else GOOD)

    def holds(self, program: Path) -> bool:
        """Whether the command accepts a program. Raises UserError when it cannot be run."""
        try:
            ended = subprocess.run(
                f"{self.command} {shlex.quote(str(program))}",
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.seconds,
            )
        except subprocess.TimeoutExpired:
            return False
        if ended.returncode in _NO_COMMAND:
            raise UserError(
                f"the command cannot be run: {ended.stderr.strip() or self.command}",
                hint="pass --check a shell command; the program's path is appended to it",
            )
        return ended.returncode == 0
