"""Advice: programs with one thing planted that costs time, and healthy ones of which nothing of the kind is said."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pellucid
from pellucid.kit.debug.check import Request
from pellucid.kit.profile.advice import MIN_SAVING, advise
from pellucid.kit.profile.measure import advised, program_of, take
from pellucid.kit.profile.request import profile_target
from pellucid.kit.profile.result import Event, KernelTime, Overhead, Process, Profile, PythonSide
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.registry import subject_of
from pellucid.machine import AVX2
from pellucid.native.build import default_toolchain
from pellucid.native.loader import default_pool_limit
from pellucid.native.runtime import flushed_denormals, pool_limit, pool_trim
from tests.small_models import build_small


def chain(x):
    for _ in range(12):
        x = 0.7 / (x + 1.1)
    return x


def divided(x, y):
    for _ in range(10):
        x = x / y
    return x


_calls = [0]


def recompiled(x):
    _calls[0] += 1
    return tagged(x, str(_calls[0]))


def tagged(x, tag):
    return x if tag == "never" else (x * 2).exp().sum()


def broken_loop(x):
    for _ in range(20):
        x = broken(x)
    return x


def broken_in_place(x):
    for number in range(4):
        x = torch.relu(x) + number
        torch._dynamo.graph_break()
    return x


def broken(x):
    x = x.exp()
    torch._dynamo.graph_break()
    return x * 0.5


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """What is freed goes back to the system at once: by the C library, and by the pool of results."""
    libc = ctypes.CDLL(None)
    trim, mmap = -1, -3
    libc.mallopt(mmap, 1 << 16)
    libc.mallopt(trim, 0)
    pool_limit(0)
    pool_trim()
    try:
        yield
    finally:
        pool_limit(default_pool_limit())
        libc.mallopt(mmap, 1 << 25)
        libc.mallopt(trim, 1 << 26)


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Planted:
    """line: a part of the place that is told, a file's name; empty for the whole process."""

    fn: Callable[..., Any]
    make: Callable[[], tuple[torch.Tensor, ...]]
    line: str = ""
    around: Callable[[], Any] = as_it_is
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


HERE = Path(__file__).name
PLANTED = {
    "oversubscription": Planted(chain, lambda: (torch.rand(1 << 20),), around=lambda: threads(8)),
    "denormals": Planted(divided, lambda: (torch.full((1 << 17,), 1e-39), torch.full((1 << 17,), 1.01)), HERE),
    "layout": Planted(lambda x: (x[:, :, 3] * 2 + 1).relu(), lambda: (torch.rand(512, 512, 16),), HERE),
    "scalar-kernel": Planted(
        chain,
        lambda: (torch.rand(1 << 18),),
        HERE,
        options={"pellucid": {"vectorize": False}, "inductor": {"cpp.simdlen": 1}},
    ),
    "allocator": Planted(
        lambda x, w: F.conv2d(x, w).relu(),
        # larger than what may lie free in the heap
        lambda: (torch.rand(1, 1, 1500, 1500), torch.rand(16, 1, 3, 3)),
        around=nothing_kept,
    ),
    "recompilation": Planted(recompiled, lambda: (torch.rand(64, 64),), HERE),
    "graph-break": Planted(broken_loop, lambda: (torch.rand(64, 64),), HERE),
}
KINDS = {*PLANTED, "openmp-runtimes", "page-faults"}
# What these cost depends on the machine and on who else uses it.
MEASURED = ("oversubscription", "denormals", "layout", "allocator")
BACKENDS = ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)]


def profiled(fn, args, backend="pellucid", options=None, kwargs=None) -> Profile:
    torch._dynamo.reset()
    case = Case.of(fn, args, kwargs or {})
    (found,) = take([program_of(case, subject_of(backend, options))], "model.py:make", budget=0.2)
    return found


@pytest.mark.sampled
@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "category", [pytest.param(name, marks=[pytest.mark.slow] * (name in MEASURED)) for name in PLANTED]
)
def test_what_is_planted_is_named_on_top(category, backend):
    planted = PLANTED[category]
    with planted.around():
        found = profiled(planted.fn, planted.make(), backend, planted.options.get(backend))
    assert found.advice, found
    first = found.advice[0]
    assert first.category == category, [(each.category, each.gain, each.evidence) for each in found.advice]
    assert first.gain > 1 / (1 - MIN_SAVING)
    assert any(planted.line in where for where in first.where) if planted.line else not first.where
    assert first.evidence and "pellucid profile model.py:make" in first.check
    assert first.what in " ".join(str(found).split()) or "\n" in str(found)


@pytest.mark.alone
def test_a_function_that_stays_python_because_its_loop_breaks_the_graph_is_named():
    """Dynamo leaves it to Python as a whole: no graph runs at all."""
    found = profiled(broken_in_place, (torch.rand(64, 64),))
    assert [each.category for each in found.advice] == ["graph-break"] and not found.kernels
    assert "graph_break" in found.advice[0].evidence and HERE in found.advice[0].where[0]


@pytest.mark.sampled
@pytest.mark.alone
def test_parameters_that_are_packed_at_each_call_are_named():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    found = profiled(model, (torch.randn(16, 1024),))
    assert [row.packed for row in found.kernels] == [1024 * 1024, 512 * 1024]
    (advice,) = (each for each in found.advice if each.category == "unfrozen")
    assert (
        advice.check.endswith("--option freeze=True")
        and "kernels that pack a parameter at each call: 2" in advice.evidence
    )
    frozen = profiled(model, (torch.randn(16, 1024),), options={"freeze": True})
    assert not any(row.packed for row in frozen.kernels)
    given = profiled(torch.nn.functional.linear, (torch.randn(16, 1024), torch.randn(512, 1024)))
    assert not any(row.packed for row in given.kernels), "an argument is no parameter"


@pytest.mark.sampled
@pytest.mark.alone
def test_a_second_openmp_runtime_is_named(tmp_path):
    """An empty library with the name of one that other packages bring, in a process of its own."""
    second = tmp_path / "libiomp5.so"
    compiler = default_toolchain().compiler
    subprocess.run([*compiler, "-shared", "-nostdlib", "-x", "c++", os.devnull, "-o", str(second)], check=True)
    (tmp_path / "model.py").write_text(
        f"import ctypes, torch\ndef make():\n    ctypes.CDLL({str(second)!r})\n"
        "    return (lambda x: x.exp().sum(0)), (torch.ones(64, 64),)\n"
    )
    found = profile_target(Request(f"{tmp_path / 'model.py'}:make"), budget=0.1)
    assert isinstance(found, Profile)
    assert found.advice[0].category == "openmp-runtimes" and str(second) in found.advice[0].evidence


def f32(*shape):
    return torch.randn(*shape)


def model(name):
    module, inputs = build_small(name)
    return module, (), inputs


HEALTHY = {
    "pointwise": lambda: (chain, (torch.rand(1 << 18),)),
    "softmax": lambda: (lambda x: x.softmax(-1), (f32(512, 512),)),
    "layer_norm": lambda: (lambda x: F.layer_norm(x, (256,)), (f32(1024, 256),)),
    "rms_norm": lambda: (
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
        (f32(512, 512), f32(512)),
    ),
    "sum_of_rows": lambda: (lambda x: x.sum(1), (f32(1024, 1024),)),
    "sum_of_columns": lambda: (lambda x: x.sum(0), (f32(1024, 1024),)),
    "sum_of_all": lambda: (lambda x: x.exp().sum(), (f32(1 << 19),)),
    "broadcast": lambda: (lambda x, y: (x + y).tanh(), (f32(512, 512), f32(512))),
    "product": lambda: (lambda x, y: x @ y, (f32(256, 256), f32(256, 256))),
    "linear_gelu": lambda: (lambda x, w, b: F.gelu(F.linear(x, w, b)), (f32(256, 256), f32(512, 256), f32(512))),
    "batched_product": lambda: (lambda x, y: torch.bmm(x, y).relu(), (f32(8, 64, 64), f32(8, 64, 64))),
    "attention": lambda: (F.scaled_dot_product_attention, (f32(1, 8, 128, 64), f32(1, 8, 128, 64), f32(1, 8, 128, 64))),
    "embedding": lambda: (lambda w, i: w[i] * 2 + 1, (f32(1000, 256), torch.randint(0, 1000, (512,)))),
    "pooling": lambda: (lambda x: F.avg_pool2d(x, 3, 1, 1).relu(), (f32(1, 64, 32, 32),)),
    "cross_entropy": lambda: (F.cross_entropy, (f32(256, 1000), torch.randint(0, 1000, (256,)))),
    "swiglu": lambda: (lambda x, y: F.silu(x) * y, (f32(512, 512), f32(512, 512))),
    "bert": lambda: model("bert"),
    "gpt2": lambda: model("gpt2"),
    "llama": lambda: model("llama"),
    "vit": lambda: model("vit"),
    "t5": lambda: model("t5"),
}
QUICK = ("pointwise", "sum_of_columns", "linear_gelu")


@pytest.mark.sampled
@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HEALTHY])
def test_nothing_of_the_kind_is_said_of_a_healthy_program(name, backend):
    fn, args, *kwargs = HEALTHY[name]()
    found = profiled(fn, args, backend, None, *kwargs)
    assert not [each for each in found.advice if each.category in KINDS]


# ------------------------------------------------------------------------------------------------ rules, one by one


def row(name="k", total=500.0, **about):
    made = {"kind": "kernel", "group": "element-wise and reductions", "symbol": name, "calls": 1, "microseconds": total}
    made |= {"spread": 0.0, "total_microseconds": total, "share": total / 1000, "user_lines": ("model.py:3",)}
    return KernelTime(name=name, **{**made, **about})


def advice_of(*rows, process=None, **about):
    whole = Profile(
        "pellucid", "model.py:make", 100, 1000.0, 0.01, 990.0, 1, 2, rows, Overhead(100.0, 10.0),
        process=process or Process(cores=2), **about,
    )  # fmt: skip
    return advise(whole, AVX2)


def test_what_gains_most_comes_first_and_what_gains_little_is_not_said():
    some = row(scalar="the plan says so", limit="memory", percent_of_limit=50.0)
    more = row("aten::sort", 300.0, kind="call", group="other operators", reason="no lowering", percent_of_limit=1.0)
    little = row("l", 10.0, scalar="the plan says so", limit="memory", percent_of_limit=1.0)
    first, second = advice_of(some, more, little)
    assert (first.category, second.category) == ("fallback", "scalar-kernel")
    assert second.gain == pytest.approx(1000 / 750, abs=1e-3) and second.where == ("k", "model.py:3")
    assert "takes 50% of the time at 50% of the memory limit, scalar because the plan says so" in second.evidence
    assert "no lowering" in first.evidence and first.check == "pellucid profile model.py:make"


def test_threads_that_wait_are_named_unless_other_processes_take_the_cores():
    waits = row(threads=2, imbalance=0.4)
    (found,) = advice_of(waits)
    assert found.category == "imbalance" and found.gain == pytest.approx(1000 / 800, abs=1e-3)
    assert not advice_of(waits, process=Process(cores=2, waited=0.5))


def test_guards_that_take_long_are_named():
    """As they do where a module has many parameters, and little to do."""
    (found,) = advice_of(python=PythonSide(1.1, 300.0, (), (), (), ""))
    assert found.category == "guards" and found.gain == pytest.approx(1000 / 850, abs=1e-3)
    assert "300 of 1000" in found.evidence and "compile_exported" in found.evidence
    assert not advice_of(python=PythonSide(1.1, 90.0, (), (), (), ""))


def test_cores_that_others_took_are_noted():
    profile = Profile(
        "pellucid", "t", 9, 1000.0, 0.0, None, 1, 2, (), Overhead(1.0, 1.0), process=Process(cores=2, waited=0.4)
    )
    assert "other processes took the cores for 40% of the time" in " ".join(advised(profile).notes)
    assert not advised(replace(profile, process=Process(cores=2, waited=0.05))).notes
    assert not advised(replace(profile, threads=8)).notes, "these are its own"


def test_cores_that_are_left_idle_are_named():
    (found,) = advice_of(row(total=800.0), process=Process(cores=4))
    assert found.category == "threads" and found.gain == pytest.approx(1000 / 600, abs=1e-3)
    assert found.check == "OMP_NUM_THREADS=4 pellucid profile model.py:make --threads 4"
    assert not advice_of(row(microseconds=AVX2.barrier * 1e-3, total=800.0), process=Process(cores=4))


def test_copies_and_slow_types_are_named():
    copy = row("clone_0", flops=0, fx_nodes=("clone", "clone_1"), bytes=4000)
    assert [each.category for each in advice_of(copy)] == ["layout"]
    assert not advice_of(row("gather_0", flops=0, fx_nodes=("index",)))
    assert not advice_of(row("copy_3", flops=0, fx_nodes=("copy_", "copy__1"))), "what the program changes in place"
    (double,) = advice_of(row(dtype="f64"))
    assert double.category == "dtype" and "f64" in double.evidence
    assert not advice_of(row(dtype="bf16")), "it moves half as much"
    (product,) = advice_of(row("aten::mm", kind="call", dtype="bf16", group="matrix products"))
    assert product.category == "dtype", "which the library has no fast product for"
    assert not advice_of(row(dtype="bf16", group="matrix products")), "a kernel multiplies as fast as in f32"


def test_kernels_that_do_little_are_named_together():
    (found,) = advice_of(row("a", 300.0, limit="overhead"), row("b", 200.0, limit="overhead"))
    assert found.category == "small-kernels" and found.where[0] == "a" and "take 510 of 1000" in found.evidence
    assert not advice_of(row("long", 500.0, limit="overhead", estimate_microseconds=1.0)), "it does more than is known"


def test_the_pages_of_a_program_that_maps_memory_itself_are_not_the_allocators():
    faulting = Process(cores=2, page_faults=200.0)
    assert [each.category for each in advice_of(process=faulting)] == ["page-faults"]
    (found,) = advice_of(process=replace(faulting, keeps_memory=False))
    assert found.category == "allocator" and found.check.startswith("MALLOC_")
    assert found.gain == pytest.approx(1000 / (1000 - 200 * AVX2.page * 1e-3), abs=1e-3)


def test_huge_pages_take_the_time_that_the_system_takes():
    """One fault of 2 MiB takes many times as long as one of 4 KiB."""
    assert not advice_of(process=Process(cores=2, page_faults=4.0)), "4 ordinary pages are nothing"
    (found,) = advice_of(process=Process(cores=2, page_faults=4.0, system=800.0))
    assert found.category == "page-faults" and "4 page faults in each call take 400 of 1000" in found.evidence
    assert not advice_of(process=Process(cores=2, system=800.0)), "the system does something else"


def test_a_block_is_checked_by_running_it_again():
    with pellucid.profile() as p:
        torch.ones(2)
    assert p.result.process.cores > 0
    made = Process(cores=2, recompilations=(Event("a guard failed", "model.py:7"),))
    profile = Profile("pellucid", "block", 1, 1000.0, 0.0, None, 1, 2, (), Overhead(900.0, 0.0), process=made)
    (found,) = advise(profile, AVX2)
    assert found.check.endswith("the same program with pellucid.profile()") and found.where == ("model.py:7",)


def test_denormal_numbers_count_as_zeros_in_all_threads_and_then_no_longer():
    x = torch.full((1 << 16,), 1e-39)
    assert (x * 1.0).count_nonzero() == x.numel()
    with flushed_denormals():
        assert (x * 1.0).count_nonzero() == 0
    assert (x * 1.0).count_nonzero() == x.numel()
