"""`pellucid profile`: where the time of a program goes."""

from __future__ import annotations

from pathlib import Path

import click

from pellucid.cli.target import Target, target_command
from pellucid.cli.terminal import OUTPUT_FILE, SECONDS


@target_command("pellucid profile model.py:make --against eager")
@click.option("--against", default="", metavar="eager|BACKEND|RUN", help="Compare with this; explain the difference.")
@click.option("--trace", type=OUTPUT_FILE, metavar="FILE", help="Write a Chrome/Perfetto trace.")
@click.option(
    "--callgraph",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write the Python call graph (cProfile, drawn by gprof2dot): .svg, .png, .pdf, .dot; or .pstats.",
)
@click.option("--budget", type=SECONDS, default=10.0, show_default=True, help="Seconds of calls to measure.")
def profile(target: Target, against: str, trace: Path | None, callgraph: Path | None, budget: float) -> None:
    """Where does the time of TARGET go? Kernels and library calls, with bytes moved and FLOPs.

    RUN is a folder that `pellucid profile -o` wrote to. Exits with 1 when the program fails while it is measured, and
    with 125 when it fails in eager mode too.
    """
    from pellucid.kit.profile.request import profile_target

    found = profile_target(target.request(), against, trace, callgraph, budget, target.seconds, target.memory)
    target.finish(found)
