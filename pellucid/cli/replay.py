"""`pellucid replay`: run captured graphs again."""

from __future__ import annotations

from pellucid.cli.target import ABOUT_RUN, Target, target_command


@target_command("pellucid replay run --backend inductor", metavar="RUN", about=ABOUT_RUN)
def replay(target: Target) -> None:
    """Run the graphs of a run again, eagerly and compiled; compare the results with each other and with the saved ones.

    Exits with 1 when compiled code is wrong or fails here.
    """
    from pellucid.kit.debug.capture import replay as run

    target.finish(run(target.request(), target.seconds, target.memory))
