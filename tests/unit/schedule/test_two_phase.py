"""Reductions in two phases: the same results as in one, whatever the kernel does besides, and a reason when not."""

from __future__ import annotations

import math

import pytest
import torch

from pellucid.ir.index import const
from pellucid.ir.interp import TORCH_DTYPES, run_kernel, size_of
from pellucid.ir.nodes import Kernel
from pellucid.ir.parser import parse_kernel
from pellucid.ir.verify_kernel import verify_kernel
from pellucid.options import Options
from pellucid.schedule.cleanup import clean_kernel
from pellucid.schedule.cut import Cut, choose_cuts
from pellucid.schedule.two_phase import split_kernel

SUM = """\
kernel total(x: f32[{n}], o: f32[1]) {{
  axes i: {n}
  a: f32 = load x[i]
  s: f32 = sum a over i
  st: f32 = store o[0], s
}}
"""

SOFTMAX = """\
kernel softmax(x: f32[300], o: f32[300], twice: f32[300]) {
  axes i: 3, j: 100
  a: f32 = load x[100*i + j]
  m: f32 = max a over j
  d: f32 = sub a, m
  e: f32 = exp d
  z: f32 = sum e over j
  q: f32 = div e, z
  b: f32 = add a, a
  st: f32 = store o[100*i + j], q
  st2: f32 = store twice[100*i + j], b
}
"""

POSITIONS = """\
kernel positions(x: f32[360], o: i64[3], p: i64[3], v: f32[3]) {
  axes k: 3, i: 10, j: 12
  a: f32 = load x[12*i + 120*k + j]
  m: i64 = argmax a over i, j
  n: i64 = argmin a over i, j
  g: f32 = max a over i, j
  st: i64 = store o[k], m
  st2: i64 = store p[k], n
  st3: f32 = store v[k], g
}
"""

# The running mean is updated in place while it is still needed, the gather has an index that is checked.
IN_PLACE = """\
kernel in_place(x: f32[600], mean: f32[6], at: i64[100], w: f32[9], o: f32[600]) {
  axes i: 100, j: 6
  a: f32 = load x[6*i + j]
  k: i64 = load at[i]
  c: i64 = check k, 9
  f: f32 = load w[[c]]
  t: f32 = mul a, f
  s: f32 = sum t over i
  old: f32 = load mean[j]
  new: f32 = add old, s
  d: f32 = sub a, old
  st: f32 = store mean[j], new
  st2: f32 = store o[6*i + j], d
}
"""

LOGIC = """\
kernel logic(x: f32[300], o: bool[3], p: bool[3], q: f32[3]) {
  axes i: 3, j: 100
  a: f32 = load x[100*i + j]
  zero: f32 = const 0.0
  c: bool = gt a, zero
  s: bool = any c over j
  t: bool = all c over j
  u: f32 = prod a over j
  st: bool = store o[i], s
  st2: bool = store p[i], t
  st3: f32 = store q[i], u
}
"""


def run(kernels: tuple[Kernel, ...], buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given = {name: tensor.clone() for name, tensor in buffers.items()}
    for kernel in kernels:
        for param in kernel.params:
            if param.name not in given:
                given[param.name] = torch.zeros(int(param.numel.value or 0), dtype=TORCH_DTYPES[param.dtype])
        run_kernel(kernel, given, {})
    return given


@pytest.mark.parametrize("text", [SOFTMAX, POSITIONS, IN_PLACE, LOGIC, SUM.format(n=1000)])
@pytest.mark.parametrize("exact", [True, False])
def test_two_phases_compute_the_same(text: str, exact: bool) -> None:
    kernel = parse_kernel(text)
    axis = kernel.reduced[0]
    extent = int(kernel.ranges[axis].value or 0)
    size = extent // 5 if exact else extent // 5 + 1
    kernels, made = split_kernel(kernel, [Cut(axis, const(-(-extent // size)), const(size), exact)])
    kernels = tuple(clean_kernel(each) for each in kernels)
    for each in kernels:
        verify_kernel(each)
    assert len(kernels) >= 2 and made
    generator = torch.Generator().manual_seed(0)
    buffers = {
        param.name: torch.randint(-9, 9, (int(param.numel.value or 0),), generator=generator).to(
            TORCH_DTYPES[param.dtype]
        )
        for param in kernel.params
    }
    once, twice = run((kernel,), buffers), run(kernels, buffers)
    for name in buffers:
        torch.testing.assert_close(twice[name], once[name])


def test_points_past_the_end_do_not_count() -> None:
    """The best of a chunk that holds only -inf is a real element, and NaN wins."""
    kernel = parse_kernel(POSITIONS)
    kernels, _ = split_kernel(kernel, [Cut("i", const(4), const(3), False)])
    x = torch.full((3, 120), -torch.inf)
    x[1, 77] = torch.nan
    x[2, 30] = 5
    buffers = {"x": x.flatten(), "o": torch.zeros(3).long(), "p": torch.zeros(3).long(), "v": torch.zeros(3)}
    result = run(kernels, buffers)
    assert result["o"].tolist() == [0, 77, 30] and result["p"].tolist() == [0, 77, 0]
    assert result["v"][0] == -math.inf and result["v"][1].isnan()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SUM.format(n=1000), "little work"),
        (SUM.format(n=10_000_000), "too few for all threads"),
        (SUM.format(n=9_999_991), "too few for all threads"),
        (
            "kernel k(x: f32[4194304], o: f32[4096]) {\n  axes i: 4096, j: 1024\n  a: f32 = load x[1024*i + j]\n"
            "  s: f32 = sum a over j\n  st: f32 = store o[i], s\n}\n",
            "keep the threads busy",
        ),
        (
            "kernel k<s0>(x: f32[0], o: f32[0]) {\n  axes i: 0, j: s0\n  a: f32 = load x[s0*i + j]\n"
            "  s: f32 = sum a over j\n  st: f32 = store o[i], s\n}\n",
            "there are no points",
        ),
    ],
)
def test_the_choice_has_a_reason(text: str, why: str) -> None:
    cuts, decision = choose_cuts(parse_kernel(text), Options())
    assert bool(cuts) == decision.ok and why in decision.why


def test_chunks_are_equal_where_they_can_be() -> None:
    (cut,), _ = choose_cuts(parse_kernel(SUM.format(n=1 << 22)), Options())
    assert cut.exact and cut.count * cut.size == const(1 << 22)
    (cut,), _ = choose_cuts(parse_kernel(SUM.format(n=9_999_991)), Options())
    assert not cut.exact


def test_a_sum_of_squares_is_no_matrix_product() -> None:
    """Nor is a dot product: they are as little parallel as any other sum."""
    text = SUM.format(n=1 << 22)
    squares = text.replace("  s: f32 = sum a over", "  b: f32 = mul a, a\n  s: f32 = sum b over")
    assert squares != text
    (cut,), _ = choose_cuts(parse_kernel(squares), Options())
    assert cut.exact


@pytest.mark.parametrize("lines", [0, 1, 10, 5000, 1 << 22])
def test_chunks_of_an_unknown_axis_are_even_and_none_is_longer_than_the_axis(lines: int) -> None:
    """Chunks of a size for a guess would be masked but for their first points, and yet be walked over."""
    text = SUM.format(n="9*s0 - 2700").replace("total(", "total<s0>(")
    cuts, _ = choose_cuts(parse_kernel(text), Options())
    (cut,) = cuts
    size, count = (size_of(each, {"s0": 300 + lines}) for each in (cut.size, cut.count))
    assert size * max(count - 1, 0) < max(1, 9 * lines) <= max(1, size * count)
    assert 1 <= size <= max(1, 9 * lines)
