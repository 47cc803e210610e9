"""Hardware counters of the processor, through Linux perf, and why they are not available."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pellucid.native.loader import library

_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class Counter(NamedTuple):
    """type, config: as in perf_event_open(2)."""

    name: str
    type: int
    config: int


HARDWARE = (Counter("cycles", 0, 0), Counter("instructions", 0, 1), Counter("cache-misses", 0, 3))
"""Cache misses are those of the last-level cache."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why counters cannot be read, and the remedy; empty if there is none."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why


def refused(counters: Sequence[Counter] = HARDWARE) -> Refused | None:
    """Why the system does not let this process read counters; None where it does."""
    number = library().pellucid_counters_error(words_of(counters), len(counters))
    return _why(number, _paranoid()) if number else None


def words_of(counters: Sequence[Counter]) -> ctypes.Array[ctypes.c_int64]:
    """Counters in the encoding of the runtime: type and config of each."""
    words = [number for each in counters for number in (each.type, each.config)]
    return (ctypes.c_int64 * len(words))(*words)


def _why(number: int, paranoid: int) -> Refused:
    if number in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return Refused(
            "the processor shows this system no counters, as in most virtual machines",
            "run on the machine itself, or let its host pass them on (QEMU: -cpu host,pmu=on)",
        )
    if number in (errno.EACCES, errno.EPERM) and paranoid > 2:
        return Refused(f"perf_event_paranoid is {paranoid}", "as root: sysctl kernel.perf_event_paranoid=2")
    if number in (errno.EACCES, errno.EPERM):
        return Refused("the sandbox refuses perf_event_open", "containers: --cap-add PERFMON, or a seccomp profile")
    if number == errno.ENOSYS:
        return Refused("this kernel has no perf events, or a sandbox hides them", "")
    return Refused(f"perf_event_open fails: {os.strerror(number)}", "")


def _paranoid() -> int:
    try:
        return int(_PARANOID.read_text())
    except (OSError, ValueError):
        return 0
