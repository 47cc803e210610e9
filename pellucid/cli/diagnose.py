"""`pellucid diagnose`: everything that the tools find out about a program, on one page."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import SECONDS, one_line


@target_command("pellucid diagnose model.py:make --backend inductor")
@click.option("--budget", type=SECONDS, default=120.0, show_default=True, help="Seconds for all tools together.")
def diagnose(target: Target, budget: float) -> None:
    """What is wrong with TARGET when it is compiled, and where? The command to begin with.

    Runs check and bisect, then cosim or explain depending on the verdict, then minify, and prints one page: verdict,
    component, kernel, operator, your line, a program that reproduces the failure, and what to do next. Exits with 1
    when TARGET is wrong, fails, crashes or hangs.
    """
    from pellucid.kit.diagnose import diagnose as run

    request = target.request()
    with one_line() as tell:
        found = run(request, target.run_of(request.target), budget, target.seconds, target.memory, tell)
    target.finish(found)
