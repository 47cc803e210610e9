"""Whether tensors still hold what they held: their places, the count of their changes, a sample of their bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pellucid.native.loader import library

_TURNS = 8
"""A sample of tensors whose changes are counted has a page in so many, others at the next call."""

_LINES = 64
"""Lines of the cache in a page, of which a sample has one: the next after all turns. `fingerprint.h` has the same."""

_UNCOUNTED = -1
"""Stands for the count of changes of a tensor of inference mode, which PyTorch does not count."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of tensors to notice a change: see `holds`.

    storages: the memory of each. pointers: where their data begins. versions: how often each was changed, as PyTorch
    counts it. watched, uncounted: samples of the bytes of those whose changes are counted, and of the others.
    memory: keeps no memory alive, but what is at `storages`, so that nothing else comes to lie there.
    """

    storages: ctypes.Array[ctypes.c_int64]
    pointers: ctypes.Array[ctypes.c_int64]
    versions: ctypes.Array[ctypes.c_int64]
    watched: _Samples
    uncounted: _Samples
    memory: tuple[StorageWeakRef, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        words = ctypes.c_int64 * len(tensors)
        memory = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        storages = words(*(tensor.untyped_storage()._cdata for tensor in tensors))
        pointers = words(*(tensor.data_ptr() for tensor in tensors))
        versions = words(*(_UNCOUNTED if tensor.is_inference() else tensor._version for tensor in tensors))
        watched = [tensor for tensor in tensors if not tensor.is_inference()]
        others = [tensor for tensor in tensors if tensor.is_inference()]
        return cls(storages, pointers, versions, _Samples.of(watched, _TURNS), _Samples.of(others, 1), memory)

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """False if one of the tensors is another, was changed by PyTorch, or differs in the sample of this call.

        tensors: as many as there were. A change that PyTorch does not count, through `.data`, NumPy or a pointer, is
        noticed in samples only: at once where it changes a tensor as a whole, whole pages within `_TURNS` calls, and
        any element within `_TURNS * _LINES`.
        """
        return self._in_place(tensors) and self.watched.hold() and self.uncounted.hold()

    def holds_entirely(self, tensors: list[torch.Tensor]) -> bool:
        """The same by the samples of all calls."""
        return self._in_place(tensors) and self.watched.all_hold() and self.uncounted.all_hold()

    def _in_place(self, tensors: list[torch.Tensor]) -> bool:
        return library().pellucid_in_place(tensors, self.storages, self.pointers, self.versions)

    def is_gone(self) -> bool:
        """Whether the memory of one of the tensors was given back."""
        return any(each.expired() for each in self.memory)


def place_of(tensors: list[torch.Tensor]) -> int:
    """A number that tells lists of tensors apart by where they lie in memory, and by types, sizes and strides."""
    return library().pellucid_place(tensors)


@dataclass(frozen=True, slots=True)
class _Samples:
    """What some tensors hold, in one line of the cache of each page, or of each of some: by turn and line."""

    hashes: ctypes.Array[ctypes.c_uint64]
    addresses: ctypes.Array[ctypes.c_int64]
    sizes: ctypes.Array[ctypes.c_int64]
    turns: int
    calls: Iterator[int] = field(default_factory=itertools.count)  # shared by all threads

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], turns: int) -> _Samples:
        words = ctypes.c_int64 * len(tensors)
        addresses, sizes = words(*(tensor.data_ptr() for tensor in tensors)), words(*map(span, tensors))
        return cls(_every_sample(addresses, sizes, turns), addresses, sizes, turns)

    def hold(self) -> bool:
        """Whether the sample whose turn it is is as it was."""
        line, turn = divmod(next(self.calls) % len(self.hashes), self.turns)
        found = library().pellucid_fingerprint(self.addresses, self.sizes, len(self.sizes), turn, self.turns, line)
        return found == self.hashes[turn * _LINES + line]

    def all_hold(self) -> bool:
        """Whether every byte is as it was."""
        return bytes(_every_sample(self.addresses, self.sizes, self.turns)) == bytes(self.hashes)


def _every_sample(
    addresses: ctypes.Array[ctypes.c_int64], sizes: ctypes.Array[ctypes.c_int64], turns: int
) -> ctypes.Array[ctypes.c_uint64]:
    hashes = (ctypes.c_uint64 * (turns * _LINES))()
    library().pellucid_every_fingerprint(addresses, sizes, len(sizes), turns, hashes)
    return hashes


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
