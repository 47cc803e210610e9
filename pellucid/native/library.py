"""Loading shared libraries, also from file systems that are mounted `noexec`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TypeVar

from pellucid.errors import ToolchainError

_Library = TypeVar("_Library", bound=ctypes.CDLL)


def open_library(path: Path, kind: type[_Library]) -> _Library:
    """Load a shared library, for the life of the process. kind: ctypes.CDLL, or ctypes.PyDLL to keep the GIL.

    If the file system does not allow to execute files, a copy in memory is loaded. Raises OSError for a file that is
    no library, ToolchainError if this machine allows no code to be loaded.
    """
    mode = os.RTLD_NOW | os.RTLD_LOCAL
    try:
        return kind(os.fspath(path), mode=mode)
    except OSError as error:
        if "failed to map segment" not in str(error):
            raise
        refused = error
    try:
        return kind(_copy_in_memory(path), mode=mode)
    except OSError as error:
        raise ToolchainError(
            f"compiled code cannot be loaded: {refused}; nor from memory: {error}",
            hint="most likely the kernel store is on a file system that is mounted noexec: "
            "set PELLUCID_CACHE_DIR to a directory of yours on another one",
        ) from error


def _copy_in_memory(path: Path) -> str:
    """The path of a copy in memory.

    Its descriptor stays open: the dynamic linker identifies libraries by path, so no number may be used twice.
    """
    handle = os.memfd_create(path.name)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(path.read_bytes())
    return f"/proc/self/fd/{handle}"
