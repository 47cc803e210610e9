"""The plan of an attention: `native/kernel/attend.h` computes some rows of one head in one parallel iteration."""

from __future__ import annotations

from pellucid.codegen.plan import Plan, chunks, grain_of
from pellucid.codegen.rows import Rows, first_of
from pellucid.codegen.sweeps import Sweeps
from pellucid.errors import InternalError
from pellucid.ir.attention import find_attention, reduces_in_turn
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, product
from pellucid.ir.nodes import Kernel
from pellucid.machine import Machine
from pellucid.machine.attention import Heads
from pellucid.machine.work import estimate
from pellucid.options import Options


def plan_attention(kernel: Kernel, machine: Machine, options: Options) -> Plan | None:
    """The plan of a kernel whose space is simplified; None if it is no attention."""
    found = find_attention(kernel)
    if found is None and reduces_in_turn(kernel):
        raise InternalError(f"kernel {kernel.name} reduces over different axes, but is no attention")
    if found is None:
        return None
    ranges = kernel.ranges
    limited = () if found.limit is None else tuple(name for name in found.rows if name in found.limit.vars())
    row = (limited or tuple(sorted(found.rows, key=lambda name: -estimate(ranges[name]))) or (None,))[0]
    outer = tuple(axis.name for axis in kernel.space if axis.name not in (row, found.column, found.term, found.key))
    count, rows = estimate(product(ranges[name] for name in outer)), ranges[row] if row else ONE
    keys, size = (estimate(ranges[name]) for name in (found.key, found.column))
    heads = Heads(count, estimate(rows), keys, size, bool(limited), found.dtype)
    seen = None
    if found.limit is not None and found.position is not None:
        seen = first_of(found.limit, found, row) - first_of(found.position, found, row) + 1
    height = heads.row_block if row else 1
    part = Rows(found, row, height, heads.size, heads.key_block, ranges[found.key], seen, bool(limited))
    extent = product(ranges[name] for name in outer) * (chunks(rows, height) if row else ONE)
    steps = heads.steps(machine)
    grain, parallel = grain_of(kernel, extent, steps, machine, options)
    why = f"softmax of a product, times values: {height} rows of a head at a time, with {heads.key_block} keys in cache"
    facts = (("rows", height), ("keys", heads.key_block))
    return Plan(
        kernel=kernel,
        outer=outer,
        inner=row,
        chunk=height if row else 0,
        colliding=(),
        reduced=(),
        vector=found.column,
        width=machine.lanes,
        wide=frozenset(),
        tile=None,
        tiled=frozenset(),
        sweeps=Sweeps({}, (), ()),
        pairwise=frozenset(),
        streamed=frozenset(),
        extent=extent,
        grain=grain,
        decisions=(Decision("codegen.attention", (kernel.name,), True, why, facts), parallel),
        steps=steps,
        rows=part,
    )
