"""Benchmarks: eager and compiled programs measured side by side, as a function and as `pellucid bench`.

`bench(["bert"])` measures models by name, like the command; `compare(Case(...), Settings())` a program of your own.
"""

from pellucid.kit.bench.harness import Settings, bench, compare
from pellucid.kit.bench.models import MODELS, Size, UnknownName, build
from pellucid.kit.bench.results import ModelResult, Report, Startup, SubjectResult
from pellucid.kit.programs.case import Case
from pellucid.kit.stats import Summary

__all__ = [
    "MODELS",
    "Case",
    "ModelResult",
    "Report",
    "Settings",
    "Size",
    "Startup",
    "SubjectResult",
    "Summary",
    "UnknownName",
    "bench",
    "build",
    "compare",
]
