"""The plans of attention and its gradients: an iteration calls `native/kernel/attend.h`, or `attend_backward.h`."""

from __future__ import annotations

from dataclasses import replace

from pellucid.codegen.plan import Plan, grain_of
from pellucid.codegen.rows import Rows
from pellucid.codegen.sweeps import Sweeps
from pellucid.errors import InternalError
from pellucid.ir.attention import Attention, AttentionBackward, find_attention, mixes_reduction_axes
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, chunks, product
from pellucid.ir.nodes import Kernel
from pellucid.machine import Machine
from pellucid.machine.attention import GRADIENT_ROWS, Heads
from pellucid.machine.work import estimate
from pellucid.options import Options


def plan_attention(kernel: Kernel, machine: Machine, options: Options) -> Plan | None:
    """The plan of a kernel whose space is simplified; None if it is neither attention nor its gradients."""
    found = find_attention(kernel)
    if found is None and mixes_reduction_axes(kernel):
        raise InternalError(f"kernel {kernel.name} reduces over different axes, but is no attention")
    match found:
        case Attention():
            return _forward(kernel, found, machine, options)
        case AttentionBackward():
            return _backward(kernel, found, machine, options)
        case None:
            return None


def _forward(kernel: Kernel, found: Attention, machine: Machine, options: Options) -> Plan:
    """A plan with a block of rows of one head per iteration."""
    ranges, row = kernel.ranges, _row(kernel, found)
    count = ranges[row] if row else ONE
    outer = _outer(kernel, found, row)
    heads = _heads(kernel, found, outer, count)
    height = heads.row_block if row else 1
    part = _rows(kernel, found, row, None, height, heads.key_block)
    extent = product(ranges[name] for name in outer) * (chunks(count, height) if row else ONE)
    why = f"softmax of a product, times values: blocks of {height} rows and {heads.key_block} keys"
    plan = _plan(kernel, part, outer, extent, heads.steps(machine), machine, options, why)
    return replace(plan, inner=row, chunk=height if row else 0)


def _backward(kernel: Kernel, found: AttentionBackward, machine: Machine, options: Options) -> Plan:
    """A plan with all rows of the heads that share keys per iteration, so that no two write to the same gradients."""
    ranges, row = kernel.ranges, _row(kernel, found)
    others = [name for name in found.rows if name != row]
    head = others[0] if others else None
    if row is None or len(others) > 1:
        raise InternalError(f"kernel {kernel.name} has queries along {len(found.rows)} axes")
    outer = _outer(kernel, found, row, head)
    count = ranges[row] * (ranges[head] if head else ONE)
    heads = _heads(kernel, found, outer, count)
    part = _rows(kernel, found, row, head, GRADIENT_ROWS, heads.gradient_keys)
    why = f"gradients of an attention: blocks of {GRADIENT_ROWS} rows and {part.block} keys"
    extent = product(ranges[name] for name in outer)
    return _plan(kernel, part, outer, extent, heads.gradient_steps(machine), machine, options, why)


def _row(kernel: Kernel, found: Attention | AttentionBackward) -> str | None:
    """The axis of rows: the one on which the limit of visible keys depends, else the longest query axis."""
    limit, ranges = found.scores.limit, kernel.ranges
    limited = [] if limit is None else [name for name in found.rows if name in limit.vars()]
    return (limited or sorted(found.rows, key=lambda name: -estimate(ranges[name])) or [None])[0]


def _outer(kernel: Kernel, found: Attention | AttentionBackward, *inside: str | None) -> tuple[str, ...]:
    """The axes of heads and batches, all except those `inside` an iteration."""
    inside = (*inside, found.column, found.scores.term, found.scores.key)
    return tuple(axis.name for axis in kernel.space if axis.name not in inside)


def _heads(kernel: Kernel, found: Attention | AttentionBackward, outer: tuple[str, ...], rows: Expr) -> Heads:
    """The sizes of the attention, for the cost model."""
    ranges, scores = kernel.ranges, found.scores
    count = estimate(product(ranges[name] for name in outer))
    keys, size = (estimate(ranges[name]) for name in (scores.key, found.column))
    causal = scores.limit is not None and bool(scores.limit.vars())
    return Heads(count, estimate(rows), keys, size, causal, scores.dtype)


def _rows(
    kernel: Kernel, found: Attention | AttentionBackward, row: str | None, head: str | None, height: int, block: int
) -> Rows:
    limit, position = found.scores.limit, found.scores.position
    size, keys = estimate(kernel.ranges[found.column]), kernel.ranges[found.scores.key]
    part = Rows(found, row, height, size, block, keys, None, False, head)
    if limit is None or position is None:
        return part
    return replace(part, visible=part.first(limit) - part.first(position) + 1, triangular=row in limit.vars())


def _plan(
    kernel: Kernel,
    rows: Rows,
    outer: tuple[str, ...],
    extent: Expr,
    steps: float,
    machine: Machine,
    options: Options,
    why: str,
) -> Plan:
    """The plan of a kernel whose iterations are one call each."""
    grain, parallel = grain_of(kernel, extent, steps, machine, options)
    facts = (("rows", rows.height), ("keys", rows.block))
    return Plan(
        kernel=kernel,
        outer=outer,
        inner=None,
        chunk=0,
        colliding=(),
        reduced=(),
        vector=rows.attention.column,
        width=machine.lanes,
        wide=frozenset(),
        gathered=frozenset(),
        tile=None,
        tiled=frozenset(),
        sweeps=Sweeps({}, (), ()),
        pairwise=frozenset(),
        abreast=0,
        streamed=frozenset(),
        extent=extent,
        grain=grain,
        decisions=(Decision("codegen.attention", (kernel.name,), True, why, facts), parallel),
        steps=steps,
        rows=rows,
        called=kernel.body,
    )
