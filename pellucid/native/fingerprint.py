"""Whether tensors still hold what they held: their places, the count of their changes, a sample of their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from pellucid.native.loader import library

# Called for each parameter at each call of a program: without a frame of Python.
_POINTER = torch.Tensor.data_ptr
_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of tensors to notice a change: see `holds`.

    pointers: where their data begins. counted: the tensors whose changes PyTorch counts, all but those of inference
    mode. versions: these counts. sample: of their bytes, one line of the cache in each page.
    """

    pointers: tuple[int, ...]
    counted: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    versions: tuple[int, ...]
    sample: int
    _addresses: ctypes.Array[ctypes.c_int64]
    _sizes: ctypes.Array[ctypes.c_int64]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        pointers = tuple(map(_POINTER, tensors))
        which = [position for position, tensor in enumerate(tensors) if not tensor.is_inference()]
        counted = _chosen(which, len(tensors))
        words = ctypes.c_int64 * len(tensors)
        addresses, sizes = words(*pointers), words(*map(_span, tensors))
        versions = tuple(map(_VERSION, counted(tensors)))
        return cls(pointers, counted, versions, _sample(addresses, sizes), addresses, sizes)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """False if one of the tensors is another, was changed by PyTorch, or differs in the sample.

        A change that PyTorch does not count, through `.data`, NumPy or a pointer, is noticed in the sample only: one of
        a few elements may be missed.
        """
        if tuple(map(_POINTER, tensors)) != self.pointers:
            return False
        try:
            if tuple(map(_VERSION, self.counted(tensors))) != self.versions:
                return False
        except RuntimeError:  # a tensor of inference mode has taken the place of another
            return False
        return _sample(self._addresses, self._sizes) == self.sample


def _chosen(which: list[int], count: int) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    if len(which) == count:
        return tuple
    return lambda tensors: [tensors[position] for position in which]


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _sample(addresses: ctypes.Array[ctypes.c_int64], sizes: ctypes.Array[ctypes.c_int64]) -> int:
    return library().pellucid_fingerprint(addresses, sizes, len(addresses))
