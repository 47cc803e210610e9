"""Profiles in runs, as `pellucid profile -o` and `pellucid report` write them."""

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
    """The profile in a run. Raises UserError if there is none, or if this version cannot read it."""
    found = saved(folder / FILE)
    return found.ours if isinstance(found, Comparison) else found


def saved(file: Path) -> Profile | Comparison:
    """The profile or comparison in a file. Raises UserError if there is none, or if this version cannot read it."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if "ours" in about:
            return compare(
                _load(Profile, about["ours"]), _load(Profile, about["theirs"]), _load(str, about.get("run", ""))
            )
        return _load(Profile, about)
    except FileNotFoundError:
        hint = "create one with `pellucid profile TARGET -o FOLDER`"
        raise UserError(f"{file.parent} has no profile", hint=hint) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a valid profile: {error!r:.80}", hint="take the profile again") from error


def _load(kind: Any, about: Any) -> Any:
    """A JSON value converted to the type of a field. Raises TypeError for a value of another type."""
    if get_origin(kind) is tuple:
        return tuple(_load(get_args(kind)[0], each) for each in about)
    if isinstance(kind, UnionType):
        return None if about is None else _load(next(each for each in get_args(kind) if each is not type(None)), about)
    if is_dataclass(kind):
        types = _types(kind)
        return kind(**{each.name: _load(types[each.name], about[each.name]) for each in fields(kind)})  # type: ignore[operator]
    if isinstance(about, bool) != (kind is bool) or not isinstance(about, (int, float) if kind is float else kind):
        raise TypeError(f"{about!r:.40} is not a {kind.__name__}")
    return about


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
