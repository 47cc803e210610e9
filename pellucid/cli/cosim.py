"""`pellucid cosim`: every intermediate result, compiled beside eager."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Look at the backward graph as well.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
@click.option(
    "--live", is_flag=True, help="Observe only; otherwise each step works on eager's results, so that all faults show."
)
def cosim(target, backend, options, threads, timeout, memory, as_json, backward, dynamic, live) -> None:
    """Which intermediate result of TARGET is the first that is wrong when it is compiled, and which kernel made it?

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 when one is.
    """
    from pellucid.debug.check import Request
    from pellucid.debug.cosim import COMPLETE, LIVE, cosim_isolated
    from pellucid.debug.show import cosimulated

    request = Request(target, backend, dict(options), threads or 0, backward, dynamic or None)
    found = cosim_isolated(request, LIVE if live else COMPLETE, timeout, (memory or 0) << 20)
    finish(found, as_json, lambda result: out.print(cosimulated(result)), Exit.GOOD if found.good else Exit.BAD)
