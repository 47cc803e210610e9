"""`pellucid explain`: why it does not compile, or was not fused, vectorised or compiled."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Look at the backward graph as well.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
def explain(target, backend, options, threads, timeout, memory, as_json, backward, dynamic) -> None:
    """Why does TARGET not compile? If it does: what was not fused, vectorised or compiled, and why.

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 if it does not compile.
    """
    from pellucid.debug.check import Request
    from pellucid.debug.reasons import reasons
    from pellucid.debug.show import explained

    request = Request(target, backend, dict(options), threads or 0, backward, dynamic or None)
    found = reasons(request, timeout, (memory or 0) << 20)
    finish(found, as_json, lambda result: out.print(explained(result)), Exit.GOOD if found.good else Exit.BAD)
