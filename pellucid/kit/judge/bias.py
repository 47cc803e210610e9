"""Decide whether the rounding to a narrow floating-point type is biased. Element by element, truncation looks like
rounding.

The bias is the mean distance of a result from float64's rounded to nearest, in units of the last place, over elements
where float64 needs rounding. Truncation has a bias of half a unit towards zero. Correct code rounds less often than
eager, and to nearest: it is biased where elements share a rounding (a mean, a scale) or the same position between two
neighbours of the type, and there eager is biased as well, or is for other inputs of the same form. So a bias is a fault
when eager's is much smaller, for the given inputs and for `SAMPLES` that are scaled at random, which changes every
shared rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

NARROW = (torch.bfloat16, torch.float16)
# Units of the last place. Ties that float32 breaks differently from float64 cause up to 1/16.
MIN_BIAS = 0.15
RATIO = 3.0
# If eager were as biased, this many samples would all have less than a third of the bias once in 100 000 times.
SAMPLES = 12
MIN_ELEMENTS = 64
_SIGNIFICANT = 6.0  # standard errors

# By direction: towards zero, and down.
Bias = tuple[float, float]
UNBIASED: Bias = (0.0, 0.0)


def bias_of(value: torch.Tensor, exact: torch.Tensor) -> Bias:
    """The bias of a result in a narrow type, 0 unless significant; distances are clamped to one unit."""
    nearest = exact.to(value.dtype).double()
    smallest = torch.finfo(value.dtype).smallest_normal
    matters = (nearest != exact) & nearest.isfinite() & value.isfinite() & (nearest.abs() >= smallest)
    nearest = nearest[matters]
    count = nearest.numel()
    if count < MIN_ELEMENTS:
        return UNBIASED
    down = (nearest - value.double()[matters]).div_(ulp(nearest, value.dtype)).clamp_(-1, 1)
    noise = down.square().mean().sqrt().item() / math.sqrt(count)
    means = ((down * nearest.sign()).mean().item(), down.mean().item())
    inward, downward = (mean if abs(mean) > _SIGNIFICANT * noise else 0.0 for mean in means)
    return inward, downward


def is_one_sided(actual: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether results in a narrow type differ from eager's mostly in one direction; else they are no more biased."""
    a, e = actual.reshape(-1).float(), eager.reshape(-1).float()
    differ = (a != e) & a.isfinite() & e.isfinite()
    signs = (a[differ] - e[differ]).sign_()
    if signs.numel() < MIN_ELEMENTS:
        return False
    sides = signs.sum().abs().item(), (signs * e[differ].sign()).sum().abs().item()
    return max(sides) > _SIGNIFICANT * math.sqrt(signs.numel())


def is_biased(ours: Bias, eagers: Iterable[Bias]) -> bool:
    """Whether a bias is a fault. eagers: eager's bias for the given inputs, then for similar ones.

    One of eager's that is nearly as large excuses ours. With too few of them nothing can be concluded.
    """
    direction = max((0, 1), key=lambda direction: abs(ours[direction]))
    if abs(ours[direction]) < MIN_BIAS:
        return False
    smaller = 0
    for other in eagers:
        if abs(other[direction]) * RATIO >= abs(ours[direction]):
            return False
        smaller += 1
    return smaller > SAMPLES // 2


def ulp(reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between adjacent values of a floating-point type at each value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(reference.abs().clamp_(min=info.tiny)).exponent.double()
    return exponent.exp2_().mul_(info.eps / 2)
