"""Products of few rows whose weights are computed: the rows are summed side by side, in one loop over the weights.

A contraction reads its operands as they lie in memory, or casts them at most, so weights that are computed would be
written as floats and read again. With so few rows that takes longer than all else:

    before: `for i0 < 4, i1 < 512, i2 < 256: sum x[256*i0 + i2] * w[256*i1 + i2]`     w = float of q
    after:  `for i1 < 512, i2 < 256: sum x[i2] * w[256*i1 + i2], sum x[i2 + 256] * w[256*i1 + i2], ...`

which is no contraction any more: what computes w is fused with it, and reads q alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from pellucid.ir.analysis import writes
from pellucid.ir.contraction import Contraction, find_contraction, is_cast
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, const
from pellucid.ir.nodes import Buffer, Kernel, Line, Node, Program, Reduce, axes_of
from pellucid.machine.work import estimated_bytes
from pellucid.schedule.rewrite import Rewrite, make_kernel, unique_name

MOST_ROWS = 4
"""Sums that registers hold beside what they are made of."""

LESS = 1.5
"""How many times as many bytes as they are made of computed weights must have."""


def sum_rows_together(program: Program) -> tuple[Program, list[Decision]]:
    """`program`, one kernel for each operator: products of few rows with computed weights have no axis of rows."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    makers: dict[str, Node] = {}
    nodes: list[Node] = []
    decisions: list[Decision] = []
    for node in program.nodes:
        found = _of_few_rows(node) if isinstance(node, Kernel) else None
        if isinstance(node, Kernel) and found is not None and found.loads[1].buffer in makers:
            decision = _decided(node, found, makers, buffers)
            decisions.append(decision)
            node = _without_rows(node, found.rows) if decision.ok else node
        nodes.append(node)
        makers.update(dict.fromkeys(writes(node), node))
    return replace(program, nodes=tuple(nodes)), decisions


def _of_few_rows(kernel: Kernel) -> Contraction | None:
    """The product of a few rows, or columns, that a kernel is, with these as its rows."""
    found = find_contraction(kernel)
    if found is None or found.windowed or found.batch or found.choice or found.cast:
        return None
    for each in (found, found.swapped()):
        if 1 < prod(kernel.ranges[name].value or MOST_ROWS + 1 for name in each.rows) <= MOST_ROWS:
            return each
    return None


def _decided(kernel: Kernel, found: Contraction, makers: Mapping[str, Node], buffers: Mapping[str, Buffer]) -> Decision:
    """Whether weights are computed in the loop of their product."""
    name = found.loads[1].buffer
    maker, (terms,) = makers[name], found.inner
    if (
        isinstance(maker, Kernel)
        and is_cast(maker)
        and all(load.index.coefficient(terms) == ONE for load in found.loads)
    ):
        why = f"{name} is cast: dot products of rows do that as they read it"
        return Decision("schedule.few_rows", (kernel.name,), False, why)
    made_of, whole = _bytes_of(name, makers, buffers), estimated_bytes(buffers[name])
    ok = LESS * made_of <= whole
    then = "rows are summed side by side, so that it need not be in memory" if ok else "it is read as it lies"
    return Decision(
        "schedule.few_rows", (kernel.name,), ok, f"{name} has {whole} bytes and is made of {made_of}: {then}"
    )


def _bytes_of(name: str, makers: Mapping[str, Node], buffers: Mapping[str, Buffer]) -> int:
    """Bytes of what the kernels that make a buffer, point by point, read in the end."""
    read: set[str] = set()
    pending = [name]
    while pending:
        name = pending.pop()
        maker = makers.get(name)
        if not isinstance(maker, Kernel) or any(isinstance(line.rhs, Reduce) for line in maker.body):
            read.add(name)
        else:
            pending += {load.buffer for _, load in maker.loads()} - {name}
    return sum(estimated_bytes(buffers[each]) for each in read)


def _without_rows(kernel: Kernel, rows: tuple[str, ...]) -> Kernel:
    """What depends on rows stands there once for each."""
    scopes = axes_of(kernel)
    apart = [line.out for line in kernel.body if not scopes[line.out].isdisjoint(rows)]
    points = list(product(*(range(kernel.ranges[name].value or 0) for name in rows)))
    taken = {line.out for line in kernel.body}
    names = [{name: unique_name(f"{name}_row{number}", taken) for name in apart} for number in range(len(points))]

    def lines() -> Iterator[Line]:
        for line in kernel.body:
            if line.out not in apart:
                yield line
                continue
            for renamed, point in zip(names, points, strict=True):
                at: dict[str, Expr] = {name: const(value) for name, value in zip(rows, point, strict=True)}
                yield Rewrite(renamed, at, {}, kernel.ranges).line(line)

    space = [axis for axis in kernel.space if axis.name not in rows]
    return make_kernel(kernel.name, space, lines(), {param.name: param for param in kernel.params})
