"""The figures of the Inductor CPU tutorial, taken side by side: `python benchmarks/tutorial.py [--rounds N]`.

Each subject runs in a process of its own, and the processes take turns: one round of each, again and again. So a slow
moment of the machine hits all of them, and the ratio of a round is fair. Subjects: eager, Inductor, Pellucid, and
Inductor as the tutorial recommends to run it (jemalloc preloaded, OpenMP settings), if jemalloc is installed
(`apt-get install libjemalloc2`).
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

FUNCTIONS = ("addaddmuladd", "softmax", "pointwise_small")
TUTORIAL_ENVIRONMENT = {
    "KMP_BLOCKTIME": "1",
    "KMP_AFFINITY": "granularity=fine,compact,1,0",
    "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1",
}


def serve(backend: str, name: str) -> None:
    """A subject's process: compile, warm up, then time one round for each line on standard input."""
    import resource
    from time import perf_counter

    import torch

    from pellucid.kit.bench.models import build

    case = build(name)
    function = case.fn if backend == "eager" else torch.compile(case.fn, backend=backend)
    arguments = list(case.kwargs.values())
    repeats = 2000 if name == "pointwise_small" else 3
    with torch.no_grad():
        for _ in range(5):
            function(*arguments)
        print("ready", flush=True)
        for _ in sys.stdin:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = perf_counter()
            for _ in range(repeats):
                function(*arguments)
            seconds = (perf_counter() - start) / repeats
            faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / repeats
            print(json.dumps([seconds, faults]), flush=True)


class Subject:
    """A child process that times rounds on request."""

    def __init__(self, label: str, backend: str, name: str, environment: dict[str, str]) -> None:
        self.label = label
        self.seconds: list[float] = []
        self.faults: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", backend, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._read()

    def round(self) -> None:
        """One more measurement."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, faults = json.loads(self._read())
        self.seconds.append(seconds)
        self.faults.append(faults)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} ended early; run it alone to see why")
        return line


def jemalloc() -> str | None:
    """Path of the system's jemalloc, if there is one."""
    name = ctypes.util.find_library("jemalloc")
    folders = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))
    return next((str(folder / name) for folder in folders if name and (folder / name).exists()), None)


def measure(name: str, rounds: int) -> None:
    """Time one function under every subject and print medians, spreads and ratios."""
    specifications = [("eager", "eager", {}), ("inductor", "inductor", {}), ("pellucid", "pellucid", {})]
    library = jemalloc()
    if library:
        specifications.append(("inductor+jemalloc", "inductor", {"LD_PRELOAD": library, **TUTORIAL_ENVIRONMENT}))
    subjects = [Subject(label, backend, name, environment) for label, backend, environment in specifications]
    for number in range(rounds):
        shift = number % len(subjects)
        for subject in subjects[shift:] + subjects[:shift]:
            subject.round()
    for subject in subjects:
        subject.stop()
    ours = next(subject for subject in subjects if subject.label == "pellucid")
    print(f"\n{name}: {rounds} rounds")
    for subject in subjects:
        ratios = [theirs / own for theirs, own in zip(subject.seconds, ours.seconds, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {subject.label:18} {statistics.median(subject.seconds) * 1e6:10.1f} us"
            f"   faults/call {statistics.median(subject.faults):8.1f}"
            f"   time / pellucid's {statistics.median(ratios):6.2f} [{low:.2f} .. {high:.2f}]"
        )


def main() -> None:
    """Measure every function that is named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("functions", nargs="*", default=list(FUNCTIONS), help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    for name in arguments.functions:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
