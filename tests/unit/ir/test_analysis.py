"""Facts about nodes that several stages ask for."""

from __future__ import annotations

import pytest
import torch

from pellucid.ir.analysis import depth_of, reads, writes
from pellucid.ir.nodes import Extern
from pellucid.ir.ops import JOINS, OPS, REDUCTIONS, identity_of
from pellucid.ir.parser import parse_kernel, parse_program
from pellucid.ir.types import TORCH_DTYPES, DType

SOFTMAX = """
kernel softmax(x: f32[24576], o: f32[24576]) {
  axes i: 48, j: 512
  a: f32 = load x[512*i + j]
  m: f32 = max a over j
  b: f32 = sub a, m
  e: f32 = exp b
  z: f32 = sum e over j
  q: f32 = div e, z
  st: f32 = store o[512*i + j], q
}
"""


def test_depth_counts_nested_reductions() -> None:
    depth = depth_of(parse_kernel(SOFTMAX))
    assert depth == {"a": 0, "m": 1, "b": 1, "e": 1, "z": 2, "q": 2, "st": 2}


def test_what_a_call_reads_and_writes_each_once() -> None:
    program = parse_program("""
program {
  buffer x: f32[4] input
  buffer y: f32[4] input
  buffer o: f32[4] output
  inputs x, y
  extern f = test::f {
    arg (view y (4,) strides (1,) offset 0, view x (4,) strides (1,) offset 0)
    kwarg z = view y (4,) strides (1,) offset 0
    output view o (4,) strides (1,) offset 0
    mutates x
  }
  output view o (4,) strides (1,) offset 0
}""")
    (call,) = program.nodes
    assert isinstance(call, Extern)
    assert reads(call) == ("y", "x") and writes(call) == ("o", "x")


@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.I64, DType.I8, DType.U8, DType.BOOL])
@pytest.mark.parametrize("join", [*JOINS, *(row.combine for row in REDUCTIONS.values() if "bitwise" in row.combine)])
def test_an_identity_changes_nothing(join: str, dtype: DType) -> None:
    if "bitwise" in join and dtype is not DType.BOOL:
        return  # of truth values only
    numbers = [False, True] if dtype is DType.BOOL else [0, 1, 5]
    if not dtype.is_float:
        numbers += [] if dtype is DType.BOOL else dtype.limits
    else:
        numbers += [float("inf"), -float("inf"), -2.5]
    values = torch.tensor(numbers, dtype=TORCH_DTYPES[dtype])
    identity = torch.full_like(values, identity_of(join, dtype))
    assert torch.equal(OPS[join].evaluate(values, identity), values)
