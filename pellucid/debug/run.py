"""A run: the captured graphs of a program with their inputs, and what a backend made of them, in a folder.

A run is data. Reading one, also one that a stranger sends, executes nothing: tensors are bytes (`tensors.py`), graphs
are lists of PyTorch's operators by name (`graph_file.py`). `FILES` says what lies where.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.capture.sizes import fake_inputs, sizes_to_json
from pellucid.debug.graph_file import graph_from_json, graph_to_json
from pellucid.debug.graphs import Graph, rebound
from pellucid.debug.tensors import TensorStore
from pellucid.errors import UserError
from pellucid.trace.store import environment

VERSION = 2

FILES: Mapping[str, str] = {
    "run.json": "what was captured, with which backend, options and environment, and how it ended",
    "graphs": "each graph: as data (.json, what the kit reads) and as Python for people (.py)",
    "tensors": "the bytes of inputs, constants and results, each stored once",
    "numbers.json": "what the graphs returned, eagerly and compiled, and intermediate results if they were asked for",
    "kernels.csv": "one row for each kernel and library call: FX nodes, user lines, operators, seconds",
    "kernels": "the C++ of each different kernel, annotated with FX nodes and user lines",
    "decisions.csv": "what was not fused, not vectorised and not compiled, and why",
    "plans": "each compiled graph as the backend prints it",
    "check.json": "and so on for each command that was run with -o: its result",
    "cosim.csv": "every result that cosimulation compared",
    "repro.py": "the smallest program that fails, from minify: running it executes its code",
}

_NUMBERS = "numbers.json"
_BACKENDS = ("pellucid", "inductor")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Run:
    """An existing run. about: the content of `run.json`. libraries: whose operators its graphs may call."""

    folder: Path
    about: Mapping[str, Any]
    libraries: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Of its graphs, in the order of their first calls."""
        return tuple(self.about["graphs"])

    @property
    def backend(self) -> str:
        """What captured it. Raises UserError for a backend that is not the kit's own subject: it may be anything."""
        if self.about["backend"] not in _BACKENDS:
            raise UserError(f"{self.folder} was captured with {self.about['backend']!r:.40}", hint="give --backend")
        return self.about["backend"]

    def options_but(self, given: Collection[str]) -> dict[str, Any]:
        """The options of its backend that are not given.

        Raises UserError for one that is no number or switch: a text may name a compiler, a flag or a file.
        """
        options = {name: value for name, value in self.about["options"].items() if name not in given}
        for name, value in options.items():
            if not isinstance(value, bool | int | float | None):
                raise UserError(
                    f"{self.folder} was captured with {name}={value!r:.60}, which a run may not choose",
                    hint=f"give --option {name}=VALUE, the same or another, if you trust it",
                )
        return options

    def graph(self, name: str) -> Graph:
        """A graph with its inputs. Raises UserError when the run has none of this name, or files are damaged."""
        if name not in self.names:
            raise UserError(f"{self.folder} has no graph {name}", hint=f"it has {', '.join(self.names)}")
        file = f"graphs/{name}.json"
        saved, tensors = self.read(file), TensorStore(self.folder)
        try:
            module = graph_from_json(saved, tensors.load, self.libraries)
            inputs, sizes = tuple(tensors.load(saved["inputs"])), saved["sizes"]
            mode, given = (None, inputs) if sizes is None else fake_inputs(sizes, inputs)
            return Graph(name, saved["kind"], rebound(module, given, mode), inputs)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{self.folder}/{file} makes no graph: {error!r:.99}", hint="copy the run again") from error

    def graphs(self, name: str = "") -> list[Graph]:
        """All graphs, or the one of this name."""
        return [self.graph(each) for each in ([name] if name else self.names)]

    def read(self, file: str) -> Any:
        """A JSON file of the run. Raises UserError when it is missing or is none."""
        path = self.folder / file
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.folder} has no {file}", hint="copy the whole folder") from None
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}", hint="copy the run again") from None

    def numbers(self, name: str) -> Mapping[str, Any] | None:
        """What a graph returned: `eager`, `compiled`, and `intermediates` by FX node; None where that was not saved."""
        saved = self.read(_NUMBERS).get(name) if (self.folder / _NUMBERS).is_file() else None
        return None if saved is None else TensorStore(self.folder).load(saved)

    def add_numbers(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Save what a graph returned."""
        every = self.read(_NUMBERS) if (self.folder / _NUMBERS).is_file() else {}
        every[name] = TensorStore(self.folder).save(f"{name}-results", dict(numbers))
        write_json(self.folder / _NUMBERS, every)

    def table(self, file: str) -> list[dict[str, str]]:
        """The rows of a CSV file of the run; none when it has no such file."""
        path = self.folder / file
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as text:
            return list(csv.DictReader(text))


def open_run(folder: Path, libraries: Iterable[str] = ()) -> Run:
    """The run in a folder. Raises UserError when there is none, or one that this version cannot read."""
    run = Run(folder, {}, frozenset(libraries))
    about = run.read("run.json")
    if not isinstance(about, dict) or about.get("kind") != "program" or about.get("schema_version") != VERSION:
        raise UserError(
            f"{folder} is no run that this version can read", hint="make one with `pellucid capture TARGET -o FOLDER`"
        )
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in about["graphs"]):
        raise UserError(f"{folder}/run.json names an impossible graph")
    return Run(folder, about, frozenset(libraries))


def run_of(target: str, libraries: Iterable[str] = ()) -> Run | None:
    """The run that a target names, be it with a graph; None for a target that is none."""
    found = split_run(target)
    return None if found is None else open_run(found[0], libraries)


def split_run(target: str) -> tuple[Path, str] | None:
    """The folder and the graph (empty: all) that `RUN` or `RUN:GRAPH` names; None for what is no run."""
    folder, _, name = target.rpartition(":")
    if (Path(target) / "run.json").is_file():
        return Path(target), ""
    return (Path(folder), name) if folder and (Path(folder) / "run.json").is_file() else None


class RunWriter:
    """Writes a run, graph by graph. Raises UserError when the folder has another run, or cannot be written."""

    def __init__(self, folder: Path, *, backend: str, options: Mapping[str, Any], target: str) -> None:
        if (folder / "run.json").exists():
            raise UserError(f"{folder} has a run already", hint="give another folder, or remove it")
        self.folder = folder
        self._about: dict[str, Any] = {
            "schema_version": VERSION,
            "kind": "program",
            "target": target,
            "backend": backend,
            "options": dict(options),
            "environment": environment(),
            "graphs": [],
        }
        try:
            (folder / "graphs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error}", hint="give a folder that is writable") from error
        self._tensors = TensorStore(folder)
        self.note()

    def add(self, graph: Graph) -> None:
        """One more graph, with its inputs."""
        saved = {
            "kind": graph.kind,
            **graph_to_json(graph.module, lambda values: self._tensors.save(f"{graph.name}-attributes", dict(values))),
            "inputs": self._tensors.save(f"{graph.name}-inputs", list(graph.inputs)),
            "sizes": sizes_to_json(graph.module),
        }
        write_json(self.folder / "graphs" / f"{graph.name}.json", saved)
        readable = graph.module.print_readable(print_output=False)
        (self.folder / "graphs" / f"{graph.name}.py").write_text(readable, encoding="utf-8")
        self._about["graphs"].append(graph.name)
        self.note()

    def note(self, **facts: Any) -> None:
        """More facts for `run.json`."""
        self._about.update(facts)
        write_json(self.folder / "run.json", self._about)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
