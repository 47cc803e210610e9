"""Do the roundings of a short floating-point type lean to one side? One by one, truncation looks like rounding.

A `lean` is the mean distance of a result from float64's rounded to the nearest, in units of the last place, where that
rounding matters. Truncation leans by half a unit towards zero. A healthy compiler rounds less often than eager, and to
nearest: it leans where values share a rounding (a mean, a scale) or lie alike between their neighbours, and there
eager leans as well, or does for other inputs of the same form. So a lean is a fault when eager's are all much smaller,
for the given inputs and for `OTHERS` that are scaled at random, which rounds all that is shared anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

NARROW = (torch.bfloat16, torch.float16)
# Units of the last place. Ties that single precision breaks otherwise than float64 make up to a sixteenth.
LEAST = 0.15
TIMES = 3.0
# If a lean were one of eager's, so many of these would all be less than a third of it once in a hundred thousand times.
OTHERS = 12
FEWEST = 64
_SIGNIFICANT = 6.0  # standard errors

# By direction, towards zero and down.
Lean = tuple[float, float]
STRAIGHT: Lean = (0.0, 0.0)


def lean(value: torch.Tensor, exact: torch.Tensor) -> Lean:
    """The lean of a result in a short type, as far as it is significant; larger distances count as one unit."""
    nearest = exact.to(value.dtype).double()
    smallest = torch.finfo(value.dtype).smallest_normal
    matters = (nearest != exact) & nearest.isfinite() & value.isfinite() & (nearest.abs() >= smallest)
    nearest = nearest[matters]
    count = nearest.numel()
    if count < FEWEST:
        return STRAIGHT
    down = (nearest - value.double()[matters]).div_(ulp(nearest, value.dtype)).clamp_(-1, 1)
    noise = down.square().mean().sqrt().item() / math.sqrt(count)
    means = ((down * nearest.sign()).mean().item(), down.mean().item())
    inward, downward = (mean if abs(mean) > _SIGNIFICANT * noise else 0.0 for mean in means)
    return inward, downward


def is_lopsided(actual: torch.Tensor, eager: torch.Tensor) -> bool:
    """Whether results in a short type differ from eager's to one side: without that they lean no more than eager's."""
    a, e = actual.reshape(-1).float(), eager.reshape(-1).float()
    differ = (a != e) & a.isfinite() & e.isfinite()
    away = (a[differ] - e[differ]).sign_()
    if away.numel() < FEWEST:
        return False
    sides = away.sum().abs().item(), (away * e[differ].sign()).sum().abs().item()
    return max(sides) > _SIGNIFICANT * math.sqrt(away.numel())


def is_biased(ours: Lean, eagers: Iterable[Lean]) -> bool:
    """Whether a lean is a fault: beside eager's for the given inputs, the first, and for others like them.

    Without many of the others there is nothing to go by. One that leans nearly as much is enough to excuse ours.
    """
    way = max((0, 1), key=lambda way: abs(ours[way]))
    if abs(ours[way]) < LEAST:
        return False
    smaller = 0
    for other in eagers:
        if abs(other[way]) * TIMES >= abs(ours[way]):
            return False
        smaller += 1
    return smaller > OTHERS // 2


def ulp(reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours in a floating-point type at each value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(reference.abs().clamp_(min=info.tiny)).exponent.double()
    return exponent.exp2_().mul_(info.eps / 2)
