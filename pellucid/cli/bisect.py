"""`pellucid bisect`: the component to blame."""

from __future__ import annotations

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import one_line


@target_command("pellucid bisect model.py:make --backend inductor")
def bisect(target: Target) -> None:
    """Which component makes TARGET fail when it is compiled, and what in it is to blame?

    Exits with 1 when something is.
    """
    from pellucid.kit.debug.bisect import bisect as run

    with one_line() as tell:
        found = run(target.request(), target.seconds, target.memory, tell)
    target.finish(found)
