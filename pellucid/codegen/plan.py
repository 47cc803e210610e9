"""The plan of a kernel: how its loops run. Every choice is made here or in callees, none while printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pellucid.codegen.ahead import fetched_ahead
from pellucid.codegen.blocks import Blocks, Order
from pellucid.codegen.collisions import colliding
from pellucid.codegen.nest import Counter, Part
from pellucid.codegen.rows import Rows
from pellucid.codegen.sweeps import Sweeps, plan_sweeps
from pellucid.codegen.vector import VectorChoice, base_lanes, choose, cost, gathered
from pellucid.errors import InternalError
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, chunks, const, product
from pellucid.ir.nodes import Kernel, Line, Load, Reduce, Store, axes_of
from pellucid.ir.prefix import Prefix
from pellucid.ir.traffic import LINE
from pellucid.ir.types import DType
from pellucid.machine import Machine, kernel_work, time
from pellucid.machine.tiles import is_short_stride
from pellucid.machine.work import SYMBOL_GUESS, estimate
from pellucid.options import Options

# Pairwise summation: terms in one block, as in eager mode; blocks are then added pairwise. Sums of up to SHORT_SUM
# terms are not worth it.
PAIRWISE_BLOCK = 16
SHORT_SUM = 24
# Work of one parallel iteration, in instructions, that makes the overhead of the loop around it negligible.
CHUNK_WORK = 4096
# Maximum number of columns that are summed side by side ("abreast"), and the rows that each vector of columns adds per
# step: few pages are read at a time, and the partial sums stay in the L2 cache.
COLUMNS_ABREAST = 1024
# Bytes of a thread's stack for the partial sums of such columns, and levels of a pairwise sum of unknown length.
STACK_ABREAST = 64 << 10
LEVELS = 40
ROWS_ABREAST = 8
# Squares of a tiled kernel in one parallel iteration: few enough rows that the cache and the TLB still hold them for
# the next iteration, which continues in the same rows.
TILES = 16
# Scatters of rows: the vectors of a row that one thread adds at a time, and the pieces of a row that threads may share.
SCATTER_STEPS = 8
# Minimum number of vectors of such a piece where the L2 cache holds all rows.
MIN_STEPS = 4
# From this number of outer iterations on, the inner axis need not be cut to keep all threads busy.
ENOUGH_ITERATIONS = 512
# The work of each additional thread should take as long as this many barriers, unless `min_work_per_thread` is set.
BARRIERS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How the loops of a kernel run. The nest, from the outside in:

    - one parallel loop over `outer`, chunks of `inner` if `chunk` is not 0, and blocks of `tile` if it is a kept axis,
      flattened, the last one fastest; for a contraction in the order of its `blocks`;
    - one loop for each of the `colliding` axes of a scatter;
    - a loop over `inner`, a kept axis, if there is one: by vectors if it is the vector axis;
    - loops over the `whole` axes: those of a contraction's block, of which the last may be cut (see `Varying` in
      block_sizes.py); otherwise short axes interleaved with the lanes of a vector;
    - a loop over one block of `tile`, if there is one, see below;
    - for each sweep, loops over `reduced`; the last one by vectors if it is the vector axis, by blocks if it is `tile`.

    kernel: the kernel under canonical names, its space simplified.
    vector: the vector axis; None for scalar code. width: lanes per step.
    wide: the values (and stores) that have one value per lane.
    gathered: loads and stores of `wide` whose lanes are not adjacent in memory.
    tile, tiled: the axis of tiles, and the accesses done in squares of `width` by `width`, see machine/tiles.py.
    pairwise: sums computed by pairwise summation.
    abreast: number of vectors of a chunk that are summed side by side, by blocks of the reduced axis; 0 if the sums of
    each vector are finished before the next one begins.
    streamed: buffers that are written with non-temporal stores, past the caches.
    guarded: buffers that must stay unchanged if an index check fails.
    ahead: loads that prefetch, with the index that they prefetch, see ahead.py.
    extent: number of iterations of the parallel loop. grain: how many of them are worth a thread.
    steps: vector instructions of a call, for the machine model; an estimate where sizes are symbols.
    blocks: of a contraction, see contraction.py; `kernel` is then the part that runs over each block.
    rows: of an attention or its gradients, see attention.py; one call computes them.
    prefix: a prefix sum, whose axis has the innermost loop; `kernel` is then the body of that loop.
    called: the lines that a call of `native/kernel/` computes in each iteration: the sums of a contraction, or `rows`.
    """

    kernel: Kernel
    outer: tuple[str, ...]
    inner: str | None
    chunk: int
    colliding: tuple[str, ...]
    reduced: tuple[str, ...]
    vector: str | None
    width: int
    wide: frozenset[str]
    gathered: frozenset[str]
    tile: str | None
    tiled: frozenset[str]
    sweeps: Sweeps
    pairwise: frozenset[str]
    abreast: int
    streamed: frozenset[str]
    extent: Expr
    grain: int
    steps: float
    decisions: tuple[Decision, ...]
    blocks: Blocks | None = None
    whole: tuple[str, ...] = ()
    rows: Rows | None = None
    called: tuple[Line, ...] = ()
    prefix: Prefix | None = None
    ahead: Mapping[str, Expr] = field(default_factory=dict)
    guarded: frozenset[str] = frozenset()

    @property
    def counters(self) -> tuple[Counter, ...]:
        """The axes that the parallel loop flattens; the last one runs fastest."""
        order = self.blocks.order if self.blocks is not None else Order.ROWS_THEN_COLUMNS
        of = {"outer": [Counter(axis, self.extent_of(axis)) for axis in self.outer], "rows": [], "columns": []}
        for part, (axis, step) in self.pieces.items():
            kind = "columns" if part is Part.BLOCK else "rows"
            of[kind].append(Counter(axis, self.extent_of(axis), step, part))
        return tuple(counter for part in order.value for counter in of[part])

    @property
    def pieces(self) -> dict[Part, tuple[str, Expr]]:
        """The axes that the parallel loop cuts into pieces, each with the points of one piece."""
        if self.blocks is not None:
            return self.blocks.pieces
        found: dict[Part, tuple[str, Expr]] = {}
        if self.inner is not None and self.chunk:
            found[Part.CHUNK] = self.inner, const(self.chunk)
        if self.outer_tile is not None:
            found[Part.BLOCK] = self.outer_tile, const(self.tile_step)
        return found

    @property
    def way(self) -> str:
        """A short description that distinguishes it from other plans of the kernel."""
        if self.blocks is not None:
            return f"blocks of {self.blocks.height} x {self.blocks.columns}"
        lanes = f"{self.width} lanes along {self.vector}" if self.vector else "scalar"
        return lanes + (f", {' around '.join(self.outer)}" if len(self.outer) > 1 else "")

    @property
    def vector_is_reduced(self) -> bool:
        return self.vector is not None and self.vector in self.reduced

    @property
    def positions(self) -> DType:
        """The integer type in which vectors hold positions in the reduced axes."""
        points = product(self.extent_of(axis) for axis in self.reduced).value
        return DType.I32 if points is not None and points < 1 << 31 else DType.I64

    @property
    def levels(self) -> int:
        """Levels of the pairwise sums of columns that are summed side by side."""
        return _levels(self.kernel)

    @property
    def tile_step(self) -> int:
        """Points of `tile` in one block."""
        if self.blocks is None:
            return self.width
        return self.blocks.rows if self.tile == self.blocks.row else self.blocks.columns

    @property
    def outer_tile(self) -> str | None:
        """`tile` if it is a kept axis, whose blocks are distributed over threads."""
        return None if self.tile in self.reduced else self.tile

    def extent_of(self, axis: str) -> Expr:
        return self.kernel.ranges[axis]


def make_plan(
    kernel: Kernel,
    machine: Machine,
    options: Options,
    choice: VectorChoice | None = None,
    prefix: Prefix | None = None,
) -> Plan:
    """The plan of a kernel whose space is simplified already.

    choice: the vector axis; by default the cheapest. prefix: the prefix sum whose loop `kernel` is.
    """
    _check_in_place(kernel)
    choice = choice or choose(kernel, machine, options.vectorize)
    vector, width, tiled = choice.axis, choice.width, choice.tiles.lines
    axes = _assign_axes(kernel, choice, prefix)
    wide = frozenset(name for name, depends in axes_of(kernel).items() if vector in depends)
    strided = gathered(kernel, vector, wide)
    sweeps = plan_sweeps(kernel, width if axes.inner_is_vector else 1, strided - tiled)
    steps = cost(kernel, vector, base_lanes(kernel, machine) if vector else 1, tiled)
    pairwise, sums = _pairwise(kernel, axes.reduced, vector, width)
    abreast, side_by_side = _abreast(kernel, axes, width, sweeps, pairwise, machine)
    whole = axes.serial or (() if abreast else _interleaved_axes(kernel, axes))
    outer = tuple(name for name in axes.outer if name not in whole)
    iterations = product(kernel.ranges[name] for name in outer) * axes.blocks(kernel, width)
    chunk = abreast * width or _chunk_of_inner(kernel, axes, width, steps, iterations, machine)
    if chunk and axes.inner is not None:
        iterations = iterations * chunks(kernel.ranges[axes.inner], chunk)
    grain, parallel = grain_of(kernel, iterations, steps, machine, options)
    streamed, streams = _streamed(kernel, wide, machine)
    ahead, fetched = fetched_ahead(kernel, choice, wide - strided, steps, machine)
    return Plan(
        kernel=kernel,
        outer=outer,
        inner=axes.inner,
        chunk=chunk,
        colliding=axes.colliding,
        reduced=axes.reduced,
        vector=vector,
        width=width,
        wide=wide,
        gathered=strided,
        tile=axes.tile,
        tiled=tiled,
        sweeps=sweeps,
        pairwise=pairwise,
        abreast=abreast,
        streamed=streamed,
        extent=iterations,
        grain=grain,
        steps=steps,
        whole=whole,
        prefix=prefix,
        ahead=ahead,
        decisions=(*choice.decisions, *sweeps.decisions, parallel, *sums, *side_by_side, *streams, *fetched),
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    """Which loop each axis of a kernel becomes, as `Plan` says. kept: kept axes that may run in any order.

    serial: the axis of a prefix sum, whose loop is the innermost one.
    """

    kept: tuple[str, ...]
    outer: tuple[str, ...]
    inner: str | None
    vector: str | None
    tile: str | None
    colliding: tuple[str, ...]
    serial: tuple[str, ...]
    reduced: tuple[str, ...]

    @property
    def inner_is_vector(self) -> bool:
        return self.inner is not None and self.inner == self.vector

    def blocks(self, kernel: Kernel, width: int) -> Expr:
        """Blocks of `tile` that threads share."""
        return chunks(kernel.ranges[self.tile], width) if self.tile in self.kept else ONE


def _assign_axes(kernel: Kernel, choice: VectorChoice, prefix: Prefix | None) -> _Axes:
    vector, tile, reduced, collisions = choice.axis, choice.tiles.axis, kernel.reduced, colliding(kernel)
    serial = () if prefix is None else (prefix.axis,)
    ordered = {*reduced, *collisions, *serial}
    kept = tuple(axis.name for axis in kernel.space if axis.name not in ordered and axis.name != vector)
    if vector in reduced:
        inner, reduced = None, (*(name for name in reduced if name != vector), str(vector))
    elif vector is not None:
        inner = vector
    elif collisions and not reduced:
        inner = next((name for name in reversed(kept) if _points_per_line(kernel, name) > 1), None)
    else:
        inner = kept[-1] if kept and not ordered else None
    outer = _line_sharing_last(kernel, tuple(name for name in kept if name not in (inner, tile)))
    return _Axes(kept, outer, inner, vector, tile, collisions, serial, reduced)


def _chunk_of_inner(kernel: Kernel, axes: _Axes, width: int, steps: float, iterations: Expr, machine: Machine) -> int:
    """Points of the inner axis in one parallel iteration; 0 for all of them. iterations: without such a cut."""
    inner, tiles = axes.inner, axes.tile in axes.kept
    if inner is None or (not tiles and estimate(iterations) >= ENOUGH_ITERATIONS):
        return 0
    points = max(1, estimate(product(kernel.ranges[name] for name in {*axes.kept, inner})))
    wanted = TILES * width if tiles else CHUNK_WORK * points / max(steps, 1)
    if axes.colliding:
        return _scatter_chunk(kernel, inner, width, wanted, machine)
    return _chunk(kernel.ranges[inner], width, wanted)


def _line_sharing_last(kernel: Kernel, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes reordered: those whose points share cache lines come last, so that a line is reused while cached."""
    sizes = {param.name: param.dtype.itemsize for param in kernel.params}

    def shares(name: str) -> bool:
        for access in (line.rhs for line in kernel.body if isinstance(line.rhs, Load | Store)):
            step = access.index.coefficient(name)
            if step is not None and 0 < abs(step.value or 0) * sizes[access.buffer] < LINE:
                return True
        return False

    return tuple(sorted(axes, key=shares))


def _scatter_chunk(kernel: Kernel, inner: str, width: int, wanted: float, machine: Machine) -> int:
    """Points of the inner axis per parallel iteration of a scatter, like `_chunk`, in whole cache lines.

    Threads that share rows held by the L2 cache wait for each other's lines, which only pays for wide rows.
    """
    step, extent = max(width, _points_per_line(kernel, inner)), estimate(kernel.ranges[inner])
    scattered = {store.buffer for _, store in kernel.stores() if store.index.vals()}
    sizes = (estimate(each.numel) * each.dtype.itemsize for each in kernel.params if each.name in scattered)
    if sum(sizes) <= machine.own_cache and extent < MIN_STEPS * SCATTER_STEPS * step:
        return 0
    return _chunk(kernel.ranges[inner], step, max(wanted, min(SCATTER_STEPS * step, extent // SCATTER_STEPS)))


def _points_per_line(kernel: Kernel, axis: str) -> int:
    """How many points of an axis share a cache line of a scattered buffer: one thread should have all of them."""
    sizes = {param.name: param.dtype.itemsize for param in kernel.params}
    found = 1
    for _, store in kernel.stores():
        step = store.index.coefficient(axis)
        if store.index.vals() and step is not None and step.value:
            found = max(found, LINE // (abs(step.value) * sizes[store.buffer]))
    return found


def _interleaved_axes(kernel: Kernel, axes: _Axes) -> tuple[str, ...]:
    """The short axes interleaved with the lanes of a vector: an inner loop over them touches each cache line once."""
    if not axes.inner_is_vector or axes.tile is not None:
        return ()
    found: list[str] = []
    for index in (line.rhs.index for line in kernel.body if isinstance(line.rhs, Load | Store)):
        step = index.coefficient(str(axes.vector))
        if not index.vals() and step is not None and is_short_stride(step):
            for name in axes.outer:
                own, extent = index.coefficient(name), kernel.ranges[name].value
                if own is not None and own.value and extent and abs(own.value) * extent <= (step.value or 0):
                    found.append(name)
    return tuple(dict.fromkeys(found))


def _check_in_place(kernel: Kernel) -> None:
    """A buffer that is loaded and stored must be stored at every kept point, or a later point would load the result."""
    loaded = {load.buffer for _, load in kernel.loads()}
    kept = {axis.name for axis in kernel.space} - set(kernel.reduced)
    depends = axes_of(kernel)
    for line, store in kernel.stores():
        if store.buffer in loaded and not kept <= depends[line.out]:
            missing = ", ".join(sorted(kept - depends[line.out]))
            raise InternalError(
                f"a kernel stores in place into {store.buffer} for all of {missing} at once",
                hint="the scheduler must not fuse such a store into this space",
                context={"kernel": kernel.name, "line": line.out},
            )


def _chunk(extent: Expr, step: int, wanted: float) -> int:
    """Points of the inner axis per parallel iteration, about `wanted`, a multiple of `step`; 0 for the whole axis.

    The axis is cut only into two or more pieces.
    """
    steps = max(1, round(wanted / step))
    chunk = step << (steps - 1).bit_length()
    return chunk if extent.value is None or extent.value >= 2 * chunk else 0


def grain_of(kernel: Kernel, extent: Expr, steps: float, machine: Machine, options: Options) -> tuple[int, Decision]:
    """Parallel iterations that are worth a thread of their own. steps: vector instructions of the whole kernel."""
    alone = time(kernel_work(kernel, steps), machine)
    nanoseconds = max(alone.moving, alone.computing)
    iterations = max(1, estimate(extent))
    each = max(nanoseconds / iterations, 0.001)
    grain = max(1, round((options.min_work_per_thread or BARRIERS * machine.barrier) / each))
    ok = iterations >= 2 * grain
    why = (
        f"an iteration takes about {each:.3g} ns, so {grain} of {iterations} are worth a thread"
        if ok
        else f"the whole kernel takes about {nanoseconds:.3g} ns in {iterations} iterations: one thread is enough"
    )
    if extent.syms():
        why += f" (for sizes of about {SYMBOL_GUESS}; the number of threads depends on the size at run time)"
    facts = (("iterations", iterations), ("grain", grain), ("estimated_ns", round(nanoseconds)))
    return grain, Decision("codegen.parallel", (kernel.name,), ok, why, facts)


def _pairwise(
    kernel: Kernel, reduced: tuple[str, ...], vector: str | None, width: int
) -> tuple[frozenset[str], tuple[Decision, ...]]:
    """The floating point sums that are long enough to need pairwise summation."""
    terms = product(kernel.ranges[name] for name in reduced)
    if vector in reduced:
        terms = chunks(terms, width)
    if terms.value is not None and terms.value <= SHORT_SUM:
        return frozenset(), ()
    sums = [
        line.out
        for line in kernel.body
        if isinstance(line.rhs, Reduce) and line.rhs.op == "sum" and line.dtype.is_float
    ]
    count = "a symbolic number of terms" if terms.value is None else f"{terms.value} terms"
    why = f"each accumulator adds {count}: they are added in blocks, and blocks pairwise, for accuracy"
    return frozenset(sums), tuple(Decision("codegen.pairwise", (kernel.name, name), True, why) for name in sums)


def _abreast(
    kernel: Kernel, axes: _Axes, width: int, sweeps: Sweeps, pairwise: frozenset[str], machine: Machine
) -> tuple[int, tuple[Decision, ...]]:
    """How many vectors of columns are summed side by side, see `Plan.abreast`.

    A vector is a strip of a row, and the next row is in another page: reading strip by strip reaches half of the
    memory bandwidth of reading rows. Data in the L2 caches is read as fast by strips, with sums in registers.
    """
    inner = axes.inner
    if inner is None or not axes.inner_is_vector or axes.tile is not None or axes.colliding:
        return 0, ()
    if len(sweeps.order) != 1 or len(axes.reduced) != 1:
        return 0, ()
    reduces = [line.out for line in kernel.body if isinstance(line.rhs, Reduce)]
    columns, moved = kernel.ranges[inner], kernel_work(kernel, 0).working_set
    if not set(reduces) <= pairwise or moved <= machine.own_caches:
        return 0, ()
    held = _levels(kernel) * sum(line.dtype.itemsize for line in kernel.body if line.out in reduces)
    most = min(COLUMNS_ABREAST // len(reduces), STACK_ABREAST // held)
    if most < 2 * width:
        return 0, ()
    outer = estimate(product(kernel.ranges[name] for name in axes.outer))
    threads = 1 if outer >= machine.cores else machine.cores
    pieces = threads * -(-estimate(columns) // (threads * most))
    vectors = -(-estimate(columns) // (pieces * width))
    if vectors < 2:
        return 0, ()
    why = f"rows are read {vectors * width} columns at a time: all its {moved} bytes exceed the L2 caches"
    return vectors, (Decision("codegen.abreast", (kernel.name, *reduces), True, why),)


def _levels(kernel: Kernel) -> int:
    """Levels of a pairwise sum over the reduced axes in blocks of `ROWS_ABREAST`, see `Blocks` in reductions.h."""
    rows = product(kernel.ranges[name] for name in kernel.reduced).value
    return LEVELS if rows is None else max(1, -(-rows // ROWS_ABREAST)).bit_length()


def _streamed(kernel: Kernel, wide: frozenset[str], machine: Machine) -> tuple[frozenset[str], tuple[Decision, ...]]:
    """Buffers to write past the caches: a plain store first reads the line it writes to, which wastes bandwidth.

    It pays when the kernel moves so much memory that little of a buffer would still be cached when it ends.
    """
    sizes = {param.name: param.numel.value for param in kernel.params}
    if any(size is None for size in sizes.values()):
        return frozenset(), ()
    moved = sum((sizes[param.name] or 0) * param.dtype.itemsize for param in kernel.params)
    if moved < 2 * machine.last_cache:
        return frozenset(), ()
    loaded = {load.buffer for _, load in kernel.loads()}
    large = {param.name for param in kernel.params if (sizes[param.name] or 0) * param.dtype.itemsize >= moved // 8}
    stored = {store.buffer for line, store in kernel.stores() if line.out in wide}
    scattered = {store.buffer for _, store in kernel.stores() if store.join or store.index.vals()}
    chosen = frozenset((stored & large) - loaded - scattered)
    why = "the kernel moves more than twice the size of the last cache, so its output is written past the caches"
    facts = (("moved_bytes", moved), ("cache_bytes", machine.last_cache))
    return chosen, tuple(Decision("codegen.stream", (kernel.name, name), True, why, facts) for name in sorted(chosen))
