"""Which other plans of a kernel are close to the chosen one, and which of a program's kernels get them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.codegen import CppKernel, compete, generate, generate_all
from pellucid.codegen.variants import differs
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Compute, Kernel
from pellucid.ir.parser import parse_kernel
from pellucid.machine import AVX512
from pellucid.options import Options
from tests.golden import codegen_cases as cases

PERMUTED = """\
kernel k(x: f32[786432], o: f32[786432]) {
  axes i: 64, j: 96, k: 128
  a: f32 = load x[12288*i + 128*j + k]
  b: f32 = exp a
  st: f32 = store o[8192*j + 128*i + k], b
}
"""
TRANSPOSED = """\
kernel k(x: f32[786432], o: f32[786432]) {
  axes i: 1024, j: 768
  a: f32 = load x[768*i + j]
  b: f32 = exp a
  st: f32 = store o[i + 1024*j], b
}
"""
COLUMNS = """\
kernel k(x: f32[1500000], o: f32[1500]) {
  axes i: 1000, j: 1500
  a: f32 = load x[1500*i + j]
  b: f32 = sum a over i
  st: f32 = store o[j], b
}
"""
ROWS = """\
kernel k(x: f32[1500000], o: f32[1000]) {
  axes i: 1000, j: 1500
  a: f32 = load x[1500*i + j]
  b: f32 = sum a over j
  st: f32 = store o[i], b
}
"""
OUTER = """\
kernel k(x: f32[512], y: f32[768], o: f32[393216]) {
  axes i: 512, j: 768
  a: f32 = load x[i]
  e: f32 = exp a
  b: f32 = load y[j]
  c: f32 = mul e, b
  st: f32 = store o[768*i + j], c
}
"""
SCATTER = """\
kernel k(x: f32[786432], n: i64[1024], o: f32[768]) {
  axes i: 1024, j: 768
  a: f32 = load x[768*i + j]
  n: i64 = load n[i]
  st: f32 = store add o[[n]], a
}
"""
PRODUCT = """\
kernel k(x: f32[131072], w: f32[1048576], o: f32[32768]) {
  axes i: 64, j: 512, k: 2048
  a: f32 = load x[2048*i + k]
  b: f32 = load w[2048*j + k]
  c: f32 = mul a, b
  d: f32 = sum c over k
  st: f32 = store o[512*i + j], d
}
"""


def ways_of(text: str) -> list[CppKernel]:
    return list(generate_all(parse_kernel(text), Options(), AVX512))


def told(text: str) -> list[str]:
    return [each.plan.way for each in ways_of(text)]


def test_the_first_way_is_the_one_that_is_generated_alone() -> None:
    for text in (PERMUTED, COLUMNS, PRODUCT, cases.SOFTMAX):
        assert ways_of(text)[0] == generate(parse_kernel(text), Options(), AVX512)


def test_loops_go_in_the_order_of_what_is_written_too() -> None:
    assert told(PERMUTED)[:2] == ["16 lanes along i2, i0 around i1", "16 lanes along i2, i1 around i0"]


def test_a_kept_axis_has_steps_of_more_and_of_fewer_lanes() -> None:
    assert told(COLUMNS) == ["32 lanes along i0", "64 lanes along i0", "16 lanes along i0"]


def test_two_axes_that_cost_the_same_are_both_tried() -> None:
    assert {way.rpartition(" ")[2] for way in told(TRANSPOSED)[:2]} == {"i0", "i1"}


def test_products_have_blocks_of_other_sizes() -> None:
    assert told(PRODUCT) == ["blocks of 64 x 128", "blocks of 64 x 256", "blocks of 64 x 64"]


@pytest.mark.parametrize("text", [ROWS, cases.SOFTMAX, SCATTER], ids=["sum", "softmax", "scatter"])
def test_what_would_round_otherwise_is_left_out(text: str) -> None:
    assert len(ways_of(text)) == 1


def test_plans_differ_where_terms_or_functions_do() -> None:
    columns, rows, outer = (ways_of(text)[0].plan for text in (COLUMNS, ROWS, OUTER))
    assert differs(columns, replace(columns, width=16)) == ""
    assert differs(rows, replace(rows, width=16)) == "terms would be added in blocks of another size"
    assert differs(columns, replace(columns, vector="i1")) == "terms would be added in another order"
    assert differs(columns, replace(columns, tile="i1")) == "terms would be added in blocks of another size"
    (exp,) = (line.out for line in outer.kernel.body if isinstance(line.rhs, Compute) and line.rhs.op == "exp")
    assert differs(outer, replace(outer, wide=outer.wide | {exp})) == f"{exp} would be computed by another function"


def test_ways_are_called_alike() -> None:
    for text in (PERMUTED, TRANSPOSED, COLUMNS, PRODUCT):
        first, *others = ways_of(text)
        assert others and all((each.params, each.symbols) == (first.params, first.symbols) for each in others)
        assert len({each.name for each in (first, *others)}) == 1 + len(others)


# ------------------------------------------------------------------------------------------------ programs


def joined(asked: str, *texts: str) -> tuple[list[CppKernel], list[Decision]]:
    nodes = [replace(parse_kernel(text), name=f"k{number}") for number, text in enumerate(texts)]
    kernels = {node.name: generate(node, Options(), AVX512) for node in nodes}

    def all_of(node: Kernel):
        return generate_all(node, Options(), AVX512)

    found, decisions = compete(kernels, nodes, all_of, asked, AVX512)
    return [found[node.name] for node in nodes], list(decisions)


def test_nothing_is_tried_unless_it_is_asked_for() -> None:
    (kernel,), decisions = joined("off", PERMUTED)
    assert kernel.others == () and decisions == []


def test_each_kernel_has_a_decision() -> None:
    small = PERMUTED.replace("786432", "512").replace("64, j: 96, k: 128", "8, j: 8, k: 8")
    small = small.replace("12288*i + 128*j", "64*i + 8*j").replace("8192*j + 128*i", "64*j + 8*i")
    symbolic = COLUMNS.replace("kernel k(x: f32[1500000]", "kernel k<n>(x: f32[1500*n]").replace("i: 1000", "i: n")
    kernels, decisions = joined("on", PERMUTED, ROWS, small, symbolic)
    assert [len(kernel.others) for kernel in kernels] == [3, 0, 0, 0]
    assert [decision.ok for decision in decisions] == [True, False, False, False]
    assert "4 plans are close" in decisions[0].why and len(decisions[0].facts) == 4
    assert "no plan with the same bits" in decisions[1].why
    assert "too little to be compiled twice" in decisions[2].why
    assert "sizes are not known" in decisions[3].why


def test_one_is_forced_by_its_place_or_by_its_name() -> None:
    ways = [each.name for each in ways_of(PERMUTED)]
    for asked, expected in (("0", ways[0]), ("1", ways[1]), ("99", ways[-1]), (f"k_other,{ways[2]}", ways[2])):
        (kernel,), (decision,) = joined(asked, PERMUTED)
        assert kernel.name == expected and kernel.others == ()
        assert decision.ok and expected in decision.why


def test_kernels_that_no_name_is_about_are_tried() -> None:
    (kernel,), _ = joined("k_other", PERMUTED)
    assert len(kernel.others) == 3
