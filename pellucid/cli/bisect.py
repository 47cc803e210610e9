"""`pellucid bisect`: find the component at fault."""

from __future__ import annotations

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import one_line


@target_command("pellucid bisect model.py:make --backend inductor")
def bisect(target: Target) -> None:
    """Which component makes TARGET fail when it is compiled, and which step of it is at fault?

    Exits with 1 when there is a failure.
    """
    from pellucid.kit.debug.bisect import bisect as run

    with one_line() as tell:
        found = run(target.request(), target.seconds, target.memory, tell)
    target.finish(found)
