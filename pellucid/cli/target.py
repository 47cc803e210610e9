"""What the commands of the debugging kit share: their options, and running a step of work in a process of its own."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import click

from pellucid.cli.exits import Exit
from pellucid.cli.terminal import SECONDS


class _Setting(click.ParamType):
    """`KEY=VALUE`, the value a Python literal or text."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is no setting: give KEY=VALUE", param, ctx)
        try:
            return key, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return key, text


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """TARGET, and the options that every command of the kit has."""
    for option in reversed(
        (
            click.argument("target", metavar="FILE.py:NAME"),
            click.option("--backend", default="pellucid", show_default=True, metavar="NAME", help="The subject."),
            click.option(
                "--option", "options", type=_Setting(), multiple=True, help="An option of the backend; repeatable."
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Threads to use. Default: torch's choice."),
            click.option(
                "--timeout", type=SECONDS, default=300.0, show_default=True, help="Until it counts as hanging."
            ),
            click.option(
                "--memory", type=click.IntRange(min=1), metavar="MB", help="Until it counts as out of memory."
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout instead of text."),
        )
    ):
        command = option(command)
    return command


def plain(value: Any) -> Any:
    """A result as JSON's types: dataclasses as objects, enumerations as their values."""
    if is_dataclass(value) and not isinstance(value, type):
        own = [name for name, item in vars(type(value)).items() if isinstance(item, property)]
        names = (*(each.name for each in fields(value)), *own)
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def finish(result: Any, as_json: bool, show: Callable[[Any], None], code: Exit) -> None:
    """Print a result and end the command."""
    if as_json:
        click.echo(json.dumps(plain(result), indent=1))
    else:
        show(result)
    raise click.exceptions.Exit(code)
