"""The view of a report: everything that the page shows, as formatted text and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.errors import UserError
from pellucid.kit.debug.doctor import Check
from pellucid.kit.profile.result import Advice, Comparison, KernelTime, Profile, PythonSide, what_was_timed
from pellucid.kit.profile.rows import GROUPS, PYTHON_AND_LAUNCH
from pellucid.kit.report.charts import Cell, Roofline, Threads, cosim_strip, roofline, threads
from pellucid.kit.report.drawing import Drawing, Step, draw, draw_calls
from pellucid.kit.report.material import Material, as_text, nodes_of, place_of
from pellucid.kit.report.panes import Json, numbers_of, panes_of
from pellucid.kit.runs.run import Run

_NOTHING = "–"
_MAX_DRAWINGS = 3
_MAX_IN_ISSUE = 8
_MAX_REPLACED = 40
_EXPLAINED = 0.02  # share of the time from which on a row shows why it is below its limit
_COLORS = {name: f"g{n}" for n, name in enumerate((*GROUPS.values(), PYTHON_AND_LAUNCH))}


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of the kernel table: its text, and the number that it is sorted by."""

    text: str
    key: float


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel. why: the reason why it is below its limit; empty if it is not, or if it takes little time.

    cells: in the order of `COLUMNS` after the first one. search: the text that the filter searches.
    """

    number: int
    name: str
    kind: str
    group: str
    color: str
    share: float
    detail: str
    why: str
    line: str
    cells: tuple[TableCell, ...]
    search: str


COLUMNS = ("kernel", "share", "µs", "calls", "µs a call", "GB/s", "GFLOP/s", "of its limit", "waiting")


@dataclass(frozen=True, slots=True)
class Part:
    """A group of kernels and calls. share: of the total, from 0 to 1. begin: its offset in the bar."""

    group: str
    color: str
    begin: float
    share: float
    microseconds: str


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """A comparison. rows: group, theirs, ours, difference in microseconds, and two lengths of bars from 0 to 1.

    replaced: kernel, theirs, ours, and the operators that it replaced.
    """

    name: str
    headline: str
    rows: tuple[tuple[str, str, str, str, float, float], ...]
    replaced: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class AdviceView:
    """Advice. number: the row of its kernel."""

    advice: Advice
    gain: str
    number: int | None


@dataclass(frozen=True, slots=True)
class View:
    """A page. verdicts: of the compiled graphs, by name, where the run was judged."""

    target: str
    headline: str
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    verdicts: tuple[tuple[str, str], ...]
    advice: tuple[AdviceView, ...]
    parts: tuple[Part, ...]
    roofline: Roofline | None
    machine: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    groups: tuple[str, ...]
    comparisons: tuple[ComparisonView, ...]
    drawings: tuple[Drawing, ...]
    undrawn: tuple[str, ...]
    python: PythonSide | None
    calls: Drawing | None
    threads: Threads | None
    cosim: tuple[Cell, ...]
    wrong: int
    checks: tuple[Check, ...]
    process: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    issue: str
    panes: Json
    colors: Mapping[str, str]


def view_of(found: Material) -> View:
    """Build the view of a report. Raises UserError for invalid data."""
    try:
        return _view(found)
    except (AttributeError, LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"the report of {found.target} cannot be created: {error!r:.90}", hint="take the profile again"
        ) from (error)


def _view(found: Material) -> View:
    profile = found.profile
    kernels, python = (profile.kernels, profile.python) if profile is not None else ((), None)
    numbers = numbers_of(kernels)
    drawings, undrawn = _drawings(found.run, kernels, numbers)
    cosim = cosim_strip(found.cosim)
    sentences = tuple(_sentences(profile)) if profile is not None else ()
    environment = _environment(found.run)
    comparisons = tuple(map(_comparison_view, found.comparisons))
    return View(
        target=found.target,
        headline=_headline(profile) if profile is not None else "This run has no profile: nothing was timed.",
        sentences=(*sentences, *(each.headline for each in comparisons)),
        notes=profile.notes if profile is not None else (),
        verdicts=_verdicts(found.run),
        advice=tuple(_advice_view(each, kernels) for each in profile.advice) if profile is not None else (),
        parts=_parts(profile) if profile is not None else (),
        roofline=roofline(kernels, found.machine, profile.threads if profile is not None else 1),
        machine=profile.machine if profile is not None else "",
        columns=COLUMNS,
        rows=tuple(_row(n, each) for n, each in enumerate(kernels)),
        groups=tuple(dict.fromkeys(each.group for each in kernels)),
        comparisons=comparisons,
        drawings=drawings,
        undrawn=undrawn,
        python=python,
        calls=draw_calls(python) if python is not None else None,
        threads=threads(found.slices),
        cosim=cosim,
        wrong=sum(not each.good for each in cosim),
        checks=found.checks,
        process=tuple(_process(profile)) if profile is not None else (),
        environment=environment,
        issue=_issue(found, environment, sentences),
        panes=panes_of(found, kernels),
        colors=_COLORS,
    )


# ------------------------------------------------------------------------------------------------ the verdict


def _headline(found: Profile) -> str:
    what, how_well = what_was_timed(found)
    text = f"{_time(found.microseconds)} {what} under {found.backend} ({how_well})"
    return f"{text}; it failed: {found.failure}" if found.failure else text


def _sentences(found: Profile) -> Iterator[str]:
    """Where the time goes, and how it compares with the machine's limits."""
    if found.kernels:
        first = found.kernels[0]
        text = f"{first.share:.0%} of it is {first.name}"
        if first.percent_of_limit is not None:
            text += f", at {_percent(first.percent_of_limit)} of its limit ({first.limit})"
        yield f"{text}."
    bound = sum(row.total_microseconds * min(1.0, (row.percent_of_limit or 0.0) / 100) for row in found.kernels)
    known = sum(row.total_microseconds for row in found.kernels if row.percent_of_limit is not None)
    if known > 0:
        yield (
            f"{known / found.microseconds:.0%} of the time is in steps whose limit is known; "
            f"at their limits these would take {_time(bound)} instead of {_time(known)}."
        )
    yield f"Python and launch take {found.overhead.microseconds / found.microseconds:.1%}."
    if found.plain_microseconds is not None and found.backend != "eager":
        yield f"Without timers a call takes {_time(found.plain_microseconds)}."


def _verdicts(run: Run | None) -> tuple[tuple[str, str], ...]:
    """The verdicts of `pellucid capture` on each graph, by comparison with eager."""
    compiled = run.about["compiled"] if run is not None else {}
    return tuple((str(name), str(each["verdict"])) for name, each in compiled.items() if each.get("verdict"))


def _advice_view(advice: Advice, kernels: Sequence[KernelTime]) -> AdviceView:
    about = next((n for n, row in enumerate(kernels) if advice.where and row.name in advice.where), None)
    return AdviceView(advice, f"up to {advice.gain:.2f} times as fast" if advice.gain > 1.005 else "", about)


def _parts(found: Profile) -> tuple[Part, ...]:
    """The total time by group."""
    total: dict[str, float] = {}
    for row in found.kernels:
        total[row.group] = total.get(row.group, 0.0) + row.total_microseconds
    total[PYTHON_AND_LAUNCH] = found.overhead.microseconds
    whole, begin, parts = sum(max(0.0, each) for each in total.values()), 0.0, list[Part]()
    for group, took in sorted(total.items(), key=lambda each: -each[1]):
        share = max(0.0, took) / whole if whole else 0.0
        parts.append(Part(group, _COLORS.get(group, "g9"), begin, share, _us(took)))
        begin += share
    return tuple(parts)


# ------------------------------------------------------------------------------------------------ tables


def _row(number: int, row: KernelTime) -> Row:
    limit = _NOTHING if row.percent_of_limit is None else f"{_percent(row.percent_of_limit)} {row.limit}"
    cells = (
        TableCell(f"{row.share:.1%}", row.share),
        _cell(row.total_microseconds, _us),
        _cell(row.calls, lambda value: f"{value:g}"),
        TableCell(f"{_us(row.microseconds)} ±{row.spread:.0%}", row.microseconds),
        _cell(row.gigabytes_per_second, lambda value: f"{value:.1f}"),
        _cell(row.gigaflops_per_second, lambda value: f"{value:.1f}"),
        TableCell(limit, -1.0 if row.percent_of_limit is None else row.percent_of_limit),
        TableCell(f"{row.imbalance:.0%}" if (row.threads or 1) > 1 else _NOTHING, row.imbalance),
    )
    places = list(dict.fromkeys(place_of(line).short for line in row.user_lines))
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    shapes = f"{', '.join(row.shapes)}{' → ' if row.results else ''}{', '.join(row.results)}"
    if row.cycles_per_instruction is not None and row.cache_misses is not None:
        shapes += f"; {row.cycles_per_instruction:.2f} cycles per instruction, {row.cache_misses:.0f} cache misses"
    line = f"{places[0]}{more}" if places else ""
    search = " ".join((row.name, row.symbol, row.group, row.limit, shapes, *row.user_lines, *row.fx_nodes)).lower()
    color = _COLORS.get(row.group, "g9")
    why = row.because if row.share >= _EXPLAINED else ""
    return Row(number, row.name, row.kind, row.group, color, row.share, shapes, why, line, cells, search)


def _cell(value: float | None, text: Any) -> TableCell:
    return TableCell(_NOTHING, -1.0) if value is None else TableCell(text(value), value)


def _comparison_view(found: Comparison) -> ComparisonView:
    ours, theirs = found.ours, found.theirs
    ratio = theirs.microseconds / ours.microseconds
    most = max((max(each.theirs_microseconds, each.ours_microseconds) for each in found.explained), default=1.0) or 1.0
    rows = [
        (
            each.group,
            _us(each.theirs_microseconds),
            _us(each.ours_microseconds),
            f"{each.difference_microseconds:+,.0f}",
            max(0.0, each.theirs_microseconds) / most,
            max(0.0, each.ours_microseconds) / most,
        )
        for each in found.explained
    ]
    how = f"{ratio:.2f} times as long" if ratio >= 1 else f"{1 / ratio:.2f} times as fast"
    text = f"{found.against} takes {_time(theirs.microseconds)}, {how}."
    replaced = [
        (
            each.title,
            _us(each.theirs_microseconds),
            _us(each.ours_microseconds),
            ", ".join(f"{of.name.removeprefix('aten::')} {_us(of.microseconds)}" for of in each.operators),
        )
        for each in found.replaced[:_MAX_REPLACED]
    ]
    return ComparisonView(found.against, text, tuple(rows), tuple(replaced))


# ------------------------------------------------------------------------------------------------ the graph


def _drawings(
    run: Run | None, kernels: Sequence[KernelTime], numbers: Mapping[tuple[str, str], int]
) -> tuple[tuple[Drawing, ...], tuple[str, ...]]:
    """The drawings of the graphs that take longest, and the names of the others."""
    if run is None:
        return (), ()
    steps: dict[str, list[Step]] = {}
    for each in run.table("kernels.csv"):
        number = numbers.get((each["graph"], each["kernel"]))
        nodes = tuple(each["fx_nodes"].split())
        share = 0.0
        if number is not None:
            share = kernels[number].share / max(1, len(kernels[number].steps))
        name = each["kernel"] if not each["op"] else each["op"].removeprefix("aten::")
        steps.setdefault(each["graph"], []).append(Step(name, not each["op"], nodes, share, number))
    known = [name for name in run.names if name in steps]
    known.sort(key=lambda name: -sum(step.share for step in steps[name]))
    drawn = [draw(name, steps[name], nodes_of(run, name)) for name in known[:_MAX_DRAWINGS]]
    return tuple(drawn), tuple(known[_MAX_DRAWINGS:])


# ------------------------------------------------------------------------------------------------ the rest


def _environment(run: Run | None) -> tuple[tuple[str, str], ...]:
    if run is None:
        return ()
    about = run.about
    given = (
        ("backend", about["backend"]),
        ("options", about["options"] or "none given"),
        *about["environment"].items(),
    )
    return tuple((str(name), as_text(value)) for name, value in given)


def _process(found: Profile) -> Iterator[tuple[str, str]]:
    """What was observed of the process while it was measured."""
    seen = found.process
    yield "page faults per call", f"{seen.page_faults:.0f}"
    if seen.cores:
        yield (
            "threads and cores",
            f"{found.threads} on {seen.cores}; threads waited for a core {seen.waited:.0%} of the time",
        )
    if found.counters:
        yield "hardware counters", f"none: {found.counters}"
    if seen.openmp:
        yield "OpenMP runtimes", ", ".join(seen.openmp)
    for name, events in (("graph break", seen.graph_breaks), ("recompilation", seen.recompilations)):
        for event in events:
            yield name, f"{event.line}: {event.why}" if event.line else event.why


def _issue(found: Material, environment: Sequence[tuple[str, str]], sentences: Sequence[str]) -> str:
    """The text to paste into an issue, as Markdown; indented text is shown verbatim there."""
    lines = [f"### Profile of `{_plain(found.target)}`", ""]
    if found.profile is not None:
        lines += [_headline(found.profile), *sentences, ""]
        table = [("share", "µs", "of limit", "kernel")]
        for row in found.profile.kernels[:_MAX_IN_ISSUE]:
            limit = _NOTHING if row.percent_of_limit is None else f"{_percent(row.percent_of_limit)} {row.limit}"
            table.append((f"{row.share:.1%}", _us(row.total_microseconds), limit, row.name))
        lines += [f"    {a:>6} {b:>9} {c:>14}  {d}" for a, b, c, d in table]
        lines += ["", *(f"- {each.what} ({each.evidence})" for each in found.profile.advice), ""]
    lines += [f"    {name}: {value}" for name, value in environment]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("`", "'")


def _us(microseconds: float) -> str:
    if abs(microseconds) < 0.05:
        return "0"
    return f"{microseconds:,.0f}" if abs(microseconds) >= 100 else f"{microseconds:.1f}"


def _percent(value: float) -> str:
    return f"{value:.0f}%" if value >= 9.5 else f"{value:.1f}%"


def _time(microseconds: float) -> str:
    return f"{microseconds * 1e-3:.3g} ms" if microseconds >= 100 else f"{microseconds:.3g} µs"
