"""The linked panes: the Python, FX, IR and C++ of each kernel, as data for the page's script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pellucid.kit.profile.result import KernelTime
from pellucid.kit.report.material import Material, place_of, texts_of
from pellucid.kit.runs.run import Run

Json: TypeAlias = "dict[str, Any]"

MAX_BYTES = 6 << 20
"""Of IR and C++ in a page; the longest kernels come first."""

_NODE = re.compile(r"^\s*(?P<name>\w+)(?:: \"[^\"]*\")? = ")
_FRAME = re.compile(r"^\s*# File: (?P<file>.+):(?P<line>\d+) in ")
_BLOCK = re.compile(r"^(?P<indent> *)(?:kernel|extern|nest) (?P<name>\w+)[ (<]")


def panes_of(found: Material, kernels: Sequence[KernelTime]) -> Json:
    """The script's data: `kernels` in the order of the table's rows, `graphs` with FX and IR by step, `cpp` by symbol,
    `source` by file and line. left_out: how many kernels have no IR and C++ here, to limit the size of the page.
    """
    graphs: dict[str, Json] = {}
    cpp: dict[str, str] = {}
    room, left_out = MAX_BYTES, 0
    texts = _Texts(found.run)
    for row in kernels:
        cost = 0
        for graph, step in _steps(row)[:1]:
            about = graphs.setdefault(graph, {"fx": texts.fx(graph), "ir": {}})
            if room > 0 and step not in about["ir"]:
                about["ir"][step] = texts.ir(graph, step)
                cost += len(about["ir"][step])
        if room > 0 and row.kind == "kernel" and row.symbol not in cpp:
            cpp[row.symbol] = found.run.source(row.symbol) if found.run is not None else ""
            cost += len(cpp[row.symbol])
        left_out += room <= 0
        room -= cost
    return {
        "kernels": [_kernel(row) for row in kernels],
        "graphs": graphs,
        "cpp": {symbol: text.splitlines() for symbol, text in cpp.items()},
        "source": {file: {str(n): text for n, text in lines.items()} for file, lines in (found.source or {}).items()},
        "left_out": left_out,
    }


def _kernel(row: KernelTime) -> Json:
    places = dict.fromkeys((place.file, place.line) for place in map(place_of, row.user_lines) if place.file)
    return {
        "name": row.name,
        "kind": row.kind,
        "symbol": row.symbol,
        "steps": [list(each) for each in _steps(row)],
        "fx": list(row.fx_nodes),
        "places": [list(each) for each in places],
    }


def _steps(row: KernelTime) -> list[tuple[str, str]]:
    """The calls of a row, by graph and step."""
    return [(graph, step) for graph, _, step in (each.partition("/") for each in row.steps)]


class _Texts:
    """The texts of the graphs of a run, split by kernel."""

    def __init__(self, run: Run | None) -> None:
        self._run = run
        self._ir: dict[str, dict[str, str]] = {}

    def fx(self, graph: str) -> list[list[str | int]]:
        """The lines of the captured graph: text, the node that it defines, file and number of the user's line."""
        found: list[list[str | int]] = []
        file, number = "", 0
        for text in texts_of(self._run, graph, "fx_graph_readable.py").splitlines():
            frame, node = _FRAME.match(text), _NODE.match(text)
            if frame is not None:
                file, number = frame["file"], int(frame["line"])
            found.append([text, node["name"] if node else "", file if node else "", number if node else 0])
        return found

    def ir(self, graph: str, step: str) -> str:
        """The loop nest of a kernel, else its IR after fusion; empty if the backend prints neither."""
        if graph not in self._ir:
            texts = [texts_of(self._run, graph, file) for file in ("ir_post_fusion.txt", "loops.txt")]
            self._ir[graph] = {name: block for text in texts for name, block in _blocks(text.splitlines())}
        return self._ir[graph].get(step, "")


def _blocks(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The nodes of a printed program, or its loop nests, by name."""
    name, indent, held = "", "", list[str]()
    for line in lines:
        begins = _BLOCK.match(line)
        if begins is not None:
            name, indent, held = begins["name"], begins["indent"], []
        if name:
            held.append(line.removeprefix(indent))
        if name and line == f"{indent}}}":
            yield name, "\n".join(held)
            name = ""


def numbers_of(kernels: Sequence[KernelTime]) -> Mapping[tuple[str, str], int]:
    """By graph and step, the row of the profile that counts it."""
    return {step: n for n, row in enumerate(kernels) for step in _steps(row)}
