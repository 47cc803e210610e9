"""Calls that Python executes during a run: functions from a list of tensors to a list of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pellucid.native.instance import (
    Arg,
    FunctionalCall,
    OutCall,
    PythonCall,
    TensorView,
    Unknown,
    arguments_of,
    outputs_of,
    views_in,
)

Trampoline: TypeAlias = "Callable[[list[torch.Tensor]], list[object]]"
"""Takes the tensors of a call's views, and returns those that the call returns."""


def trampoline(call: OutCall | FunctionalCall | PythonCall, numbers: Sequence[Any]) -> Trampoline:
    """The function that executes a call, with the tensors of `tensor_arguments`. numbers: those that are open."""
    function = call.function if isinstance(call, PythonCall) else _with_location(call)
    count = itertools.count()
    args = [_with_holes(arg, count, numbers) for arg in call.args]
    kwargs = {name: _with_holes(value, count, numbers) for name, value in call.kwargs}
    wanted = bool(outputs_of(call))

    def run(tensors: list[torch.Tensor]) -> list[object]:
        filled = [_fill(arg, tensors) for arg in args]
        returned = function(*filled, **{name: _fill(value, tensors) for name, value in kwargs.items()})
        if isinstance(returned, torch.Tensor):
            return [returned]
        return list(_flatten(returned)) if wanted else []

    return run


def tensor_arguments(call: OutCall | FunctionalCall | PythonCall) -> list[TensorView]:
    """The views among the arguments of a call, in order."""
    return list(views_in(arguments_of(call)))


def is_open(call: OutCall | FunctionalCall | PythonCall) -> bool:
    """Whether some argument, shapes of tensors excepted, is a number that is not known yet."""
    return _is_open(arguments_of(call))


def _is_open(arg: Arg) -> bool:
    return any(map(_is_open, arg)) if isinstance(arg, tuple) else isinstance(arg, Unknown)


def _with_location(call: OutCall | FunctionalCall) -> Callable[..., Any]:
    """The operator as a Python function whose exceptions, of the same type as in eager mode, name the user's line."""

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
    """A placeholder for tensor number `index` among the arguments of a Python function."""

    index: int


def _with_holes(arg: Arg, count: Iterator[int], numbers: Sequence[Any]) -> Any:
    match arg:
        case TensorView():
            return _Hole(next(count))
        case Unknown(index):
            return numbers[index]
        case tuple():
            return tuple(_with_holes(item, count, numbers) for item in arg)
        case _:
            return arg


def _fill(arg: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(arg, _Hole):
        return tensors[arg.index]
    return [_fill(item, tensors) for item in arg] if isinstance(arg, tuple) else arg


def _flatten(returned: Any) -> Iterator[object]:
    """The tensors in the return value of an operator; integers and the like are ignored."""
    if returned is None or isinstance(returned, torch.Tensor):
        yield returned
    elif isinstance(returned, (tuple, list)):
        for item in returned:
            yield from _flatten(item)
