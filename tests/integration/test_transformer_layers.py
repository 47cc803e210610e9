"""Layers that eager computes by one call without gradients are kernels, with the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid.ir.nodes import Extern
from tests.support import assert_matches, recorded

pytestmark = pytest.mark.usefixtures("quick_compiler")

BATCH, ROWS, SIZE, HEADS = 4, 10, 32, 4
PADDING = torch.arange(ROWS) >= torch.tensor([[ROWS], [7], [ROWS], [2]])
CAUSAL = torch.ones(ROWS, ROWS).triu(1).bool()
MASKS: dict[str, dict[str, Tensor]] = {
    "all": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"src_mask": CAUSAL},
    "added": {"src_mask": torch.zeros(ROWS, ROWS).masked_fill(CAUSAL, -torch.inf)},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    "of-heads": {"src_mask": CAUSAL.expand(BATCH * HEADS, -1, -1)},
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compare(module: nn.Module, *args: Tensor, **options: Any) -> None:
    """With eager's, judged by float64; at most the attention itself is left to ATen, where that is faster."""
    run = torch.compile(module, backend="pellucid", options={"verify": True})
    wide = [each.double() for each in args]
    with torch.no_grad(), recorded() as records:
        results = run(*args, **options), module(*args, **options), copy.deepcopy(module).double()(*wide, **options)
    assert_matches(*(each if isinstance(each, tuple) else [each] for each in results))
    called = [node.op for record in records for node in record.scheduled.nodes if isinstance(node, Extern)]
    assert records and not any("layer" in op or "multi_head" in op for op in called), called


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("norm_first", "activation", "batch_first"), [
    (False, "relu", True), (True, "gelu", True), (True, "relu", False)
])  # fmt: skip
def test_layers(mask: str, norm_first: bool, activation: str, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        SIZE, HEADS, 64, 0.1, activation, norm_first=norm_first, batch_first=batch_first
    ).eval()
    x = torch.randn(BATCH, ROWS, SIZE)
    compare(layer, x if batch_first else x.transpose(0, 1), **MASKS[mask])


def test_a_text_of_padding_alone() -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 64, batch_first=True).eval()
    run = torch.compile(layer, backend="pellucid", options={"verify": True})
    x, mask = torch.randn(2, ROWS, SIZE), torch.stack([torch.zeros(ROWS), torch.ones(ROWS)]).bool()
    with torch.no_grad():
        result, expected = run(x, src_key_padding_mask=mask), layer(x, src_key_padding_mask=mask)
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("options", [
    {}, {"need_weights": False}, {"average_attn_weights": False}, {"key_padding_mask": PADDING}, {"attn_mask": CAUSAL}
], ids=str)  # fmt: skip
def test_multi_head_attention(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True).eval()
    run = torch.compile(module, backend="pellucid", options={"verify": True})
    x = torch.randn(BATCH, ROWS, SIZE)
    with torch.no_grad():
        (result, weights), (expected, shares) = run(x, x, x, **options), module(x, x, x, **options)
    torch.testing.assert_close(result, expected)
    assert (weights is None) == (shares is None)
    if shares is not None:
        torch.testing.assert_close(weights, shares)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, HEADS, 64, batch_first=True), 2).eval().to(dtype)
    x = torch.randn(BATCH, ROWS, SIZE).to(dtype)
    run = torch.compile(encoder, backend="pellucid", options={"verify": True})
    with torch.no_grad():
        assert_matches([run(x)], [encoder(x)], [copy.deepcopy(encoder).double()(x.double())])


def test_texts_of_any_length() -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 64, batch_first=True).eval()
    run = torch.compile(layer, backend="pellucid", dynamic=True, options={"verify": True})
    with torch.no_grad(), recorded() as records:
        for shape in ((4, 10, SIZE), (3, 17, SIZE), (2, 5, SIZE)):
            x = torch.randn(shape)
            assert_matches([run(x)], [layer(x)], [copy.deepcopy(layer).double()(x.double())])
    assert len(records) == 1
