"""`pellucid metrics`: tables of several targets, each collected in a separate process."""

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
    """Write the tables of several targets and summarise them; a target that fails is reported and skipped.

    only, without: names of tables. budget: seconds of calls for each target, where a table needs times. seconds, memory
    (bytes): limits of each process. tell: is called with a line of progress. Raises UserError for an unknown table and
    for a folder that cannot be written.
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
            failures[model] = _message(found)
            continue
        for name, each in found.items():
            rows[name] += each
    write_tables(folder, rows)
    return summary_of(folder, failures)


def _message(failure: Failure) -> str:
    """How a target failed. Raises errors that concern all targets: no compiler, or no usable store."""
    try:
        pass_on(failure)
    except (UserError, NotJudged) as error:
        return error.message
    return str(failure)
