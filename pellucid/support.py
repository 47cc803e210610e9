"""Checks the versions of Python and PyTorch, before anything that depends on them is imported."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from pellucid.errors import UnsupportedError, warn

PYTHON = (3, 10)
TORCH = (2, 13)


def check_versions() -> None:
    """Raise UnsupportedError for a Python or a PyTorch that is too old or absent; warn of one that is newer.

    The adapter to PyTorch's private interfaces follows it one minor release at a time.
    """
    wanted = f"pip install 'torch=={TORCH[0]}.{TORCH[1]}.*'"
    if sys.version_info < PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise UnsupportedError(
            f"Pellucid needs Python {PYTHON[0]}.{PYTHON[1]} or later; this is {found}", hint="use a newer Python"
        )
    version = _torch_version()
    if version is None:
        raise UnsupportedError("Pellucid is a backend of PyTorch, which is not installed", hint=wanted)
    release = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(release[1]), int(release[2])) if release else TORCH
    if numbers < TORCH:
        raise UnsupportedError(f"Pellucid needs PyTorch {TORCH[0]}.{TORCH[1]}; this is {version}", hint=wanted)
    if numbers > TORCH:
        warn(
            f"Pellucid is made for PyTorch {TORCH[0]}.{TORCH[1]} and this is {version}, where it may fail: "
            f"use a newer Pellucid, or {wanted}"
        )


def _torch_version() -> str | None:
    torch = sys.modules.get("torch")  # a build from source has no metadata
    if torch is not None:
        return str(getattr(torch, "__version__", ""))
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
