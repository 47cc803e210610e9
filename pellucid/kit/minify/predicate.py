"""A command of the user's as the judge of candidates."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from pellucid.errors import UserError
from pellucid.kit.minify.repro import How, write_repro
from pellucid.kit.minify.subgraph import EagerPart, NotAGraph, Subgraph, Workshop
from pellucid.kit.minify.trial import GOOD, Found, Kind

ACCEPTED = Kind("accepted", "the command")

# As shells have it: a command that cannot be run, or is not there.
_NO_COMMAND = (126, 127)


class Predicate:
    """A command that is run through the shell with the path of a candidate's program as its last argument.

    It exits with 0 when the program shows the failure that is looked for, and with anything else when it does not: as
    for C-Reduce, C-Vise and llvm-reduce, and the opposite of `git bisect run`.
    """

    def __init__(self, command: str, shop: Workshop, how: How, seconds: float) -> None:
        self.command, self.shop, self.how, self.seconds = command, shop, how, seconds

    def found(self, part: Subgraph) -> Found:
        """Whether the command accepts a part."""
        try:
            graph = self.shop.cut(part)
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
                hint="give --check a command of the shell; the program's path is added to it",
            )
        return ended.returncode == 0
