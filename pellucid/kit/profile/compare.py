"""Why one profile is faster than another: their times by group, side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pellucid.kit.profile.result import Comparison, Explained, KernelTime, OperatorTime, Profile, Replaced
from pellucid.kit.profile.rows import PYTHON_AND_LAUNCH


def compare(ours: Profile, theirs: Profile, run: str = "") -> Comparison:
    """Compare two profiles by group. Every row is in one group; the rest of a call without timers is Python and launch.

    So the groups add up to the time without timers. The timers run between the steps, whose times exclude them.
    run: the name of the folder that theirs was read from.
    """
    mine, other = _groups(ours), _groups(theirs)
    rows = [Explained(group, other.get(group, 0.0), mine.get(group, 0.0)) for group in dict.fromkeys((*other, *mine))]
    rows.sort(key=lambda row: -abs(row.difference_microseconds))
    return Comparison(ours, theirs, tuple(rows), tuple(_replaced(ours, theirs)), run)


def _groups(found: Profile) -> Mapping[str, float]:
    total: dict[str, float] = {}
    for row in found.kernels:
        total[row.group] = total.get(row.group, 0.0) + row.total_microseconds
    total[PYTHON_AND_LAUNCH] = max(0.0, found.real_microseconds - sum(total.values()))
    return total


def _replaced(ours: Profile, theirs: Profile) -> Iterator[Replaced]:
    """The operators of eager mode by the kernels that replaced them. Each operator is counted once: for the kernels
    that implement its kind on its line or, where there is none because it was decomposed, for all on its line.
    """
    if not any(row.line_calls for row in theirs.kernels):
        return
    lines = [{_plain(line) for line in row.user_lines} for row in ours.kernels]
    kinds = [{_kind(node) for node in row.fx_nodes} for row in ours.kernels]
    found: dict[int | None, Counter[str]] = {n: Counter() for n in (*range(len(ours.kernels)), None)}
    for row in theirs.kernels:
        kind = row.symbol.partition("::")[2].rstrip("_")
        for line, share in _by_line(row):
            there = [n for n in range(len(lines)) if _plain(line) in lines[n]]
            for n, part in _divided([n for n in there if kind in kinds[n]] or there, ours.kernels):
                found[n][row.name] += row.total_microseconds * share * part  # type: ignore[assignment]
    for n, operators in sorted(found.items(), key=lambda each: -each[1].total()):
        if operators:
            name, taken = ("", 0.0) if n is None else (ours.kernels[n].name, ours.kernels[n].total_microseconds)
            each = tuple(OperatorTime(operator, time) for operator, time in operators.most_common())
            yield Replaced(name, operators.total(), taken, each)


def _by_line(row: KernelTime) -> list[tuple[str, float]]:
    whole = sum(row.line_calls)
    return [(line, calls / whole) for line, calls in zip(row.user_lines, row.line_calls, strict=True)] or [("", 1.0)]


def _divided(rows: Sequence[int], kernels: Sequence[KernelTime]) -> list[tuple[int | None, float]]:
    """The kernels with their shares of the calls."""
    whole = sum(kernels[n].calls for n in rows)
    return [(n, kernels[n].calls / whole) for n in rows] if whole else [(None, 1.0)]


def _plain(line: str) -> str:
    """A line without the module that it belongs to."""
    return line.partition(" (")[0]


def _kind(node: str) -> str:
    """`native_layer_norm` of `native_layer_norm_12`."""
    return re.sub(r"(_\d+)+$", "", node).rstrip("_")
