"""The input of a report: the files of a run, read and checked. Nothing is measured or executed here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.kit.debug.doctor import Check
from pellucid.kit.profile.result import Comparison, Profile
from pellucid.kit.profile.saved import FILE, saved
from pellucid.kit.runs.run import Run, open_run
from pellucid.machine import Machine
from pellucid.machine.model import from_text
from pellucid.trace.folder import read_json
from pellucid.trace.schema import RUN, USER_SOURCE

MACHINE, TRACE, DOCTOR = "machine.json", "trace.json", "doctor.json"
AGAINST = "profile_against_{}.json"

_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+)(?: \((?P<module>.*)\))?")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's program. file: empty where only the module is known."""

    file: str
    line: int
    module: str = ""

    @property
    def short(self) -> str:
        """The file with its last folder only."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line}" if self.file else f"module {self.module}"


@dataclass(frozen=True, slots=True)
class Material:
    """The parts of a report; missing ones are empty or None.

    comparisons: of the profile with others. machine: the one whose limits the profile was compared with. checks: of the
    profiled process. slices: of a Chrome trace. source: lines of the user's program, by file and number. cosim: rows of
    `cosim.csv`.
    """

    target: str
    run: Run | None = None
    profile: Profile | None = None
    comparisons: tuple[Comparison, ...] = ()
    machine: Machine | None = None
    checks: tuple[Check, ...] = ()
    slices: tuple[Mapping[str, Any], ...] = ()
    source: Mapping[str, Mapping[int, str]] | None = None
    cosim: tuple[Mapping[str, str], ...] = ()


def material_of(folder: Path) -> Material:
    """The contents of a run. Raises UserError for a folder that is not a run, and for damaged files."""
    run = open_run(folder) if (folder / RUN).is_file() else None
    found = [saved(file) for file in sorted(folder.glob(AGAINST.format("*")))]
    own = saved(folder / FILE) if (folder / FILE).is_file() else None
    comparisons = [each for each in (own, *found) if isinstance(each, Comparison)]
    profile = own.ours if isinstance(own, Comparison) else own
    if run is None and profile is None:
        hint = "`pellucid report TARGET` creates a run, `pellucid profile TARGET -o FOLDER` a profile"
        raise UserError(f"{folder} contains neither a run nor a profile", hint=hint)
    try:
        return Material(
            profile.target if profile is not None else run.about["target"] if run is not None else "",
            run,
            profile,
            tuple(comparisons),
            _machine(folder / MACHINE),
            tuple(Check(**each) for each in _read(folder / DOCTOR, [])),
            tuple(each for each in _read(folder / TRACE, {"traceEvents": []})["traceEvents"] if each["ph"] == "X"),
            {file: {int(n): str(text) for n, text in lines.items()} for file, lines in _source(folder).items()},
            tuple(run.table("cosim.csv") if run is not None else ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder} is damaged: {error!r:.90}", hint="create the report again") from error


def place_of(text: str) -> Place:
    """Parse `file:line (module)`, as profiles write it."""
    found = _PLACE.fullmatch(text)
    if found is None:
        return Place("", 0, text.removeprefix("module "))
    return Place(found["file"], int(found["line"]), found["module"] or "")


def texts_of(run: Run | None, graph: str, file: str) -> str:
    """A text file of a graph; empty if the run has none."""
    return run.text(graph, file) if run is not None and graph in run.names else ""


def nodes_of(run: Run, graph: str) -> Sequence[Mapping[str, Any]]:
    """The nodes of a captured graph, as JSON."""
    return run.read(f"graphs/{graph}/graph.json")["nodes"]


def _machine(file: Path) -> Machine | None:
    return from_text(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else None


def _source(folder: Path) -> Mapping[str, Mapping[str, str]]:
    return _read(folder / USER_SOURCE, {})


def _read(file: Path, otherwise: Any) -> Any:
    return read_json(file) if file.is_file() else otherwise


def as_text(value: Any) -> str:
    """A value of `run.json` on one line."""
    return value if isinstance(value, str) else json.dumps(value)
