"""Memory in huge pages, for what is read at each call: a core's translations of addresses reach 512 times as far."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from pellucid.ir.types import ALIGNMENT

HUGE_PAGE = 2 << 20
"""Bytes."""


def empty_in_huge_pages(numels: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of f32 that lie one after the other in huge pages, if the system has them and they fill one.

    numels: how many elements each has. The memory goes when the last of them does.
    """
    step = ALIGNMENT // torch.float32.itemsize
    sizes = [-(-numel // step) * step for numel in numels]
    whole = _empty(sum(sizes))
    return [part[:numel] for part, numel in zip(whole.split(sizes), numels, strict=True)]


def _empty(numel: int) -> torch.Tensor:
    nbytes = numel * torch.float32.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if nbytes < HUGE_PAGE or advice is None:
        return torch.empty(numel, dtype=torch.float32)
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(advice)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % HUGE_PAGE
    return found[start : start + nbytes].view(torch.float32)
