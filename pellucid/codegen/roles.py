"""The roles of a kernel's buffers in its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roles:
    """Sets of buffers.

    frozen: have the same content in each call, so they may be packed in advance. unread: no other operator of the
    program reads them. produced: other kernels compute them. given: the caller owns them.
    """

    frozen: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    produced: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> Roles:
        """The roles of the buffers in `names`, under their new names."""

        def each(buffers: frozenset[str]) -> frozenset[str]:
            return frozenset(new for old, new in names.items() if old in buffers)

        return Roles(each(self.frozen), each(self.unread), each(self.produced), each(self.given))
