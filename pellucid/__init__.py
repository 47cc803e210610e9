"""A transparent `torch.compile` backend for CPUs.

    model = torch.compile(model, backend="pellucid")

PyTorch finds the backend by its name once the package is installed. See `pellucid.options` for the options.

    with pellucid.profile() as p:
        model(x)
    print(p)

Programs of `torch.export` are compiled by `pellucid.compile_exported`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pellucid.support import check_versions

check_versions()
del check_versions

_FROM = {"profile": "pellucid.profiling", "compile_exported": "pellucid.exported"}
_MODULES = ("backend", "debug", "profiling")


def __getattr__(name: str) -> Any:
    """Import the public modules and functions on first use: a program that only compiles does not load the kit."""
    if name in _MODULES:
        return import_module(f"pellucid.{name}")
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
