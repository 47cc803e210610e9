"""Prefix sums: sums over all earlier points of an axis, recognised in the lines of a kernel.

    axes i: N, c: C, k: N
    m = le (index k), (index i)
    w = where m, v, 0.0            v: of k and c
    s = sum w over k

As written, these are N terms for each of N points. One loop over `i` with a running sum adds N terms in all:
`Prefix.kernel` is the body of that loop, in which `s` is the term, which code generation replaces by the running sum.
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
    memoized,
    operands,
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """axis: the axis of the running sum. total: the sum, over that axis. kernel: the loop, see above."""

    axis: str
    total: Line
    kernel: Kernel


@memoized
def find_prefix(kernel: Kernel) -> Prefix | None:
    """The prefix sum that a kernel computes, or None."""
    reductions = [line for line in kernel.body if isinstance(line.rhs, Reduce)]
    if len(reductions) != 1 or len(kernel.reduced) != 1:
        return None
    (total,), (earlier,) = reductions, kernel.reduced
    assert isinstance(total.rhs, Reduce)
    lines = {line.out: line for line in kernel.body}
    limited = _limited(lines, total.rhs.arg, earlier)
    if total.rhs.op != "sum" or limited is None:
        return None
    axis, term = limited
    scopes = axes_of(kernel)
    independent = all(axis not in scopes[name] for name in _needed(lines, term))
    stored = [store.index.vars() for _, store in kernel.stores()]
    if (
        kernel.ranges[axis] != kernel.ranges[earlier]
        or not independent
        or any(axis not in axes or earlier in axes for axes in stored)
    ):
        return None
    if any(load.buffer in writes(kernel) for _, load in kernel.loads()):
        return None
    term_line = replace(total, rhs=Compute("cast", (term,)))
    space = tuple(each for each in kernel.space if each.name != earlier)
    moved = [_moved(term_line if line is total else line, earlier, axis) for line in kernel.body]
    used = _needed({line.out: line for line in moved}, *(line.out for line in moved if isinstance(line.rhs, Store)))
    body = tuple(line for line in moved if line.out in used)
    return Prefix(axis, replace(total, rhs=Reduce("sum", term, (axis,))), replace(kernel, space=space, body=body))


def as_run(kernel: Kernel) -> Kernel:
    """The kernel whose points are executed: the loop of a prefix sum, or the kernel itself."""
    prefix = find_prefix(kernel)
    return kernel if prefix is None else prefix.kernel


def _limited(lines: Mapping[str, Line], arg: str, earlier: str) -> tuple[str, str] | None:
    """The axis whose counter limits the terms, and the term; None unless the argument of the sum has that form."""
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
    """These lines and all lines that they depend on."""
    found, pending = set[str](), list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += operands(lines[name].rhs)
    return found


def _moved(line: Line, earlier: str, axis: str) -> Line:
    """A line at the current point of the axis in place of an earlier one."""
    match line.rhs:
        case IndexValue(index) | Load(_, index):
            return replace(line, rhs=replace(line.rhs, index=index.substitute({Var(earlier): var(axis)})))
        case _:
            return line
