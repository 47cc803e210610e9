"""Which kernels are contractions, and in what blocks they run."""

from __future__ import annotations

import pytest

from pellucid.codegen import Plan, generate
from pellucid.codegen.block_sizes import ENOUGH_BLOCKS
from pellucid.ir.contraction import find_contraction
from pellucid.ir.parser import parse_kernel
from pellucid.machine import AVX2, AVX512, Machine
from pellucid.options import Options

PRODUCT = """\
kernel product(a: f32[{a}], b: f32[{b}], c: f32[{c}]) {{
  axes m: {m}, n: {n}, k: {k}
  x: f32 = load a[{at_a}]
  y: f32 = load b[{at_b}]
  p: f32 = mul x, y
  t: f32 = sum p over k
  {rest}
  st: f32 = store c[{at_c}], {value}
}}
"""


def product(
    m: int, n: int, k: int, at_c: str = "", rest: str = "", value: str = "t", at_a: str = "", at_b: str = ""
) -> str:
    return PRODUCT.format(
        a=m * k, b=n * k, c=m * n, m=m, n=n, k=k, rest=rest, value=value,
        at_a=at_a or f"{k}*m + k", at_b=at_b or f"{k}*n + k", at_c=at_c or f"{n}*m + n",
    )  # fmt: skip


def plan_of(text: str, target: Machine = AVX2, **options: bool) -> Plan:
    return generate(parse_kernel(text), Options(**options), target).plan


def test_rows_and_columns_are_those_of_one_operand() -> None:
    found = find_contraction(parse_kernel(product(40, 50, 60)))
    assert found is not None
    assert (found.batch, found.rows, found.columns, found.inner) == ((), ("m",), ("n",), ("k",))


@pytest.mark.parametrize(
    "text",
    [
        product(40, 50, 60).replace("sum p", "max p"),
        product(40, 50, 60).replace("mul x", "add x"),
        product(40, 50, 60, rest="w: f32 = div p, t", value="w", at_c="50*m + n"),
        product(40, 50, 60, rest="w: f32 = load b[60*n + k]\n  z: f32 = sum w over k\n  u: f32 = add t, z", value="u"),
        product(40, 50, 60).replace("f32[2400]", "bf16[2400]"),
    ],
)
def test_what_is_no_contraction_has_no_blocks(text: str) -> None:
    assert find_contraction(parse_kernel(text)) is None
    assert plan_of(text).blocks is None


def test_scalar_code_has_no_blocks() -> None:
    assert plan_of(product(40, 50, 60), vectorize=False).blocks is None


@pytest.mark.parametrize("target", [AVX2, AVX512])
def test_columns_are_the_axis_along_which_the_result_lies(target: Machine) -> None:
    plain, turned = plan_of(product(64, 96, 60), target), plan_of(product(64, 96, 60, at_c="m + 64*n"), target)
    for plan, extent in ((plain, 96), (turned, 64)):
        assert plan.blocks is not None and plan.vector == plan.blocks.column
        assert plan.extent_of(plan.blocks.column).value == extent


@pytest.mark.parametrize("target", [AVX2, AVX512])
@pytest.mark.parametrize(
    ("m", "n", "k", "columns", "along_rows"),
    [
        (32, 768, 768, 32, True),  # the weight is read where it lies: nothing is packed for few rows
        (32, 768, 3072, 768, False),  # of which rows lie in one set of the cache
        (128, 768, 768, 768, False),
        (512, 512, 512, 512, False),
    ],
)
def test_the_operand_with_the_cheaper_blocks_gives_the_columns(
    target: Machine, m: int, n: int, k: int, columns: int, along_rows: bool
) -> None:
    plan = plan_of(product(m, n, k), target)
    assert plan.blocks is not None and plan.blocks.ranges[plan.blocks.column].value == columns
    assert plan.blocks.along_rows == along_rows == (plan.vector == plan.blocks.row)


def test_few_columns_are_rows_of_blocks_where_registers_are_wide() -> None:
    """What is stored apart lies near."""
    blocks = plan_of(product(1024, 10, 768), AVX512).blocks
    assert blocks is not None and not blocks.along_rows and blocks.ranges[blocks.column].value == 1024


def test_blocks_are_equal_and_enough() -> None:
    plan = plan_of(product(1024, 1024, 512))
    assert plan.blocks is not None
    rows, columns = plan.blocks.rows, plan.blocks.columns
    assert 1024 % rows > rows - 12 or 1024 % rows == 0
    assert columns == 128 and (plan.extent.value or 0) >= ENOUGH_BLOCKS
    small = plan_of(product(128, 768, 768))
    assert small.blocks is not None and small.blocks.columns < 128 and (small.extent.value or 0) >= ENOUGH_BLOCKS


@pytest.mark.parametrize(("m", "n"), [(480, 256), (96, 96), (256, 256), (768, 768)])
def test_where_both_operands_are_packed_blocks_are_large_and_equal(m: int, n: int) -> None:
    """As many for each core as for the others: (96, 64) and (96, 32) would not be."""
    plan, cores = plan_of(product(m, n, 600, at_a=f"m + {m}*k")), AVX2.cores
    blocks = plan.blocks
    assert blocks is not None and blocks.columns >= 64 and blocks.rows >= 48
    assert (plan.extent.value or 0) % cores == 0 and n % blocks.columns == 0


def test_a_small_product_is_for_one_thread() -> None:
    plan = plan_of(product(12, 30, 20))
    assert plan.grain >= (plan.extent.value or 0)


def test_columns_are_not_the_few_that_are_stored_side_by_side() -> None:
    """Pixels of a transposed convolution come from several columns, but channels fill the registers."""
    text = product(40, 256, 60, at_c="256*m + n")
    text = (
        text.replace("n: 256,", "n: 128, p: 2,")
        .replace("60*n + k]", "60*n + 7680*p + k]")
        .replace("+ n]", "+ 2*n + p]")
    )
    blocks = plan_of(text).blocks
    assert blocks is not None and blocks.ranges[blocks.column].value == 128
