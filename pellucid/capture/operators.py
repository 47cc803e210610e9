"""Pellucid's own operators, which passes insert into graphs where ATen has no equivalent.

    attention(query, key, value, attn_mask, masking, scale, is_causal, cap, sinks)
        -> softmax(scale * query @ key^T + attn_mask) @ value, and for each row its maximum score, 0 where that is -inf,
           and the logarithm of the sum of exponentials relative to it
    attention_backward(grad_out, query, key, value, out, greatest, logarithm, attn_mask, masking, scale)
        -> the gradients of query, key and value

Differences from ATen's `scaled_dot_product_attention`: a row whose keys are all masked out is NaN, as in a softmax; and
a mask need not be added (`Masking`): `torch.where` can replace scores by it, whatever they are. `is_causal` also masks
out the keys after a row. With a `cap`, scores are cap * tanh(score / cap) before the mask is applied (Gemma 2). `sinks`
are additional scores without keys and values: weights that no key gets (gpt-oss).

query: (batch, heads, rows, size). key, value: (batch, heads or a divisor of it, keys, size). attn_mask: broadcast to
(batch, heads, rows, keys). sinks: f32, broadcast to (batch, heads, rows). Results are laid out as (batch, rows, heads,
size) in memory. The implementations here are reference definitions, for tools that run graphs call by call; kernels
compute the operators (`lower/attention.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pellucid.ir.attention import Masking

NAMESPACE = "pellucid"
KNOWN_NAMESPACES = frozenset({"aten", "prims", NAMESPACE})
"""Namespaces of operators whose schemas and tags describe all their effects."""


def may_draw(target: torch._ops.OpOverload) -> bool:
    """True if a call may draw random numbers: a user's operator may, or may have other state, without declaring it."""
    return target.namespace not in KNOWN_NAMESPACES or torch.Tag.nondeterministic_seeded in target.tags


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, str masking, float scale,"
    " bool is_causal=False, float? cap=None, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor greatest,"
    " Tensor logarithm, Tensor? attn_mask, str masking, float scale) -> (Tensor, Tensor, Tensor)"
)


def _attention(
    query: Any, key: Any, value: Any, mask: Any, masking: Masking, scale: float, is_causal: bool = False,
    cap: float | None = None, sinks: Any = None,
) -> Any:  # fmt: skip
    score = _scores(query, key, mask, masking, scale, cap)
    if is_causal:
        score = score.where(torch.ones_like(score, dtype=torch.bool).tril(), float("-inf"))
    keys = score.shape[-1]
    if sinks is not None:
        score = torch.cat([score, sinks.expand(score.shape[:-1]).unsqueeze(-1).to(score.dtype)], -1)
    weight = score.softmax(-1)[..., :keys].to(query.dtype)
    out, *_ = _results(query)
    greatest = score.amax(-1)
    greatest = greatest.where(greatest != float("-inf"), 0.0)
    logarithm = (score - greatest.unsqueeze(-1)).exp().sum(-1).log()
    return out.copy_(weight @ _repeated(value, query)), greatest, logarithm


def _attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, greatest: Any, logarithm: Any, mask: Any,
    masking: Masking, scale: float,
) -> Any:  # fmt: skip
    wide = [_wide(each) for each in (grad_out, query, key, value, out)]
    grad, q, k, v, o = wide
    k, v = _repeated(k, q), _repeated(v, q)
    score = _scores(query, key, mask, masking, scale)
    weight = (score - greatest.unsqueeze(-1) - logarithm.unsqueeze(-1)).exp()
    change = weight * (grad @ v.mT - (grad * o).sum(-1, keepdim=True)) * scale
    if mask is not None and masking != "adds":
        change = change.where(mask == 0 if masking == "replaces" else mask != -math.inf, 0.0)
    heads = key.shape[1]
    found = (change @ k, change.mT @ q, weight.mT @ grad)
    sums = (found[0], *(each.unflatten(1, (heads, -1)).sum(2) for each in found[1:]))
    return tuple(_laid_out(like).copy_(each) for like, each in zip((query, key, value), sums, strict=True))


def _scores(query: Any, key: Any, mask: Any, masking: Masking, scale: float, cap: float | None = None) -> Any:
    score = _wide(query) @ _repeated(_wide(key), query).mT * scale
    if cap is not None:
        score = (score / cap).tanh() * cap
    if mask is not None:
        added = score if masking == "replaces" else score + mask
        visible = {"adds": None, "hides": mask != -math.inf, "replaces": mask == 0}[masking]
        score = added if visible is None else added.where(visible, mask.to(score.dtype))
    return score


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, once for each head of queries."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _laid_out(like: torch.Tensor) -> torch.Tensor:
    """Allocate a result of this shape, laid out as (batch, rows, heads, size)."""
    batch, heads, rows, size = like.shape
    return like.new_empty((batch, rows, heads, size)).transpose(1, 2)


def _results(query: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    """Allocate the results of an attention."""
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    return _laid_out(query), *(query.new_empty(query.shape[:3], dtype=wide) for _ in range(2))


def _gradients(_: Any, query: Any, key: Any, value: Any, *__: Any) -> tuple[torch.Tensor, ...]:
    return _laid_out(query), _laid_out(key), _laid_out(value)


for _name, _reference, _allocate in (
    ("attention", _attention, _results),
    ("attention_backward", _attention_backward, _gradients),
):
    _LIBRARY.impl(_name, _reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _allocate, lib=_LIBRARY)

ATTENTION = torch.ops.pellucid.attention.default
ATTENTION_BACKWARD = torch.ops.pellucid.attention_backward.default
