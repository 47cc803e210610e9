"""The random numbers of PyTorch's CPU generator, many at a time (`twister.h`)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from pellucid.capture.operators import NAMESPACE
from pellucid.native.loader import library

_BITS = 53
"""Bits of a number that ATen draws to compare it with a probability."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def bernoulli_(mask: torch.Tensor, p: float, generator: torch.Generator = torch.default_generator) -> torch.Tensor:
    """Draw each element, true with probability `p`. Like `mask.bernoulli_(p)`, which also raises for a wrong `p`.

    Other threads must not draw from the generator meanwhile.
    """
    if not 0 <= p <= 1 or not mask.numel() or not _is_dense(mask) or not _draws_as_aten():
        return mask.bernoulli_(p, generator=generator)
    return _drawn(mask, p, generator)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements, which do not overlap, are contiguous in memory in some order."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last == tensor.numel() - 1


def _drawn(mask: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state()
    library().pellucid_draw(state.data_ptr(), mask.data_ptr(), mask.numel(), math.ceil(p * 2**_BITS))
    generator.set_state(state)
    return mask


@lru_cache(maxsize=1)
def _draws_as_aten() -> bool:
    """Whether ATen draws the same numbers: with MKL, on Intel processors, it draws others, on all threads."""
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    mask, expected = (torch.empty(1000, dtype=torch.bool) for _ in range(2))
    expected.bernoulli_(0.5, generator=theirs)
    same = torch.equal(_drawn(mask, 0.5, ours), expected)
    return same and torch.equal(ours.get_state(), theirs.get_state())


def _bernoulli_out(p: float, *, out: torch.Tensor) -> torch.Tensor:
    return bernoulli_(out, p)


_LIBRARY.define("bernoulli.out(float p, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("bernoulli.out", _bernoulli_out, "CPU")
