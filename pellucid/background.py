"""A graph whose kernels are still being built: PyTorch's operators compute its calls until the program is there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

import torch

from pellucid.native.locks import Lock
from pellucid.native.threads import in_thread

_Run: TypeAlias = "Callable[[list[Any]], list[Any]]"

log = logging.getLogger(__name__)


class InBackground:
    """Runs the FX graph until the program that is made of it in a thread is ready, and that program from then on.

    Called with the list of the graph's arguments (the boxed calling convention: the list is emptied). Any number of
    threads may call it. What making the program raises, each later call raises.
    """

    _boxed_call = True

    def __init__(self, graph: torch.fx.GraphModule, make: Callable[[], _Run], name: str) -> None:
        """make: builds the kernels, and returns the program. name: of the program, for logs."""
        self._graph: torch.fx.GraphModule | None = graph
        self._make: Callable[[], _Run] | None = make
        self._name = name
        self._run: _Run | None = None
        self._error: Exception | None = None
        self._owner = 0
        self._done = threading.Event()
        self._starting = Lock()
        self._started()

    def __call__(self, args: list[Any]) -> list[Any]:
        return (self._run or self._meanwhile())(args)

    def made(self, timeout: float | None = None) -> _Run:
        """The program, once it is ready. Raises what making it raised, and TimeoutError after `timeout` seconds."""
        self._started()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the kernels of {self._name} are still being built")
        if self._run is None:
            assert self._error is not None
            raise self._error
        return self._run

    def _meanwhile(self) -> _Run:
        """What computes a call before the program is ready."""
        self._started()
        graph = self._graph
        return self.made() if graph is None or self._done.is_set() else lambda args: _called(graph, args)

    def _started(self) -> None:
        """Start the thread, in a forked child too: there the parent's is not."""
        with self._starting:
            if self._owner != os.getpid():
                self._owner, self._done = os.getpid(), threading.Event()
                _pending.add(self)
                in_thread(self._work, "pellucid-build")

    def _work(self) -> None:
        make, done = self._make, self._done
        assert make is not None
        try:
            self._run = make()
            self._graph = self._make = None
            log.info("%s: kernels built, calls run them", self._name)
        except Exception as error:
            self._error = error
            log.info("%s: %s", self._name, error)
        _pending.discard(self)
        done.set()


def _called(graph: torch.fx.GraphModule, args: list[Any]) -> list[Any]:
    given = tuple(args)
    args.clear()
    return list(graph(*given))


_pending: set[InBackground] = set()


def in_the_end(run: Any) -> Any:
    """A compiled graph, without what runs before it is built. Raises what making it raised."""
    return run.made() if isinstance(run, InBackground) else run


def wait_for_builds(timeout: float | None = None) -> bool:
    """Wait until no program of this process is being built in the background; returns whether there was one.

    timeout: in seconds, of the whole. Raises TimeoutError after it. What a build raised, the next call of its program
    raises.
    """
    until = None if timeout is None else monotonic() + timeout
    waiting = list(_pending)
    for each in waiting:
        try:
            each.made(None if until is None else max(0.0, until - monotonic()))
        except TimeoutError:
            raise
        except Exception:
            continue  # its next call raises it
    return bool(waiting)
