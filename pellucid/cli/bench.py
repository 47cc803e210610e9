"""`pellucid bench`: eager and compiled programs side by side."""

from __future__ import annotations

import os

import click
from rich.console import Group

from pellucid.cli.exits import Exit
from pellucid.cli.target import SETTING, example
from pellucid.cli.terminal import SECONDS, Count, complaints, out, progress_bar
from pellucid.printing import sentence, show


@click.command(
    epilog=example(
        "pellucid bench bert --backend inductor:freezing=True --backend pellucid",
        "pellucid bench model.py:make --no-cold",
        "pellucid bench --op aten.bmm --shape 12x128x64,12x64x128",
    )
)
@click.argument("words", nargs=-1, metavar="[PROGRAM]...")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="What to measure, with its options; repeat for several: a backend of torch.compile, openvino or onnxruntime "
    "(pip install 'pellucid[peers]'). guard_filter_fn=NAME: a filter of torch.compiler; exported=True: the "
    "program is exported first, as for these engines. Default: inductor and pellucid. Eager is always the "
    "baseline.",
)
@click.option("--op", metavar="NAME", help="Measure this operator, on random tensors of the shapes of --shape.")
@click.option(
    "--shape",
    "shapes",
    metavar="SHAPES",
    help="Its tensors' shapes, comma-separated: 12x128x64; with a dtype: bf16[12x128], i64[128]<5 (integers below 5).",
)
@click.option("--arg", "arguments", type=SETTING, multiple=True, help="Another argument of --op, by name; repeatable.")
@click.option("--batch", type=Count(min=1), default=1, show_default=True, help="Sequences per call.")
@click.option("--seq", type=Count(min=1), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--dtype", default="f32", show_default=True, metavar="f32|bf16", help="Dtype of weights and activations.")
@click.option("--train", is_flag=True, help="Measure training steps: forward, loss, backward; dropout is off.")
@click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True).")
@click.option("--fallbacks", is_flag=True, help="List what Pellucid leaves to ATen, with its share of the time.")
@click.option("--threads", type=Count(min=1), help="Threads to use. Default: torch's choice.")
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
    words, backends, op, shapes, arguments, batch, seq, dtype, train, dynamic, fallbacks, threads, budget, cold,
    as_json, list_models,
) -> None:  # fmt: skip
    """Measure PROGRAMs (default: mobilebert) under eager and other backends, side by side.

    PROGRAM is a model of --list; FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs); a run, RUN or
    RUN:GRAPH; or a kernel of one, RUN:GRAPH:KERNEL. Exits with 1 when a backend failed or its numbers are wrong, and
    with 125 when a model cannot be built, or a program fails in eager mode.
    """
    from pellucid.bench import ModelResult, Settings, UnknownName
    from pellucid.bench import bench as run
    from pellucid.kit.bench.models import DoesNotFit
    from pellucid.kit.bench.programs import operator_word
    from pellucid.kit.bench.subjects import DEFAULT_SUBJECTS, known_subjects
    from pellucid.kit.bench.table import model_list, model_table, summary

    if list_models:
        show(out, model_list())
        show(out, sentence("backends and engines: " + ", ".join(known_subjects())))
        return
    if (op is None) != (shapes is None):
        raise click.UsageError("--op and --shape belong together")
    if arguments and op is None:
        raise click.UsageError("--arg belongs to --op")
    if op is not None:
        words = (*words, operator_word(op, shapes, dtype, arguments))
        dtype = "f32"
    settings = Settings(
        backends or DEFAULT_SUBJECTS, batch, seq, dtype, threads or 0, budget, cold, train, dynamic, fallbacks
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's log messages would garble the progress bar
    with complaints(UnknownName, DoesNotFit), progress_bar() as progress:

        def tell(result: ModelResult) -> None:
            """Print each result at once: an interrupted run loses nothing that it has measured."""
            if not as_json:
                with progress.aside():
                    show(out, Group(model_table(result), ""))

        report = run(words or ["mobilebert"], settings, progress, tell)
    if as_json:
        click.echo(report.to_json())
    else:
        show(out, summary(report))
    raise click.exceptions.Exit(Exit.GOOD if report.good else Exit.BAD)
