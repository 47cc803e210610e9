"""Decomposes the layers that PyTorch computes by a single call without gradients.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call these operators in evaluation mode. The formulas are
ATen's: a row in which every key is masked out is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`_native_multi_head_attention` of (batch, rows, embed_dim); NotImplemented for other shapes.

    mask: nonzero elements mask scores out; by `mask_type` its shape is (rows, rows), (batch, rows), or that of all
    scores. Returns the result, and the weights, or their mean over heads, or None.
    """
    if not query.shape == key.shape == value.shape or query.dim() != 3 or query.is_nested:
        return NotImplemented
    batch, rows, size = *query.shape[:2], embed_dim // num_head
    if query is key is value:
        parts = aten.linear(query, qkv_weight, qkv_bias).split(embed_dim, -1)
    else:
        parameters = qkv_weight.split(embed_dim), qkv_bias.split(embed_dim)
        parts = [aten.linear(*each) for each in zip((query, key, value), *parameters, strict=True)]
    heads = [part.view(batch, rows, num_head, size).transpose(1, 2) for part in parts]
    scores = (heads[0] * (1 / math.sqrt(size))) @ heads[1].transpose(-1, -2)
    if mask is not None:
        shapes = ((1, 1, rows, rows), (batch, 1, 1, rows), tuple(scores.shape))
        scores = scores.masked_fill(mask.to(torch.bool).view(shapes[mask_type or 0]), -math.inf)
    weights = aten._softmax(scores, -1, False)
    joined = (weights @ heads[2]).transpose(1, 2).reshape(batch, rows, embed_dim)
    result = aten.linear(joined, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """`_transformer_encoder_layer_fwd` of (batch, rows, embed_dim); NotImplemented for other shapes."""
    if src.is_nested or src.dim() != 3:
        return NotImplemented

    def attention(x: Tensor) -> Tensor:
        products = qkv_weight, qkv_bias, proj_weight, proj_bias
        return multi_head_attention(x, x, x, embed_dim, num_heads, *products, mask, False, True, mask_type)[0]

    def perceptron(x: Tensor) -> Tensor:
        hidden = aten.linear(x, ffn_weight_1, ffn_bias_1)
        return aten.linear(aten.gelu(hidden) if use_gelu else aten.relu(hidden), ffn_weight_2, ffn_bias_2)

    def first(x: Tensor) -> Tensor:
        return aten.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Tensor) -> Tensor:
        return aten.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attention(first(src))
        return x + perceptron(second(x))
    x = first(src + attention(src))
    return second(x + perceptron(x))
