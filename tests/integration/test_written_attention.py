"""Attention that is written out, as a kernel: its forms against eager's, and what stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.integration.traced import decisions, said, traced, with_gradients
from tests.small_models import VOCABULARY, tokens
from tests.support import assert_matches, error, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
hf: Any = transformers
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULE, KERNEL, ATEN = "transform.attention", "codegen.attention", "lower.fallback"


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which the kernel is no faster are tested like all others."""
    monkeypatch.setattr("pellucid.capture.attention._check_speed", lambda *_, **__: ())


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


# ------------------------------------------------------------------------------------------------ the forms

PADDED = torch.tensor([[True] * 20, [True] * 11 + [False] * 9])[:, None, None]
ADDED = torch.linspace(-2, 2, 20 * 20).view(20, 20).sin()


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.25) @ v


def divided_before_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(softmax(torch.matmul(q / math.sqrt(q.shape[-1]), k.transpose(-1, -2))), v)


def scaled_on_both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.25
    return softmax((q * scale) @ (k * scale).mT) @ v


def divided_by_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT / torch.full([], 4.0, dtype=q.dtype)) @ v


def no_scale_but_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = ADDED.to(q.dtype)[None] * torch.arange(1, 5, dtype=q.dtype)[:, None, None]
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def added_in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = (1.0 - PADDED.to(q.dtype)) * 10000.0
    return softmax((ADDED.to(q.dtype) + q @ k.mT - hidden) * 0.5) @ v


def in_f32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 16**-0.5 + ADDED.to(q.dtype)
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return torch.matmul(F.softmax(scores, dim=-1, dtype=wide).to(q.dtype), v)


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT * 0.25).masked_fill(~PADDED, -INF)) @ v


def filled_with_the_lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 4
    return softmax(torch.where(PADDED, scores, torch.full([], lowest(scores), dtype=q.dtype))) @ v


def filled_with_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(torch.where(PADDED, q @ k.mT * 0.25, torch.tensor(-INF, dtype=q.dtype))) @ v


def filled_before_the_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT).masked_fill(PADDED.logical_not(), -1e4) * 0.25) @ v


def filled_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    return softmax((q @ k.mT * 0.25).masked_fill(~seen, -INF).masked_fill(~PADDED, -1e4)) @ v


def filled_and_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    return softmax(torch.where(seen, q @ k.mT * 0.25, -INF) + ADDED.to(q.dtype)) @ v


def causal_by_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position = torch.arange(q.shape[2])
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25
    weights = softmax(scores.masked_fill(position[None, :] > position[:, None], -INF))
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def causal_by_triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.25 + torch.full((20, 20), -INF, dtype=q.dtype).triu(1)) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, 5, dtype=q.dtype)
    position = torch.arange(k.shape[2], dtype=q.dtype)
    return softmax(q @ k.mT * 0.25 + slopes[:, None, None] * (position[None, :] - position[:, None])) @ v


def merged_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.reshape(8, 20, 16) for each in (q, k, v))
    weights = softmax(torch.bmm(q * 0.25, k.transpose(1, 2)) + ADDED.to(q.dtype))
    return torch.bmm(weights, v).view(2, 4, 20, 16).transpose(1, 2).reshape(2, 20, 64)


def merged_heads_with_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM has it: `baddbmm` of a bias for each head, and a mask on four dimensions."""
    q, k, v = (each.reshape(8, 20, 16) for each in (q, k, v))
    bias = (torch.arange(20, dtype=q.dtype) * 0.125).expand(2, 4, 20).reshape(8, 1, 20)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=1.0).view(2, 4, 20, 20)
    weights = softmax(scores + ADDED.to(q.dtype)).view(8, 20, 20)
    return torch.bmm(weights, v)


def positions_in_two_directions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MViT has it: positions are those of an image of 4 x 5, and their distances are added on six dimensions."""
    lines, columns = ADDED.view(1, 1, 4, 5, 20)[..., :4].to(q.dtype), ADDED[:5, :5].to(q.dtype)
    scores = (q @ k.mT * 0.25).view(2, 4, 4, 5, 4, 5)
    scores = scores + lines[..., None] + columns[None, None, None, :, None, :]
    return softmax(scores.view(2, 4, 20, 20)) @ v


def positions_of_merged_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As SAM has it: the same on five dimensions, where a position is hidden from a line."""
    q, k, v = (each.reshape(8, 20, 16) for each in (q, k, v))
    scores = (q @ k.mT * 0.25).view(8, 4, 5, 4, 5) + ADDED[:4, :4].to(q.dtype)[None, :, None, :, None]
    scores = scores.masked_fill(torch.arange(20).view(4, 5)[1:2].eq(7), -INF)
    return softmax(scores.view(8, 20, 20)) @ v


def a_bias_of_split_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bias has as few dimensions as a matrix, and is none of rows and keys."""
    scores = (q @ k.mT * 0.25).view(2, 4, 20, 4, 5) + ADDED[:4, :5].to(q.dtype)
    scores = scores + ADDED[:4].view(1, 4, 1, 4, 5).to(q.dtype)
    return softmax(scores.view(2, 4, 20, 20)) @ v


def one_head_of_split_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores of three dimensions, to which a mask of four is added."""
    scores = (q[:, 0] @ k[:, 0].mT * 0.25).reshape(2, 4, 5, 20) + ADDED.to(q.dtype).view(4, 5, 20)
    return softmax(scores.reshape(2, 20, 20)) @ v[:, 0]


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q[:, 0] @ k[:, 0].mT * 0.25) @ v[:, 0]


def heads_beside_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From one projection each, as most models have it; keys are permuted at once."""
    wide = [each.transpose(1, 2).reshape(2, 20, 64) * 1.5 for each in (q, k, v)]
    q, k, v = (each.view(2, 20, 4, 16) for each in wide)
    weights = softmax(q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * 0.25)
    return (weights @ v.permute(0, 2, 1, 3)).transpose(1, 2).contiguous().view(2, 20, 64)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As LLaMA has it: queries of two heads share keys, which are repeated."""
    k, v = (each[:, :2, None].expand(2, 2, 2, 20, 16).reshape(2, 4, 20, 16) for each in (k, v))
    return (softmax(q @ k.transpose(2, 3) * 0.25 + ADDED.to(q.dtype)) @ v).transpose(1, 2).contiguous()


def one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k[:, :1].expand_as(k).mT * 0.25) @ v


def values_read_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmax(q @ k.mT * 0.25)
    return (weights @ v).relu() + v + q


FORMS = (
    scaled, divided_before_the_product, scaled_on_both_sides, divided_by_a_tensor, no_scale_but_a_bias, added_in_order,
    in_f32, filled, filled_with_the_lowest, filled_with_a_tensor, filled_before_the_scale, filled_twice,
    filled_and_added, causal_by_positions, causal_by_triu, alibi, merged_heads, merged_heads_with_a_bias,
    positions_in_two_directions, positions_of_merged_heads, a_bias_of_split_keys, one_head, one_head_of_split_rows,
    heads_beside_positions,
    shared_keys, one_head_of_keys, values_read_twice,
)  # fmt: skip

Form = Callable[..., Tensor]


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma 2 has it."""
    scores = torch.tanh(q @ k.mT * 0.25 / 1.5) * 1.5
    return (softmax(scores + ADDED.to(q.dtype)).to(q.dtype) @ v).transpose(1, 2).contiguous()


def capped_at_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT).tanh().masked_fill(~PADDED, -INF)) @ v


def capped_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(-2 * ((q @ k.mT).tanh() * 3)) @ v


def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As gpt-oss has it: a score of each head that belongs to no key; queries of two heads share keys."""
    k, v = (each[:, :2, None].expand(2, 2, 2, 20, 16).reshape(2, 4, 20, 16) for each in (k, v))
    scores = q @ k.transpose(2, 3) * 0.25 + ADDED.to(q.dtype)
    beside = torch.linspace(-1, 2, 4).to(q.dtype).reshape(1, -1, 1, 1).expand(2, -1, 20, -1)
    every = torch.cat([scores, beside], dim=-1)
    every = every - every.max(dim=-1, keepdim=True).values
    return (softmax(every)[..., :-1] @ v).transpose(1, 2).contiguous()


def sinks_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some of which are nothing, and some all; on three dimensions, and without a maximum that is subtracted."""
    q, k, v = (each.reshape(8, 20, 16) for each in (q, k, v))
    beside = q[..., :1].masked_fill(torch.arange(20).view(20, 1) == 3, -INF) * 10
    return softmax(torch.cat([q @ k.mT * 0.25, beside], -1))[:, :, :20] @ v


def sinks_beside_capped_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT).masked_fill(HIDDEN, -INF)
    every = torch.cat([scores, q[..., 1:2]], 3)
    return softmax(every - every.amax(-1, keepdim=True))[..., :-1] @ v


def sinks_of_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On five dimensions."""
    q, k, v = q.view(2, 2, 2, 20, 16), k[:, :2, None], v[:, :2, None]
    every = torch.cat([q @ k.mT * 0.25, q[..., :1]], -1)
    return softmax(every)[..., :-1] @ v


UNTRAINED = (capped, capped_at_one, capped_below, sinks, sinks_of_rows, sinks_beside_capped_scores, sinks_of_groups)

# All forms in f32; in narrow types those of which each part of the kernel is different, and all of them where time does
# not matter.
NARROW_FORMS = (in_f32, filled_and_added, shared_keys)
CASES = [
    pytest.param(
        form,
        dtype,
        id=f"{form.__name__}-{dtype}",
        marks=() if dtype is torch.float32 or form in NARROW_FORMS else pytest.mark.slow,
    )
    for form in FORMS
    for dtype in DTYPES
]


def trained(function: Form, folder: Path, *args: Tensor, **options: Any) -> tuple[Any, list[dict[str, str]]]:
    """The result and gradients of the compiled function, and the compiler's decisions."""

    def run(*args: Tensor) -> Any:
        torch._dynamo.reset()
        chosen = {"trace": str(folder), "verify": True}
        return torch.compile(function, backend="pellucid", options=chosen, **options)(*args)

    return with_gradients(run, *args), decisions(folder)


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_forms(tmp_path: Path, form: Form, dtype: torch.dtype) -> None:
    args = [heads(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    result, rows = traced(form, tmp_path, *args)
    with torch.no_grad():
        assert_matches(result, form(*args), form(*widened(args)))
    assert [row["ok"] for row in rows if row["rule"] == RULE] == ["1"]
    assert len(said(rows, KERNEL)) == 1 and not [why for why in said(rows, ATEN) if "multiplication" not in why]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", UNTRAINED, ids=lambda form: form.__name__)
def test_forms_without_gradients(tmp_path: Path, form: Form, dtype: torch.dtype) -> None:
    """A kernel computes them, but not where gradients are taken."""
    args = [heads(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    result, rows = traced(form, tmp_path / "inference", *args)
    with torch.no_grad():
        assert_matches(result, form(*args), form(*widened(args)))
    assert len(said(rows, KERNEL)) == 1
    results, rows = trained(form, tmp_path / "training", *args)
    assert_matches(results, with_gradients(form, *args), with_gradients(form, *widened(args)))
    assert not said(rows, KERNEL) and "takes no gradients" in " ".join(said(rows, RULE))


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_gradients_of_forms(tmp_path: Path, form: Form, dtype: torch.dtype) -> None:
    """Forward and backward are a kernel each, and backward is given no matrix of weights."""
    args = [heads(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    results, rows = trained(form, tmp_path, *args)
    assert_matches(results, with_gradients(form, *args), with_gradients(form, *widened(args)))
    assert [row["ok"] for row in rows if row["rule"] == RULE] == ["1"]
    assert len(said(rows, KERNEL)) == 2
    kept = [row["facts"] for row in rows if row["rule"] == "transform.keep" and row["ok"] == "1"]
    weights = 8 * 20 * 20 * args[0].itemsize
    if form is not merged_heads_with_a_bias:  # whose mask is the sum of two, as large
        assert all(int(fact.removeprefix("bytes=")) < weights for fact in kept)


# ------------------------------------------------------------------------------------------------ sizes and values


def any_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From projections, causal where as many keys as queries; queries of two heads share keys."""
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    q = q.view(batch, rows, 4, 16).transpose(1, 2)
    k, v = (each.view(batch, keys, 2, 16).transpose(1, 2) for each in (k, v))
    k, v = (each[:, :, None].expand(batch, 2, 2, keys, 16).reshape(batch, 4, keys, 16) for each in (k, v))
    seen = torch.arange(keys) <= torch.arange(rows)[:, None] + (keys - rows)
    scores = torch.where(seen, q @ k.mT * 0.25, lowest(q))
    return (softmax(scores) @ v).transpose(1, 2).reshape(batch, rows, 64)


@pytest.mark.sampled
def test_sizes_that_are_symbols(tmp_path: Path) -> None:
    """One program for all lengths, forward and backward."""
    torch._dynamo.reset()
    chosen = {"trace": str(tmp_path), "verify": True}
    compiled = torch.compile(any_lengths, backend="pellucid", dynamic=True, options=chosen)
    for batch, rows, keys in ((2, 7, 9), (3, 40, 70), (2, 33, 33)):
        args = heads(batch, rows, 64), heads(batch, keys, 32), heads(batch, keys, 32)
        expected = with_gradients(any_lengths, *args), with_gradients(any_lengths, *widened(args))
        assert_matches(with_gradients(compiled, *args), *expected)
        with torch.no_grad():
            assert_matches(compiled(*args), expected[0][0], expected[1][0])
    texts = {file.parent.name.split("-")[-1]: file.read_text() for file in tmp_path.rglob("decisions.csv")}
    assert len(texts) == 3 and all(KERNEL in text for text in texts.values())


def test_long_rows_and_blocks_of_keys(tmp_path: Path) -> None:
    """Several blocks of keys, of which a row may see none in the first."""
    q, k, v = heads(1, 2, 70, 64), heads(1, 2, 1100, 64), heads(1, 2, 1100, 64)
    late = (torch.arange(1100) > 600) & (torch.arange(1100) < 1000)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax((q @ k.mT * 0.125).masked_fill(~late, -INF)) @ v

    results, rows = trained(function, tmp_path, q, k, v)
    assert_matches(results, with_gradients(function, q, k, v), with_gradients(function, *widened((q, k, v))))
    assert len(said(rows, KERNEL)) == 2


LATE = torch.arange(700) - torch.arange(190)[:, None] - 400  # of a key, behind the row
HIDING = {
    "causal": torch.where(LATE <= 0, 0.0, torch.finfo(torch.float32).min),
    "a window": torch.where((LATE <= 0) & (LATE > -90), ADDED[0, 0], -INF),
    "padded": torch.where(torch.arange(700) < 300, 0.0, -1e4).expand(190, 700),
    "documents": torch.where(LATE // 150 == -1, 0.0, -1e4),
    "rows of nothing": torch.where((LATE < -500) | (LATE > 200), 0.0, torch.finfo(torch.float32).min),
    "rows of -inf": torch.where((LATE < -500) | (LATE > 200), 0.0, -INF),
    "a long way down": torch.where(LATE <= 0, -2000.0, -4000.0),
    "nan": torch.where(LATE <= 0, 0.0, -INF).masked_fill(LATE == 130, NAN),
}


def spoiled(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose scores are exact, however great."""
    q, k, v = heads(1, 2, 190, 16), heads(1, 2, 700, 16), heads(1, 2, 700, 16)
    q, k = ((each * 8).round() / 8 for each in (q, k))
    match kind:
        case "an infinite key":
            k[0, 0, 650, 3] = INF
        case "a key that is nan":
            k[0, 1, 10, 3] = NAN
        case "an infinite value":
            v[0, 0, 690, 3] = INF
        case "a value that is nan":
            v[0, 0, 5, 3] = NAN
        case "an infinite query":
            q[0, 0, 30] = -INF
        case "great scores":
            q, k = q * 40, k * 40
        case "a great key":
            k[0, :, 140], k[0, :, 500] = 2e3, -2e3
    return q, k, v


@pytest.mark.sampled
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize(
    "kind",
    [
        "", "an infinite key", "a key that is nan", "an infinite value", "a value that is nan", "an infinite query",
        "great scores", "a great key",
    ],
)  # fmt: skip
def test_keys_that_a_mask_hides_by_addition(tmp_path: Path, hiding: str, kind: str) -> None:
    """They are left out where nothing of them could show, and are there where something does."""
    mask = HIDING[hiding]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT * 0.25 + mask.to(q.dtype)) @ v

    args = spoiled(kind)
    results, rows = trained(function, tmp_path, *args)
    eager, exact = with_gradients(function, *args), with_gradients(function, *widened(args))
    judged = 1 if "great" in kind else 4  # where one weight is 1, gradients are differences of what rounding leaves
    assert_matches(results[:judged], eager[:judged], exact[:judged])
    assert len(said(rows, KERNEL)) == 2


HIDDEN = torch.zeros(20, 20, dtype=torch.bool)
HIDDEN[3], HIDDEN[5, :11], HIDDEN[:, 19] = True, True, True


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [-INF, -1e4, None, 0.5])
def test_rows_that_see_nothing(tmp_path: Path, number: float | None, dtype: torch.dtype) -> None:
    """Uniform where a number hides scores, whatever it is; NaN where -inf does, and so in gradients."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax((q @ k.mT * 0.25).masked_fill(HIDDEN, lowest(q) if number is None else number)) @ v

    args = [heads(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    results, rows = trained(function, tmp_path, *args)
    expected = with_gradients(function, *args), with_gradients(function, *widened(args))
    assert_matches(results, *expected)
    assert len(said(rows, KERNEL)) == 2
    assert results[0][:, :, 3].isnan().all() == (number == -INF) and results[0][:, :, 4].isfinite().all()


@pytest.mark.parametrize("number", [-INF, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_by_addition(tmp_path: Path, number: float) -> None:
    added = torch.zeros(20, 20).masked_fill(HIDDEN, number)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT * 0.25 + added.to(q.dtype)) @ v

    args = [heads(2, 4, 20, 16) for _ in range(3)]
    results, rows = trained(function, tmp_path, *args)
    assert_matches(results, with_gradients(function, *args), with_gradients(function, *widened(args)))
    assert len(said(rows, KERNEL)) == 2


@pytest.mark.parametrize(
    "form", [scaled, filled, filled_with_the_lowest, causal_by_positions], ids=lambda f: f.__name__
)
def test_infinities_and_nan(tmp_path: Path, form: Form) -> None:
    """In operands, also where a mask hides the scores that they make."""
    q, k, v = heads(2, 4, 20, 16), heads(2, 4, 20, 16), heads(2, 4, 20, 16)
    q[0, 0, 3, 2], q[0, 1, 0, 1], k[0, 2, 7, 3], k[1, 3, 15, 2] = NAN, -INF, INF, NAN
    result, rows = traced(form, tmp_path, q, k, v)
    assert_matches(result, form(q, k, v), form(*widened((q, k, v))))
    assert len(said(rows, KERNEL)) == 1


@pytest.mark.parametrize("form", [sinks_of_rows, sinks_beside_capped_scores, capped], ids=lambda f: f.__name__)
def test_infinities_and_nan_in_sinks_and_capped_scores(tmp_path: Path, form: Form) -> None:
    q, k, v = heads(2, 4, 20, 16), heads(2, 4, 20, 16), heads(2, 4, 20, 16)
    q[0, 0, 4, 0], q[0, 0, 5, 0], q[0, 0, 6, 0], q[0, 0, 7, 1], k[1, 2, 7, 3] = NAN, INF, -INF, INF, INF
    result, rows = traced(form, tmp_path, q, k, v)
    assert_matches(result, form(q, k, v), form(*widened((q, k, v))))
    assert len(said(rows, KERNEL)) == 1


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_sinks_of_any_number_of_rows(tmp_path: Path, rows: int) -> None:
    """Few rows read keys where they are, and one of each head is a row of those that share keys. Sizes are symbols."""

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        batch, keys = k.shape[0], k.shape[1]
        q = q.view(batch, q.shape[1], 4, 16).transpose(1, 2)
        k, v = (each.view(batch, keys, 2, 16).transpose(1, 2) for each in (k, v))
        k, v = (each[:, :, None].expand(batch, 2, 2, keys, 16).reshape(batch, 4, keys, 16) for each in (k, v))
        beside = sink.view(1, -1, 1, 1).expand(batch, -1, q.shape[2], -1)
        scores = torch.cat([torch.tanh(q @ k.mT / 5) * 5, beside], -1)
        return (softmax(scores)[..., :-1] @ v).transpose(1, 2).reshape(batch, -1, 64)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pellucid", dynamic=True, options={"trace": str(tmp_path)})
    for keys in (50, 700):
        args = heads(2, rows, 64), heads(2, keys, 32), heads(2, keys, 32), torch.linspace(-2, 3, 4)
        with torch.no_grad():
            assert_matches(compiled(*args), function(*args), function(*widened(args)))
    assert len(said(decisions(tmp_path), KERNEL)) == 1


@pytest.mark.parametrize("size", [2.0**10, 2.0**17, 2.0**30])
def test_great_scores(tmp_path: Path, size: float) -> None:
    """What is lost where they are rounded is in no weight. Sums of products are exact: only the scale is not."""
    q, k = (torch.randint(-3, 4, (2, 4, 20, 16)).float() for _ in range(2))
    q, v = q * size, heads(2, 4, 20, 16)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q @ k.mT * 0.2425) @ v

    for form in (function, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2425)):
        results, rows = trained(form, tmp_path / str(form is function), q, k, v)
        eager, exact = with_gradients(form, q, k, v), with_gradients(form, *widened((q, k, v)))
        assert_matches(results[0], eager[0], exact[0])
        assert all(each.isfinite().all() for each in results)
        assert len(said(rows, KERNEL)) == (2 if form is function else 1)  # ATen has small forwards of its operator


SHOWN = torch.arange(20) < 13


def hidden_after_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return softmax(torch.where(SHOWN, q @ k.mT * 0.25 + bias, -INF)) @ v


def hidden_before_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return softmax(torch.where(SHOWN, q @ k.mT * 0.25, -INF) + bias) @ v


def hidden_twice_beside_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(~SHOWN, -INF) + bias
    return softmax(scores.masked_fill(torch.arange(20) == 5, -INF)) @ v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form", [hidden_after_a_bias, hidden_before_a_bias, hidden_twice_beside_a_bias], ids=lambda f: f.__name__
)
def test_what_is_hidden_beside_a_bias_does_not_count(tmp_path: Path, form: Form, dtype: torch.dtype) -> None:
    """Neither what its scores are, nor, if it is added before, what the bias is."""
    q, k, v = (heads(2, 4, 20, 16, dtype=dtype) for _ in range(3))
    for at, number in ((15, NAN), (16, INF), (5, -INF if form is hidden_twice_beside_a_bias else 0.0)):
        k[:, :, at] = number
    bias = ADDED.to(dtype).clone()
    if form is hidden_after_a_bias:
        bias[:, 14], bias[3, 17] = NAN, INF

    result, rows = traced(form, tmp_path / "inference", q, k, v, bias)
    with torch.no_grad():
        assert_matches(result, form(q, k, v, bias), form(*widened((q, k, v, bias))))
    assert len(said(rows, KERNEL)) == 1 and result.isfinite().all()
    args = [each.nan_to_num(0.0, 0.0, 0.0) for each in (q, k, v)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return form(q, k, v, bias.to(q.dtype))

    results, rows = trained(function, tmp_path / "training", *args)
    assert_matches(results, with_gradients(function, *args), with_gradients(function, *widened(args)))
    assert len(said(rows, KERNEL)) == 2


def test_an_infinite_value_of_which_nothing_is_hidden(tmp_path: Path) -> None:
    q, k, v = heads(2, 4, 20, 16), heads(2, 4, 20, 16), heads(2, 4, 20, 16)
    v[0, 0, 3, 2], v[1, 1, 4, 5] = INF, NAN
    result, _ = traced(scaled, tmp_path, q, k, v)
    assert_matches(result, scaled(q, k, v), scaled(*widened((q, k, v))))


# ------------------------------------------------------------------------------------------------ what stays


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(q @ k.mT * 0.25)
    return weights @ v, weights


def weights_read_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmax(q @ k.mT * 0.25)
    return weights @ v + weights.sum(-1, keepdim=True)


def scores_read_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    return softmax(scores) @ v + scores.amax(-1, keepdim=True)


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.25, -2) @ v


def turned_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.25).mT.contiguous() @ v


def two_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = softmax(q @ k.mT * 0.25)
    return weights @ v + weights @ k


def a_power_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT).sin()) @ v


def capped_after_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT + ADDED.to(q.dtype)).tanh() * 3) @ v


def capped_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(((q @ k.mT).tanh() * 2).tanh()) @ v


def capped_at_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax((q @ k.mT).tanh() * 0) @ v


def two_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(torch.cat([q @ k.mT, q[..., :2]], -1))[..., :-2] @ v


def a_sink_before_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(torch.cat([q[..., :1], q @ k.mT], -1))[..., 1:] @ v


def a_sink_in_the_place_of_a_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(torch.cat([q @ k.mT, q[..., :1]], -1))[..., 1:] @ v


def a_sink_with_a_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(torch.cat([q @ k.mT, q[..., :1]], -1)) @ torch.cat([v, v[:, :, :1]], 2)


def less_than_another_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return softmax(scores - (scores * 2).amax(-1, keepdim=True)) @ v


def longer_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT * 0.25) @ torch.cat([v, v], -1)


def wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled(q.double(), k.double(), v.double())


def added_after_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A row of nothing but the number is not uniform, since a bias is added to it."""
    return softmax((q @ k.mT).masked_fill(HIDDEN, -50.0) + ADDED.to(q.dtype)) @ v


KEPT = {
    with_weights: "the caller reads", weights_read_elsewhere: "reads its weights or scores",
    scores_read_elsewhere: "reads its weights or scores", over_queries: "sums over something else",
    two_values: "sums over", longer_values: "values as long as keys", wide: "in f32, bf16 and f16",
    added_after_a_number: "does not hide them",
    a_power_of_scores: "", turned_weights: "", capped_after_a_mask: "", capped_twice: "", capped_at_nothing: "",
    two_sinks: "", a_sink_before_keys: "", a_sink_in_the_place_of_a_key: "sums over", a_sink_with_a_value: "sums over",
    less_than_another_maximum: "reads its weights or scores",
}  # fmt: skip


@pytest.mark.parametrize("form", KEPT, ids=lambda form: form.__name__)
def test_what_is_no_such_attention(tmp_path: Path, form: Callable[..., Any]) -> None:
    """Each with its reason; what is no attention at all without one."""
    args = [heads(2, 4, 20, 16) for _ in range(3)]
    result, rows = traced(form, tmp_path, *args)
    with torch.no_grad():
        assert_matches(result, form(*args), form(*widened(args)))
    assert not said(rows, KERNEL)
    found = [row for row in rows if row["rule"] == RULE]
    assert [KEPT[form] in row["why"] and row["ok"] == "0" for row in found] == [True] * bool(KEPT[form])


def test_a_softmax_that_is_no_attention(tmp_path: Path) -> None:
    x, w = heads(20, 16), heads(16, 30)
    result, rows = traced(lambda x, w: softmax(x @ w), tmp_path, x, w)
    assert_matches(result, softmax(x @ w), softmax(x.double() @ w.double()))
    assert not [row for row in rows if row["rule"] == RULE]


def test_dropout_of_weights(tmp_path: Path) -> None:
    """Draws eager's numbers, from weights in memory."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(softmax(q @ k.mT * 0.25), 0.3) @ v

    args = [heads(2, 4, 20, 16) for _ in range(3)]
    torch.manual_seed(1)
    results, rows = trained(function, tmp_path, *args)
    torch.manual_seed(1)
    for ours, eager in zip(results, with_gradients(function, *args), strict=True):
        assert torch.allclose(ours, eager, atol=1e-5)
    assert "dropout draws" in " ".join(said(rows, RULE)) and not said(rows, KERNEL)


def test_a_bias_that_is_learned(tmp_path: Path) -> None:
    """Its gradient is that of scores, which no kernel writes. Without gradients it is as any mask."""
    q, bias = heads(2, 4, 20, 16), heads(4, 20, 20)

    def function(q: Tensor, bias: Tensor) -> Tensor:
        return softmax(q @ (q * 0.5).mT + bias) @ (q + 1)

    results, rows = trained(function, tmp_path / "trained", q, bias)
    assert_matches(results, with_gradients(function, q, bias), with_gradients(function, *widened((q, bias))))
    assert not said(rows, KERNEL) and [row["ok"] for row in rows if row["rule"] == RULE] == ["0"]
    _, rows = traced(function, tmp_path / "inference", q, bias)
    assert len(said(rows, KERNEL)) == 1


def test_queries_without_gradients(tmp_path: Path) -> None:
    q, k = heads(2, 4, 20, 16), heads(2, 4, 20, 16)

    def function(k: Tensor) -> Tensor:
        return scaled(q.to(k.dtype), k, k * 2)

    results, rows = trained(function, tmp_path, k)
    assert_matches(results, with_gradients(function, k), with_gradients(function, k.double()))
    assert "all three" in " ".join(said(rows, RULE)) and not said(rows, KERNEL)


def test_the_option_contract(tmp_path: Path) -> None:
    args = [heads(2, 4, 20, 16) for _ in range(3)]
    _, rows = traced(scaled, tmp_path, *args, contract=False)
    assert not said(rows, KERNEL) and not said(rows, RULE)


def test_the_price_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prices are told; few rows of many keys in f32 stay as they are, and what stays in cache is trained so."""
    monkeypatch.undo()
    monkeypatch.setenv("PELLUCID_MACHINE", "reference")
    q, k = heads(1, 4, 512, 64), heads(1, 4, 512, 64)
    for rows, training, ok in ((512, False, True), (512, True, True), (4, False, False), (64, True, False)):
        given = q[:, :, :rows].contiguous(), k[:, :, : max(rows, 64)].contiguous()

        def function(q: Tensor, k: Tensor) -> Tensor:
            return softmax(q @ k.mT * 0.125) @ (k * 2)

        folder = tmp_path / f"{rows}{training}"
        _, said_so = trained(function, folder, *given) if training else traced(function, folder, *given)
        found = [row for row in said_so if row["rule"] == RULE]
        assert [row["ok"] for row in found] == [str(int(ok))], found
        assert not ok or ("kernel_ns=" in found[0]["facts"] and "written_ns=" in found[0]["facts"])


# ------------------------------------------------------------------------------------------------ models


def bert() -> Any:
    config = hf.BertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=72, intermediate_size=144,
                           attn_implementation="eager")  # fmt: skip
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[1, 13:] = 0
    return hf.BertModel(config), {"input_ids": tokens(), "attention_mask": mask}


def gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_embd=72, n_head=4, n_positions=256, use_cache=False,
                           bos_token_id=0, eos_token_id=None, attn_implementation="eager")  # fmt: skip
    return hf.GPT2LMHeadModel(config), {"input_ids": tokens()}


def t5() -> Any:
    config = hf.T5Config(vocab_size=VOCABULARY, num_layers=2, d_model=72, d_ff=144, d_kv=18, num_heads=4,
                         use_cache=False, decoder_start_token_id=0, attn_implementation="eager")  # fmt: skip
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(), "decoder_input_ids": tokens(length=13)}


def llama() -> Any:
    config = hf.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=72, intermediate_size=136,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                            use_cache=False, bos_token_id=0, eos_token_id=None,
                            attn_implementation="eager")  # fmt: skip
    return hf.LlamaForCausalLM(config), {"input_ids": tokens()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "attentions", "dtype"),
    [
        (bert, 2, torch.float32),
        (gpt2, 2, torch.bfloat16),
        (t5, 6, torch.float32),
        (llama, 2, torch.float32),
    ],
)
def test_models(tmp_path: Path, make: Callable[[], Any], attentions: int, dtype: torch.dtype) -> None:
    """Hugging Face's models as they write attention out."""
    torch.manual_seed(3)
    model, inputs = make()
    model = model.to(dtype).eval()
    wide = copy.deepcopy(model).double()
    result, rows = traced(lambda: model(**inputs)[0], tmp_path)
    with torch.no_grad():
        eager, exact = model(**inputs)[0], wide(**inputs)[0]
    assert error(result, exact) <= 2 * error(eager, exact) + (1e-6 if dtype is torch.float32 else 1e-3)
    assert len(said(rows, KERNEL)) == attentions


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "attentions"), [(bert, 2), (gpt2, 2), (llama, 2)])
def test_models_are_trained(tmp_path: Path, make: Callable[[], Any], attentions: int) -> None:
    torch.manual_seed(3)
    model, inputs = make()
    model.eval()  # without dropout
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="pellucid", options={"trace": str(tmp_path), "verify": True})

    def gradients(model: Any, run: Any) -> list[Tensor]:
        out = run(**inputs)[0]
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]

    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    found = gradients(model, compiled), gradients(eager, eager), gradients(wide, wide)
    scale = max(exact.abs().max().item() for exact in found[2])
    for ours, theirs, exact in zip(*found, strict=True):
        far = (theirs.double() - exact).abs().max().item()
        assert (ours.double() - exact).abs().max().item() <= 2 * far + 1e-6 * scale
    _, rows = traced(torch.neg, tmp_path, torch.ones(1))
    assert len(said(rows, KERNEL)) == 2 * attentions
