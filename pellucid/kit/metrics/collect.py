"""Collect the rows of one model: from its compiled graphs, and from measured times where a table needs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pellucid.kit.metrics.tables import Rows
from pellucid.kit.metrics.timed import slow_fusions
from pellucid.kit.profile.measure import program_of_graphs, take
from pellucid.kit.programs.graphs import Graph, calls_of
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.subjects.base import Compiled, Step, Subject

UNKNOWN = "unknown"

_LOOP = re.compile(r"\bfor\s*\(|\bpv::(?:whole_)?steps<")
_ATOMIC = re.compile(r"\batomic_add")


def rows_of(request: Request, tables: Sequence[str], budget: float) -> Rows:
    """The rows of the tables for one request, computed in this process. budget: seconds of calls for `estimates`."""
    graphs, subject = captured(request)
    rows: Rows = {name: [] for name in tables}
    for graph in graphs:
        with torch.no_grad():
            compiled = subject.compile(graph)
        about = {"model": model_of(request.target), "backend": subject.name, "graph": graph.name}
        collectors = _collectors(graph, subject, compiled, budget / len(graphs))
        for name in tables:
            rows[name] += [{**about, **row} for row in collectors[name]()]
    return rows


def _collectors(
    graph: Graph, subject: Subject, compiled: Compiled, budget: float
) -> Mapping[str, Callable[[], Iterable[dict[str, Any]]]]:
    """For each table, the function that collects its rows for a graph."""
    return {
        "graphs": lambda: [_graph(graph, compiled)],
        "kernels": lambda: map(_kernel, _kernels(compiled)),
        "fusion_failures": lambda: _failures(compiled),
        "slow_fusions": lambda: slow_fusions(graph, subject, compiled),
        "estimates": lambda: _estimates(graph, subject, budget),
    }


def model_of(target: str) -> str:
    """The tag of a target: `model:make` for `FOLDER/model.py:make`, or the folder of a run."""
    path, _, name = target.rpartition(":")
    return f"{Path(path).stem}:{name}" if path.endswith(".py") else Path(target).name


def _graph(graph: Graph, compiled: Compiled) -> dict[str, Any]:
    kernels = list(_kernels(compiled))
    calls = list(calls_of(graph.module))
    refused = list(compiled.refusals())
    return {
        "kind": graph.kind,
        "fx_calls": len(calls),
        "operators": len({str(node.target) for node in calls}),
        "kernels": len(kernels),
        "distinct_kernels": len({step.symbol for step in kernels}),
        "library_calls": sum(not step.generated for step in compiled.steps),
        "fusions": len(compiled.fusions()),
        "fusion_failures": sum(each.kind == "fusion" for each in refused),
        "not_vectorized": sum(each.kind == "vectorisation" for each in refused),
        "bytes": _sum(_bytes(step) for step in kernels),
        "flops": _sum(_number(step.facts.get("flops")) for step in kernels),
        "compile_seconds": f"{sum(compiled.seconds.values()):.3f}",
    }


def _kernels(compiled: Compiled) -> Iterator[Step]:
    return (step for step in compiled.steps if step.generated)


def _kernel(step: Step) -> dict[str, Any]:
    facts = step.facts
    return {
        "kernel": step.name,
        "symbol": step.symbol,
        "fx_nodes": len(step.origin.nodes),
        "ir_ops": len(step.ops),
        "loads": facts.get("loads", ""),
        "stores": facts.get("stores", ""),
        "loops": len(_LOOP.findall(step.source)),
        "reductions": sum(op in _REDUCTIONS for op in step.ops),
        "atomic_adds": len(_ATOMIC.findall(step.source)),
        "argument_bytes": _text(_bytes(step)),
        "flops": facts.get("flops", ""),
        "vectorized": facts.get("vectorized", int(bool(_VECTORS.search(step.source)))),
        "lines": step.source.count("\n"),
    }


_REDUCTIONS = frozenset("sum prod max min argmax argmin any all reduction welford_reduce welford_combine".split())
_VECTORS = re.compile(r"\bpv::Vec\b|\bat::vec::|\bpv::(?:whole_)?steps<")


def _failures(compiled: Compiled) -> Iterator[dict[str, Any]]:
    for each in compiled.refusals():
        if each.kind == "fusion":
            first, second = (*each.subject, "", "")[:2]
            category = each.category or UNKNOWN
            yield {
                "category": category,
                "first": first,
                "second": second,
                "why": each.cause,
                "user_line": each.user_line,
            }


def _estimates(graph: Graph, subject: Subject, budget: float) -> Iterator[dict[str, Any]]:
    """One row for each kernel or call at one set of sizes."""
    (found,) = take([program_of_graphs([graph], subject)], graph.name, budget)
    for row in found.kernels:
        if row.estimate_microseconds is not None:
            yield {
                "kernel": row.name,
                "kind": row.kind,
                "calls": row.calls,
                "estimate_microseconds": f"{row.estimate_microseconds:.2f}",
                "measured_microseconds": f"{row.microseconds:.2f}",
                "factor": _text(row.estimate_factor, ".3f"),
                "limit": row.limit,
                "percent_of_limit": _text(row.percent_of_limit, ".1f"),
            }


def _bytes(step: Step) -> int | None:
    loaded, stored = (_number(step.facts.get(name)) for name in ("bytes_loaded", "bytes_stored"))
    return None if loaded is None or stored is None else loaded + stored


def _number(value: Any) -> int | None:
    """A number; None if it is unknown or depends on symbolic sizes."""
    return int(value) if str(value).isdigit() else None


def _sum(values: Iterator[int | None]) -> int | str:
    known = list(values)
    return "" if None in known else sum(each for each in known if each is not None)


def _text(value: float | None, form: str = "") -> str:
    return "" if value is None else format(value, form)
