"""What an exported program takes, and what sizes it is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from pellucid.errors import UserError

Size: TypeAlias = Any
"""An integer as an expression of SymPy, whose own types say too little."""


_UNWRAP = "give the program a plain tensor, or use torch.compile"


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that the program takes. Strides, in elements, are the example's, but without gaps and overlaps."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """The sizes of an argument. Raises UserError for what is no such tensor."""
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{self.name} is a {type(value).__name__}, and the program takes a tensor")
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
            raise UserError(f"{self.name} is a {type(value).__name__}, which stands for other tensors", hint=_UNWRAP)
        if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype is not self.dtype:
            what = f"{value.dtype} on {value.device} of layout {value.layout}"
            wanted = f"{self.dtype} on cpu of layout {torch.strided}"
            raise UserError(f"{self.name} is {what}, and the program was exported for {wanted}")
        return value.shape


@dataclass(frozen=True, slots=True)
class SizeInput:
    """An integer that the program takes: its only size."""

    name: str
    sizes: tuple[Size]

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """The argument. Raises UserError for what is no integer."""
        if type(value) is not int:
            raise UserError(f"{self.name} is a {type(value).__name__}, and the program takes an integer")
        return (value,)


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """What the program was exported with, and takes nothing else for."""

    name: str
    value: object
    sizes: tuple[Size, ...] = ()

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """None. Raises UserError for any other value."""
        if type(value) is not type(self.value) or (value != self.value and value == value):
            raise UserError(f"{self.name} is {value!r}, and the program was exported for {self.value!r} alone")
        return ()


Input: TypeAlias = "TensorInput | SizeInput | ConstantInput"


def symbols_of(inputs: Sequence[Input]) -> tuple[sympy.Symbol, ...]:
    """The symbols that sizes of inputs are made of."""
    return tuple(dict.fromkeys(symbol for each in inputs for size in each.sizes for symbol in symbols_in(size)))


def symbols_in(size: Size) -> list[sympy.Symbol]:
    """The symbols of a size, in the order of their names."""
    return sorted(size.free_symbols, key=str)


def value_of(size: Size, values: Mapping[sympy.Symbol, int]) -> int:
    """A size for these values of its symbols."""
    return int(size.xreplace(values))


def values_for(
    inputs: Sequence[Input], given: Sequence[object], ranges: Mapping[sympy.Symbol, tuple[int, int]]
) -> dict[sympy.Symbol, int]:
    """The values of the symbols for these arguments, one for each input.

    ranges: the least and the largest value of each. Raises UserError for arguments that the program does not take.
    """
    told = [(each, each.sizes_of(value)) for each, value in zip(inputs, given, strict=True)]
    values: dict[sympy.Symbol, int] = {}
    for each, numbers in told:
        if len(numbers) != len(each.sizes):
            raise _other_sizes(each, numbers)
        for size, number in zip(each.sizes, numbers, strict=True):
            if len(symbols_in(size)) == 1:
                found = _solved(size, number)
                if found is None:
                    raise _other_sizes(each, numbers)
                values.setdefault(symbols_in(size)[0], found)
    for symbol in ranges:
        if symbol not in values:
            raise UserError(f"no argument tells the size {symbol}, of which others are made")
    for each, numbers in told:
        if numbers != tuple(value_of(size, values) for size in each.sizes):
            raise _other_sizes(each, numbers)
    for symbol, (least, most) in ranges.items():
        if not least <= values[symbol] <= most:
            raise UserError(
                f"the size {symbol} is {values[symbol]}, and the program was exported for {least} to {most}"
            )
    return values


def _solved(size: Size, number: int) -> int | None:
    """The value of the only symbol of a linear size that is `number`; None where that is no integer."""
    (symbol,) = symbols_in(size)
    factor, rest = sympy.Poly(size, symbol).all_coeffs()
    found, remainder = divmod(number - int(rest), int(factor))
    return None if remainder else found


def _other_sizes(each: Input, numbers: tuple[int, ...]) -> UserError:
    wanted = f"({', '.join(map(str, each.sizes))}{',' if len(each.sizes) == 1 else ''})"
    what = f"{each.name} has size {tuple(numbers)}, and the program was exported for {wanted}"
    return UserError(what, hint="export it with dynamic_shapes to call it with other sizes")
