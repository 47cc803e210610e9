"""Charts as shapes with coordinates, which the template draws as inline SVG: the roofline, threads, cosimulation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.kit.judge.judge import Verdict
from pellucid.kit.profile.result import KernelTime
from pellucid.machine import Machine

WIDTH, HEIGHT = 640.0, 360.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 14.0, 38.0
_STRIP = 1180.0
_GOOD = frozenset(verdict.value for verdict in Verdict if verdict.good)
_NARROW = 0.4  # drawing units: narrower slices and gaps are merged


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its label."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel in the roofline. number: its row."""

    x: float
    y: float
    radius: float
    group: str
    number: int
    label: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """roofs: bandwidths and the peak. left_out: the number of kernels and calls without known bytes and FLOPs."""

    roofs: tuple[Line, ...]
    ticks_x: tuple[Line, ...]
    ticks_y: tuple[Line, ...]
    points: tuple[Point, ...]
    left_out: int
    width: float = WIDTH
    height: float = HEIGHT


def roofline(kernels: Sequence[KernelTime], machine: Machine | None, threads: int) -> Roofline | None:
    """GFLOP/s over FLOPs per byte, both on logarithmic axes; None if no kernel has both.

    Without a machine there are only points. threads: the number of threads whose bandwidth and peak the roofs show.
    """
    measured = [(n, row, row.flops / row.bytes) for n, row in enumerate(kernels) if row.flops and row.bytes]
    shown = [(n, row, x, row.gigaflops_per_second or 0.0) for n, row, x in measured if row.gigaflops_per_second]
    if not shown:
        return None
    peak = machine.flops.f32.of(threads) if machine is not None else 0.0
    levels = [(each.name, each.read.of(threads)) for each in machine.levels] if machine is not None else []
    ridges = [peak / rate / 5 for _, rate in levels]  # so that each slope is visible
    low_x, high_x = _decades([x for _, _, x, _ in shown] + ridges)
    low_y, high_y = _decades([y for *_, y in shown] + ([peak * 1.5] if peak else []))

    def at_x(value: float) -> float:
        return _LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return HEIGHT - _BOTTOM - (math.log10(value) - low_y) / (high_y - low_y) * (HEIGHT - _TOP - _BOTTOM)

    def roofs() -> Iterator[Line]:
        for name, rate in levels:
            left, right = max(10**low_x, 10**low_y / rate), min(peak / rate, 10**high_x)
            if left < right:
                yield Line(at_x(left), at_y(left * rate), at_x(right), at_y(right * rate), f"{name} {rate:.0f} GB/s")
        if peak:
            left = max(10**low_x, peak / max(rate for _, rate in levels))
            y = at_y(peak)
            yield Line(at_x(left), y, WIDTH - _RIGHT, y, f"f32 {peak:.0f} GFLOP/s")

    points = [
        Point(at_x(x), at_y(y), 3 + 14 * math.sqrt(min(1.0, max(0.0, row.share))), row.group, n, row.name)
        for n, row, x, y in shown
    ]
    points.sort(key=lambda each: -each.radius)
    return Roofline(
        tuple(roofs()),
        tuple(Line(at_x(10**e), _TOP, at_x(10**e), HEIGHT - _BOTTOM, _power(e)) for e in range(low_x, high_x + 1)),
        tuple(Line(_LEFT, at_y(10**e), WIDTH - _RIGHT, at_y(10**e), _power(e)) for e in range(low_y, high_y + 1)),
        tuple(points),
        len(kernels) - len(shown),
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The exponents of the powers of ten that enclose the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 4 else f"1e{exponent}"


# ------------------------------------------------------------------------------------------------ threads


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval in which a thread worked."""

    x: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Track:
    """A thread. busy: the share of the call in which it worked."""

    name: str
    busy: float
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Threads:
    """The last call in a trace. active: the average number of working threads. outline: a step line, as SVG points."""

    milliseconds: float
    active: float
    tracks: tuple[Track, ...]
    outline: str
    most: int
    width: float = _STRIP


def threads(slices: Iterable[Mapping[str, Any]]) -> Threads | None:
    """When each thread worked in the last call of the program; None if the trace has no call."""
    known = [(str(e["cat"]), int(e["tid"]), float(e["ts"]), float(e["dur"]), str(e["name"])) for e in slices]
    calls = [(begin, begin + length, thread) for kind, thread, begin, length, _ in known if kind == "program"]
    if not calls or calls[-1][1] <= calls[-1][0]:
        return None
    begin, end, first = calls[-1]
    scale = _STRIP / (end - begin)
    work: dict[int, list[tuple[float, float, str, str]]] = {first: []}
    for kind, thread, at, length, name in known:
        if kind not in ("program", "graph") and begin <= at <= end:
            work.setdefault(thread, []).append((at - begin, min(length, end - at), kind, name))
    tracks = [
        Track("program" if thread == first else f"thread {n}", sum(each[1] for each in found) / (end - begin),
              tuple(_merged(sorted(found), scale)))
        for n, (thread, found) in enumerate(work.items())
    ]  # fmt: skip
    spans = [(at, at + length) for found in work.values() for at, length, *_ in found]
    total = sum(b - a for a, b in spans) / (end - begin)
    return Threads((end - begin) * 1e-3, total, tuple(tracks), _outline(spans, scale, len(tracks)), len(tracks))


def _merged(spans: Iterable[tuple[float, float, str, str]], scale: float) -> Iterator[Slice]:
    """Merge slices that are too narrow to be distinguished."""
    held: Slice | None = None
    for at, length, kind, name in spans:
        x, width = at * scale, max(length * scale, _NARROW)
        if held is not None and width <= 2 * _NARROW and x - (held.x + held.width) < _NARROW:
            held = Slice(held.x, x + width - held.x, held.kind, f"{held.label.removesuffix(' and others')} and others")
            continue
        if held is not None:
            yield held
        held = Slice(x, width, kind, f"{name}: {length:.1f} µs")
    if held is not None:
        yield held


def _outline(spans: Sequence[tuple[float, float]], scale: float, most: int, height: float = 40.0) -> str:
    """The number of working threads over time, as the points of a line."""
    changes = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    points, active = [f"0,{height:g}"], 0
    for at, change in changes:
        for now in (active, active + change):
            point = f"{at * scale:.1f},{height * (1 - now / most):.1f}"
            if point != points[-1]:
                points.append(point)
        active += change
    return " ".join(points)


# ------------------------------------------------------------------------------------------------ cosimulation


@dataclass(frozen=True, slots=True)
class Cell:
    """A compared result."""

    x: float
    width: float
    verdict: str
    label: str

    @property
    def good(self) -> bool:
        return self.verdict in _GOOD


def cosim_strip(rows: Sequence[Mapping[str, str]]) -> tuple[Cell, ...]:
    """One cell per result, in execution order; bad ones are never merged with others."""
    if not rows:
        return ()
    each = _STRIP / len(rows)
    cells: list[Cell] = []
    for n, row in enumerate(rows):
        label = f"{row['graph']} {row['kernel']} {row['fx_node']}: {row['verdict']}, {row['why'] or row['error']}"
        if each < 1 and cells and cells[-1].good and cells[-1].verdict == row["verdict"]:
            cells[-1] = Cell(cells[-1].x, (n + 1) * each - cells[-1].x, row["verdict"], cells[-1].label)
        else:
            cells.append(Cell(n * each, max(each, 1.0), row["verdict"], label))
    return tuple(cells)
