"""Whether tensors still hold what they held: their places, the count of their changes, a sample of their bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from pellucid.native.loader import library

# Called for each parameter at each call of a program: without a frame of Python.
_POINTER = torch.Tensor.data_ptr
_VERSION = attrgetter("_version")

_TURNS = 8
"""A sample of tensors whose changes are counted has a page in so many, others at the next call."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of tensors to notice a change: see `holds`.

    pointers: where their data begins. counted: the tensors whose changes PyTorch counts, all but those of inference
    mode. versions: these counts. watched, uncounted: samples of the bytes of both.
    """

    pointers: tuple[int, ...]
    counted: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    versions: tuple[int, ...]
    watched: _Samples
    uncounted: _Samples

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        pointers = tuple(map(_POINTER, tensors))
        which = [position for position, tensor in enumerate(tensors) if not tensor.is_inference()]
        counted = _chosen(which, len(tensors))
        versions = tuple(map(_VERSION, counted(tensors)))
        others = [tensor for tensor in tensors if tensor.is_inference()]
        return cls(pointers, counted, versions, _Samples.of(counted(tensors), _TURNS), _Samples.of(others, 1))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """False if one of the tensors is another, was changed by PyTorch, or differs in the sample of this call.

        A change that PyTorch does not count, through `.data`, NumPy or a pointer, is noticed in samples only: at once
        where it changes a tensor as a whole, a part of a tensor after some calls, and one of a few elements perhaps
        not at all.
        """
        if tuple(map(_POINTER, tensors)) != self.pointers:
            return False
        try:
            if tuple(map(_VERSION, self.counted(tensors))) != self.versions:
                return False
        except RuntimeError:  # a tensor of inference mode has taken the place of another
            return False
        return self.watched.hold() and self.uncounted.hold()


@dataclass(frozen=True, slots=True)
class _Samples:
    """What some tensors hold, in one line of the cache of each page: as many samples as there are turns."""

    hashes: tuple[int, ...]
    addresses: ctypes.Array[ctypes.c_int64]
    sizes: ctypes.Array[ctypes.c_int64]
    turns: Iterator[int] = field(default_factory=itertools.count)  # shared by all threads

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], turns: int) -> _Samples:
        words = ctypes.c_int64 * len(tensors)
        addresses, sizes = words(*map(_POINTER, tensors)), words(*map(_span, tensors))
        return cls(tuple(_sample(addresses, sizes, turn, turns) for turn in range(turns)), addresses, sizes)

    def hold(self) -> bool:
        """Whether the sample whose turn it is is as it was."""
        turn = next(self.turns) % len(self.hashes)
        return _sample(self.addresses, self.sizes, turn, len(self.hashes)) == self.hashes[turn]


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


def _sample(addresses: ctypes.Array[ctypes.c_int64], sizes: ctypes.Array[ctypes.c_int64], turn: int, turns: int) -> int:
    return library().pellucid_fingerprint(addresses, sizes, len(addresses), turn, turns)
