"""The `pellucid` command: one file per command, without logic.

Exit codes, the same for every command, so that `git bisect run pellucid ...` works: 0 good, 1 bad (a wrong
result, a failing backend), 125 skip (the program cannot be judged), 255 the tool itself failed or was misused.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from importlib import metadata
from typing import Any

import click

from pellucid.cli.bench import bench
from pellucid.cli.bisect import bisect
from pellucid.cli.cache import cache
from pellucid.cli.capture import capture
from pellucid.cli.check import check
from pellucid.cli.cosim import cosim
from pellucid.cli.demo import demo
from pellucid.cli.diagnose import diagnose
from pellucid.cli.diff import diff
from pellucid.cli.doctor import doctor
from pellucid.cli.exits import Exit
from pellucid.cli.explain import explain
from pellucid.cli.match import match
from pellucid.cli.metrics import metrics
from pellucid.cli.minify import minify
from pellucid.cli.profile import profile
from pellucid.cli.replay import replay
from pellucid.cli.report import report
from pellucid.cli.run import run
from pellucid.cli.terminal import Commands, called_wrongly, complain
from pellucid.cli.testgen import testgen
from pellucid.errors import NotJudged, PellucidError
from pellucid.options import check_environment


class _Group(Commands):
    """A group whose commands never exit with 1 ("bad", and Python's default) when the tool itself failed."""

    def main(self, *args: Any, **about: Any) -> Any:
        try:
            return super().main(*args, **about)
        except SystemExit as end:
            if end.code == click.UsageError.exit_code:
                raise SystemExit(Exit.FAILED) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        _check_environment()
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            called_wrongly(error)
            sys.exit(Exit.FAILED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort):
            click.echo("\ninterrupted: no result", err=True)
            sys.exit(Exit.FAILED)
        except PellucidError as error:
            complain(error)
            if "--json" in sys.argv:
                click.echo(json.dumps({"error": error.message, "hint": error.hint}))
            sys.exit(Exit.SKIP if isinstance(error, NotJudged) else Exit.FAILED)
        except Exception:
            traceback.print_exc()
            click.echo("error: pellucid itself failed, see above", err=True)
            sys.exit(Exit.FAILED)


def _check_environment() -> None:
    """Warn about unknown PELLUCID_ variables once, and suppress the warning in processes that the command starts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_environment()
    for each in caught:
        click.echo(f"warning: {each.message}", err=True)
    filters = os.environ.get("PYTHONWARNINGS"), "ignore:the environment variable PELLUCID_"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))


def _version() -> str:
    try:
        return metadata.version("pellucid")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="pellucid")
def main() -> None:
    """Pellucid: a transparent torch.compile backend for CPUs, and its debugging and profiling kit."""


for _command in (
    bench,
    bisect,
    cache,
    capture,
    check,
    cosim,
    demo,
    diagnose,
    diff,
    doctor,
    explain,
    match,
    metrics,
    minify,
    profile,
    replay,
    report,
    run,
    testgen,
):
    main.add_command(_command)
