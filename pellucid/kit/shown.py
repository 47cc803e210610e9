"""Results whose text is what their command prints."""

from __future__ import annotations


class Shown:
    """`str()` of a result reads like the command's text, as a pipe gets it."""

    __slots__ = ()

    def __str__(self) -> str:
        from pellucid.kit.show import shown  # imports every result
        from pellucid.printing import plain

        return plain(shown(self))
