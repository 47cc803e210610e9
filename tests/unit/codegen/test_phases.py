"""Kernels of images compute the same in phases and in pieces of lines."""

from __future__ import annotations

import pytest
import torch

from pellucid.codegen.phases import in_phases, in_pieces
from pellucid.ir.index import ONE
from pellucid.ir.interp import run_kernel
from pellucid.ir.nodes import Kernel
from pellucid.ir.parser import parse_kernel
from pellucid.ir.verify_kernel import verify_kernel

DILATED = """\
kernel dilated(x: f32[480], w: f32[9], o: f32[480]) {
  axes i: 20, j: 24, s: 3, t: 3
  line: i64 = index 2*s + i - 2
  pixel: i64 = index 2*t + j - 2
  zero: i64 = const 0
  lines: i64 = const 20
  pixels: i64 = const 24
  a: bool = ge line, zero
  b: bool = lt line, lines
  c: bool = ge pixel, zero
  d: bool = lt pixel, pixels
  ab: bool = bitwise_and a, b
  cd: bool = bitwise_and c, d
  inside: bool = bitwise_and ab, cd
  l: f32 = load x[48*s + 24*i + 2*t + j - 50] if inside else 0
  r: f32 = load w[3*s + t]
  p: f32 = mul l, r
  v: f32 = sum p over s, t
  st: f32 = store o[24*i + j], v
}
"""


def assert_same_results(*kernels: Kernel) -> None:
    results = []
    for each in kernels:
        verify_kernel(each)
        buffers = {"x": torch.arange(480.0), "w": torch.arange(9.0), "o": torch.zeros(480)}
        run_kernel(each, buffers, {})
        results.append(buffers["o"])
    assert results[0].count_nonzero() > 400
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_phases_compute_the_same() -> None:
    kernel = parse_kernel(DILATED)
    split = in_phases(kernel, ("i", "j"), 2)
    assert split is not None
    assert [(axis.name, axis.extent.value) for axis in split.space] == [
        ("i_phase", 2), ("i", 10), ("j_phase", 2), ("j", 12), ("s", 3), ("t", 3)
    ]  # fmt: skip
    assert_same_results(kernel, split)
    (load,) = (load for _, load in split.loads() if load.buffer == "x")
    assert load.index.coefficient("i") == load.index.coefficient("s")
    assert load.index.coefficient("j") == load.index.coefficient("t")


@pytest.mark.parametrize("count", [2, 3, 24])
def test_pieces_compute_the_same(count: int) -> None:
    kernel = parse_kernel(DILATED)
    split = in_pieces(kernel, "j", count)
    assert [(axis.name, axis.extent.value) for axis in split.space] == [
        ("i", 20), ("j_piece", count), ("j", 24 // count), ("s", 3), ("t", 3)
    ]  # fmt: skip
    assert_same_results(kernel, split)
    (load,) = (load for _, load in split.loads() if load.buffer == "x")
    assert load.index.coefficient("j") == ONE


@pytest.mark.parametrize("count", [3, 5, 16, 48])
def test_phases_of_different_sizes_are_none(count: int) -> None:
    assert in_phases(parse_kernel(DILATED), ("i", "j"), count) is None
