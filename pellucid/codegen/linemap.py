"""The origin of each line of a generated kernel, and the source annotated with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pellucid.ir.origin import GLUE, Origin

WIDTH = 100
MAX_LISTED = 4


@dataclass(slots=True)
class Writer:
    """Source text under construction: each line with its origin."""

    lines: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    depth: int = 0

    def line(self, text: str, origin: Origin = GLUE) -> None:
        self.lines.append("  " * self.depth + text)
        self.origins.append(origin)

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def describe(origin: Origin) -> str:
    """The comment of a line: `add, mul  model.py:12, model.py:14`; empty for glue. Long lists are shortened."""
    if origin.is_glue:
        return ""
    users = _listed([str(user) for user in origin.users])
    return _listed(origin.nodes) + (f"  {users}" if users else "")


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def annotate_source(source: str, origins: Sequence[Origin]) -> str:
    """The source with a trailing comment on every line that has an origin.

    before: `const auto v2 = pv::add(v0, v1);`
    after:  `const auto v2 = pv::add(v0, v1);        // add_3  model.py:12`
    """
    result: list[str] = []
    for line, origin in zip(source.splitlines(), origins, strict=True):
        comment = describe(origin)
        result.append(f"{line:<{WIDTH}}  // {comment}" if comment else line)
    return "\n".join(result) + "\n"
