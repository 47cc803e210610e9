"""`pellucid check`: eager against compiled."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Compare gradients as well.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
@click.option("--fuzz", type=click.IntRange(min=0), default=0, metavar="N", help="Try N variations of the inputs too.")
def check(target, backend, options, threads, timeout, memory, as_json, backward, dynamic, fuzz) -> None:
    """Is what TARGET computes when compiled wrong, or only rounded otherwise? float64 decides.

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 when it is wrong, fails,
    crashes or hangs.
    """
    from pellucid.debug.check import Request, check_isolated
    from pellucid.debug.show import checked

    request = Request(target, backend, dict(options), threads or 0, backward, dynamic or None, fuzz)
    found = check_isolated(request, timeout, (memory or 0) << 20)
    finish(found, as_json, lambda result: out.print(checked(result)), Exit.GOOD if found.good else Exit.BAD)
