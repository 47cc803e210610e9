"""A compiled kernel as a Python function, for what calls one by itself; programs call theirs natively."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

KernelFunction: TypeAlias = "Callable[[Sequence[torch.Tensor], Sequence[int], int], None]"
"""Called with the tensors of a kernel's parameters, its symbols, and the extent of its parallel loop."""

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
"""Of a kernel's function: its pointers, its sizes, and the iterations from and to which it runs; see `KernelCall`."""


def kernel_function(name: str, address: int) -> KernelFunction:
    """The kernel at `address`, on one thread. It raises IndexError, with `name`, for an index out of bounds."""
    function = SIGNATURE(address)

    def call(tensors: Sequence[torch.Tensor], symbols: Sequence[int], extent: int) -> None:
        pointers = (ctypes.c_void_p * max(1, len(tensors)))(*[tensor.data_ptr() for tensor in tensors])
        sizes = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)
        status = function(ctypes.addressof(pointers), ctypes.addressof(sizes), 0, extent)
        if status:
            _, index, size = (ctypes.c_int64 * 3).from_address(status)
            raise IndexError(f"{name}: index {index} is out of bounds for a dimension with size {size}")

    return call
