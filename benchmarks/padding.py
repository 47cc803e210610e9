"""Programs whose temporaries have rows that meet in few sets of a cache, for `pellucid bench`:

    pellucid bench benchmarks/padding.py:balance --no-cold \\
        --backend inductor --backend pellucid:pad=False --backend pellucid

Record 31 has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[Callable[..., Any], tuple[Tensor, ...]]


def sinkhorn(scores: Tensor) -> Tensor:
    """Sinkhorn's algorithm: a matrix whose rows and columns sum up to one, from which matchings are read."""
    plan = scores.exp()
    for _ in range(10):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True)
    return plan


def balance() -> Made:
    """1024 x 1024 scores."""
    return sinkhorn, (torch.randn(1024, 1024),)


def standardise() -> Made:
    """Features of 1024 samples that are standardised over the batch, as losses of decorrelation do."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        z = x @ weight
        return (z - z.mean(0)) / (z.var(0) + 1e-5).sqrt()

    return run, (torch.randn(1024, 64), torch.randn(64, 2048))


def feed_forward() -> Made:
    """Two layers in bf16, 4096 features between them."""
    layers = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).bfloat16()
    return layers, (torch.randn(512, 1024, dtype=torch.bfloat16),)
