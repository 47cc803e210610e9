"""Facts about this machine's CPU, as far as this process may use it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU. Sizes in bytes; 0 where the system does not say.

    name: the model. flags: instruction set extensions as the kernel names them.
    cores: that this process may use, by affinity and cgroup quota. memory: that it may use, by cgroup limit.
    l1, l2: data caches of one core. l3: shared by some cores.
    """

    name: str
    machine: str
    flags: frozenset[str]
    cores: int
    memory: int
    l1: int
    l2: int
    l3: int


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    """The facts, read once per process."""
    fields = _cpuinfo()
    caches = _cache_sizes()
    return Cpu(
        name=fields.get("model name", fields.get("CPU part", "unknown")),
        machine=os.uname().machine,
        flags=frozenset(fields.get("flags", fields.get("Features", "")).split()),
        cores=_cores(),
        memory=_memory(),
        l1=caches.get(1, 0),
        l2=caches.get(2, 0),
        l3=caches.get(3, 0),
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo."""
    first = _read(Path("/proc/cpuinfo")).split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def _quota() -> float | None:
    """CPUs' worth of time that the cgroup grants, None without a limit."""
    text = _read(_CGROUP / "cpu.max")
    if not text:
        text = f"{_read(_CGROUP / 'cpu/cpu.cfs_quota_us')} {_read(_CGROUP / 'cpu/cpu.cfs_period_us')}"
    match = re.match(r"(\d+)\s+(\d+)", text)  # "max 100000" and "-1 100000" mean no limit
    return int(match[1]) / int(match[2]) if match else None


def _memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = _read(_CGROUP / "memory.max") or _read(_CGROUP / "memory/memory.limit_in_bytes")
    return min(total, int(text)) if text.strip().isdigit() else total


def _cache_sizes() -> dict[int, int]:
    """Size of each level's data cache, as core 0 sees it."""
    sizes: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KM]?)", size)
        if level.isdigit() and match and kind != "Instruction":
            sizes[int(level)] = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return sizes


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
