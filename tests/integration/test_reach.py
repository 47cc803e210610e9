"""What each iteration of a kernel touches: no more than its reaches say, which strips rely on."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.codegen import CppKernel
from pellucid.executable import INSTANCES
from pellucid.ir.types import TORCH_DTYPES
from pellucid.native.build import build
from tests.support import assert_touches_no_more, images, native_function, randn, some_iterations

pytestmark = pytest.mark.usefixtures("quick_compiler")

_LIBC = ctypes.CDLL(None)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "pointwise": (lambda x, y: torch.relu(x) * y + 1, (randn(70, 40), randn(40))),
    "transposed": (lambda x: (x + 1).t().contiguous(), (randn(70, 50),)),
    "squares": (lambda x: x.softmax(-1).permute(0, 2, 3, 1).contiguous(), (randn(3, 17, 40, 70),)),
    "few rows": (lambda x: (x * 2).permute(0, 2, 1).contiguous() + 1, (randn(5, 9, 2000),)),
    "flat": (lambda x: x.reshape(-1).sin().view(20, 35)[:, ::2], (randn(70, 10),)),
    "rolled": (lambda x: x + x.roll(1, 0) + x.roll(-2, 1), (randn(40, 30),)),
    "softmax": (lambda x: x.softmax(1), (randn(40, 300),)),
    "columns": (lambda x: x.sum(0), (randn(300, 70),)),
    "norm": (lambda x: F.layer_norm(x, (64,)), (randn(40, 64),)),
    "joined": (lambda x, y: torch.cat([x, y * 2], 1), (randn(40, 30), randn(40, 20))),
    "padded": (lambda x: F.pad(x, (2, 3, 1, 0)) * 2, (randn(4, 20, 30),)),
    "product": (lambda x, y: F.gelu(x @ y), (randn(130, 40), randn(40, 70))),
    "product-bf16": (lambda x, y: x @ y, (randn(130, 64, dtype=torch.bfloat16), randn(64, 96, dtype=torch.bfloat16))),
    "products": (lambda x, y: x @ y, (randn(5, 30, 20), randn(5, 20, 40))),
    "linear": (lambda x, y: F.linear(x, y), (randn(6, 256), randn(300, 256))),
    "convolution": (lambda x, w: F.relu(F.conv2d(x, w, padding=1)), (images(2, 8, 20, 18), images(16, 8, 3, 3))),
    "planes": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (randn(2, 3, 33, 31), randn(16, 3, 3, 3))),
    "dilated": (lambda x, w: F.conv2d(x, w, dilation=2, padding=2), (images(2, 8, 20, 18), images(16, 8, 3, 3))),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=32), (images(2, 32, 17, 15), randn(32, 1, 3, 3))),
    "depthwise-strided": (lambda x, w: F.conv2d(x, w, None, 2, 2, 1, 32), (images(2, 32, 17, 15), randn(32, 1, 5, 5))),
    "grouped": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (images(2, 16, 12, 12), images(16, 4, 3, 3))),
    "tiles": (lambda x, w: F.conv2d(x, w, padding=1), (images(1, 64, 28, 28), images(64, 64, 3, 3))),
    "pools": (lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1), 2), (images(2, 16, 21, 21),)),
    "gradient": (lambda x, y: torch.ops.aten.gelu_backward(x, y), (randn(70, 40), randn(70, 40))),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_iterations_touch_no_more(name: str) -> None:
    found = [assert_touches_no_more(kernel, address, _buffers(kernel)) for kernel, address in _compiled(name)]
    assert any(found) == (name != "grouped")


def _compiled(name: str) -> list[tuple[CppKernel, int]]:
    """The kernels of a case, and where they are."""
    function, args = CASES[name]
    torch._dynamo.reset()
    known = set(INSTANCES)
    compiled = torch.compile(function, backend="pellucid", options={"reuse": False})
    with torch.no_grad():
        compiled(*args)
    kernels = {each.name: each for n in set(INSTANCES) - known for each in INSTANCES[n].kernels.values()}
    addresses, _ = build({each.name: each.source for each in kernels.values()})
    return [(kernel, addresses[name]) for name, kernel in kernels.items()]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["squares", "few rows", "transposed", "product", "convolution", "depthwise", "planes"])
def test_iterations_read_no_more(name: str) -> None:
    """Nor what they do not need, as whole squares are: beyond what they touch memory is protected."""
    for kernel, address in _compiled(name):
        _run_guarded(kernel, address)


def _run_guarded(kernel: CppKernel, address: int) -> None:
    """In a process of its own, with each buffer ending, or beginning, where what is read of it does."""
    reaches, extent = kernel.reaches, kernel.extent.value or 0
    if reaches is None:
        return
    for begin, end in some_iterations(extent):
        for at_end in (True, False):
            child = os.fork()
            if child == 0:
                loads = {kernel.params[k]: reach.over(begin, end) for k, reach in reaches.loads.items()}
                _, pointers = zip(
                    *(_guarded(kernel, name, loads.get(name), at_end) for name in kernel.params), strict=True
                )
                native_function(address)((ctypes.c_void_p * len(pointers))(*pointers), None, begin, end)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, f"{begin} to {end} read more, {at_end=}\n{kernel.source}"


def _guarded(kernel: CppKernel, name: str, read: tuple[int, int] | None, at_end: bool) -> tuple[mmap.mmap, int]:
    """Memory for a parameter, and where the parameter begins: none is beyond, or before, the elements `read`."""
    number = kernel.params.index(name)
    param, skipped = kernel.computes.params[number], kernel.offsets[number]
    size = param.dtype.itemsize
    first, last = read or (0, skipped + (param.numel.value or 0) - 1)
    pages = -(-(last + 1 - first) * size // mmap.PAGESIZE) if last >= first else 1
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + (pages + 1) * mmap.PAGESIZE):
        assert _LIBC.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    inside = start + mmap.PAGESIZE
    buffer = inside + pages * mmap.PAGESIZE - (last + 1) * size if at_end else inside - first * size
    return memory, buffer + skipped * size


def _buffers(kernel: CppKernel) -> dict[str, Tensor]:
    """Random contents for each parameter."""
    params = zip(kernel.params, kernel.offsets, kernel.computes.params, strict=True)
    return {
        name: randn(first + (param.numel.value or 0), dtype=TORCH_DTYPES[param.dtype]) for name, first, param in params
    }
