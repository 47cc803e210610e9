"""`flex_attention` is the attention kernel where its functions allow, and its definition in memory else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support import assert_matches, compiled, recorded

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]

BATCH, HEADS, ROWS, KEYS, SIZE = 2, 4, 40, 72, 32
SLOPES = torch.linspace(-1, 1, HEADS)
TABLE = torch.randn(HEADS, ROWS + KEYS, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([50, 0])
OWNERS, KEY_OWNERS = torch.arange(ROWS) // 11, torch.arange(KEYS) // 17

CHANGES: dict[str, Any] = {
    "none": None,
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (i - j),
    "less": lambda s, b, h, i, j: s - (i - j).abs() * 0.1,
    "looked up": lambda s, b, h, i, j: s + TABLE[h, i - j + KEYS],
    "hidden": lambda s, b, h, i, j: torch.where((i - j).abs() < 7, s + SLOPES[h], float("-inf")),
    "capped": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "capped and more": lambda s, b, h, i, j: torch.tanh(s / 3) * 2 + SLOPES[h] * (i - j),
    "doubled": lambda s, b, h, i, j: (torch.where(i < 30, s, float("-inf")) + SLOPES[h]) * 2,
    "scaled": lambda s, b, h, i, j: s * SLOPES[h],
    "by itself": lambda s, b, h, i, j: torch.where(s > 0, s, float("-inf")),
    "twice": lambda s, b, h, i, j: s + torch.tanh(s),
    "finite": lambda s, b, h, i, j: torch.where(i > j, s, -3.0),
}
IN_MEMORY = {"scaled", "by itself", "twice", "finite"}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 9),
    "later": lambda b, h, i, j: i + 5 >= j,
    "documents": lambda b, h, i, j: (j <= i) & (OWNERS[i] == KEY_OWNERS[j]),
    "padded": lambda b, h, i, j: j < LENGTHS[b],
    "by head": lambda b, h, i, j: (h % 2 == 0) | (j > i),
}
LONG_MASKS: dict[str, Any] = {
    "long window": lambda b, h, i, j: (i >= j) & (i - j < 130),
    "long documents": lambda b, h, i, j: i // 150 == j // 150,
    "last keys": lambda b, h, i, j: j > 1300 + i,
    "no keys": lambda b, h, i, j: (i > 100) & (j < 64 * b),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def operands(
    dtype: torch.dtype = torch.float32, shared: int = HEADS, batch: int = BATCH, width: int = SIZE, rows: int = ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, heads beside positions in memory."""
    generator = torch.Generator().manual_seed(1)
    keys = rows * KEYS // ROWS
    shapes = (BATCH, rows, HEADS, SIZE), (batch, keys, shared, SIZE), (batch, keys, shared, width)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v


def program(change: str = "none", mask: str = "none", rows: int = ROWS, **how: Any) -> Callable[..., Any]:
    keys, counts = rows * KEYS // ROWS, {**MASKS, **LONG_MASKS}[mask]
    blocks = create_block_mask(counts, BATCH, HEADS, rows, keys, device="cpu") if counts else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=CHANGES[change], block_mask=blocks, enable_gqa=True, **how)

    return attend


@torch.no_grad()
def check(function: Callable[..., Any], given: tuple[Tensor, ...], kernel: bool | None = True, **how: Any) -> None:
    """Results and strides are eager's, float64 deciding. kernel: whether one computes them; None if any may do so."""
    with recorded() as records:
        ours = compiled(function, **how)(*given)
    found = [each for record in records for each in record.decisions if each.rule == "transform.flex_attention"]
    assert len(found) == 1 and kernel in (None, found[0].ok), found
    assert_matches(ours, function(*given), function(*(each.double() for each in given)))


@pytest.mark.sampled
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("change", CHANGES)
def test_functions_of_positions(change: str, mask: str) -> None:
    check(program(change, mask), operands(), kernel=change not in IN_MEMORY)


@pytest.mark.parametrize("mask", ["documents", "padded"])
@pytest.mark.parametrize(
    "given",
    [
        operands(torch.bfloat16, shared=2),
        operands(torch.float16, shared=1),
        operands(shared=2, batch=1),
        tuple(each.contiguous() for each in operands()),
    ],
)
def test_types_and_groups(given: tuple[Tensor, ...], mask: str) -> None:
    check(program("slopes", mask), given)


@pytest.mark.parametrize("given", [operands(torch.float64), operands(width=16), operands(width=16, shared=2, batch=1)])
def test_what_no_kernel_covers(given: tuple[Tensor, ...]) -> None:
    check(program("slopes", "documents"), given, kernel=False)


@pytest.mark.parametrize("change", ["none", "slopes", "capped", "scaled"])
@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
def test_logarithms_of_sums(change: str, mask: str) -> None:
    """Also of rows of which no key counts: -inf."""
    check(program(change, mask, return_lse=True), operands(), kernel=change not in IN_MEMORY)


@pytest.mark.parametrize("change", ["none", "capped", "scaled"])
def test_sizes_that_are_not_known(change: str) -> None:
    check(program(change, "documents"), operands(shared=2), kernel=change not in IN_MEMORY, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", LONG_MASKS)
def test_keys_that_are_hidden_from_all_rows_at_work(mask: str, dtype: torch.dtype) -> None:
    """More of them than a block has."""
    check(program("none", mask, rows=800), operands(dtype, shared=2, rows=800))


@pytest.mark.parametrize("change", ["none", "slopes", "capped and more"])
def test_what_hidden_keys_hold_does_not_count(change: str) -> None:
    q, k, v = operands()
    k[0, :, 50:] = float("nan")
    check(program(change, "padded"), (q, k, v))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hidden_values_count_as_zero_times_what_they_are(value: float) -> None:
    q, k, v = operands(batch=1)
    v[0, 1, 70, 3] = value
    check(program("none", "later"), (q, k, v))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_scores_hide_do_not_count(value: float) -> None:
    q, k, v = operands()
    k[:, :, 50:] = value
    check(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(j < 50, s, -float("inf"))), (q, k, v)
    )


def with_number(number: float) -> dict[str, Callable[..., Tensor]]:
    return {
        "added": lambda s, b, h, i, j: s + number,
        "factor": lambda s, b, h, i, j: s * number,
        "share": lambda s, b, h, i, j: number * torch.tanh(s / number),
        "condition": lambda s, b, h, i, j: torch.where(j < number - 1, s, -float("inf")),
        "index": lambda s, b, h, i, j: s + TABLE[h, (i - j + int(number)) % KEYS],
    }


@pytest.mark.parametrize("number", [30, 2.5])
@pytest.mark.parametrize("change", with_number(1))
def test_numbers_that_only_a_call_tells(change: str, number: float) -> None:
    function = with_number(number)[change]
    check(
        lambda q, k, v: flex_attention(q, k, v, function),
        operands(),
        kernel=None,
        dynamic=True,
        fullgraph=False,
    )


def test_a_scale_that_only_a_call_tells() -> None:
    check(lambda q, k, v: flex_attention(q, k, v, scale=2), operands(), kernel=None, dynamic=True)


def test_it_can_be_left_in_memory() -> None:
    check(program("none", "causal"), operands(), kernel=False, options={"contract": False})


def test_positions_have_64_bits() -> None:
    def far(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + (i * 2**30 + j) * 1e-10

    check(lambda q, k, v: flex_attention(q, k, v, score_mod=far), operands())
