"""What every compilation needs, made while PyTorch is still capturing the first graph."""

from __future__ import annotations

from pellucid.native.build import default_store, default_toolchain
from pellucid.native.compiler import Compiler
from pellucid.native.loader import library
from pellucid.native.threads import in_thread

_USUAL = "pv::contract<9, 32, 64>"
"""What most programs have among their kernels: a product."""


def warm_up() -> None:
    """Start making what most kernels share, in an empty store, and the runtime, in a thread; returns at once.

    Errors are left to the first `build`, which meets them again.
    """
    in_thread(_make, "pellucid-warm-up")


def _make() -> None:
    """One after the other: PyTorch needs a core meanwhile."""
    _headers()
    _runtime()


def _headers() -> None:
    try:
        compiler = Compiler(default_toolchain(), default_store())
        compiler.prepare_stub()
        if not (compiler.store.directory / "files" / "prelude.h").exists():
            compiler.prepare_headers()
            for part in compiler.parts_to_make(_USUAL):
                compiler.prepare_shared(part)
    except Exception:
        return


def _runtime() -> None:
    try:
        library()
    except Exception:
        return
