"""What the IR's operators mean for `u16`, `u32` and `u64`, of which ATen computes little.

Pointwise operators are Python's, on its integers, and results are taken modulo 2^bits. Reductions and stores go by the
bits, seen as a signed type: sums and products wrap around alike, and flipping the sign bit keeps the order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from pellucid.ir.ops import OPS, REDUCTIONS, Result

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_MEANINGS: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": lambda a, b: a // (b or 1),
    "truncdiv": lambda a, b: a // (b or 1),
    "remainder": lambda a, b: a % (b or 1),
    "fmod": lambda a, b: a % (b or 1),
    "neg": operator.neg,
    "abs": operator.pos,
    "sign": lambda a: int(a > 0),
    "maximum": max,
    "minimum": min,
    "pow": lambda a, b: pow(a, b, 1 << 64),
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "shl": lambda a, b: a << min(b, 64),
    "shr": operator.rshift,
}


def is_unsigned(dtype: torch.dtype) -> bool:
    """True for the types that this file is about."""
    return dtype in _SIGNED


def as_signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that ATen can store into at given places; itself, where it has one."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def evaluate(op: str, args: list[torch.Tensor]) -> torch.Tensor:
    """A pointwise operator but `where` and `cast`, on tensors of one of these types that broadcast together."""
    args = list(torch.broadcast_tensors(*args))
    dtype = torch.bool if OPS[op].result is Result.BOOL else args[0].dtype
    modulus = 1 << (8 * args[0].itemsize)
    points = zip(*(arg.flatten().tolist() for arg in args), strict=True)
    numbers = [_MEANINGS[op](*point) % modulus for point in points]
    return torch.tensor(numbers, dtype=dtype).reshape(args[0].shape)


def reduce(op: str, tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A reduction over `dims`, which are removed."""
    signed = as_signed(tensor)
    if op in ("sum", "prod"):
        return REDUCTIONS[op].evaluate(signed, dims).view(tensor.dtype)
    flip = torch.iinfo(signed.dtype).min
    result = REDUCTIONS[op].evaluate(signed ^ flip, dims)
    return result if op.startswith("arg") else (result ^ flip).view(tensor.dtype)
