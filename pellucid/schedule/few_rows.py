"""Products of few rows with computed weights: all rows are summed in one loop over the weights.

A contraction reads its operands from memory, at most casting them, so computed weights would be written as floats and
read again. With few rows that takes most of the time:

    before: `for i0 < 4, i1 < 512, i2 < 256: sum x[256*i0 + i2] * w[256*i1 + i2]`     w = float of q
    after:  `for i1 < 512, i2 < 256: sum x[i2] * w[256*i1 + i2], sum x[i2 + 256] * w[256*i1 + i2], ...`

which is no longer a contraction: the kernel that computes w is fused with it, and only q is read.
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

MAX_ROWS = 4
"""Maximum rows: registers hold one sum per row in addition to the operands."""

MIN_RATIO = 1.5
"""Minimum ratio of the bytes of computed weights to the bytes that they are computed from."""


def sum_rows_together(program: Program) -> tuple[Program, list[Decision]]:
    """`program`, one kernel for each operator, with products of few rows and computed weights unrolled over rows."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    producers: dict[str, Node] = {}
    nodes: list[Node] = []
    decisions: list[Decision] = []
    for node in program.nodes:
        found = _of_few_rows(node) if isinstance(node, Kernel) else None
        if isinstance(node, Kernel) and found is not None and found.loads[1].buffer in producers:
            decision = _decided(node, found, producers, buffers)
            decisions.append(decision)
            node = _without_rows(node, found.rows) if decision.ok else node
        nodes.append(node)
        producers.update(dict.fromkeys(writes(node), node))
    return replace(program, nodes=tuple(nodes)), decisions


def _of_few_rows(kernel: Kernel) -> Contraction | None:
    """The product with few rows, or columns, that a kernel computes, with these as its rows; None for others."""
    found = find_contraction(kernel)
    if found is None or found.windowed or found.batch or found.choice or found.cast:
        return None
    for each in (found, found.swapped()):
        if 1 < prod(kernel.ranges[name].value or MAX_ROWS + 1 for name in each.rows) <= MAX_ROWS:
            return each
    return None


def _decided(
    kernel: Kernel, found: Contraction, producers: Mapping[str, Node], buffers: Mapping[str, Buffer]
) -> Decision:
    """Whether to compute the weights in the loop of their product."""
    name = found.loads[1].buffer
    producer, (terms,) = producers[name], found.inner
    if (
        isinstance(producer, Kernel)
        and is_cast(producer)
        and all(load.index.coefficient(terms) == ONE for load in found.loads)
    ):
        why = f"{name} is only cast: dot products of rows cast it as they read it"
        return Decision("schedule.few_rows", (kernel.name,), False, why)
    sources, whole = _source_bytes(name, producers, buffers), estimated_bytes(buffers[name])
    ok = MIN_RATIO * sources <= whole
    then = "all rows are summed in one loop, without storing it" if ok else "it is stored and read"
    return Decision(
        "schedule.few_rows", (kernel.name,), ok, f"{name} has {whole} bytes and is computed from {sources}: {then}"
    )


def _source_bytes(name: str, producers: Mapping[str, Node], buffers: Mapping[str, Buffer]) -> int:
    """Bytes of the buffers from which pointwise kernels compute a buffer."""
    read: set[str] = set()
    pending = [name]
    while pending:
        name = pending.pop()
        producer = producers.get(name)
        if not isinstance(producer, Kernel) or any(isinstance(line.rhs, Reduce) for line in producer.body):
            read.add(name)
        else:
            pending += {load.buffer for _, load in producer.loads()} - {name}
    return sum(estimated_bytes(buffers[each]) for each in read)


def _without_rows(kernel: Kernel, rows: tuple[str, ...]) -> Kernel:
    """The kernel with lines that depend on rows repeated for each row."""
    scopes = axes_of(kernel)
    per_row = [line.out for line in kernel.body if not scopes[line.out].isdisjoint(rows)]
    points = list(product(*(range(kernel.ranges[name].value or 0) for name in rows)))
    taken = {line.out for line in kernel.body}
    names = [{name: unique_name(f"{name}_row{number}", taken) for name in per_row} for number in range(len(points))]

    def lines() -> Iterator[Line]:
        for line in kernel.body:
            if line.out not in per_row:
                yield line
                continue
            for renamed, point in zip(names, points, strict=True):
                at: dict[str, Expr] = {name: const(value) for name, value in zip(rows, point, strict=True)}
                yield Rewrite(renamed, at, {}, kernel.ranges).line(line)

    space = [axis for axis in kernel.space if axis.name not in rows]
    return make_kernel(kernel.name, space, lines(), {param.name: param for param in kernel.params})
