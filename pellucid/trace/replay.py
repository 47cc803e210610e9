"""What the programs of a run folder call: making inputs, comparing, building and calling edited kernels."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from pellucid.native.build import build

Kernel = Callable[..., None]


def make_input(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this layout: normal random floats, small integers that are valid indices, random bools."""
    tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return tensor.copy_(torch.randn(tuple(shape), dtype=torch.float32).to(dtype))
    return tensor.copy_(torch.randint(0, 2, tuple(shape)).to(dtype))


def compare(function: Callable[..., Any], inputs: list[Any]) -> None:
    """Run `function` in eager mode and compiled, and print each output's largest difference."""
    cast(Any, torch).manual_seed(0)  # both draw the same random numbers
    expected = _tensors(function(*_copies(inputs)))
    compiled = cast(Any, torch).compile(function, backend="pellucid", fullgraph=True)
    cast(Any, torch).manual_seed(0)
    actual = _tensors(compiled(*_copies(inputs)))
    for position, (eager, compiled) in enumerate(zip(expected, actual, strict=True)):
        difference = (eager.double() - compiled.double()).abs().max().item() if eager.numel() else 0.0
        print(f"output {position}: {tuple(eager.shape)} {eager.dtype}, largest difference {difference:.3g}")


def _copies(inputs: list[Any]) -> list[Any]:
    return [
        value.new_empty_strided(value.shape, value.stride()).copy_(value) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    several = cast(Sequence[Any], outputs) if isinstance(outputs, list | tuple) else [outputs]
    return [value for value in several if isinstance(value, torch.Tensor)]


def load_kernels(sources: Mapping[str, str]) -> dict[str, Kernel]:
    """Build C++ kernels, edited or not; each is called as `kernel([tensors], [symbols], extent)`.

    The function in the text has the name of its key; it is renamed after its content, so that an edit is compiled
    and never mistaken for the original.
    """
    renamed = {name: f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}" for name, text in sources.items()}
    addresses, _ = build({renamed[name]: text.replace(name, renamed[name]) for name, text in sources.items()})
    return {name: _callable(name, addresses[unique]) for name, unique in renamed.items()}


def _callable(name: str, address: int) -> Kernel:
    function = ctypes.CFUNCTYPE(
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    )(address)  # fmt: skip

    def call(tensors: Sequence[torch.Tensor], symbols: Sequence[int], extent: int) -> None:
        pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        status = function(ctypes.addressof(pointers), ctypes.addressof(sizes), 0, extent)
        if status:
            _, index, size = (ctypes.c_int64 * 3).from_address(status)
            raise IndexError(f"{name}: index {index} is out of bounds for a dimension with size {size}")

    return call


def buffer(arena: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` at byte `offset` of the arena."""
    return arena[offset : offset + numel * dtype.itemsize].view(dtype)


def view(base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> torch.Tensor:
    """A strided view; `offset` counts elements from the start of `base`."""
    return torch.as_strided(base, tuple(shape), tuple(strides), base.storage_offset() + offset)


def fit(result: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """What an ATen call returned, in the layout that the graph was compiled for."""
    if result.stride() == tuple(strides):
        return result
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=result.dtype).copy_(result)
