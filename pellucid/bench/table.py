"""Reports as tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pellucid.bench.models import MODELS
from pellucid.bench.results import Environment, ModelResult, Report, Startup, SubjectResult
from pellucid.bench.stats import Summary, geometric_mean
from pellucid.bench.subjects import EAGER

Row = SubjectResult
NOTHING = "–"
_STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False}


def report_table(report: Report) -> RenderableType:
    """One table per model, the geometric means where there are several, and the machine below."""
    parts: list[RenderableType] = [part for m in report.models for part in (model_table(m), "")]
    parts += [Text(line) for line in _means(report)]
    parts.append(Text(_machine(report.environment), style="dim"))
    return Group(*parts)


def model_table(result: ModelResult) -> RenderableType:
    """One row per subject, and below the table one line for each thing that went wrong."""
    table = Table(title=_title(result), title_justify="left", **_STYLE)
    shown = [c for c in _COLUMNS if c[0] in _ALWAYS or any(c[1](s) != NOTHING for s in result.subjects)]
    table.add_column("subject", no_wrap=True, overflow="ellipsis", max_width=9 if len(shown) > 6 else 24)
    for heading, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for subject in result.subjects:
        style = None if subject.good else "red"
        table.add_row(subject.name, *(cell(subject) for _, cell in shown), style=style)
    fallbacks = [_fallback_table(s) for s in result.subjects if s.fallback_times]
    return Group(table, *(Text(line, style="red") for line in _complaints(result)), *fallbacks)


def _fallback_table(subject: SubjectResult) -> RenderableType:
    """What is not compiled, the dearest first, and how much of the time it takes."""
    table = Table(title=f"{subject.name}: calls that are not compiled", title_justify="left", **_STYLE)
    for heading in ("share", "calls"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("operator", overflow="fold", max_width=30)
    table.add_column("why", overflow="fold")
    for row in subject.fallback_times:
        table.add_row(f"{row.share:.1%}", str(row.calls), row.op.partition("::")[2] or row.op, row.reason)
    total = sum(row.share for row in subject.fallback_times)
    table.add_row(f"{total:.1%}", str(sum(row.calls for row in subject.fallback_times)), "all", "", end_section=True)
    return table


def model_list() -> RenderableType:
    """The registry: what `pellucid bench` can be asked for."""
    table = Table(**_STYLE)
    table.add_column("model")
    table.add_column("what it is")
    for name, model in MODELS.items():
        table.add_row(name, model.summary)
    return table


# ---------------------------------------------------------------------------------------------------- cells


def seconds_text(seconds: float) -> str:
    """A duration in three digits and its unit: 1.23 s, 45.6 ms, 789 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _digits(value: float) -> str:
    """Three digits that matter, never an exponent: 1.23, 12.3, 123, 1234."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _spread(summary: Summary | None, text: Callable[[float], str]) -> str:
    return f"{text(summary.median)} ±{summary.spread:.0%}" if summary else NOTHING


def _start(start: Startup | None) -> str:
    if start is None:
        return NOTHING
    return "failed" if start.seconds is None else _digits(start.seconds)


def _faults(row: Row) -> str:
    if row.faults is None:
        return NOTHING
    median = row.faults.median
    return f"{median:.0f}" if median < 9999.5 else f"{median / 1000:.0f}k"


def _peak(row: Row) -> str:
    return f"{row.peak_bytes / 2**20:.0f}" if row.peak_bytes else NOTHING


def _generated(row: Row) -> str:
    return f"{row.kernels}+{row.fallbacks}" if row.kernels is not None else NOTHING


def _error(row: Row) -> str:
    return f"{row.error:.0e}" if row.error is not None else NOTHING


def _first(row: Row) -> str:
    seen = row.cold is None and row.first_seconds is not None
    return _digits(row.first_seconds) if seen and row.first_seconds is not None else NOTHING


_ALWAYS = ("time/call", "vs eager", "faults", "error")
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("time/call", lambda row: _spread(row.seconds, seconds_text)),
    ("vs eager", lambda row: NOTHING if row.name == EAGER else _spread(row.speedup, lambda x: f"{x:.2f}x")),
    ("first", _first),
    ("cold", lambda row: _start(row.cold)),
    ("warm", lambda row: _start(row.warm)),
    ("MiB", _peak),
    ("faults", _faults),
    ("error", _error),
    ("kernels", _generated),
)


# ------------------------------------------------------------------------------------------ around the table

LEGEND = (
    "time/call: median ± half the quartile distance. vs eager: speed-up, by rounds.\n"
    "first: seconds to the first result, in this process; cold, warm: in a fresh one\n"
    "with empty caches, and in a second one. MiB: peak memory of the latter. faults:\n"
    "minor page faults per call. error: max |x - float64| / rms. kernels: generated\n"
    "+ operators left to ATen."
)


def _title(result: ModelResult) -> str:
    sized = MODELS[result.model].sized if result.model in MODELS else False
    size = f"batch {result.batch} x {result.seq}, " if sized else ""
    kind = ("training step, " if result.train else "") + ("dynamic shapes, " if result.dynamic else "")
    return f"{result.model}: {kind}{size}{result.dtype}, {result.rounds} rounds"


def _complaints(result: ModelResult) -> list[str]:
    lines = []
    for s in result.subjects:
        if s.failure:
            lines.append(f"{s.name}: {s.failure}")
        if s.accurate is False and s.error is not None:
            lines.append(f"{s.name}: wrong result: error {s.error:.2g} against float64, eager's is smaller")
        for kind, start in (("cold", s.cold), ("warm", s.warm)):
            if start and start.failure and start.failure != s.failure:
                lines.append(f"{s.name}, {kind} process: {start.failure}")
    return lines


def _means(report: Report) -> list[str]:
    """The geometric mean of each subject's speed-up, over the models where it has one."""
    lines = []
    names = dict.fromkeys(s.name for m in report.models for s in m.subjects if s.name != EAGER)
    for name in names if len(report.models) > 1 else ():
        found = [s.speedup.median for m in report.models for s in m.subjects if s.name == name and s.speedup]
        if found:
            mean = geometric_mean(found)
            lines.append(f"{name}: {mean:.2f}x eager, geometric mean of {len(found)} models")
    return lines


def _machine(e: Environment) -> str:
    busy = f", load {e.load:.1f} at the start" if e.load > 0.5 * e.cores else ""
    return f"{e.cpu}, {e.cores} cores, {e.threads} threads{busy}; torch {e.torch}, Python {e.python}"
