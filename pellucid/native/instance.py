"""What the runtime executes, as frozen data.

An `Instance` (see `runtime`) consists of `Slot`s (where each buffer is stored), `Call`s in execution order, and
`Result`s. Sizes, strides and offsets of views count elements; arena offsets and `nbytes` count bytes. Calls and
results of a `Template` may leave numbers open, which are then set for each of its instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Unknown:
    """A number that is set for each instance, by its index. real: written as the bits of a double."""

    index: int
    real: bool = False


Size: TypeAlias = "int | Unknown"


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """A buffer in the arena, `offset` bytes from its start. Its content lasts for one run."""

    offset: int


@dataclass(frozen=True, slots=True)
class InputSlot:
    """The memory of argument `index`, from its data pointer on: a dense CPU tensor, as the caller's guards promise."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """A buffer of `nbytes` that each run allocates from the output pool; freed with the last tensor that uses it.

    Its tensors are like any others, except that PyTorch cannot make their storage larger (`resize_`).
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class ExternSlot:
    """A buffer that a `FunctionalCall` or `PythonCall` allocates; exists after that call."""


Slot: TypeAlias = ArenaSlot | InputSlot | OutputSlot | ExternSlot


@dataclass(frozen=True, slots=True)
class TensorView:
    """A strided view of a slot; `offset` is relative to the slot's data pointer. All in elements."""

    slot: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype


Constant: TypeAlias = torch.dtype | torch.layout | torch.device | torch.memory_format
Arg: TypeAlias = "TensorView | Size | float | bool | str | Constant | tuple[Arg, ...] | None"
"""An argument of an operator; a tuple stands for any list of the schema. An `Unknown` may be a float."""


def event_name(program: str, call: str = "") -> str:
    """The name of a run of a program, or of a call in it, in torch.profiler."""
    return f"pellucid::{program}/{call}" if call else f"pellucid::{program}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of a kernel: see `KernelCall`."""

    address: int
    extent: Size
    grain: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Variants of a kernel with bitwise equal results, the cheapest by estimated cost first: calls find the fastest.

    threads: of a call that is measured.
    settled: called once with a list: the number of the fastest variant, the number of pairs of calls that were
        compared, and the median nanoseconds of each variant.
    """

    variants: tuple[Variant, ...]
    threads: int
    settled: Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A compiled kernel, `int64_t (*)(void* const* p, const int64_t* s, int64_t begin, int64_t end)`.

    It returns 0, or the address of the index check that failed, the index and the size (three `int64_t`).

    address: of that function.
    slots: their pointers are `p`.
    symbols: the values of `s`.
    extent: number of parallel iterations; they are split evenly over
        `max(1, min(torch.get_num_threads(), extent // grain))` threads. Nothing is called when it is 0.
    checks: the message of IndexError for each index check of the kernel, with `{index}` and `{size}` in it.
    where: the user's line, for error messages.
    reads: the views that it reads, for profiles.
    trial: of several variants, of which this is the first; None if there is one.
    offsets: bytes from its slot's pointer to each parameter; empty if all are 0.
    """

    address: int
    slots: tuple[int, ...]
    symbols: tuple[Size, ...]
    extent: Size
    grain: int
    name: str
    checks: tuple[str, ...] = ()
    where: str = ""
    reads: tuple[TensorView, ...] = ()
    trial: Trial | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Strips:
    """Calls of kernels, from `first` to `last`, that run strip by strip, without trials and index checks.

    windows: arena slots that hold a range of a buffer for each part, and the bytes of one part. parts: see
    `strips.Chain`.
    """

    first: int
    last: int
    windows: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OutCall:
    """An operator that writes into existing memory: an `out=` overload, its outputs among `kwargs`.

    name: for profiles. where: the user's line, for error messages.
    """

    op: torch._ops.OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    name: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class FunctionalCall:
    """An operator that returns fresh tensors (or none, for one that only mutates its arguments).

    outputs: for each tensor that the operator returns, its view in the graph, whose `ExternSlot` it is bound to; None
        if it has no users. The run fails if its sizes or dtype differ from the view; if its strides differ, it is
        copied to memory with the view's strides.
    """

    op: torch._ops.OpOverload
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorView | None, ...]
    name: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A Python function called in the middle of a run, with tensors in place of views; its exceptions pass through.

    It returns a tensor, or a sequence of tensors (and Nones) if `outputs` has several, and must not keep references to
    its arguments: their memory is reused.
    """

    function: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorView | None, ...]
    name: str
    where: str = ""


Call: TypeAlias = KernelCall | OutCall | FunctionalCall | PythonCall

Result: TypeAlias = "TensorView | Size | None"
"""A result of a graph. A view that equals an input in sizes, strides and offset returns the same tensor object."""


def slots_of(call: Call) -> Iterator[int]:
    """Slots that a call reads or writes, except those that it binds."""
    if isinstance(call, KernelCall):
        yield from call.slots
    else:
        yield from (view.slot for view in views_in(arguments_of(call)))


def arguments_of(call: OutCall | FunctionalCall | PythonCall) -> tuple[Arg, ...]:
    """All arguments of a call, positional ones first."""
    return (*call.args, *(value for _, value in call.kwargs))


def views_read(call: Call) -> Iterator[TensorView]:
    """The inputs of a call in profiles."""
    if isinstance(call, KernelCall):
        return iter(call.reads)
    return views_in((*call.args, *(value for key, value in call.kwargs if key != "out")))


def outputs_of(call: Call) -> tuple[TensorView | None, ...]:
    """The views whose slots a call binds."""
    return call.outputs if isinstance(call, FunctionalCall | PythonCall) else ()


def views_in(arg: Any) -> Iterator[TensorView]:
    """The views in an argument."""
    if isinstance(arg, TensorView):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from views_in(item)
