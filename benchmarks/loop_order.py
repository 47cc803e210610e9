"""Programs whose operators go through the same elements in different orders, for `pellucid bench`:

    pellucid bench benchmarks/loop_order.py:softmax_and_transposed --no-cold \\
        --backend inductor --backend pellucid:loop_orders=False --backend pellucid

Record 29 has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Made = tuple[Callable[..., Any], tuple[Tensor, ...]]


def softmax_and_transposed() -> Made:
    """A reduction and its transposed pointwise user."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        return x.softmax(1).t() * y

    return run, (torch.randn(1000, 1500), torch.randn(1500, 1000))


def both_orders() -> Made:
    """A product that is returned as it is, and transposed with something added."""

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        product = x * y
        return product, (product.t() + 1).contiguous()

    return run, (torch.randn(1000, 1500), torch.randn(1000, 1500))


def merged_ranges() -> Made:
    """Heads that are brought together, 12 of 64 to 768, and normed."""

    def run(x: Tensor) -> Tensor:
        return functional.layer_norm((x * 0.125).transpose(0, 1).reshape(-1, 768), (768,))

    return run, (torch.randn(12, 1024, 64),)


def no_order_serves() -> Made:
    """Two results that are contiguous along two axes, neither of them the input's: better two kernels."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.permute(2, 1, 0).contiguous(), y.permute(0, 2, 1).contiguous()

    return run, (torch.randn(128, 128, 128),)
