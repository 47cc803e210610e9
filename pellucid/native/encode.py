"""From an instance's description to the words that the native runtime reads (`Reader` in instance.h).

It also decides how each operator is called, checks the description, and finds out when results can be freed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from pellucid.errors import InternalError
from pellucid.native.instance import (
    ALIGNMENT,
    ArenaSlot,
    Arg,
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
    TensorView,
    event_name,
)
from pellucid.native.loader import dtype_code, layout_code, memory_format_code

_KERNEL, _SHIM, _DISPATCHER, _PYTHON = range(4)
_VIEW, _BITS, _NONE, _SOME, _LIST, _TEXT = range(6)
_TENSOR, _TENSOR_LIST, _OTHER = range(3)
_MM, _BMM, _ADDMM, _BADDBMM = range(4)
_SHIMS = {"aten::mm.out": _MM, "aten::bmm.out": _BMM, "aten::addmm.out": _ADDMM, "aten::baddbmm.out": _BADDBMM}


class _Unboxable(Exception):
    """The dispatcher's C interface cannot take this argument; the message says why."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """words: for the runtime. paths: how each call is made. objects: Python objects that the words point to."""

    words: array[int]
    paths: tuple[str, ...]
    objects: tuple[object, ...]


@dataclass(slots=True)
class _Writer:
    words: array[int] = field(default_factory=lambda: array("q"))

    def word(self, *values: int) -> None:
        self.words.extend(values)

    def list(self, values: Sequence[int]) -> None:
        self.words.append(len(values))
        self.words.extend(values)

    def real(self, value: float) -> None:
        self.words.append(_double_bits(value))

    def text(self, text: str) -> None:
        data = text.encode()
        self.words.append(len(data))
        self.words.frombytes(data + b"\0" * (-len(data) % 8))


def encode(
    slots: Sequence[Slot],
    calls: Sequence[Call],
    results: Sequence[Result],
    inputs: int,
    arena: int,
    name: str,
    number: int,
) -> Encoded:
    """Check and encode an instance. Raises InternalError for a description that contradicts itself."""
    encoder = _Encoder(slots)
    encoder.views_of_results(results)
    body = _Writer()
    body.word(len(calls))
    last = _last_uses(slots, calls, results)
    bound = {number for number, slot in enumerate(slots) if not isinstance(slot, ExternSlot)}
    paths = []
    for index, call in enumerate(calls):
        encoder.check_bound(call, bound)
        paths.append(encoder.call(body, call))
        bound |= {view.slot for view in _outputs(call) if view is not None}
        body.list([slot for slot, user in last.items() if user == index])
        body.text(event_name(name, call.name))
        body.list([encoder.show(view) for view in _read(call)])
    _check(slots, results, bound, inputs, arena)
    head = _Writer()
    operators = any(not isinstance(call, KernelCall) for call in calls)
    head.word(number, inputs, arena, int(operators or not _tiny(calls)), int(operators))
    head.text(event_name(name))
    head.word(len(slots))
    returned = _returned_views(results)
    for number, slot in enumerate(slots):
        head.word(*_place(slot), _only_view(returned.get(number, frozenset()), encoder.views))
    for views in (encoder.views, encoder.shown):
        head.word(len(views))
        for view in views:
            head.word(view.slot, dtype_code(view.dtype), view.offset, view.dtype.itemsize)
            head.list(view.shape)
            head.list(view.strides)
    body.word(len(results))
    for result in results:
        body.word(*encoder.result(result))
    return Encoded(head.words + body.words, tuple(paths), tuple(encoder.objects))


def _tiny(calls: Sequence[Call]) -> bool:
    """Whether a run is too short to be worth releasing the GIL: a few kernels without work for a second thread."""
    return len(calls) <= 4 and all(isinstance(call, KernelCall) and call.extent <= call.grain for call in calls)


def _place(slot: Slot) -> tuple[int, int]:
    match slot:
        case ArenaSlot(offset):
            return 0, offset
        case InputSlot(index):
            return 1, index
        case OutputSlot(nbytes):
            return 2, nbytes
        case ExternSlot():
            return 3, 0


def _returned_views(results: Sequence[Result]) -> dict[int, set[TensorView]]:
    """By slot, the views as which it is returned."""
    returned: dict[int, set[TensorView]] = {}
    for result in results:
        if isinstance(result, TensorView):
            returned.setdefault(result.slot, set()).add(result)
    return returned


def _only_view(returned: Set[TensorView], views: dict[TensorView, int]) -> int:
    """The view as which an output slot is returned, when there is one and it starts where the slot does."""
    if len(returned) != 1:
        return -1
    (view,) = returned
    return views[view] if view.offset == 0 else -1


@dataclass(slots=True)
class _Encoder:
    slots: Sequence[Slot]
    views: dict[TensorView, int] = field(default_factory=dict)
    shown: dict[TensorView, int] = field(default_factory=dict)
    objects: list[object] = field(default_factory=list)

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
            return 0, self.view(result)
        return (2, 0) if result is None else (1, int(result))

    def check_bound(self, call: Call, bound: set[int]) -> None:
        for slot in _used(call):
            if slot not in bound:
                raise InternalError(f"call {call.name!r} uses slot {slot}, which nothing has produced yet")

    def call(self, out: _Writer, call: Call) -> str:
        """Write a call; returns the way it is made."""
        out.text(call.name)
        match call:
            case KernelCall():
                out.text(call.where)
                self._kernel(out, call)
                return "kernel"
            case OutCall() | FunctionalCall():
                out.text(call.where)
                return self._operator(out, call)
            case PythonCall():
                out.text(call.where)
                out.word(_PYTHON)
                self._python(out, call.function, call)
                return "python: a Python function"

    def _kernel(self, out: _Writer, call: KernelCall) -> None:
        if call.extent < 0 or not call.address:
            raise InternalError(f"kernel {call.name!r} has extent {call.extent} and address {call.address}")
        out.word(_KERNEL, call.address)
        out.list(call.slots)
        out.list(call.symbols)
        out.word(call.extent, max(1, call.grain))
        out.word(len(call.checks))
        for message in call.checks:
            out.text(message)

    def _operator(self, out: _Writer, call: OutCall | FunctionalCall) -> str:
        shim = self._shim(call) if isinstance(call, OutCall) else None
        if shim:
            which, views, beta, alpha = shim
            out.word(_SHIM, which)
            out.list([self.view(view) for view in views])
            out.real(beta)
            out.real(alpha)
            return "shim"
        try:
            arguments = self._boxed_arguments(call)
        except _Unboxable as why:
            out.word(_PYTHON)
            self._python(out, _naming_itself(call), call)
            return f"python: {why}"
        schema = call.op._schema
        out.word(_DISPATCHER)
        out.text(schema.name)
        out.text(schema.overload_name)
        out.words.extend(arguments)
        out.list([_returned(entry.type) for entry in schema.returns])
        out.list([-1 if view is None else self.view(view) for view in _outputs(call)])
        self._python(out, _naming_itself(call), call)
        return "dispatcher"

    def _shim(self, call: OutCall) -> tuple[int, list[TensorView], float, float] | None:
        """Operators with a C function of their own, which spares the dispatcher's half microsecond."""
        which = _SHIMS.get(call.op.name())
        if which is None:
            return None
        given = _bind(call)
        alpha, beta = given.pop("alpha", 1), given.pop("beta", 1)
        views = [view for view in (given.pop("out"), *given.values()) if isinstance(view, TensorView)]
        # The C functions take the scalars as doubles, which operators on integers refuse.
        if not all(view.dtype.is_floating_point for view in views):
            return None
        if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
            return None
        return which, views, float(beta), float(alpha)

    # ------------------------------------------------------------------------------ boxed arguments

    def _boxed_arguments(self, call: OutCall | FunctionalCall) -> array[int]:
        given = _bind(call)
        out = _Writer()
        out.word(len(call.op._schema.arguments))
        for argument in call.op._schema.arguments:
            self._box(out, argument.real_type, given[argument.name], argument.name)
        for entry in call.op._schema.returns:
            if _returned(entry.type) == _OTHER and str(entry.type) not in ("int", "float", "bool"):
                raise _Unboxable(f"it returns {entry.type}")
        return out.words

    def _box(self, out: _Writer, kind: Any, value: Arg, name: str) -> None:
        match kind.kind():
            case "OptionalType":
                self._box_optional(out, kind.getElementType(), value, name)
            case "ListType":
                self._box_list(out, kind.getElementType(), value, name)
            case "TensorType" if isinstance(value, TensorView):
                out.word(_VIEW, self.view(value))
            case "StringType" if isinstance(value, str):
                out.word(_TEXT)
                out.text(value)
            case scalar:
                out.word(_BITS, _bits(scalar, value, name))

    def _box_optional(self, out: _Writer, kind: Any, value: Arg, name: str) -> None:
        if value is None:
            out.word(_NONE)
        else:
            out.word(_SOME)
            self._box(out, kind, value, name)

    def _box_list(self, out: _Writer, kind: Any, value: Arg, name: str) -> None:
        items = value if isinstance(value, (tuple, list)) else (value,)
        out.word(_LIST, len(items))
        for item in items:
            self._box(out, kind, item, name)

    # ------------------------------------------------------------------------------------ by Python

    def _python(self, out: _Writer, function: Callable[..., Any], call: OutCall | FunctionalCall | PythonCall) -> None:
        views: list[TensorView] = []
        args = [_with_holes(arg, views) for arg in call.args]
        kwargs = {name: _with_holes(value, views) for name, value in call.kwargs}
        outputs = _outputs(call)

        def trampoline(tensors: list[torch.Tensor]) -> list[object]:
            filled = [_fill(arg, tensors) for arg in args]
            returned = function(*filled, **{name: _fill(value, tensors) for name, value in kwargs.items()})
            if isinstance(returned, torch.Tensor):
                return [returned]
            return list(_flatten(returned)) if outputs else []

        self.objects.append(trampoline)
        out.word(id(trampoline))
        out.list([self.view(view) for view in views])
        out.list([-1 if view is None else self.view(view) for view in outputs])


def _naming_itself(call: OutCall | FunctionalCall) -> Callable[..., Any]:
    """The operator as a Python function, which says in its exceptions, of eager's own type, where it stands."""

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return call.op(*args, **kwargs)
        except Exception as error:
            kind = type(error)
            text = f"{call.name}: {error}" + (f"\n  at {call.where}" if call.where else "")
        raise kind(text)

    return function


@dataclass(frozen=True, slots=True)
class _Hole:
    """Stands for tensor number `index` among the arguments of a Python function."""

    index: int


def _with_holes(arg: Arg, views: list[TensorView]) -> Any:
    if isinstance(arg, TensorView):
        views.append(arg)
        return _Hole(len(views) - 1)
    return tuple(_with_holes(item, views) for item in arg) if isinstance(arg, tuple) else arg


def _fill(arg: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(arg, _Hole):
        return tensors[arg.index]
    return [_fill(item, tensors) for item in arg] if isinstance(arg, tuple) else arg


def _flatten(returned: Any) -> Iterator[object]:
    """The tensors of what an operator returns; integers and the like are not bound to anything."""
    if returned is None or isinstance(returned, torch.Tensor):
        yield returned
    elif isinstance(returned, (tuple, list)):
        for item in returned:
            yield from _flatten(item)


def _bind(call: OutCall | FunctionalCall) -> dict[str, Arg]:
    """The argument for each parameter of the schema, defaults filled in, in the schema's order."""
    parameters: Any = call.op._schema.arguments
    keywords = dict(call.kwargs)
    given: dict[str, Arg] = {}
    positional = iter(call.args)
    for parameter in parameters:
        value = keywords.pop(parameter.name, _MISSING)
        if value is _MISSING and not parameter.kwarg_only:
            value = next(positional, _MISSING)
        if value is _MISSING:
            if not parameter.has_default_value():
                raise InternalError(f"{call.op.name()} in call {call.name!r} lacks argument {parameter.name!r}")
            value = parameter.default_value
        given[parameter.name] = tuple(value) if isinstance(value, list) else value
    if keywords or next(positional, _MISSING) is not _MISSING:
        raise InternalError(f"{call.op.name()} in call {call.name!r} has more arguments than its schema")
    return given


_MISSING: Any = object()


def _bits(kind: str, value: Arg, name: str) -> int:
    """A scalar as the dispatcher's 64-bit stack entry. Raises _Unboxable for what it has no form for."""
    match kind, value:
        case "FloatType", bool() | int() | float():
            return _double_bits(float(value))
        case "BoolType", bool() | int():
            return int(bool(value))
        case (("IntType" | "SymIntType"), bool() | int()):
            return int(value)
        case "ScalarTypeType", torch.dtype():
            return dtype_code(value)
        case "LayoutType", torch.layout():
            return layout_code(value)
        case "MemoryFormatType", torch.memory_format():
            return memory_format_code(value)
        case "DeviceObjType", torch.device(type="cpu"):
            return 0xFFFFFFFF  # type 0 above, index -1 below: the CPU
        case "NumberType", _:
            raise _Unboxable(f"argument {name!r} is a Scalar")
        case _:
            raise _Unboxable(f"argument {name!r} is a {kind.removesuffix('Type')}")


def _double_bits(value: float) -> int:
    return struct.unpack("q", struct.pack("d", value))[0]


def _returned(kind: Any) -> int:
    if kind.kind() == "TensorType":
        return _TENSOR
    if kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
        return _TENSOR_LIST
    return _OTHER


# ------------------------------------------------------------------------------------------------ checks


def _views(arg: Any) -> Iterator[TensorView]:
    if isinstance(arg, TensorView):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _views(item)


def _used(call: Call) -> Iterator[int]:
    """Slots that a call reads or writes, those that it binds left out."""
    if isinstance(call, KernelCall):
        yield from call.slots
    else:
        for arg in (*call.args, *(value for _, value in call.kwargs)):
            yield from (view.slot for view in _views(arg))


def _read(call: Call) -> Iterator[TensorView]:
    """What a profiler shows as the inputs of a call."""
    if isinstance(call, KernelCall):
        return iter(call.reads)
    return _views((*call.args, *(value for key, value in call.kwargs if key != "out")))


def _outputs(call: Call) -> tuple[TensorView | None, ...]:
    return call.outputs if isinstance(call, FunctionalCall | PythonCall) else ()


def _last_uses(slots: Sequence[Slot], calls: Sequence[Call], results: Sequence[Result]) -> dict[int, int]:
    """For each extern slot that is not returned, the last call that touches it."""
    kept = {result.slot for result in results if isinstance(result, TensorView)}
    last: dict[int, int] = {}
    for index, call in enumerate(calls):
        for slot in (*_used(call), *(view.slot for view in _outputs(call) if view is not None)):
            if isinstance(slots[slot], ExternSlot) and slot not in kept:
                last[slot] = index
    return last


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
