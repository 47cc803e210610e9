"""Terminal input and output of the commands: results on stdout, progress and errors on stderr, option types."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pellucid.cli.exits import Exit
from pellucid.errors import PellucidError
from pellucid.printing import code, sentence, show

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class Commands(click.Group):
    """A group whose help lists the whole first sentence of each command's help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(self.commands[name])) for name in self.list_commands(ctx)])


def _first_sentence(command: click.Command) -> str:
    return re.split(r"(?<=[.?])\s", " ".join((command.help or "").split()))[0]


class _Seconds(click.ParamType):
    """A positive, finite number of seconds."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = click.FLOAT.convert(value, param, ctx)
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value} is not a duration: give a number of seconds above 0", param, ctx)
        return seconds


class Count(click.IntRange):
    """An integer in a range; error messages call it a whole number."""

    name = "whole number"


class _Output(click.Path):
    """A file or folder to write; one that is not writable is reported before the work instead of after it.

    A folder is created with its parents; the folder of a file must exist, as a mistyped one would be left behind.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        path = super().convert(value, param, ctx)
        file = Path(os.fsdecode(path))
        if not self.dir_okay and not file.parent.exists():
            self.fail(f"cannot write to {value}: there is no folder {file.parent}; create it first", param, ctx)
        why = unwritable(file if self.dir_okay else file.parent)
        return self.fail(f"cannot write to {value}: {why}", param, ctx) if why else path


def unwritable(folder: Path) -> str:
    """Why a folder, which need not exist, is not writable; empty if it is."""
    try:
        with TemporaryDirectory(dir=next(each for each in (folder, *folder.parents) if each.exists())):
            return ""
    except OSError as error:
        return error.strerror or str(error)


class _Quantity(click.ParamType):
    """A non-negative number with a unit."""

    def __init__(self, name: str, units: Mapping[str, float], example: str) -> None:
        self.name, self.units, self.example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip(), re.IGNORECASE | re.ASCII)
        factor = self.units.get(found[2].lower()) if found else None
        if found is None or factor is None:
            known = ", ".join(unit for unit in self.units if unit)
            self.fail(f"{value!r} is not a valid {self.name}: give {self.example} (units: {known})", param, ctx)
        return float(found[1]) * factor


SECONDS = _Seconds()
AGE = _Quantity("age", {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}, "30d or 12h")
SIZE = _Quantity("size", {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}, "500MB or 2GB")
OUTPUT_FILE = _Output(path_type=Path, dir_okay=False, writable=True)
OUTPUT_FOLDER = _Output(path_type=Path, file_okay=False, writable=True)


def complain(error: PellucidError) -> None:
    """Print an error with its context and its hint."""
    show(err, sentence(f"error: [{error.code}] {error.message}", hang=2))
    for name, value in error.context.items():
        show(err, code(f"{name}: {value}", "  "))
    if error.hint:
        show(err, sentence(f"  hint: {error.hint}", hang=4))


def called_wrongly(error: click.UsageError) -> None:
    """Print a command's usage, what is wrong with this call and, where an argument is missing, an example."""
    if error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
    show(err, sentence(f"Error: {error.format_message()}"))
    if isinstance(error, click.MissingParameter) and error.ctx is not None and error.ctx.command.epilog:
        show(err, code(error.ctx.command.epilog.removeprefix("\b\n")))


@contextmanager
def complaints(*wrong: type[Exception]) -> Iterator[None]:
    """Turn exceptions of the types `wrong` into usage errors, and a missing `transformers` into exit code SKIP."""
    try:
        yield
    except wrong as error:
        raise click.UsageError(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        click.echo(f"skipped: {error}; install the models' extra: pip install 'pellucid[bench]'", err=True)
        raise click.exceptions.Exit(Exit.SKIP) from error


class Bar:
    """The progress that `progress_bar` shows: called with a text and the fraction done."""

    def __init__(self, tell: Callable[[str, float], None], bar: Progress | None = None) -> None:
        self._tell = tell
        self._bar = bar

    def __call__(self, doing: str, done: float) -> None:
        self._tell(doing, done)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while something is printed on stdout."""
        if self._bar is not None:
            self._bar.stop()
        yield
        if self._bar is not None:
            self._bar.start()


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A progress bar on stderr that disappears when done.

    Where stderr is no terminal, the texts are printed one per line instead.
    """
    if not err.is_terminal:
        yield Bar(_printer())
        return
    columns = (BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield Bar(lambda doing, done: bar.update(task, description=doing, completed=done), bar)


@contextmanager
def one_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a status line on stderr: it is overwritten each time, and disappears when done.

    Where stderr is no terminal, each line is printed.
    """
    if not err.is_terminal:
        yield lambda line: show(err, line)
        return
    with err.status("") as status:
        yield lambda line: status.update(escape(line))


def _printer() -> Callable[[str, float], None]:
    last = [""]

    def tell(doing: str, done: float) -> None:
        if doing != last[0]:
            last[0] = doing
            show(err, f"[{done:4.0%}] {doing}")

    return tell
