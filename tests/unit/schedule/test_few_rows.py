"""Rows that are summed side by side: the same sums, and where weights are computed from less."""

from __future__ import annotations

import pytest
import torch

from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Kernel
from pellucid.ir.parser import parse_program
from pellucid.ir.verify import verify_program
from pellucid.schedule.few_rows import MAX_ROWS, sum_rows_together

PRODUCT = """\
program {{
  buffer x: f32[{numel}] input
  buffer q: {kind}[96] input
  buffer s: f32[8] input
  buffer f: f32[96] temp
  buffer w: f32[96] temp
  buffer y: f32[{results}] output
  inputs x, q, s

  kernel floats(q: {kind}[96], f: f32[96]) {{
    axes n: 96
    a: {kind} = load q[n]
    b: f32 = cast a
    st: f32 = store f[n], b
  }}

  kernel weights(f: f32[96], s: f32[8], w: f32[96]) {{
    axes n: 8, k: 12
    a: f32 = load f[12*n + k]
    b: f32 = load s[n]
    c: f32 = mul a, b
    st: f32 = store w[12*n + k], c
  }}

  kernel product(x: f32[{numel}], w: f32[96], y: f32[{results}]) {{
    axes m: {rows}, n: 8, k: 12
    a: f32 = load x[12*m + k]
    b: f32 = load w[12*n + k]
    c: f32 = mul a, b
    d: f32 = sum c over k
    st: f32 = store y[8*m + n], d
  }}

  output view y ({rows}, 8) strides (8, 1) offset 0
}}
"""


def text(rows: int, kind: str) -> str:
    return PRODUCT.format(rows=rows, kind=kind, numel=12 * rows, results=8 * rows)


@pytest.mark.parametrize("rows", [2, 3, MAX_ROWS])
def test_sums_are_the_same(rows: int) -> None:
    before = parse_program(text(rows, "i8"))
    after, decisions = sum_rows_together(before)
    verify_program(after)
    assert [decision.ok for decision in decisions] == [True]
    (kernel,) = (node for node in after.nodes if isinstance(node, Kernel) and node.name == "product")
    assert [axis.name for axis in kernel.space] == ["n", "k"]
    assert sum(load.buffer == "w" for _, load in kernel.loads()) == 1
    args = [torch.randn(rows, 12), torch.randint(-128, 128, (8, 12), dtype=torch.int8), torch.randn(8)]
    one, other = (run_program(program, list(args)) for program in (before, after))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("rows", "kind", "told"), [(1, "i8", 0), (MAX_ROWS + 1, "i8", 0), (4, "i32", 1)])
def test_elsewhere_products_stay_as_they_are(rows: int, kind: str, told: int) -> None:
    before = parse_program(text(rows, kind))
    after, decisions = sum_rows_together(before)
    assert after.nodes == before.nodes
    assert [decision.ok for decision in decisions] == [False] * told
