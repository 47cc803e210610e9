"""`pellucid report`: one page about where the time goes."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import SECONDS


@target_command("pellucid report model.py:make --against eager --against inductor")
@click.option("--against", multiple=True, metavar="eager|BACKEND", help="Compare with this too; repeatable.")
@click.option("--budget", type=SECONDS, default=10.0, show_default=True, help="Seconds of calls to measure.")
def report(target: Target, against: tuple[str, ...], budget: float) -> None:
    """Where does the time of TARGET go, and what can be done? Writes one self-contained HTML page.

    A program is captured and profiled into the run of -o, or a new one. For a run, the page shows its contents, and a
    profile is taken if it has none. The page is `report.html` in the run, or in the folder of -o.
    """
    from pellucid.kit.report.request import REPORT
    from pellucid.kit.report.request import report as run

    request = target.request()
    own = target.own_run(request.target)
    folder = own or target.run_of(request.target)
    page = target.folder / REPORT if own and target.folder else None
    target.finish(run(request, folder, against, budget, target.seconds, target.memory, page))
