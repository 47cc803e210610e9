"""`pellucid check`: compare compiled results with eager ones."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import Count


@target_command("pellucid check model.py:make --backward --fuzz 16")
@click.option("--fuzz", type=Count(min=0), default=0, metavar="N", help="Try N variations of the inputs too.")
@click.option("--sanitize", is_flag=True, help="Run the kernels under AddressSanitizer and UBSan (GCC only; slow).")
def check(target: Target, fuzz: int, sanitize: bool) -> None:
    """Is TARGET wrong when it is compiled, or does it only round differently? A float64 reference decides.

    Exits with 1 when it is wrong, fails, crashes or hangs.
    """
    from pellucid.kit.debug.check import check_isolated

    target.finish(check_isolated(target.request(fuzz=fuzz, sanitize=sanitize), target.seconds, target.memory))
