"""`pellucid explain`: why it does not compile, or was not fused, vectorised or compiled."""

from __future__ import annotations

from pellucid.cli.target import Target, target_command


@target_command("pellucid explain -- python train.py")
def explain(target: Target) -> None:
    """Why does TARGET not compile? If it does: what was not fused, vectorised or compiled, and why.

    Graph breaks and recompilations are reported as well. Exits with 1 if it does not compile.
    """
    from pellucid.kit.debug.reasons import reasons

    target.finish(reasons(target.request(), target.seconds, target.memory))
