"""`pellucid cosim`: every intermediate result, compiled beside eager."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command


@target_command
@click.option(
    "--live", is_flag=True, help="Observe only; otherwise each step works on eager's results, so that all faults show."
)
def cosim(target: Target, live: bool) -> None:
    """Which intermediate result of TARGET is the first that is wrong when it is compiled, and which kernel made it?

    Exits with 1 when one is.
    """
    from pellucid.debug.cosim import COMPLETE, LIVE, cosim_isolated
    from pellucid.debug.show import cosimulated

    mode = LIVE if live else COMPLETE
    target.finish(cosim_isolated(target.request(), mode, target.seconds, target.memory), cosimulated)
