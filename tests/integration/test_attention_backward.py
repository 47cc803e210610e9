"""Gradients of attention as a kernel against eager's, and what is left to ATen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_attention import ATEN, FLASH, INF, KERNEL, NAN, check, heads
from tests.integration.traced import said, traced
from tests.support import assert_matches, widened

F = torch.nn.functional
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def with_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """The arguments of BACKWARD: a gradient, the operands, and what eager's forward makes of them."""
    out, logsumexp = FLASH(q, k, v, **options)
    return (torch.randn_like(out), q, k, v, out, logsumexp)


def gradients(*args: Any, is_causal: bool = False, **options: Any) -> tuple[torch.Tensor, ...]:
    return BACKWARD(*args, 0.0, is_causal, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_sizes_and_lengths(tmp_path: Path, dtype: torch.dtype) -> None:
    """Sizes that fill registers or do not, several blocks of rows and of keys, odd ends of both."""
    cases = [(20, 37, 55), (64, 121, 401), (33, 2, 200), (256, 97, 131), (2, 50, 3), (8, 25, 194)]
    calls = [
        (
            with_forward(*(heads(1, 2, length, size, dtype=dtype) for length in (rows, keys, keys)), is_causal=causal),
            causal,
        )
        for size, rows, keys in cases
        for causal in (False, True)
    ]

    def function(*args: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        parts = zip(*(args[k::6] for k in range(6)), strict=True)
        return [gradients(*each, is_causal=causal) for each, (_, causal) in zip(parts, calls, strict=True)]

    check(function, tmp_path, *(arg for call, _ in calls for arg in call), kernels=len(calls))


def test_masks_and_scales(tmp_path: Path) -> None:
    """Added and chosen, for all heads or each, with rows that see nothing, infinities and NaN."""
    q, k, v = heads(2, 3, 40, 16), heads(2, 3, 50, 16), heads(2, 3, 50, 16)
    added = torch.randn(40, 50)
    added[1], added[2, :30] = -INF, -INF
    broken = added.clone()
    broken[3, 4] = NAN
    padded = torch.where(torch.rand(2, 1, 1, 50) < 0.7, 0.0, -INF)
    masks = (added, padded, broken, added.mT.contiguous().mT)
    calls = [with_forward(q, k, v, attn_mask=mask, scale=-0.3) for mask in masks]

    def function(*args: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [gradients(*args[6 * n + 4 : 6 * n + 10], attn_mask=args[n], scale=-0.3) for n in range(4)]

    check(function, tmp_path, *masks, *(arg for call in calls for arg in call), kernels=4)


def test_infinities_and_nan_in_operands(tmp_path: Path) -> None:
    q, k, v = heads(1, 2, 30, 16), heads(1, 2, 30, 16), heads(1, 2, 30, 16)
    q[0, 0, 3, 2], k[0, 1, 7, 3] = NAN, -INF
    large = with_forward(*(1e30 * heads(1, 2, 30, 16) for _ in range(2)), v)
    check(gradients, tmp_path / "broken", *with_forward(q, k, v), kernels=1)
    check(gradients, tmp_path / "large", *large, kernels=1)
    grad, *others = with_forward(heads(1, 2, 30, 16), heads(1, 2, 30, 16), v)
    grad[0, 0, 5, 1] = INF
    check(gradients, tmp_path / "gradient", grad, *others, kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_shapes_through_autograd(tmp_path: Path, dtype: torch.dtype) -> None:
    """Heads beside positions, queries of several heads that share keys, one head for all."""
    x, shared = heads(2, 20, 3, 4, 24, dtype=dtype), heads(2, 2, 90, 24, dtype=dtype)

    def attention(x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in x.unbind(2))
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grouped = F.scaled_dot_product_attention(q, shared, shared * 2, enable_gqa=True)
        limited = F.scaled_dot_product_attention(q, shared, shared * 2, enable_gqa=True, is_causal=True)
        one = F.scaled_dot_product_attention(q, k[:, :1].expand_as(k), v)
        return (plain + grouped + limited + one).transpose(1, 2)

    def function(*args: torch.Tensor, run: Any = attention) -> tuple[torch.Tensor, ...]:
        inputs = [each.detach().requires_grad_() for each in args]
        out = run(*inputs)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))

    torch._dynamo.reset()
    run = torch.compile(attention, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    ours = function(x, shared, run=run)
    assert_matches(ours, function(x, shared), function(*widened((x, shared))))
    backward = next(tmp_path.rglob("*backward*/decisions.csv")).read_text()
    assert backward.count(KERNEL) == 4 and ATEN not in backward


def test_lengths_that_are_symbols(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(gradients, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    for rows, keys in ((7, 9), (300, 700), (33, 5)):
        args = with_forward(heads(2, 3, rows, 16), heads(2, 3, keys, 16), heads(2, 3, keys, 16))
        for each in args:
            torch._dynamo.mark_dynamic(each, 2)
        with torch.no_grad():
            assert_matches(compiled(*args), gradients(*args), gradients(*widened(args)))
    assert KERNEL in next(tmp_path.rglob("decisions.csv")).read_text()


def test_what_aten_keeps(tmp_path: Path) -> None:
    """A single query, and a gradient that nobody asks for."""
    single = with_forward(*(heads(1, 2, length, 8) for length in (1, 5, 5)))
    args = with_forward(*(heads(1, 2, 5, 8) for _ in range(3)))
    for reason, function, given in (
        ("of a single query", gradients, single),
        ("where one is not read", lambda *args: gradients(*args)[:2], args),
    ):
        result, rows = traced(function, tmp_path / reason, *given)
        assert reason in " ".join(said(rows, ATEN)) and not said(rows, KERNEL)
        assert_matches(result, function(*given), function(*widened(given)))
