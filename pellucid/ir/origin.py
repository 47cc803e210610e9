"""Provenance of IR lines: user code, FX nodes and the compiler's own steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class UserLine(NamedTuple):
    """One line of the user's program. module: the path of the `nn.Module` that ran it, `blocks.1.norm`, if one did.

    file: empty where only the module is known, as in an `nn.Sequential`, which PyTorch's own code runs; `code` is then
    the module's class.
    """

    file: str
    line: int
    code: str = ""
    module: str = ""

    def __str__(self) -> str:
        if not self.file:
            return f"module {self.module}" + (f" ({self.code})" if self.code else "")
        return f"{self.file}:{self.line}" + (f" ({self.module})" if self.module else "")


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of a value. It accompanies the value and is never part of its identity.

    nodes: names of the FX nodes, in graph order of first use.
    users: lines of the user's program, innermost frame of each node.
    steps: the compiler steps that created this line (`lower`, `fuse`, ...); an origin with only steps is glue.
    """

    nodes: tuple[str, ...] = ()
    users: tuple[UserLine, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def is_glue(self) -> bool:
        """True when the value comes from no FX node."""
        return not self.nodes

    def step(self, name: str) -> Origin:
        """This origin with one more compiler step, unless it has it already."""
        return self if name in self.steps else Origin(self.nodes, self.users, (*self.steps, name))


GLUE = Origin()


def merge(origins: Iterable[Origin]) -> Origin:
    """The union of several origins, in order of first appearance."""
    nodes: dict[str, None] = {}
    users: dict[UserLine, None] = {}
    steps: dict[str, None] = {}
    for origin in origins:
        nodes.update(dict.fromkeys(origin.nodes))
        users.update(dict.fromkeys(origin.users))
        steps.update(dict.fromkeys(origin.steps))
    return Origin(tuple(nodes), tuple(users), tuple(steps))
