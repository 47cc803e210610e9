"""Decide whether a whole model is as accurate as in eager mode: the judge's distances, as one number per run.

e(x) = max |x - reference| / rms(reference), where the reference is the same program on the same numbers in float64.
The error of a gradient is relative to the largest rms in its module: the bias of an attention's keys, for example,
cancels in softmax, so that its gradient is 0 but for rounding, and has no scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pellucid.kit.judge.judge import distance
from pellucid.kit.programs.case import Case

# Stricter than the judge's for one value: the worst of a whole model varies less, and this is what Pellucid promises.
FACTOR, FLOOR_ROUNDINGS = 2.0, 4


def tensors(output: object) -> list[Tensor]:
    """The tensors of a model's output, however nested, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def floating_type(case: Case) -> torch.dtype:
    """The narrowest floating-point type of a program's parameters and arguments; float32 where it has none."""
    found = [*case.fn.parameters()] if isinstance(case.fn, torch.nn.Module) else []
    found += tensors((case.args, dict(case.kwargs)))
    types = [tensor.dtype for tensor in found if tensor.is_floating_point()]
    return max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def error(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The worst e(x) over all outputs: 0 when equal, infinite when shapes, NaNs or infinities differ.

    >>> error([torch.tensor([1.0, 2.5])], [torch.tensor([1.0, 7.0])])
    0.9
    """
    if len(outputs) != len(reference):
        return math.inf
    found = (distance(*each) for each in zip(outputs, reference, strict=True))
    return max((error / (rms or 1.0) for error, rms in found), default=0.0)


def gradient_error(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The worst e(x) over the gradients of parameters, by name; infinite when one is missing.

    A parameter that the loss does not depend on may have a gradient of zeros instead of none, as under AOTAutograd.
    """
    if not gradients.keys() >= reference.keys():
        return math.inf
    found: dict[str, list[tuple[float, float]]] = {}
    for name, gradient in gradients.items():
        error_and_rms = distance(gradient, reference.get(name, torch.zeros_like(gradient)))
        found.setdefault(name.rpartition(".")[0], []).append(error_and_rms)
    return max(
        (max(error for error, _ in each) / (max(rms for _, rms in each) or 1.0) for each in found.values()), default=0.0
    )


def is_accurate(subject: float, eager: float, dtype: torch.dtype) -> bool:
    """Whether the error `subject` is no larger than eager's, up to rounding in `dtype`."""
    return subject <= FACTOR * eager + FLOOR_ROUNDINGS * torch.finfo(dtype).eps
