"""The IR's operators for `u16`, `u32` and `u64`, for which ATen implements few operators.

Pointwise operators are computed with Python integers, and results are taken modulo 2^bits. Reductions and stores work
on the bits as a signed type: sums and products wrap in the same way, and flipping the sign bit preserves the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from pellucid.ir.ops import OPS, REDUCTIONS, Result

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_UNARY: dict[str, Callable[[int], int]] = {
    "neg": lambda a: -a,
    "abs": lambda a: a,
    "sign": lambda a: int(a > 0),
    "bitwise_not": lambda a: ~a,
}

_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // (b or 1),
    "truncdiv": lambda a, b: a // (b or 1),
    "remainder": lambda a, b: a % (b or 1),
    "fmod": lambda a, b: a % (b or 1),
    "maximum": lambda a, b: max(a, b),
    "minimum": lambda a, b: min(a, b),
    "pow": lambda a, b: pow(a, b, 1 << 64),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> b,
}


def is_unsigned(dtype: torch.dtype) -> bool:
    """True for the types that this file handles."""
    return dtype in _SIGNED


def as_signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that ATen's indexed stores support; `tensor` itself where they support its type."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def evaluate(op: str, args: list[torch.Tensor]) -> torch.Tensor:
    """A pointwise operator, except `where` and `cast`, on tensors of one of these types that broadcast together."""
    function: Callable[..., int] = _UNARY[op] if len(args) == 1 else _BINARY[op]
    shape: Any = cast("Any", torch).broadcast_shapes(*(arg.shape for arg in args))
    dtype, modulus = args[0].dtype, 1 << (8 * args[0].itemsize)
    columns: list[list[int]] = [cast("Any", arg.expand(shape).flatten()).tolist() for arg in args]
    numbers = [function(*point) % modulus for point in zip(*columns, strict=True)]
    return torch.tensor(numbers, dtype=torch.bool if OPS[op].result is Result.BOOL else dtype).reshape(shape)


def reduce(op: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A reduction over `dims`, which are removed."""
    signed = as_signed(tensor)
    if op in ("sum", "prod"):
        return REDUCTIONS[op].evaluate(signed, dims).view(tensor.dtype)
    flip = torch.iinfo(signed.dtype).min
    result = REDUCTIONS[op].evaluate(signed ^ flip, dims)
    return result if op.startswith("arg") else (result ^ flip).view(tensor.dtype)
