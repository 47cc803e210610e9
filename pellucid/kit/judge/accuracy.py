"""Is a result as good as eager's? float64 decides.

e(x) = max |x - reference| / rms(reference), where the reference is the same program on the same numbers in
float64. A gradient is measured on the largest rms in its module: what a bias adds to the keys of attention cancels in
softmax, so that its gradient is 0 but for rounding, and has no scale of its own.

A subject is accurate when its e is at most `FACTOR` times eager's plus a floor of a few roundings of the dtype: sums
may be taken in another order, and eager itself may happen to be lucky.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    return _worst(outputs, reference, [_rms(r) for r in reference])


def gradient_error(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The worst e(x) over the gradients of parameters, by their names; infinite when one is missing.

    A parameter that plays no part in the loss may have a gradient of zeros instead of none, as AOTAutograd gives it.
    """
    if not gradients.keys() >= reference.keys():
        return math.inf
    reference = {name: reference.get(name, torch.zeros_like(gradient)) for name, gradient in gradients.items()}
    scales: dict[str, float] = {}
    for name, gradient in reference.items():
        module = name.rpartition(".")[0]
        scales[module] = max(scales.get(module, 0.0), _rms(gradient))
    own = [scales[name.rpartition(".")[0]] for name in gradients]
    return _worst(list(gradients.values()), list(reference.values()), own)


def _worst(outputs: Sequence[Tensor], reference: Sequence[Tensor], scales: Sequence[float]) -> float:
    if len(outputs) != len(reference):
        return math.inf
    return max((_error(*each) for each in zip(outputs, reference, scales, strict=True)), default=0.0)


def _error(output: Tensor, reference: Tensor, scale: float) -> float:
    if output.shape != reference.shape:
        return math.inf
    out, ref = output.detach().double(), reference.detach().double()
    if not _same_nonfinite(out, ref):
        return math.inf
    finite = ref.isfinite()
    if not finite.any():
        return 0.0
    return (out - ref)[finite].abs().max().item() / (scale or 1.0)


def _rms(reference: Tensor) -> float:
    """Of the finite elements; 0 when there are none."""
    finite = reference.detach().double()[reference.isfinite()]
    return finite.square().mean().sqrt().item() if finite.numel() else 0.0


def _same_nonfinite(a: Tensor, b: Tensor) -> bool:
    """Whether NaN, inf and -inf stand at the same places in both."""
    return all(torch.equal(f(a), f(b)) for f in (torch.isnan, torch.isposinf, torch.isneginf))


def is_accurate(subject: float, eager: float, dtype: torch.dtype) -> bool:
    """Whether error `subject` is as good as eager's error, up to rounding in `dtype`."""
    return subject <= FACTOR * eager + FLOOR_ROUNDINGS * torch.finfo(dtype).eps
