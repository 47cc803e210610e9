"""Builds the rows of a profile from the times of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple

import torch

from pellucid.ir.origin import merge
from pellucid.kit.profile.limits import known_machine, limit_of, why_below
from pellucid.kit.profile.result import KernelTime, Overhead, Profile
from pellucid.kit.stats import midmean, summarise
from pellucid.kit.subjects.clock import Clock, Timed, TimedRun
from pellucid.kit.subjects.facts import StepFacts
from pellucid.machine import Machine
from pellucid.native.timeline import CallTime

_LAYOUT = ("copy", "clone", "contiguous", "empty", "fill", "zero", "cat", "resize", "to_copy", "as_strided")
GROUPS = {
    "product": "matrix products",
    "convolution": "convolutions",
    "attention": "attention",
    "kernel": "element-wise and reductions",
    "layout": "copies and memory",
    "call": "other operators",
}
"""The group in comparisons, by the kind of a step; `layout` is for library calls that only move data."""

PYTHON_AND_LAUNCH = "Python and launch"


class Call(NamedTuple):
    """A call of the program, in nanoseconds."""

    begin: int
    end: int

    @property
    def nanoseconds(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class _Row:
    """Calls of one kernel or operator at one set of sizes. worked, lost: nanoseconds in which its threads worked, and
    waited."""

    facts: StepFacts
    times: list[int] = field(default_factory=list)
    steps: dict[tuple[str, str], StepFacts] = field(default_factory=dict)
    threads: int = 0
    worked: int = 0
    lost: int = 0

    def add(self, facts: StepFacts, time: CallTime, nanoseconds: int) -> None:
        self.times.append(nanoseconds)
        self.steps[facts.graph, facts.step] = facts
        spans = [share.end - share.begin for share in time.shares]
        self.threads = max(self.threads, len(spans) or 1)
        if spans:
            self.worked += sum(spans)
            self.lost += max(spans) * len(spans) - sum(spans)


def profile_of(
    clock: Clock,
    calls: Sequence[Call],
    *,
    backend: str,
    target: str,
    plain: Sequence[float] = (),
    notes: Iterable[str] = (),
    failure: str = "",
    counted: Clock | None = None,
) -> Profile:
    """The profile of the calls of a program that ran while a clock was on.

    counted: a clock that was on during other calls, with `HARDWARE` counters. plain: seconds of calls without a clock.

    With more than a few calls only the middle half by time is used: interference on the machine causes outliers, and
    the rows of the remaining calls still add up.
    """
    kept = _middle(calls)
    runs = [run for run in _without_nested(clock.runs) if _within(run, kept)]
    rows: dict[object, _Row] = {}
    for run in runs:
        for step, own in run.steps:
            facts = step.facts
            rows.setdefault(_key(facts), _Row(facts)).add(facts, step.time, own)
    number, whole = max(1, len(kept)), sum(call.nanoseconds for call in kept)
    machine, where = known_machine()
    counts = _counts(counted.runs if counted else ())
    kernels = (_counted(_kernel(row, number, whole, machine), counts.get(key)) for key, row in rows.items())
    found = sorted(kernels, key=lambda row: -row.total_microseconds)
    inside = sum(run.own for run in runs)
    steps = sum(sum(row.times) for row in rows.values())
    summary = summarise([call.nanoseconds for call in calls]) if calls else None
    return Profile(
        backend,
        target,
        len(calls),
        whole / number * 1e-3,
        summary.spread if summary else 0.0,
        midmean(plain) * 1e6 if plain else None,
        len(runs) / number,
        torch.get_num_threads(),
        tuple(found),
        Overhead((whole - inside) / number * 1e-3, (inside - steps) / number * 1e-3),
        clock.lost,
        (*notes, *_notes(runs, clock, backend)),
        failure,
        machine=where,
    )


def _key(facts: StepFacts) -> object:
    """The key of the row that a step belongs to."""
    return facts.symbol, facts.reads, facts.writes, facts.loaded, facts.stored, facts.flops


def _counts(runs: Iterable[TimedRun]) -> dict[object, tuple[float, ...]]:
    """The median counter values of one call, by row."""
    found: dict[object, list[tuple[int, ...]]] = {}
    for run in runs:
        for step in run.steps:
            if step.time.counts:
                found.setdefault(_key(step.facts), []).append(step.time.counts)
    return {key: tuple(map(median, zip(*each, strict=True))) for key, each in found.items()}


def _counted(row: KernelTime, counts: tuple[float, ...] | None) -> KernelTime:
    if counts is None:
        return row
    cycles, instructions, misses = counts
    return replace(row, cycles=cycles, instructions=instructions, cache_misses=misses)


def _notes(runs: Sequence[_OwnRun], clock: Clock, backend: str) -> Iterable[str]:
    if not runs:
        yield f"no graph compiled by {backend} ran"
    if clock.lost:
        yield f"{clock.lost} runs of graphs are not counted: the buffer was full, or the graph was freed"
    reached = 0
    for run in sorted(runs, key=lambda each: each.run.span.begin):
        if not run.nested and run.run.span.begin < reached:
            yield "graphs ran in several threads at once: the times of rows add up to more than the total"
            return
        reached = max(reached, run.run.span.end)


def _middle(calls: Sequence[Call]) -> list[Call]:
    """The calls between the quartiles by time, or all if there are few; in order."""
    if len(calls) < 4:
        return list(calls)
    ordered = sorted(calls, key=lambda call: call.nanoseconds)
    quarter = len(calls) // 4
    return sorted(ordered[quarter : len(ordered) - quarter])


def _within(run: _OwnRun, calls: Sequence[Call]) -> bool:
    return any(call.begin <= run.run.span.begin and run.run.span.end <= call.end for call in calls)


class _OwnStep(NamedTuple):
    step: Timed
    own: int


@dataclass(frozen=True, slots=True)
class _OwnRun:
    """A run with its own nanoseconds and those of its steps, without the runs nested in it."""

    run: TimedRun
    own: int
    steps: tuple[_OwnStep, ...]
    nested: bool


def _without_nested(runs: Sequence[TimedRun]) -> list[_OwnRun]:
    """Runs with their own times: a step may run another graph in the same thread, whose time must count once."""
    inner: dict[int, list[TimedRun]] = {}
    nested: set[int] = set()
    open_runs: dict[int, list[TimedRun]] = {}
    for run in sorted(runs, key=lambda each: (each.span.begin, -each.span.end)):
        outer = open_runs.setdefault(run.span.thread, [])
        while outer and outer[-1].span.end <= run.span.begin:
            outer.pop()
        if outer:
            inner.setdefault(id(outer[-1]), []).append(run)
            nested.add(id(run))
        outer.append(run)
    return [_own(run, inner.get(id(run), ()), id(run) in nested) for run in runs]


def _own(run: TimedRun, inner: Sequence[TimedRun], nested: bool) -> _OwnRun:
    steps = []
    for step in run.steps:
        begin, end = step.time.begin, step.time.end
        taken = sum(
            each.span.end - each.span.begin for each in inner if begin <= each.span.begin and each.span.end <= end
        )
        steps.append(_OwnStep(step, end - begin - taken))
    taken = sum(each.span.end - each.span.begin for each in inner)
    return _OwnRun(run, run.span.end - run.span.begin - taken, tuple(steps), nested)


def _kernel(row: _Row, calls: int, whole: int, machine: Machine) -> KernelTime:
    facts, total, mean = row.facts, sum(row.times), fmean(row.times)
    origin = merge(each.origin for each in row.steps.values())
    made = KernelTime(
        name=facts.step.partition("#")[0] if facts.kind == "kernel" else facts.symbol,
        kind="kernel" if facts.kind == "kernel" else "call",
        group=GROUPS[facts.counts_as or group_of(facts.kind, facts.symbol)],
        symbol=facts.symbol,
        calls=round(len(row.times) / calls, 2),
        microseconds=mean * 1e-3,
        spread=summarise(row.times).spread,
        total_microseconds=total / calls * 1e-3,
        share=total / whole if whole else 0.0,
        shapes=facts.reads,
        results=facts.writes,
        bytes=facts.nbytes,
        flops=facts.flops,
        threads=row.threads if facts.threads is not None else None,
        imbalance=row.lost / (row.lost + row.worked) if row.lost else 0.0,
        fx_nodes=origin.nodes,
        user_lines=tuple(map(str, origin.users)),
        steps=tuple(f"{graph}/{step}" for graph, step in row.steps),
        dtype=facts.dtype,
        fetched=facts.fetched,
        scalar=facts.scalar,
        reason=facts.reason,
        packed=facts.packed,
    )
    limits = [(limit, step) for step in row.steps.values() if (limit := limit_of(step, machine)) is not None]
    if not limits or not mean:
        return made
    limits.sort(key=lambda each: each[0].nanoseconds)  # they differ with what ran before
    limit, typical = limits[len(limits) // 2]
    return replace(
        made,
        limit=limit.limit,
        percent_of_limit=100 * limit.bound / mean,
        estimate_microseconds=fmean(each.nanoseconds for each, _ in limits) * 1e-3,
        why_below=why_below(typical, limit, mean, made.imbalance, machine),
    )


def group_of(kind: str, symbol: str) -> str:
    """A key of `GROUPS`. symbol: the operator, where it is a library call."""
    operator = symbol.partition("::")[2] or symbol
    moves = kind == "call" and any(word in operator for word in _LAYOUT)
    return "layout" if moves else kind
