"""`pellucid metrics`: tables of several targets, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pellucid.errors import NotJudged, UserError
from pellucid.kit.metrics.collect import model_of, rows_of
from pellucid.kit.metrics.summary import Summary, summary_of
from pellucid.kit.metrics.tables import Rows, chosen, write_tables
from pellucid.kit.process.child import SECONDS, Failure, Worker, pass_on
from pellucid.kit.runs.target import Request

BUDGET = 5.0


def metrics(
    requests: Sequence[Request],
    folder: Path,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    budget: float = BUDGET,
    seconds: float = SECONDS,
    memory: int = 0,
    tell: Callable[[str], None] = print,
) -> Summary:
    """Write the tables of some targets and sum them up; what fails is told, and the others are still written.

    only, without: names of tables. budget: seconds of calls for each target, where a table wants times. seconds, memory
    (bytes): what each process may take. tell: is given a line about what is going on. Raises UserError for a table that
    is none, and where a target or the folder is none.
    """
    tables = chosen(only, without)
    rows: Rows = {name: [] for name in tables}
    failures: dict[str, str] = {}
    for request in requests:
        model = model_of(request.target)
        tell(f"{model}: compiling under {request.backend}")
        with Worker(memory) as worker:
            found = worker.call(rows_of, request, tables, budget, seconds=seconds)
        if isinstance(found, Failure):
            failures[model] = _said(found)
            continue
        for name, each in found.items():
            rows[name] += each
    write_tables(folder, rows)
    return summary_of(folder, failures)


def _said(failure: Failure) -> str:
    """How a target failed. Raises what concerns all of them: there is no compiler, or no place for kernels."""
    try:
        pass_on(failure)
    except (UserError, NotJudged) as error:
        return error.message
    return str(failure)
