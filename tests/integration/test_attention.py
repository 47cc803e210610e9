"""Attention as a kernel against eager's, and what is left to ATen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.traced import said, traced
from tests.support import assert_matches, tensors, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL, ATEN = "codegen.attention", "lower.fallback"
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which ATen's kernel is faster are tested like all others."""
    monkeypatch.setattr("pellucid.lower.attention._check_speed", lambda *_: None)


def check(function: Callable[..., Any], folder: Path, *args: Any, kernels: int, **options: Any) -> None:
    """Results as near to float64 as eager's, from so many kernels.

    ATen's kernel takes neighbours in a row to be neighbours in memory: eager has its strides, but what copies give.
    """
    results, rows = traced(function, folder, *args, **options)
    copies = [arg.contiguous() for arg in args]
    with torch.no_grad():
        eager, plain = (tensors(function(*given)) for given in (args, copies))
        for to, what in zip(eager, plain, strict=True):
            to.copy_(what)
        assert_matches(results, eager, function(*widened(copies)))
    assert (len(said(rows, KERNEL)), said(rows, ATEN)) == (kernels, [])


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    "cases",
    [
        [(20, 37, 600), (64, 25, 1030), (256, 3, 300)],
        pytest.param([(2, 4, 2), (8, 1, 5), (33, 2, 70), (80, 70, 400), (128, 49, 33)], marks=pytest.mark.slow),
    ],
)
def test_head_sizes_and_lengths(tmp_path: Path, cases: list[tuple[int, int, int]]) -> None:
    """One query and many, fewer and more keys than one block has, head sizes that fill registers or do not."""
    args = [heads(1, 2, length, size) for size, rows, keys in cases for length in (rows, keys, keys)]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        triples = zip(args[::3], args[1::3], args[2::3], strict=True)
        return [F.scaled_dot_product_attention(*each, is_causal=k % 2 == 1) for k, each in enumerate(triples)]

    check(function, tmp_path, *args, kernels=len(cases))


def test_what_is_masked(tmp_path: Path) -> None:
    """Added and chosen, for all heads or each, with rows that see nothing, infinities and NaN."""
    q, k, v = heads(2, 3, 40, 16), heads(2, 3, 50, 16), heads(2, 3, 50, 16)
    added = torch.randn(40, 50)
    added[1], added[2, :30], added[3, 4], added[5, 6] = -INF, -INF, NAN, INF
    padded = torch.rand(2, 1, 1, 50) < 0.7
    keys = torch.randn(2, 3, 40, 1)

    def function(q: Any, k: Any, v: Any, added: Any, padded: Any, keys: Any) -> list[Any]:
        masks = (added, padded, keys.expand(2, 3, 40, 50), torch.ones(40, 50, dtype=torch.bool).tril(), added.mT.mT)
        return [F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=-0.3) for mask in masks]

    check(function, tmp_path, q, k, v, added, padded, keys, kernels=5)


def test_infinities_and_nan_in_operands(tmp_path: Path) -> None:
    q, k, v = heads(1, 2, 30, 16), heads(1, 2, 30, 16), heads(1, 2, 30, 16)
    q[0, 0, 3, 2], q[0, 0, 5, 1], k[0, 1, 7, 3], v[0, 0, 29, 4], v[0, 1, 2, 1] = NAN, INF, -INF, INF, NAN
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tmp_path, q, k, v, kernels=1)
    large = 1e30 * q.nan_to_num(0, 0, 0)
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tmp_path, large, large, v, kernels=2)


def test_any_strides(tmp_path: Path) -> None:
    """Heads beside positions, parts of one projection, some of the positions, one head for all."""
    joint, wide = heads(2, 20, 3, 4, 24), heads(2, 4, 40, 48)

    def function(joint: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
        q, k, v = (each.transpose(1, 2) for each in joint.unbind(2))
        some, one = wide[:, :, 3::2, 7:31], k[:, :1].expand(2, 4, 20, 24)
        triples = ((q, k, v), (some, k, v), (q, one, one), (q[:, :, 1::3], some, some), (one, q, v))
        return [F.scaled_dot_product_attention(*each) for each in triples]

    check(function, tmp_path, joint, wide, kernels=5)


def test_grouped_queries_and_short_queries(tmp_path: Path) -> None:
    """Queries of several heads share keys: where there is one of each head, they are rows of one call."""
    cache, q = heads(2, 2, 90, 32), heads(2, 8, 5, 32)

    def function(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        parts = (q, q[:, :, :1], q[:, :4, :1])
        return [F.scaled_dot_product_attention(each, k, k, enable_gqa=True) for each in parts] + [
            F.scaled_dot_product_attention(each, k, k, enable_gqa=True, is_causal=True) for each in parts
        ]

    check(function, tmp_path, q, cache, kernels=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(tmp_path: Path, dtype: torch.dtype) -> None:
    """Sizes and lengths that are whole units or not, in place and packed, any strides, masks of both types."""
    cases = [(20, 37, 600), (25, 26, 333), (64, 25, 1030), (64, 3, 129), (32, 1, 64), (33, 2, 71), (256, 5, 301)]
    triples = [
        tuple(heads(1, 2, length, size, dtype=dtype) for length in (rows, keys, keys)) for size, rows, keys in cases
    ]
    triples += [tuple(heads(1, 2, 24, length, dtype=dtype).mT for length in (rows, 50, 50)) for rows in (40, 2)]
    mask = torch.randn(40, 50, dtype=dtype)
    mask[1], mask[2, :30] = -INF, -INF

    def function(mask: torch.Tensor, *args: torch.Tensor) -> list[torch.Tensor]:
        found = zip(args[::3], args[1::3], args[2::3], strict=True)
        out = [FLASH(*each, is_causal=k % 2 == 1)[0] for k, each in enumerate(found)]
        q, k, v = args[-6:-3]
        return [*out, FLASH(q, k, v, attn_mask=mask)[0], *FLASH(q, k, v, attn_mask=mask.float())]

    check(function, tmp_path, mask, *(each for triple in triples for each in triple), kernels=len(triples) + 2)


def test_lengths_that_are_symbols(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    compiled = torch.compile(function, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    for rows, keys in ((7, 9), (300, 700), (33, 5)):
        q, k = heads(2, 3, rows, 16), heads(2, 3, keys, 16)
        for each in (q, k):
            torch._dynamo.mark_dynamic(each, 2)
        with torch.no_grad():
            assert_matches(compiled(q, k), function(q, k), function(q.double(), k.double()))
    assert len(list(tmp_path.rglob("decisions.csv"))) == 1
    assert KERNEL in next(tmp_path.rglob("decisions.csv")).read_text()


def test_gradients_follow_from_the_logarithms(tmp_path: Path) -> None:
    """The backward is ATen's: it takes the logarithm of each row's sum, which is 0 for a row that sees nothing."""
    mask = torch.zeros(30, 30)
    mask[4] = -INF

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [each.detach().requires_grad_() for each in (q, k, v)]
        out = run(*inputs)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype)) + F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    args = tuple(heads(2, 3, 30, 16) for _ in range(3))
    torch._dynamo.reset()
    options = {"trace": str(tmp_path), "verify": True}
    run: Callable[..., Any] = torch.compile(attention, backend="pellucid", options=options)
    ours = function(*args)
    run = attention
    assert_matches(ours, function(*args), function(*widened(args)))
    forward = next(tmp_path.rglob("*forward*/decisions.csv")).read_text()
    assert forward.count(KERNEL) == 2 and ATEN not in forward


def test_what_stands_around_it_stays_outside(tmp_path: Path) -> None:
    """What makes its operands and its mask, what takes its result, and what reads the same operands."""
    q, k, v = heads(2, 3, 30, 16), heads(2, 3, 30, 16), heads(2, 3, 30, 16)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        near = (torch.arange(30)[:, None] - torch.arange(30)).abs() < 9
        out = F.scaled_dot_product_attention(q * 2, k + 1, v, attn_mask=near)
        return out.relu() + q, (k + 1).sum(-1), F.scaled_dot_product_attention(q * 2, out, v)

    results, rows = traced(function, tmp_path, q, k, v)
    with torch.no_grad():
        assert_matches(results, function(q, k, v), function(*widened((q, k, v))))
    assert len(said(rows, KERNEL)) == 2 and "is an attention" in " ".join(said(rows, "fuse.attention"))


def test_no_heads_at_all(tmp_path: Path) -> None:
    q, k = heads(0, 3, 8, 16), heads(0, 3, 9, 16)
    result, _ = traced(lambda q, k: FLASH(q, k, k)[0], tmp_path, q, k)
    assert result.shape == q.shape


@pytest.mark.parametrize(
    ("reason", "change", "options"),
    [
        ("in other types", lambda x: x.double(), {}),
        ("head sizes from 2 to 256", lambda x: x.repeat(1, 1, 1, 33), {}),
        ("of a single key", lambda x: x[:, :, :1], {}),
        ("same queries and keys", lambda x: x[:, :1].expand(1, 3, 5, 8), {}),
        ("because the option `contract` is off", lambda x: x, {"contract": False}),
    ],
)
def test_what_aten_keeps(tmp_path: Path, reason: str, change: Any, options: dict[str, bool]) -> None:
    x = change(heads(1, 2, 5, 8))
    result, rows = traced(lambda x: FLASH(x, x, x)[0], tmp_path, x, **options)
    assert reason in " ".join(said(rows, ATEN)) and not said(rows, KERNEL)
    assert_matches(result, FLASH(x, x, x)[0], FLASH(x.double(), x.double(), x.double())[0])


def test_the_price_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prices are told; a few rows of many keys are ATen's."""
    monkeypatch.undo()
    q, k = heads(1, 4, 128, 64), heads(1, 4, 1024, 64)
    _, long = traced(lambda q, k: F.scaled_dot_product_attention(q, k, k), tmp_path / "long", q, k)
    _, short = traced(lambda q, k: F.scaled_dot_product_attention(q, k, k), tmp_path / "short", q[:, :, :8], k)
    chosen, refused = ([row for row in rows if row["rule"] == "lower.attention"] for rows in (long, short))
    for row, ok in ((chosen[0], True), (refused[0], False)):
        facts = dict(fact.split("=") for fact in row["facts"].replace(";", " ").split())
        assert (int(facts["kernel_ns"]) < int(facts["aten_ns"])) is ok
    assert said(long, KERNEL) and "ATen's fused kernel" in said(short, ATEN)[0]
