"""What there is to say of this machine and this process before any program runs: a verdict and a remedy each."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pellucid.errors import PellucidError, UserError
from pellucid.kit.shown import Shown
from pellucid.machine import Machine
from pellucid.machine.model import to_text
from pellucid.native.build import default_store, default_toolchain
from pellucid.native.counters import refused
from pellucid.native.cpu import available_memory, cpu, cpu_quota, usable_cores
from pellucid.native.loader import came_with_package
from pellucid.native.machine import keep, machine_file, machine_for, measured
from pellucid.native.measure import measure
from pellucid.native.toolchain import INSTALL_HINT, choose_isa, shipped

GOOD, WARNING, BAD = "good", "warning", "bad"

_OPENMP = ("libgomp", "libiomp", "libomp")
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_ALLOCATORS = ("libjemalloc", "libtcmalloc", "libmimalloc")
_LARGE = 48 << 20  # bytes of a tensor that the C library gives back to the system when it is freed
_SLOW_DENORMALS = 4.0
KEEP_PAGES = "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. verdict: `good`, `warning` (it costs time) or `bad` (it does not work, or gives surprises).

    remedy: what to do about it; empty where there is nothing to do. settings: variables of the environment that do it,
    for a process that is to be started: what `pellucid run` applies.
    """

    name: str
    verdict: str
    found: str
    remedy: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Doctored(Shown):
    """checks: in the order in which they matter. machine: its figures; None where it could not be measured."""

    checks: tuple[Check, ...]
    machine: Machine | None

    @property
    def good(self) -> bool:
        """Whether nothing is bad."""
        return all(check.verdict != BAD for check in self.checks)


def doctor(remeasure: bool = False) -> Doctored:
    """Look at this machine, as this process may use it; measure it first where that has not been done.

    remeasure: measure it again. What was measured is what the compiler asks from now on.
    """
    toolchain = _toolchain()
    machine, check = _machine(remeasure or measured() is None)
    package = [_package()] if toolchain.verdict == GOOD else []
    return Doctored(_sorted([toolchain, *package, check, *process_checks()]), machine)


def process_checks() -> tuple[Check, ...]:
    """What there is to say of this process, without measuring the machine."""
    return _sorted([each() for each in _CHECKS])


def _sorted(checks: list[Check]) -> tuple[Check, ...]:
    order = (BAD, WARNING, GOOD)
    return tuple(sorted(checks, key=lambda each: order.index(each.verdict)))


def write_machine(found: Doctored, file: Path) -> None:
    """Write the measurements, for PELLUCID_MACHINE. Raises UserError where there are none, or no such place."""
    if found.machine is None:
        raise UserError(f"there is nothing to write to {file}: the machine could not be measured")
    try:
        file.write_text(to_text(found.machine))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def _machine(again: bool) -> tuple[Machine | None, Check]:
    """The measurements, and whether the machine that PELLUCID_MACHINE names in their place can be read."""
    machine, check = _measurements(again)
    given = os.environ.get("PELLUCID_MACHINE")
    if not given:
        return machine, check
    try:
        machine_for(given)
    except UserError as error:
        found = f"nothing can be compiled: {error.message}; {check.found}"
        return machine, Check(
            "machine", BAD, found, "unset PELLUCID_MACHINE, or make such a file: pellucid doctor -o FILE"
        )
    return machine, replace(check, found=f"{check.found}; PELLUCID_MACHINE={given} is what the compiler asks")


def _measurements(again: bool) -> tuple[Machine | None, Check]:
    """Made again or those that are kept. Disturbed ones are shown, and not kept."""
    if not again:
        return measured(), Check("machine", GOOD, f"{cpu().name}, measured before: {machine_file()}")
    try:
        made = measure()
    except PellucidError as error:
        return None, Check("machine", WARNING, f"it cannot be measured: {error.message}", error.hint or "")
    if not made.steady:
        found = f"{cpu().name}: other programs disturbed the measurements, so they are not kept"
        return made.machine, Check("machine", WARNING, found, "end them, then: pellucid doctor --remeasure")
    try:
        return keep(made.machine), Check("machine", GOOD, f"{cpu().name}, measured now: {machine_file()}")
    except OSError as error:
        found = f"{cpu().name}: the measurements cannot be kept: {error}"
        return made.machine, Check("machine", WARNING, found, "set PELLUCID_CACHE_DIR to a directory of yours")


def _toolchain() -> Check:
    try:
        toolchain = default_toolchain()
        store = default_store()
    except PellucidError as error:
        return Check("toolchain", BAD, error.message, error.hint or "")
    found = f"{shlex.join(toolchain.compiler)}, {toolchain.kind} {toolchain.version}; kernels in {store.directory}"
    if toolchain.absent:
        return Check("toolchain", WARNING, f"{toolchain.absent}; only kernels of the store can be used", INSTALL_HINT)
    return Check("toolchain", GOOD, found)


def _package() -> Check:
    """Whether the first program finds native code that was built with the package."""
    came = {"the runtime": came_with_package(), "micro-kernels": bool(shipped(default_toolchain()))}
    lacking = " and ".join(name for name, there in came.items() if not there)
    if not lacking:
        return Check("package", GOOD, "the runtime and micro-kernels came with it")
    wait = "the first program in each store waits until they are built"
    if came["the runtime"] and os.environ.get("PELLUCID_CXXFLAGS"):
        found, remedy = f"its micro-kernels were built without PELLUCID_CXXFLAGS: {wait}", "unset PELLUCID_CXXFLAGS"
        return Check("package", WARNING, found, remedy)
    found = f"{lacking} did not come with it: {wait}"
    return Check("package", WARNING, found, "install Pellucid again, where there is a C++ compiler")


def _instructions() -> Check:
    used = choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
    has = "avx512f" in cpu().flags
    if has and used != "AVX512":
        pinned = "ATEN_CPU_CAPABILITY" in os.environ
        found, remedy = f"{used}; the processor has AVX-512, and PyTorch does not use it", "unset ATEN_CPU_CAPABILITY"
        return Check("instructions", WARNING, found, remedy if pinned else "")
    return Check("instructions", GOOD, used)


def openmp_runtimes() -> tuple[str, ...]:
    """The OpenMP runtimes that this process has loaded, as paths. Two of them keep two teams of threads."""
    return _loaded(_OPENMP)


def _openmp() -> Check:
    found = openmp_runtimes()
    if len(found) > 1:
        remedy = "keep PyTorch's: take the others out of LD_PRELOAD, or of the packages that load them"
        return Check("openmp", BAD, f"{len(found)} runtimes in one process: {', '.join(found)}", remedy)
    return Check("openmp", GOOD, found[0] if found else "none is loaded: PyTorch runs on one thread")


def _threads() -> Check:
    threads, cores, physical = torch.get_num_threads(), usable_cores(), _physical_cores()
    found = f"{threads} threads of PyTorch's on {cores} cores that this process may use"
    best = min(cores, physical)
    remedy, settings = f"OMP_NUM_THREADS={best}", {"OMP_NUM_THREADS": str(best)}
    if threads > cores:
        return Check("threads", WARNING, f"{found}: they wait for one another", remedy, settings)
    if threads > physical:
        found += f", which are {physical} physical ones"
        return Check("threads", WARNING, found, f"try {remedy}: two share one's arithmetic", settings)
    if threads < best:
        return Check("threads", WARNING, f"{found}: cores are left idle", remedy, settings)
    return Check("threads", GOOD, found)


def _affinity() -> Check:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    bound = [f"{name}={os.environ[name]}" for name in _BINDING if name in os.environ]
    told = ", ".join(bound) or "threads are not bound to cores"
    found = f"{allowed} of {present} cores allowed; {told}"
    if allowed == 1 < present:
        return Check("affinity", WARNING, found, "taskset, or what started this process, holds it on one core")
    return Check("affinity", GOOD, found)


def _container() -> Check:
    quota, threads = cpu_quota(), torch.get_num_threads()
    memory = f"{available_memory() >> 20} MB of memory to be had"
    if quota is None:
        return Check("container", GOOD, f"no limit of CPU time; {memory}")
    found = f"CPU time of {quota:g} cores; {memory}"
    if threads > quota:
        settings = {"OMP_NUM_THREADS": str(max(1, int(quota)))}
        remedy = f"OMP_NUM_THREADS={settings['OMP_NUM_THREADS']}, or a higher limit"
        return Check("container", WARNING, f"{found}: {threads} threads use it up, and then all wait", remedy, settings)
    return Check("container", GOOD, found)


def _load() -> Check:
    running = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    found = f"{running:.1f} processes ran or waited over the last minute, on {cores} cores"
    if running > cores + 0.5:
        return Check("load", WARNING, found, "end what else is running before timing anything")
    return Check("load", GOOD, found)


def _allocator() -> Check:
    """Whether memory that was freed is faulted in again: told by doing it."""
    named = ", ".join(_loaded(_ALLOCATORS)) or "the C library's"
    share, pages = faults_per_page(), _LARGE // resource.getpagesize()
    found = f"{named}; {share * pages:.0f} page faults for a new tensor of {pages} pages, as large as one just freed"
    if share > 1 / 16:
        remedy = f"LD_PRELOAD of jemalloc or tcmalloc, or {KEEP_PAGES}: for eager and for calls of ATen"
        settings = {name: value for name, _, value in (each.partition("=") for each in KEEP_PAGES.split())}
        return Check("allocator", WARNING, found, remedy, settings)
    return Check("allocator", GOOD, found)


def faults_per_page(rounds: int = 3) -> float:
    """Page faults for each page of a large tensor that takes the place of one that was freed: 1 where the allocator
    gives memory back to the system, next to 0 where it keeps it."""
    for _ in range(2):
        torch.empty(_LARGE, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty(_LARGE, dtype=torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults / rounds / (_LARGE // resource.getpagesize())


def _huge_pages() -> Check:
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = text.partition("[")[2].partition("]")[0] or "not told by the system"
    return Check("huge pages", GOOD, f"transparent huge pages: {mode}")


def _denormals() -> Check:
    """How much longer a product takes whose results are denormal, and whether they are flushed to zero."""
    if (torch.tensor([1e-30]) * 1e-10).item() == 0:
        return Check("denormals", GOOD, "they are flushed to zero: torch.set_flush_denormal(True)")
    slow = _product_seconds(1e-30) / _product_seconds(1.0)
    found = f"they are kept, as IEEE 754 says; a product with denormal results takes {slow:.1f} times as long"
    if slow > _SLOW_DENORMALS:
        remedy = "torch.set_flush_denormal(True), in each thread, if values below 1e-38 do not matter"
        return Check("denormals", WARNING, found, remedy)
    return Check("denormals", GOOD, found)


def _product_seconds(value: float) -> float:
    x, out = torch.full((4096,), value), torch.empty(4096)
    times: list[float] = []
    for _ in range(50):
        start = time.perf_counter()
        torch.mul(x, 1e-10, out=out)
        times.append(time.perf_counter() - start)
    return min(times)


def _counters() -> Check:
    found = refused()
    if found is None:
        return Check("counters", GOOD, "cycles, instructions and misses of the cache can be read")
    return Check("counters", GOOD, f"none: {found.why}", found.remedy)  # which costs no time


def _versions() -> Check:
    found = f"Python {platform.python_version()}, PyTorch {torch.__version__}, {platform.platform()}"
    return Check("versions", GOOD, found)


_CHECKS: tuple[Callable[[], Check], ...] = (
    _openmp,
    _threads,
    _container,
    _load,
    _allocator,
    _denormals,
    _instructions,
    _affinity,
    _huge_pages,
    _counters,
    _versions,
)


def _loaded(names: tuple[str, ...]) -> tuple[str, ...]:
    """Shared libraries of this process whose file name begins with one of `names`."""
    paths = (line.split(maxsplit=5)[5] for line in _read("/proc/self/maps").splitlines() if line.count("/"))
    return tuple(sorted({path.strip() for path in paths if Path(path).name.startswith(names)}))


def _physical_cores() -> int:
    """Of those that this process may use: threads of one core count once."""
    topology = (f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in os.sched_getaffinity(0))
    siblings = {_read(path).strip() or path for path in topology}
    return len(siblings)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
