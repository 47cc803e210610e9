"""What binds a step on a machine, how long it should take, and where the rest of a slower one goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pellucid.kit.profile.limits import limit_of, why_below
from pellucid.kit.subjects.facts import StepFacts
from pellucid.machine import AVX2, Part, Work, time
from tests.kit.facts import facts_of


def test_what_binds_a_step_and_how_long_it_should_take():
    """By hand, with the figures of the reference."""
    moving = StepFacts("g", "k", "k", "kernel", loaded=10**9, stored=0, flops=10, dtype="f32", threads=2)
    found = limit_of(moving, AVX2)
    assert found is not None and found.limit == "memory"
    whole = 10**9 / AVX2.memory.read.all
    assert 0.95 * whole < found.bound < whole, "caches may hold some of it"
    assert found.nanoseconds == pytest.approx(whole + AVX2.call + AVX2.barrier)
    product = StepFacts("g", "mm", "mm", "product", loaded=10**6, stored=0, flops=10**9, dtype="f32", threads=2)
    found = limit_of(product, AVX2)
    assert found is not None and found.limit == "compute" and found.bound == pytest.approx(10**9 / AVX2.flops.f32.all)
    assert found.nanoseconds == pytest.approx(10**9 / AVX2.product.f32.all + AVX2.dispatch)
    small = limit_of(StepFacts("g", "k", "k", "kernel", loaded=4, stored=4, flops=1, threads=1), AVX2)
    assert small is not None and small.limit == "overhead"
    assert limit_of(StepFacts("g", "k", "k", "kernel"), AVX2) is None


def rest_of(facts: StepFacts, nanoseconds: float, imbalance: float = 0.0) -> tuple[str, ...]:
    limit = limit_of(facts, AVX2)
    assert limit is not None
    return why_below(facts, limit, nanoseconds, imbalance, AVX2)


def test_a_step_below_its_limit_says_where_the_rest_goes():
    """By hand: 10**9 operations at the peak are the limit of all of these."""
    base = StepFacts("g", "k", "k", "kernel", loaded=4096, stored=0, flops=10**9, dtype="f32", threads=2)
    peak = 10**9 / AVX2.flops.f32.all
    assert rest_of(base, peak / 0.71) == ()
    assert rest_of(base, 2 * peak) == ("50% work that is not modelled, interference",)
    assert rest_of(base, 2 * peak, 0.2) == (
        "20% waiting for its slowest thread",
        "30% work that is not modelled, interference",
    )
    many = replace(base, instructions=1.5 * peak * 2 * AVX2.instructions)
    assert rest_of(many, 1.55 * peak) == ("32% issuing vector instructions",)
    assert rest_of(many, 1.55 * peak, 0.3) == (
        "32% issuing vector instructions",
        "3% waiting for its slowest thread",
    )
    assert rest_of(replace(many, scalar="a reason"), 1.55 * peak) == ("32% computing without vectors (a reason)",)
    packed = replace(base, uncounted=("packing an operand",), scalar="a reason")
    assert rest_of(packed, 2 * peak) == ("50% packing an operand, computing without vectors (a reason), interference",)
    size = int(peak / 2 * AVX2.memory.read.all)  # half as long as the operations take, if it comes from memory
    far = replace(base, loaded=size, touched=size, parts=(Part(size, 0, 1, 10**9),))
    assert rest_of(far, 1.5 * peak) == ("33% fetching from memory",)


def test_bytes_apart_and_libraries_say_where_the_rest_goes():
    size = 10**9
    apart = StepFacts("g", "k", "k", "kernel", loaded=size, stored=0, touched=size, fetched=2 * size, threads=2)
    limit = limit_of(apart, AVX2)
    assert limit is not None
    assert rest_of(apart, 2 * limit.bound)[0] == "50% fetching partly used cache lines"
    call = StepFacts("g", "mm", "mm", "product", loaded=8, stored=8, flops=10**9, dtype="f32")
    reached = 10**9 / AVX2.product.f32.of(torch.get_num_threads())
    *_, slower, rest = rest_of(call, 4 * reached)
    assert "the library being slower than the peak" in slower and rest.endswith("work of the library, interference")


def test_contractions_say_what_nothing_counts():
    image = torch.randn(1, 64, 28, 28).contiguous(memory_format=torch.channels_last)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
    (found,) = facts_of(layer, image)
    assert found.counts_as == "convolution"
    assert found.uncounted == ("packing a parameter (`freeze` avoids it)", "transforming input and output tiles")
    *_, found = facts_of(lambda x, w: F.conv2d(x, w, stride=2), image, layer.weight.detach())
    assert found.uncounted == ("packing an operand", "copying windows")
    (found,) = facts_of(torch.mm, torch.randn(64, 64), torch.randn(64, 64))
    assert (found.counts_as, found.uncounted) == ("product", ("packing an operand",))
    for few in (
        facts_of(torch.nn.Linear(64, 3), torch.randn(500, 64)),
        facts_of(torch.nn.Linear(64, 70), torch.randn(3, 64)),
    ):
        assert [(each.uncounted, each.packed) for each in few] == [((), 0)], "dot products pack nothing"
    (found,) = facts_of(lambda x: x + 1, torch.randn(48, 80))
    assert found.uncounted == ()


def parts_of(fn, *args):
    """By step: what each buffer's bytes are read or written at, and what was touched since it was touched last."""
    return [[(p.read, p.written, p.runs, p.distance) for p in step.parts] for step in facts_of(fn, *args)]


def test_what_was_touched_before_says_where_bytes_lie():
    """x @ w reads both as the run before left them: x after w and both results, which it is one of."""
    n = 64
    size = 4 * n * n

    def fn(x, w):
        return torch.sort(x @ w)[0]  # which no kernel does

    product, *_ = parts_of(fn, torch.randn(n, n), torch.randn(n, n))
    assert [part[:3] for part in product] == [(size, 0, 1), (size, 0, 1), (0, size, 1)]
    read, _, written = product
    assert 3 * size <= read[3] <= 6 * size, "x, w and the results"
    assert written[3] == 3 * size, "a temporary lies where others have just been"


def test_rows_that_values_choose_begin_anew():
    """Of a table in memory each of them waits for its first line."""
    rows, width = 32, 16
    table, index = torch.randn(1000, width), torch.randint(0, 1000, (rows,))
    (parts,) = parts_of(lambda t, i: t[i] * 2, table, index)
    assert (4 * rows * width, 0, rows) in [part[:3] for part in parts]
    (parts,) = parts_of(lambda t, i: t[i] * 2, torch.randn(2, width), torch.randint(0, 2, (rows,)))
    assert (4 * 2 * width, 0, 2) in [part[:3] for part in parts], "two rows are two lines"
    far = Part(4 * rows * width, 0, rows, distance=10**9)
    work = Work(far.read, 0, far.read, 0, parts=(far,))
    found = time(work, AVX2)
    assert found.level == "l1" and found.bound == pytest.approx(max(found.moving, AVX2.call))
    streamed = far.read / AVX2.memory.read.one
    assert found.nanoseconds == pytest.approx(rows * AVX2.latency + streamed + AVX2.call)
