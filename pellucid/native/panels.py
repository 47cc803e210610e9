"""Matrices that are packed once for kernels, and shared by all programs that need them packed in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from pellucid.native.fingerprint import Fingerprint, layout_hash
from pellucid.native.function import kernel_function
from pellucid.native.huge_pages import empty_in_huge_pages


@dataclass(frozen=True, slots=True)
class Packer:
    """A function that packs a tensor: the one at `position` among the arguments and the results of what runs before.

    name, source, numel: see `CppPacking`.
    """

    name: str
    source: str
    numel: int
    position: int


class Panels:
    """What a packer made of a tensor. Shape: [packer.numel], f32. source: of the tensor, as it was."""

    def __init__(self, tensor: torch.Tensor, source: Fingerprint) -> None:
        self.tensor = tensor
        self.source = source


_known: WeakValueDictionary[tuple[int, int], Panels] = WeakValueDictionary()
"""By the address of the packer and the place of the tensor, as long as some program keeps them."""


def pack(packers: Sequence[Packer], addresses: Mapping[str, int], tensors: Sequence[Any], given: int) -> list[Panels]:
    """The panels of tensors, of which the first `given` are arguments: panels of these are shared.

    addresses: of the packers' functions, by name.
    """
    keys = [(addresses[packer.name], layout_hash([tensors[packer.position]])) for packer in packers]
    known = {key: _shared(key, tensors[packer.position]) for key, packer in zip(keys, packers, strict=True)}
    found = {key: panels for key, panels in known.items() if panels is not None}
    missing = {key: packer for key, packer in zip(keys, packers, strict=True) if key not in found}
    rooms = empty_in_huge_pages([packer.numel for packer in missing.values()])
    for (key, packer), room in zip(missing.items(), rooms, strict=True):
        source = tensors[packer.position]
        found[key] = Panels(room, Fingerprint.of([source]))
        kernel_function(packer.name, addresses[packer.name])([source, room], [], 1)
        if packer.position < given:
            _known[key] = found[key]
    return [found[key] for key in keys]


def _shared(key: tuple[int, int], source: torch.Tensor) -> Panels | None:
    panels = _known.get(key)
    return panels if panels is not None and panels.source.holds_entirely([source]) else None
