"""Rows that are computed once: the same results, and only where the kernel would repeat dear work."""

from __future__ import annotations

import pytest
import torch

from pellucid.ir.interp import TORCH_DTYPES, run_kernel
from pellucid.ir.nodes import Buffer, Kernel, Program
from pellucid.ir.ops import OPS
from pellucid.ir.parser import parse_kernel
from pellucid.ir.verify_kernel import verify_kernel
from pellucid.machine import AVX2
from pellucid.machine.work import op_cost
from pellucid.schedule.hoist import find_rows, hoist

NORM = """\
kernel norm(x: f32[{numel}], mean: f32[{c}], var: f32[{c}], o: f32[{numel}]) {{
  axes i: {n}, c: {c}
  a: f32 = load x[{c}*i + c]
  m: f32 = load mean[c]
  v: f32 = load var[c]
  h: f32 = const 2.0
  w: f32 = div m, h
  d: f32 = sub a, w
  s: f32 = sqrt v
  r: f32 = reciprocal s
  q: f32 = mul d, r
  st: f32 = store o[{c}*i + c], q
}}
"""

# The statistics are updated in place by the kernel that needs them, and one row goes into a sum.
IN_PLACE = """\
kernel in_place(x: f32[96000], w: f32[16], old: f32[16], o: f32[6000]) {
  axes i: 6000, c: 16
  a: f32 = load x[16*i + c]
  v: f32 = load w[c]
  e: f32 = exp v
  t: f32 = mul a, e
  s: f32 = sum t over c
  b: f32 = load old[c]
  f: f32 = exp b
  st: f32 = store o[i], s
  st2: f32 = store old[c], f
}
"""

# A part of the row does not exist; the mask depends on the row alone.
MASKED = """\
kernel masked(x: f32[40000], w: f32[7], o: f32[40000]) {
  axes i: 5000, c: 8
  p: i64 = index c
  limit: i64 = const 7
  k: bool = lt p, limit
  v: f32 = load w[c] if k else 1.5
  e: f32 = exp v
  a: f32 = load x[8*i + c]
  t: f32 = mul a, e
  st: f32 = store o[8*i + c], t
}
"""


# Two rows over different axes, of which the longer one needs the other.
TWO = """\
kernel two(x: f32[400000], w: f32[10], u: f32[400], o: f32[400000]) {
  axes i: 1000, j: 40, c: 10
  a: f32 = load x[400*i + 10*j + c]
  v: f32 = load w[c]
  e: f32 = exp v
  y: f32 = load u[10*j + c]
  z: f32 = mul y, e
  f: f32 = exp z
  t: f32 = mul a, e
  q: f32 = add t, f
  st: f32 = store o[400*i + 10*j + c], q
}
"""


def norm(n: int, c: int) -> Kernel:
    return parse_kernel(NORM.format(n=n, c=c, numel=n * c))


def program_of(kernel: Kernel) -> Program:
    buffers = tuple(Buffer(param.name, param.dtype, param.numel, "input") for param in kernel.params)
    return Program((), buffers, tuple(buffer.name for buffer in buffers), (kernel,), ())


def work(kernel: Kernel) -> set[str]:
    return {line.rhs.op for line in kernel.body if op_cost(line.rhs) >= OPS["div"].cost}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kernel", "moved"),
    [
        (norm(4000, 32), {"sqrt", "reciprocal", "div"}),
        (parse_kernel(IN_PLACE), {"exp"}),
        (parse_kernel(MASKED), {"exp"}),
    ],
)
def test_hoisting_computes_the_same(kernel: Kernel, moved: set[str]) -> None:
    program, (decision,) = hoist(program_of(kernel), AVX2)
    first, rest = program.nodes
    assert isinstance(first, Kernel) and isinstance(rest, Kernel)
    verify_kernel(first)
    verify_kernel(rest)
    assert decision.ok and decision.subject == (kernel.name,) and "computed once instead of" in decision.why
    assert (first.name, rest.name) == (f"{kernel.name}_rows", kernel.name)
    assert work(first) == moved
    if kernel.name != "in_place":
        assert not work(rest) & moved
    generator = torch.Generator().manual_seed(0)
    sizes = {param.name: int(param.numel.value or 0) for param in (*first.params, *rest.params)}
    given = {name: torch.rand(size, generator=generator) for name, size in sizes.items()}
    assert {TORCH_DTYPES[param.dtype] for param in (*first.params, *rest.params)} == {torch.float32}
    before = {name: tensor.clone() for name, tensor in given.items()}
    run_kernel(kernel, before, {})
    for each in (first, rest):
        run_kernel(each, given, {})
    for param in kernel.params:
        assert torch.equal(given[param.name], before[param.name]), param.name


def test_rows_over_several_axes_are_taken_out_one_after_the_other() -> None:
    kernel = parse_kernel(TWO)
    program, decisions = hoist(program_of(kernel), AVX2)
    assert [decision.ok for decision in decisions] == [True, True]
    assert [node.name for node in program.nodes] == ["two_rows", "two_rows_1", "two"]
    given: dict[str, torch.Tensor] = {}
    for node in program.nodes:
        assert isinstance(node, Kernel)
        verify_kernel(node)
        given.update({param.name: torch.rand(int(param.numel.value or 0)) for param in node.params})
    before = {name: tensor.clone() for name, tensor in given.items()}
    run_kernel(kernel, before, {})
    for node in program.nodes:
        run_kernel(node, given, {})  # type: ignore[arg-type]
    assert torch.equal(given["o"], before["o"])


def test_what_the_kernel_stores_itself_stays() -> None:
    """`exp` of `old` may be taken before or after its update: only the kernel knows."""
    (rows,) = find_rows(parse_kernel(IN_PLACE), AVX2)
    assert [line.out for line in rows.values] == ["e"]


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (norm(6, 32), "costs less than another kernel"),
        (norm(8, 20000), "too many to stay in the cache"),
    ],
)
def test_a_row_that_is_not_kept_has_a_reason(kernel: Kernel, why: str) -> None:
    program, (decision,) = hoist(program_of(kernel), AVX2)
    assert program.nodes == (kernel,)
    assert not decision.ok and why in decision.why


def test_cheap_rows_and_columns_are_left_alone() -> None:
    cheap = NORM.replace("sqrt v", "neg v").replace("reciprocal s", "neg s").replace("div m, h", "mul m, h")
    assert find_rows(parse_kernel(cheap.format(n=4000, c=32, numel=128000)), AVX2) == []
    column = NORM.replace("mean[c]", "mean[i]").replace("var[c]", "var[i]").replace("f32[{c}]", "f32[{n}]")
    assert find_rows(parse_kernel(column.format(n=4000, c=32, numel=128000)), AVX2) == [], (
        "that is lifted out of the loop"
    )
