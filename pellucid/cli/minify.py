"""`pellucid minify`: the smallest graph that still fails."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import SECONDS, Count, one_line
from pellucid.kit.process.apart import Apart, Died, died
from pellucid.kit.shown import plain


@target_command("pellucid minify model.py:make --backend inductor -o smallest")
@click.option(
    "--check",
    "command",
    metavar="CMD",
    default="",
    help="Let CMD decide: it is passed the path of a candidate program, and exits with 0 if that shows the failure.",
)
@click.option("--jobs", type=Count(min=1), default=1, show_default=True, help="Candidates tried in parallel.")
@click.option("--budget", type=SECONDS, default=600.0, show_default=True, help="Seconds for the whole search.")
def minify(target: Target, command: str, jobs: int, budget: float) -> None:
    """What is the smallest part of TARGET's graphs that still fails in the same way when it is compiled?

    The standalone program is written to -o, by default a new run. Exits with 1 when something fails. With --check CMD,
    a shell command decides instead: exit status 0 keeps a candidate, as for C-Reduce and llvm-reduce, and any other
    rejects it.
    """
    settings = {"jobs": jobs, "budget": budget, "seconds": target.seconds, "memory": target.memory, "command": command}
    about = target.about()
    place = os.path.abspath(target.run_of(about["target"]))
    with one_line() as tell:
        tell("trying the whole program")
        work = Apart("pellucid.cli.minify:search", about, place, settings)
        try:
            found = work.result(tell, budget + 2 * target.seconds)
        except Died as death:
            raise died(about["target"], death) from None
    target.end(found.result, found.text, found.good)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search, as JSON types and as text. It uses no class of the kit, whose modules import torch."""

    good: bool
    result: dict[str, Any]
    text: Any


def search(about: dict[str, Any], folder: str, settings: dict[str, Any]) -> Found:
    """Search in a separate process, so that this one need not import torch."""
    from pellucid.kit.minify.minify import Settings
    from pellucid.kit.minify.minify import search as run
    from pellucid.kit.runs.target import Request
    from pellucid.kit.show import shown

    found = run(Request(**about), folder, Settings(**settings), text=True)
    return Found(found.good, plain(found), shown(found))
