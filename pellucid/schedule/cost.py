"""What a kernel moves and computes: the numbers behind cost rules and kernel tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pellucid.ir.index import ZERO, Expr, product, total
from pellucid.ir.nodes import Axis, Compute, Kernel, Line, Load, Param, Reduce, Rhs, Store, axes_of
from pellucid.ir.ops import OPS

SYMBOL_GUESS = 256  # a size symbol, where a rule needs a number

_NOT_ARITHMETIC = frozenset(("where", "cast", "round_bf16", "round_f16"))


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Totals of one kernel.

    loaded, stored: bytes of distinct elements, as if each were moved once.
    flops: arithmetic on floats, one for each operator and each step of a reduction.
    work: estimated instructions, from the `cost` of each operator.
    """

    loaded: Expr
    stored: Expr
    flops: Expr
    work: Expr


def kernel_cost(kernel: Kernel) -> KernelCost:
    """The cost of one call of `kernel`, in terms of the size symbols."""
    params = {param.name: param for param in kernel.params}
    scopes = axes_of(kernel)
    flops, work = ZERO, ZERO
    for line in kernel.body:
        cost = op_cost(line.rhs)
        if cost:
            points = evaluations(_reduced_scope(line.rhs, scopes), kernel.space)
            work = work + points * cost
            flops = flops + points if _is_flop(line) else flops
    loads = [line.rhs for line in kernel.body if isinstance(line.rhs, Load)]
    stores = [line.rhs for line in kernel.body if isinstance(line.rhs, Store)]
    return KernelCost(_bytes(loads, kernel, params), _bytes(stores, kernel, params), flops, work)


def op_cost(rhs: Rhs) -> int:
    """Estimated instructions of one line at one point, memory left aside."""
    match rhs:
        case Compute(op):
            return OPS[op].cost
        case Reduce():
            return 1
        case _:
            return 0


def evaluations(scope: Collection[str], space: Iterable[Axis]) -> Expr:
    """How often a line that depends on the axes `scope` runs, when loops nest in the order of `space`.

    A line that misses an inner axis is lifted out of its loop; one that misses an outer axis runs again and again.
    """
    axes = tuple(space)
    depth = max((number + 1 for number, axis in enumerate(axes) if axis.name in scope), default=0)
    return product(axis.extent for axis in axes[:depth])


def estimate(size: Expr) -> int:
    """`size` as a number; symbols that are not known yet count as a middling size."""
    return size.value if size.value is not None else size.evaluate(lambda _: SYMBOL_GUESS)


def touched_bytes(index: Expr, param: Param, ranges: Mapping[str, Expr]) -> Expr:
    """Bytes of the distinct elements of a buffer that one load or store touches over the whole space."""
    if index.vals():
        return param.numel * param.dtype.itemsize
    elements = product(ranges[name] for name in sorted(index.vars()))
    if elements.value is not None and param.numel.value is not None and elements.value > param.numel.value:
        elements = param.numel
    return elements * param.dtype.itemsize


def _bytes(accesses: Iterable[Load | Store], kernel: Kernel, params: Mapping[str, Param]) -> Expr:
    """Bytes of all accesses; equal ones count once, and no buffer counts for more than it holds."""
    by_buffer: dict[str, set[Expr]] = {}
    for access in accesses:
        by_buffer.setdefault(access.buffer, set()).add(access.index)
    sums: list[Expr] = []
    for buffer, found in by_buffer.items():
        moved = total(touched_bytes(index, params[buffer], kernel.ranges) for index in found)
        whole = params[buffer].numel * params[buffer].dtype.itemsize
        sums.append(whole if len(found) > 1 and estimate(moved) > estimate(whole) else moved)
    return total(sums)


def _reduced_scope(rhs: Rhs, scopes: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The loops in which the work of a line is done; a reduction works in the loops of its argument."""
    match rhs:
        case Compute(_, args):
            return frozenset[str]().union(*(scopes[arg] for arg in args))
        case Reduce(_, arg, axes):
            return scopes[arg] | frozenset(axes)
        case _:
            return frozenset()


def _is_flop(line: Line) -> bool:
    match line.rhs:
        case Compute(op):
            return line.dtype.is_float and op not in _NOT_ARITHMETIC
        case Reduce():
            return line.dtype.is_float
        case _:
            return False
