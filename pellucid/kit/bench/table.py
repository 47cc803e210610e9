"""Reports as tables that fit a terminal of 80 columns, except for long names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from pellucid.kit.bench.models import MODELS
from pellucid.kit.bench.programs import is_sized
from pellucid.kit.bench.results import Environment, FallbackTime, ModelResult, Report, Startup, SubjectResult
from pellucid.kit.bench.subjects import EAGER
from pellucid.kit.stats import Summary, geometric_mean
from pellucid.printing import Part, Sentence, Table, code, sentence

Row = SubjectResult
NOTHING = "–"


def report_table(report: Report) -> RenderableType:
    """One table per model, and the summary below."""
    return Group(*(part for model in report.models for part in (model_table(model), "")), summary(report))


def summary(report: Report) -> RenderableType:
    """The geometric means for several models, the machine, and the meaning of the columns."""
    means = [sentence(line) for line in _means(report)]
    return Group(*means, sentence((_machine(report.environment), "dim")), _legend(report))


def model_table(result: ModelResult) -> RenderableType:
    """One row per subject, and below the table one line for each failure."""
    shown = _shown(result)
    rows = []
    for subject in result.subjects:
        style = "" if subject.good else "red"
        rows.append([*(Text(cell, style) for cell in (subject.name, *(cell(subject) for _, cell, _ in shown))), ""])
    table = Table(("subject", *(name for name, _, _ in shown), ""), rows, frozenset(range(1, 1 + len(shown))), gap=" ")
    fallbacks = [
        part for s in result.subjects if s.fallback_times is not None for part in _fallbacks(s, s.fallback_times)
    ]
    complaints = [sentence((line, "red")) for line in _complaints(result)]
    return Group(sentence((_title(result), "italic")), table, *complaints, *fallbacks)


def _shown(result: ModelResult) -> list[tuple[str, Callable[[Row], str], str]]:
    """The columns in which a subject has a value, and those that are always shown."""
    return [c for c in _COLUMNS if c[0] in _ALWAYS or any(c[1](s) != NOTHING for s in result.subjects)]


def _fallbacks(subject: SubjectResult, times: Sequence[FallbackTime]) -> Iterator[RenderableType]:
    """The calls that are not compiled, the most expensive first, with their share of the time."""
    yield Text()
    if not times:
        yield sentence((f"{subject.name}: every call is compiled, nothing is left to ATen", "italic"))
        return
    yield sentence((f"{subject.name}: calls that are not compiled", "italic"))
    rows: list[tuple[str, str, tuple[Part, ...]]] = []
    for row in times:
        what = code(row.op.partition("::")[2] or row.op), sentence(row.reason)
        rows.append((f"{row.share:.1%}", str(row.calls), what))
    if len(rows) > 1:
        total = sum(row.share for row in times)
        rows.append((f"{total:.1%}", str(sum(row.calls for row in times)), (sentence("all"),)))
    yield Table(("share", "calls", "operator, and why"), rows, right=frozenset((0, 1)))


def model_list() -> RenderableType:
    """The registry: the models of `pellucid bench`."""
    return Table(("model", "what it is"), [(name, model.summary) for name, model in MODELS.items()])


# ---------------------------------------------------------------------------------------------------- cells


def seconds_text(seconds: float) -> str:
    """A duration with three digits and its unit: 1.23 s, 45.6 ms, 789 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _digits(value: float) -> str:
    """Three significant digits, never an exponent: 1.23, 12.3, 123, 1234."""
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
    shown = row.cold is None and row.first_seconds is not None
    return _digits(row.first_seconds) if shown and row.first_seconds is not None else NOTHING


_ALWAYS = ("time/call", "vs eager", "faults", "error")
# Heading, cell, and what it means.
_COLUMNS: tuple[tuple[str, Callable[[Row], str], str], ...] = (
    ("time/call", lambda row: _spread(row.seconds, seconds_text), "median ± half the interquartile range"),
    (
        "vs eager",
        lambda row: NOTHING if row.name == EAGER else _spread(row.speedup, lambda x: f"{x:.2f}x"),
        "speed-up, by rounds",
    ),
    ("first", _first, "seconds to the first result, in this process"),
    ("cold", lambda row: _start(row.cold), "seconds to the first result in a fresh process with empty caches"),
    ("warm", lambda row: _start(row.warm), "the same in a second process with these caches"),
    ("MiB", _peak, "peak memory of that process"),
    ("faults", _faults, "minor page faults per call"),
    ("error", _error, "max |x - float64| / rms"),
    ("kernels", _generated, "generated + operators left to ATen"),
)


# ------------------------------------------------------------------------------------------ around the table


def _legend(report: Report) -> Sentence:
    """The meaning of the report's columns."""
    names = {name for model in report.models for name, _, _ in _shown(model)}
    return sentence((" ".join(f"{name}: {meaning}." for name, _, meaning in _COLUMNS if name in names), "dim"))


def _title(result: ModelResult) -> str:
    size = f"batch {result.batch} x {result.seq}, " if is_sized(result.model) else ""
    kind = ("training step, " if result.train else "") + ("dynamic shapes, " if result.dynamic else "")
    dtype = f"{result.dtype}, " if result.model in MODELS else ""
    return f"{result.model}: {kind}{size}{dtype}{result.rounds} rounds"


def _complaints(result: ModelResult) -> list[str]:
    lines = []
    for s in result.subjects:
        if s.failure:
            lines.append(f"{s.name}: {s.failure}")
        if s.accurate is False and s.error is not None:
            lines.append(f"{s.name}: wrong result: error {s.error:.2g} against float64, larger than eager's")
        for kind, start in (("cold", s.cold), ("warm", s.warm)):
            if start and start.failure and start.failure != s.failure:
                lines.append(f"{s.name}, {kind} process: {start.failure}")
    return lines


def _means(report: Report) -> list[str]:
    """The geometric mean of each subject's speed-up, over the models for which it has one."""
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
