"""What the runtime executes, as frozen data.

An `Instance` (see `runtime`) is made from these: `Slot`s (where each buffer lives), `Call`s in execution order, and
`Result`s. Sizes, strides and offsets of views count elements; arena offsets and `nbytes` count bytes. Calls and
results of a `Template` may leave numbers open that each of its instances is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Unknown:
    """The number at `index` of those that an instance is given. real: written as the bits of a double."""

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
    """A buffer of `nbytes` that each run takes from the output pool; it returns there when its last tensor dies.

    Its tensors are like any others, except that PyTorch cannot make their storage larger (`resize_`).
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class ExternSlot:
    """A buffer that a `FunctionalCall` or `PythonCall` allocates; known from the return of that call on."""


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
"""An argument of an operator; a tuple stands for any list of the schema. An unknown one may be a float."""


def event_name(program: str, call: str = "") -> str:
    """How torch.profiler shows a run of a program, or a call in it."""
    return f"pellucid::{program}/{call}" if call else f"pellucid::{program}"


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant to run a kernel: see `KernelCall`."""

    address: int
    extent: Size
    grain: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Ways to run a kernel that give the same bits, the cheapest by price first: calls find out which is the fastest.

    threads: as many as a call has to have to count.
    settled: called once with a list: the number of the fastest variant, the pairs of calls that were compared, and the
        median of the nanoseconds of each variant.
    """

    variants: tuple[Variant, ...]
    threads: int
    settled: Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A compiled kernel, `int64_t (*)(void* const* p, const int64_t* s, int64_t begin, int64_t end)`.

    It returns 0, or the address of the index check that failed, the index and the size (three `int64_t`).

    address: of that function.
    slots: whose pointers make up `p`.
    symbols: the values of `s`.
    extent: number of parallel iterations; they are split evenly over
        `max(1, min(torch.get_num_threads(), extent // grain))` threads. Nothing is called when it is 0.
    checks: the message of IndexError for each index check of the kernel, with `{index}` and `{size}` in it.
    where: the user's line, for error messages.
    reads: what it reads, for profiles.
    trial: of several variants to run it, of which this is the first; None where there is one.
    offsets: how many bytes after its slot's pointer each parameter begins; empty where all begin there.
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

    windows: arena slots that hold a stretch of a buffer in each part, and bytes of one. parts: see `strips.Chain`.
    """

    first: int
    last: int
    windows: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OutCall:
    """An operator that writes into memory it is given: an `out=` overload, its outputs among `kwargs`.

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

    outputs: for each tensor that the operator returns, the view through which the graph knows it, which binds that
        view's `ExternSlot`; None where nobody uses it. Sizes and dtype must be as returned, else the run fails; where
        strides differ the result is copied into memory with the expected ones.
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

    It returns what `outputs` says: a tensor, or a sequence of tensors (and Nones) when there are several, and must
    not keep its arguments: their memory is reused.
    """

    function: Callable[..., Any]
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorView | None, ...]
    name: str
    where: str = ""


Call: TypeAlias = KernelCall | OutCall | FunctionalCall | PythonCall

Result: TypeAlias = "TensorView | Size | None"
"""What a graph returns. A view that is an input with its own sizes, strides and offset returns that very object."""


def slots_of(call: Call) -> Iterator[int]:
    """Slots that a call reads or writes, those that it binds left out."""
    if isinstance(call, KernelCall):
        yield from call.slots
    else:
        yield from (view.slot for view in views_in(arguments_of(call)))


def arguments_of(call: OutCall | FunctionalCall | PythonCall) -> tuple[Arg, ...]:
    """All arguments of a call, those by position first."""
    return (*call.args, *(value for _, value in call.kwargs))


def views_read(call: Call) -> Iterator[TensorView]:
    """What a profiler shows as the inputs of a call."""
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
