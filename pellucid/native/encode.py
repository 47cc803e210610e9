"""From an instance's description to the words that the native runtime reads.

It also decides how each operator is called, checks the description, and finds out when results can be freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

from pellucid.errors import InternalError
from pellucid.ir.types import ALIGNMENT
from pellucid.native.boxing import Unboxable, bind, box, returned
from pellucid.native.by_python import trampoline
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
    Slot,
    Strips,
    TensorView,
    Trial,
    Way,
    event_name,
    outputs_of,
    slots_of,
    views_read,
)
from pellucid.native.loader import dtype_code
from pellucid.native.words import CallKind, Place, ResultKind, Shim, Writer

_SHIMS = {
    "aten::mm.out": Shim.MM,
    "aten::bmm.out": Shim.BMM,
    "aten::addmm.out": Shim.ADDMM,
    "aten::baddbmm.out": Shim.BADDBMM,
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """words: for the runtime. paths: how each call is made. objects: Python objects that the words point to."""

    words: array[int]
    paths: tuple[str, ...]
    objects: tuple[object, ...]


def encode(
    slots: Sequence[Slot],
    calls: Sequence[Call],
    results: Sequence[Result],
    strips: Sequence[Strips],
    inputs: int,
    arena: int,
    name: str,
    number: int,
) -> Encoded:
    """Check and encode an instance. Raises InternalError for a description that contradicts itself."""
    encoder = _Encoder(slots)
    encoder.views_of_results(results)
    body = Writer()
    body.word(len(calls))
    ends = _ends(slots, calls, results)
    bound = {number for number, slot in enumerate(slots) if not isinstance(slot, ExternSlot)}
    paths = []
    for index, call in enumerate(calls):
        encoder.check_bound(call, bound)
        paths.append(encoder.call(body, call))
        bound.update(view.slot for view in outputs_of(call) if view is not None)
        body.list(ends.get(index, ()))
        body.text(event_name(name, call.name))
        body.list([encoder.show(view) for view in views_read(call)])
    _check(slots, results, bound, inputs, arena)
    head = Writer()
    operators = any(not isinstance(call, KernelCall) for call in calls)
    head.word(number, inputs, arena, int(operators or not _tiny(calls)), int(operators))
    head.text(event_name(name))
    head.word(len(slots))
    as_views = _returned_views(results)
    for number, slot in enumerate(slots):
        head.word(*_place(slot), _only_view(as_views.get(number, frozenset()), encoder.views))
    for views in (encoder.views, encoder.shown):
        head.word(len(views))
        for view in views:
            head.words.extend(_view_words(view))
    head.word(len(encoder.trials))
    for trial, sites in encoder.trials.items():
        head.word(len(trial.ways))
        for way in trial.ways:
            head.word(*_way(way))
        head.word(trial.threads, sites, id(trial.settled))
    body.word(len(results))
    for result in results:
        body.word(*encoder.result(result))
    body.word(len(strips))
    for each in strips:
        _strips(body, each, calls)
    return Encoded(head.words + body.words, tuple(paths), tuple(encoder.objects))


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


def _tiny(calls: Sequence[Call]) -> bool:
    """Whether a run is too short to be worth releasing the GIL: a few kernels without work for a second thread."""
    return len(calls) <= 4 and all(
        isinstance(call, KernelCall) and all(way.extent <= way.grain for way in _ways(call)) for call in calls
    )


def _ways(call: KernelCall) -> tuple[Way, ...]:
    return call.trial.ways if call.trial else (Way(call.address, call.extent, call.grain),)


def _way(way: Way) -> tuple[int, int, int]:
    return way.address, way.extent, max(1, way.grain)


def _place(slot: Slot) -> tuple[int, int]:
    match slot:
        case ArenaSlot(offset):
            return Place.ARENA, offset
        case InputSlot(index):
            return Place.INPUT, index
        case OutputSlot(nbytes):
            return Place.OUTPUT, nbytes
        case ExternSlot():
            return Place.EXTERN, 0


def _returned_views(results: Sequence[Result]) -> dict[int, set[TensorView]]:
    """By slot, the views as which it is returned."""
    views: dict[int, set[TensorView]] = {}
    for result in results:
        if isinstance(result, TensorView):
            views.setdefault(result.slot, set()).add(result)
    return views


def _only_view(as_views: Set[TensorView], views: dict[TensorView, int]) -> int:
    """The view as which an output slot is returned, when there is one and it starts where the slot does."""
    if len(as_views) != 1:
        return -1
    (view,) = as_views
    return views[view] if view.offset == 0 else -1


# Of calls that are alive: those whose numbers do not depend on sizes are the same in many instances.
_KERNELS: WeakKeyDictionary[KernelCall, array[int]] = WeakKeyDictionary()


def _kernel_words(call: KernelCall) -> array[int]:
    """A kernel's call without its trial, which is known by its number in an instance."""
    out = Writer()
    out.text(call.name)
    out.text(call.where)
    first, *_ = ways = _ways(call)
    for way in ways:
        if way.extent < 0 or not way.address:
            raise InternalError(f"kernel {call.name!r} has extent {way.extent} and address {way.address}")
    out.word(CallKind.KERNEL, *_way(first))
    if len(call.offsets) not in (0, len(call.slots)):
        raise InternalError(f"kernel {call.name!r} has {len(call.slots)} slots and {len(call.offsets)} offsets")
    out.list(call.slots)
    out.list(call.offsets or [0] * len(call.slots))
    out.list(call.symbols)
    out.word(len(call.checks))
    for message in call.checks:
        out.text(message)
    return out.words


@lru_cache(maxsize=1 << 12)
def _view_words(view: TensorView) -> array[int]:
    """Most views are the same for all sizes."""
    out = Writer()
    out.word(view.slot, dtype_code(view.dtype), view.offset, view.dtype.itemsize)
    out.list(view.shape)
    out.list(view.strides)
    return out.words


@dataclass(slots=True)
class _Encoder:
    slots: Sequence[Slot]
    views: dict[TensorView, int] = field(default_factory=dict)
    shown: dict[TensorView, int] = field(default_factory=dict)
    objects: list[object] = field(default_factory=list)
    trials: dict[Trial, int] = field(default_factory=dict)  # with the calls that share each

    def view(self, view: TensorView) -> int:
        """Number of a view; equal views share one, and its tensor."""
        if not 0 <= view.slot < len(self.slots) or len(view.shape) != len(view.strides):
            raise InternalError(f"{view} is not a view of any slot")
        return self.views.setdefault(view, len(self.views))

    def show(self, view: TensorView) -> int:
        """The same for a view that only a profiler looks at."""
        return self.shown.setdefault(view, len(self.shown))

    def views_of_results(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, TensorView):
                self.view(result)

    def result(self, result: Result) -> tuple[int, int]:
        if isinstance(result, TensorView):
            return ResultKind.VIEW, self.view(result)
        return (ResultKind.NOTHING, 0) if result is None else (ResultKind.INTEGER, int(result))

    def check_bound(self, call: Call, bound: set[int]) -> None:
        unbound = set(slots_of(call)) - bound
        if unbound:
            raise InternalError(f"call {call.name!r} uses slot {min(unbound)}, which nothing has produced yet")

    def call(self, out: Writer, call: Call) -> str:
        """Write a call; returns the way it is made."""
        if isinstance(call, KernelCall):
            self._kernel(out, call)
            return "kernel"
        out.text(call.name)
        out.text(call.where)
        match call:
            case OutCall() | FunctionalCall():
                return self._operator(out, call)
            case PythonCall():
                out.word(CallKind.PYTHON)
                self._python(out, call)
                return "python: a Python function"

    def _kernel(self, out: Writer, call: KernelCall) -> None:
        words = _KERNELS.get(call)
        if words is None:
            _KERNELS[call] = words = _kernel_words(call)
        out.words.extend(words)
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
            out.real(beta)
            out.real(alpha)
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
        out.words.extend(arguments)
        out.list([returned(entry.type) for entry in schema.returns])
        out.list([-1 if view is None else self.view(view) for view in outputs_of(call)])
        self._python(out, call)
        return "dispatcher"

    def _shim(self, call: OutCall) -> tuple[Shim, list[TensorView], float, float] | None:
        """Operators with a C function of their own, which spares the dispatcher's half microsecond."""
        which = _SHIMS.get(call.op.name())
        if which is None:
            return None
        given = bind(call)
        alpha, beta = given.pop("alpha", 1), given.pop("beta", 1)
        views = [view for view in (given.pop("out"), *given.values()) if isinstance(view, TensorView)]
        # The C functions take the scalars as doubles, which operators on integers refuse.
        if not all(view.dtype.is_floating_point for view in views):
            return None
        if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
            return None
        return which, views, float(beta), float(alpha)

    def _python(self, out: Writer, call: OutCall | FunctionalCall | PythonCall) -> None:
        function, views = trampoline(call)
        self.objects.append(function)
        out.word(id(function))
        out.list([self.view(view) for view in views])
        out.list([-1 if view is None else self.view(view) for view in outputs_of(call)])


def _ends(slots: Sequence[Slot], calls: Sequence[Call], results: Sequence[Result]) -> dict[int, list[int]]:
    """By call, the extern slots that are not returned and that no later call touches."""
    kept = {result.slot for result in results if isinstance(result, TensorView)}
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for slot in (*slots_of(call), *(view.slot for view in outputs_of(call) if view is not None)):
            if isinstance(slots[slot], ExternSlot) and slot not in kept:
                last[slot] = index
    ends: dict[int, list[int]] = {}
    for slot, index in last.items():
        ends.setdefault(index, []).append(slot)
    return ends


def _check(slots: Sequence[Slot], results: Sequence[Result], bound: set[int], inputs: int, arena: int) -> None:
    for number, slot in enumerate(slots):
        if isinstance(slot, InputSlot) and not 0 <= slot.index < inputs:
            raise InternalError(f"slot {number} is argument {slot.index} of {inputs}")
        if isinstance(slot, ArenaSlot) and (slot.offset % ALIGNMENT or not 0 <= slot.offset <= arena):
            raise InternalError(f"slot {number} is at byte {slot.offset} of an arena of {arena}")
    for result in results:
        if not isinstance(result, TensorView):
            continue
        if result.slot not in bound:
            raise InternalError(f"result {result} is never produced")
        if isinstance(slots[result.slot], ArenaSlot):
            raise InternalError(f"result {result} lies in the arena, whose content does not outlive the run")
