"""Reading a run: a folder with the captured graphs of a program, their inputs, and the output of a backend for them.

A run is data. Reading one, even from an untrusted source, executes nothing: tensors are bytes (`trace/tensors.py`),
graphs are lists of PyTorch's operators by name (`trace/graph_file.py`). `trace/schema.py` describes the files.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.capture.sizes import fake_inputs
from pellucid.errors import UserError
from pellucid.kit.programs.case import no_run
from pellucid.kit.programs.graphs import Graph, rebound
from pellucid.trace.folder import RunWriter, read_json
from pellucid.trace.fx_programs import readable
from pellucid.trace.graph_file import graph_from_json
from pellucid.trace.schema import GRAPH, GRAPHS, NUMBERS, RUN, VALUES, VERSION
from pellucid.trace.tensors import TensorStore

_BACKENDS = ("pellucid", "inductor")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Run:
    """An existing run. about: the content of `run.json`. libraries: those whose operators its graphs may call."""

    folder: Path
    about: Mapping[str, Any]
    libraries: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its graphs, in the order of their first calls."""
        return tuple(self.about["graphs"])

    @property
    def backend(self) -> str:
        """The backend that captured it. Raises UserError for any but the kit's own subjects, as it may be anything."""
        if self.about["backend"] not in _BACKENDS:
            raise UserError(f"{self.folder} was captured with {self.about['backend']!r:.40}", hint="give --backend")
        return self.about["backend"]

    def options_but(self, given: Collection[str]) -> dict[str, Any]:
        """The options of its backend that are not in `given`, without `machine`: it runs on this machine.

        Raises UserError for one that is neither a number nor a boolean: a string may name a compiler, a flag or a file.
        """
        options = {name: value for name, value in self.about["options"].items() if name not in (*given, "machine")}
        for name, value in options.items():
            if not isinstance(value, bool | int | float | None):
                raise UserError(
                    f"{self.folder} was captured with {name}={value!r:.60}, which a run may not choose",
                    hint=f"give --option {name}=VALUE, the same or another, if you trust it",
                )
        return options

    def of_graph(self, name: str) -> Path:
        """The folder of a graph."""
        return self.folder / GRAPHS / name

    def graph(self, name: str) -> Graph:
        """A graph with its inputs. Raises UserError if the run has none of this name, or if files are damaged."""
        if name not in self.names:
            raise UserError(f"{self.folder} has no graph {name}", hint=f"it has {', '.join(self.names)}")
        saved, values = self.read(f"{GRAPHS}/{name}/{GRAPH}"), self.read(f"{GRAPHS}/{name}/{VALUES}")
        if not isinstance(values, dict) or values.get("inputs") is None:
            raise UserError(f"{self.folder} has no inputs of {name}", hint="it was not called, or they are too large")
        tensors = TensorStore(self.folder)
        try:
            module = graph_from_json(saved, tensors.load, self.libraries)
            inputs, sizes = tuple(tensors.load(values["inputs"])), saved["sizes"]
            mode, given = (None, inputs) if sizes is None else fake_inputs(sizes, inputs)
            return Graph(name, saved["kind"], rebound(module, given, mode), inputs)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            message = f"{self.of_graph(name)}/{GRAPH} is not a valid graph: {error!r:.99}"
            raise UserError(message, hint="copy the run again") from error

    def graphs(self, name: str = "") -> list[Graph]:
        """All graphs, or the one of this name."""
        return [self.graph(each) for each in ([name] if name else self.names)]

    def calls(self, name: str) -> list[str]:
        """The operators that a graph calls."""
        nodes = self.read(f"{GRAPHS}/{name}/{GRAPH}")["nodes"]
        return [str(node["target"]) for node in nodes if node["op"] == "call_function"]

    def text(self, name: str, file: str) -> str:
        """A text file of a graph; empty if there is none."""
        path = self.of_graph(name) / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def source(self, symbol: str) -> str:
        """The C++ of a kernel; empty if there is none."""
        path = self.folder / "kernels" / f"{symbol}.cpp"
        return path.read_text(encoding="utf-8") if _NAME.fullmatch(symbol) and path.is_file() else ""

    def read(self, file: str) -> Any:
        """A JSON file of the run. Raises UserError if it is missing or invalid."""
        return read_json(self.folder / file)

    def numbers(self, name: str) -> Mapping[str, Any] | None:
        """The results of a graph: `eager`, `compiled`, and `intermediates` by FX node; None if they were not saved."""
        path = self.of_graph(name) / NUMBERS
        return TensorStore(self.folder).load(read_json(path)) if path.is_file() else None

    def table(self, file: str) -> list[dict[str, str]]:
        """The rows of a CSV file of the run; none if it has no such file."""
        path = self.folder / file
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as text:
            return list(csv.DictReader(text))


def open_run(folder: Path, libraries: Iterable[str] = ()) -> Run:
    """The run in a folder. Raises UserError if there is none, or if this version cannot read it."""
    if not (folder / RUN).is_file():
        raise no_run(folder)
    about = read_json(folder / RUN)
    if not isinstance(about, dict) or about.get("schema_version") != VERSION:
        raise UserError(
            f"{folder} is not a run that this version can read",
            hint="create one with `pellucid capture TARGET -o FOLDER`",
        )
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in about["graphs"]):
        raise UserError(f"{folder}/{RUN} contains an invalid graph name")
    return Run(folder, about, frozenset(libraries))


def run_of(target: str, libraries: Iterable[str] = ()) -> Run | None:
    """The run that a target names, with or without a graph; None for a target that is not a run."""
    found = split_run(target)
    return None if found is None else open_run(found[0], libraries)


def split_run(target: str) -> tuple[Path, str] | None:
    """The folder and the graph (empty: all) that `RUN` or `RUN:GRAPH` names; None for a target that is not a run."""
    folder, _, name = target.rpartition(":")
    if (Path(target) / RUN).is_file():
        return Path(target), ""
    return (Path(folder), name) if folder and (Path(folder) / RUN).is_file() else None


def save_graph(writer: RunWriter, graph: Graph) -> None:
    """Add a graph with its inputs to a run. Raises UserError if it cannot be saved."""
    writer.add_graph(graph.name, graph.kind, graph.module)
    writer.add_values(graph.name, inputs=graph.inputs, constants=())
    writer.add_texts(graph.name, {"fx_graph_readable.py": readable(graph.module)})


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
