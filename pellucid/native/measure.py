"""Measure the machine: bandwidths, peaks and the cost of small things, in about two seconds.

Each figure is the median of several rounds. In a round every figure is measured once, so that what disturbs the
machine for a moment disturbs one measurement of each figure, and not all of one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median, quantiles
from time import perf_counter_ns

import torch

from pellucid.capture.torch_compat import real_tensors
from pellucid.machine import Machine
from pellucid.machine.model import make_machine
from pellucid.native.build import default_toolchain
from pellucid.native.cpu import available_memory, cpu, scheduled, usable_cores
from pellucid.native.instance import ArenaSlot, KernelCall, OutCall, TensorView
from pellucid.native.library import open_library
from pellucid.native.loader import built
from pellucid.native.runtime import Instance

ROUNDS = 9
_PASS_NS = 400_000
"""Nanoseconds that a measurement should take at the least, so that starting it does not count."""

_WAITED, _SPREAD = 0.03, 0.25
"""Of a steady measurement: the share of the time without a core; the spread that half of the figures may have."""

_LEAST_MEMORY, _MOST_MEMORY = 64 << 20, 1 << 30
_PAGES = 4096
_CALLS = 64
_LOADS = 2000

Measure = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """waited: the share of the time in which the threads that measured were ready to run and had no core."""

    machine: Machine
    waited: float

    @property
    def steady(self) -> bool:
        """Whether little disturbed the measurements: else they tell more of other programs than of the machine."""
        return self.waited <= _WAITED and median(self.machine.spread.values()) <= _SPREAD


def measure() -> Measured:
    """This machine, as far as this process may use it. Raises ToolchainError where nothing can be compiled."""
    caches = {name: size for name, size in (("l1", cpu().l1), ("l2", cpu().l2), ("l3", cpu().l3)) if size}
    caches = caches or {"l2": 1 << 20}
    with real_tensors(), _threads(torch.get_num_threads()):
        measures = _measures(caches)
        for each in measures.values():
            each()  # touches memory, wakes threads, loads libraries
        ran, waited = scheduled()
        rounds = [{name: each() for name, each in measures.items()} for _ in range(ROUNDS)]
        ran, waited = (after - before for after, before in zip(scheduled(), (ran, waited), strict=True))
    samples = {name: [each[name] for each in rounds] for name in measures}
    figures = {name: median(values) for name, values in samples.items()}
    spread = {name: _spread(values) for name, values in samples.items()}
    _derive(figures, spread, caches)
    machine = make_machine(cpu().name, default_toolchain().isa, usable_cores(), caches, figures, dict(cpu().ways))
    return Measured(replace(machine, spread=spread), waited / max(ran + waited, 1))


def _spread(values: list[float]) -> float:
    low, _, high = quantiles(values, n=4)
    return (high - low) / median(values)


def _derive(figures: dict[str, float], spread: dict[str, float], caches: dict[str, int]) -> None:
    """What follows from what was measured: rates of writing, and peaks that are at least what a library reaches."""
    for level in (*caches, "memory"):
        for who in ("one", "all"):
            read, copied = figures[f"{level}.read.{who}"], figures.pop(f"{level}.copy.{who}")
            # Copying that hides behind reading: then a write costs what is left, a tenth of a read at the least.
            figures[f"{level}.write.{who}"] = 1 / max(2 / copied - 1 / read, 0.1 / read)
            spread[f"{level}.write.{who}"] = spread.pop(f"{level}.copy.{who}")
    for dtype in ("f32", "f64", "bf16", "f16"):
        for who in ("one", "all"):
            peak, reached = f"flops.{dtype}.{who}", f"product.{dtype}.{who}"
            figures[peak] = max(figures[peak], figures[reached])


def _measures(caches: dict[str, int]) -> dict[str, Measure]:
    """How each figure is measured, by name."""
    native, count = _native(), torch.get_num_threads()
    measures: dict[str, Measure] = {}
    memory = _memory(max(caches.values()))
    held = _held(caches, count)
    for level, size in (*caches.items(), ("memory", 0)):
        shared = level in ("l3", "memory")
        for who, threads in (("one", 1), ("all", 0)):
            nbytes = held[level] * (count if who == "all" and not shared else 1) if size else memory.nbytes
            for what, function in (("read", native.pellucid_read), ("copy", native.pellucid_copy)):
                measures[f"{level}.{what}.{who}"] = _bandwidth(function, memory, min(nbytes, memory.nbytes), threads)
    for dtype, kind in (("f32", 4), ("f64", 8), ("bf16", 2), ("f16", 4)):  # kernels compute f16 in f32
        for who, threads, cores in (("one", 1, 1), ("all", 0, count)):
            measures[f"flops.{dtype}.{who}"] = _flops(native.pellucid_flops, kind, threads, cores)
    for name, dtype in (("f32", torch.float32), ("f64", torch.float64), ("bf16", torch.bfloat16), ("f16", torch.half)):
        for who, cores in (("one", 1), ("all", count)):
            measures[f"product.{name}.{who}"] = _product(dtype, cores)
            measures[f"attention.{name}.{who}"] = _attention(dtype, cores)
    for who, cores in (("one", 1), ("all", count)):
        measures[f"convolution.{who}"] = _convolution(cores)
    measures["latency"] = lambda: native.pellucid_latency(memory.data_ptr(), memory.nbytes, _LOADS)
    measures["barrier"] = lambda: native.pellucid_barrier(100)
    measures["call"] = _call(ctypes.cast(native.pellucid_nothing, ctypes.c_void_p).value or 0)
    measures["dispatch"] = _dispatch()
    measures["page"] = lambda: native.pellucid_page(_PAGES)
    return measures


def _held(caches: dict[str, int], threads: int) -> dict[str, int]:
    """The bytes to measure each cache with: half of it; of the last, which others may use too, no more than it takes
    to leave the nearer ones.
    """
    halves = {level: size // 2 for level, size in caches.items()}
    if "l3" in halves and "l2" in halves:
        halves["l3"] = min(halves["l3"], 4 * threads * caches["l2"])
    return halves


@lru_cache(maxsize=1)
def _native() -> ctypes.CDLL:
    """The loops in measure.cpp, compiled like kernels, but that multiply-adds are made."""
    path = built(
        "measure",
        ("measure.cpp", "openmp_abi.h"),
        lambda toolchain: (*toolchain.flags, "-ffp-contract=fast"),
        "what measures the machine does not compile",
        "try another compiler: set CXX",
    )
    lib = open_library(path, ctypes.CDLL)
    for function in (lib.pellucid_read, lib.pellucid_copy):
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    lib.pellucid_latency.restype = ctypes.c_double
    lib.pellucid_latency.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    lib.pellucid_flops.restype = ctypes.c_double
    lib.pellucid_flops.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    for function in (lib.pellucid_barrier, lib.pellucid_page):
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_int64]
    return lib


def _memory(last_cache: int) -> torch.Tensor:
    """Memory that no cache holds, as far as there is so much of it."""
    nbytes = min(max(4 * last_cache, _LEAST_MEMORY), _MOST_MEMORY, available_memory() // 4)
    return torch.zeros(nbytes // 4096 * 4096, dtype=torch.uint8)


def _bandwidth(function: Callable[..., float], memory: torch.Tensor, nbytes: int, threads: int) -> Measure:
    nbytes = nbytes // 4096 * 4096
    repeats = max(1, _PASS_NS * 100 // nbytes)
    return lambda: nbytes / function(memory.data_ptr(), nbytes, repeats, threads)


def _flops(function: Callable[..., float], kind: int, threads: int, cores: int) -> Measure:
    return lambda: cores * function(kind, _PASS_NS // 2, threads)


def _product(dtype: torch.dtype, cores: int) -> Measure:
    size = 512 if dtype is torch.float32 else 256
    left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return _library(lambda: torch.mm(left, right, out=out), 2 * size**3, cores)


def _convolution(cores: int) -> Measure:
    channels, side = 128, 28
    x = torch.ones(1, channels, side, side).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(channels, channels, 1, 1).contiguous(memory_format=torch.channels_last)
    return _library(lambda: torch.conv2d(x, weight), 2 * channels**2 * side**2, cores)


def _attention(dtype: torch.dtype, cores: int) -> Measure:
    heads, length, size = 8, 128, 64
    query, key, value = (torch.ones(1, heads, length, size, dtype=dtype) for _ in range(3))
    work = 4 * heads * length**2 * size
    return _library(lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value), work, cores)


def _library(function: Callable[[], object], work: int, cores: int) -> Measure:
    def run() -> float:
        with _threads(cores), torch.inference_mode():
            function()
            start = perf_counter_ns()
            function()
            return work / (perf_counter_ns() - start)

    return run


def _call(address: int) -> Measure:
    """Of a kernel in a plan: what a plan of many takes beyond one of one."""
    return _per_call(lambda count: [KernelCall(address, (), (), 1, 1, "nothing")] * count)


def _dispatch() -> Measure:
    one = TensorView(0, (1,), (1,), 0, torch.float32)
    call = OutCall(torch.ops.aten.neg.out, (one,), (("out", one),), "neg")
    return _per_call(lambda count: [call] * count)


def _per_call(calls: Callable[[int], list[KernelCall | OutCall]]) -> Measure:
    few, many = (Instance([ArenaSlot(0)], calls(count), [], inputs=0, arena=64).run for count in (1, 1 + _CALLS))

    def taken(run: Callable[[list[object]], object]) -> float:
        start = perf_counter_ns()
        for _ in range(20):
            run([])
        return (perf_counter_ns() - start) / 20

    return lambda: max(taken(many) - taken(few), 1.0) / _CALLS


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """With so many threads of torch's; as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
