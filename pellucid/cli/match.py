"""`pellucid match`: what each kernel implements."""

from __future__ import annotations

import click

from pellucid.cli.target import Target, target_command


@target_command("pellucid match model.py:make --source")
@click.option("--source", is_flag=True, help="Print the C++ too, annotated with FX nodes and your lines.")
def match(target: Target, source: bool) -> None:
    """Which IR operators, FX nodes and lines of yours does each kernel of TARGET implement?

    Exits with 1 if this is unknown for a kernel.
    """
    from pellucid.kit.debug.match import match as run

    target.finish(run(target.request(), target.seconds, target.memory), source=source)
