"""Is it worth computing a value again instead of loading it? A rule of thumb in bytes moved."""

from __future__ import annotations

from pellucid.ir.decision import Fact
from pellucid.ir.index import total
from pellucid.ir.nodes import Kernel, Load, axes_of
from pellucid.ir.ops import EXPENSIVE
from pellucid.schedule.cost import estimate, evaluations, op_cost, touched_bytes
from pellucid.schedule.graph import FusionGraph, Group
from pellucid.schedule.inline import Inlined, Recipe, loads_of

# What things cost, in bytes moved from memory: an operator at one point, a stored byte (its cache line is fetched
# before it is written back), and the start of one more kernel.
OPS_PER_BYTE = 2
_STORE_WEIGHT = 2
KERNEL_BYTES = 65536

_MOST_LINES = 64
_MOST_READERS = 16


def is_trivial(recipe: Recipe) -> bool:
    """True for constants, positions and masks made from them: cheaper to make than to load, wherever."""
    return recipe.is_constant and sum(op_cost(line.rhs) for line in recipe.lines) < EXPENSIVE


def inlining_costs(
    graph: FusionGraph, recipe: Recipe, producer: Group, consumer: Group, inlined: Inlined
) -> tuple[bool, tuple[tuple[str, Fact], ...]]:
    """Whether inlining pays, and the numbers: bytes that are saved, and what computing again costs in bytes."""
    gain = _bytes_saved(graph, recipe, producer, consumer)
    work, expensive = _work(inlined)
    price = work // OPS_PER_BYTE + _bytes_added(consumer.kernel, inlined)
    again = expensive and work > KERNEL_BYTES
    pays = price <= gain and len(recipe.lines) <= _MOST_LINES and not again
    return pays, (("bytes_saved", gain), ("bytes_spent", price), ("lines", len(recipe.lines)))


def _bytes_saved(graph: FusionGraph, recipe: Recipe, producer: Group, consumer: Group) -> int:
    """The consumer's loads; if all readers may follow suit, also its share of the store and of what makes it."""
    buffer = recipe.store.buffer
    param = next(param for param in consumer.kernel.params if param.name == buffer)
    ranges = consumer.kernel.ranges
    indices = {load.index for _, load in consumer.kernel.loads() if load.buffer == buffer}
    saved = sum(estimate(touched_bytes(index, param, ranges)) for index in indices)
    readers = graph.readers[buffer]
    if _may_vanish(graph, buffer):
        vanishing = estimate(param.numel) * param.dtype.itemsize * _STORE_WEIGHT
        if sum(1 for _ in producer.kernel.stores()) == 1:
            sizes = {param.name: param for param in recipe.kernel.params}
            ranges = recipe.kernel.ranges
            loads = {(load.buffer, load.index) for load in loads_of(recipe.lines)}
            loaded = total(touched_bytes(index, sizes[name], ranges) for name, index in loads)
            vanishing += estimate(loaded) + KERNEL_BYTES
        saved += vanishing // len(readers)
    return saved


def _may_vanish(graph: FusionGraph, buffer: str) -> bool:
    """True if nobody would miss `buffer` should all its readers inline it; a share among many is nothing."""
    readers = graph.readers[buffer]
    few = graph.buffers[buffer].role == "temp" and len(readers) <= _MOST_READERS
    return few and all(isinstance(reader.node, Kernel) for reader in readers)


def _work(inlined: Inlined) -> tuple[int, bool]:
    """Instructions of the copied lines over all points, and whether an expensive one is among them."""
    scopes = axes_of(inlined.kernel)
    work, expensive = 0, False
    for line in inlined.kernel.body:
        cost = op_cost(line.rhs) if line.out in inlined.copied else 0
        if cost:
            work += cost * estimate(evaluations(scopes[line.out], inlined.kernel.space))
            expensive |= cost >= EXPENSIVE
    return work, expensive


def _bytes_added(before: Kernel, inlined: Inlined) -> int:
    """Bytes of the copied loads that the consumer did not do anyway."""
    known = {(load.buffer, load.index) for _, load in before.loads()}
    params = {param.name: param for param in inlined.kernel.params}
    added = {
        (line.rhs.buffer, line.rhs.index)
        for line in inlined.kernel.body
        if line.out in inlined.copied and isinstance(line.rhs, Load)
    }
    ranges = inlined.kernel.ranges
    return sum(estimate(touched_bytes(index, params[name], ranges)) for name, index in added - known)
