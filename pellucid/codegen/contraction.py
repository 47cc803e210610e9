"""The plan of a contraction: `native/kernel/contract.h` computes blocks of its sums, the rest runs over each block.

Each parallel iteration takes a block of rows and columns. A call fills memory of its own with that block of the sums;
then the other lines of the kernel run over the block as those of any kernel, with a load from there in place of the
sum. Sums that are only stored go to their place at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from pellucid.codegen.blocks import Blocks
from pellucid.codegen.find_blocks import close_blocks, find_blocks, stored_at_once, turned_as_results_lie
from pellucid.codegen.groups import join_groups
from pellucid.codegen.nest import BLOCK
from pellucid.codegen.plan import Plan, grain_of
from pellucid.codegen.roles import Roles
from pellucid.codegen.sweeps import plan_sweeps
from pellucid.codegen.variants import CLOSE
from pellucid.codegen.vector import base_lanes, choose, cost, gathered
from pellucid.codegen.winograd import by_tiles
from pellucid.ir.contraction import Contraction
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr, chunks, product, var
from pellucid.ir.nodes import CheckIndex, Const, Kernel, Line, Load, Store, axes_of, operands
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.library import BETWEEN
from pellucid.machine.work import estimate
from pellucid.options import Options

MOST_LOOPED = 8
"""Results for each pixel up to which loops over the pixels are thought of."""


def plan_contraction(kernel: Kernel, machine: Machine, options: Options, roles: Roles) -> Iterator[Plan]:
    """The plan of a kernel whose space is simplified; none if it is no contraction that this file can run.

    After it come plans with other blocks that are close to it by price.
    """
    joined = join_groups(kernel, machine)
    found = find_blocks(joined.of_first, options, machine, roles, joined.groups)
    if found is None:
        return
    blocks, decisions = found
    whole, blocks, tiles = by_tiles(blocks, joined.kernel, machine)
    blocks = turned_as_results_lie(whole, blocks, machine)
    for each in chain((blocks,), close_blocks(blocks, CLOSE)):
        yield _planned(whole, each, (*decisions, *tiles), machine, options, roles.unread)


def compared_with_loops(kernel: Kernel, plan: Plan, machine: Machine) -> tuple[Decision, ...]:
    """Whether `plan` takes less time than loops: for a convolution of few results for each pixel, in f32, whose blocks
    have mostly empty columns, and for small matrices of a batch that lie between one another."""
    blocks = plan.blocks
    assert blocks is not None
    contraction, ranges = blocks.contraction, kernel.ranges
    if not (contraction.windowed or blocks.by_channel) and _lie_between(contraction, ranges, machine):
        rows, columns = (
            estimate(product(ranges[name] for name in axes)) for axes in (contraction.rows, contraction.columns)
        )
        ok = rows * columns > BETWEEN * (rows + columns)
        why = "vectors along the batch, whose elements lie side by side, take less than what blocks fetch one by one"
        if ok:
            why = f"{rows} rows and {columns} columns use what blocks fetch one by one often enough"
        return (Decision("codegen.blocks", (kernel.name,), ok, why),)
    columns = estimate(product(ranges[name] for name in contraction.columns))
    one_image = contraction.windowed and not contraction.batch and contraction.dtype is DType.F32
    if not one_image or columns > MOST_LOOPED:
        return ()
    terms = estimate(product(ranges[name] for name in (*contraction.rows, *contraction.inner)))
    gathered_and_multiplied = terms * (1 + blocks.columns / machine.lanes)
    total = contraction.total
    summed = replace(total, rhs=Const(0.0))
    rest = replace(plan.kernel, body=tuple(summed if line.out == total.out else line for line in plan.kernel.body))
    apart = gathered_and_multiplied + cost(rest, plan.vector, machine.lanes)
    together = choose(kernel, machine, enabled=True).price
    facts = (("instructions", round(apart)), ("by_loops", round(together)))
    ok = apart <= together
    why = f"blocks whose columns are {columns} take {'less' if ok else 'more'} instructions than loops over the pixels"
    return (Decision("codegen.blocks", (kernel.name,), ok, why, facts),)


def _lie_between(contraction: Contraction, ranges: Mapping[str, Expr], machine: Machine) -> bool:
    """Whether neighbours in both operands belong to different matrices of a batch."""
    places = [load.index for load in contraction.loads]
    return any(
        all(place.coefficient(axis) == ONE for place in places) and estimate(ranges[axis]) >= machine.lanes
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
    blocks = replace(blocks, stored=stored_at_once(blocks, rest, machine))
    ranges = kernel.ranges
    inside = (blocks.row, *blocks.whole, blocks.column)
    outer = tuple(axis.name for axis in rest.space if axis.name not in inside)
    pieces = product(chunks(ranges[name], size) for name, size in blocks.pieces.values())
    extent = product(ranges[name] for name in outer) * pieces
    at_once = 1 if blocks.by_channel else machine.isa.products(blocks.contraction.dtype)
    steps = blocks.share * estimate(product(ranges.values())) / (machine.lanes * at_once)
    grain, parallel = grain_of(kernel, extent, steps, machine, options)
    lines = (blocks.row, *blocks.whole)
    first, *others, along = (*lines[:-1], blocks.column, lines[-1]) if blocks.turned else (*lines, blocks.column)
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
    """Results to write past the caches: those that the second cache does not hold until somebody else reads them."""
    stored = {store.buffer for line, store in kernel.stores() if line.out in wide and not store.join}
    loaded = {load.buffer for _, load in kernel.loads()}
    sizes = {param.name: (param.numel.value or 0) * param.dtype.itemsize for param in kernel.params}
    chosen = frozenset(name for name in stored & unread - loaded if sizes[name] >= machine.own_cache)
    why = "no other kernel reads the result, and the second cache cannot hold it: it goes past the caches"
    return chosen, tuple(Decision("codegen.stream", (kernel.name, name), True, why) for name in sorted(chosen))


def epilogue(kernel: Kernel, blocks: Blocks) -> Kernel:
    """`kernel` with a load from the block in place of the sum."""
    total = blocks.contraction.total
    load = Line(total.out, Load(BLOCK, _in_block(kernel, blocks)), total.dtype, total.origin)
    body = [load if line.out == total.out else line for line in kernel.body]
    ends = [line.out for line in body if isinstance(line.rhs, Store | CheckIndex)]
    space = tuple(axis for axis in kernel.space if axis.name not in blocks.inner)
    return Kernel(kernel.name, kernel.params, space, _made_of(body, ends))


def _called(kernel: Kernel, blocks: Blocks) -> tuple[Line, ...]:
    """The lines of the sums of a block, stored to its memory where they do not go to their place at once."""
    if blocks.stored:
        return kernel.body
    total = blocks.contraction.total
    store = Line("sums", Store(BLOCK, _in_block(kernel, blocks), total.out), total.dtype, total.origin)
    return _made_of((*kernel.body, store), [store.out])


def _made_of(lines: Sequence[Line], ends: Iterable[str]) -> tuple[Line, ...]:
    """The lines of these names and all that they are made of, in order."""
    needed = {*ends}
    body: list[Line] = []
    for line in reversed(lines):
        if line.out in needed:
            needed.update(operands(line.rhs))
            body.append(line)
    return tuple(body[::-1])


def _in_block(kernel: Kernel, blocks: Blocks) -> Expr:
    """Where a sum is in the memory of a block."""
    place = ZERO
    for name in (blocks.row, *blocks.whole):
        first, count = blocks.points(name)
        place = place * count + var(name) - first
    return place * blocks.stride + var(blocks.column) - blocks.points(blocks.column)[0]
