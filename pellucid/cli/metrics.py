"""`pellucid metrics`: tables over models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from pellucid.cli.target import Target, new_run, target_command
from pellucid.cli.terminal import SECONDS, one_line


@target_command(
    "pellucid metrics models.py:bert models.py:gpt2 --table kernels -o tables",
    metavar="TARGET...",
    writes=("FOLDER", "Write the tables to this folder."),
)
@click.option("--table", "only", multiple=True, metavar="NAME", help="Only this table; repeatable.")
@click.option("--without", multiple=True, metavar="NAME", help="Without this table; repeatable.")
@click.option("--budget", type=SECONDS, default=5.0, show_default=True, help="Seconds of calls, for tables with times.")
@click.option("--sum", "sums", is_flag=True, help="TARGET is a folder of tables: only summarise them.")
def metrics(target: Target, only: tuple[str, ...], without: tuple[str, ...], budget: float, sums: bool) -> None:
    """Write tables over models as CSV; each row names its model, backend and graph.

    graphs: statistics. kernels: loads, stores, loops, atomic adds, argument bytes. fusion_failures: each pair that was
    not fused, with its category. slow_fusions: kernels that take longer than their parts. estimates: those of the
    machine model, next to measured times. Exits with 1 when a target could not be inspected.
    """
    from pellucid.kit.metrics.request import metrics as run
    from pellucid.kit.metrics.summary import summary_of

    if sums:
        target.finish(summary_of(Path(target.words[0])))
    targets = [target] if target.is_script else [replace(target, words=(word,)) for word in target.words]
    requests = [each.request() for each in targets]
    with one_line() as tell:
        folder = target.folder or new_run("metrics")
        found = run(requests, folder, only, without, budget, target.seconds, target.memory, tell)
    target.finish(found)
