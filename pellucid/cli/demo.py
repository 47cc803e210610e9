"""`pellucid demo`: MobileBERT under three backends, and a run folder that shows what the compiler did."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.padding import Padding

from pellucid.cli.exits import Exit
from pellucid.cli.terminal import SECONDS, out, progress_bar


@click.command()
@click.option("--model", default="mobilebert", show_default=True, help="Any model that `pellucid bench` knows.")
@click.option("--budget", type=SECONDS, default=20.0, show_default=True, help="Seconds of timing.")
@click.option("--dir", "folder", type=click.Path(path_type=Path, file_okay=False), help="Where the run folder goes.")
def demo(model: str, budget: float, folder: Path | None) -> None:
    """Compile and run a model with eager, Inductor and Pellucid, and write a run folder to look into."""
    from pellucid.bench import UnknownName
    from pellucid.bench.demo import demo as run
    from pellucid.bench.demo import explained
    from pellucid.bench.table import LEGEND, report_table

    folder = folder or Path("pellucid_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    try:
        with progress_bar() as progress:
            result = run(folder, model, budget, progress)
    except UnknownName as e:
        raise click.UsageError(str(e)) from e
    out.print(report_table(result.report))
    out.print(LEGEND, style="dim")
    if result.folder is None:
        raise click.exceptions.Exit(Exit.BAD)
    out.print(f"\nThe run folder, {folder}, shows what the compiler did. Read it in this order:")
    for file in explained(result.folder):
        more = f" (one of {file.count})" if file.count > 1 else ""
        out.print(f"  [bold]{file.path}[/bold]{more}")
        out.print(Padding(file.meaning, (0, 0, 0, 6)))
    raise click.exceptions.Exit(Exit.GOOD if result.report.good else Exit.BAD)
