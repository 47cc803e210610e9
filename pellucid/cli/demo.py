"""`pellucid demo`: MobileBERT under three backends, and a run folder that shows what the compiler did."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import example
from pellucid.cli.terminal import OUTPUT_FOLDER, SECONDS, complaints, out, progress_bar
from pellucid.printing import code, relative, sentence, show


@click.command(epilog=example("pellucid demo --model gpt2 --dir my_run"))
@click.option("--model", default="mobilebert", show_default=True, help="Any model that `pellucid bench` knows.")
@click.option("--budget", type=SECONDS, default=20.0, show_default=True, help="Seconds of timing.")
@click.option("--dir", "folder", type=OUTPUT_FOLDER, help="The run folder to write.")
def demo(model: str, budget: float, folder: Path | None) -> None:
    """Run a model with eager, Inductor and Pellucid, and write a run folder to inspect."""
    from pellucid.bench import UnknownName
    from pellucid.kit.bench.demo import demo as run
    from pellucid.kit.bench.demo import explained
    from pellucid.kit.bench.table import report_table

    folder = folder or Path("pellucid_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    with complaints(UnknownName), progress_bar() as progress:
        result = run(folder, model, budget, progress)
    show(out, report_table(result.report))
    if result.folder is None:
        raise click.exceptions.Exit(Exit.BAD)
    show(out, "")
    show(out, "What the compiler did is in the run folder")
    show(out, code(relative(str(folder)), "  "))
    show(out, "Read it in this order:")
    for file in explained(result.folder):
        more = f" (one of {file.count})" if file.count > 1 else ""
        show(out, sentence("  ", (str(file.path), "bold"), more))
        show(out, sentence(f"      {file.meaning}", hang=6))
    raise click.exceptions.Exit(Exit.GOOD if result.report.good else Exit.BAD)
