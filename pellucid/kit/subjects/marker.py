"""The probe that records which step a process died in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pellucid.kit.process.child import Note
from pellucid.kit.subjects.base import Probe, Step


class Marker(Probe):
    """Writes the running step, or the first of several, where the parent process can read it after this one died."""

    def __init__(self) -> None:
        self._note = Note()

    @property
    def observes(self) -> bool:
        return False

    def before(self, step: Step) -> None:
        self.note(step.name)

    def after(self, step: Step, values: Mapping[str, Any]) -> None:
        self.note("")

    def note(self, text: str) -> None:
        self._note.write(text)
