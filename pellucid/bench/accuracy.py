"""Is a result as good as eager's? float64 decides.

e(x) = max |x - reference| / rms(reference), where the reference is the same program on the same numbers in
float64. A subject is accurate when its e is at most `FACTOR` times eager's plus a floor of a few roundings of
the dtype: sums may be taken in another order, and eager itself may happen to be lucky.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FACTOR = 2.0
FLOOR_ROUNDINGS = 4.0


def tensors(output: object) -> list[Tensor]:
    """The tensors of a model's output, whatever its nesting, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def error(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The worst e(x) over all outputs: 0 when equal, infinite when shapes, NaNs or infinities differ.

    >>> error([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 7.0])])
    0.9
    """
    if len(outputs) != len(reference):
        return math.inf
    return max((_error(o, r) for o, r in zip(outputs, reference, strict=True)), default=0.0)


def _error(output: Tensor, reference: Tensor) -> float:
    if output.shape != reference.shape:
        return math.inf
    out, ref = output.detach().double(), reference.detach().double()
    finite = ref.isfinite()
    if not _same_nonfinite(out, ref):
        return math.inf
    out, ref = out[finite], ref[finite]
    if ref.numel() == 0:
        return 0.0
    rms = ref.square().mean().sqrt().item()
    return (out - ref).abs().max().item() / (rms or 1.0)


def _same_nonfinite(a: Tensor, b: Tensor) -> bool:
    """Whether NaN, inf and -inf stand at the same places in both."""
    return all(torch.equal(f(a), f(b)) for f in (torch.isnan, torch.isposinf, torch.isneginf))


def is_accurate(subject: float, eager: float, dtype: torch.dtype) -> bool:
    """Whether error `subject` is as good as eager's error, up to rounding in `dtype`."""
    return subject <= FACTOR * eager + FLOOR_ROUNDINGS * torch.finfo(dtype).eps
