"""`pellucid minify`: the smallest graph that still fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pellucid.apart import Apart, Died, died
from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, plain, target_options
from pellucid.cli.terminal import SECONDS, one_line, out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Look at the backward graph as well.")
@click.option("--dynamic", is_flag=True, help="Capture with dynamic shapes, and keep them.")
@click.option(
    "--check",
    "command",
    metavar="CMD",
    default="",
    help="Keep what CMD says: it gets the path of a candidate's program, and exits with 0 if that shows the failure.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Candidates tried at once.")
@click.option("--budget", type=SECONDS, default=600.0, show_default=True, help="Seconds for the whole search.")
@click.option(
    "-o",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pellucid_repro"),
    show_default=True,
    help="Where the standalone program goes.",
)
def minify(
    target, backend, options, threads, timeout, memory, as_json, backward, dynamic, command, jobs, budget, folder
) -> None:
    """What is the smallest part of TARGET's graphs that still fails in the same way when it is compiled?

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 when something fails.
    With --check CMD, a shell command judges instead: exit status 0 keeps a candidate, as for C-Reduce and llvm-reduce,
    and any other drops it.
    """
    about = {"backend": backend, "options": dict(options), "threads": threads or 0, "backward": backward}
    settings = {"jobs": jobs, "budget": budget, "seconds": timeout, "memory": (memory or 0) << 20, "command": command}
    place = os.path.abspath(folder)
    with one_line() as tell:
        work = Apart("pellucid.cli.minify:search", target, about | {"dynamic": dynamic or None}, place, settings)
        try:
            good, found, text = work.result(tell, budget + 2 * timeout)
        except Died as death:
            raise died(target, death) from None
    finish(found, as_json, lambda _: out.print(text), Exit.GOOD if good else Exit.BAD)


def search(target: str, about: dict[str, Any], folder: str, settings: dict[str, Any]) -> tuple[bool, Any, Any]:
    """In a process of its own, so that this one need not import torch: is it good, all of it, and what to print."""
    from pellucid.debug.check import Request
    from pellucid.debug.minify import Settings
    from pellucid.debug.minify import search as run
    from pellucid.debug.show import minified

    found = run(Request(target, **about), folder, Settings(**settings), text=True)
    return found.good, plain(found), minified(found)
