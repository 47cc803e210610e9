"""Sources and flags of native code, built with the package, or later into a store.

This file imports nothing of Pellucid, because the package is built where PyTorch may be absent.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent

# ------------------------------------------------------------------------------------------------ the runtime

FILES = (
    "runtime.cpp",
    "run.h",
    "kernel_call.h",
    "strips.h",
    "host.h",
    "stack.h",
    "contention.h",
    "denormals.h",
    "twister.h",
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

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-w")

STUB = "libtorch_cpu.so"
STUB_FLAGS = ("-shared", "-nostdlib", f"-Wl,-soname,{STUB}", "-x", "c++", os.devnull)
"""Flags to build an empty library of that name, which replaces PyTorch's at link time, see `Compiler.link`."""


def linked_to(stub: str) -> tuple[str, ...]:
    """Flags of a library that needs PyTorch's. stub: the path of the empty one."""
    return ("-Wl,--no-as-needed", stub)


def library_name(stem: str, files: tuple[str, ...]) -> str:
    """The file name of the library `stem`, with a hash of its sources, `files` in this directory."""
    return f"{stem}-{_digest(*((SOURCES / name).read_bytes() for name in files))}.so"


# --------------------------------------------------------------------------------------------------- kernels

# Rounding equals eager mode's: no -ffast-math, no contraction of a * b + c. Eager mode has no errno and no traps.
KERNEL_FLAGS = (
    *("-std=c++20", "-fPIC", "-fvisibility-inlines-hidden", "-fno-semantic-interposition", "-w"),
    *("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)

LEVELS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16"),
}
"""The instruction sets that the shared code of kernels (kernel/shared.h) is built for, and the flags of each."""


def prelude_text(directory: Path) -> str:
    """The header of all kernels, `prelude.h`, with the headers that it includes inserted.

    It is one text because a single header is precompiled and stored with the kernels.
    """
    return re.sub(
        r'^#include "([\w/]+\.h)"$',
        lambda found: (directory / found[1]).read_text(encoding="utf-8"),
        (directory / "prelude.h").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


@lru_cache(maxsize=1)
def prelude_hash() -> str:
    """A hash of the header that every kernel includes."""
    return _digest(prelude_text(SOURCES).encode())[:12]


def shared_source(part: str) -> str:
    """The C++ file of a part of kernel/shared.h; the part `all` is all of it."""
    return f'#include "prelude.h"\nnamespace pv {{\nPV_SHARED_{part}(template)\n}}\n'


@lru_cache(maxsize=len(LEVELS))
def shared_name(level: str) -> str:
    """The file name of the object file of all parts for an instruction set, with a hash of its source and flags."""
    flags = " ".join((*KERNEL_FLAGS, *LEVELS[level]))
    return f"shared-{level}-{_digest(prelude_text(SOURCES).encode(), flags.encode())}.o"


def _digest(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()[:16]
