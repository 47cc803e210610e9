"""Merge two groups into one kernel if every rule allows it; the first refusal is returned."""

from __future__ import annotations

from collections.abc import Iterable

from pellucid.ir.decision import Decision, Fact
from pellucid.ir.index import ZERO, Expr, product
from pellucid.ir.nodes import Kernel, Load, Reduce, axes_of, operands
from pellucid.machine.work import estimate, estimated_bytes
from pellucid.options import Options
from pellucid.schedule.contractions import check_epilogue, check_neighbours, check_prefix
from pellucid.schedule.fusion_graph import FusionGraph, Group
from pellucid.schedule.match_axes import Anchor, Match, Mismatch, match_axes, same_order
from pellucid.schedule.merge import merge_kernels
from pellucid.schedule.worth import check_strides

_RULES = {
    "extern": "fuse.extern",
    "cycle": "fuse.cycle",
    "search-limit": "fuse.cycle",
    "size-limit": "fuse.size",
    "mutation": "fuse.mutation",
    "cost": "fuse.cost",
    "strided": "fuse.strided",
    "memory": "fuse.memory",
    "contraction": "fuse.contraction",
    "attention": "fuse.attention",
    "prefix": "fuse.prefix",
}

# A reduction is parallel along its kept axes. With fewer rows than `_FEW_ROWS`, each longer than `_LONG_ROW`, a sweep
# that needs the result would run on few threads, whereas a separate kernel can use all of them.
_FEW_ROWS = 16
_LONG_ROW = 32768

# A temporary of at least `_LARGE` bytes must not stay in memory until another one is computed if it has `_TIMES` as
# many bytes as what is computed from it.
_LARGE, _TIMES = 16 << 20, 4


def refusal(subject: tuple[str, str], mismatch: Mismatch, facts: tuple[tuple[str, Fact], ...] = ()) -> Decision:
    """The decision not to fuse."""
    rule = _RULES.get(mismatch.category, "fuse.axes")
    return Decision(rule, subject, False, mismatch.why, (("category", mismatch.category), *facts))


def merge_groups(graph: FusionGraph, one: Group, other: Group, options: Options) -> Group | Mismatch:
    """Merge two groups of `graph` if every rule agrees; the earlier one becomes the first part of the kernel."""
    first, second = (one.kernel, other.kernel) if one.rank < other.rank else (other.kernel, one.kernel)
    refused = check_count(graph, options) or _check_size(first, second, options) or _check_scatter(first, second)
    refused = refused or check_neighbours(first, second)
    if refused is not None:
        return refused
    joint = graph.joint(one, other)
    if isinstance(joint, Mismatch):
        return joint
    if any(axis.extent == ZERO for axis in (*first.space, *second.space)):
        return Mismatch("different-numel", "one of them has no points")
    match = _match(graph, first, second)
    if isinstance(match, Mismatch):
        return match
    if not (options.loop_orders or same_order(first, second, match)):
        return Mismatch("different-loop-orders", "their loops differ in order, and option loop_orders is off")
    dead = [buffer for buffer in joint.first.written if not graph.needed_outside(buffer, joint.first, joint.second)]
    kernel = merge_kernels(first, second, match, dead, graph.partitioned)
    if isinstance(kernel, Mismatch):
        return kernel
    refused = check_limits(kernel, options) or _check_parallel(kernel) or check_epilogue(first, kernel)
    refused = refused or check_prefix(first, second, kernel) or _check_memory(graph, first, second)
    refused = refused or check_strides(graph.machine, first, second, kernel)
    return refused or graph.merge(joint, kernel)


def check_count(graph: FusionGraph, options: Options) -> Mismatch | None:
    """Refuse to exceed the maximum number of fusions."""
    if graph.fusions >= options.max_fusions:
        return Mismatch("size-limit", f"{graph.fusions} fusions were made, which is the maximum")
    return None


def check_limits(kernel: Kernel, options: Options) -> Mismatch | None:
    """Refuse kernels above the limits of the options."""
    if len(kernel.body) > options.max_fused_lines:
        return Mismatch("size-limit", f"{len(kernel.body)} lines are more than {options.max_fused_lines}")
    if len(kernel.params) > options.max_fused_buffers:
        return Mismatch("size-limit", f"{len(kernel.params)} buffers are more than {options.max_fused_buffers}")
    return None


def _match(graph: FusionGraph, first: Kernel, second: Kernel) -> Match | Mismatch:
    """The common space, from the elements that the first stores and the second loads, or that both load."""
    stored = {store.buffer: store.index for _, store in first.stores()}
    loads = [load for _, load in second.loads()]
    anchors = [(stored[load.buffer], load.index) for load in loads if load.buffer in stored]
    if anchors:
        # The index with most axes determines most of the space.
        anchor = max(anchors, key=lambda anchor: len(anchor[0].vars()))
        if len(anchor[0].vars()) == len(first.space) and len(anchor[1].vars()) == len(second.space):
            return match_axes(first, second, [anchor])
        return match_axes(first, second, [anchor], _shared_loads(graph, first, loads))
    partial = _partial_stores(graph, first, second)
    shared = _shared_loads(graph, first, loads)
    return match_axes(first, second, partial, shared) if partial else match_axes(first, second, shared[:1], shared[1:])


def _partial_stores(graph: FusionGraph, first: Kernel, second: Kernel) -> list[Anchor]:
    """The indices at which both kernels store parts of one buffer, without their offsets."""
    stored = {store.buffer: store.index for _, store in first.stores() if store.buffer in graph.partitioned}
    both = [(stored[store.buffer], store.index) for _, store in second.stores() if store.buffer in stored]
    return [(one - one.at_zero, other - other.at_zero) for one, other in both[:1]]


def _shared_loads(graph: FusionGraph, first: Kernel, loads: Iterable[Load]) -> list[Anchor]:
    """The indices at which both kernels load the same buffer, for a few of the largest buffers."""
    loaded: dict[str, Expr] = {}
    for _, load in first.loads():
        loaded.setdefault(load.buffer, load.index)
    shared = [load for load in loads if load.buffer in loaded]
    shared.sort(key=lambda load: -estimate(graph.buffers[load.buffer].numel))
    return [(loaded[load.buffer], load.index) for load in shared[:4]]


def _check_size(first: Kernel, second: Kernel, options: Options) -> Mismatch | None:
    """Refuse early if the result is too large even without all loads and stores between the two."""
    vanishing = sum(1 for _ in first.stores()) + sum(1 for _ in second.loads())
    minimum = len(first.body) + len(second.body) - vanishing
    if minimum > options.max_fused_lines:
        return Mismatch("size-limit", f"{minimum} lines or more are more than {options.max_fused_lines}")
    return None


def _check_scatter(first: Kernel, second: Kernel) -> Mismatch | None:
    """Refuse to merge other work into a scatter, which is less parallel, and runs in order."""
    for kernel in (first, second):
        if any(store.join or store.index.vals() for _, store in kernel.stores()):
            return Mismatch("scatter", f"{kernel.name} adds to memory, or stores at indices that depend on values")
    return None


def _check_parallel(kernel: Kernel) -> Mismatch | None:
    """Refuse a second sweep over long rows if there are few rows to distribute over threads."""
    reduced = kernel.reduced
    if not reduced:
        return None
    ranges = kernel.ranges
    length = estimate(product(ranges[name] for name in reduced))
    rows = estimate(product(extent for name, extent in ranges.items() if name not in reduced))
    if rows >= _FEW_ROWS or length < _LONG_ROW or not _has_second_sweep(kernel):
        return None
    return Mismatch("cost", f"{rows} rows of {length} elements are too little parallel work for a second sweep")


def _check_memory(graph: FusionGraph, first: Kernel, second: Kernel) -> Mismatch | None:
    """Refuse to keep a large temporary, from which little is computed, in memory until another one is computed."""
    one, other = ({load.buffer for _, load in kernel.loads()} for kernel in (first, second))
    waiting = sum(_temporary(graph, name) for name in one - other)
    if not waiting or not any(_temporary(graph, name) for name in other - one):
        return None
    made = sum(estimated_bytes(graph.buffers[store.buffer]) for _, store in first.stores())
    if waiting < _TIMES * made:
        return None
    return Mismatch("memory", f"{waiting} bytes would stay in memory until other inputs of {second.name} exist")


def _temporary(graph: FusionGraph, name: str) -> int:
    """The bytes of a buffer if it is a large temporary, else 0."""
    buffer = graph.buffers[name]
    size = estimated_bytes(buffer)
    return size if size >= _LARGE and buffer.role == "temp" else 0


def _has_second_sweep(kernel: Kernel) -> bool:
    """True if some line runs over the reduced axes and needs the result of a reduction."""
    scopes, reduced = axes_of(kernel), frozenset(kernel.reduced)
    after: set[str] = set()
    for line in kernel.body:
        waits = not after.isdisjoint(operands(line.rhs))
        if waits and scopes[line.out] & reduced:
            return True
        if waits or isinstance(line.rhs, Reduce):
            after.add(line.out)
    return False
