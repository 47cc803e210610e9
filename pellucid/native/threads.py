"""Threads that work beside the program, and their end."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from pellucid.native.children import stop_all

_EXIT_S = 10


class _Beside(threading.Thread):
    """A thread of ours, told from those of others."""


def in_thread(task: Callable[[], None], name: str) -> None:
    """Start `task` in a thread that ends with the process. task: may raise nothing. name: for debuggers."""
    _Beside(target=task, name=name, daemon=True).start()


def _running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _Beside)]


def _end() -> None:
    """Python ends a thread where it next asks for the interpreter: inside an operator of PyTorch, that aborts."""
    until = time.monotonic() + _EXIT_S
    while (threads := _running()) and time.monotonic() < until:
        stop_all()
        for thread in threads:
            thread.join(0.02)


atexit.register(_end)
