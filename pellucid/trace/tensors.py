"""Tensors as files that are safe to read from untrusted sources: bytes as safetensors; dtypes and strides as JSON.

A tree of values becomes JSON (`TensorStore.save`), in which a tensor is a view of a numbered range of memory. The
ranges are in `tensors/NAME.safetensors` under the hash of their bytes: ranges that several trees of a run share, such
as the weights of a forward and a backward graph, are stored once. Reading allocates new memory for every tree.
"""

# pyright: basic

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from pellucid.errors import UserError
from pellucid.trace.schema import TENSORS
from pellucid.trace.values import decode, encode


@dataclass(slots=True)
class _Memory:
    """The range of a storage that the tensors of a tree cover, in bytes."""

    number: int
    tensor: torch.Tensor
    first: int
    last: int


@dataclass(slots=True)
class TensorStore:
    """The tensors of a run folder."""

    folder: Path
    _known: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted((self.folder / TENSORS).glob("*.safetensors")):
            with _opened(path) as file:
                self._known.update(dict.fromkeys(file.keys(), path))

    def save(self, name: str, tree: Any) -> Any:
        """A tree of tensors and plain values as JSON; its new bytes go to `tensors/NAME.safetensors`.

        Raises UserError for a value that is neither, or for a tensor that is not dense memory of the CPU.
        """
        memories: dict[int, _Memory] = {}
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                _cover(memories, leaf)
        hashes = self._write(name, memories)
        return {"memory": hashes, "value": encode(tree, lambda tensor: _describe(tensor, memories))}

    def load(self, saved: Mapping[str, Any]) -> Any:
        """The tree from JSON that `save` wrote. Raises UserError if bytes are missing or do not match."""
        memory = [self._bytes(digest) for digest in saved["memory"]]
        return decode(saved["value"], lambda described: _rebuilt(described, memory))

    def _write(self, name: str, memories: Mapping[int, _Memory]) -> list[str]:
        hashes, fresh = [], {}
        for each in memories.values():
            content = _raw(each)
            digest = _digest(content)
            hashes.append(digest)
            if digest not in self._known and digest not in fresh:
                fresh[digest] = content.clone()
        if fresh:
            path = self.folder / TENSORS / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(fresh, path)
            self._known.update(dict.fromkeys(fresh, path))
        return hashes

    def _bytes(self, digest: str) -> torch.Tensor:
        if digest not in self._known:
            raise UserError(f"{self.folder} lacks the tensor {digest[:12]}", hint="copy the whole folder")
        with _opened(self._known[digest]) as file:
            content = file.get_tensor(digest).clone()
        if content.dtype is not torch.uint8 or _digest(content) != digest:
            raise UserError(f"the tensor {digest[:12]} in {self._known[digest]} is damaged", hint="copy the run again")
        return content


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}", hint="copy the run again") from None


def _digest(content: torch.Tensor) -> str:
    return hashlib.sha256(content.numpy()).hexdigest()  # pyright: ignore[reportArgumentType]


def _cover(memories: dict[int, _Memory], tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UserError(
            f"a tensor of layout {tensor.layout} on {tensor.device} cannot be saved", hint="only dense CPU tensors can"
        )
    first, last = _span(tensor)
    key = _key(tensor)
    known = memories.get(key)
    if known is None:
        memories[key] = _Memory(len(memories), tensor.detach(), first, last)
    else:
        known.first, known.last = min(first, known.first), max(last, known.last)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range from the start of the storage, to which offsets are relative, to the end of the tensor."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    return 0, (start + _elements(tensor.shape, tensor.stride())) * size


def _elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements of memory that a view of this shape spans."""
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0


def _raw(memory: _Memory) -> torch.Tensor:
    storage = memory.tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
    return whole[memory.first : memory.last]


def _describe(tensor: torch.Tensor, memories: Mapping[int, _Memory]) -> dict[str, Any]:
    memory = memories[_key(tensor)]
    return {
        "memory": memory.number,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset() * tensor.element_size() - memory.first,
        **({"conj": True} if tensor.is_conj() else {}),
        **({"neg": True} if tensor.is_neg() else {}),
        **({"requires_grad": True} if tensor.requires_grad else {}),
    }


def _rebuilt(described: Mapping[str, Any], memory: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype, content = getattr(torch, described["dtype"], None), memory[described["memory"]]
    shape, stride, offset = described["shape"], described["stride"], described["offset"]
    if not isinstance(dtype, torch.dtype) or len(shape) != len(stride) or min((*shape, *stride, offset), default=0) < 0:
        raise UserError(f"the run describes an impossible tensor: {dict(described)}")
    first = offset // dtype.itemsize
    if offset % dtype.itemsize or (first + _elements(shape, stride)) * dtype.itemsize > content.numel():
        raise UserError(f"the run describes a tensor outside of its memory: {dict(described)}")
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(content.untyped_storage(), first, shape, stride)  # type: ignore[call-overload]
    tensor = torch.ops.aten._neg_view(tensor) if described.get("neg") else tensor
    tensor = tensor.conj() if described.get("conj") else tensor
    return tensor.requires_grad_(bool(described.get("requires_grad")))
