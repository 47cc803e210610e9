"""Check this machine and this process before any program runs; each check has a verdict and a remedy."""

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
_LARGE = 48 << 20  # bytes of a tensor that the C library returns to the system when it is freed
_SLOW_DENORMALS = 4.0
KEEP_PAGES = "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. verdict: `good`, `warning` (it costs time) or `bad` (it fails or misbehaves).

    found: what was found. remedy: what to do about it; may be empty. settings: environment variables that do it in a
    new process, as `pellucid run` applies them.
    """

    name: str
    verdict: str
    found: str
    remedy: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Doctored(Shown):
    """checks: the worst first. machine: its measured figures; None where it could not be measured."""

    checks: tuple[Check, ...]
    machine: Machine | None

    @property
    def good(self) -> bool:
        """Whether nothing is bad."""
        return all(check.verdict != BAD for check in self.checks)


def doctor(remeasure: bool = False) -> Doctored:
    """Check this machine, as far as this process may use it; measure it first if that has not been done.

    remeasure: measure it again. The compiler uses the measured figures from now on.
    """
    toolchain = _toolchain()
    machine, check = _machine(remeasure or measured() is None)
    package = [_package()] if toolchain.verdict == GOOD else []
    return Doctored(_sorted([toolchain, *package, check, *process_checks()]), machine)


def process_checks() -> tuple[Check, ...]:
    """The checks of this process, without measuring the machine."""
    return _sorted([each() for each in _CHECKS])


def _sorted(checks: list[Check]) -> tuple[Check, ...]:
    order = (BAD, WARNING, GOOD)
    return tuple(sorted(checks, key=lambda each: order.index(each.verdict)))


def write_machine(found: Doctored, file: Path) -> None:
    """Write the measurements to a file for PELLUCID_MACHINE. Raises UserError where there are none, or on failure."""
    if found.machine is None:
        raise UserError(f"there is nothing to write to {file}: the machine could not be measured")
    try:
        file.write_text(to_text(found.machine))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def _machine(again: bool) -> tuple[Machine | None, Check]:
    """The measurements, and whether the file that PELLUCID_MACHINE names to override them can be read."""
    machine, check = _measurements(again)
    path = os.environ.get("PELLUCID_MACHINE")
    if not path:
        return machine, check
    try:
        machine_for(path)
    except UserError as error:
        found = f"nothing can be compiled: {error.message}; {check.found}"
        return machine, Check(
            "machine", BAD, found, "unset PELLUCID_MACHINE, or write such a file: pellucid doctor -o FILE"
        )
    return machine, replace(check, found=f"{check.found}; the compiler uses PELLUCID_MACHINE={path} instead")


def _measurements(again: bool) -> tuple[Machine | None, Check]:
    """The measurements, saved or new. New ones that other programs disturbed are shown but not saved."""
    if not again:
        return measured(), Check("machine", GOOD, f"{cpu().name}, measured before: {machine_file()}")
    try:
        made = measure()
    except PellucidError as error:
        return None, Check("machine", WARNING, f"it cannot be measured: {error.message}", error.hint or "")
    if not made.steady:
        found = f"{cpu().name}: other programs disturbed the measurements, so they are not saved"
        return made.machine, Check("machine", WARNING, found, "stop them, then run: pellucid doctor --remeasure")
    try:
        return keep(made.machine), Check("machine", GOOD, f"{cpu().name}, measured now: {machine_file()}")
    except OSError as error:
        found = f"{cpu().name}: the measurements cannot be saved: {error}"
        return made.machine, Check("machine", WARNING, found, "set PELLUCID_CACHE_DIR to a directory of yours")


def _toolchain() -> Check:
    try:
        toolchain = default_toolchain()
        store = default_store()
    except PellucidError as error:
        return Check("toolchain", BAD, error.message, error.hint or "")
    found = f"{shlex.join(toolchain.compiler)}, {toolchain.kind} {toolchain.version}; kernels in {store.directory}"
    if toolchain.absent:
        return Check("toolchain", WARNING, f"{toolchain.absent}; only kernels in the store can be used", INSTALL_HINT)
    return Check("toolchain", GOOD, found)


def _package() -> Check:
    """Whether the package includes prebuilt native code for the first program."""
    included = {"the runtime": came_with_package(), "micro-kernels": bool(shipped(default_toolchain()))}
    missing = " and ".join(name for name, there in included.items() if not there)
    if not missing:
        return Check("package", GOOD, "it includes the prebuilt runtime and micro-kernels")
    wait = "the first program with a new store waits until they are built"
    if included["the runtime"] and os.environ.get("PELLUCID_CXXFLAGS"):
        found, remedy = f"its micro-kernels were built without PELLUCID_CXXFLAGS: {wait}", "unset PELLUCID_CXXFLAGS"
        return Check("package", WARNING, found, remedy)
    found = f"it does not include {missing}: {wait}"
    return Check("package", WARNING, found, "reinstall Pellucid on a machine with a C++ compiler")


def _instructions() -> Check:
    used = choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
    has = "avx512f" in cpu().flags
    if has and used != "AVX512":
        pinned = "ATEN_CPU_CAPABILITY" in os.environ
        found, remedy = f"{used}; the processor has AVX-512, but PyTorch does not use it", "unset ATEN_CPU_CAPABILITY"
        return Check("instructions", WARNING, found, remedy if pinned else "")
    return Check("instructions", GOOD, used)


def openmp_runtimes() -> tuple[str, ...]:
    """The paths of the OpenMP runtimes that this process has loaded. Each keeps its own team of threads."""
    return _loaded(_OPENMP)


def _openmp() -> Check:
    found = openmp_runtimes()
    if len(found) > 1:
        remedy = "use only PyTorch's: remove the others from LD_PRELOAD, or the packages that load them"
        return Check("openmp", BAD, f"{len(found)} runtimes in one process: {', '.join(found)}", remedy)
    return Check("openmp", GOOD, found[0] if found else "none is loaded: PyTorch runs on one thread")


def _threads() -> Check:
    threads, cores, physical = torch.get_num_threads(), usable_cores(), _physical_cores()
    found = f"{threads} PyTorch threads on the {cores} cores that this process may use"
    best = min(cores, physical)
    remedy, settings = f"OMP_NUM_THREADS={best}", {"OMP_NUM_THREADS": str(best)}
    if threads > cores:
        return Check("threads", WARNING, f"{found}: they wait for one another", remedy, settings)
    if threads > physical:
        found += f", which are {physical} physical cores"
        return Check("threads", WARNING, found, f"try {remedy}: two threads share a core's arithmetic units", settings)
    if threads < best:
        return Check("threads", WARNING, f"{found}: some cores are idle", remedy, settings)
    return Check("threads", GOOD, found)


def _affinity() -> Check:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    bound = [f"{name}={os.environ[name]}" for name in _BINDING if name in os.environ]
    binding = ", ".join(bound) or "threads are not bound to cores"
    found = f"{allowed} of {present} cores allowed; {binding}"
    if allowed == 1 < present:
        return Check("affinity", WARNING, found, "taskset, or the parent process, restricts this process to one core")
    return Check("affinity", GOOD, found)


def _container() -> Check:
    quota, threads = cpu_quota(), torch.get_num_threads()
    memory = f"{available_memory() >> 20} MB of memory available"
    if quota is None:
        return Check("container", GOOD, f"no CPU time limit; {memory}")
    found = f"CPU time of {quota:g} cores; {memory}"
    if threads > quota:
        settings = {"OMP_NUM_THREADS": str(max(1, int(quota)))}
        remedy = f"OMP_NUM_THREADS={settings['OMP_NUM_THREADS']}, or a higher limit"
        return Check("container", WARNING, f"{found}: {threads} threads exceed it and are throttled", remedy, settings)
    return Check("container", GOOD, found)


def _load() -> Check:
    running = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    found = f"load average {running:.1f} over the last minute, on {cores} cores"
    if running > cores + 0.5:
        return Check("load", WARNING, found, "stop other programs before timing anything")
    return Check("load", GOOD, found)


def _allocator() -> Check:
    """Whether freed memory is faulted in again when it is reused; determined by trying it."""
    named = ", ".join(_loaded(_ALLOCATORS)) or "the C library's"
    share, pages = faults_per_page(), _LARGE // resource.getpagesize()
    found = f"{named}; reallocating a freed tensor of {pages} pages takes {share * pages:.0f} page faults"
    if share > 1 / 16:
        remedy = f"LD_PRELOAD jemalloc or tcmalloc, or set {KEEP_PAGES}: for eager mode and calls to ATen"
        settings = {name: value for name, _, value in (each.partition("=") for each in KEEP_PAGES.split())}
        return Check("allocator", WARNING, found, remedy, settings)
    return Check("allocator", GOOD, found)


def faults_per_page(rounds: int = 3) -> float:
    """Page faults per page of a large tensor allocated after freeing one of the same size.

    About 1 where the allocator returns memory to the system, about 0 where it keeps it.
    """
    for _ in range(2):
        torch.empty(_LARGE, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty(_LARGE, dtype=torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults / rounds / (_LARGE // resource.getpagesize())


def _huge_pages() -> Check:
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = text.partition("[")[2].partition("]")[0] or "unknown"
    return Check("huge pages", GOOD, f"transparent huge pages: {mode}")


def _denormals() -> Check:
    """How much longer a multiplication with denormal results takes, and whether they are flushed to zero."""
    if (torch.tensor([1e-30]) * 1e-10).item() == 0:
        return Check("denormals", GOOD, "they are flushed to zero: torch.set_flush_denormal(True)")
    slow = _product_seconds(1e-30) / _product_seconds(1.0)
    found = f"they are computed as IEEE 754 requires; a product with denormal results takes {slow:.1f} times as long"
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
        return Check("counters", GOOD, "cycles, instructions and cache misses can be counted")
    return Check("counters", GOOD, f"none: {found.why}", found.remedy)  # it costs no time, so it is no warning


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
    """The number of physical cores among those that this process may use."""
    topology = (f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in os.sched_getaffinity(0))
    siblings = {_read(path).strip() or path for path in topology}
    return len(siblings)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
