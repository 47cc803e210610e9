"""What changed between two runs: kernels, decisions, plans, numbers and times.

Two kernels are the same when they implement the same FX nodes of the same graph; their C++ may differ. A time has
changed when it did so by a quarter or more, and more than a launch costs: runs are timed on machines that are shared.
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

KINDS = ("environment", "graph", "result", "kernel", "decision", "plan", "number", "time")
_ORIGIN = re.compile(r" +# .*$", re.MULTILINE)  # where a line of a plan comes from: not what it does
_TIME_RATIO, _TIME_S = 1.25, 20e-6


@dataclass(frozen=True, slots=True)
class Change:
    """kind: of KINDS. what: a graph, a kernel, a result ... before, after: in words; one is empty where it is only in
    the other.
    """

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
        """Whether nothing changed but times, which no two runs share."""
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
    """By graph, its calls."""
    found: dict[str, str] = {}
    for name in run.names:
        nodes = [node for node in run.read(f"graphs/{name}.json")["nodes"] if node["op"] == "call_function"]
        found[name] = f"{len(nodes)} calls: " + " ".join(str(node["target"]) for node in nodes)
    return found


def _results(run: Run) -> dict[str, str]:
    results: Mapping[str, Mapping[str, str]] = run.about.get("results", {})
    return {name: f"{each['verdict']} {each['failure']}".strip() for name, each in results.items()}


def _kernels(run: Run) -> dict[str, str]:
    """By what they implement, the C++ function (its name tells its text) or the operator of a library."""
    return {f"{row['graph']}: {row['fx_nodes']}": row["symbol"] or row["op"] for row in run.table("kernels.csv")}


def _decisions(run: Run) -> dict[str, str]:
    return {
        f"{row['graph']}: {row['kind']} of {row['fx_nodes'] or row['subject']}": row["cause"]
        for row in run.table("decisions.csv")
    }


def _plans(before: Run, after: Run) -> Iterator[Change]:
    for name in before.names:
        texts = [run.folder / "plans" / f"{name}.txt" for run in (before, after)]
        if all(path.is_file() for path in texts):
            a, b = (_ORIGIN.sub("", path.read_text(encoding="utf-8")).splitlines() for path in texts)
            lines = [line for line in difflib.unified_diff(a, b, lineterm="", n=0) if line[:3] not in ("---", "+++")]
            removed = [line[1:].strip() for line in lines if line.startswith("-")]
            added = [line[1:].strip() for line in lines if line.startswith("+")]
            if removed or added:
                yield Change("plan", name, "\n".join(removed), "\n".join(added))


def _numbers(before: Run, after: Run) -> Iterator[Change]:
    """Results, eager's and compiled, that differ by more than rounding: eager's of the first run are the reference."""
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
