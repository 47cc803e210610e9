"""Worker processes that may crash or hang: that is then a result, and the worker is replaced."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

# Compiled kernels stay loaded for the life of a process, so it is not kept for ever.
_UNITS_PER_WORKER = 40

# The workers share the cores, so that threads must not spin while they wait for each other.
_SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}

_READY = "ready"


class _Worker:
    """A process that calls `function` on one unit at a time."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        with mock.patch.dict(os.environ, _SLEEPING):
            self.process.start()
        theirs.close()
        self.unit: Any = None
        self.started = 0.0  # the unit; infinite until the process has imported what it needs
        self.served = 0

    def give(self, unit: Any) -> None:
        self.unit, self.served = unit, self.served + 1
        self.started = time.monotonic() if self.served > 1 else float("inf")
        self.pipe.send(unit)

    def stop(self) -> None:
        """End the process: an idle one by itself, when its pipe closes."""
        self.pipe.close()
        if self.unit is None:
            self.process.join(3)
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    pipe.send(_READY)
    while True:
        try:
            unit = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(unit), ""))
        except Exception:
            pipe.send((None, f"the harness failed: {traceback.format_exc().strip().splitlines()[-1]}"))


def run_all(
    function: Callable[[T], Any], units: Sequence[T], jobs: int, seconds: float
) -> Iterator[tuple[T, Any, str]]:
    """(unit, result, problem) as they finish; problem is empty, or says how the worker died: then result is None.

    seconds: for one unit; a worker that takes longer is killed.
    """
    pending = deque(units)
    workers = [_Worker(function) for _ in range(min(jobs, len(units)))]
    try:
        while pending or any(worker.unit is not None for worker in workers):
            for position, worker in enumerate(workers):
                if worker.unit is None and pending:
                    if worker.served >= _UNITS_PER_WORKER:
                        worker.stop()
                        worker = workers[position] = _Worker(function)
                    worker.give(pending.popleft())
            wait([worker.pipe for worker in workers if worker.unit is not None], timeout=1.0)
            for position, worker in enumerate(workers):
                if worker.unit is None:
                    continue
                outcome = _poll(worker, seconds)
                if outcome is None:
                    continue
                yield (worker.unit, *outcome)
                worker.unit = None
                if not worker.process.is_alive():
                    worker.stop()
                    workers[position] = _Worker(function)
    finally:
        for worker in workers:
            worker.stop()


def _poll(worker: _Worker, seconds: float) -> tuple[Any, str] | None:
    """(result, problem) of a worker's unit, None while it is at work."""
    try:
        if worker.pipe.poll():
            answer = worker.pipe.recv()
            if answer != _READY:
                return answer
            worker.started = time.monotonic()
    except (EOFError, OSError):
        worker.process.join(10)
        return None, f"the process died with exit code {worker.process.exitcode}"
    if time.monotonic() > worker.started + seconds:
        worker.process.kill()
        worker.process.join()
        return None, f"no answer within {seconds:.0f} s"
    return None
