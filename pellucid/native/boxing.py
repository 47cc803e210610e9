"""The arguments of an operator, encoded for the dispatcher's C interface: `Arg` in instance.h."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pellucid.errors import InternalError
from pellucid.native.instance import Arg, FunctionalCall, OutCall, Size, TensorView, Unknown
from pellucid.native.loader import dtype_code, layout_code, memory_format_code
from pellucid.native.words import ArgKind, Returned, Writer, double_bits


class Unboxable(Exception):
    """The dispatcher's C interface cannot take this argument; the message says why."""


def box(call: OutCall | FunctionalCall, number: Callable[[TensorView], int]) -> list[Any]:
    """The words of a call's arguments. number: of a view. Raises Unboxable."""
    given = bind(call)
    out = Writer()
    out.word(len(call.op._schema.arguments))
    for argument in call.op._schema.arguments:
        _box(out, argument.real_type, given[argument.name], argument.name, number)
    for entry in call.op._schema.returns:
        if returned(entry.type) == Returned.OTHER and str(entry.type) not in ("int", "float", "bool"):
            raise Unboxable(f"it returns {entry.type}")
    return out.words


def returned(kind: Any) -> Returned:
    """The kind of a returned value. kind: its type in the schema."""
    if kind.kind() == "TensorType":
        return Returned.TENSOR
    if kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
        return Returned.TENSOR_LIST
    return Returned.OTHER


def bind(call: OutCall | FunctionalCall) -> dict[str, Arg]:
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


def _box(out: Writer, kind: Any, value: Arg, name: str, number: Callable[[TensorView], int]) -> None:
    match kind.kind():
        case "OptionalType" if value is None:
            out.word(ArgKind.NONE)
        case "OptionalType":
            out.word(ArgKind.SOME)
            _box(out, kind.getElementType(), value, name, number)
        case "ListType":
            items = value if isinstance(value, (tuple, list)) else (value,)
            out.word(ArgKind.LIST, len(items))
            for item in items:
                _box(out, kind.getElementType(), item, name, number)
        case "TensorType" if isinstance(value, TensorView):
            out.word(ArgKind.VIEW, number(value))
        case "StringType" if isinstance(value, str):
            out.word(ArgKind.TEXT)
            out.text(value)
        case scalar:
            out.word(ArgKind.BITS, _bits(scalar, value, name))


def real(value: float | Unknown) -> Size:
    """The word of a double."""
    return replace(value, real=True) if isinstance(value, Unknown) else double_bits(float(value))


def _bits(kind: str, value: Arg, name: str) -> Size:
    """A scalar as the dispatcher's 64-bit stack entry. Raises Unboxable for other values."""
    match kind, value:
        case "FloatType", bool() | int() | float() | Unknown():
            return real(value)
        case "BoolType", bool() | int():
            return int(bool(value))
        case (("IntType" | "SymIntType"), bool() | int()):
            return int(value)
        case (("IntType" | "SymIntType"), Unknown()):
            return value
        case "ScalarTypeType", torch.dtype():
            return dtype_code(value)
        case "LayoutType", torch.layout():
            return layout_code(value)
        case "MemoryFormatType", torch.memory_format():
            return memory_format_code(value)
        case "DeviceObjType", torch.device(type="cpu"):
            return 0xFFFFFFFF  # type 0 above, index -1 below: the CPU
        case "NumberType", _:
            raise Unboxable(f"argument {name!r} is a Scalar")
        case _:
            raise Unboxable(f"argument {name!r} is a {kind.removesuffix('Type')}")
