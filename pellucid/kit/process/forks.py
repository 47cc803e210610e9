"""Forks: copies of this process that start with everything it has imported and computed, and may die of their calls.

The process must have no other threads: a fork does not have them, and would wait for them forever. torch starts OpenMP
threads when it first computes with more than one, so call `torch.set_num_threads(1)` before. The forks compute with
their own number of threads.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from pellucid.kit.process.child import NOTE, PENDING, POLL_S, Child, Failure, most_memory, serve


class Forks:
    """Up to `count` children. threads: torch's in them. memory: bytes that one may use; by default three quarters of
    what is available now. Close it, or use it as a context manager.
    """

    def __init__(self, count: int = 1, threads: int = 1, memory: int = 0) -> None:
        self._count, self._threads, self._memory = count, threads, memory or most_memory()
        self._free: list[Child] = []
        self._busy: dict[Child, int] = {}  # the index of the call that each executes
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-debug-")

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all children and the processes that they started."""
        for child in (*self._free, *self._busy):
            child.end()
        self._free, self._busy = [], {}
        self._folder.cleanup()

    def call(self, function: str | Callable[..., Any], *args: Any, seconds: float) -> Any:
        """The result of a module-level function in a child, or the `Failure` that ended it."""
        return self.map(function, [args], seconds)[0]

    def map(
        self, function: str | Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float
    ) -> list[Any]:
        """Like `call`, for several calls, of which up to `count` run in parallel."""
        answers: dict[int, Any] = {}
        waiting = list(range(len(arguments)))
        try:
            while len(answers) < len(arguments):
                while waiting and len(self._busy) < self._count:
                    child = self._spare() or self._fork()
                    self._busy[child] = waiting.pop(0)
                    child.ask(function, arguments[self._busy[child]], seconds)
                answers |= self._collected()
        finally:
            for child in self._busy:  # interrupted: a late answer would be taken for that of another call
                child.end()
            self._busy = {}
        return [answers[number] for number in range(len(arguments))]

    def _collected(self) -> dict[int, Any]:
        """The answers that have arrived, by the indices of their calls."""
        found: dict[int, Any] = {}
        wait([child.pipe for child in self._busy], timeout=POLL_S)
        for child in list(self._busy):
            answer = child.answer()
            if answer is PENDING:
                continue
            found[self._busy.pop(child)] = answer
            if not isinstance(answer, Failure) or child.alive:
                self._free.append(child)
        return found

    def _spare(self) -> Child | None:
        """A child that waits for a call; dead ones are discarded."""
        while self._free:
            child = self._free.pop()
            if child.alive:
                return child
            child.end()
        return None

    def _fork(self) -> Child:
        return Child(self._start, Path(self._folder.name), self._memory)

    def _start(self, ours: Connection, theirs: Connection, note: Path, errors: Path) -> psutil.Process:
        pid = os.fork()
        if pid:
            return psutil.Process(pid)
        status = 1
        try:
            os.setsid()
            for pipe in (ours, *(child.pipe for child in (*self._free, *self._busy))):
                pipe.close()
            with errors.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ[NOTE] = str(note)
            torch.set_num_threads(self._threads)
            serve(theirs.fileno())
            status = 0
        finally:
            os._exit(status)
