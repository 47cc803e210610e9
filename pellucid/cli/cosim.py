"""`pellucid cosim`: compare every intermediate result with eager."""

from __future__ import annotations

from typing import Any

import click

from pellucid.cli.target import SETTING, Target, target_command


@target_command("pellucid cosim model.py:make --against inductor")
@click.option(
    "--live", is_flag=True, help="Only observe. By default each step is given eager's results, so that all faults show."
)
@click.option("--against", metavar="NAME|RUN", help="Compare with this backend, or with a run, instead of with eager.")
@click.option(
    "--against-option", "others", type=SETTING, multiple=True, help="Compare with the backend with this option."
)
def cosim(target: Target, live: bool, against: str | None, others: tuple[tuple[str, Any], ...]) -> None:
    """Which intermediate result of TARGET is the first wrong one when it is compiled, and which kernel computed it?

    With --against RUN the results saved in the run are compared, and --live is implied. Exits with 1 when one is wrong.
    """
    from pellucid.kit.debug.cosim import Other, cosim_isolated, write_csv
    from pellucid.kit.debug.simulation import COMPLETE, LIVE
    from pellucid.kit.runs.run import split_run

    request = target.request()
    other = Other(against or request.backend, dict(others)) if against or others else None
    mode = LIVE if live or (against and split_run(against)) else COMPLETE
    found = cosim_isolated(request, mode, target.seconds, target.memory, other)
    if target.folder is not None:
        write_csv(found, target.folder)
    target.finish(found)
