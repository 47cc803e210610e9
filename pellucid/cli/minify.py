"""`pellucid minify`: the smallest graph that still fails."""

from __future__ import annotations

from pathlib import Path

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import SECONDS, err, out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Look at the backward graph as well.")
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
def minify(target, backend, options, threads, timeout, memory, as_json, backward, jobs, budget, folder) -> None:
    """What is the smallest part of TARGET's graphs that still fails in the same way when it is compiled?

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 when something fails.
    """
    from pellucid.debug.check import Request
    from pellucid.debug.minify import minify as run
    from pellucid.debug.show import minified

    request = Request(target, backend, dict(options), threads or 0, backward)
    found = run(
        request,
        folder,
        jobs=jobs,
        budget=budget,
        seconds=timeout,
        memory=(memory or 0) << 20,
        tell=lambda line: err.print(line, markup=False),
    )
    finish(found, as_json, lambda result: out.print(minified(result)), Exit.GOOD if found.good else Exit.BAD)
