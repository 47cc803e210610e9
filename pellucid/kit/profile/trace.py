"""A profile as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

There is one track per thread: calls of the program, runs of graphs in them, steps in these, and on the other threads of
a kernel their shares of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid.errors import UserError
from pellucid.kit.profile.rows import Call
from pellucid.kit.subjects.clock import TimedRun
from pellucid.kit.subjects.facts import StepFacts

MAX_CALLS = 5


def write_trace(path: Path, runs: Sequence[TimedRun], calls: Sequence[Call]) -> None:
    """Write the last few calls of a program with the runs of graphs in them. Raises UserError if `path` cannot be
    written."""
    shown = calls[-MAX_CALLS:]
    begin = shown[0].begin if shown else 0
    inside = [run for run in runs if any(c.begin <= run.span.begin and run.span.end <= c.end for c in shown)]
    events = [*_calls(shown, inside, begin), *(event for run in inside for event in _run(run, begin))]
    threads = dict.fromkeys(event["tid"] for event in events)
    named = [_named(thread, number) for number, thread in enumerate(threads)]
    try:
        path.write_text(json.dumps({"traceEvents": [*named, *events], "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}", hint="give a writable file") from error


def _calls(calls: Sequence[Call], runs: Sequence[TimedRun], begin: int) -> Iterator[dict[str, Any]]:
    """One slice per call, on the track of its first run; a call that runs no graph has none."""
    for number, call in enumerate(calls):
        first = next((run for run in runs if call.begin <= run.span.begin <= call.end), None)
        if first is not None:
            about = {"call": number}
            yield _slice("call", "program", first.span.thread, call.begin - begin, call.nanoseconds, about)


def _run(run: TimedRun, begin: int) -> Iterator[dict[str, Any]]:
    thread = run.span.thread
    yield _slice(run.graph, "graph", thread, run.span.begin - begin, run.span.end - run.span.begin, {})
    for facts, time in run.steps:
        length = time.end - time.begin
        about = _about(facts, length)
        yield _slice(facts.step, facts.kind, thread, time.begin - begin, length, about)
        for share in time.shares:
            if share.thread != thread:
                took = share.end - share.begin
                yield _slice(facts.step, "share", share.thread, share.begin - begin, took, about)


def _about(facts: StepFacts, nanoseconds: int) -> Mapping[str, Any]:
    """The arguments of a slice, without unknown ones."""
    rates = {
        "GB/s": _rate(facts.nbytes, nanoseconds),
        "GFLOP/s": _rate(facts.flops, nanoseconds),
    }
    known = {
        "symbol": facts.symbol,
        "reads": ", ".join(facts.reads),
        "writes": ", ".join(facts.writes),
        "bytes": facts.nbytes,
        "flops": facts.flops,
        **rates,
        "threads": facts.threads,
        "fx_nodes": " ".join(facts.origin.nodes),
        "user_lines": " ".join(map(str, facts.origin.users)),
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def _rate(amount: int | None, nanoseconds: int) -> float | None:
    return round(amount / nanoseconds, 3) if amount is not None and nanoseconds else None


def _slice(
    name: str, category: str, thread: int, begin: int, nanoseconds: int, about: Mapping[str, Any]
) -> dict[str, Any]:
    """A complete event; its times are microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": os.getpid(),
        "tid": thread,
        "ts": begin * 1e-3,
        "dur": nanoseconds * 1e-3,
        "args": dict(about),
    }


def _named(thread: int, number: int) -> dict[str, Any]:
    about = {"name": "program" if number == 0 else f"thread {number}"}
    return {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread, "args": about}
