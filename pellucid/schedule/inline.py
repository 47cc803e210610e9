"""Inlining: a consumer recomputes what a producer stores, instead of loading it.

This is for producers that cannot share the consumer's points: constants, small tensors that are broadcast, parts of
a tensor, and cheap values with several consumers. The results of reductions are loaded: a consumer of few elements
of a softmax computes them from the maximum and sum of their rows, and the softmax need not be in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.index import Expr, FloorDiv, Mod, in_range, nonnegative, product, total
from pellucid.ir.nodes import Buffer, CheckIndex, Compute, Kernel, Line, Load, Param, Reduce, Store, axes_of, operands
from pellucid.ir.types import DType
from pellucid.machine.work import estimate
from pellucid.schedule.fusion_graph import FusionGraph, Group
from pellucid.schedule.match_axes import Mismatch
from pellucid.schedule.merge import forward
from pellucid.schedule.normalize import split_axes
from pellucid.schedule.rewrite import Rewrite, indices, make_kernel, row_major, unique_name
from pellucid.schedule.solve import solve

_INTEGER_DIVISION = frozenset(("floordiv", "truncdiv", "remainder", "fmod"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a producer computes the elements of a buffer: the lines up to the stored value, and the store."""

    kernel: Kernel
    lines: tuple[Line, ...]
    store: Store

    @property
    def is_constant(self) -> bool:
        """True if it reads no memory."""
        return not any(isinstance(line.rhs, Load) for line in self.lines)


@dataclass(frozen=True, slots=True)
class Inlined:
    """A consumer that recomputes what it loaded before, and the names of the copied lines."""

    kernel: Kernel
    copied: frozenset[str]


def recipe_of(producer: Kernel, buffer: str) -> Recipe | Mismatch:
    """The recipe of `buffer`, if a point of the producer depends on other points only through stored results."""
    store, *others = (store for _, store in producer.stores() if store.buffer == buffer)
    if others:
        return Mismatch("several-stores", f"{len(others) + 1} lines store parts of {buffer}, each computed differently")
    needed = {store.arg}
    stored = _stored_totals(producer, buffer)
    lines: list[Line] = []
    for line in reversed(producer.body):
        if line.out in needed and not isinstance(line.rhs, Store):
            line = replace(line, rhs=stored.get(line.out, line.rhs))
            if isinstance(line.rhs, Reduce):
                return Mismatch("reduction-axes", f"{buffer} depends on a reduction, which each reader would repeat")
            needed.update(operands(line.rhs))
            lines.append(line)
    return Recipe(producer, tuple(reversed(lines)), store)


def _stored_totals(kernel: Kernel, buffer: str) -> dict[str, Load]:
    """Values that depend on reductions, do not vary along the reduced axes, and are stored in addition to `buffer`.

    Of buffers with the same value the later ones load the first, never the reverse, so that recipes are not cyclic.
    """
    scopes, totals = axes_of(kernel), set[str]()
    for line in kernel.body:
        if isinstance(line.rhs, Reduce) or not totals.isdisjoint(operands(line.rhs)):
            totals.add(line.out)
    types = {param.name: param.dtype for param in kernel.params}
    found: dict[str, Load] = {}
    own: set[str] = set()
    for line, store in kernel.stores():
        if store.buffer == buffer:
            own.add(store.arg)
        same = scopes[store.arg].isdisjoint(kernel.reduced) and types[store.buffer] is line.dtype
        if store.arg not in own and store.arg in totals and same and not store.join:
            found.setdefault(store.arg, Load(store.buffer, store.index))
    return found


def with_totals(kernel: Kernel, buffer: str, taken: set[str]) -> tuple[Kernel, tuple[Buffer, ...]]:
    """The kernel with stores of the reductions that the recipe of `buffer` needs, and the new buffers.

    Before: `max`, `exp`, `sum`, `store y`. After: also `store y_max[i0]` and `store y_sum[i0]`.
    """
    scopes, stored = axes_of(kernel), _stored_totals(kernel, buffer)
    needed = {store.arg for _, store in kernel.stores() if store.buffer == buffer}
    made: dict[str, Buffer] = {}
    for line in reversed(kernel.body):
        if line.out in needed and line.out not in stored and not isinstance(line.rhs, Store):
            if isinstance(line.rhs, Reduce):
                size = product(axis.extent for axis in kernel.space if axis.name in scopes[line.out])
                made[line.out] = Buffer(unique_name(f"{buffer}_{line.rhs.op}", taken), line.dtype, size, "temp")
            else:
                needed.update(operands(line.rhs))
    body: list[Line] = []
    for line in kernel.body:
        body.append(line)
        if line.out in made:
            index = row_major(axis for axis in kernel.space if axis.name in scopes[line.out])
            store = Store(made[line.out].name, index, line.out)
            body.append(Line(f"{line.out}.store", store, line.dtype, line.origin.step("fuse")))
    params = {param.name: param for param in kernel.params}
    params |= {each.name: Param(each.name, each.dtype, each.numel) for each in made.values()}
    return make_kernel(kernel.name, kernel.space, body, params), tuple(made.values())


def follows_totals(kernel: Kernel, buffer: str) -> bool:
    """Whether the value stored in `buffer` varies along reduced axes, so that it has more elements than the reductions.

    False for attention, which runs as a whole.
    """
    scopes = axes_of(kernel)
    stored = [scopes[store.arg] for _, store in kernel.stores() if store.buffer == buffer]
    return not mixes_reduction_axes(kernel) and any(not scope.isdisjoint(kernel.reduced) for scope in stored)


def reads_few(consumer: Kernel, buffer: Buffer) -> bool:
    """Whether a kernel loads less than a quarter of the elements of a buffer."""
    scopes = axes_of(consumer)
    points = (
        product(axis.extent for axis in consumer.space if axis.name in scopes[line.out])
        for line, load in consumer.loads()
        if load.buffer == buffer.name
    )
    return 4 * estimate(total(points)) < estimate(buffer.numel)


def inline(graph: FusionGraph, recipe: Recipe, producer: Group, group: Group) -> Inlined | Mismatch:
    """The kernel of `group` with every load of the recipe's buffer replaced by a copy of its lines, from `producer`.

    Before: `load B[n + i]` where `B[j] = neg(load A[j])`. After: `neg(load A[n + i])`.
    """
    buffer, consumer = recipe.store.buffer, group.kernel
    if len(graph.writers[buffer]) > 1 or any(
        graph.is_changed(load.buffer, producer, group) for load in loads_of(recipe.lines)
    ):
        return Mismatch("mutation", "a buffer that it needs is overwritten later")
    numel = graph.buffers[buffer].numel
    copies: dict[str, list[Line]] = {}
    values: dict[str, Line] = {}
    known: dict[tuple[Expr, str | None], Line] = {}
    for line, load in consumer.loads():
        if load.buffer != buffer:
            continue
        if (load.index, load.mask) in known:
            values[line.out] = known[load.index, load.mask]
            continue
        if _may_fail(recipe.lines) and not _loads_everything(load, consumer, numel):
            return Mismatch("cost", "it may fail at points that the consumer does not read")
        point = solve(recipe.kernel, recipe.store.index, numel, consumer, load.index, load.mask)
        if isinstance(point, Mismatch):
            return point
        copies[line.out] = _copy(recipe, point, consumer, load.mask, graph.fresh())
        values[line.out] = known[load.index, load.mask] = copies[line.out][-1]
    params = {param.name: param for param in (*recipe.kernel.params, *consumer.params)}
    body = forward(consumer.body, values, copies)
    kernel = split_axes(make_kernel(consumer.name, consumer.space, body, params))
    if _divisions(kernel) > _divisions(consumer):
        return Mismatch(
            "different-loop-orders", f"computing the point that stores an element of {buffer} needs divisions"
        )
    return Inlined(kernel, frozenset(line.out for lines in copies.values() for line in lines))


def loads_of(lines: Iterable[Line]) -> list[Load]:
    """The loads among `lines`."""
    return [line.rhs for line in lines if isinstance(line.rhs, Load)]


def _divisions(kernel: Kernel) -> int:
    """How many divisions the index expressions of `kernel` need."""
    atoms = {atom for index in indices(kernel.body) for atom in index.atoms()}
    return sum(isinstance(atom, FloorDiv | Mod) for atom in atoms)


def _loads_everything(load: Load, consumer: Kernel, numel: Expr) -> bool:
    """Whether a load is unmasked and has at least as many points as its buffer has elements."""
    points = product(consumer.ranges[name] for name in load.index.vars())
    return load.mask is None and nonnegative(points - numel)


def _may_fail(lines: Iterable[Line]) -> bool:
    """True if a line traps or raises for some arguments."""
    for line in lines:
        match line.rhs:
            case CheckIndex():
                return True
            case Compute(op) if op in _INTEGER_DIVISION and not line.dtype.is_float:
                return True
            case _:
                pass
    return False


def _copy(recipe: Recipe, point: Mapping[str, Expr], consumer: Kernel, mask: str | None, number: int) -> list[Line]:
    """The lines of the recipe at another point, under new names; the stored value comes last.

    Where the consumer's load is masked, the point may not exist: the copied loads are masked too, unless their element
    always exists (a parameter per channel, under a mask that depends on the row).
    """
    numel = {param.name: param.numel for param in recipe.kernel.params}
    names = {line.out: f"copy{number}:v{position}" for position, line in enumerate(recipe.lines)}
    lines: list[Line] = []
    for line in Rewrite(names, point, {}, consumer.ranges).lines(recipe.lines):
        line = replace(line, origin=line.origin.step("fuse"))
        if mask is not None and isinstance(line.rhs, Load):
            both = mask
            if line.rhs.mask is None and in_range(line.rhs.index, numel[line.rhs.buffer], consumer.ranges):
                lines.append(line)
                continue
            if line.rhs.mask is not None:
                both = f"{line.out}.mask"
                rhs = Compute("bitwise_and", (mask, line.rhs.mask))
                lines.append(replace(line, out=both, rhs=rhs, dtype=DType.BOOL))
            line = replace(line, rhs=replace(line.rhs, mask=both))
        lines.append(line)
    return lines
