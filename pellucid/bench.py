"""Benchmarks: eager and compiled programs measured side by side, as a function and as `pellucid bench`.

`bench(["bert"])` measures models of the registry, `compare(Workload(...), Settings())` a program of your own.
"""

from pellucid.kit.bench.harness import Settings, bench, compare
from pellucid.kit.bench.models import MODELS, Size, UnknownName, Workload, build
from pellucid.kit.bench.results import ModelResult, Report, Startup, SubjectResult
from pellucid.kit.bench.stats import Summary

__all__ = [
    "MODELS",
    "ModelResult",
    "Report",
    "Settings",
    "Size",
    "Startup",
    "SubjectResult",
    "Summary",
    "UnknownName",
    "Workload",
    "bench",
    "build",
    "compare",
]
