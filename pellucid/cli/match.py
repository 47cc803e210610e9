"""`pellucid match`: what each kernel implements."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import finish, target_options
from pellucid.cli.terminal import out


@click.command()
@target_options
@click.option("--backward", is_flag=True, help="Match the backward graph as well.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
@click.option("--source", is_flag=True, help="Print the C++ too, with FX nodes and your lines beside it.")
def match(target, backend, options, threads, timeout, memory, as_json, backward, dynamic, source) -> None:
    """Which IR operators, FX nodes and lines of yours does each kernel of TARGET implement?

    TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs). Exits with 1 if a kernel is unknown.
    """
    from pellucid.debug.check import Request
    from pellucid.debug.match import match as run
    from pellucid.debug.show import matched

    request = Request(target, backend, dict(options), threads or 0, backward, dynamic or None)
    found = run(request, timeout, (memory or 0) << 20)
    finish(found, as_json, lambda result: out.print(matched(result, source)), Exit.GOOD if found.good else Exit.BAD)
