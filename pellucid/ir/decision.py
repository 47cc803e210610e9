"""Every legality or cost rule of the compiler returns a `Decision`, never a bare bool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Fact: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of one rule for one subject.

    rule: name of the rule, `stage.rule` (for example `fuse.vertical`).
    subject: names of the kernels, buffers or values that it concerns.
    ok: whether the rule allows it.
    why: one plain sentence; a refusal without it is a bug.
    facts: the numbers behind the sentence.
    """

    rule: str
    subject: tuple[str, ...]
    ok: bool
    why: str
    facts: tuple[tuple[str, Fact], ...] = field(default=())

    def __post_init__(self) -> None:
        assert self.why, f"decision {self.rule} about {self.subject} gives no reason"

    def __str__(self) -> str:
        facts = "".join(f" {name}={value}" for name, value in self.facts)
        return (
            f"{'yes' if self.ok else 'no '} {self.rule}  {' <- '.join(self.subject)}: {self.why}{facts and ';'}{facts}"
        )

    def __bool__(self) -> bool:
        return self.ok


class DecisionLog:
    """Decisions in the order in which they were made."""

    def __init__(self) -> None:
        self._decisions: list[Decision] = []

    def add(self, decision: Decision) -> Decision:
        """Record `decision` and return it, so that a rule can be evaluated and logged in one expression."""
        self._decisions.append(decision)
        return decision

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions)

    def __len__(self) -> int:
        return len(self._decisions)
