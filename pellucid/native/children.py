"""Compiler processes: how many may run at once, and their end when they hang or nobody wants them any more."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pellucid.native.cpu import available_memory, usable_cores
from pellucid.native.store import POLL_S, KernelStore

MEMORY = 512 << 20
"""Bytes that must be free for one more compiler beside those that run: what the largest ones take."""

_PATIENCE_S = 600
# Of compilers that yield: they get a quarter of a core that somebody else wants too.
_NICE = 5
# Not a session: Linux shares cores among sessions, whatever the priority of their processes.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class Stopped(Exception):
    """The build that the process was for has been given up."""


@dataclass(eq=False)
class Children:
    """The compiler processes of one build, which `stop` ends. yielding: to the process that they are for."""

    yielding: bool = False
    stopped: bool = False
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _owner: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        _all.add(self)

    def run(self, command: Sequence[str], store: KernelStore, timeout: float) -> tuple[int, str]:
        """Run a compiler when its turn has come; returns its exit status (negative: the signal) and what it said.

        All threads and processes that share the store run as many compilers at once as there are cores, and fewer
        when memory is short. Raises Stopped, OSError, or subprocess.TimeoutExpired after `timeout` seconds.
        """
        with self._turn(store):
            # In a group of its own: all that a driver starts ends with it, and Ctrl-C in a terminal is for us to
            # handle. LC_ALL: messages are read.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                **_OWN_GROUP,
            )
            self._running.add(process)
            try:
                if self.yielding:
                    _yield(process)
                if self.stopped:
                    raise Stopped
                output, _ = process.communicate(timeout=timeout)
            finally:
                self._running.discard(process)
                if process.returncode is None:
                    _kill(process)
                    process.communicate()
            if self.stopped:
                raise Stopped
            return process.wait(), output

    def each(self, function: Callable[[_Item], _Made], items: Sequence[_Item]) -> list[_Made]:
        """`function` of each item, as many at once as there are cores; the first exception stops all the others.

        The threads are daemons: a process that exits does not wait for its compilers.
        """
        made: dict[int, _Made] = {}
        errors: list[BaseException] = []
        numbers = iter(range(len(items)))

        def work() -> None:
            for number in numbers:
                if self.stopped:
                    return
                try:
                    made[number] = function(items[number])
                except BaseException as error:
                    errors.append(error)
                    self.stop()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(usable_cores(), len(items)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(1)  # a wait without end could not be interrupted everywhere
        except BaseException:
            self.stop()
            raise
        if errors:
            raise errors[0]
        return [made[number] for number in range(len(items))]

    def stop(self) -> None:
        """End every process, at once; who waits for one gets Stopped."""
        if os.getpid() == self._owner:  # in a forked child they are the parent's
            self.stopped = True
            for process in list(self._running):
                _kill(process)

    def _turn(self, store: KernelStore) -> AbstractContextManager[None]:
        """The right to run a compiler: one of as many locks as there are cores."""
        started = time.monotonic()
        while not self.stopped:
            for number in range(usable_cores()):
                turn = store.try_lock(f"compiler-{number}")
                if turn is None:
                    continue
                if number == 0 or available_memory() >= MEMORY:
                    return turn
                with turn:  # a core is free, but no memory
                    break
            if time.monotonic() - started > _PATIENCE_S:  # those who hold them all may be hanging
                return nullcontext()
            time.sleep(POLL_S)
        raise Stopped


_all: weakref.WeakSet[Children] = weakref.WeakSet()


def _yield(process: subprocess.Popen[str]) -> None:
    """Let others have most of a core that it wants too."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, process.pid, _NICE)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def stop_all() -> None:
    """End the compilers of every build of this process."""
    for children in list(_all):
        children.stop()


def yield_all() -> None:
    """Let compilers that run leave cores to this process."""
    for children in list(_all):
        for process in list(children._running):
            _yield(process)


atexit.register(stop_all)
