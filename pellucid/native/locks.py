"""Locks that are free in a forked child, even if a thread of the parent held them at the fork."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress


class Lock:
    """A mutual exclusion lock, used by `with`. In a child of `fork` it is free: the child has no other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # in a forked child, where it was renewed while held
            self._lock.release()

    def renew(self) -> None:
        """Make it free."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)
