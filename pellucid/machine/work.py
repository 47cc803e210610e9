"""What kernels move and compute, as expressions over symbolic sizes, for cost rules.

`ir.traffic` counts it exactly, for the sizes of a call, and defines for both which lines are arithmetic, and where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pellucid.ir.attention import find_attention
from pellucid.ir.contraction import find_contraction
from pellucid.ir.index import ZERO, Atom, Expr, FloorDiv, Mod, Var, product, total
from pellucid.ir.nodes import Axis, Buffer, Compute, Kernel, Load, Param, Reduce, Rhs, Store, axes_of
from pellucid.ir.ops import OPS
from pellucid.ir.prefix import as_run
from pellucid.ir.traffic import flops_of, work_axes
from pellucid.ir.types import DType

SYMBOL_GUESS = 256
"""The assumed value of a size symbol where a rule needs a number."""

Size: TypeAlias = Callable[[Expr], int]
"""Evaluates an expression over sizes: for the sizes of a call, or by an estimate."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Totals of one kernel.

    loaded, stored: bytes of distinct elements, as if each were moved once.
    flops: operations on floats.
    work: estimated instructions, from the `cost` of each operator.
    """

    loaded: Expr
    stored: Expr
    flops: Expr
    work: Expr


def kernel_cost(kernel: Kernel) -> KernelCost:
    """The cost of one call of `kernel`, in terms of the size symbols."""
    kernel = as_run(kernel)
    params = {param.name: param for param in kernel.params}
    scopes = axes_of(kernel)
    flops, work = ZERO, ZERO
    for line in kernel.body:
        scope, cost = work_axes(line, scopes), op_cost(line.rhs)
        if cost:
            work = work + evaluations(scope, kernel.space) * cost
        if flops_of(line):
            flops = flops + product(kernel.ranges[name] for name in sorted(scope)) * flops_of(line)
    loads = [(line.rhs, scopes[line.out]) for line in kernel.body if isinstance(line.rhs, Load)]
    stores = [(line.rhs, scopes[line.out]) for line in kernel.body if isinstance(line.rhs, Store)]
    return KernelCost(_bytes(loads, kernel, params), _bytes(stores, kernel, params), flops, work)


def op_cost(rhs: Rhs) -> int:
    """Estimated instructions of one line at one point, without memory accesses."""
    match rhs:
        case Compute(op):
            return OPS[op].cost
        case Reduce():
            return 1
        case _:
            return 0


def evaluations(scope: Collection[str], space: Iterable[Axis]) -> Expr:
    """How often a line that depends on the axes `scope` runs, when loops nest in the order of `space`.

    A line that does not depend on an inner axis is hoisted out of its loop; one that does not depend on an outer axis
    is repeated.
    """
    axes = tuple(space)
    depth = max((number + 1 for number, axis in enumerate(axes) if axis.name in scope), default=0)
    return product(axis.extent for axis in axes[:depth])


def estimate(size: Expr) -> int:
    """`size` as a number, with `SYMBOL_GUESS` for unknown symbols and 0 for loop counters.

    A symbolic size is at least 1: n // 512 or n - 300 is not 0. A stride may be negative.
    """
    if size.value is not None:
        return size.value
    guess = sum(coefficient * math.prod(map(_guess, monomial)) for monomial, coefficient in size.terms)
    backwards = all(coefficient < 0 for monomial, coefficient in size.terms if monomial)
    return guess if guess > 0 or size.vars() or (guess and backwards) else 1


def _guess(atom: Atom) -> int:
    match atom:
        case Var():
            return 0
        case FloorDiv(num, den):
            return max(estimate(num) // estimate(den), 0 if num.vars() else 1)
        case Mod(num, den):
            return estimate(num) % estimate(den)
        case _:
            return SYMBOL_GUESS


def estimated_bytes(buffer: Buffer | Param) -> int:
    """The size of a buffer, `estimate`d."""
    return estimate(buffer.numel) * buffer.dtype.itemsize


def touched_bytes(index: Expr, param: Param, ranges: Mapping[str, Expr]) -> Expr:
    """Bytes of the distinct elements of a buffer that one load or store touches over the whole space."""
    if index.vals():
        return param.numel * param.dtype.itemsize
    elements = product(ranges[name] for name in sorted(index.vars()))
    if elements.value is not None and param.numel.value is not None and elements.value > param.numel.value:
        elements = param.numel
    return elements * param.dtype.itemsize


def _bytes(
    accesses: Iterable[tuple[Load | Store, frozenset[str]]], kernel: Kernel, params: Mapping[str, Param]
) -> Expr:
    """Bytes of all accesses, each given with the axes that it depends on; equal accesses are counted once.

    The bytes of a buffer are at most its size, and those of an access indexed by values at most its number of points.
    """
    by_buffer: dict[str, dict[Expr, frozenset[str]]] = {}
    for access, scope in accesses:
        by_buffer.setdefault(access.buffer, {})[access.index] = scope
    sums: list[Expr] = []
    for buffer, found in by_buffer.items():
        moved = total(_moved(index, scope, params[buffer], kernel.ranges) for index, scope in found.items())
        whole = params[buffer].numel * params[buffer].dtype.itemsize
        sums.append(whole if len(found) > 1 and estimate(moved) > estimate(whole) else moved)
    return total(sums)


def _moved(index: Expr, scope: frozenset[str], param: Param, ranges: Mapping[str, Expr]) -> Expr:
    whole = touched_bytes(index, param, ranges)
    points = product(ranges[name] for name in sorted(scope)) * param.dtype.itemsize
    return points if index.vals() and estimate(points) < estimate(whole) else whole


# ------------------------------------------------------------------------------------------------- as numbers


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of one buffer that a call moves.

    runs: the contiguous ranges it consists of: one, except for rows selected by values. distance: bytes touched since
    the buffer was touched last, including its own.
    """

    read: int
    written: int
    runs: int
    distance: int


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call of a kernel or of a library.

    read, written: bytes, each element once. working_set: bytes of all that it touches.
    flops: floating point operations. dtype: their type.
    steps: vector instructions of a kernel; 0 if not known, and for a library call.
    kind: `kernel`; for library calls `product`, `convolution`, `attention` or `call`.
    parts: the bytes moved by buffer, if the preceding calls are known; without them all buffers count as just touched.
    """

    read: int
    written: int
    working_set: int
    flops: int
    dtype: DType = DType.F32
    steps: float = 0.0
    kind: str = "kernel"
    parts: tuple[Part, ...] = ()


def kernel_work(kernel: Kernel, steps: float, size: Size = estimate) -> Work:
    """The work of a call of `kernel`, which issues `steps` vector instructions."""
    cost = kernel_cost(kernel)
    read, written, flops = size(cost.loaded), size(cost.stored), size(cost.flops)
    held = sum(size(param.numel) * param.dtype.itemsize for param in kernel.params)
    return Work(read, written, min(held, read + written), flops, computed_in(kernel), steps)


def computed_in(kernel: Kernel) -> DType:
    """The type of a kernel's operations; for products and attention that of the operands, which may be faster."""
    if any(param.dtype is DType.BF16 for param in kernel.params):
        attention = find_attention(kernel)
        found = attention.scores if attention else find_contraction(kernel)
        if found is not None:
            return found.dtype
    floats = [line.dtype for line in kernel.body if line.dtype.is_float and not isinstance(line.rhs, Store)]
    return max(floats, key=lambda dtype: dtype.itemsize, default=DType.F32)
