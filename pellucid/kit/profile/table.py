"""What `pellucid profile` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from pellucid.kit.profile.python import GRAPHS
from pellucid.kit.profile.result import Advice, Comparison, KernelTime, Profile, is_block, what_was_timed
from pellucid.printing import Cell, Part, Table, name, place, sentence

_MOST = 12  # rows that are printed; `--json` has all of them
_MOST_ADVICE = 5
_MOST_OPERATORS = 6  # that are printed for a kernel that replaced them
_NOTHING = "–"
_LINES = 2  # of the user's that are printed for a row
_PYTHON, _MOST_PYTHON = 0.1, 6  # of the time: from here on Python is shown, so many functions of it
_RIGHT = frozenset(range(5))
_IMBALANCE = 0.2  # from here on it is said


def profile_text(found: Profile, run: str = "") -> Iterator[RenderableType]:
    """The whole, what it is made of, and what makes the numbers say less. run: see `headline`."""
    yield from headline(found, run)
    yield from (sentence((note, "yellow")) for note in found.notes)
    shown, rest = found.kernels[:_MOST], found.kernels[_MOST:]
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
    yield sentence((f"µs: of all its calls in {whole}; rates: while it runs", "dim"))
    if found.estimate_factor is not None:
        rows_known = sum(row.estimate_factor is not None for row in found.kernels)
        yield sentence(f"estimates are a factor of {found.estimate_factor:.2f} from the times, the geometric mean of "
                       f"{rows_known} kernels and calls")  # fmt: skip
        yield sentence(f"limits and estimates: of {found.machine}")
    if found.counters:
        yield sentence(f"no hardware counters: {found.counters}")
    yield from _python(found)
    yield from _advice(found.advice)


def headline(found: Profile, run: str = "") -> Iterator[RenderableType]:
    """The time of a call, and how the program ended if by an exception. run: where the profile was read from."""
    yield sentence(_headline(found, f"{run} ({found.backend})" if run else found.backend))
    if found.failure:
        yield sentence((f"the program failed while it was measured: {found.failure}", "bold red"))


def comparison_text(found: Comparison) -> Iterator[RenderableType]:
    """What explains the difference, and the profile of ours."""
    ours, theirs = found.ours, found.theirs
    mine, other = ours.real_microseconds, theirs.real_microseconds
    yield sentence(f"{ours.backend}: {_milliseconds(mine)} a call; {found.against}: "
                   f"{_milliseconds(other)}, {other / mine if mine else 0.0:.2f} times as long")  # fmt: skip
    rows = [
        (_us(row.theirs_microseconds), _us(row.ours_microseconds), _signed(row.difference_microseconds), row.group)
        for row in found.explained
    ]
    rows.append(("", "", _signed(found.unexplained_microseconds), "not explained: timers and noise"))
    rows.append((_us(other), _us(mine), _signed(found.difference_microseconds), "all, without timers"))
    headings = (f"{found.against} µs", f"{ours.backend} µs", "difference", "what")
    yield Table(headings, rows, right=frozenset(range(3)))
    if found.replaced:
        yield sentence("")
        yield _replaced(found)
    for each, run in ((theirs, found.run), (ours, "")):
        yield sentence("")
        yield from profile_text(each, run)


def _python_parts(found: Profile) -> Sequence[Part]:
    """Whose the time outside compiled graphs is."""
    seen, whole = found.python, found.overhead.python_microseconds
    if seen is None or whole < _PYTHON * found.microseconds:
        return []
    parts = [f"{part.name} {part.microseconds / whole:.0%}" for part in seen.parts if part.microseconds >= 0.01 * whole]
    said = [sentence(", ".join(parts), hang=2)] if parts else []
    if seen.guards_microseconds:
        said.append(
            sentence(f"Dynamo's guards take {_us(seen.guards_microseconds)} µs of it, as torch.profiler sees them")
        )
    return said


def _python(found: Profile) -> Iterator[RenderableType]:
    """The Python functions that take most, where they matter."""
    seen = found.python
    if seen is None or found.overhead.python_microseconds < _PYTHON * found.microseconds:
        return
    yield sentence("")
    if seen.why_not:
        yield sentence((f"cProfile could not look at Python: {seen.why_not}", "yellow"))
        return
    own = sorted((each for each in seen.functions if each.part != GRAPHS), key=lambda each: -each.own_microseconds)
    rows = [
        (
            _us(each.own_microseconds),
            _us(each.total_microseconds),
            f"{each.calls:g}",
            [name(each.name, after=f" ({each.part})"), *([place(each.where)] if each.where else [])],
        )
        for each in own[:_MOST_PYTHON]
    ]
    yield Table(("own µs", "total", "calls", "Python, under cProfile"), rows, right=frozenset(range(3)), gap=" ")
    yield sentence((f"a call takes {seen.slower:.1f} times as long under cProfile; total: with what it calls", "dim"))


def _replaced(found: Comparison) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in found.replaced[:_MOST]:
        operators = [
            f"{each.name.removeprefix('aten::')} {_us(each.microseconds)}" for each in row.operators[:_MOST_OPERATORS]
        ]
        more = len(row.operators) - _MOST_OPERATORS
        text = ", ".join(operators) + (f" and {more} more" if more > 0 else "")
        what: list[Part] = [name(row.name) if row.name else sentence(row.title)]
        rows.append((_us(row.theirs_microseconds), _us(row.ours_microseconds), [*what, sentence(text, hang=2)]))
    if len(found.replaced) > _MOST:
        rows.append(("", "", f"{len(found.replaced) - _MOST} more, see --json"))
    headings = (f"{found.against} µs", f"{found.ours.backend} µs", "kernel, and the operators that it replaced")
    return Table(headings, rows, right=frozenset(range(2)))


def _advice(advice: Sequence[Advice]) -> Iterator[RenderableType]:
    """What gains most comes first; each with what it follows from, where it is, and how to see whether it helped."""
    for each in advice[:_MOST_ADVICE]:
        yield sentence("")
        gain = f"up to {each.gain:.2g} times as fast: " if each.gain > 1 else ""
        yield sentence((each.category, "bold"), f": {gain}{each.what}", hang=2)
        yield sentence(f"  {each.evidence}", hang=2)
        yield from (place(line, "  ") for line in each.where)
        yield sentence(f"  check: {each.check}", hang=2)
    if len(advice) > _MOST_ADVICE:
        yield sentence(f"{len(advice) - _MOST_ADVICE} more, see --json")


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
        what.append(sentence(f"{row.percent_of_limit:.0f}% of the limit of {row.limit}{expected}"))
    if row.because:
        what.append(sentence(row.because, hang=2))
    if row.cycles_per_instruction is not None and row.cache_misses is not None:
        misses = f"{row.cache_misses:.0f} misses of the last cache a call"
        what.append(sentence(f"{row.cycles_per_instruction:.2f} cycles an instruction, {misses}"))
    if row.imbalance >= _IMBALANCE:
        what.append(sentence(f"its threads wait {row.imbalance:.0%} of their time for the last of them"))
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
