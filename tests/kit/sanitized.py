"""Faults that only a sanitizer sees, as targets: kernels that touch a little more memory than they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.kit.planted import Program, instead, patch


def program() -> Program:
    def fn(x: torch.Tensor) -> torch.Tensor:
        scaled = x * 3
        return scaled.sin() - 1  # the line to blame

    return fn, (torch.rand(64, 16),)


def pellucid_beyond() -> Program:
    """Results are stored 4 rows further on: the last ones behind the end of their buffer."""
    from pellucid.codegen.cpp import _Printer

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def pointer(self: Any, buffer: str, index: Any) -> str:
            stored = buffer in {store.buffer for _, store in self.plan.kernel.stores()}
            return original(self, buffer, index) + " + 64" * stored

        return pointer

    patch(_Printer, "pointer", make)
    return program()


def inductor_beyond() -> Program:
    """The same."""
    from torch._inductor.codegen.cpp import CppKernel, CppVecKernel

    def make(original: Callable[..., None]) -> Callable[..., None]:
        return lambda self, name, index, value, mode=None: original(self, name, index + 64, value, mode)

    patch(CppKernel, "store", make)
    patch(CppVecKernel, "store", make)
    return program()


# A count of elements that does not fit into 32 bits; its value is not used.
OVERFLOW = "([&] {{ volatile int32_t n = 1 << 30; volatile int32_t all = n * 4; (void)all; }}(), {it})"


def pellucid_overflows() -> Program:
    """What no result shows: behaviour that C++ leaves undefined."""
    instead("sub", OVERFLOW)
    return program()


def inductor_overflows() -> Program:
    """The same."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    for owner in (CppOverrides, CppVecOverrides):
        patch(owner, "sub", lambda original: staticmethod(lambda a, b: OVERFLOW.format(it=original(a, b))))
    return program()
