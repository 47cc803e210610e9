"""What the native runtime is built of: with the package, and at its first use where that was not possible.

This file imports nothing of Pellucid, because the package is built where PyTorch may not be.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SOURCES = Path(__file__).parent

FILES = (
    "runtime.cpp",
    "run.h",
    "kernel_call.h",
    "strips.h",
    "host.h",
    "contention.h",
    "denormals.h",
    "fingerprint.h",
    "instance.h",
    "memory.h",
    "trial.h",
    "timeline.h",
    "counters.h",
    "openmp_abi.h",
    "torch_abi.h",
    "python_abi.h",
    "words.h",
)
"""The first one is compiled; it includes the others."""

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-w")

STUB = "libtorch_cpu.so"
STUB_FLAGS = ("-shared", "-nostdlib", f"-Wl,-soname,{STUB}", "-x", "c++", os.devnull)
"""What makes an empty library of that name: it stands for PyTorch's, see `Compiler.link`."""


def linked_to(stub: str) -> tuple[str, ...]:
    """Flags of a library that needs PyTorch's. stub: the path of the empty one."""
    return ("-Wl,--no-as-needed", stub)


def library_name(stem: str, files: tuple[str, ...]) -> str:
    """The file name of the library `stem`, which tells of what `files` in this directory it was made."""
    digest = hashlib.sha256()
    for name in files:
        digest.update((SOURCES / name).read_bytes())
    return f"{stem}-{digest.hexdigest()[:16]}.so"
