"""`pellucid minify`: the smallest graph that still fails."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import SECONDS, err


@target_command
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Candidates tried at once.")
@click.option("--budget", type=SECONDS, default=600.0, show_default=True, help="Seconds for the whole search.")
def minify(target: Target, jobs: int, budget: float) -> None:
    """What is the smallest part of TARGET's graphs that still fails in the same way when it is compiled?

    The standalone program is written to -o, by default a new run. Exits with 1 when something fails.
    """
    from pellucid.debug.minify import minify as run
    from pellucid.debug.show import minified

    request = target.request()
    found = run(
        request,
        target.run_of(request),
        jobs=jobs,
        budget=budget,
        seconds=target.seconds,
        memory=target.memory,
        tell=lambda line: err.print(line, markup=False),
    )
    target.finish(found, minified)
