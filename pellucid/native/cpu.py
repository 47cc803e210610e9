"""Facts about this machine's CPU, as far as this process may use it."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of x86-64
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU. Sizes in bytes; 0 where the system does not say.

    name: the model. flags: instruction set extensions as the kernel names them, as far as this process may use them.
    cores: that this process may use, by affinity and cgroup quota. memory: that it may use, by cgroup limit.
    l1, l2: data caches of one core. l3: shared by some cores. ways: lines of a set, by the name of the cache.
    """

    name: str
    machine: str
    flags: frozenset[str]
    cores: int
    memory: int
    l1: int
    l2: int
    l3: int
    ways: tuple[tuple[str, int], ...] = ()


@lru_cache(maxsize=1)
def cpu() -> Cpu:
    """The facts, read once per process."""
    fields = _cpuinfo()
    caches = _cache_sizes()
    return Cpu(
        name=fields.get("model name", fields.get("CPU part", "unknown")),
        machine=os.uname().machine,
        flags=_flags(fields),
        cores=usable_cores(),
        memory=_memory(),
        l1=caches.get(1, 0),
        l2=caches.get(2, 0),
        l3=caches.get(3, 0),
        ways=tuple((f"l{level}", count) for level, count in _of_caches("ways_of_associativity").items()),
    )


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry in /proc/cpuinfo."""
    first = _read(Path("/proc/cpuinfo")).split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _flags(fields: Mapping[str, str]) -> frozenset[str]:
    """The extensions, but those of units for tiles (AMX) only if the system lets this process use them."""
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    tiles = frozenset(flag for flag in flags if flag.startswith("amx"))
    return flags - tiles if tiles and not _may_use_tiles() else flags


def _may_use_tiles() -> bool:
    """Ask Linux for the state of tiles, which a process has to do once before it uses any of it."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


def usable_cores() -> int:
    """Cores that this process may use now, by affinity and cgroup quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, round(quota)))


def available_memory() -> int:
    """Bytes that this process could still take without swapping, now: what the machine and every cgroup have left."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    left = [int(match[1]) << 10] if match else [_memory()]
    for group in _cgroups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                left.append(most - used + _reclaimable(group))
    return max(0, min(left))


def _reclaimable(group: Path) -> int:
    """Bytes of files that a cgroup is charged for and could drop."""
    match = re.search(r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
    return int(match[1]) if match else 0


def _cgroups(controller: str) -> list[Path]:
    """Directories of the cgroups that this process is in, itself first; limits of all of them hold."""
    directories: list[Path] = []
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _CGROUP / controller if controllers else _CGROUP
        own = top / path.lstrip("/")
        directories += [group for group in (own, *own.parents) if group.is_relative_to(top) and group.is_dir()]
    return directories or [_CGROUP, _CGROUP / controller]


def cpu_quota() -> float | None:
    """CPUs' worth of time that the cgroups grant, None without a limit."""
    quotas: list[float] = []
    for group in _cgroups("cpu"):
        text = _read(group / "cpu.max")
        if not text:
            text = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
        match = re.match(r"(\d+)\s+(\d+)", text)  # "max 100000" and "-1 100000" mean no limit
        if match:
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def scheduled() -> tuple[int, int]:
    """Nanoseconds in which the threads of this process ran, and in which they waited for a core; 0 if nobody tells."""
    ran = waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        each = _read(path).split()
        if len(each) > 1:  # else the thread has ended
            ran, waited = ran + int(each[0]), waited + int(each[1])
    return ran, waited


def _memory() -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _cgroups("memory"):
        found = (_number(group / "memory.max"), _number(group / "memory.limit_in_bytes"))
        limits += [limit for limit in found if limit is not None]
    return min(limits)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none ("max": no limit)."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _cache_sizes() -> dict[int, int]:
    """Size of each level's data cache, as core 0 sees it."""
    return _of_caches("size")


def _of_caches(what: str) -> dict[int, int]:
    """A number of each level's data cache, where the system tells one."""
    found: dict[int, int] = {}
    for index in sorted(_CACHES.glob("index*")):
        level, kind, number = (_read(index / name).strip() for name in ("level", "type", what))
        match = re.fullmatch(r"(\d+)([KM]?)", number)
        if level.isdigit() and match and int(match[1]) and kind != "Instruction":
            found[int(level)] = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
