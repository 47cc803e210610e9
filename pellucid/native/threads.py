"""Threads that work beside the program, and their end."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pellucid.native.children import stop_all

_EXIT_S = 10
_threads: list[threading.Thread] = []


def in_thread(task: Callable[[], None], name: str) -> None:
    """Start `task` in a thread that ends with the process. task: may raise nothing. name: for debuggers."""
    thread = threading.Thread(target=task, name=name, daemon=True)
    thread.start()
    _threads.append(thread)
    for each in list(_threads):
        if not each.is_alive():
            with suppress(ValueError):  # another thread was faster
                _threads.remove(each)


def _end() -> None:
    """Python ends a thread where it next asks for the interpreter: inside an operator of PyTorch, that aborts."""
    until = time.monotonic() + _EXIT_S
    while any(thread.is_alive() for thread in _threads) and time.monotonic() < until:
        stop_all()
        for thread in _threads:
            thread.join(0.02)


atexit.register(_end)
