"""The blocks of a contraction: the axes of their rows, columns and terms, chosen by the layout of the operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from pellucid.codegen.block_sizes import (
    COLUMN_STEP,
    FETCH,
    GATHER,
    MIN_ROWS,
    PACK,
    ROWS,
    Pricing,
    Varying,
    even_pieces,
    few_sums,
    lines_and_columns,
    pieces_of_lines,
    points_except,
    product_pricing,
    product_sizes,
    right_fits,
    runners_up,
    speed_up,
    split_image,
    split_lines,
    split_rows,
)
from pellucid.codegen.blocks import (
    MAX_ROW_AXES,
    MAX_TAP_AXES,
    Blocks,
    Groups,
    area_of,
    outermost_first,
    taps_of,
)
from pellucid.codegen.roles import Roles
from pellucid.codegen.weight_gradients import sums_by_channel, sums_by_group, sums_over_pixels
from pellucid.ir.contraction import (
    COLUMNS,
    GROUP_WEIGHTS,
    MAX_SPREAD_CHANNELS,
    MAX_SPREAD_TERMS,
    Contraction,
    find_contraction,
    is_affine,
    is_evenly_strided,
    stored_along,
    stride_along,
)
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr, product
from pellucid.ir.nodes import Kernel, Load, Store
from pellucid.ir.types import DType
from pellucid.machine import Machine
from pellucid.machine.kernels import DEPTH, FEW_COLUMNS, FEW_ROWS
from pellucid.machine.work import estimate
from pellucid.options import Options

# Costs are in multiply-adds. To compute the address of a tap for a row, in a convolution of several groups.
TAP_ADDRESS = 48.0
# Operands are swapped if a product would otherwise take longer by this factor: costs are not exact.
SWAP_MARGIN = 1.03
# To gather one sum of a block.
GATHER_SUM = 50.0
# To load or store one element of a strided access: STRIDED up to a stride of BASE_STRIDE elements, proportionally more
# above it, at most MAX_STRIDED times as much.
STRIDED, BASE_STRIDE, MAX_STRIDED = 20.0, 64, 16.0
# Maximum number of taps of a line that share pixel loads, as in `groups.h`.
MAX_NEIGHBOURS = 5


def find_blocks(
    kernel: Kernel,
    options: Options,
    machine: Machine,
    roles: Roles,
    groups: Groups | None = None,
) -> tuple[Blocks, tuple[Decision, ...]] | None:
    """The blocks of a kernel whose space is simplified; None if it is no contraction, or is faster as loops.

    groups: see `Blocks`.
    """
    found = find_contraction(kernel)
    if found is None or not options.vectorize:
        return None
    of_taps = sums_by_channel(found, kernel.ranges)
    if not of_taps and (not found.rows or not (found.columns or by_channel(found))):
        return None
    if groups:
        blocks = _of_groups(kernel, found, groups, machine)
    else:
        blocks = of_taps or sums_over_pixels(found, kernel.ranges, machine) or _lines(kernel, found, machine, roles)
    if blocks is None:
        return None
    taps = "share what is packed" if blocks.taps else "one by one"
    facts = (
        ("rows", blocks.height),
        ("columns", blocks.columns),
        *((("taps", taps),) if blocks.pixels else ()),
        *_priced(blocks),
    )
    terms, lines = ", ".join(blocks.inner), ", ".join((blocks.row, *blocks.whole))
    why = f"a sum of products over {terms}: computed in blocks of {lines} and {blocks.column}"
    decision = Decision("codegen.contract", (kernel.name, found.total.out), True, why, facts)
    left, right = (load.buffer for load in found.loads)
    buffer = right if right in roles.frozen else left
    if buffer not in roles.frozen:
        return blocks, (decision,)
    refusal = _not_packed(kernel, blocks) if buffer == right else "the operand has the rows of blocks, not the columns"
    why = refusal or "the operand is frozen: it is packed before the program runs"
    freezing = Decision("codegen.freeze", (kernel.name, buffer), not refusal, why)
    return replace(blocks, packed=not refusal), (decision, freezing)


def _priced(blocks: Blocks) -> tuple[tuple[str, str], ...]:
    """The block sizes that were not chosen, the cheapest first."""
    price = blocks.pricing
    if price is None:
        return ()
    chosen, whole = (blocks.rows, blocks.columns), blocks.height // blocks.rows
    sizes = [each for each in dict.fromkeys(blocks.sizes) if each != chosen]
    others = sorted((price(rows, columns), f"{rows * whole} x {columns}") for rows, columns in sizes)
    return (("runners_up", runners_up(price(*chosen), others)),) if others else ()


def _not_packed(kernel: Kernel, blocks: Blocks) -> str:
    """Why a frozen right operand is not packed; empty if it can be packed."""
    right = blocks.contraction.loads[1]
    columns = blocks.ranges[blocks.column]
    if blocks.pixels or blocks.stack() is None:
        return "the operand is neither one matrix nor a stack of evenly spaced ones"
    if right.index.syms() or blocks.terms.value is None or columns.value is None:
        return "the operand's sizes are not known"
    if sum(load.buffer == right.buffer for _, load in kernel.loads()) > 1:
        return "the kernel also reads the operand elsewhere"
    if columns.value <= FEW_COLUMNS:
        return f"panels of {columns.value} columns would be mostly empty"
    choice, rows = blocks.contraction.choice, estimate(product(blocks.ranges[name] for name in blocks.contraction.rows))
    if choice and choice.batch:
        return "each of its rows contributes to one selected batch entry only"
    if choice and rows <= FEW_ROWS * choice.count:
        return f"{rows} rows select among {choice.count} matrices: with so few rows each, they are read without packing"
    return ""


def close_blocks(blocks: Blocks, close: float) -> Iterator[Blocks]:
    """Blocks of other sizes, the cheapest first, whose estimated cost is at most `close` times as high.

    They are no larger than the largest blocks. Winograd blocks have no alternatives: their sizes are chosen elsewhere.
    """
    if blocks.pricing is None or blocks.tiles:
        return
    price, whole = blocks.pricing, blocks.height // blocks.rows
    others = [each for each in dict.fromkeys(blocks.sizes) if each != (blocks.rows, blocks.columns)]
    for rows, columns in sorted(others, key=lambda each: price(*each)):
        if rows * whole * columns <= ROWS * COLUMNS and price(rows, columns) <= close * price(
            blocks.rows, blocks.columns
        ):
            yield replace(blocks, rows=rows, columns=columns)


def direct_store(blocks: Blocks, rest: Kernel, machine: Machine) -> Store | None:
    """The store to which sums can be written directly: the only use of the sums, in whole panels, in a single pass.

    rest: the lines that run over a block. Sums that take several passes over the terms stay in the cache meanwhile.
    """
    terms, columns = blocks.terms.value, blocks.ranges[blocks.column].value
    if terms is None or terms > DEPTH * machine.isa.terms(blocks.contraction.dtype):
        return None
    if columns is None or columns % COLUMN_STEP or len(rest.body) != 2:
        return None
    store = rest.body[-1].rhs
    dtypes = {param.name: param.dtype for param in rest.params}
    if not isinstance(store, Store) or store.join or not is_affine(store.index):
        return None
    if dtypes[store.buffer] is not DType.F32:
        return None
    lines = (blocks.row, *blocks.whole)
    even = not blocks.whole or is_evenly_strided(store.index, lines, blocks.ranges)
    return store if even and stride_along(store.index, blocks.column) == ONE else None


def _lines(kernel: Kernel, found: Contraction, machine: Machine, roles: Roles) -> Blocks | None:
    """Blocks whose rows are lines of an image, or points of one axis; None for windows with unsupported strides."""
    ranges = kernel.ranges

    def longest(axes: tuple[str, ...]) -> str:
        return max(axes, key=lambda name: estimate(ranges[name]))

    columns = found.columns or found.batch
    row, column = longest(found.rows), longest(columns)
    along = stored_along(kernel, columns)
    if along and estimate(ranges[along[0]]) >= min(COLUMN_STEP, estimate(ranges[column])):
        column = along[0]
    several = len(found.rows) > 1 and estimate(ranges[row]) < MIN_ROWS and not (found.choice or found.cast)
    packed = found.loads[1].buffer in roles.frozen
    blocks = _windows(found, ranges, column, machine, packed) if found.windowed or several else None
    if blocks or found.windowed:
        return blocks
    one = _product(kernel, found, row, column, machine, roles)
    if found.choice or found.cast or {load.buffer for load in found.loads} & roles.frozen:
        return one
    other = _product(kernel, found.swapped(), column, row, machine, roles)
    return (
        other
        if SWAP_MARGIN * _time_of_product(kernel, machine, other) < _time_of_product(kernel, machine, one)
        else one
    )


def _product(kernel: Kernel, found: Contraction, row: str, column: str, machine: Machine, roles: Roles) -> Blocks:
    """Blocks of a matrix product, with rows along one axis."""
    ranges, right = kernel.ranges, found.loads[1].buffer
    pack = 0.0 if right in roles.frozen else PACK
    size = partial(product_sizes, found, row, column, ranges, machine, pack, produced=right in roles.produced)
    (height, width), unshared = size(shared=not found.choice), size(shared=False)
    pricing = product_pricing(found, row, column, ranges, machine, pack)
    along_rows = _vectors_along_rows(kernel, found, row, column)
    blocks = Blocks(found, row, (), column, found.inner, height, width, ranges, along_rows=along_rows, pricing=pricing)
    if ranges[row].value is None and not found.choice:
        return replace(blocks, varying=split_rows(found, row, column, ranges, machine, (height, width)))
    others = (
        unshared,
        *((height, even_pieces(pricing.n, wide, COLUMN_STEP)) for wide in (2 * width, width // 2, 4 * width)),
    )
    return replace(blocks, sizes=others)


def _time_of_product(kernel: Kernel, machine: Machine, blocks: Blocks) -> float:
    """The cost per term, relative to a product whose columns fill registers and are stored contiguously."""
    found, pricing = blocks.contraction, blocks.pricing
    assert pricing is not None
    along = blocks.row if blocks.along_rows else blocks.column
    strided = _strided_cost(kernel, found, along) + (GATHER_SUM if blocks.along_rows else 0.0)
    time = pricing.padding(blocks.rows, blocks.columns, machine) * pricing(blocks.rows, blocks.columns)
    return time + strided * speed_up(found.dtype, machine) / max(1, estimate(blocks.terms))


def orient_vectors(kernel: Kernel, blocks: Blocks, machine: Machine) -> Blocks:
    """Blocks of a convolution; their epilogue gets vectors along pixels if results are channels-first.

    Lines of few pixels fill only a part of each vector.
    """
    if not blocks.window:
        return blocks
    pixels = estimate(blocks.ranges[blocks.pixel])
    filled = pixels / (-(-pixels // machine.lanes) * machine.lanes)
    along_rows = _vectors_along_rows(kernel, blocks.contraction, blocks.pixel, blocks.column, filled)
    return replace(blocks, along_rows=along_rows)


def _vectors_along_rows(kernel: Kernel, found: Contraction, row: str, column: str, filled: float = 1.0) -> bool:
    """Whether an epilogue that gathers sums along rows is cheaper than strided loads and stores along columns.

    filled: the fraction of the lanes that vectors along rows use.
    """
    along = all(store.index.coefficient(row) == ONE for _, store in kernel.stores())
    return along and (GATHER_SUM + _strided_cost(kernel, found, row)) / filled < _strided_cost(kernel, found, column)


def _strided_cost(kernel: Kernel, found: Contraction, axis: str) -> float:
    """The cost per sum of the kernel's other loads and stores that are strided along an axis."""
    own = (found.left.out, found.right.out)
    others = (line.rhs for line in kernel.body if isinstance(line.rhs, Load | Store) and line.out not in own)
    steps = (other.index.coefficient(axis) for other in others)
    strides = (
        BASE_STRIDE * MAX_STRIDED if step is None else estimate(step) for step in steps if step not in (ZERO, ONE)
    )
    return sum(STRIDED * min(max(1.0, stride / BASE_STRIDE), MAX_STRIDED) for stride in strides)


def _of_groups(kernel: Kernel, found: Contraction, groups: Groups, machine: Machine) -> Blocks | None:
    """Blocks of a convolution of several groups, or of its weight's gradient; None for unsupported layouts."""
    ranges = kernel.ranges
    if groups.backward:
        of_weight = sums_by_group(found, ranges, groups, machine)
        if of_weight is None or of_weight.rows < machine.lanes // 2:
            return of_weight
        return replace(of_weight, along_rows=bool(stored_along(kernel, (of_weight.row,))))
    (column,) = found.columns
    blocks = _windows(found, ranges, column, machine, groups=groups)
    if blocks is None:
        return None
    taps, channels = taps_of(found, blocks.inner)
    if area_of(channels, ranges) != groups.channels:  # all strides are equal, so they do not identify the channels
        return None
    pixel = (blocks.row, *blocks.whole)[-1]
    moves = [found.loads[0].index, *(bound.position for bound in found.bounds)]
    shared = bool(taps) and all(stride_along(move, taps[-1]) == stride_along(move, pixel) for move in moves)
    neighbours = estimate(ranges[taps[-1]]) if shared else 1
    return replace(blocks, groups=replace(groups, neighbours=neighbours if neighbours <= MAX_NEIGHBOURS else 1))


def by_channel(found: Contraction) -> bool:
    """True for a depthwise convolution (each channel has its own sums) of a channels-last image."""
    return found.windowed and len(found.batch) == 1 and stride_along(found.loads[0].index, found.batch[0]) == ONE


def _windows(
    found: Contraction,
    ranges: dict[str, Expr],
    column: str,
    machine: Machine,
    packed: bool = False,
    groups: Groups | None = None,
) -> Blocks | None:
    """Blocks of a convolution: whole lines of an image, as many as fit the caches. None for unsupported layouts.

    packed: the right operand is packed before the program runs.
    """
    terms = _window_terms(found, ranges, column, groups)
    if terms is None:
        return None
    row, whole = _lines_of_image(found, ranges)
    size = prod(ranges[name].value or 1 for name in whole)
    step, most = COLUMN_STEP, COLUMNS
    if groups:
        step = COLUMN_STEP if groups.period % machine.lanes == 0 else groups.period
        most = min(COLUMNS, GROUP_WEIGHTS // estimate(product(ranges[name] for name in terms.inner)))
    blocks = Blocks(found, row, whole, column, terms.inner, ROWS, COLUMNS, ranges, True, terms.planes)
    blocks = replace(blocks, spread=terms.spread)
    m, n = estimate(ranges[row]), estimate(ranges[column])
    if any(ranges[name].value is None for name in (row, *whole)):
        columns = even_pieces(n, most, step)
        varying = _varying(blocks, ROWS // size, pieces_of_lines(n, columns, machine))
        return replace(blocks, columns=columns, varying=varying)
    small = packed and (terms.spread or column in found.batch)
    faster = 0.0 if small else speed_up(found.dtype, machine)
    gather = TAP_ADDRESS / groups.channels if groups and not small else GATHER * faster
    fetch = FETCH if right_fits(found, column, ranges, machine) else 0.0
    outer = points_except(ranges, (*terms.inner, *whole, row, column))
    pricing = Pricing(m, size, n, outer, machine.cores, fetch, gather, PACK * faster)
    (lines, columns), *others = few_sums(pricing) if small else lines_and_columns(pricing, step, most)
    return replace(blocks, rows=lines, columns=columns, pricing=pricing, sizes=tuple(others))


@dataclass(frozen=True, slots=True)
class _WindowTerms:
    """The terms of a convolution, outermost first. planes: the image is channel by channel; spread: see `_spread`."""

    inner: tuple[str, ...]
    planes: bool
    spread: bool


def _window_terms(
    found: Contraction, ranges: dict[str, Expr], column: str, groups: Groups | None
) -> _WindowTerms | None:
    """None if the weights are not in the order of the terms, or there are too many taps."""
    right = found.loads[1].index
    spread = None if groups or column in found.batch else _spread(found, ranges)
    inner = spread or _channels_last(found)
    taps, channels = (inner[:-1], inner[-1:]) if spread else taps_of(found, inner)
    planes = not is_evenly_strided(right, inner, ranges)
    if planes and not channels:  # an image of one channel was transposed, the weight was not
        inner = outermost_first(found.inner, right)
        taps, channels = taps_of(found, inner)
        planes = not is_evenly_strided(right, inner, ranges)
    few = area_of(taps, ranges) <= DEPTH
    if len(taps) > MAX_TAP_AXES or (column in found.batch and (channels or not few)):
        return None
    in_planes = found.dtype is DType.F32 and channels and few and is_evenly_strided(right, (*channels, *taps), ranges)
    return None if planes and not in_planes else _WindowTerms(inner, planes, spread is not None)


def _lines_of_image(found: Contraction, ranges: dict[str, Expr]) -> tuple[str, tuple[str, ...]]:
    """The axis of rows that blocks cut, and the axes inside it that they hold whole."""
    index = found.loads[0].index
    rows = sorted(found.rows, key=lambda name: -estimate(stride_along(index, name)))
    whole: list[str] = []
    size = 1
    while len(rows) > 1 and len(whole) + 1 < MAX_ROW_AXES and _fits(ranges[rows[-1]], ROWS // size):
        whole.insert(0, rows.pop())
        size *= estimate(ranges[whole[0]])
    if ranges[rows[-1]].value is None and len(rows) > 1 and not whole:
        whole.insert(0, rows.pop())
    return rows[-1], tuple(whole)


def _channels_last(found: Contraction) -> tuple[str, ...]:
    """The summed axes in the memory order of the image; channels last among equal strides (lines of one pixel)."""
    channels = found.channels_among(found.inner)
    others = outermost_first((name for name in found.inner if name != channels), found.loads[0].index)
    return (*others, channels) if channels else others


def _varying(blocks: Blocks, most: int, share: int) -> Varying:
    """Blocks of lines of symbolic number, at most `most` of them, or length. share: see `split_lines`."""
    lines = blocks.ranges[blocks.row]
    pixels = blocks.ranges[blocks.whole[-1]] if blocks.whole else ONE
    if pixels.value is None:
        return split_image(lines, pixels, ROWS, 1, share)
    return Varying(split_lines(lines, most, share))


def _fits(extent: Expr, most: int) -> bool:
    """True if an axis has a known number of points, at most `most`."""
    return extent.value is not None and extent.value <= most


def _spread(found: Contraction, ranges: dict[str, Expr]) -> tuple[str, ...] | None:
    """The axes of taps, then of channels, for an image of so few channels that `contract_spread` reads it.

    None for any other. Channels may have any stride: channels last or channels first.
    """
    terms = product(ranges[name] for name in found.inner).value
    if found.dtype is not DType.F32 or found.batch or terms is None or terms > MAX_SPREAD_TERMS:
        return None
    if not 1 < len(found.inner) <= MAX_TAP_AXES + 1:
        return None
    left, right = (load.index for load in found.loads)
    few = [name for name in found.inner if name not in found.bounded and estimate(ranges[name]) <= MAX_SPREAD_CHANNELS]
    orders = [
        (outermost_first([each for each in found.inner if each != name], operand), name)
        for operand in (left, right)  # their orders differ if the image was transposed
        for name in few
    ]
    orderings = (
        (*taps, name)
        for taps, name in orders
        if is_evenly_strided(right, (*taps, name), ranges) or is_evenly_strided(right, (name, *taps), ranges)
    )
    return next(orderings, None)
