"""Attention that is written out, as a kernel: its forms against eager's, and what stays as it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.integration.test_convolution import said, traced
from tests.small_models import VOCABULARY, tokens
from tests.support import assert_matches, error, tensors, widened

F = torch.nn.functional
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
    in_f32, filled, filled_with_the_lowest, filled_before_the_scale, filled_twice, filled_and_added,
    causal_by_positions, causal_by_triu, alibi, merged_heads, merged_heads_with_a_bias, one_head,
    heads_beside_positions, shared_keys, one_head_of_keys, values_read_twice,
)  # fmt: skip

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def with_gradients(run: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...]:
    """A result, and the gradients of all arguments."""
    given = [each.detach().requires_grad_() for each in args]
    out = run(*given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.detach(), *torch.autograd.grad((out * weights).sum(), given))


def trained(function: Form, folder: Path, *args: Tensor, **options: Any) -> tuple[Any, list[dict[str, str]]]:
    """The result and gradients of the compiled function, and the compiler's decisions."""

    def run(*args: Tensor) -> Any:
        torch._dynamo.reset()
        chosen = {"trace": str(folder), "verify": True}
        return torch.compile(function, backend="pellucid", options=chosen, **options)(*args)

    results = with_gradients(run, *args)
    _, rows = traced(torch.neg, folder, torch.ones(1))  # reads the decisions
    return results, rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms(tmp_path: Path, form: Form, dtype: torch.dtype) -> None:
    args = [heads(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    result, rows = traced(form, tmp_path, *args)
    with torch.no_grad():
        assert_matches(result, form(*args), form(*widened(args)))
    assert [row["ok"] for row in rows if row["rule"] == RULE] == ["1"]
    assert len(said(rows, KERNEL)) == 1 and not [why for why in said(rows, ATEN) if "multiplication" not in why]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
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
