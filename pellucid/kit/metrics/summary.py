"""Summaries of the tables: a row for each model, and one for all of them together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from rich.console import RenderableType

from pellucid.kit.metrics.tables import read_tables
from pellucid.kit.shown import Shown
from pellucid.kit.stats import geometric_mean
from pellucid.printing import Cell, Table, name, sentence

Row: TypeAlias = "Mapping[str, str]"
_NUMBERS = 48  # columns of a terminal for numbers; the others are for the model's name


@dataclass(frozen=True, slots=True)
class Summed:
    """A summary of a table. rows: cells as text, by `columns`; the last row is for all models together."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Summary(Shown):
    """tables: paths by name. sums: one for each table. failures: of targets, by model."""

    tables: Mapping[str, str]
    sums: tuple[Summed, ...]
    failures: Mapping[str, str]

    @property
    def good(self) -> bool:
        return not self.failures


def summary_of(folder: Path, failures: Mapping[str, str] | None = None) -> Summary:
    """Summarise the tables in a folder. Raises UserError where there are none."""
    found = read_tables(folder)
    sums = tuple(_SUMS[name](rows) for name, rows in found.items())
    return Summary({name: str(folder / f"{name}.csv") for name in found}, sums, failures or {})


def _by_model(
    rows: Sequence[Row], columns: tuple[str, ...], row_of: Callable[[Sequence[Row]], tuple[str, ...]], name: str
):
    """A summary by `row_of` of the rows of each model under each backend, and of all rows."""
    models = dict.fromkeys(f"{row['model']} ({row['backend']})" for row in rows)
    parts = {model: [row for row in rows if f"{row['model']} ({row['backend']})" == model] for model in models}
    sums = [(model, *row_of(part)) for model, part in parts.items()]
    return Summed(name, ("model", *columns), (*sums, ("all", *row_of(rows))))


def _graphs(rows: Sequence[Row]) -> Summed:
    columns = ("fx_calls", "kernels", "distinct_kernels", "library_calls", "fusions", "fusion_failures")
    return _by_model(rows, columns, lambda part: tuple(f"{_total(part, name):g}" for name in columns), "graphs")


def _kernels(rows: Sequence[Row]) -> Summed:
    columns = ("kernels", "loads", "stores", "loops", "atomic adds", "not vectorized", "argument MB")

    def row(part: Sequence[Row]) -> tuple[str, ...]:
        totals = (_total(part, name) for name in ("loads", "stores", "loops", "atomic_adds"))
        scalar = sum(each["vectorized"] == "0" for each in part)
        return (
            str(len(part)),
            *(f"{each:g}" for each in totals),
            str(scalar),
            f"{_total(part, 'argument_bytes') / 1e6:.1f}",
        )

    return _by_model(rows, columns, row, "kernels")


def _failures(rows: Sequence[Row]) -> Summed:
    """A column for each category, the most frequent first."""
    categories = [name for name, _ in Counter(row["category"] for row in rows).most_common()]

    def row(part: Sequence[Row]) -> tuple[str, ...]:
        counted = Counter(each["category"] for each in part)
        return str(len(part)), *(str(counted[name]) for name in categories)

    return _by_model(rows, ("failures", *categories), row, "fusion_failures")


def _slow(rows: Sequence[Row]) -> Summed:
    def row(part: Sequence[Row]) -> tuple[str, ...]:
        ratios = [float(each["ratio"]) for each in part if float(each["ratio"]) > 0]
        worst = max(part, key=lambda each: float(each["ratio"]), default=None)
        mean = f"{geometric_mean(ratios):.2f}" if ratios else ""
        slow = sum(each["slow"] == "1" for each in part)
        return str(len(part)), str(slow), mean, f"{worst['kernel']} {worst['ratio']}" if worst else ""

    return _by_model(rows, ("fused kernels", "slow", "mean ratio", "worst"), row, "slow_fusions")


def _estimates(rows: Sequence[Row]) -> Summed:
    def row(part: Sequence[Row]) -> tuple[str, ...]:
        factors = [float(each["factor"]) for each in part if each["factor"]]
        over = sum(bool(each["percent_of_limit"]) and float(each["percent_of_limit"]) > 100 for each in part)
        return (
            str(len(part)),
            f"{geometric_mean(factors):.2f}" if factors else "",
            f"{max(factors, default=0):.1f}",
            str(over),
        )

    return _by_model(rows, ("kernels and calls", "mean factor", "worst", "over their limit"), row, "estimates")


def _total(rows: Sequence[Row], column: str) -> float:
    """The sum of the known values of a column."""
    return sum(float(row[column]) for row in rows if row[column].replace(".", "", 1).isdigit())


_SUMS: Mapping[str, Callable[[Sequence[Row]], Summed]] = {
    "graphs": _graphs,
    "kernels": _kernels,
    "fusion_failures": _failures,
    "slow_fusions": _slow,
    "estimates": _estimates,
}


def summary_text(found: Summary) -> Iterator[RenderableType]:
    """The summary of each table, and the failures."""
    for number, each in enumerate(found.sums):
        if number:
            yield sentence("")
        yield sentence(f"{each.name}: ", found.tables[each.name])
        yield _table(each)
    for model, failure in found.failures.items():
        yield sentence((f"{model}: {failure}", "bold red"))


def _table(found: Summed) -> Table:
    """A table whose columns fit next to the model's name, with two-line headings; the rest is listed below the name."""
    heads = [_two_lines(column) for column in found.columns[1:]]
    cells = zip(heads, *(row[1:] for row in found.rows), strict=True)
    ends = accumulate(max(map(len, (*head, *column))) + 1 for head, *column in cells)
    shown = sum(end <= _NUMBERS for end in ends)
    rows: list[Sequence[Cell]] = [
        (*(head[0] for head in heads[:shown]), ""),
        (*(head[1] for head in heads[:shown]), found.columns[0]),
    ]
    for model, *row in found.rows:
        others = zip(found.columns[1 + shown :], row[shown:], strict=True)
        rest = ", ".join(f"{column} {cell}" for column, cell in others if cell not in ("", "0"))
        rows.append((*row[:shown], [name(model), *([sentence(f"  {rest}", hang=2)] if rest else [])]))
    return Table((), rows, right=frozenset(range(shown)), gap=" ")


def _two_lines(heading: str) -> tuple[str, str]:
    """Split a heading such as `not vectorized` after its first word."""
    first, _, rest = re.sub("[_-]", " ", heading).partition(" ")
    return (first, rest) if rest else ("", first)
