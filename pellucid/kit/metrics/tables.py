"""The tables: their names, columns and CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pellucid.errors import UserError, near

Rows: TypeAlias = "dict[str, list[dict[str, Any]]]"
"""Rows by table name."""

TAGS = ("model", "backend", "graph")
"""The first columns of each table."""

TABLES: dict[str, tuple[str, ...]] = {
    "graphs": (
        "kind", "fx_calls", "operators", "kernels", "distinct_kernels", "library_calls", "fusions", "fusion_failures",
        "not_vectorized", "bytes", "flops", "compile_seconds",
    ),
    "kernels": (
        "kernel", "symbol", "fx_nodes", "ir_ops", "loads", "stores", "loops", "reductions", "atomic_adds",
        "argument_bytes", "flops", "vectorized", "lines",
    ),
    "fusion_failures": ("category", "first", "second", "why", "user_line"),
    "slow_fusions": ("kernel", "parts", "fused_microseconds", "parts_microseconds", "ratio", "spread", "slow"),
    "estimates": (
        "kernel", "kind", "calls", "estimate_microseconds", "measured_microseconds", "factor", "limit",
        "percent_of_limit",
    ),
}  # fmt: skip
"""By name, the columns after the tags. Cells that a backend does not report are empty.

graphs: `fx_calls` of the captured graph, `operators`: distinct ones; `bytes` and `flops` of its kernels;
`compile_seconds` of all stages together.
kernels: a row for each call of a kernel; `loads` and `stores` in its loops, `loops` and `atomic_adds` in its C++,
`argument_bytes` of distinct elements, those that are read and written counted twice.
fusion_failures: a row for each pair and each rule that rejected it.
slow_fusions: a fused kernel compared with the kernels of its operators without fusion; `slow` where it takes longer
than they do by more than the spread.
estimates: the machine model's compared with the measured time.
"""


def chosen(only: Iterable[str], without: Iterable[str]) -> tuple[str, ...]:
    """The tables to write: all or `only`, except those in `without`. Raises UserError for an unknown name."""
    only, without = tuple(only), tuple(without)
    for name in (*only, *without):
        if name not in TABLES:
            raise UserError(f"unknown table {name!r}", hint=near(name, TABLES) or f"choose from {', '.join(TABLES)}")
    found = tuple(name for name in (only or TABLES) if name not in without)
    if not found:
        raise UserError("no tables left to write")
    return found


def write_tables(folder: Path, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, str]:
    """Write the tables; returns their paths by name. Raises UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, found in rows.items():
            with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, (*TAGS, *TABLES[name]), restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(found)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}", hint="use a writable folder") from error
    return {name: str(folder / f"{name}.csv") for name in rows}


def read_tables(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The tables in a folder. Raises UserError where there are none, or one has other columns."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, columns in TABLES.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != (*TAGS, *columns):
                    raise UserError(f"{path} has other columns than this version writes", hint="write it again")
                found[name] = list(reader)
    if not found:
        raise UserError(f"{folder} has no tables", hint="`pellucid metrics TARGET... -o FOLDER` writes them")
    return found
