"""What a program says of the buffers of one of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roles:
    """frozen: buffers that are the same at each call, so that what they hold may be packed before.

    unread: those that nothing else in the program reads. made: those that other kernels make. given: the caller's.
    """

    frozen: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> Roles:
        """Of the buffers among `names`, by their new names."""

        def each(buffers: frozenset[str]) -> frozenset[str]:
            return frozenset(new for old, new in names.items() if old in buffers)

        return Roles(each(self.frozen), each(self.unread), each(self.made), each(self.given))
