"""Where C++ sources and headers are: the runtime's and the kernels' beside this file, PyTorch's in its package."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent


def include_dir() -> Path:
    """Directory of PyTorch's headers (Sleef's among them)."""
    return Path(torch.__file__).parent / "include"


@lru_cache(maxsize=1)
def prelude_hash() -> str:
    """Identity of the header that every kernel includes."""
    return hashlib.sha256((SOURCES / "prelude.h").read_bytes()).hexdigest()[:12]
