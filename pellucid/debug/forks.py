"""Forks: copies of this process that have all it imported and computed at once, and may die of what they run.

The process must have no threads of its own, for a fork is without them and would wait for them for ever: torch starts
OpenMP's when it first computes with more than one, so it has to be told to use one before (`torch.set_num_threads(1)`).
The forks compute with as many as they are told to.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch

from pellucid.apart import die_with_parent
from pellucid.debug.child import NOTE, NOTE_BYTES, Failure, failure_of, pickled, resident, signal_name

_POLL_S = 0.02
_SAID_BYTES = 4000


@dataclass(slots=True)
class _Fork:
    """A child. number: of the call that it works on, -1 when it is free."""

    pid: int
    to: Connection
    back: Connection
    note: Path
    errors: Path
    number: int = -1
    deadline: float = 0.0


class Forks:
    """Up to `count` children. threads: torch's in them. memory: bytes that one may use; by default three quarters of
    what is available now. Close it, or use it as a context manager.
    """

    def __init__(self, count: int = 1, threads: int = 1, memory: int = 0) -> None:
        self._count, self._threads = count, threads
        self._memory = memory or psutil.virtual_memory().available * 3 // 4
        self._forks: list[_Fork] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-debug-")
        self._made = 0

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all children and what they started."""
        for fork in list(self._forks):
            self._end(fork)
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        """What a function of a module returns in a child, or the `Failure` that ended it."""
        return self.map(function, [args], seconds)[0]

    def map(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """The same for several calls, which run side by side as far as there are children."""
        answers: dict[int, Any] = {}
        waiting = list(range(len(arguments)))
        try:
            while len(answers) < len(arguments):
                while waiting and (fork := self._free()) is not None:
                    fork.number, fork.deadline = waiting.pop(0), time.monotonic() + seconds
                    fork.note.write_bytes(bytes(NOTE_BYTES))
                    with suppress(BrokenPipeError):
                        fork.to.send_bytes(pickle.dumps((function, arguments[fork.number])))
                self._collect(answers, seconds)
        finally:
            for fork in [fork for fork in self._forks if fork.number >= 0]:
                self._end(fork)  # interrupted: its answer would be taken for another's
        return [answers[number] for number in range(len(arguments))]

    def _collect(self, answers: dict[int, Any], seconds: float) -> None:
        """Note the answers that are there, and the ends of children that died, hang or grew too large."""
        busy = [fork for fork in self._forks if fork.number >= 0]
        ready = wait([fork.back for fork in busy], timeout=_POLL_S)
        for fork in busy:
            number = fork.number
            if fork.back in ready:
                try:
                    answers[number] = pickle.loads(fork.back.recv_bytes())
                    fork.number = -1
                except EOFError:
                    answers[number] = self._died(fork)
            elif time.monotonic() > fork.deadline:
                answers[number] = self._stopped(fork, "hang", f"no end after {seconds:g} s")
            elif resident(psutil.Process(fork.pid)) > self._memory:
                limit = f"out of memory: it used more than {self._memory >> 20} MB"
                answers[number] = self._stopped(fork, "crash", limit)

    def _free(self) -> _Fork | None:
        free = next((fork for fork in self._forks if fork.number < 0), None)
        if free is None and len(self._forks) < self._count:
            free = self._fork()
            self._forks.append(free)
        return free

    def _fork(self) -> _Fork:
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        note, errors = (Path(self._folder.name) / f"{name}{self._made}" for name in ("note", "stderr"))
        self._made += 1
        note.write_bytes(bytes(NOTE_BYTES))
        pid = os.fork()
        if pid == 0:
            for other in self._forks:
                other.to.close()
                other.back.close()
            os.close(down_write)
            os.close(up_read)
            _serve(down_read, up_write, note, errors, self._threads)
        os.close(down_read)
        os.close(up_write)
        return _Fork(pid, Connection(down_write, readable=False), Connection(up_read, writable=False), note, errors)

    def _died(self, fork: _Fork) -> Failure:
        _, status = os.waitpid(fork.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        failure = self._failure(fork, "crash", signal_name(-code) if code < 0 else f"exit status {code}")
        self._end(fork, waited=True)
        return failure

    def _stopped(self, fork: _Fork, kind: str, what: str) -> Failure:
        failure = self._failure(fork, kind, what)
        self._end(fork)
        return failure

    def _failure(self, fork: _Fork, kind: str, what: str) -> Failure:
        said = fork.errors.read_text(errors="replace")[-_SAID_BYTES:] if fork.errors.exists() else ""
        return Failure(kind, what, said, fork.note.read_bytes().rstrip(b"\0").decode(errors="replace"))

    def _end(self, fork: _Fork, waited: bool = False) -> None:
        self._forks.remove(fork)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(fork.pid, signal.SIGKILL)
        if not waited:
            with suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)
        fork.to.close()
        fork.back.close()


def _serve(read: int, write: int, note: Path, errors: Path, threads: int) -> None:
    """In the child: answer calls until the pipe closes. Never returns."""
    status = 1
    try:
        os.setsid()
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with errors.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ[NOTE] = str(note)
        torch.set_num_threads(threads)
        calls, answers = Connection(read, writable=False), Connection(write, readable=False)
        while True:
            try:
                function, args = pickle.loads(calls.recv_bytes())
            except EOFError:
                break
            try:
                answer = function(*args)
            except Exception as error:
                answer = failure_of(error)
            answers.send_bytes(pickled(answer))
        status = 0
    finally:
        os._exit(status)
