"""What commands share in how they speak: tables on stdout, progress and complaints on stderr."""

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
    """A group whose help has the first sentence of each command's help, whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(self.commands[name])) for name in self.list_commands(ctx)])


def _first_sentence(command: click.Command) -> str:
    return re.split(r"(?<=[.?])\s", " ".join((command.help or "").split()))[0]


class _Seconds(click.ParamType):
    """A time that makes sense: more than zero, and not for ever."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = click.FLOAT.convert(value, param, ctx)
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value} is no time to spend: give seconds, more than 0", param, ctx)
        return seconds


class Count(click.IntRange):
    """An integer in a range, called a whole number where it is none."""

    name = "whole number"


class _Output(click.Path):
    """What is written, a file or a folder: where that cannot be, it is told before the work, not after it.

    A folder is made with those above it; that of a file has to be there, as a mistyped one would be left behind.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        path = super().convert(value, param, ctx)
        file = Path(os.fsdecode(path))
        if not self.dir_okay and not file.parent.exists():
            self.fail(f"cannot write to {value}: there is no folder {file.parent}; make it first", param, ctx)
        why = unwritable(file if self.dir_okay else file.parent)
        return self.fail(f"cannot write to {value}: {why}", param, ctx) if why else path


def unwritable(folder: Path) -> str:
    """Why nothing can be written into a folder, which need not be there; empty if it can."""
    try:
        with TemporaryDirectory(dir=next(each for each in (folder, *folder.parents) if each.exists())):
            return ""
    except OSError as error:
        return error.strerror or str(error)


class _Quantity(click.ParamType):
    """A number with a unit; not below zero."""

    def __init__(self, name: str, units: Mapping[str, float], example: str) -> None:
        self.name, self.units, self.example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip(), re.IGNORECASE | re.ASCII)
        factor = self.units.get(found[2].lower()) if found else None
        if found is None or factor is None:
            known = ", ".join(unit for unit in self.units if unit)
            self.fail(f"{value!r} is no {self.name}: give {self.example} (units: {known})", param, ctx)
        return float(found[1]) * factor


SECONDS = _Seconds()
AGE = _Quantity("age", {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}, "30d or 12h")
SIZE = _Quantity("size", {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}, "500MB or 2GB")
OUTPUT_FILE = _Output(path_type=Path, dir_okay=False, writable=True)
OUTPUT_FOLDER = _Output(path_type=Path, file_okay=False, writable=True)


def complain(error: PellucidError) -> None:
    """Say what went wrong, the facts about it, and what can be done."""
    show(err, sentence(f"error: [{error.code}] {error.message}", hang=2))
    for name, value in error.context.items():
        show(err, code(f"{name}: {value}", "  "))
    if error.hint:
        show(err, sentence(f"  hint: {error.hint}", hang=4))


def called_wrongly(error: click.UsageError) -> None:
    """Say how a command is called, what is wrong with this call and, where something is missing, show an example."""
    if error.ctx is not None:
        click.echo(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
    show(err, sentence(f"Error: {error.format_message()}"))
    if isinstance(error, click.MissingParameter) and error.ctx is not None and error.ctx.command.epilog:
        show(err, code(error.ctx.command.epilog.removeprefix("\b\n")))


@contextmanager
def complaints(*wrong: type[Exception]) -> Iterator[None]:
    """Exceptions of a type in `wrong` mean a wrong call; a missing library of models, that nothing can be told here."""
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
    """How far the work is, as `progress_bar` shows it: called with a text and the fraction done."""

    def __init__(self, tell: Callable[[str, float], None], bar: Progress | None = None) -> None:
        self._tell = tell
        self._bar = bar

    def __call__(self, doing: str, done: float) -> None:
        self._tell(doing, done)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Something is printed on stdout, and the bar is not in its way."""
        if self._bar is not None:
            self._bar.stop()
        yield
        if self._bar is not None:
            self._bar.start()


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar on stderr that goes away when done.

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
    """Yields what to call with how far the work is: a line on stderr that is rewritten, and goes away when done.

    Where stderr is no terminal, every line is kept.
    """
    if not err.is_terminal:
        yield lambda line: show(err, line)
        return
    with err.status("") as status:
        yield lambda line: status.update(escape(line))


def _printer() -> Callable[[str, float], None]:
    said = [""]

    def tell(doing: str, done: float) -> None:
        if doing != said[0]:
            said[0] = doing
            show(err, f"[{done:4.0%}] {doing}")

    return tell
