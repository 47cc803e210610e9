"""PyTorch's own operator and module databases against eager.

    python -m tests.operators.sweep [--database ops|large|modules] [--engine native|dynamic|convolved|interpreter]
                                    [--dtypes f32,...] [--directions forward,training] [--share K/N] [NAME ...]
    python -m tests.operators.sweep --all

For every operator and dtype, three samples (first, middle, last) are run in eager mode, in float64 as the judge, and
compiled. With `--engine interpreter` the lowered IR is interpreted, which tests capture and lowering without any C++;
with `--engine convolved` what the operator gets lies channels-last, as results of convolutions do. `--database large`
has the operators' samples grown to up to a million elements, in other layouts (see `large.py`).
Each row of the JSON file is a sample: `ok`, or why not. The exit status is 1 if a sample fails that is not listed in
`exceptions.py`; with `--all`, which runs every column of `GRID`, also if nothing fails any more that is listed there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.operators.cases import DATABASES, DIRECTIONS, DTYPES, Case, Task, cases, tasks
from tests.operators.engines import ENGINES, check
from tests.operators.exceptions import KNOWN, reason
from tests.operators.large import PLAN
from tests.operators.workers import run_all

# Tasks that are compiled as one program: of large samples fewer, for the sake of memory.
BATCH = {"ops": 10, "large": 4, "modules": 10}

# What is large is shared by threads.
THREADS = {"ops": 1, "large": 2, "modules": 1}

# Engine, database, direction, dtypes.
GRID = (
    ("native", "ops", "forward", "f32,f64,bf16,f16,i64,u8,bool"),
    ("native", "ops", "training", "f64"),
    ("dynamic", "ops", "forward", "f32,f64,bf16,f16,i64,u8,bool"),
    ("dynamic", "ops", "training", "f64"),
    ("convolved", "ops", "forward", "f32"),
    ("convolved", "ops", "training", "f64"),
    ("native", "ops", "forward", "c64"),
    ("native", "ops", "training", "c128"),
    ("dynamic", "ops", "forward", "c64"),
    ("dynamic", "ops", "training", "c128"),
    ("native", "ops", "forward", "u16,u32,u64"),
    ("native", "large", "forward", "f32,bf16,i64,u16,u32,u64,c64"),
    ("native", "large", "training", "f32,c64"),
    ("native", "modules", "forward,training", "f32,f64"),
    ("dynamic", "modules", "forward,training", "f32,f64"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one sample. number: of the sample, -1 when no samples could be made."""

    task: Task
    number: int
    engine: str
    result: str

    @property
    def skipped(self) -> bool:
        return self.result.startswith("skip")

    @property
    def failed(self) -> bool:
        return not self.skipped and self.result != "ok"


@dataclass(frozen=True, slots=True)
class Unit:
    """What a worker process does at a time: tasks of one database and direction, or a single sample of one task."""

    tasks: tuple[Task, ...]
    engine: str
    number: int | None = None


def run_unit(unit: Unit) -> list[Row]:
    """The verdicts on all samples of a unit, in a worker process."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are no news here
    torch.set_num_threads(THREADS[unit.tasks[0].database])
    rows: list[Row] = []
    found: list[Case] = []
    for task in unit.tasks:
        try:
            found += [case for case in cases(task) if unit.number in (None, case.sample)]
        except Exception as error:
            rows.append(Row(task, -1, unit.engine, f"skip: no samples ({type(error).__name__})"))
    verdicts = check(found, unit.engine)
    return rows + [Row(case.task, case.sample, unit.engine, result) for case, result in verdicts.items()]


def sweep(todo: Sequence[tuple[str, Task]], jobs: int, seconds: float) -> list[Row]:
    """Run tasks, each on an engine, in batches. The samples of a batch that kills its worker are run again, alone.

    seconds: for one batch.
    """
    groups: dict[tuple[str, str, str], list[Task]] = defaultdict(list)
    for engine, task in todo:
        groups[engine, task.direction, task.database].append(task)
    batches = [
        Unit(tuple(group[at : at + BATCH[database]]), engine)
        for (engine, _, database), group in groups.items()
        for at in range(0, len(group), BATCH[database])
    ]
    rows: list[Row] = []
    alone: list[Unit] = []
    for number, (unit, result, problem) in enumerate(run_all(run_unit, batches, jobs, seconds)):
        if problem:
            print(f"\n{problem}: {', '.join(map(str, unit.tasks))}", file=sys.stderr)
            alone += [Unit((task,), unit.engine, sample) for task in unit.tasks for sample in _numbers(task)]
        else:
            rows += result
        if sys.stderr.isatty() or number % 10 == 0:
            print(f"\r{number + 1}/{len(batches)}", end="", file=sys.stderr, flush=True)
    for unit, result, problem in run_all(run_unit, alone, jobs, seconds):
        rows += result if not problem else [Row(unit.tasks[0], unit.number or 0, unit.engine, problem)]
    return rows


def _numbers(task: Task) -> list[int]:
    if task.database == "large":
        return list(range(len(PLAN)))  # to find out which there are, eager runs them
    try:
        return [case.sample for case in cases(task)]
    except Exception:
        return []


def report(rows: Sequence[Row], everything: bool) -> int:
    """Print counts by engine, database, direction and dtype, and what failed; returns the exit status.

    everything: the rows are those of the whole grid, so that an entry of `exceptions.py` must cover a failure.
    """
    columns: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        kind = "skip" if row.skipped else "failed" if row.failed else "ok"
        columns[row.engine, row.task.database, row.task.direction, row.task.dtype][kind] += 1
    failed = [row for row in rows if row.failed]
    unknown = [row for row in failed if reason(row.task, row.engine) is None]
    for row in sorted(failed, key=lambda row: (row.task, row.number)):
        print(f"{row.task} #{row.number} {row.engine}: {row.result}{'' if row in unknown else '  [known]'}")
    needed = {known for known in KNOWN for row in failed if known.covers(row.task, row.engine)}
    stale = [known for known in KNOWN if known not in needed and not known.somewhere]
    for known in stale if everything else ():
        print(f"exceptions.py lists {known.name} ({known.reason}), but all of its samples match")
    for column, counts in sorted(columns.items()):
        accepted = counts["ok"] + counts["failed"]
        share = 100 * counts["ok"] / accepted if accepted else 100.0
        print(f"{' '.join(column):40} {counts['ok']:6} of {accepted:6} match ({share:.2f}%), {counts['skip']} skipped")
    accepted = sum(not row.skipped for row in rows)
    print(f"{accepted - len(failed)} of {accepted} match, {len(failed) - len(unknown)} known mismatches")
    return 1 if unknown or (everything and stale) or not accepted else 0


def parse_arguments(given: Iterable[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operators or modules; all if none is named")
    parser.add_argument("--database", choices=DATABASES, default="ops")
    parser.add_argument("--dtypes", default="f32", help=f"of {','.join(DTYPES)}")
    parser.add_argument("--directions", default="forward", help=f"of {','.join(DIRECTIONS)}")
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--share", default="0/1", help="K/N: the K-th of N equal parts, chosen by hash")
    parser.add_argument(
        "--all", action="store_true", help="run the whole grid; of the other options only --jobs counts"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one batch")
    parser.add_argument("-o", "--output", help="JSON file of all rows")
    return parser.parse_args(None if given is None else list(given))


def main() -> int:
    given = parse_arguments()
    part, parts = (int(number) for number in given.share.split("/"))
    todo = [
        (engine, task)
        for engine, database, directions, dtypes in GRID
        for task in tasks(database, dtypes.split(","), directions.split(","))
    ]
    if not given.all:
        chosen = tasks(given.database, given.dtypes.split(","), given.directions.split(","), given.names)
        todo = [(given.engine, task) for task in chosen if task.hash % parts == part]
    rows = sweep(todo, given.jobs, given.timeout)
    if given.output:
        with open(given.output, "w", encoding="utf-8") as file:
            json.dump([_flat(row) for row in rows], file, indent=0)
    return report(rows, everything=given.all)


def _flat(row: Row) -> dict[str, Any]:
    task = row.task
    return {"database": task.database, "name": task.name, "dtype": task.dtype, "direction": task.direction,
            "sample": row.number, "engine": row.engine, "result": row.result}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
