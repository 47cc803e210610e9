"""What an exported program takes, and what sizes it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        if stands_for_others(value):
            raise UserError(f"{self.name} is a {type(value).__name__}, which stands for other tensors", hint=_UNWRAP)
        found, wanted = (value.dtype, value.device.type, value.layout), (self.dtype, "cpu", torch.strided)
        differ = [(str(one), str(other)) for one, other in zip(found, wanted, strict=True) if one != other]
        if differ:
            what, asked = (", ".join(each) for each in zip(*differ, strict=True))
            hint = "convert it first, or export the program with such an example"
            raise UserError(f"{self.name} is {what}, and the program was exported for {asked}", hint=hint)
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
            what = f"{self.name} is {value!r}, and the program was exported for {self.value!r} alone"
            raise UserError(what, hint="export it once more, with this value")
        return ()


Input: TypeAlias = "TensorInput | SizeInput | ConstantInput"


def stands_for_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class with operators of its own: it need not have memory."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def symbols_of(inputs: Sequence[Input]) -> tuple[sympy.Symbol, ...]:
    """The symbols that sizes of inputs are made of."""
    return tuple(dict.fromkeys(symbol for each in inputs for size in each.sizes for symbol in symbols_in(size)))


def symbols_in(size: Size) -> list[sympy.Symbol]:
    """The symbols of a size, in the order of their names."""
    return sorted(size.free_symbols, key=str)


class Inputs:
    """All that an exported program takes, in order. ranges: the least and the largest value of each symbol."""

    def __init__(self, inputs: Sequence[Input], ranges: Mapping[sympy.Symbol, tuple[int, int]]) -> None:
        self.each = tuple(inputs)
        self._ranges = dict(ranges)
        self._sources = _sources(self.each)
        self._sizes = _function(ranges, [each.sizes for each in self.each])
        strides = [each.strides if isinstance(each, TensorInput) else () for each in self.each]
        self._strides = _function(ranges, strides)

    def values(self, given: Sequence[object]) -> dict[sympy.Symbol, int]:
        """The values of the symbols for these arguments. Raises UserError for ones that the program does not take."""
        told = [each.sizes_of(value) for each, value in zip(self.each, given, strict=True)]
        for each, sizes in zip(self.each, told, strict=True):
            if len(sizes) != len(each.sizes):
                raise _other_sizes(each, sizes)
        values: dict[sympy.Symbol, int] = {}
        for symbol in self._ranges:
            if symbol not in self._sources:
                raise UserError(f"no argument tells the size {symbol}, of which others are made")
            source = self._sources[symbol]
            values[symbol], rest = divmod(told[source.number][source.place] - source.shift, source.factor)
            if rest:
                raise _other_sizes(self.each[source.number], told[source.number])
        for each, sizes, wanted in zip(self.each, told, self._sizes(*values.values()), strict=True):
            if sizes != wanted:
                raise _other_sizes(each, sizes)
        for symbol, (least, most) in self._ranges.items():
            if not least <= values[symbol] <= most:
                what = f"the size {symbol} is {values[symbol]}, and the program was exported for {least} to {most}"
                raise UserError(what)
        return values

    def strides(self, values: Mapping[sympy.Symbol, int]) -> tuple[tuple[int, ...], ...]:
        """Those of each tensor, and none of other inputs."""
        return self._strides(*(values[symbol] for symbol in self._ranges))


@dataclass(frozen=True, slots=True)
class _Source:
    """What tells a symbol: the size at `place` of the input `number`, `factor` times the symbol and `shift`."""

    number: int
    place: int
    factor: int
    shift: int


def _sources(inputs: Sequence[Input]) -> dict[sympy.Symbol, _Source]:
    """For each symbol the first size that is linear in it, and made of no other."""
    found: dict[sympy.Symbol, _Source] = {}
    for number, each in enumerate(inputs):
        for place, size in enumerate(each.sizes):
            symbols = symbols_in(size)
            if len(symbols) == 1 and symbols[0] not in found and size.is_polynomial(*symbols):
                factors = sympy.Poly(size, *symbols).all_coeffs()
                if len(factors) == 2:
                    found[symbols[0]] = _Source(number, place, *map(int, factors))
    return found


def _function(symbols: Iterable[sympy.Symbol], sizes: list[tuple[Size, ...]]) -> Callable[..., Any]:
    """Gives the values of sizes for those of symbols: replacing symbols in expressions takes milliseconds a call."""
    return sympy.lambdify(list(symbols), sizes, modules=[{"Max": max, "Min": min}, "math"])


def _other_sizes(each: Input, numbers: tuple[int, ...]) -> UserError:
    wanted = f"({', '.join(map(str, each.sizes))}{',' if len(each.sizes) == 1 else ''})"
    what = f"{each.name} has size {tuple(numbers)}, and the program was exported for {wanted}"
    return UserError(what, hint="export it with dynamic_shapes to call it with other sizes")
