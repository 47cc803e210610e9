"""The machine that kernels are written for, as far as their plan depends on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """One vector instruction set.

    register_bytes: size of a vector register.
    registers: how many of them there are.
    cache_bytes: size of the last level of cache.
    """

    name: str
    register_bytes: int
    registers: int
    cache_bytes: int = 32 << 20


AVX512 = Target("AVX512", 64, 32)
AVX2 = Target("AVX2", 32, 16)


@lru_cache(maxsize=1)
def host() -> Target:
    """This machine, with the widest instruction set that the kernels know and PyTorch uses as well."""
    widest = AVX512 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else AVX2
    known = "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if known else 0
    return replace(widest, cache_bytes=cache) if cache > 0 else widest
