"""The machine that kernels are written for, as far as their plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """One vector instruction set.

    register_bytes: size of a vector register.
    registers: how many of them there are.
    """

    name: str
    register_bytes: int
    registers: int


AVX512 = Target("AVX512", 64, 32)
AVX2 = Target("AVX2", 32, 16)


def host() -> Target:
    """The widest instruction set of this machine that the kernels know."""
    return AVX512 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else AVX2
