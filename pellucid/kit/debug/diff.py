"""Report what changed between two runs: kernels, decisions, plans, results and times.

Two kernels are the same when they implement the same FX nodes of the same graph; their C++ may differ. A time counts as
changed if it differs by more than a quarter and by more than the cost of a launch, because machines are shared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.kit.judge.judge import judge
from pellucid.kit.runs.run import Run
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.refusals import kind_of

KINDS = ("environment", "graph", "result", "kernel", "decision", "plan", "number", "time")
# Comments in plans and kernels that name the origin of a line, which do not count as changes.
_ORIGIN, _COMMENT = (re.compile(rf" +{sign} .*$", re.MULTILINE) for sign in ("#", "//"))
_TIME_RATIO, _TIME_S = 1.25, 20e-6


@dataclass(frozen=True, slots=True)
class Change:
    """kind: one of KINDS. what: a graph, a kernel, a result ... before, after: as text; empty for a run without it."""

    kind: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Changes(Shown):
    """changed: in the order of KINDS."""

    before: str
    after: str
    changed: tuple[Change, ...]

    @property
    def good(self) -> bool:
        """Whether nothing changed but times, which always differ."""
        return all(change.kind == "time" for change in self.changed)


def diff(before: Run, after: Run) -> Changes:
    """Compare two runs. Neither is executed."""
    found = [
        *_mapping("environment", before.about["environment"], after.about["environment"]),
        *_mapping("environment", {"backend": before.about["backend"]}, {"backend": after.about["backend"]}),
        *_mapping("environment", before.about["options"], after.about["options"]),
        *_mapping("graph", _graphs(before), _graphs(after)),
        *_mapping("result", _results(before), _results(after)),
        *_mapping("kernel", _kernels(before), _kernels(after)),
        *_mapping("decision", _decisions(before), _decisions(after)),
        *_plans(before, after),
        *_numbers(before, after),
        *_times(before, after),
    ]
    return Changes(str(before.folder), str(after.folder), tuple(found))


def _mapping(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        a, b = str(before.get(name, "")), str(after.get(name, ""))
        if a != b or (name in before) != (name in after):
            yield Change(kind, name, a, b)


def _graphs(run: Run) -> dict[str, str]:
    """The calls of each graph."""
    called = {name: run.calls(name) for name in run.names}
    return {name: f"{len(calls)} calls: {' '.join(calls)}" for name, calls in called.items()}


def _results(run: Run) -> dict[str, str]:
    found = {name: each for name, each in run.about["compiled"].items() if "verdict" in each}
    return {name: f"{each['verdict']} {each['failure']}".strip() for name, each in found.items()}


def _kernels(run: Run) -> dict[str, str]:
    """By FX nodes, the C++ function (its name contains a hash of its text) or the library operator."""
    return {f"{row['graph']}: {row['fx_nodes']}": row["symbol"] or row["op"] for row in run.table("kernels.csv")}


def _decisions(run: Run) -> dict[str, str]:
    """What was not fused, vectorised or compiled, and why."""
    found: dict[str, list[str]] = {}
    for row in run.table("decisions.csv"):
        kind = kind_of(row["rule"])
        if kind and row["ok"] == "0":
            found.setdefault(f"{row['graph']}: {kind} of {row['fx_nodes'] or row['subject']}", []).append(row["why"])
    return {what: "\n".join(dict.fromkeys(whys)) for what, whys in found.items()}


def _plans(before: Run, after: Run) -> Iterator[Change]:
    """Changes of the loops after fusion, and of the C++ of kernels that have the same name."""
    for name in before.names:
        yield from _text_change(
            name, *(_ORIGIN.sub("", run.text(name, "ir_post_fusion.txt")) for run in (before, after))
        )
    for symbol in dict.fromkeys(row["symbol"] for row in before.table("kernels.csv") if row["symbol"]):
        yield from _text_change(symbol, *(_COMMENT.sub("", run.source(symbol)) for run in (before, after)))


def _text_change(name: str, before: str, after: str) -> Iterator[Change]:
    if before and after:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
        changed = [line for line in lines if line[:3] not in ("---", "+++")]
        removed, added = ([line[1:].strip() for line in changed if line[0] == sign] for sign in "-+")
        if removed or added:
            yield Change("plan", name, "\n".join(removed), "\n".join(added))


def _numbers(before: Run, after: Run) -> Iterator[Change]:
    """Results, of eager and compiled code, that differ by more than rounding; those of `before` are the reference."""
    for name in before.names:
        a, b = before.numbers(name), after.numbers(name)
        if a is None or b is None:
            continue
        for what, then, now in _pairs(a, b):
            if then.shape != now.shape or then.dtype != now.dtype:
                yield Change("number", f"{name}: {what}", _kind(then), _kind(now))
            elif (found := judge(now, then, then.double() if then.is_floating_point() else then)).why:
                yield Change("number", f"{name}: {what}", "", found.why.replace("eager", "before"))


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for how in ("eager", "compiled"):
        for number, (then, now) in enumerate(zip(a[how], b[how], strict=False)):
            if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor):
                yield f"{how} output {number}", then, now
    for name in a["intermediates"].keys() & b["intermediates"].keys():
        yield name, a["intermediates"][name], b["intermediates"][name]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _times(before: Run, after: Run) -> Iterator[Change]:
    a, b = _seconds(before), _seconds(after)
    for name in (name for name in a if name in b):
        low, high = sorted((a[name], b[name]))
        if high > _TIME_RATIO * low and high - low > _TIME_S:
            yield Change("time", name, f"{a[name] * 1e6:.1f} us", f"{b[name] * 1e6:.1f} us")


def _seconds(run: Run) -> dict[str, float]:
    rows = [row for row in run.table("kernels.csv") if row["seconds"]]
    return {f"{row['graph']}: {row['fx_nodes']}": float(row["seconds"]) for row in rows}
