"""A compiled kernel as a Python function, to call it alone; compiled programs call kernels natively."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

KernelFunction: TypeAlias = "Callable[[Sequence[torch.Tensor], Sequence[int], int], None]"
"""Called with the tensors of a kernel's parameters, its symbols, and the extent of its parallel loop."""

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
"""The signature of a kernel: pointers, sizes, and the first and last (exclusive) iteration; see `KernelCall`."""


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
