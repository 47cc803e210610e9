"""Writing a run folder, for the compiler's trace of one graph and for the kit's capture of a program."""

from __future__ import annotations

import csv
import json
import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.capture.sizes import sizes_to_json
from pellucid.errors import UserError
from pellucid.ir.origin import UserLine
from pellucid.trace.environment import environment
from pellucid.trace.graph_file import graph_to_json
from pellucid.trace.schema import GRAPH, GRAPHS, NUMBERS, RUN, TABLES, USER_SOURCE, VALUES, VERSION
from pellucid.trace.tensors import TensorStore

_AROUND = 6  # lines before and after one of the user's


def check_free(folder: Path) -> None:
    """Raise UserError if a folder already has a run."""
    if (folder / RUN).exists():
        raise UserError(f"{folder} has a run already", hint="give another folder, or remove it")


@dataclass(frozen=True, slots=True)
class RunWriter:
    """Adds to the run in a folder; see `schema` for its files."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *, backend: str, options: Mapping[str, Any], target: str = "") -> RunWriter:
        """A new run. Raises UserError if the folder already has one, or cannot be written."""
        check_free(folder)
        about: dict[str, Any] = {
            "schema_version": VERSION,
            "target": target,
            "backend": backend,
            "options": dict(options),
            "environment": environment(),
            "graphs": [],
            "compiled": {},
        }
        try:
            (folder / GRAPHS).mkdir(parents=True, exist_ok=True)
            write_json(folder / RUN, about)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error}", hint="give a folder that is writable") from error
        return cls(folder)

    def of_graph(self, name: str) -> Path:
        """The folder of a graph."""
        folder = self.folder / GRAPHS / name
        folder.mkdir(exist_ok=True)
        return folder

    def note(self, **facts: Any) -> None:
        """Add facts to `run.json`."""
        write_json(self.folder / RUN, {**read_json(self.folder / RUN), **facts})

    def note_compiled(self, name: str, facts: Mapping[str, Any]) -> None:
        """Add facts about the compilation of a graph to `run.json`."""
        about = read_json(self.folder / RUN)
        known = about["compiled"].get(name, {})
        self.note(compiled={**about["compiled"], name: {**known, **facts}})

    def add_graph(self, name: str, kind: str, module: torch.fx.GraphModule) -> None:
        """Add a graph, as data. Raises UserError for one that calls anything but PyTorch's operators."""
        tensors = TensorStore(self.folder)
        saved = {
            "kind": kind,
            **graph_to_json(module, lambda values: tensors.save(f"{name}-attributes", dict(values))),
            "sizes": sizes_to_json(module),
        }
        write_json(self.of_graph(name) / GRAPH, saved)
        self.note(graphs=[*read_json(self.folder / RUN)["graphs"], name])

    def add_values(self, name: str, **values: Sequence[Any]) -> None:
        """Add `inputs` or `constants` of the programs of a graph. Raises UserError for values that cannot be saved."""
        path, tensors = self.of_graph(name) / VALUES, TensorStore(self.folder)
        known: dict[str, Any] = read_json(path) if path.exists() else {}
        fresh = {what: tensors.save(f"{name}-{what}", list(each)) for what, each in values.items()}
        write_json(path, {**known, **fresh})

    def add_numbers(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Add the results of a graph."""
        write_json(self.of_graph(name) / NUMBERS, TensorStore(self.folder).save(f"{name}-results", dict(numbers)))

    def add_texts(self, name: str, texts: Mapping[str, str]) -> None:
        """Add text files of a graph, by name."""
        for file, text in texts.items():
            (self.of_graph(name) / file).write_text(text, encoding="utf-8")

    def add_user_source(self, lines: Iterable[UserLine]) -> None:
        """Add these lines of the user's program, with lines around them, as they are in their files now."""
        found: dict[str, dict[str, str]] = {}
        for file, number, *_ in lines:
            window = range(max(1, number - _AROUND), number + _AROUND + 1) if file else ()
            texts = {each: linecache.getline(file, each) for each in window}  # empty where the file has ended
            found.setdefault(file, {}).update({str(n): text.rstrip("\n") for n, text in texts.items() if text})
        write_json(self.folder / USER_SOURCE, {file: each for file, each in found.items() if each})

    def add_sources(self, sources: Mapping[str, str]) -> None:
        """Add the C++ of kernels, by symbol."""
        folder = self.folder / "kernels"
        folder.mkdir(exist_ok=True)
        for symbol, text in sources.items():
            (folder / f"{symbol}.cpp").write_text(text, encoding="utf-8")

    def add_rows(self, file: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a table; each maps columns to values."""
        path, columns = self.folder / file, TABLES[file]
        fresh = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerows(rows)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError if it is missing or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}", hint="copy the whole folder") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", hint="copy the run again") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
