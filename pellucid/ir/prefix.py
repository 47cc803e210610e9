"""Prefix sums: sums over all earlier points of an axis, recognised in the lines of a kernel.

    axes i: N, c: C, k: N
    m = le (index k), (index i)
    w = where m, v, 0.0            v: of k and c
    s = sum w over k

As they stand these are N terms for each of N points. One loop over `i` that adds the term of each point to what it has
takes N in all: `Prefix.kernel` is what that loop computes, in which `s` is the term until the loop makes it the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pellucid.ir.analysis import writes
from pellucid.ir.index import Var, var
from pellucid.ir.nodes import (
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Reduce,
    Store,
    axes_of,
    operands,
    remembered,
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """axis: along which sums grow. total: the sum, over that axis. kernel: the loop, see above."""

    axis: str
    total: Line
    kernel: Kernel


@remembered
def find_prefix(kernel: Kernel) -> Prefix | None:
    """The prefix sum that a kernel is, or None."""
    reductions = [line for line in kernel.body if isinstance(line.rhs, Reduce)]
    if len(reductions) != 1 or len(kernel.reduced) != 1:
        return None
    (total,), (earlier,) = reductions, kernel.reduced
    assert isinstance(total.rhs, Reduce)
    lines = {line.out: line for line in kernel.body}
    chosen = _chosen(lines, total.rhs.arg, earlier)
    if total.rhs.op != "sum" or chosen is None:
        return None
    axis, term = chosen
    scopes = axes_of(kernel)
    alone = all(axis not in scopes[name] for name in _needed(lines, term))
    stored = [store.index.vars() for _, store in kernel.stores()]
    if (
        kernel.ranges[axis] != kernel.ranges[earlier]
        or not alone
        or any(axis not in axes or earlier in axes for axes in stored)
    ):
        return None
    if any(load.buffer in writes(kernel) for _, load in kernel.loads()):
        return None
    made = replace(total, rhs=Compute("cast", (term,)))
    space = tuple(each for each in kernel.space if each.name != earlier)
    moved = [_moved(made if line is total else line, earlier, axis) for line in kernel.body]
    used = _needed({line.out: line for line in moved}, *(line.out for line in moved if isinstance(line.rhs, Store)))
    body = tuple(line for line in moved if line.out in used)
    return Prefix(axis, replace(total, rhs=Reduce("sum", term, (axis,))), replace(kernel, space=space, body=body))


def as_run(kernel: Kernel) -> Kernel:
    """What a kernel computes as it runs: a prefix sum its loop, any other itself."""
    prefix = find_prefix(kernel)
    return kernel if prefix is None else prefix.kernel


def _chosen(lines: Mapping[str, Line], arg: str, earlier: str) -> tuple[str, str] | None:
    """The axis up to which terms count, and the term; None if what is summed is nothing of that kind."""
    match lines[arg].rhs:
        case Compute("where", (mask, term, zero)):
            pass
        case _:
            return None
    match lines[mask].rhs, lines[zero].rhs:
        case Compute("le", (low, high)), Const(0 | 0.0):
            pass
        case Compute("ge", (high, low)), Const(0 | 0.0):
            pass
        case _:
            return None
    match lines[low].rhs, lines[high].rhs:
        case IndexValue(position), IndexValue(limit) if position == var(earlier) and len(limit.vars()) == 1:
            (axis,) = limit.vars()
            return (axis, term) if limit == var(axis) else None
        case _:
            return None


def _needed(lines: Mapping[str, Line], *names: str) -> set[str]:
    """The lines that these are made of, themselves among them."""
    found, pending = set[str](), list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += operands(lines[name].rhs)
    return found


def _moved(line: Line, earlier: str, axis: str) -> Line:
    """A line at the point where the axis is, in place of an earlier one."""
    match line.rhs:
        case IndexValue(index) | Load(_, index):
            return replace(line, rhs=replace(line.rhs, index=index.substitute({Var(earlier): var(axis)})))
        case _:
            return line
