"""Points whose results are never read are not computed.

A causal convolution pads a line at both ends, and a slice drops the surplus at one end; a language model computes the
scores of all tokens, and reads those of the last one:

    before: `y[i] = sum ... over k`  for i < 1026      `z[i] = relu y[i]`  for i < 1024
    after:  `y[i] = sum ... over k`  for i < 1024      `z[i] = relu y[i]`  for i < 1024

which now have the same points, and become one kernel. Kernels without a reduction, which may be inlined into their
readers (`inline.py`), are cut only if at most half of their points remain. The remaining part has a buffer of its own;
the buffer of the whole result is gone, as after fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import mul

from pellucid.ir.analysis import reads, writes
from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.decision import Decision
from pellucid.ir.index import (
    ONE,
    ZERO,
    Expr,
    FloorDiv,
    Mod,
    Var,
    bounds,
    floordiv,
    mod,
    nonnegative,
    product,
    total,
    var,
)
from pellucid.ir.nodes import Axis, Buffer, CheckIndex, Extern, Kernel, Line, Load, Param, Program, Store, View
from pellucid.machine.work import estimate
from pellucid.schedule.match_axes import Mismatch
from pellucid.schedule.rewrite import Rewrite, make_kernel, unique_name
from pellucid.schedule.solve import radix, solve


def cut_unread(program: Program) -> tuple[Program, list[Decision]]:
    """`program`, one kernel for each operator, each restricted to the points that are read."""
    whole = set(_read_whole(program))
    buffers = {buffer.name: buffer for buffer in program.buffers}
    nodes = {node.name: node for node in program.nodes}
    taken = {*program.symbols, *buffers, *nodes}
    readers: dict[str, list[str]] = {}
    decisions: list[Decision] = []
    for name in reversed(nodes):
        node = nodes[name]
        if not isinstance(node, Kernel):
            continue
        store = _cuttable(node)
        if store is not None and store.buffer in readers and store.buffer not in whole:
            found = [each for each in (nodes[reader] for reader in readers[store.buffer]) if isinstance(each, Kernel)]
            cut = _cut(node, store, buffers[store.buffer], found)
            if cut is not None:
                before = buffers.pop(store.buffer)
                made = Buffer(unique_name(f"{before.name}_part", taken), before.dtype, cut.numel, "temp")
                buffers[made.name] = made
                nodes |= {each.name: each for each in cut.kernels(node, store, found, made)}
                decisions += cut.decisions(node, store)
        for buffer in reads(nodes[name]):
            readers.setdefault(buffer, []).append(name)
    return replace(program, nodes=tuple(nodes.values()), buffers=tuple(buffers.values())), decisions[::-1]


def _read_whole(program: Program) -> Iterable[str]:
    """The buffers that calls and callers read, or that are written more than once."""
    yield from (buffer.name for buffer in program.buffers if buffer.role != "temp")
    yield from (view.buffer for view in program.outputs if isinstance(view, View))
    written = set[str]()
    for node in program.nodes:
        yield from reads(node) if isinstance(node, Extern) else ()
        yield from written.intersection(writes(node))
        written.update(writes(node))


def _cuttable(kernel: Kernel) -> Store | None:
    """The only store of a kernel whose points are independent and cannot fail; None for other kernels."""
    stores = [store for _, store in kernel.stores()]
    if len(stores) != 1 or mixes_reduction_axes(kernel):
        return None
    fails = any(isinstance(line.rhs, CheckIndex) for line in kernel.body)
    return None if fails or stores[0].join or stores[0].index.vals() else stores[0]


@dataclass(frozen=True, slots=True)
class _Part:
    """`count` points of an axis, from `first` on, with distance `step`."""

    first: Expr
    step: Expr
    count: Expr

    @property
    def last(self) -> Expr:
        return self.first + self.step * (self.count - 1)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a buffer that is read. parts: by axis of the kernel that stores it, the innermost in memory first.

    extents, weights: of these axes, before the cut. points: by load of a reader, the element that it loads, as
    coordinates on these axes.
    """

    parts: Mapping[str, _Part]
    extents: Mapping[str, Expr]
    weights: Mapping[str, Expr]
    points: Mapping[tuple[str, Load], Mapping[str, Expr]]

    @property
    def numel(self) -> Expr:
        return product(part.count for part in self.parts.values())

    @property
    def strides(self) -> dict[str, Expr]:
        """The strides of the axes in a buffer that has only the parts."""
        counts = (part.count for part in self.parts.values())
        return dict(zip(self.parts, accumulate(counts, mul, initial=ONE), strict=False))

    def is_whole(self, axis: str) -> bool:
        return self.parts[axis] == _Part(ZERO, ONE, self.extents[axis])

    def offset(self, index: Expr, point: Mapping[str, Expr], ranges: Mapping[str, Expr]) -> Expr:
        """The new index of the element at `index`, whose coordinates are `point`.

        Neighbouring axes that are whole stay together if splitting the index between them would need divisions.
        """
        rest = index - total(self.weights[axis] * point[axis] for axis in self.parts if not self.is_whole(axis))
        offset, strides = ZERO, self.strides
        for whole, run in groupby(self.parts, key=self.is_whole):
            axes = list(run)
            if whole and any(isinstance(atom, FloorDiv | Mod) for axis in axes for atom in point[axis].atoms()):
                low, high = self.weights[axes[0]], self.weights[axes[-1]] * self.extents[axes[-1]]
                offset += strides[axes[0]] * mod(floordiv(rest, low, ranges), floordiv(high, low), ranges)
                continue
            for axis in axes:
                part = self.parts[axis]
                offset += strides[axis] * floordiv(point[axis] - part.first, part.step, ranges)
        return offset

    def kernels(self, kernel: Kernel, store: Store, readers: Iterable[Kernel], buffer: Buffer) -> Iterable[Kernel]:
        """The kernel, cut, and its readers, with a buffer that has only these parts."""
        param = Param(buffer.name, buffer.dtype, buffer.numel)
        counts = {axis: part.count for axis, part in self.parts.items()}
        space = [replace(axis, extent=counts.get(axis.name, axis.extent)) for axis in kernel.space]
        space = [axis for axis in space if axis.name not in counts or axis.extent != ONE]
        ranges = {axis.name: axis.extent for axis in space}
        counters = {axis: var(axis) if axis in ranges else ZERO for axis in self.parts}
        moved = {
            axis: part.step * counters[axis] + part.first
            for axis, part in self.parts.items()
            if axis not in ranges or not self.is_whole(axis)
        }
        index = total(stride * counters[axis] for axis, stride in self.strides.items())
        lines = [
            replace(line, rhs=replace(line.rhs, buffer=buffer.name, index=index)) if line.rhs == store else new
            for line, new in zip(kernel.body, Rewrite(axes=moved, ranges=ranges).lines(kernel.body), strict=True)
        ]
        yield _made(kernel, space, lines, param)
        for reader in readers:
            lines = [self._loaded(reader, line, buffer.name) for line in reader.body]
            yield _made(reader, reader.space, lines, param)

    def _loaded(self, reader: Kernel, line: Line, buffer: str) -> Line:
        if not isinstance(line.rhs, Load) or (reader.name, line.rhs) not in self.points:
            return line
        index = self.offset(line.rhs.index, self.points[reader.name, line.rhs], reader.ranges)
        return replace(line, rhs=replace(line.rhs, buffer=buffer, index=index))

    def decisions(self, kernel: Kernel, store: Store) -> Iterable[Decision]:
        for axis, part in self.parts.items():
            if self.is_whole(axis):
                continue
            every = "" if part.step == ONE else f"every {part.step} from "
            what = f"{part.first}" if part.count == ONE else f"{every}{part.first} to {part.last}"
            why = f"only {what} of {store.buffer} is read along {axis}: the rest is not computed"
            yield Decision("schedule.unread", (kernel.name, store.buffer), True, why)


def _made(kernel: Kernel, space: Iterable[Axis], lines: Iterable[Line], param: Param) -> Kernel:
    return make_kernel(kernel.name, space, lines, {each.name: each for each in (*kernel.params, param)})


def _cut(kernel: Kernel, store: Store, buffer: Buffer, readers: Sequence[Kernel]) -> _Cut | None:
    """The points of a kernel that its readers need; None if these are all, or unknown, or the cut does not pay."""
    digits = radix(kernel, store.index, buffer.numel)
    if digits is None:
        return None
    points: dict[tuple[str, Load], Mapping[str, Expr]] = {}
    parts: dict[str, _Part] = {}
    for reader in readers:
        for load in {load for _, load in reader.loads() if load.buffer == buffer.name}:
            point = _with_equal_strides(kernel, store, reader, load) or solve(
                kernel, store.index, buffer.numel, reader, load.index, load.mask
            )
            if isinstance(point, Mismatch):
                return None
            points[reader.name, load] = point
            for axis, _ in digits:
                extent = kernel.ranges[axis]
                part = _Part(ZERO, ONE, extent) if axis in kernel.reduced else _part(point[axis], reader.ranges, extent)
                parts[axis] = _joined(parts.get(axis, part), part, extent)
    needed, whole = product(part.count for part in parts.values()), product(kernel.ranges[axis] for axis in parts)
    if needed == whole or (not kernel.reduced and 2 * estimate(needed) > estimate(whole)):
        return None
    weights, extents = dict(digits), {axis: kernel.ranges[axis] for axis in parts}
    return _Cut(parts, extents, weights, points)


def _with_equal_strides(kernel: Kernel, store: Store, reader: Kernel, load: Load) -> dict[str, Expr] | None:
    """The axes of a kernel in terms of the axes of a reader whose index has the same strides, for any sizes."""
    point: dict[str, Expr] = {}
    for axis in store.index.vars():
        step = store.index.coefficient(axis)
        names = [name for name in load.index.vars() if load.index.coefficient(name) == step]
        if step is None or len(names) != 1 or not nonnegative(kernel.ranges[axis] - reader.ranges[names[0]]):
            return None
        point[axis] = var(names[0])
    form = store.index.substitute({Var(axis): position for axis, position in point.items()})
    return point if form == load.index else None


def _part(position: Expr, ranges: Mapping[str, Expr], extent: Expr) -> _Part:
    """The points of an axis that `position` visits; all if unknown: a masked position may be outside the axis."""
    low, high = bounds(position, ranges) or (ZERO, extent - 1)
    if not (nonnegative(low) and nonnegative(extent - 1 - high) and nonnegative(high - low)):
        return _Part(ZERO, ONE, extent)
    axes = [name for name in position.vars() if ranges[name] != ONE]
    step = position.coefficient(axes[0]) if len(axes) == 1 else None
    if step is not None and nonnegative(step - 1) and position == step * var(axes[0]) + low:
        return _Part(low, step, ranges[axes[0]])
    return _Part(low, ONE, high - low + 1)


def _joined(one: _Part, other: _Part, extent: Expr) -> _Part:
    """The smallest part of an axis that contains both; without steps unless they are equal."""
    if one == other:
        return one
    first = next((a.first for a, b in ((one, other), (other, one)) if nonnegative(b.first - a.first)), ZERO)
    last = next((a.last for a, b in ((one, other), (other, one)) if nonnegative(a.last - b.last)), extent - 1)
    return _Part(first, ONE, last - first + 1)
