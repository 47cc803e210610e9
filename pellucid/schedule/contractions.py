"""Rules for fusion with contractions: only an epilogue on the result may be fused; with attention, nothing.

A contraction is computed once, in blocks of rows and columns. Lines over rows and columns can use the sum of each point
there; a line over the summed axis would have no loop.
"""

from __future__ import annotations

from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.contraction import Contraction, find_contraction, find_groups
from pellucid.ir.index import ONE, product
from pellucid.ir.nodes import Kernel
from pellucid.ir.prefix import find_prefix
from pellucid.machine.kernels import FEW_ROWS, SAME_SET
from pellucid.machine.work import estimate
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.match_axes import Mismatch

# Minimum columns of a block along one axis, or all columns if these are fewer.
_MIN_COLUMNS = 32
_FEW_SETS = 4
"""Sets of the first cache that are too few to hold the lines of all columns of a block."""


def check_neighbours(first: Kernel, second: Kernel) -> Mismatch | None:
    """Refuse merges that put work before a contraction or next to it, and all merges with attention."""
    for kernel in (first, second):
        if mixes_reduction_axes(kernel):
            return Mismatch("attention", f"{kernel.name} is an attention, which runs as a whole")
    if find_contraction(second) is not None:
        return Mismatch("contraction", f"{second.name} is a product of matrices, which reads its operands from memory")
    if find_contraction(first) is None:
        return None
    stored = {store.buffer for _, store in first.stores()}
    if stored.isdisjoint(load.buffer for _, load in second.loads()):
        return Mismatch("contraction", f"{first.name} multiplies matrices: only its consumers may share its loops")
    return None


def check_epilogue(first: Kernel, kernel: Kernel) -> Mismatch | None:
    """Refuse a `kernel`, merged from the contraction `first` and a consumer, that has no large blocks any more."""
    before = find_contraction(first)
    if before is None:
        return None
    refused = _check_blocks(first, before, kernel)
    return refused and _check_blocks(first, before, canonical_kernel(kernel))  # with longer axes, but expensive


def check_prefix(first: Kernel, second: Kernel, kernel: Kernel) -> Mismatch | None:
    """Refuse a `kernel` that is no prefix sum although one of its parts is: it would add all terms for each point."""
    if find_prefix(kernel) is not None:
        return None
    found = next((each for each in (first, second) if find_prefix(each) is not None), None)
    return found and Mismatch("prefix", f"{found.name} is a prefix sum, and would add all terms for each point")


def _check_blocks(first: Kernel, before: Contraction, kernel: Kernel) -> Mismatch | None:
    after = find_contraction(kernel)
    if after is None:
        return Mismatch("contraction", "a part would run over more axes than rows and columns of the product")
    if find_groups(first, before) and not find_groups(kernel, after):
        return Mismatch("contraction", "outputs of several groups would no longer be contiguous in memory")
    extents = [kernel.ranges[name] for name in after.columns]
    longest = max(map(estimate, extents), default=1)
    if longest < min(estimate(product(extents)), _MIN_COLUMNS):
        return Mismatch("contraction", f"blocks of {longest} columns would be too small")
    return _check_sets(first, kernel, after)


def _check_sets(first: Kernel, kernel: Kernel, found: Contraction) -> Mismatch | None:
    """Refuse buffers whose columns map to few sets of the first cache: a separate kernel accesses them in tiles.

    Stores that are contiguous along rows are exempt: the epilogue of a block is then vectorized along rows.
    """
    if any(all(store.index.coefficient(row) == ONE for _, store in kernel.stores()) for row in found.rows):
        return None
    known = {param.name for param in first.params}
    ranges = kernel.ranges
    dtypes = {param.name: param.dtype for param in kernel.params}
    for access in (rhs for _, rhs in (*kernel.loads(), *kernel.stores()) if rhs.buffer not in known):
        steps = {name: access.index.coefficient(name) for name in found.columns}
        values = {name: step.value for name, step in steps.items() if step is not None and step.value}
        if not values:
            continue
        innermost, longest = min(values, key=values.__getitem__), max(values, key=lambda each: estimate(ranges[each]))
        short = estimate(ranges[innermost]) < min(_MIN_COLUMNS, estimate(ranges[longest]))
        name = longest if short else innermost  # the axis of columns within a block
        if values[name] * dtypes[access.buffer].itemsize % (SAME_SET // _FEW_SETS):
            continue
        if estimate(ranges[name]) > FEW_ROWS:
            return Mismatch("contraction", f"columns of {access.buffer} map to few sets of the first cache")
    return None


def check_operands(before: Kernel, after: Kernel) -> Mismatch | None:
    """Refuse to recompute operands: each element is read for many points."""
    if mixes_reduction_axes(before):
        return Mismatch("attention", f"{before.name} is an attention, which reads its operands from memory")
    one = find_contraction(before)
    if one is None:
        return None
    other = find_contraction(after)
    if other is not None and other.cast and not one.cast:  # integers that the kernel casts where it reads them
        return None
    if other is None or _operands(one) != _operands(other):
        return Mismatch("contraction", f"{before.name} is a product of matrices, which reads its operands from memory")
    return None


def casts_operand(kernel: Kernel) -> bool:
    """Whether a kernel is a product that casts an operand as it reads it, so that it reads fewer bytes."""
    found = find_contraction(kernel)
    return found is not None and found.cast is not None


def _operands(found: Contraction) -> frozenset[str]:
    return frozenset(load.buffer for load in found.loads)
