"""Encodes an instance's description as the words that the native runtime reads.

Also decides how each operator is called, checks the description, and determines when results can be freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pellucid.errors import InternalError
from pellucid.ir.types import ALIGNMENT
from pellucid.native.boxing import Unboxable, bind, box, real, returned
from pellucid.native.by_python import is_open, tensor_arguments, trampoline
from pellucid.native.instance import (
    ArenaSlot,
    Call,
    ExternSlot,
    FunctionalCall,
    InputSlot,
    KernelCall,
    OutCall,
    OutputSlot,
    PythonCall,
    Result,
    Size,
    Slot,
    Strips,
    TensorView,
    Trial,
    Unknown,
    Variant,
    event_name,
    outputs_of,
    slots_of,
    views_read,
)
from pellucid.native.loader import dtype_code
from pellucid.native.words import CallKind, Place, ResultKind, Shim, Writer, double_bits

_BY_PYTHON = OutCall | FunctionalCall | PythonCall
"""Calls that may need Python; among words they are placeholders for the function that executes them."""

_SHIMS = {
    "aten::mm.out": Shim.MM,
    "aten::bmm.out": Shim.BMM,
    "aten::addmm.out": Shim.ADDMM,
    "aten::baddbmm.out": Shim.BADDBMM,
}


class Template:
    """The encoding that instances share: all but their memory and the numbers that are not known yet.

    slots: their number. externs: those that a `FunctionalCall` or `PythonCall` allocates. The rest: see `Instance`.
    paths: how each call is executed. Raises InternalError for a description that contradicts itself.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        results: Sequence[Result],
        strips: Sequence[Strips],
        *,
        slots: int,
        externs: Set[int],
        inputs: int,
        name: str,
    ) -> None:
        encoder = _Encoder(slots)
        encoder.views_of_results(results)
        body = Writer()
        body.word(len(calls))
        ends = _ends(externs, calls, results)
        bound = set(range(slots)) - externs
        paths = []
        for index, call in enumerate(calls):
            encoder.check_bound(call, bound)
            paths.append(encoder.call(body, call))
            bound.update(view.slot for view in outputs_of(call) if view is not None)
            body.list(ends.get(index, ()))
            body.text(event_name(name, call.name))
            body.list([encoder.show(view) for view in views_read(call)])
        body.word(len(results))
        for result in results:
            body.word(*encoder.result(result))
        body.word(len(strips))
        for each in strips:
            _strips(body, each, calls)
        as_views = _returned_views(results)
        missing = as_views.keys() - bound
        if missing:
            raise InternalError(f"result {min(missing)} is never produced")
        self.paths = tuple(paths)
        self._inputs = inputs
        self._externs = externs
        self._returned = frozenset(as_views)
        self._only_views = [_only_view(as_views.get(slot, frozenset()), encoder.views) for slot in range(slots)]
        self._trials = tuple(encoder.trials)  # the words contain their addresses
        self._set_words(encoder.head(name).words + body.words)

    def _set_words(self, words: list[Any]) -> None:
        """Store the words, and the positions of placeholders for unknown numbers and for functions of calls."""
        others = [(at, words[at]) for at, kind in enumerate(map(type, words)) if kind is not int]
        unknown = [(at, word) for at, word in others if isinstance(word, Unknown)]
        by_python = [(at, word) for at, word in others if isinstance(word, _BY_PYTHON)]
        self._integers = [(at, word.index) for at, word in unknown if not word.real]
        self._reals = [(at, word.index) for at, word in unknown if word.real]
        self._functions = [(at, trampoline(call, ())) for at, call in by_python if not is_open(call)]
        self._open = [(at, call) for at, call in by_python if is_open(call)]
        for at, _ in (*unknown, *by_python):
            words[at] = 0
        self._words = array("q", words)

    def words(self, number: int, slots: Sequence[Slot], arena: int, numbers: Sequence[Any]) -> Words:
        """An instance for the runtime. number: its identifier in timelines. numbers: those that are open."""
        words = array("q", self._words)
        for at, index in self._integers:
            words[at] = numbers[index]
        for at, index in self._reals:
            words[at] = double_bits(numbers[index])
        functions = self._functions + [(at, trampoline(call, numbers)) for at, call in self._open]
        for at, function in functions:
            words[at] = id(function)
        head = [number, self._inputs, arena, len(slots)]
        for at, (slot, view) in enumerate(zip(slots, self._only_views, strict=True)):
            head += (*self._slot(at, slot, arena), view)
        return Words(array("q", head) + words, tuple(function for _, function in functions))

    def _slot(self, number: int, slot: Slot, arena: int) -> tuple[int, int]:
        """Check a slot, and return its words."""
        match slot:
            case ArenaSlot(offset):
                if offset % ALIGNMENT or not 0 <= offset <= arena:
                    raise InternalError(f"slot {number} is at byte {offset} of an arena of {arena}")
                if number in self._returned:
                    raise InternalError(f"result {number} is in the arena, whose content does not outlive the run")
                words = Place.ARENA, offset
            case InputSlot(index):
                if not 0 <= index < self._inputs:
                    raise InternalError(f"slot {number} is argument {index} of {self._inputs}")
                words = Place.INPUT, index
            case OutputSlot(nbytes):
                words = Place.OUTPUT, nbytes
            case ExternSlot():
                words = Place.EXTERN, 0
        if isinstance(slot, ExternSlot) != (number in self._externs):
            raise InternalError(f"slot {number} is {slot}, which contradicts the template")
        return words


@dataclass(frozen=True, slots=True)
class Words:
    """words: of an instance, for the runtime. objects: those whose addresses are among the words."""

    words: array[int]
    objects: tuple[object, ...]


def _strips(out: Writer, strips: Strips, calls: Sequence[Call]) -> None:
    members = calls[strips.first : strips.last + 1]
    plain = all(isinstance(call, KernelCall) and call.trial is None and not call.checks for call in members)
    if not plain or not members or not strips.parts:
        raise InternalError(f"calls {strips.first} to {strips.last} cannot run strip by strip")
    out.word(strips.first, strips.last)
    out.word(len(strips.windows))
    for slot, nbytes in strips.windows:
        out.word(slot, nbytes)
    out.word(len(strips.parts))
    for part in strips.parts:
        out.list(part)


def _variants(call: KernelCall) -> tuple[Variant, ...]:
    return call.trial.variants if call.trial else (Variant(call.address, call.extent, call.grain),)


def _variant(variant: Variant) -> tuple[int, Size, int]:
    return variant.address, variant.extent, max(1, variant.grain)


def _returned_views(results: Sequence[Result]) -> dict[int, set[TensorView]]:
    """By slot, the views of it that are returned."""
    views: dict[int, set[TensorView]] = {}
    for result in results:
        if isinstance(result, TensorView):
            views.setdefault(result.slot, set()).add(result)
    return views


def _only_view(as_views: Set[TensorView], views: dict[TensorView, int]) -> int:
    """The number of the only view that is returned of a slot, if it starts where the slot does; else -1."""
    if len(as_views) != 1:
        return -1
    (view,) = as_views
    return views[view] if view.offset == 0 else -1


@dataclass(slots=True)
class _Encoder:
    slots: int
    views: dict[TensorView, int] = field(default_factory=dict)
    shown: dict[TensorView, int] = field(default_factory=dict)
    trials: dict[Trial, int] = field(default_factory=dict)  # with the number of calls that share each

    def view(self, view: TensorView) -> int:
        """Number of a view; equal views share one, and its tensor."""
        if not 0 <= view.slot < self.slots or len(view.shape) != len(view.strides):
            raise InternalError(f"{view} is not a view of any slot")
        return self.views.setdefault(view, len(self.views))

    def show(self, view: TensorView) -> int:
        """Like `view`, for a view that only profilers use."""
        return self.shown.setdefault(view, len(self.shown))

    def views_of_results(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, TensorView):
                self.view(result)

    def result(self, result: Result) -> tuple[ResultKind, Size]:
        if isinstance(result, TensorView):
            return ResultKind.VIEW, self.view(result)
        return (ResultKind.NOTHING, 0) if result is None else (ResultKind.INTEGER, result)

    def head(self, name: str) -> Writer:
        """The words before the calls; complete only after all calls are encoded."""
        out = Writer()
        out.text(event_name(name))
        for views in (self.views, self.shown):
            out.word(len(views))
            for view in views:
                out.word(view.slot, dtype_code(view.dtype), view.offset, view.dtype.itemsize)
                out.list(view.shape)
                out.list(view.strides)
        out.word(len(self.trials))
        for trial, sites in self.trials.items():
            out.word(len(trial.variants))
            for variant in trial.variants:
                out.word(*_variant(variant))
            out.word(trial.threads, sites, id(trial.settled))
        return out

    def check_bound(self, call: Call, bound: set[int]) -> None:
        unbound = set(slots_of(call)) - bound
        if unbound:
            raise InternalError(f"call {call.name!r} uses slot {min(unbound)}, which nothing has produced yet")

    def call(self, out: Writer, call: Call) -> str:
        """Write a call; returns how it is executed."""
        out.text(call.name)
        out.text(call.where)
        match call:
            case KernelCall():
                self._kernel(out, call)
                return "kernel"
            case OutCall() | FunctionalCall():
                return self._operator(out, call)
            case PythonCall():
                out.word(CallKind.PYTHON)
                self._python(out, call)
                return "python: a Python function"

    def _kernel(self, out: Writer, call: KernelCall) -> None:
        first, *_ = variants = _variants(call)
        for variant in variants:
            if not variant.address or (isinstance(variant.extent, int) and variant.extent < 0):
                raise InternalError(f"kernel {call.name!r} has extent {variant.extent} and address {variant.address}")
        if len(call.offsets) not in (0, len(call.slots)):
            raise InternalError(f"kernel {call.name!r} has {len(call.slots)} slots and {len(call.offsets)} offsets")
        out.word(CallKind.KERNEL, *_variant(first))
        out.list(call.slots)
        out.list(call.offsets or [0] * len(call.slots))
        out.list(call.symbols)
        out.word(len(call.checks))
        for message in call.checks:
            out.text(message)
        if call.trial is None:
            out.word(-1, 0)
            return
        site = self.trials.get(call.trial, 0)
        self.trials[call.trial] = site + 1
        out.word(list(self.trials).index(call.trial), site)

    def _operator(self, out: Writer, call: OutCall | FunctionalCall) -> str:
        shim = self._shim(call) if isinstance(call, OutCall) else None
        if shim:
            which, views, beta, alpha = shim
            out.word(CallKind.SHIM, which)
            out.list([self.view(view) for view in views])
            out.word(real(beta), real(alpha))
            return "shim"
        try:
            arguments = box(call, self.view)
        except Unboxable as why:
            out.word(CallKind.PYTHON)
            self._python(out, call)
            return f"python: {why}"
        schema = call.op._schema
        out.word(CallKind.DISPATCHER)
        out.text(schema.name)
        out.text(schema.overload_name)
        out.words += arguments
        out.list([returned(entry.type) for entry in schema.returns])
        out.list([-1 if view is None else self.view(view) for view in outputs_of(call)])
        self._python(out, call)
        return "dispatcher"

    def _shim(self, call: OutCall) -> tuple[Shim, list[TensorView], float | Unknown, float | Unknown] | None:
        """For an operator with its own C function, which saves the half microsecond of the dispatcher."""
        which = _SHIMS.get(call.op.name())
        if which is None:
            return None
        given = bind(call)
        alpha, beta = given.pop("alpha", 1), given.pop("beta", 1)
        views = [view for view in (given.pop("out"), *given.values()) if isinstance(view, TensorView)]
        # The C functions take the scalars as doubles, which operators on integers refuse.
        if not all(view.dtype.is_floating_point for view in views):
            return None
        if not isinstance(alpha, int | float | Unknown) or not isinstance(beta, int | float | Unknown):
            return None
        return which, views, beta, alpha

    def _python(self, out: Writer, call: OutCall | FunctionalCall | PythonCall) -> None:
        out.word(call)
        out.list([self.view(view) for view in tensor_arguments(call)])
        out.list([-1 if view is None else self.view(view) for view in outputs_of(call)])


def _ends(externs: Set[int], calls: Sequence[Call], results: Sequence[Result]) -> dict[int, list[int]]:
    """By call, the extern slots that are not returned and that no later call uses."""
    returned_slots = {result.slot for result in results if isinstance(result, TensorView)}
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for slot in (*slots_of(call), *(view.slot for view in outputs_of(call) if view is not None)):
            if slot in externs and slot not in returned_slots:
                last[slot] = index
    ends: dict[int, list[int]] = {}
    for slot, index in last.items():
        ends.setdefault(index, []).append(slot)
    return ends
