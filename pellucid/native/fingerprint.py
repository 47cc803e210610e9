"""Detects changes of tensors: by their memory, their version counters and samples of their bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pellucid.native.loader import library

_TURNS = 8
"""Tensors with a version counter are sampled in one of `_TURNS` pages, in other pages at the next call."""

_LINES = 64
"""Cache lines in a page. A sample has one of them, the next one after all turns. Equal to `kLines` in fingerprint.h."""

_UNCOUNTED = -1
"""The version of an inference tensor, which has no version counter."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The state of tensors at one time, to detect changes: see `holds`.

    storages: the address of each StorageImpl. pointers: of their data. versions: their version counters.
    counted, uncounted: samples of the bytes of tensors with a version counter, and of those without one.
    memory: weak references to the storages; they keep the addresses in `storages` from being reused.
    """

    storages: ctypes.Array[ctypes.c_int64]
    pointers: ctypes.Array[ctypes.c_int64]
    versions: ctypes.Array[ctypes.c_int64]
    counted: _Samples
    uncounted: _Samples
    memory: tuple[StorageWeakRef, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Fingerprint:
        words = ctypes.c_int64 * len(tensors)
        memory = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        storages = words(*(tensor.untyped_storage()._cdata for tensor in tensors))
        pointers = words(*(tensor.data_ptr() for tensor in tensors))
        versions = words(*(_UNCOUNTED if tensor.is_inference() else tensor._version for tensor in tensors))
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        others = [tensor for tensor in tensors if tensor.is_inference()]
        return cls(storages, pointers, versions, _Samples.of(counted, _TURNS), _Samples.of(others, 1), memory)

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """False if one of the tensors was replaced, was changed by PyTorch, or differs in the sample of this call.

        tensors: as many as before. A change that PyTorch does not count, through `.data`, NumPy or a pointer, is only
        detected by samples: at once if it changes a whole tensor, within `_TURNS` calls if it changes whole pages, and
        within `_TURNS * _LINES` calls for any element.
        """
        return self._unchanged(tensors) and self.counted.hold() and self.uncounted.hold()

    def holds_entirely(self, tensors: list[torch.Tensor]) -> bool:
        """Like `holds`, but compares every byte."""
        return self._unchanged(tensors) and self.counted.all_hold() and self.uncounted.all_hold()

    def _unchanged(self, tensors: list[torch.Tensor]) -> bool:
        return library().pellucid_unchanged(tensors, self.storages, self.pointers, self.versions)

    def is_gone(self) -> bool:
        """Whether the memory of one of the tensors was freed."""
        return any(each.expired() for each in self.memory)


def layout_hash(tensors: list[torch.Tensor]) -> int:
    """A hash of the addresses, types, sizes and strides of tensors."""
    return library().pellucid_layout_hash(tensors)


@dataclass(frozen=True, slots=True)
class _Samples:
    """Hashes of the samples of some tensors, by turn and line. turns: a sample has one of `turns` pages."""

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
        """Whether the sample of this call is unchanged."""
        line, turn = divmod(next(self.calls) % len(self.hashes), self.turns)
        current = library().pellucid_fingerprint(self.addresses, self.sizes, len(self.sizes), turn, self.turns, line)
        return current == self.hashes[turn * _LINES + line]

    def all_hold(self) -> bool:
        """Whether every byte is unchanged."""
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
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
