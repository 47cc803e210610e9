"""`pellucid check`: eager against compiled."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import Count


@target_command("pellucid check model.py:make --backward --fuzz 16")
@click.option("--fuzz", type=Count(min=0), default=0, metavar="N", help="Try N variations of the inputs too.")
@click.option("--sanitize", is_flag=True, help="Let AddressSanitizer and UBSan watch the kernels (GCC only; slow).")
def check(target: Target, fuzz: int, sanitize: bool) -> None:
    """Is what TARGET computes when compiled wrong, or only rounded otherwise? float64 decides.

    Exits with 1 when it is wrong, fails, crashes or hangs.
    """
    from pellucid.kit.debug.check import check_isolated

    target.finish(check_isolated(target.request(fuzz=fuzz, sanitize=sanitize), target.seconds, target.memory))
