"""The scalar operators of kernel bodies: one row holds every fact about an operator.

A row's `name` is also the name of the C++ function in `native/kernel/scalar.h` and, for vectors, `vector.h`; its
meaning is `evaluate`, which the interpreter calls. Lowering expands PyTorch operators that this table lacks into
several lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from pellucid.ir.types import DType

Tensor: TypeAlias = torch.Tensor


class Result(Enum):
    """How the type of the result follows from the types of the arguments."""

    SAME = "the common type of all arguments"
    BOOL = "bool; the arguments have one common type"
    SELECT = "the common type of the last two arguments; the first is bool"
    CAST = "whatever the line says"


class Domain(Enum):
    """Which argument types an operator takes."""

    ANY = "every type"
    NUMBER = "integers and floats"
    FLOAT = "floats"
    INTEGRAL = "integers and bool"
    INTEGER = "integers"


@dataclass(frozen=True, slots=True)
class Op:
    """One scalar operator.

    cost: estimated instructions per element; from `EXPENSIVE` on, storing the value beats recomputing it.
    evaluate: its meaning on tensors of equal shape and type; for casts the target type comes first.
    """

    name: str
    arity: int
    result: Result
    domain: Domain
    cost: int
    evaluate: Callable[..., Any]


EXPENSIVE = 8


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


def _truncdiv(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


def _cast(dtype: torch.dtype, a: Tensor) -> Tensor:
    return a.to(dtype)


def _round_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda a: _cast(a.dtype, _cast(dtype, a))


_ROWS = (
    # arithmetic; integers wrap around
    Op("add", 2, Result.SAME, Domain.NUMBER, 1, torch.add),
    Op("sub", 2, Result.SAME, Domain.NUMBER, 1, torch.sub),
    Op("mul", 2, Result.SAME, Domain.NUMBER, 1, torch.mul),
    Op("div", 2, Result.SAME, Domain.FLOAT, 4, torch.div),
    Op("floordiv", 2, Result.SAME, Domain.NUMBER, 6, _floordiv),
    Op("truncdiv", 2, Result.SAME, Domain.NUMBER, 6, _truncdiv),
    Op("remainder", 2, Result.SAME, Domain.NUMBER, 6, torch.remainder),  # sign of the divisor
    Op("fmod", 2, Result.SAME, Domain.NUMBER, 8, torch.fmod),  # sign of the dividend
    Op("neg", 1, Result.SAME, Domain.NUMBER, 1, torch.neg),
    Op("abs", 1, Result.SAME, Domain.NUMBER, 1, torch.abs),
    Op("sign", 1, Result.SAME, Domain.NUMBER, 2, torch.sign),
    Op("maximum", 2, Result.SAME, Domain.ANY, 3, torch.maximum),  # NaN wins
    Op("minimum", 2, Result.SAME, Domain.ANY, 3, torch.minimum),  # NaN wins
    Op("reciprocal", 1, Result.SAME, Domain.FLOAT, 4, torch.reciprocal),
    Op("fma", 3, Result.SAME, Domain.FLOAT, 1, _fma),
    # rounding
    Op("floor", 1, Result.SAME, Domain.FLOAT, 1, torch.floor),
    Op("ceil", 1, Result.SAME, Domain.FLOAT, 1, torch.ceil),
    Op("trunc", 1, Result.SAME, Domain.FLOAT, 1, torch.trunc),
    Op("round", 1, Result.SAME, Domain.FLOAT, 1, torch.round),  # half to even
    Op("round_bf16", 1, Result.SAME, Domain.FLOAT, 3, _round_to(torch.bfloat16)),
    Op("round_f16", 1, Result.SAME, Domain.FLOAT, 2, _round_to(torch.float16)),
    # powers, exponentials, trigonometry and special functions
    Op("sqrt", 1, Result.SAME, Domain.FLOAT, 4, torch.sqrt),
    Op("rsqrt", 1, Result.SAME, Domain.FLOAT, 6, torch.rsqrt),
    Op("pow", 2, Result.SAME, Domain.NUMBER, 40, torch.pow),
    Op("exp", 1, Result.SAME, Domain.FLOAT, 12, torch.exp),
    Op("exp2", 1, Result.SAME, Domain.FLOAT, 12, torch.exp2),
    Op("expm1", 1, Result.SAME, Domain.FLOAT, 20, torch.expm1),
    Op("log", 1, Result.SAME, Domain.FLOAT, 16, torch.log),
    Op("log2", 1, Result.SAME, Domain.FLOAT, 16, torch.log2),
    Op("log10", 1, Result.SAME, Domain.FLOAT, 16, torch.log10),
    Op("log1p", 1, Result.SAME, Domain.FLOAT, 20, torch.log1p),
    Op("sin", 1, Result.SAME, Domain.FLOAT, 20, torch.sin),
    Op("cos", 1, Result.SAME, Domain.FLOAT, 20, torch.cos),
    Op("tan", 1, Result.SAME, Domain.FLOAT, 25, torch.tan),
    Op("asin", 1, Result.SAME, Domain.FLOAT, 20, torch.asin),
    Op("acos", 1, Result.SAME, Domain.FLOAT, 20, torch.acos),
    Op("atan", 1, Result.SAME, Domain.FLOAT, 20, torch.atan),
    Op("atan2", 2, Result.SAME, Domain.FLOAT, 25, torch.atan2),
    Op("sinh", 1, Result.SAME, Domain.FLOAT, 25, torch.sinh),
    Op("cosh", 1, Result.SAME, Domain.FLOAT, 25, torch.cosh),
    Op("tanh", 1, Result.SAME, Domain.FLOAT, 20, torch.tanh),
    Op("asinh", 1, Result.SAME, Domain.FLOAT, 25, torch.asinh),
    Op("acosh", 1, Result.SAME, Domain.FLOAT, 25, torch.acosh),
    Op("atanh", 1, Result.SAME, Domain.FLOAT, 25, torch.atanh),
    Op("sigmoid", 1, Result.SAME, Domain.FLOAT, 16, torch.sigmoid),
    Op("erf", 1, Result.SAME, Domain.FLOAT, 20, torch.erf),
    Op("erfc", 1, Result.SAME, Domain.FLOAT, 25, torch.erfc),
    Op("lgamma", 1, Result.SAME, Domain.FLOAT, 60, torch.lgamma),
    Op("hypot", 2, Result.SAME, Domain.FLOAT, 12, torch.hypot),
    # comparisons and classification
    Op("eq", 2, Result.BOOL, Domain.ANY, 1, torch.eq),
    Op("ne", 2, Result.BOOL, Domain.ANY, 1, torch.ne),
    Op("lt", 2, Result.BOOL, Domain.ANY, 1, torch.lt),
    Op("le", 2, Result.BOOL, Domain.ANY, 1, torch.le),
    Op("gt", 2, Result.BOOL, Domain.ANY, 1, torch.gt),
    Op("ge", 2, Result.BOOL, Domain.ANY, 1, torch.ge),
    Op("isnan", 1, Result.BOOL, Domain.FLOAT, 1, torch.isnan),
    Op("isinf", 1, Result.BOOL, Domain.FLOAT, 1, torch.isinf),
    # bits; on bool these are the logical operators
    Op("bitwise_and", 2, Result.SAME, Domain.INTEGRAL, 1, torch.bitwise_and),
    Op("bitwise_or", 2, Result.SAME, Domain.INTEGRAL, 1, torch.bitwise_or),
    Op("bitwise_xor", 2, Result.SAME, Domain.INTEGRAL, 1, torch.bitwise_xor),
    Op("bitwise_not", 1, Result.SAME, Domain.INTEGRAL, 1, torch.bitwise_not),
    Op("shl", 2, Result.SAME, Domain.INTEGER, 2, torch.bitwise_left_shift),
    Op("shr", 2, Result.SAME, Domain.INTEGER, 2, torch.bitwise_right_shift),  # arithmetic for signed types
    # choice and conversion
    Op("where", 3, Result.SELECT, Domain.ANY, 1, torch.where),
    Op("cast", 1, Result.CAST, Domain.ANY, 1, _cast),  # float to int truncates
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

# The operators that a store may combine its value and memory with: the result does not depend on the order, up to
# rounding.
JOINS = ("add", "mul", "maximum", "minimum")


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction operator over the elements of some axes.

    combine: name of the scalar operator that combines two partial results, or "" for the index-valued ones.
    evaluate: its meaning: (tensor, dims) -> tensor with `dims` removed.
    """

    name: str
    combine: str
    evaluate: Callable[[Tensor, tuple[int, ...]], Tensor]


def _prod(a: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        a = a.prod(dim, dtype=a.dtype)
    return a


def _flat_arg(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    """Index reductions see the reduced axes as one, in space order; the first of equal elements is taken."""

    def evaluate(a: Tensor, dims: tuple[int, ...]) -> Tensor:
        kept = [dim for dim in range(a.dim()) if dim not in dims]
        moved = a.permute(*kept, *sorted(dims))
        return function(moved.flatten(len(kept)), -1)

    return evaluate


# Over an empty axis `sum` is 0, `prod` 1, `any` false, `all` true; lowering never emits the others.
_REDUCTIONS = (
    Reduction("sum", "add", lambda a, dims: a.sum(dims, dtype=a.dtype)),
    Reduction("prod", "mul", _prod),
    Reduction("max", "maximum", lambda a, dims: a.amax(dims)),  # NaN wins
    Reduction("min", "minimum", lambda a, dims: a.amin(dims)),  # NaN wins
    Reduction("any", "bitwise_or", lambda a, dims: a.any(dims)),
    Reduction("all", "bitwise_and", lambda a, dims: a.all(dims)),
    Reduction("argmax", "", _flat_arg(torch.argmax)),  # i64; NaN wins
    Reduction("argmin", "", _flat_arg(torch.argmin)),  # i64; NaN wins
)

REDUCTIONS: dict[str, Reduction] = {row.name: row for row in _REDUCTIONS}


def identity_of(join: str, dtype: DType) -> bool | int | float:
    """The identity element of `join`, the operator of a store or a reduction.

    In kernels the structs of `native/kernel/reductions.h` define it.
    """
    if join in ("maximum", "minimum"):
        lowest = join == "maximum"
        if dtype.is_float:
            return -math.inf if lowest else math.inf
        return dtype.limits[0 if lowest else 1] if dtype is not DType.BOOL else not lowest
    identity = {"add": 0, "bitwise_or": 0, "mul": 1, "bitwise_and": 1}[join]
    return bool(identity) if dtype is DType.BOOL else identity


ROUNDING = {DType.BF16: "round_bf16", DType.F16: "round_f16"}
"""The operators that round to a narrow type, which kernels compute with in f32."""
