"""Compilers that are broken on purpose, for docs/debugging.md: each function breaks `neg` and returns a program.

Targets for the kit: `pellucid check examples/broken_neg.py:pellucid_wrong_result`. A fault ends with its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def foo(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """The tutorial's program."""
    a = torch.neg(x1)
    b = torch.maximum(x2, a)
    return torch.cat([b], dim=0)


def bytes_program() -> Program:
    """On unsigned bytes, whose negation C++ makes an int."""
    torch.manual_seed(0)
    return foo, (torch.randint(256, (1, 8), dtype=torch.uint8), torch.randint(256, (8390, 8), dtype=torch.uint8))


def floats_program() -> Program:
    """On numbers that are about one."""
    torch.manual_seed(0)
    return foo, (torch.randn(1, 8), torch.randn(8390, 8))


def inductor_neg(text: Callable[[Any], str]) -> None:
    """Change what Inductor prints for `neg`, in scalar and in vector code."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    for owner in (CppOverrides, CppVecOverrides):
        mock.patch.object(owner, "neg", staticmethod(text)).start()


def pellucid_neg(text: Callable[[str], str]) -> None:
    """Change what Pellucid prints for `neg`."""
    from pellucid.codegen.cpp import _Printer

    original = _Printer.value

    def value(self: Any, line: Any) -> str:
        if getattr(line.rhs, "op", "") != "neg":
            return original(self, line)
        return text(self.arg(line.rhs.args[0], self.is_wide(line.out)))

    mock.patch.object(_Printer, "value", value).start()
    os.environ["PELLUCID_REUSE"] = "0"  # else later processes would start what this one compiles


def inductor_compile_error() -> Program:
    """`-` makes an int of an unsigned char."""
    inductor_neg(lambda x: f"-{x}")
    return bytes_program()


def inductor_wrong_result() -> Program:
    """Twice the number instead of its negative."""
    inductor_neg(lambda x: f"decltype({x})({x} + {x})")
    return floats_program()


def pellucid_compile_error() -> Program:
    """As in C++, an int."""
    pellucid_neg(lambda x: f"pv::cast<int32_t>(pv::neg({x}))")
    return bytes_program()


def pellucid_wrong_result() -> Program:
    """Twice the number instead of its negative."""
    pellucid_neg(lambda x: f"pv::add({x}, {x})")
    return floats_program()


def pellucid_crash() -> Program:
    """Writes to address 0."""
    pellucid_neg(lambda x: f"(*(volatile int*)nullptr = 1, pv::neg({x}))")
    return floats_program()


def pellucid_endless_loop() -> Program:
    """Never comes back."""
    pellucid_neg(lambda x: f'([&] {{ while (true) asm volatile(""); }}(), pv::neg({x}))')
    return floats_program()
