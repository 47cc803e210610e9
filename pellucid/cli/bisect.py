"""`pellucid bisect`: the component to blame."""

from __future__ import annotations

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import err


@target_command
def bisect(target: Target) -> None:
    """Which component makes TARGET fail when it is compiled, and what in it is to blame?

    Exits with 1 when something is.
    """
    from pellucid.debug.bisect import bisect as run
    from pellucid.debug.show import bisected

    tell = lambda line: err.print(line, markup=False)  # noqa: E731
    target.finish(run(target.request(), target.seconds, target.memory, tell), bisected)
