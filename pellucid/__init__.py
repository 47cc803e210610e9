"""A `torch.compile` backend for CPUs that people can see through.

    model = torch.compile(model, backend="pellucid")

PyTorch finds the backend by its name once the package is installed. See `pellucid.options` for what can be set.

    with pellucid.profile() as p:
        model(x)
    print(p)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pellucid.support import check_versions

check_versions()
del check_versions


def __getattr__(name: str) -> Any:
    """`profile`, which comes with the kit: what only compiles loads nothing of it."""
    if name != "profile":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("pellucid.profiling").profile
