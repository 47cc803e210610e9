"""`pellucid bench`: eager and compiled models side by side."""

from __future__ import annotations

import click

from pellucid.cli.exits import Exit
from pellucid.cli.target import example
from pellucid.cli.terminal import SECONDS, complaints, out, progress_bar
from pellucid.printing import sentence, show


@click.command(epilog=example("pellucid bench bert --backend inductor --backend pellucid"))
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    help="A torch.compile backend to measure; repeat for several. Default: inductor and pellucid. Eager is "
    "always the baseline.",
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per call.")
@click.option("--seq", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--dtype", default="f32", show_default=True, metavar="f32|bf16", help="Of weights and activations.")
@click.option("--train", is_flag=True, help="Measure training steps: forward, loss, backward; dropout is off.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
@click.option("--fallbacks", is_flag=True, help="List what Pellucid leaves to ATen, with its share of the time.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to use. Default: torch's choice.")
@click.option("--budget", type=SECONDS, default=20.0, show_default=True, help="Seconds of timing per model.")
@click.option(
    "--cold/--no-cold",
    default=True,
    show_default=True,
    help="Measure the time to the first result in fresh processes too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of tables.")
@click.option("--list", "list_models", is_flag=True, help="List the models and the backends, and stop.")
def bench(
    models, backends, batch, seq, dtype, train, dynamic, fallbacks, threads, budget, cold, as_json, list_models
) -> None:
    """Measure MODELs (default: mobilebert) under eager and torch.compile backends, side by side.

    Exits with 1 when a backend failed or its numbers are wrong, and with 125 when a model cannot be built.
    """
    from pellucid.bench import Settings, UnknownName
    from pellucid.bench import bench as run
    from pellucid.kit.bench.models import DoesNotFit
    from pellucid.kit.bench.subjects import DEFAULT_SUBJECTS, known_subjects
    from pellucid.kit.bench.table import model_list, report_table

    if list_models:
        show(out, model_list())
        show(out, sentence("backends: " + ", ".join(known_subjects())))
        return
    settings = Settings(
        backends or DEFAULT_SUBJECTS, batch, seq, dtype, threads or 0, budget, cold, train, dynamic, fallbacks
    )
    with complaints(UnknownName, DoesNotFit), progress_bar() as progress:
        report = run(models or ["mobilebert"], settings, progress)
    if as_json:
        click.echo(report.to_json())
    else:
        show(out, report_table(report))
    raise click.exceptions.Exit(Exit.GOOD if report.good else Exit.BAD)
