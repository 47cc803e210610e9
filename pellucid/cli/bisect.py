"""`pellucid bisect`: the component to blame."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import err, out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Look at gradients as well.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
def bisect(target, backend, options, threads, timeout, memory, as_json, backward, dynamic) -> None:
    """Which component makes TARGET fail when it is compiled, and what in it is to blame?

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 when something is.
    """
    from pellucid.debug.bisect import bisect as run
    from pellucid.debug.check import Request
    from pellucid.debug.show import bisected

    request = Request(target, backend, dict(options), threads or 0, backward, dynamic or None)
    found = run(request, timeout, (memory or 0) << 20, lambda line: err.print(line, markup=False))
    finish(found, as_json, lambda result: out.print(bisected(result)), Exit.GOOD if found.good else Exit.BAD)
