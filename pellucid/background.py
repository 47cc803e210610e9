"""A graph whose kernels are still being built: PyTorch's operators compute its calls until the program is ready."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import torch

from pellucid.native.children import yield_all
from pellucid.native.locks import Lock
from pellucid.native.threads import in_thread

_Run: TypeAlias = "Callable[[list[Any]], list[Any]]"

log = logging.getLogger(__name__)


class InBackground:
    """Runs the FX graph until a thread has built the program, then the program.

    Called with the list of the graph's arguments (the boxed calling convention: the list is emptied). Any number of
    threads may call it. The thread starts after the first call, so as not to delay it. If building the program raises
    an exception, each later call raises it.
    """

    _boxed_call = True

    def __init__(self, graph: torch.fx.GraphModule, make: Callable[[], _Run], name: str) -> None:
        """make: builds the kernels, and returns the program. name: of the program, for logs."""
        self._graph: torch.fx.GraphModule | None = graph
        self._make: Callable[[], _Run] | None = make
        self._name = name
        self._run: _Run | None = None
        self._error: Exception | None = None
        self._lock = Lock()
        self._builder = 0  # the process whose thread builds it
        self._done = threading.Event()
        self._then: list[Callable[[], None]] = []
        with _lock:
            _pending.add(self)
        yield_all()

    def __call__(self, args: list[Any]) -> list[Any]:
        run, graph = self._run, self._graph
        if run is None and (graph is None or self._done.is_set()):
            run = self.result()
        if run is not None:
            return run(args)
        assert graph is not None
        given = tuple(args)
        args.clear()
        outputs = list(graph(*given))
        self._start()
        return outputs

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the program is ready, or has failed. Raises TimeoutError after `timeout` seconds."""
        self._start()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the kernels of {self._name} are still being built")

    def result(self) -> _Run:
        """The program, once it is ready. Raises the exception of its build."""
        self.wait()
        if self._run is None:
            assert self._error is not None
            raise self._error
        return self._run

    def then(self, task: Callable[[], None]) -> None:
        """Call `task` once the program is ready, or has failed."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(task)
                return
        task()

    def _start(self) -> None:
        """Start the thread; in a forked child too, where the parent's thread does not exist."""
        with self._lock:
            if self._builder != os.getpid() and not self._done.is_set():
                self._builder, self._done = os.getpid(), threading.Event()
                in_thread(self._work, "pellucid-build")

    def _work(self) -> None:
        make = self._make
        assert make is not None
        try:
            self._run = make()
            self._graph = self._make = None
            log.info("%s: kernels built, calls run them", self._name)
        except Exception as error:
            self._error = error
            log.info("%s: %s", self._name, error)
        with self._lock:
            self._done.set()
        with _lock:
            _pending.discard(self)
        for task in self._then:
            task()


_pending: weakref.WeakSet[InBackground] = weakref.WeakSet()
_lock = Lock()


def finished(run: Any) -> Any:
    """A compiled graph, after waiting for a build in the background. Raises the exception of the build."""
    return run.result() if isinstance(run, InBackground) else run


def when_finished(runs: Sequence[Any], task: Callable[[], None]) -> None:
    """Call `task` once none of these compiled graphs is being built any more."""
    first, *rest = (*(run for run in runs if isinstance(run, InBackground)), None)
    if first is None:
        task()
    else:
        first.then(partial(when_finished, rest, task))


def wait_for_builds(timeout: float | None = None) -> bool:
    """Wait until no program of this process is being built in the background; returns whether there was one.

    timeout: in seconds, of the whole. Raises TimeoutError after it. If a build raised an exception, the next call of
    its program raises it.
    """
    until = None if timeout is None else monotonic() + timeout
    with _lock:
        waiting = list(_pending)
    for each in waiting:
        each.wait(None if until is None else max(0.0, until - monotonic()))
    return bool(waiting)
