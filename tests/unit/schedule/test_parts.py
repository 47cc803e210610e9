"""Kernels that choose at each point between tensors: a kernel for each part, with the same results."""

from __future__ import annotations

import pytest
import torch

from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Kernel, Program
from pellucid.ir.parser import parse_program
from pellucid.ir.verify import verify_program
from pellucid.machine import AVX2
from pellucid.options import Options
from pellucid.schedule import schedule

CAT = """\
program {{
  buffer x: f32[{left}] input
  buffer y: f32[{right}] input
  buffer a: f32[{left}] temp
  buffer b: f32[{right}] temp
  buffer z: f32[{whole}] output
  inputs x, y

  kernel first(x: f32[{left}], a: f32[{left}]) {{
    axes i: {left}
    v: f32 = load x[i]
    w: f32 = exp v
    st: f32 = store a[i], w
  }}

  kernel second(y: f32[{right}], b: f32[{right}]) {{
    axes i: {right}
    v: f32 = load y[i]
    w: f32 = sqrt v
    st: f32 = store b[i], w
  }}

  kernel cat(a: f32[{left}], b: f32[{right}], z: f32[{whole}]) {{
    axes i: {rows}, j: {columns}
    k: i64 = index {position}
    e: i64 = const {end}
    c: bool = lt k, e
    d: bool = ge k, e
    v: f32 = load a[{of_a}] if c else 0.0
    w: f32 = load b[{of_b}] if d else 0.0
    u: f32 = where c, v, w
    st: f32 = store z[{columns}*i + j], u
  }}

  output view z ({rows}, {columns}) strides ({columns}, 1) offset 0
}}
"""


def columns(rows: int, left: int, right: int) -> Program:
    """`torch.cat([exp(x), sqrt(y)], 1)`."""
    places = {"position": "j", "of_a": f"{left}*i + j", "of_b": f"{right}*i + j - {left}"}
    sizes = {"left": rows * left, "right": rows * right, "whole": rows * (left + right)}
    return parse_program(CAT.format(rows=rows, columns=left + right, end=left, **places, **sizes))


def rows(left: int, right: int, columns: int) -> Program:
    """`torch.cat([exp(x), sqrt(y)], 0)`."""
    places = {"position": "i", "of_a": f"{columns}*i + j", "of_b": f"{columns}*i + j - {left * columns}"}
    sizes = {"left": left * columns, "right": right * columns, "whole": (left + right) * columns}
    return parse_program(CAT.format(rows=left + right, columns=columns, end=left, **places, **sizes))


@pytest.mark.parametrize(
    "before",
    [columns(256, 64, 64), columns(300, 17, 100), columns(4096, 16, 33), rows(100, 28, 96), rows(1, 127, 96)],
    ids=["equal", "unequal", "many-rows", "rows", "one-row"],
)
def test_parts_store_what_the_whole_kernel_did(before: Program) -> None:
    after, decisions = schedule(before, Options(), AVX2)
    verify_program(after)
    assert [each.ok for each in decisions if each.rule == "schedule.parts"] == [True]
    kernels = [node for node in after.nodes if isinstance(node, Kernel)]
    assert not any(load.mask for kernel in kernels for _, load in kernel.loads())
    assert {buffer.name for buffer in after.buffers} == {"x", "y", "z"}, "what is stored once need not be in memory"
    inputs = [torch.rand(buffer.numel.value) for buffer in before.buffers if buffer.role == "input"]
    (expected,), (result,) = run_program(before, inputs), run_program(after, inputs)
    assert torch.equal(result, expected)


def test_equal_parts_are_one_kernel() -> None:
    after, _ = schedule(columns(256, 64, 64), Options(), AVX2)
    assert len(after.nodes) == 1


SMALL = """\
program {
  buffer x: f32[6] input
  buffer y: f32[10] input
  buffer z: f32[16] output
  inputs x, y

  kernel cat(x: f32[6], y: f32[10], z: f32[16]) {
    axes i: 2, j: 8
    k: i64 = index j
    e: i64 = const 3
    c: bool = lt k, e
    d: bool = ge k, e
    v: f32 = load x[3*i + j] if c else 0.0
    w: f32 = load y[5*i + j - 3] if d else 0.0
    u: f32 = where c, v, w
    st: f32 = store z[8*i + j], u
  }

  output view z (2, 8) strides (8, 1) offset 0
}
"""


def test_a_small_kernel_stays_whole() -> None:
    """Starting another kernel costs more than a few masks."""
    after, decisions = schedule(parse_program(SMALL), Options(), AVX2)
    assert [each.ok for each in decisions if each.rule == "schedule.parts"] == [False]
    assert len(after.nodes) == 1


def test_a_buffer_that_others_write_too_is_left_alone() -> None:
    text = CAT.replace(
        "  output view",
        """\
  kernel again(x: f32[{left}], z: f32[{whole}]) {{
    axes i: {left}
    v: f32 = load x[i]
    st: f32 = store z[i], v
  }}

  output view""",
    )
    places = {"position": "j", "of_a": "64*i + j", "of_b": "64*i + j - 64"}
    before = parse_program(text.format(rows=256, columns=128, end=64, left=16384, right=16384, whole=32768, **places))
    _, decisions = schedule(before, Options(), AVX2)
    assert not [each for each in decisions if each.rule == "schedule.parts"]
