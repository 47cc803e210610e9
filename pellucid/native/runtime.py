"""Execution of compiled graphs: `Instance`, and the memory that instances share.

instance = Instance(slots, calls, results, inputs=2, arena=4096)
outputs = instance.run([x, y])
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import pellucid.native.random  # noqa: F401 (registers the operator that draws)
from pellucid.native.encode import Template
from pellucid.native.instance import Call, ExternSlot, Result, Slot, Strips
from pellucid.native.loader import library

_numbers = itertools.count()


class Instance:
    """A graph that is ready to run. Immutable; any number of threads may run it at once, each in its own frame.

    slots: every buffer, by number.
    calls: in execution order.
    results: what `run` returns, in order.
    inputs: number of arguments of `run`; those without an `InputSlot` may be any object.
    arena: bytes of scratch memory one run needs. Arenas are shared by all instances of the process.
    name: for profiles, where each call is named `pellucid::NAME/CALL`.
    strips: calls that run strip by strip.

    Raises InternalError for a description that contradicts itself, ToolchainError when the runtime cannot be built.
    """

    __slots__ = ("number", "paths", "run")

    number: int
    """Its identifier in timelines, unique in the process, see `timeline`."""

    run: Callable[[list[object]], list[torch.Tensor | int | None]]
    """Run on a list of arguments. IndexError: a failed index check of a kernel; RuntimeError: an operator failed;
    an exception of a `PythonCall` passes through. The GIL is released except for tiny graphs. A builtin function,
    which may outlive the instance."""

    paths: tuple[str, ...]
    """How each call is executed: `kernel`, `shim` (a C function), `dispatcher`, or `python: <why>`."""

    def __init__(
        self,
        slots: Sequence[Slot],
        calls: Sequence[Call],
        results: Sequence[Result],
        *,
        inputs: int,
        arena: int,
        name: str = "program",
        strips: Sequence[Strips] = (),
    ) -> None:
        externs = {number for number, slot in enumerate(slots) if isinstance(slot, ExternSlot)}
        template = Template(calls, results, strips, slots=len(slots), externs=externs, inputs=inputs, name=name)
        self._make(template, slots, arena, ())

    @classmethod
    def of(cls, template: Template, slots: Sequence[Slot], arena: int, numbers: Sequence[int | float]) -> Instance:
        """An instance of a template. numbers: those that the template leaves open."""
        instance = cls.__new__(cls)
        instance._make(template, slots, arena, numbers)
        return instance

    def _make(self, template: Template, slots: Sequence[Slot], arena: int, numbers: Sequence[int | float]) -> None:
        runtime = library()
        self.number = next(_numbers)
        encoded = template.words(self.number, slots, arena, numbers)
        address, _ = encoded.words.buffer_info()
        self.run = runtime.pellucid_instance(address)
        self.paths = template.paths


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Memory that the runtime holds, in bytes, and the hit rate of the output pool.

    in_use: in live tensors. cached: free, for reuse. limit: of `cached`. arenas: scratch memory of all frames.
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

    Returns the number of bytes freed.
    """
    return library().pellucid_pool_trim(keep)


def pool_limit(nbytes: int) -> None:
    """Bound the bytes cached by the output pool (default: 1/8 of the memory this process may use, at least 256 MB)."""
    library().pellucid_pool_limit(nbytes)


def contended() -> bool:
    """Whether other processes compete for the cores: threads that wait for each other then sleep, not spin."""
    return library().pellucid_contended()


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Make this thread and its team of worker threads treat denormal numbers as zeros in the block.

    Libraries that set this themselves are not affected.
    """
    before = (torch.tensor([1e-30]) * 1e-10).item() == 0
    library().pellucid_flush_denormals(True)
    try:
        yield
    finally:
        library().pellucid_flush_denormals(before)
