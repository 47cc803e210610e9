"""What becomes one kernel, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pellucid.ir.decision import Decision
from pellucid.ir.index import sym
from pellucid.ir.nodes import Extern, Kernel, Program
from pellucid.ir.parser import parse_kernel, parse_program
from pellucid.ir.types import DType
from pellucid.ir.verify import verify_program
from pellucid.machine import AVX2, Machine, Rate
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.inline import recipe_of
from pellucid.schedule.match_axes import Mismatch
from tests.unit.schedule.build import ProgramBuilder, Tensor, check_same, kernels, scheduled


def refusals(program: Program) -> set[str]:
    """The categories of all refusals."""
    _, decisions = schedule(program, Options())
    return {str(dict(decision.facts)["category"]) for decision in decisions if "category" in dict(decision.facts)}


def softmax(b: ProgramBuilder, x: Tensor) -> Tensor:
    dim = len(x.shape) - 1
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, dim)))
    return b.op("div", e, b.reduce("sum", e, dim))


def mean(b: ProgramBuilder, x: Tensor) -> Tensor:
    extent = x.shape[-1].value
    assert extent is not None
    return b.op("div", b.reduce("sum", x, len(x.shape) - 1), float(extent))


def layer_norm(b: ProgramBuilder, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = b.op("sub", x, mean(b, x))
    variance = mean(b, b.op("mul", centred, centred))
    scale = b.op("rsqrt", b.op("add", variance, 1e-5))
    return b.op("add", b.op("mul", b.op("mul", centred, scale), weight), bias)


def rms_norm(b: ProgramBuilder, x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    scale = b.op("rsqrt", b.op("add", mean(b, b.op("mul", x, x)), 1e-5))
    return b.op("mul", b.op("mul", x, scale), weight)


def log_softmax(b: ProgramBuilder, x: Tensor, *_: Tensor) -> Tensor:
    shifted = b.op("sub", x, b.reduce("max", x, len(x.shape) - 1))
    return b.op("sub", shifted, b.op("log", b.reduce("sum", b.op("exp", shifted), len(x.shape) - 1)))


def in_two_orders(size: int) -> Program:
    """What is stored in two orders that are contiguous along two axes, neither of them that of the input."""
    b = ProgramBuilder()
    e = b.op("exp", b.input(size, size, size))
    return b.finish(b.copy(e.permute(2, 1, 0)), b.copy(e.permute(0, 2, 1)))


def test_accesses_that_no_loop_order_serves_stay_apart_where_that_is_cheaper() -> None:
    after, decisions = schedule(in_two_orders(96), Options())
    verify_program(after)
    (refused,) = [each for each in decisions if each.rule == "fuse.strided"]
    assert not refused.ok and dict(refused.facts)["category"] == "strided" and "saves" in refused.why
    assert len(kernels(after)) == 2
    assert len(kernels(scheduled(in_two_orders(4)))) == 1  # a call costs more


def test_where_loading_again_is_dear_they_are_merged_all_the_same() -> None:
    slow = tuple(replace(level, read=Rate(0.01, 0.01), write=Rate(0.01, 0.01)) for level in AVX2.levels[-1:])
    machine = replace(AVX2, levels=(*AVX2.levels[:-1], *slow))
    after, decisions = schedule(in_two_orders(256), Options(), machine)
    assert not [each for each in decisions if each.rule == "fuse.strided"]
    assert len(kernels(after)) == 1


def turned(rows: int) -> Program:
    """A vector against so many rows, after its elements were brought into another order."""
    b = ProgramBuilder()
    vector = b.copy(b.input(1, 9, 32).permute(0, 2, 1)).merge(1)
    assert vector is not None
    return b.finish(b.reduce("sum", b.op("mul", vector, b.input(rows, 32 * 9)), 1))


def test_what_each_row_reads_anew_is_brought_into_its_order_once() -> None:
    after, decisions = schedule(turned(256), Options())
    refused = [dict(each.facts)["category"] for each in decisions if each.rule == "fuse.inline" and not each.ok]
    assert "cost" in refused and len(kernels(after)) == 2
    check_same(turned(256), after)
    assert len(kernels(scheduled(turned(1)))) == 1  # a call costs more


@pytest.mark.parametrize("norm", [layer_norm, rms_norm, log_softmax, lambda b, x, *_: softmax(b, x)])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_norms_become_one_kernel(norm: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    b = ProgramBuilder()
    x, weight, bias = b.input(*shape), b.input(8), b.input(8)
    y = b.op("maximum", norm(b, b.op("mul", x, 0.5), weight, bias), 0.0)
    (kernel,) = kernels(scheduled(b.finish(y)))
    assert len(kernel.space) == 2
    assert len(kernel.reduced) == 1


def test_symbolic_softmax_becomes_one_kernel() -> None:
    b = ProgramBuilder(["n", "m"])
    x = b.input(sym("n"), sym("m"))
    y = b.op("neg", softmax(b, b.op("add", x, 1.0)))
    (kernel,) = kernels(scheduled(b.finish(y), {"n": 3, "m": 5}))
    assert [axis.extent for axis in kernel.space] == [sym("n"), sym("m")]


def test_permuted_consumer() -> None:
    """The order of axes does not matter: the producer's loops follow the consumer."""
    b = ProgramBuilder()
    x, y = b.input(3, 4, 5), b.input(5, 3, 4)
    total = b.op("add", x, 1.0)
    program = b.finish(total, b.op("mul", total.permute(2, 0, 1), y))
    assert len(kernels(scheduled(program))) == 1
    apart, decisions = schedule(program, Options(loop_orders=False))
    assert len(kernels(apart)) == 2
    assert "option loop_orders is off" in decisions[0].why


def test_split_axes() -> None:
    """`[6, 8]` and `[2, 6, 4]` can be the same points."""
    b = ProgramBuilder()
    x, y = b.input(6, 8), b.input(2, 6, 4)
    halves = b.op("mul", b.op("add", x, 1.0).split(1, 4).permute(1, 0, 2), y)
    (kernel,) = kernels(scheduled(b.finish(halves)))
    assert len(kernel.space) == 3


def test_merged_axes() -> None:
    """`[48]` and `[6, 8]` are the same points, and one loop will do."""
    b = ProgramBuilder()
    flat = b.op("neg", b.input(6, 8)).merge(0)
    assert flat is not None
    (kernel,) = kernels(scheduled(b.finish(b.op("exp", b.op("abs", flat).split(0, 8)))))
    assert len(kernel.space) == 1


def test_producer_with_finer_axes() -> None:
    """The consumer's axis is split to match the producer's two."""
    b = ProgramBuilder()
    x, y = b.input(4, 6), b.input(24)
    fine = b.op("add", x.permute(1, 0), 1.0)
    flat = fine.merge(0)
    assert flat is not None
    assert len(kernels(scheduled(b.finish(b.op("mul", flat, y))))) == 1


def test_incompatible_radix_stays_apart() -> None:
    b = ProgramBuilder()
    x, y = b.input(6, 4), b.input(6, 4)
    total = b.op("exp", b.op("add", x.permute(1, 0), y.permute(1, 0)))
    flat = total.merge(0)
    assert flat is not None
    z = b.op("mul", flat.split(0, 8).permute(1, 0), 2.0)
    program = b.finish(z)
    assert len(kernels(scheduled(program))) == 2
    assert "different-loop-orders" in refusals(program)


def test_reductions_over_different_axes_stay_apart() -> None:
    b = ProgramBuilder()
    x = b.input(64, 64)
    e = b.op("exp", x)
    program = b.finish(b.reduce("sum", e, 0), b.reduce("sum", e, 1))
    assert len(kernels(scheduled(program))) == 2
    assert "reduction-axes" in refusals(program)


def test_row_value_joins_a_reduction() -> None:
    """A value per row, computed before the reduction, runs once per row in the same kernel."""
    b = ProgramBuilder()
    x, scale = b.input(6, 8), b.input(6, 1)
    y = b.reduce("sum", b.op("mul", x, b.op("exp", scale)), 1)
    assert len(kernels(scheduled(b.finish(y, b.op("neg", y))))) == 1


def test_constants_are_inlined_everywhere() -> None:
    b = ProgramBuilder()
    x = b.input(4, 8, 8)
    rows, columns = b.iota(8).unsqueeze(1), b.iota(8)
    mask = b.op("le", columns, rows)
    masked = b.op("where", mask, x, b.full(-100.0, 1))
    (kernel,) = kernels(scheduled(b.finish(softmax(b, masked))))
    assert len(kernel.params) == 2


def test_what_several_lines_store_has_no_one_recipe() -> None:
    kernel = parse_kernel("""
        kernel k(x: f32[8], y: f32[16]) {
          axes i: 8
          a: f32 = load x[i]
          b: f32 = neg a
          st0: f32 = store y[2*i], a
          st1: f32 = store y[2*i + 1], b
        }""")
    refused = recipe_of(kernel, "y")
    assert isinstance(refused, Mismatch) and refused.category == "several-stores"


def test_expensive_broadcast_is_kept() -> None:
    b = ProgramBuilder()
    x, table = b.input(512, 1024), b.input(1024)
    program = b.finish(b.op("mul", x, b.op("cos", table)))
    assert len(kernels(schedule(program, Options())[0])) == 2
    assert "cost" in refusals(program)


def test_slices_and_cat() -> None:
    """Rotary embedding: halves are negated and swapped, with no memory in between."""
    b = ProgramBuilder()
    x, cos, sin = b.input(4, 6, 8), b.input(6, 8), b.input(6, 8)
    swapped = b.cat([b.op("neg", x.slice(2, 4, 8)), x.slice(2, 0, 4)], 2)
    y = b.op("add", b.op("mul", x, cos), b.op("mul", swapped, sin))
    (kernel,) = kernels(scheduled(b.finish(y)))
    assert len(kernel.params) == 4


def test_gated_unit() -> None:
    b = ProgramBuilder()
    x, bias = b.input(6, 16), b.input(16)
    h = b.op("add", x, bias)
    y = b.op("mul", h.slice(1, 0, 8), b.op("sigmoid", h.slice(1, 8, 16)))
    assert len(kernels(scheduled(b.finish(y)))) == 1


def test_cat_of_split_heads() -> None:
    b = ProgramBuilder()
    parts = [b.copy(b.input(2, 3, 5, 4).permute(0, 2, 1, 3)) for _ in range(3)]
    flat = [part.merge(2) for part in parts]
    y = b.cat([part for part in flat if part is not None], 2)
    assert len(kernels(scheduled(b.finish(y)))) == 1


def test_both_transposes_of_one_tensor() -> None:
    b = ProgramBuilder()
    h = b.op("add", b.input(6, 6), 1.0)
    assert len(kernels(scheduled(b.finish(b.op("mul", h, h.permute(1, 0)))))) == 1


def test_library_calls_are_barriers_for_their_operands_only() -> None:
    b = ProgramBuilder()
    x, w = b.input(4, 4), b.input(4, 4)
    h = b.op("add", x, 1.0)
    product = b.mm(h, w)
    y = b.op("neg", b.op("mul", x, 2.0))
    z = b.op("exp", b.op("add", product, y))
    after = scheduled(b.finish(z))
    assert [type(node) for node in after.nodes] == [Kernel, Extern, Kernel]


def test_no_cycle_through_a_library_call() -> None:
    b = ProgramBuilder()
    x, w = b.input(512, 512), b.input(512, 512)
    h = b.op("exp", x)
    program = b.finish(b.op("add", h, b.mm(h, w)))
    after, _ = schedule(program, Options())
    assert [type(node) for node in after.nodes] == [Kernel, Extern, Kernel]
    assert "cycle" in refusals(program)


def test_horizontal_fusion_of_shared_loads() -> None:
    b = ProgramBuilder()
    x = b.input(64, 96)
    program = b.finish(b.reduce("sum", x, 1), b.reduce("max", x, 1), b.op("exp", x))
    (kernel,) = kernels(scheduled(program))
    assert len(list(kernel.loads())) == 1


def test_long_rows_are_not_swept_twice_by_few_threads() -> None:
    b = ProgramBuilder()
    x = b.input(1, 262144)
    program = b.finish(b.op("sub", x, b.reduce("max", x, 1)))
    names = [kernel.name for kernel in kernels(schedule(program, Options())[0])]
    assert names == ["max_0_part1", "max_0_all1", "sub_1"]  # the maximum in two phases, and not fused
    assert "cost" in refusals(program)


def test_limits() -> None:
    b = ProgramBuilder()
    x = b.input(8)
    for _ in range(40):
        x = b.op("exp", x)
    program = b.finish(x)
    assert len(kernels(scheduled(program))) == 1
    assert all(len(kernel.body) <= 10 for kernel in kernels(scheduled(program, max_fused_lines=10)))


def test_without_fusion() -> None:
    b = ProgramBuilder()
    program = b.finish(b.op("exp", b.op("neg", b.input(8))))
    assert len(kernels(scheduled(program, fusion=False))) == 2


def test_equal_layers_fuse_alike() -> None:
    b = ProgramBuilder()
    x = b.input(16, 8)
    weights = [(b.input(8, 8), b.input(8), b.input(8)) for _ in range(6)]
    for w, gain, bias in weights:
        h = layer_norm(b, b.op("add", x, b.op("maximum", b.mm(x, w), 0.0)), gain, bias)
        x = b.op("mul", h, 0.5)
    after = scheduled(b.finish(x))
    forms = {(kernel.space, tuple(type(line.rhs) for line in kernel.body)) for kernel in kernels(after)}
    assert len(kernels(after)) == 6
    assert len(forms) == 1


def test_no_fx_node_is_lost() -> None:
    b = ProgramBuilder()
    x = b.input(6, 8)
    y = b.copy(b.op("neg", b.copy(softmax(b, b.copy(x)))))
    program = b.finish(y)
    (kernel,) = kernels(scheduled(program))
    found = {node for line in kernel.body for node in line.origin.nodes}
    assert found == {node.name for node in program.nodes}
    assert all("fuse" in line.origin.steps for line in kernel.body)


def test_in_place_update_of_an_input() -> None:
    """Every index of the mutated buffer is the same: reading and writing share a kernel."""
    b = ProgramBuilder()
    x, step = b.input(6, 8), b.input(6, 8)
    new = b.op("sub", x, b.op("mul", step, 0.5))
    b.write(x, new)
    y = b.op("add", x, 1.0)
    assert len(kernels(scheduled(b.finish(y)))) == 1


def test_write_after_shifted_read_stays_apart() -> None:
    b = ProgramBuilder()
    x = b.input(8)
    y = b.op("add", x.slice(0, 1, 8), x.slice(0, 0, 7))
    b.write(x.slice(0, 0, 7), y)
    program = b.finish(y)
    assert len(kernels(scheduled(program))) == 2
    assert "mutation" in refusals(program)


def test_reads_keep_their_place_between_writes() -> None:
    b = ProgramBuilder()
    x, other = b.input(6, 8), b.input(8, 6)
    first = b.reduce("sum", x, 0)
    b.write(x, b.op("add", x, 1.0))
    second = b.reduce("sum", x, 0)
    b.write(x, b.op("mul", other.permute(1, 0), 2.0))
    third = b.reduce("sum", x, 0)
    scheduled(b.finish(first, second, third))


def test_running_statistics() -> None:
    b = ProgramBuilder()
    x, running = b.input(32, 6), b.input(6)
    batch = b.op("div", b.reduce("sum", x, 0), 32.0)
    b.write(running, b.op("add", b.op("mul", running, 0.5), batch.select(0, 0)))
    y = b.op("sub", x, batch)
    assert len(kernels(scheduled(b.finish(y)))) == 1


def test_narrow_buffers_forward_their_wide_value() -> None:
    b = ProgramBuilder()
    x = b.input(6, 8, dtype=DType.BF16)
    y = b.op("add", b.op("mul", x, 2.0, dtype=DType.BF16), 1.0, dtype=DType.BF16)
    (kernel,) = kernels(scheduled(b.finish(y)))
    assert len(list(kernel.stores())) == 1


def test_decisions_have_known_categories() -> None:
    b = ProgramBuilder()
    x, w = b.input(16, 16), b.input(16, 16)
    h = softmax(b, b.mm(b.op("exp", x), w))
    program = b.finish(h, b.reduce("sum", h, 0), b.cat([h, x], 0))
    known = {
        "broadcast", "cost", "cycle", "different-loop-orders", "different-numel", "different-offset", "extern",
        "indirect", "mutation", "reduction-axes", "scatter", "search-limit", "several-stores", "size-limit",
    }  # fmt: skip
    decisions: list[Decision] = schedule(program, Options())[1]
    for decision in decisions:
        facts = dict(decision.facts)
        assert decision.ok or not decision.rule.startswith("fuse.") or facts["category"] in known


def test_whether_a_value_is_computed_again_depends_on_the_machine() -> None:
    """Loading it costs bandwidth, computing it again costs instructions: the machine says which is less."""
    b = ProgramBuilder()
    x, w = b.input(512, 512), b.input(512, 512)
    h = b.op("mul", x, 2.0)
    program = b.finish(b.op("add", b.op("add", b.mm(h, w), x), h))

    def inlined(machine: Machine) -> bool:
        return any(each.rule == "fuse.inline" and each.ok for each in schedule(program, Options(), machine)[1])

    flops = replace(AVX2.flops, f32=Rate(AVX2.flops.f32.one / 1000, AVX2.flops.f32.all / 1000))
    assert inlined(AVX2)
    assert not inlined(replace(AVX2, flops=flops))


def lookup(reads_all: bool) -> str:
    """A log-softmax of rows, and a kernel that reads an element of each row, or all of them in another order."""
    axes, index = ("i0: 6, i1: 40", "i0 + 6*i1") if reads_all else ("i0: 6", "40*i0 + [v1]")
    return f"""
program {{
  buffer x: f32[240] input
  buffer y: i64[6] input
  buffer b: f32[240] temp
  buffer r: f32[{240 if reads_all else 6}] output
  inputs x, y

  kernel normal(x: f32[240], b: f32[240]) {{
    axes i0: 6, i1: 40
    v0: f32 = load x[40*i0 + i1]
    v1: f32 = max v0 over i1
    v2: f32 = sub v0, v1
    v3: f32 = exp v2
    v4: f32 = sum v3 over i1
    v5: f32 = log v4
    v6: f32 = sub v2, v5
    st0: f32 = store b[40*i0 + i1], v6
  }}

  kernel lookup(y: i64[6], b: f32[240], r: f32[{240 if reads_all else 6}]) {{
    axes {axes}
    v0: i64 = load y[i0]
    v1: i64 = check v0, 40
    v2: f32 = load b[{index}]
    v3: f32 = neg v2
    st0: f32 = store r[{"40*i0 + i1" if reads_all else "i0"}], v3
  }}

  output view r (6,) strides (1,) offset 0
}}
"""


@pytest.mark.parametrize("reads_all", [False, True])
def test_few_elements_of_a_softmax_come_from_the_numbers_of_their_rows(reads_all: bool) -> None:
    program, _ = schedule(parse_program(lookup(reads_all)), Options())
    assert ("b" in {buffer.name for buffer in program.buffers}) == reads_all
    verify_program(program)


def test_totals_that_are_stored_twice_are_not_looked_up_in_a_circle() -> None:
    """A kernel stores the same total in two buffers, and a reader at other points wants one of them."""
    b = ProgramBuilder()
    total = b.op("sign", b.reduce("sum", b.input(6, 2, 3), 0, 1)).select(0, 0).select(0, 0)
    again = b.copy(total)
    products = b.op("mul", total.unsqueeze(1), total)
    scheduled(b.finish(products, b.op("neg", again), again, b.copy(again.slice(0, 1, 3))))


def test_large_temporaries_do_not_wait_for_one_another() -> None:
    """Of two products the sums over rows, added: the first need not be in memory any more when the second is."""

    def sums(rows: int) -> list[Decision]:
        b = ProgramBuilder()
        w = b.input(64, 1024)
        parts = [b.mm(b.input(rows, 64), w) for _ in range(2)]
        after, decisions = schedule(b.finish(b.op("add", *(b.reduce("sum", part, 0) for part in parts))), Options())
        verify_program(after)
        return [each for each in decisions if each.rule == "fuse.memory"]

    (refused,) = sums(8192)
    assert not refused.ok and "stay in memory" in refused.why
    assert not sums(64)
