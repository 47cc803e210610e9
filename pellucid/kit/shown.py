"""Results of commands as the text that the command prints, as JSON, and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


class Shown:
    """A result whose `str()` is the text that its command prints to a pipe."""

    __slots__ = ()

    def __str__(self) -> str:
        from pellucid import printing
        from pellucid.kit.show import shown  # imports every result

        return printing.plain(shown(self))


class Paged(Shown):
    """A result that a notebook shows as the page of `pellucid report`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from pellucid.kit.report.page import notebook

        return notebook(self)  # type: ignore[arg-type]


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
