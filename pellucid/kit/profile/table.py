"""The text that `pellucid profile` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from pellucid.kit.profile.python import GRAPHS
from pellucid.kit.profile.result import Advice, Comparison, KernelTime, Profile, is_block, what_was_timed
from pellucid.printing import Cell, Part, Table, name, place, sentence

_MAX_ROWS = 12  # rows that are printed; `--json` has all of them
_MAX_ADVICE = 5
_MAX_OPERATORS = 6  # replaced operators that are printed for a kernel
_NOTHING = "–"
_LINES = 2  # user lines that are printed for a row
_PYTHON, _MAX_PYTHON = 0.1, 6  # the share of the time from which on Python is shown, and the number of functions
_RIGHT = frozenset(range(5))
_IMBALANCE = 0.2  # the share from which on it is reported


def profile_text(found: Profile, run: str = "") -> Iterator[RenderableType]:
    """The total time, its parts, notes on the validity of the numbers, and advice. run: see `headline`."""
    yield from headline(found, run)
    yield from (sentence((note, "yellow")) for note in found.notes)
    shown, rest = found.kernels[:_MAX_ROWS], found.kernels[_MAX_ROWS:]
    rows = [_row(each, found) for each in shown]
    if rest:
        rows.append(_line(found, sum(each.total_microseconds for each in rest), f"{len(rest)} more, see --json"))
    rows += [
        _line(found, found.overhead.launch_microseconds, "launch: in compiled graphs, between their steps"),
        _line(found, found.overhead.python_microseconds, "Python, outside compiled graphs", _python_parts(found)),
        _line(found, found.microseconds, "the block" if is_block(found) else "a call of the program"),
    ]
    yield Table(("share", "µs", "calls", "GB/s", "GFLOP/s", "what"), rows, right=_RIGHT, gap=" ")
    whole = "the block" if is_block(found) else "one call of the program"
    yield sentence((f"µs: all calls of a row in {whole}; rates: while it runs", "dim"))
    if found.estimate_factor is not None:
        rows_known = sum(row.estimate_factor is not None for row in found.kernels)
        yield sentence(f"estimates differ from times by a factor of {found.estimate_factor:.2f} (geometric mean of "
                       f"{rows_known} kernels and calls)")  # fmt: skip
        yield sentence(f"limits and estimates: for {found.machine}")
    if found.counters:
        yield sentence(f"no hardware counters: {found.counters}")
    yield from _python(found)
    yield from _advice(found.advice)


def headline(found: Profile, run: str = "") -> Iterator[RenderableType]:
    """The time of a call, and the exception that ended the program, if any. run: where the profile was read from."""
    yield sentence(_headline(found, f"{run} ({found.backend})" if run else found.backend))
    if found.failure:
        yield sentence((f"the program failed while it was measured: {found.failure}", "bold red"))


def comparison_text(found: Comparison) -> Iterator[RenderableType]:
    """What explains the difference, and both profiles."""
    ours, theirs = found.ours, found.theirs
    mine, other = ours.real_microseconds, theirs.real_microseconds
    yield sentence(f"{ours.backend}: {_milliseconds(mine)} a call; {found.against}: "
                   f"{_milliseconds(other)}, {other / mine if mine else 0.0:.2f} times as long")  # fmt: skip
    rows = [
        (_us(row.theirs_microseconds), _us(row.ours_microseconds), _signed(row.difference_microseconds), row.group)
        for row in found.explained
    ]
    rows.append(("", "", _signed(found.unexplained_microseconds), "not explained: timers and noise"))
    rows.append((_us(other), _us(mine), _signed(found.difference_microseconds), "total, without timers"))
    headings = (f"{found.against} µs", f"{ours.backend} µs", "difference", "what")
    yield Table(headings, rows, right=frozenset(range(3)))
    if found.replaced:
        yield sentence("")
        yield _replaced(found)
    for each, run in ((theirs, found.run), (ours, "")):
        yield sentence("")
        yield from profile_text(each, run)


def _python_parts(found: Profile) -> Sequence[Part]:
    """The parts of the time outside compiled graphs, and Dynamo's guards."""
    seen, whole = found.python, found.overhead.python_microseconds
    if seen is None or whole < _PYTHON * found.microseconds:
        return []
    parts = [f"{part.name} {part.microseconds / whole:.0%}" for part in seen.parts if part.microseconds >= 0.01 * whole]
    lines = [sentence(", ".join(parts), hang=2)] if parts else []
    if seen.guards_microseconds:
        lines.append(
            sentence(f"Dynamo's guards take {_us(seen.guards_microseconds)} µs of it, as measured by torch.profiler")
        )
    return lines


def _python(found: Profile) -> Iterator[RenderableType]:
    """The Python functions that take longest, where they matter."""
    seen = found.python
    if seen is None or found.overhead.python_microseconds < _PYTHON * found.microseconds:
        return
    yield sentence("")
    if seen.why_not:
        yield sentence((f"cProfile could not be used: {seen.why_not}", "yellow"))
        return
    own = sorted((each for each in seen.functions if each.part != GRAPHS), key=lambda each: -each.own_microseconds)
    rows = [
        (
            _us(each.own_microseconds),
            _us(each.total_microseconds),
            f"{each.calls:g}",
            [name(each.name, after=f" ({each.part})"), *([place(each.where)] if each.where else [])],
        )
        for each in own[:_MAX_PYTHON]
    ]
    yield Table(("own µs", "total", "calls", "Python, under cProfile"), rows, right=frozenset(range(3)), gap=" ")
    yield sentence((f"a call takes {seen.slower:.1f} times as long under cProfile; total: including callees", "dim"))


def _replaced(found: Comparison) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in found.replaced[:_MAX_ROWS]:
        operators = [
            f"{each.name.removeprefix('aten::')} {_us(each.microseconds)}" for each in row.operators[:_MAX_OPERATORS]
        ]
        more = len(row.operators) - _MAX_OPERATORS
        text = ", ".join(operators) + (f" and {more} more" if more > 0 else "")
        what: list[Part] = [name(row.name) if row.name else sentence(row.title)]
        rows.append((_us(row.theirs_microseconds), _us(row.ours_microseconds), [*what, sentence(text, hang=2)]))
    if len(found.replaced) > _MAX_ROWS:
        rows.append(("", "", f"{len(found.replaced) - _MAX_ROWS} more, see --json"))
    headings = (f"{found.against} µs", f"{found.ours.backend} µs", "kernel, and the operators that it replaced")
    return Table(headings, rows, right=frozenset(range(2)))


def _advice(advice: Sequence[Advice]) -> Iterator[RenderableType]:
    """Each piece of advice with its evidence, where it applies, and how to check it; the largest gain first."""
    for each in advice[:_MAX_ADVICE]:
        yield sentence("")
        gain = f"up to {each.gain:.2g} times as fast: " if each.gain > 1 else ""
        yield sentence((each.category, "bold"), f": {gain}{each.what}", hang=2)
        yield sentence(f"  {each.evidence}", hang=2)
        yield from (place(line, "  ") for line in each.where)
        yield sentence(f"  check: {each.check}", hang=2)
    if len(advice) > _MAX_ADVICE:
        yield sentence(f"{len(advice) - _MAX_ADVICE} more, see --json")


def _headline(found: Profile, title: str) -> str:
    what, how_well = what_was_timed(found)
    text = f"{title}: {_milliseconds(found.microseconds)} {what} ({how_well})"
    if found.plain_microseconds is not None and found.backend != "eager":
        text += f"; {_milliseconds(found.plain_microseconds)} without timers"
    return text


def _row(row: KernelTime, found: Profile) -> tuple[Cell, ...]:
    what: list[Part] = [name(row.name, after=f" ({row.threads} threads)" if (row.threads or 1) > 1 else "")]
    if row.shapes:
        results = f" → {', '.join(row.results)}" if row.results else ""
        what.append(sentence(f"{', '.join(row.shapes)}{results}", hang=2))
    if row.percent_of_limit is not None:
        expected = f"; {_us(row.estimate_microseconds)} µs a call expected" if row.estimate_microseconds else ""
        what.append(sentence(f"{row.percent_of_limit:.0f}% of the {row.limit} limit{expected}"))
    if row.because:
        what.append(sentence(row.because, hang=2))
    if row.cycles_per_instruction is not None and row.cache_misses is not None:
        misses = f"{row.cache_misses:.0f} last-level cache misses per call"
        what.append(sentence(f"{row.cycles_per_instruction:.2f} cycles per instruction, {misses}"))
    if row.imbalance >= _IMBALANCE:
        what.append(sentence(f"its threads wait {row.imbalance:.0%} of their time for the slowest one"))
    what += [place(line) for line in row.user_lines[:_LINES]]
    if len(row.user_lines) > _LINES:
        more = len(row.user_lines) - _LINES
        what.append(sentence(f"and {more} {'line' if more == 1 else 'lines'} more"))
    rates = (row.gigabytes_per_second, row.gigaflops_per_second)
    return (
        _share(row.total_microseconds, found),
        _us(row.total_microseconds),
        f"{row.calls:g}",
        *(_NOTHING if rate is None else f"{rate:.1f}" for rate in rates),
        what,
    )


def _line(found: Profile, microseconds: float, what: str, more: Sequence[Part] = ()) -> tuple[Cell, ...]:
    return _share(microseconds, found), _us(microseconds), "", "", "", (sentence(what), *more)


def _share(microseconds: float, found: Profile) -> str:
    return f"{microseconds / found.microseconds:.1%}" if found.microseconds else _NOTHING


def _us(microseconds: float) -> str:
    return f"{microseconds:.0f}" if abs(microseconds) >= 100 else f"{microseconds:.1f}"


def _signed(microseconds: float) -> str:
    microseconds = 0.0 if abs(microseconds) < 0.05 else microseconds
    return f"{'+' if microseconds > 0 else ''}{_us(microseconds)}"


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds * 1e-3:.3g} ms"
