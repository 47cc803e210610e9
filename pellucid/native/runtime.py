"""Execution of compiled graphs: `Instance`, and the memory that instances share.

instance = Instance(slots, calls, results, inputs=2, arena=4096)
outputs = instance.run([x, y])
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pellucid.native.encode import encode
from pellucid.native.loader import library
from pellucid.native.plan import Call, Result, Slot


class Instance:
    """A graph that is ready to run. Immutable; any number of threads may run it at once, each in its own frame.

    slots: every buffer, by number.
    calls: in execution order.
    results: what `run` returns, in order.
    inputs: number of arguments of `run`; those that no `InputSlot` names may be anything.
    arena: bytes of scratch memory one run needs. Arenas are shared by all instances of the process.
    name: for profiles, in which each call is shown as `pellucid::NAME/CALL`.

    Raises InternalError for a description that contradicts itself, ToolchainError when the runtime cannot be built.
    """

    __slots__ = ("paths", "run")

    run: Callable[[list[object]], list[torch.Tensor | int | None]]
    """Run on a list of arguments. IndexError: a failed index check of a kernel; RuntimeError: an operator failed;
    an exception of a `PythonCall` passes through. The GIL is released except for tiny graphs. A builtin function,
    which may outlive the instance."""

    paths: tuple[str, ...]
    """How each call is made: `kernel`, `shim` (a C function), `dispatcher`, or `python: <why>`."""

    def __init__(
        self,
        slots: Sequence[Slot],
        calls: Sequence[Call],
        results: Sequence[Result],
        *,
        inputs: int,
        arena: int,
        name: str = "program",
    ) -> None:
        runtime = library()
        encoded = encode(slots, calls, results, inputs, arena, name)
        address, _ = encoded.words.buffer_info()
        self.run = runtime.pellucid_instance(address)
        self.paths = encoded.paths


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Memory that the runtime holds, in bytes, and how well the output pool serves.

    in_use: in live tensors. cached: waiting for reuse. limit: of `cached`. arenas: scratch memory of all frames.
    hits, misses: allocations served from the cache, and from the system.
    """

    in_use: int
    cached: int
    limit: int
    arenas: int
    hits: int
    misses: int


def pool_stats() -> PoolStats:
    """The state of the output pool and the arenas."""
    values = (ctypes.c_int64 * 6)()
    library().pellucid_pool_stats(values)
    return PoolStats(*values)


def pool_trim(keep: int = 0) -> int:
    """Return cached blocks to the system until at most `keep` bytes are cached, and idle arenas when `keep` is 0.

    Returns the number of bytes given back.
    """
    return library().pellucid_pool_trim(keep)


def pool_limit(nbytes: int) -> None:
    """Bound the bytes cached by the output pool (default: 1/8 of the memory this process may use, at least 256 MB)."""
    library().pellucid_pool_limit(nbytes)
