"""The plan of a contraction: `native/kernel/contract.h` computes blocks of its sums, an epilogue runs over each block.

Each parallel iteration computes a block of rows and columns. A call writes that block of the sums to a local buffer;
then the epilogue, the other lines of the kernel, runs over the block like any kernel, with a load from the buffer in
place of the sum. Sums that are only stored are written directly to their destination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from pellucid.codegen.blocks import Blocks
from pellucid.codegen.find_blocks import close_blocks, direct_store, find_blocks, orient_vectors
from pellucid.codegen.groups import join_groups
from pellucid.codegen.nest import BLOCK
from pellucid.codegen.plan import Plan, grain_of
from pellucid.codegen.roles import Roles
from pellucid.codegen.sweeps import plan_sweeps
from pellucid.codegen.variants import CLOSE
from pellucid.codegen.vector import base_lanes, choose, cost, gathered
from pellucid.codegen.winograd import with_winograd
from pellucid.ir.contraction import Contraction
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr, chunks, product, var
from pellucid.ir.nodes import CheckIndex, Const, Kernel, Line, Load, Store, axes_of, operands
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.library import MIN_REUSE
from pellucid.machine.work import estimate
from pellucid.options import Options

MAX_LOOPED = 8
"""Maximum number of results per pixel for which loops over the pixels are considered."""


def plan_contraction(kernel: Kernel, machine: Machine, options: Options, roles: Roles) -> Iterator[Plan]:
    """The plan of a kernel whose space is simplified; none if it is no contraction that this file supports.

    It is followed by plans with other block sizes of about the same estimated cost.
    """
    joined = join_groups(kernel, machine)
    found = find_blocks(joined.of_first, options, machine, roles, joined.groups)
    if found is None:
        return
    blocks, decisions = found
    whole, blocks, tiles = with_winograd(blocks, joined.kernel, machine)
    blocks = orient_vectors(whole, blocks, machine)
    for each in chain((blocks,), close_blocks(blocks, CLOSE)):
        yield _planned(whole, each, (*decisions, *tiles), machine, options, roles.unread)


def compared_with_loops(kernel: Kernel, plan: Plan, machine: Machine) -> tuple[Decision, ...]:
    """Whether `plan` is faster than loops, for contractions where it may not be: f32 convolutions with few results per
    pixel, whose blocks have mostly empty columns, and small matrices with the batch as the innermost axis."""
    blocks = plan.blocks
    assert blocks is not None
    contraction, ranges = blocks.contraction, kernel.ranges
    if not (contraction.windowed or blocks.by_channel) and _batch_is_innermost(contraction, ranges, machine):
        rows, columns = (
            estimate(product(ranges[name] for name in axes)) for axes in (contraction.rows, contraction.columns)
        )
        ok = rows * columns > MIN_REUSE * (rows + columns)
        why = "contiguous vectors along the batch take less time than blocks, which load elements one by one"
        if ok:
            why = f"with {rows} rows and {columns} columns, blocks reuse the elements that they load one by one enough"
        return (Decision("codegen.blocks", (kernel.name,), ok, why),)
    columns = estimate(product(ranges[name] for name in contraction.columns))
    one_image = contraction.windowed and not contraction.batch and contraction.dtype is DType.F32
    if not one_image or columns > MAX_LOOPED:
        return ()
    terms = estimate(product(ranges[name] for name in (*contraction.rows, *contraction.inner)))
    gathered_and_multiplied = terms * (1 + blocks.columns / machine.lanes)
    total = contraction.total
    summed = replace(total, rhs=Const(0.0))
    rest = replace(plan.kernel, body=tuple(summed if line.out == total.out else line for line in plan.kernel.body))
    by_blocks = gathered_and_multiplied + cost(rest, plan.vector, machine.lanes)
    by_loops = choose(kernel, machine, enabled=True).price
    facts = (("instructions", round(by_blocks)), ("by_loops", round(by_loops)))
    ok = by_blocks <= by_loops
    why = f"blocks of {columns} columns take {'fewer' if ok else 'more'} instructions than loops over the pixels"
    return (Decision("codegen.blocks", (kernel.name,), ok, why, facts),)


def _batch_is_innermost(contraction: Contraction, ranges: Mapping[str, Expr], machine: Machine) -> bool:
    """Whether adjacent elements of both operands belong to different matrices of a batch."""
    indices = [load.index for load in contraction.loads]
    return any(
        all(index.coefficient(axis) == ONE for index in indices) and estimate(ranges[axis]) >= machine.lanes
        for axis in contraction.batch
    )


def _planned(
    kernel: Kernel,
    blocks: Blocks,
    decisions: tuple[Decision, ...],
    machine: Machine,
    options: Options,
    unread: frozenset[str],
) -> Plan:
    rest = epilogue(kernel, blocks)
    blocks = replace(blocks, stored=direct_store(blocks, rest, machine))
    ranges = kernel.ranges
    inside = (blocks.row, *blocks.whole, blocks.column)
    outer = tuple(axis.name for axis in rest.space if axis.name not in inside)
    pieces = product(chunks(ranges[name], size) for name, size in blocks.pieces.values())
    extent = product(ranges[name] for name in outer) * pieces
    at_once = 1 if blocks.by_channel else machine.isa.products(blocks.contraction.dtype)
    steps = blocks.share * estimate(product(ranges.values())) / (machine.lanes * at_once)
    grain, parallel = grain_of(kernel, extent, steps, machine, options)
    lines = (blocks.row, *blocks.whole)
    first, *others, along = (*lines[:-1], blocks.column, lines[-1]) if blocks.along_rows else (*lines, blocks.column)
    wide = frozenset(name for name, axes in axes_of(rest).items() if along in axes)
    streamed, streams = _streamed(rest, wide, unread, machine)
    return Plan(
        kernel=rest,
        outer=outer,
        inner=first,
        chunk=blocks.rows,
        whole=tuple(others),
        colliding=(),
        reduced=(),
        vector=along,
        width=base_lanes(rest, machine),
        wide=wide,
        gathered=gathered(rest, along, wide),
        tile=along,
        tiled=frozenset(),
        sweeps=plan_sweeps(rest, 1),
        pairwise=frozenset(),
        abreast=0,
        streamed=streamed,
        extent=extent,
        grain=grain,
        decisions=(*decisions, parallel, *streams),
        steps=steps,
        blocks=blocks,
        called=_called(kernel, blocks),
    )


def _streamed(
    kernel: Kernel, wide: frozenset[str], unread: frozenset[str], machine: Machine
) -> tuple[frozenset[str], tuple[Decision, ...]]:
    """Results to write past the caches: those that no other kernel reads and that exceed the L2 cache."""
    stored = {store.buffer for line, store in kernel.stores() if line.out in wide and not store.join}
    loaded = {load.buffer for _, load in kernel.loads()}
    sizes = {param.name: (param.numel.value or 0) * param.dtype.itemsize for param in kernel.params}
    chosen = frozenset(name for name in stored & unread - loaded if sizes[name] >= machine.own_cache)
    why = "no other kernel reads the result, and it exceeds the L2 cache: it is written past the caches"
    return chosen, tuple(Decision("codegen.stream", (kernel.name, name), True, why) for name in sorted(chosen))


def epilogue(kernel: Kernel, blocks: Blocks) -> Kernel:
    """`kernel` with a load from the block in place of the sum."""
    total = blocks.contraction.total
    load = Line(total.out, Load(BLOCK, _in_block(kernel, blocks)), total.dtype, total.origin)
    body = [load if line.out == total.out else line for line in kernel.body]
    ends = [line.out for line in body if isinstance(line.rhs, Store | CheckIndex)]
    space = tuple(axis for axis in kernel.space if axis.name not in blocks.inner)
    return Kernel(kernel.name, kernel.params, space, _needed_for(body, ends))


def _called(kernel: Kernel, blocks: Blocks) -> tuple[Line, ...]:
    """The lines that compute the sums of a block, with a store to the local buffer unless they are stored directly."""
    if blocks.stored:
        return kernel.body
    total = blocks.contraction.total
    store = Line("sums", Store(BLOCK, _in_block(kernel, blocks), total.out), total.dtype, total.origin)
    return _needed_for((*kernel.body, store), [store.out])


def _needed_for(lines: Sequence[Line], ends: Iterable[str]) -> tuple[Line, ...]:
    """The lines with these names and all that they depend on, in order."""
    needed = {*ends}
    body: list[Line] = []
    for line in reversed(lines):
        if line.out in needed:
            needed.update(operands(line.rhs))
            body.append(line)
    return tuple(body[::-1])


def _in_block(kernel: Kernel, blocks: Blocks) -> Expr:
    """The index of a sum in the local buffer of a block."""
    row = ZERO
    for name in (blocks.row, *blocks.whole):
        first, count = blocks.points(name)
        row = row * count + var(name) - first
    return row * blocks.stride + var(blocks.column) - blocks.points(blocks.column)[0]
