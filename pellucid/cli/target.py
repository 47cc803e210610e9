"""What the commands of the debugging kit share: the target program, their common options, and how they end."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pellucid.cli.exits import Exit
from pellucid.cli.terminal import OUTPUT_FOLDER, SECONDS, Count, err, out, unwritable
from pellucid.errors import UserError
from pellucid.kit.shown import plain
from pellucid.printing import relative, show

if TYPE_CHECKING:
    from pellucid.kit.runs.target import Request

ABOUT_TARGET = """TARGET is FILE.py:NAME, where NAME() returns (fn, args) or (fn, args, kwargs); or a run, the folder
    that `pellucid capture` wrote; or -- python SCRIPT.py ..., a script whose torch.compile calls are captured."""

ABOUT_RUN = """RUN is the folder that `pellucid capture` wrote, or RUN:GRAPH for one graph of it."""

WRITES = ("RUN", "Write to this run.")


class _Setting(click.ParamType):
    """`KEY=VALUE`, the value a Python literal or text."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not a setting: give KEY=VALUE", param, ctx)
        try:
            return key, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return key, text


class _Words(click.types.UnprocessedParamType):
    """A TARGET. about: what that is, shown where it is missing."""

    def __init__(self, about: str) -> None:
        self.about = " ".join(about.split())

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return self.about


SETTING = _Setting()


@dataclass(frozen=True, slots=True)
class Target:
    """The values of the shared options. words: TARGET as typed. memory: in bytes, 0 where the user gave no limit."""

    words: Sequence[str]
    backend: str | None
    options: Mapping[str, Any]
    threads: int
    seconds: float
    memory: int
    folder: Path | None
    libraries: tuple[str, ...]
    as_json: bool
    backward: bool
    dynamic: bool | None

    @property
    def is_script(self) -> bool:
        return len(self.words) > 1 and Path(self.words[0]).name.startswith("python")

    @property
    def more(self) -> tuple[str, ...]:
        """The arguments after TARGET."""
        return () if self.is_script else tuple(self.words[1:])

    def request(self, takes_more: bool = False, **more: Any) -> Request:
        """The request for TARGET. takes_more: whether the command has arguments after TARGET. more: other fields."""
        from pellucid.kit.runs.target import Request

        return Request(**self.about(takes_more), **more)

    def about(self, takes_more: bool = False) -> dict[str, Any]:
        """The fields of the request. A script is run and captured first, because the tools work on its graphs."""
        if self.more and not takes_more:
            first, rest = self.words[0], " ".join(self.more)
            there = os.path.exists(first.partition(":")[0])
            what = f"unexpected arguments after TARGET: {rest}" if there else f"{first} is neither a TARGET nor Python"
            raise click.UsageError(f"{what}; to run a script, write -- python SCRIPT.py")
        target, backend, options = self.words[0], self.backend, dict(self.options)
        if self.is_script:
            target = self._captured()
        if any(os.path.isfile(os.path.join(folder, "run.json")) for folder in (target, target.rpartition(":")[0])):
            from pellucid.kit.runs.run import run_of

            run = run_of(target, self.libraries)
            if run is not None and backend in (None, run.about["backend"]):
                backend, options = run.backend, {**run.options_but(options), **options}
        return {
            "target": target,
            "backend": backend or "pellucid",
            "options": options,
            "threads": self.threads,
            "backward": self.backward,
            "dynamic": self.dynamic,
            "libraries": self.libraries,
        }

    def _captured(self) -> str:
        """The run that a script is captured into."""
        from pellucid.kit.debug.script import capture_script

        folder = self.folder or new_run(Path(self.words[1]).stem)
        capture_script(self.words, folder, self.backend or "pellucid", dict(self.options), self.seconds)
        show(err, f"captured into {relative(str(folder))}: each graph, with the inputs of its first call")
        return str(folder)

    def run_of(self, target: str) -> Path:
        """The run to write to: the folder of -o, the run that a script was captured into, or a new one."""
        if self.folder is not None:
            return self.folder
        return Path(target) if self.is_script else new_run(Path(self.words[0]).stem)

    def own_run(self, target: str) -> Path | None:
        """The run that TARGET is, or that a script was captured into; also a folder that has only a profile."""
        from pellucid.kit.profile.saved import FILE
        from pellucid.kit.runs.run import split_run

        found = split_run(target)
        if found is not None:
            return found[0]
        return Path(target) if Path(target, FILE).is_file() else None

    def finish(self, result: Any, **how: Any) -> None:
        """Print a result, save it in the folder of -o, and end the command. how: options of `kit.show.shown`."""
        from pellucid.kit.show import shown

        self.end(result, shown(result, **how), result.good)

    def end(self, result: Any, text: Any, good: bool) -> None:
        """Like `finish`, with the text to print; `result` may also be of JSON types."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{click.get_current_context().info_name}.json"
            file.write_text(json.dumps(plain(result), indent=1) + "\n", encoding="utf-8")
        unsure = str(getattr(result, "verdict", "")) == "unsure"
        end(result, text, self.as_json, good, unsure)


def new_run(name: str) -> Path:
    """A folder below `pellucid_runs` that does not exist yet. Raises UserError if it is not writable."""
    plain_name = re.sub(r"\W+", "_", name).strip("_") or "program"
    stem = Path("pellucid_runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{plain_name}"
    names = (stem.with_name(f"{stem.name}-{n}") if n else stem for n in itertools.count())
    folder = next(path for path in names if not path.exists())
    if why := unwritable(folder):
        raise UserError(f"cannot write to {folder}: {why}", hint="give a folder that is writable with -o")
    return folder


_SHARED = (
    click.option("--backend", metavar="NAME", help="The backend to test. Default: pellucid, or that of the run."),
    click.option("--option", "options", type=SETTING, multiple=True, help="An option of the backend; repeatable."),
    click.option("--threads", type=Count(min=1), help="Threads to use. Default: torch's choice."),
    click.option(
        "--timeout", "seconds", type=SECONDS, default=300.0, show_default=True, help="Seconds until it counts as hung."
    ),
    click.option("--memory", type=Count(min=1), metavar="MB", help="Memory above which it counts as out of memory."),
    click.option(
        "--trust",
        "libraries",
        multiple=True,
        metavar="NAME",
        help="A library whose operators a run may call; repeatable.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text."),
    click.option("--backward", is_flag=True, help="Include gradients and the backward graph."),
    click.option("--dynamic", is_flag=True, help="Compile with symbolic sizes (torch.compile's dynamic=True)."),
)


def target_command(
    call_of_it: str, *, metavar: str = "TARGET", about: str = ABOUT_TARGET, writes: tuple[str, str] = WRITES
) -> Callable[[Callable[..., None]], click.Command]:
    """A command on a TARGET: `command(target, **own options)`.

    call_of_it: an example call. writes: the metavar of -o, and its help. `about`, what a TARGET is, is appended to
    the docstring.
    """

    def decorate(command: Callable[..., None]) -> click.Command:
        @functools.wraps(command)
        def call(**given: Any) -> None:
            shared = {name: given.pop(name) for name in (each.name for each in fields(Target))}
            shared["options"] = dict(shared["options"])
            shared["threads"] = shared["threads"] or 0
            shared["memory"] = (shared["memory"] or 0) << 20
            shared["dynamic"] = shared["dynamic"] or None
            command(Target(**shared), **given)

        call.__doc__ = f"{command.__doc__}\n\n    {about}\n"
        made: Any = call
        output = click.option("-o", "folder", metavar=writes[0], help=writes[1], type=OUTPUT_FOLDER)
        for option in reversed((*_SHARED, output)):
            made = option(made)
        made = click.argument("words", metavar=metavar, nargs=-1, required=True, type=_Words(about))(made)
        return click.command(epilog=example(call_of_it))(made)

    return decorate


def example(*calls: str) -> str:
    """The examples at the end of a command's help."""
    return "\n".join(("\b", "For example:", *(f"  {call}" for call in calls)))


def end(result: Any, text: Any, as_json: bool, good: bool, unsure: bool = False) -> None:
    """Print a result, as JSON or as text, and exit: 0 if good, 1 if bad, 125 if that cannot be determined."""
    if as_json:
        click.echo(json.dumps(plain(result), indent=1))
    else:
        show(out, text)
    raise click.exceptions.Exit(Exit.GOOD if good else Exit.SKIP if unsure else Exit.BAD)
