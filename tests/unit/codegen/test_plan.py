"""What the plan chooses, and that it says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.codegen import CppKernel, generate
from pellucid.errors import InternalError
from pellucid.ir.decision import Decision
from pellucid.ir.index import const
from pellucid.ir.parser import parse_kernel
from pellucid.machine import AVX2, AVX512, Machine, Rate
from pellucid.options import Options
from tests.golden import codegen_cases as cases


def compile_text(text: str, target: Machine = AVX512, **options: bool) -> CppKernel:
    return generate(parse_kernel(text), Options(**options), target)


def decision(kernel: CppKernel, rule: str) -> Decision:
    return next(each for each in kernel.decisions if each.rule == rule)


def test_contiguous_axes_are_merged_and_cut_into_chunks() -> None:
    kernel = compile_text(
        """\
kernel k(x: f32[8388608], o: f32[8388608]) {
  axes i: 16384, j: 512
  a: f32 = load x[512*i + j]
  b: f32 = neg a
  st: f32 = store o[512*i + j], b
}
"""
    )
    plan = kernel.plan
    assert [axis.extent for axis in plan.kernel.space] == [const(8388608)]
    assert plan.chunk % plan.width == 0
    assert kernel.extent == const(8388608 // plan.chunk)


def test_a_broadcast_operand_keeps_the_axes_apart() -> None:
    plan = compile_text(cases.POINTWISE).plan
    assert [axis.extent for axis in plan.kernel.space] == [const(16384), const(512)]
    assert plan.vector == "i1" and plan.inner == "i1" and plan.outer == ("i0",)


def test_row_reduction_vectorises_the_reduced_axis() -> None:
    plan = compile_text(cases.SOFTMAX).plan
    assert plan.vector_is_reduced and plan.width == 64
    assert [sweep.keep for sweep in plan.sweeps.order] == [(), ("v3",), ()]
    assert [sweep.recall for sweep in plan.sweeps.order] == [(), (), ("v3",)]


def test_column_reduction_vectorises_the_kept_axis() -> None:
    plan = compile_text(cases.COLUMN_SUM).plan
    assert not plan.vector_is_reduced and plan.vector == plan.inner
    assert plan.width * 4 == 256  # whole cache lines of every row
    assert plan.pairwise == {"v1"}


SUMS_OF_COLUMNS = """\
kernel k(x: f32[{numel}], o: f32[{columns}]) {{
  axes i: {columns}, j: {rows}
  a: f32 = load x[{columns}*j + i]
  s: f32 = sum a over j
  st: f32 = store o[i], s
}}
"""


def sums_of_columns(rows: int, columns: int) -> CppKernel:
    return compile_text(SUMS_OF_COLUMNS.format(rows=rows, columns=columns, numel=rows * columns))


@pytest.mark.parametrize(("rows", "columns", "vectors"), [(4096, 4096, 16), (4096, 768, 6), (9000, 1000, 32)])
def test_rows_that_the_second_caches_do_not_hold_are_read_whole(rows: int, columns: int, vectors: int) -> None:
    kernel = sums_of_columns(rows, columns)
    assert kernel.plan.abreast == vectors and kernel.plan.chunk == vectors * kernel.plan.width
    told = decision(kernel, "codegen.abreast")
    assert told.ok and f"rows are read {kernel.plan.chunk} columns at a time" in told.why


@pytest.mark.parametrize(("rows", "columns"), [(100, 1024), (100_000, 64)])
def test_other_columns_are_added_strip_by_strip(rows: int, columns: int) -> None:
    assert sums_of_columns(rows, columns).plan.abreast == 0


def test_runners_up_are_kept_with_their_prices() -> None:
    facts = dict(decision(compile_text(cases.COLUMN_SUM), "codegen.vectorize").facts)
    told = [each.rpartition(": ") for each in str(facts["runners_up"]).split(", ")]
    names = [name for name, _, _ in told]
    prices = [int(price.removesuffix(" ns")) for _, _, price in told]
    assert set(names) == {"scalar", "16 lanes along i1"}
    assert [facts["estimated_ns"], *prices] == sorted([facts["estimated_ns"], *prices])
    assert facts["axis"] == "i0" and facts["estimated_ns"] < prices[-1]


def test_scalar_code_that_wins_has_the_vectors_as_runners_up() -> None:
    facts = dict(decision(compile_text(cases.STRIDED), "codegen.vectorize").facts)
    assert "lanes along" in str(facts["runners_up"]) and "scalar" not in str(facts["runners_up"])


def test_cheap_values_are_computed_again() -> None:
    sweeps = compile_text(cases.LAYER_NORM).plan.sweeps
    assert len(sweeps.order) == 3
    assert not any(sweep.keep for sweep in sweeps.order)


def test_byte_kernels_fill_the_register() -> None:
    assert compile_text(cases.BYTES).plan.width == 64
    assert compile_text(cases.BYTES, AVX2).plan.width == 32


def test_division_of_the_vector_axis_splits_it() -> None:
    kernel = compile_text(
        """\
kernel k(x: f32[512], o: f32[2048]) {
  axes i: 4, j: 512
  a: f32 = load x[64*i + (j % 64)]
  st: f32 = store o[512*i + j], a
}
"""
    )
    assert "%" not in kernel.source.split("steps")[1]
    assert "gather" not in kernel.source


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (cases.SOFTMAX, {"vectorize": False}, "switched off"),
        (cases.STRIDED, {}, "80 elements apart"),
        ("kernel k(o: f32[1]) {\n  a: f32 = const 1.0\n  st: f32 = store o[0], a\n}\n", {}, "single point"),
    ],
)
def test_scalar_code_has_a_reason(text: str, options: dict[str, bool], why: str) -> None:
    kernel = compile_text(text, **options)
    refused = decision(kernel, "codegen.vectorize")
    assert not refused.ok and why in refused.why
    assert "steps<" not in kernel.source


def test_lane_by_lane_lines_are_told() -> None:
    kernel = compile_text(
        """\
kernel k(x: i64[1000], y: f32[1000], w: f32[50], o: f32[1000]) {
  axes i: 1000
  k: i64 = load x[i]
  c: i64 = check k, 50
  a: f32 = load w[[c]]
  b: f32 = load y[i]
  d: f32 = exp b
  e: f32 = mul a, d
  st: f32 = store o[i], e
}
"""
    )
    assert decision(kernel, "codegen.vectorize").ok
    told = decision(kernel, "codegen.lanes")
    assert told.subject[1] == "w" and "depends on values" in told.why
    assert len(kernel.checks) == 1


def test_a_transposed_load_is_read_in_squares() -> None:
    kernel = compile_text(cases.TRANSPOSED)
    assert kernel.plan.tile == "i0" and kernel.plan.vector == "i1"
    told = decision(kernel, "codegen.tile")
    assert told.ok and told.subject[1] == "x"
    assert "gather" not in kernel.source


def test_a_masked_transposed_load_is_read_in_squares_and_masked_afterwards() -> None:
    kernel = compile_text(cases.TRANSPOSED_PAD)
    assert decision(kernel, "codegen.tile").ok
    assert "gather" not in kernel.source and "pv::where(" in kernel.source


def test_a_transposed_store_is_written_in_squares() -> None:
    kernel = compile_text(cases.TRANSPOSED_STORE)
    assert "written" in decision(kernel, "codegen.tile").why
    assert "scatter" not in kernel.source


def test_sweeps_read_what_is_transposed_in_squares_along_the_reduced_axis() -> None:
    kernel = compile_text(cases.SOFTMAX_TRANSPOSED)
    plan = kernel.plan
    assert plan.vector == plan.inner == "i0" and plan.tile in plan.reduced and plan.outer_tile is None
    assert kernel.source.count("const pv::Tile<float, 16>") == 2  # the third sweep finds them in scratch memory
    assert "gather" not in kernel.source and "scatter" not in kernel.source


def test_sweeps_write_what_is_transposed_in_squares() -> None:
    text = cases.SOFTMAX_TRANSPOSED.replace("x[512*i + j]", "x[i + 48*j]").replace("o[i + 48*j]", "o[512*i + j]")
    kernel = compile_text(text)
    assert [decision(kernel, "codegen.tile").subject[1]] == ["o"]
    assert kernel.source.count(".write<") == 1 and "scatter" not in kernel.source


PRODUCT_TRANSPOSED = """\
kernel k(x: f32[{numel}], y: f32[{numel}], w: f32[{columns}], o: f32[{numel}]) {{
  axes i: {rows}, j: {columns}
  a: f32 = load x[{columns}*i + j]
  b: f32 = load y[{columns}*i + j]
  c: f32 = load w[j]
  d: f32 = mul a, b
  e: f32 = add d, c
  st: f32 = store o[i + {rows}*j], e
}}
"""


def product_transposed(rows: int, columns: int) -> CppKernel:
    return compile_text(PRODUCT_TRANSPOSED.format(rows=rows, columns=columns, numel=rows * columns))


def test_rows_of_squares_are_fetched_ahead() -> None:
    kernel = product_transposed(1000, 1500)
    assert {name: str(index) for name, index in kernel.plan.ahead.items()} == {
        "v0": "i0 + 1500*i1 + 32",
        "v1": "i0 + 1500*i1 + 32",
    }
    assert kernel.source.count("pv::prefetch<16>(") == 2
    told = decision(kernel, "codegen.ahead")
    assert told.ok and "18006000 bytes" in told.why and "two squares ahead" in told.why


def test_what_the_second_caches_hold_is_not_fetched_ahead() -> None:
    kernel = product_transposed(100, 1500)
    assert kernel.plan.tiled and not kernel.plan.ahead and "prefetch" not in kernel.source


def test_squares_that_are_only_copied_overlap_by_themselves() -> None:
    text = """\
kernel k(x: f32[1500000], o: f32[1500000]) {
  axes i: 1000, j: 1500
  a: f32 = load x[1500*i + j]
  st: f32 = store o[i + 1000*j], a
}
"""
    kernel = compile_text(text)
    assert kernel.plan.tiled and not kernel.plan.ahead


def test_sweeps_fetch_the_rows_of_the_square_after_the_next_one() -> None:
    text = """\
kernel k(x: f32[1500000], y: f32[1500000], w: f32[1500], o: f32[1500000]) {
  axes i: 1000, j: 1500
  a: f32 = load x[1500*i + j]
  m: f32 = max a over j
  b: f32 = load y[i + 1000*j]
  c: f32 = load w[j]
  d: f32 = sub a, m
  e: f32 = mul d, b
  g: f32 = add e, c
  st: f32 = store o[i + 1000*j], g
}
"""
    plan = compile_text(text).plan
    assert plan.vector == "i0" and plan.tile in plan.reduced
    assert [str(index) for index in plan.ahead.values()] == ["i0 + 1000*i1 + 32000"]


def test_a_transposed_store_that_joins_is_not_written_in_squares() -> None:
    kernel = compile_text(cases.TRANSPOSED_STORE.replace("= store ", "= store add "))
    assert not kernel.plan.tiled and "pv::add(a, b)" in kernel.source


@pytest.mark.parametrize("dtype", ["i64", "f64", "u8", "f16"])
def test_squares_serve_every_element_size(dtype: str) -> None:
    wide = "f32" if dtype == "f16" else dtype
    text = f"""\
kernel k(x: {dtype}[40000], o: {dtype}[40000]) {{
  axes i: 200, j: 200
  a: {wide} = load x[i + 200*j]
  st: {wide} = store o[200*i + j], a
}}
"""
    assert "gather" not in compile_text(text).source
    assert decision(compile_text(text), "codegen.tile").ok


def test_argmax_has_vectors_along_rows_and_along_columns() -> None:
    rows = compile_text(cases.ARGMAX)
    assert rows.plan.vector_is_reduced and ".first()" in rows.source
    columns = compile_text(cases.ARGMAX.replace("100*i + j", "50*j + i"))
    assert columns.plan.vector == columns.plan.inner and ".value()" in columns.source


def test_narrow_floats_that_are_only_moved_stay_as_they_are() -> None:
    text = """\
kernel k(x: bf16[1000], y: bf16[1000], o: bf16[1000], q: bf16[1000]) {
  axes i: 1000
  a: f32 = load x[i]
  b: f32 = load y[i]
  c: f32 = neg b
  st: f32 = store o[i], a
  st2: f32 = store q[i], c
}
"""
    dtypes = [param.dtype.value for param in compile_text(text).plan.kernel.params]
    assert dtypes == ["i16", "bf16", "i16", "bf16"]


def test_large_outputs_are_streamed_and_small_ones_are_not() -> None:
    assert "pv::stream<float>" in compile_text(cases.POINTWISE).source
    assert "pv::stream" not in compile_text(cases.SOFTMAX).source


def test_grain_follows_the_work() -> None:
    small, large = compile_text(cases.POINTWISE), compile_text(cases.COLUMN_SUM)
    assert small.grain > 10 * large.grain
    more = generate(parse_kernel(cases.POINTWISE), Options(min_work_per_thread=200_000), AVX512)
    assert more.grain > 5 * small.grain


def test_a_store_in_place_that_lacks_an_axis_is_refused() -> None:
    with pytest.raises(InternalError, match="in place"):
        compile_text(
            """\
kernel k(x: f32[8], o: f32[64]) {
  axes i: 8, j: 8
  a: f32 = load x[i]
  b: f32 = neg a
  st: f32 = store x[i], b
  st2: f32 = store o[8*i + j], b
}
"""
        )


def test_empty_axes_vanish() -> None:
    kernel = compile_text(
        """\
kernel k(x: f32[4], o: f32[4], q: f32[4]) {
  axes i: 4, j: 0
  a: f32 = load x[i + j]
  s: f32 = sum a over j
  st: f32 = store o[i], s
  sq: f32 = store q[i + j], a
}
"""
    )
    assert kernel.params == ("o",)
    assert kernel.extent == const(1)


def test_how_much_work_is_worth_a_thread_depends_on_the_machine() -> None:
    """What a barrier costs, and how fast memory is, decide; not a number of ours."""
    usual = compile_text(cases.SOFTMAX)
    assert usual.grain < 24, "two threads share it"
    slow_barrier = replace(AVX512, barrier=100 * AVX512.barrier)
    alone = generate(parse_kernel(cases.SOFTMAX), Options(), slow_barrier)
    assert alone.source == usual.source and alone.grain > 24
    said = next(decision for decision in alone.decisions if decision.rule == "codegen.parallel")
    assert not said.ok and "one thread is enough" in said.why
    memory = replace(AVX512.memory, read=Rate(1.0, 1.0))
    slow_memory = replace(AVX512, levels=(*AVX512.levels[:-1], memory))
    assert generate(parse_kernel(cases.POINTWISE), Options(), slow_memory).grain < compile_text(cases.POINTWISE).grain


def test_reasons_about_symbolic_sizes_are_words() -> None:
    """The chunks of a long sum, joined by one kernel: few points, as a size at run time says."""
    kernel = compile_text(
        """\
kernel k<s0>(x: f32[(4*s0 + 131071) // 131072], o: f32[1]) {
  axes i: (4*s0 + 131071) // 131072
  a: f32 = load x[i]
  b: f32 = sum a over i
  st: f32 = store o[0], b
}
"""
    )
    assert all("//" not in each.why for each in kernel.decisions)
    assert decision(kernel, "codegen.vectorize").why.endswith(
        "its extent depends on sizes, and is about 1 where they are about 256"
    )


@pytest.mark.parametrize(("channels", "squares"), [(3, False), (40, True)])
def test_squares_that_would_be_mostly_empty_are_not_made(channels: int, squares: bool) -> None:
    """An image of three channels becomes channels-last by vectors of its pixels, not by rows of three lanes."""
    kernel = compile_text(
        f"""\
kernel k(x: f32[{5000 * channels}], o: f32[{5000 * channels}]) {{
  axes i: 5000, j: {channels}
  a: f32 = load x[i + 5000*j]
  st: f32 = store o[{channels}*i + j], a
}}
"""
    )
    assert bool(kernel.plan.tiled) is squares and kernel.plan.vector == "i0"
    assert ("pv::Interleaved<3, float, 16>" in kernel.source) is not squares


FLIPPED = """\
kernel k(w: f32[786432], o: f32[786432]) {
  axes t: 2, i: 64, p: 8, c: 768
  a: f32 = load w[12288*i + 16*c - 8*t - p + 15]
  st: f32 = store o[393216*t + 6144*i + 768*p + c], a
}
"""


def test_axes_that_are_read_backwards_are_turned() -> None:
    """Then neighbours are read forwards, in squares. What shares a line with them follows at once."""
    plan = compile_text(FLIPPED).plan
    assert plan.tile is not None and plan.tiled
    (load,) = (load for _, load in plan.kernel.loads())
    assert load.index.coefficient(plan.tile) == const(1)
    assert load.index.coefficient(plan.outer[-1]) == const(-8)


def test_what_is_stored_forwards_is_not_turned() -> None:
    text = "kernel k(x: f32[64], o: f32[64]) {\n  axes i: 64\n  a: f32 = load x[63 - i]\n  st: f32 = store o[i], a\n}\n"
    (store,) = (store for _, store in compile_text(text).plan.kernel.stores())
    assert store.index.coefficient("i0") == const(1)
