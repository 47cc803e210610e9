"""How fast ATen computes a convolution with its tensors in either layout, tried on this machine."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from pellucid.capture.torch_compat import real_tensors

_ROUNDS = 5
_LARGEST_BATCH = 4  # more of the same tells nothing new, and takes longer


@cache
def convolution_seconds(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Seconds of a call with contiguous tensors, and with channels-last ones; of the fastest of a few rounds.

    Shapes are [batch, channels, height, width] and [outputs, channels / groups, height, width]. Of a large batch, a few
    images are computed.
    """
    with real_tensors():
        x = torch.ones((min(input_shape[0], _LARGEST_BATCH), *input_shape[1:]), dtype=dtype)
        weight = torch.ones(weight_shape, dtype=dtype)
        layouts = torch.contiguous_format, torch.channels_last
        tensors = [(x.contiguous(memory_format=each), weight.contiguous(memory_format=each)) for each in layouts]
        best = [float("inf")] * len(tensors)
        for _ in range(_ROUNDS):
            for number, (laid_out, weights) in enumerate(tensors):
                start = perf_counter()
                torch.conv2d(laid_out, weights, None, stride, padding, dilation, groups)
                best[number] = min(best[number], perf_counter() - start)
    return best[0], best[1]
