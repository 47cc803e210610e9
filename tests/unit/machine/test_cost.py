"""Bytes, operations and nanoseconds of kernels, against counts by hand."""

from __future__ import annotations

import pytest

from pellucid.ir.index import floordiv, sym, var
from pellucid.ir.parser import parse_kernel
from pellucid.ir.traffic import traffic
from pellucid.ir.types import DType
from pellucid.machine import AVX2, Work, kernel_work, time
from pellucid.machine.work import estimate
from tests.golden.codegen_cases import CASES

# Each kernel with the bytes that it reads and writes, the size of what it touches, and its floating point operations.
KERNELS = {
    "pointwise": ((2 * 16384 * 512 + 3 * 512) * 4, 16384 * 512 * 4, 4 * 16384 * 512),
    "softmax": (48 * 512 * 4, 48 * 512 * 4, 5 * 48 * 512),
    "column_sum": (4096 * 1024 * 4, 1024 * 4, 4096 * 1024),
    "embedding": (100 * 8 + 23040 * 4, 76800 * 4, 0),
    "bytes": (2000, 1000, 0),
    "transposed": (60000 * (2 + 4), 60000 * 4, 60000),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_move_and_compute_what_a_count_by_hand_says(name: str) -> None:
    work = kernel_work(parse_kernel(CASES[name]), 0)
    assert (work.read, work.written, work.flops) == KERNELS[name]


def test_sizes_are_those_of_the_call() -> None:
    kernel = parse_kernel(CASES["contiguous_symbolic"])
    sizes = {"n": 10, "m": 7}
    work = kernel_work(kernel, 0, lambda size: size.evaluate(lambda atom: sizes[atom.name]))  # type: ignore[union-attr]
    assert (work.read, work.written, work.flops) == (70 * 2, 70 * 2, 2 * 70)


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_counts_what_is_counted_exactly(name: str) -> None:
    """Windows and values as indices aside, of which the closed form counts the most that can be."""
    kernel = parse_kernel(CASES[name])
    exact, closed = traffic(kernel, estimate), kernel_work(kernel, 0)
    assert closed.flops == exact.flops
    assert closed.read >= sum(exact.loaded.values()) and closed.written >= sum(exact.stored.values())


def test_the_longer_of_moving_and_computing_counts_and_says_what_binds() -> None:
    memory = time(Work(10**9, 0, 10**9, flops=10**6), AVX2, threads=2)
    assert memory.limit == "memory" and memory.nanoseconds == pytest.approx(10**9 / AVX2.memory.read.all, rel=1e-3)
    cached = time(Work(10**5, 10**5, 2 * 10**5, flops=10**4), AVX2)
    assert cached.limit == "l2"
    near, far = (10**5 / level.read.one + 10**5 / level.write.one for level in AVX2.levels[:2])
    in_l1 = AVX2.levels[0].size / (2 * 10**5)
    assert cached.moving == pytest.approx(far)
    assert cached.bound == pytest.approx(in_l1 * near + (1 - in_l1) * far), "what the nearest level holds stays there"
    computed = time(Work(10**5, 10**5, 2 * 10**5, flops=10**9, kind="product"), AVX2, threads=2)
    assert computed.limit == "compute"
    assert computed.bound == pytest.approx(10**9 / AVX2.flops.f32.all)
    assert computed.nanoseconds == pytest.approx(10**9 / AVX2.product.f32.all + AVX2.dispatch), "the library's own rate"
    assert time(Work(32, 32, 64, 8, steps=1), AVX2, threads=2).limit == "overhead"
    narrow = time(Work(0, 0, 0, flops=10**9, dtype=DType.F64, kind="product"), AVX2)
    assert narrow.nanoseconds > 2 * 10**9 / AVX2.product.f32.one, "doubles are slower"


def test_what_is_known_at_the_call_alone_is_not_nothing() -> None:
    """Of 256 samples, 320 to a token, there is a token, and what follows of it."""
    length, tokens = sym("s0"), floordiv(sym("s0"), 320)
    assert estimate(length) == 256 and estimate(tokens) == 1 and estimate(320 * tokens) == 320
    assert estimate(floordiv(tokens, 2) + 3) == 4 and estimate(tokens - 1) == 1 and estimate(length - 300) == 1
    assert estimate(floordiv(var("i0"), 4)) == 0 and estimate(-8 * length) == -2048
