"""What every compilation needs, made while PyTorch is still capturing the first graph."""

from __future__ import annotations

import threading

from pellucid.native.build import default_store, default_toolchain
from pellucid.native.compiler import Compiler
from pellucid.native.loader import library


def warm_up() -> None:
    """Start making the precompiled header and the runtime in the background; returns at once.

    Errors are left to the first `build`, which meets them again.
    """
    for task in (_headers, _runtime):
        threading.Thread(target=task, name="pellucid-warm-up", daemon=True).start()


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
