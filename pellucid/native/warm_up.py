"""What every compilation needs, made while PyTorch is still capturing the first graph."""

from __future__ import annotations

import atexit
import threading
import time

from pellucid.native.build import default_store, default_toolchain
from pellucid.native.children import stop_all
from pellucid.native.compiler import Compiler
from pellucid.native.loader import library

_EXIT_S = 10
_threads: list[threading.Thread] = []


def warm_up() -> None:
    """Start making the precompiled header and the runtime in the background; returns at once.

    Errors are left to the first `build`, which meets them again.
    """
    for task in (_headers, _runtime):
        thread = threading.Thread(target=task, name="pellucid-warm-up", daemon=True)
        thread.start()
        _threads.append(thread)


def _headers() -> None:
    try:
        compiler = Compiler(default_toolchain(), default_store())
        compiler.prepare_stub()
        if not (compiler.store.directory / "files" / "prelude.h").exists():
            compiler.prepare_headers()
    except Exception:
        return


def _runtime() -> None:
    try:
        library()
    except Exception:
        return


def _end() -> None:
    """Python ends a thread where it next asks for the interpreter: inside an operator of PyTorch, that aborts."""
    until = time.monotonic() + _EXIT_S
    while any(thread.is_alive() for thread in _threads) and time.monotonic() < until:
        stop_all()
        for thread in _threads:
            thread.join(0.02)


atexit.register(_end)
