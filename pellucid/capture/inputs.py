"""The inputs of an exported program, and the values of its symbols in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from pellucid.errors import UserError

Size: TypeAlias = Any
"""An integer as a SymPy expression; SymPy's own type hints are too imprecise."""


_UNWRAP = "give the program a plain tensor, or use torch.compile"


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor input. Strides, in elements, have the example's dimension order, but no gaps or overlaps."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """The sizes of an argument. Raises UserError if it is no such tensor."""
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{self.name} is a {type(value).__name__}, and the program takes a tensor")
        if is_tensor_subclass(value):
            raise UserError(f"{self.name} is a {type(value).__name__}, which wraps other tensors", hint=_UNWRAP)
        found, wanted = (value.dtype, value.device.type, value.layout), (self.dtype, "cpu", torch.strided)
        differ = [(str(one), str(other)) for one, other in zip(found, wanted, strict=True) if one != other]
        if differ:
            what, asked = (", ".join(each) for each in zip(*differ, strict=True))
            hint = "convert it first, or export the program with such an example"
            raise UserError(f"{self.name} is {what}, and the program was exported for {asked}", hint=hint)
        return value.shape


@dataclass(frozen=True, slots=True)
class SizeInput:
    """An integer input, in `sizes`."""

    name: str
    sizes: tuple[Size]

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """The argument. Raises UserError if it is no integer."""
        if type(value) is not int:
            raise UserError(f"{self.name} is a {type(value).__name__}, and the program takes an integer")
        return (value,)


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """An argument that must have the value that the program was exported with."""

    name: str
    value: object
    sizes: tuple[Size, ...] = ()

    def sizes_of(self, value: object) -> tuple[int, ...]:
        """No sizes. Raises UserError for any other value."""
        if type(value) is not type(self.value) or (value != self.value and value == value):
            what = f"{self.name} is {value!r}, and the program was exported for {self.value!r} alone"
            raise UserError(what, hint="export it once more, with this value")
        return ()


Input: TypeAlias = "TensorInput | SizeInput | ConstantInput"


def is_tensor_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that overrides operators: it need not have memory."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def symbols_of(inputs: Sequence[Input]) -> tuple[sympy.Symbol, ...]:
    """The symbols in the sizes of inputs."""
    return tuple(dict.fromkeys(symbol for each in inputs for size in each.sizes for symbol in symbols_in(size)))


def symbols_in(size: Size) -> list[sympy.Symbol]:
    """The symbols of a size, in the order of their names."""
    return sorted(size.free_symbols, key=str)


class Inputs:
    """All inputs of an exported program, in order. ranges: the minimum and the maximum value of each symbol."""

    def __init__(self, inputs: Sequence[Input], ranges: Mapping[sympy.Symbol, tuple[int, int]]) -> None:
        self.each = tuple(inputs)
        self._ranges = dict(ranges)
        self._sources = _sources(self.each)
        self._sizes = _function(ranges, [each.sizes for each in self.each])
        strides = [each.strides if isinstance(each, TensorInput) else () for each in self.each]
        self._strides = _function(ranges, strides)

    def values(self, given: Sequence[object]) -> dict[sympy.Symbol, int]:
        """The values of the symbols for these arguments. Raises UserError if they do not match the program."""
        given_sizes = [each.sizes_of(value) for each, value in zip(self.each, given, strict=True)]
        for each, sizes in zip(self.each, given_sizes, strict=True):
            if len(sizes) != len(each.sizes):
                raise _other_sizes(each, sizes)
        values: dict[sympy.Symbol, int] = {}
        for symbol in self._ranges:
            if symbol not in self._sources:
                raise UserError(f"no argument determines the size {symbol}, which other sizes depend on")
            source = self._sources[symbol]
            values[symbol], rest = divmod(given_sizes[source.number][source.dim] - source.shift, source.factor)
            if rest:
                raise _other_sizes(self.each[source.number], given_sizes[source.number])
        for each, sizes, wanted in zip(self.each, given_sizes, self._sizes(*values.values()), strict=True):
            if sizes != wanted:
                raise _other_sizes(each, sizes)
        for symbol, (minimum, maximum) in self._ranges.items():
            if not minimum <= values[symbol] <= maximum:
                what = f"the size {symbol} is {values[symbol]}, and the program was exported for {minimum} to {maximum}"
                raise UserError(what)
        return values

    def strides(self, values: Mapping[sympy.Symbol, int]) -> tuple[tuple[int, ...], ...]:
        """The strides of each tensor, and none for other inputs."""
        return self._strides(*(values[symbol] for symbol in self._ranges))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where to read a symbol: size `dim` of the input `number` is `factor` times the symbol, plus `shift`."""

    number: int
    dim: int
    factor: int
    shift: int


def _sources(inputs: Sequence[Input]) -> dict[sympy.Symbol, _Source]:
    """For each symbol the first size that is linear in it and has no other symbols."""
    found: dict[sympy.Symbol, _Source] = {}
    for number, each in enumerate(inputs):
        for dim, size in enumerate(each.sizes):
            symbols = symbols_in(size)
            if len(symbols) == 1 and symbols[0] not in found and size.is_polynomial(*symbols):
                factors = sympy.Poly(size, *symbols).all_coeffs()
                if len(factors) == 2:
                    found[symbols[0]] = _Source(number, dim, *map(int, factors))
    return found


def _function(symbols: Iterable[sympy.Symbol], sizes: list[tuple[Size, ...]]) -> Callable[..., Any]:
    """A function from values of symbols to sizes: substituting symbols in expressions takes milliseconds a call."""
    return sympy.lambdify(list(symbols), sizes, modules=[{"Max": max, "Min": min}, "math"])


def _other_sizes(each: Input, numbers: tuple[int, ...]) -> UserError:
    wanted = f"({', '.join(map(str, each.sizes))}{',' if len(each.sizes) == 1 else ''})"
    what = f"{each.name} has size {tuple(numbers)}, and the program was exported for {wanted}"
    return UserError(what, hint="export it with dynamic_shapes to call it with other sizes")
