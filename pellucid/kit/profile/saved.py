"""Profiles in runs, as `pellucid profile -o` and `pellucid report` leave them."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pellucid.errors import UserError
from pellucid.kit.profile.compare import compare
from pellucid.kit.profile.result import Comparison, Profile
from pellucid.trace.schema import PROFILE

FILE = PROFILE


def saved_profile(folder: Path) -> Profile:
    """The profile in a run. Raises UserError when there is none, or it is none of this version's."""
    found = saved(folder / FILE)
    return found.ours if isinstance(found, Comparison) else found


def saved(file: Path) -> Profile | Comparison:
    """What a file holds. Raises UserError when there is none, or it is none of this version's."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if "ours" in about:
            return compare(
                _made(Profile, about["ours"]), _made(Profile, about["theirs"]), _made(str, about.get("run", ""))
            )
        return _made(Profile, about)
    except FileNotFoundError:
        hint = "make one with `pellucid profile TARGET -o FOLDER`"
        raise UserError(f"{file.parent} has no profile", hint=hint) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} holds no profile: {error!r:.80}", hint="take it again") from error


def _made(kind: Any, about: Any) -> Any:
    """A value of JSON as the type that a field has. Raises TypeError for one of another type."""
    if get_origin(kind) is tuple:
        return tuple(_made(get_args(kind)[0], each) for each in about)
    if isinstance(kind, UnionType):
        return None if about is None else _made(next(each for each in get_args(kind) if each is not type(None)), about)
    if is_dataclass(kind):
        types = _types(kind)
        return kind(**{each.name: _made(types[each.name], about[each.name]) for each in fields(kind)})  # type: ignore[operator]
    if isinstance(about, bool) != (kind is bool) or not isinstance(about, (int, float) if kind is float else kind):
        raise TypeError(f"{about!r:.40} is no {kind.__name__}")
    return about


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
