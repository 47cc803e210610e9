"""Time to the first result in a fresh process: cold, with an empty cache, and warm, with the cache of the cold one.

The fresh process runs this module: `python -m pellucid.kit.bench.startup REQUEST.json ANSWER.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pellucid.background import wait_for_builds
from pellucid.kit.bench.models import DTYPES, Size
from pellucid.kit.bench.programs import programs_of
from pellucid.kit.bench.results import Startup, decode
from pellucid.kit.bench.subjects import EAGER, compiled

TIMEOUT_SECONDS = 1800
CACHE_VARIABLES = ("PELLUCID_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Request:
    """What the fresh process runs: the one program of this name. `threads` of 0 keeps torch's default."""

    program: str
    subject: str
    batch: int
    seq: int
    dtype: str
    threads: int = 0
    train: bool = False
    dynamic: bool = False


def cold_and_warm(request: Request, timeout: float = TIMEOUT_SECONDS) -> tuple[Startup, Startup | None]:
    """Run `request` in one process with an empty cache, then in a second one with the same cache.

    Eager, which has no cache, and a subject whose first process failed get no second one. A crash or a hang of the
    child is a `Startup` with its `failure`, never an exception.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
        cold = _in_child(request, Path(folder), timeout)
        if cold.failure or request.subject == EAGER:
            return cold, None
        return cold, _in_child(request, Path(folder), timeout)


def _in_child(request: Request, folder: Path, timeout: float) -> Startup:
    ask, answer = folder / "request.json", folder / "answer.json"
    ask.write_text(json.dumps(dataclasses.asdict(request)))
    answer.unlink(missing_ok=True)
    caches = {name: str(folder / name.lower()) for name in CACHE_VARIABLES}
    command = [sys.executable, "-m", "pellucid.kit.bench.startup", str(ask), str(answer)]
    try:
        child = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Startup(failure=f"no result within {timeout:g} s")
    if child.returncode == 0 and answer.exists():
        return decode(Startup, json.loads(answer.read_text()))
    return Startup(failure=_explain(child.returncode, child.stderr))


def _explain(status: int, stderr: str) -> str:
    """One line for a child that died: the signal's name, or its last line of stderr."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"


def run_request(request: Request) -> Startup:
    """Build the program and make its first call in this process."""
    import torch

    if request.threads:
        torch.set_num_threads(request.threads)
    size = Size(request.batch, request.seq, DTYPES[request.dtype], request.train)
    (case,) = programs_of(request.program, size)
    built = _reset_peak()
    with torch.set_grad_enabled(request.train):
        start = time.perf_counter()
        call = compiled(case, request.subject, request.train, request.dynamic or None)
        call()
        seconds = time.perf_counter() - start
        wait_for_builds()
        for _ in range(3):
            call()
    return Startup(seconds, built, _peak_bytes())


def _reset_peak() -> int:
    """Reset the peak memory, which building the program has raised; returns the resident bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    """The peak resident memory of this process.

    ru_maxrss is only the fallback: it starts with the parent's figure, which survives the exec.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(ask: str, answer: str) -> None:
    """The child process: read the request, write the answer."""
    startup = run_request(decode(Request, json.loads(Path(ask).read_text())))
    Path(answer).write_text(json.dumps(dataclasses.asdict(startup)))


if __name__ == "__main__":
    main(*sys.argv[1:])
