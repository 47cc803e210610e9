"""The page: a template, a style sheet and a script in one file without external links."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import lru_cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from pellucid.kit.profile.result import Comparison, Profile
from pellucid.kit.report.material import Material
from pellucid.kit.report.view import View, view_of

_NOTEBOOK_HEIGHT = 900


def page_of(view: View) -> str:
    """The HTML of a view. The template escapes all text; the script's data is JSON that cannot contain a tag."""
    script = _text("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(view=view, style=_text("report.css"), script=script, digest=digest)


def notebook(found: Profile | Comparison) -> str:
    """A profile as a page in an iframe, so that it and the notebook do not share styles or scripts."""
    profile = found.ours if isinstance(found, Comparison) else found
    comparisons = (found,) if isinstance(found, Comparison) else ()
    text = page_of(view_of(Material(profile.target, profile=profile, comparisons=comparisons)))
    style = f"width:100%;height:{_NOTEBOOK_HEIGHT}px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(text)}"></iframe>'


@lru_cache(maxsize=1)
def _template() -> Template:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.from_string(_text("report.html"))


def _text(name: str) -> str:
    return (files("pellucid.kit.report") / name).read_text(encoding="utf-8")
