"""Lowers pooling: one kernel over the results, with the elements of a window unrolled.

Backward, one kernel over the inputs: each element gathers from the few windows that contain it, so nothing is scattered
and threads can divide the work freely.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch

from pellucid.capture.fx import shape_of
from pellucid.ir.index import Expr, const, exact_div, floordiv, product, total
from pellucid.ir.types import DType
from pellucid.lower.extern import extern_call
from pellucid.lower.kernel_builder import KernelBuilder, Value, both
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments, op_name
from pellucid.lower.registry import NotLowered, rule

Coordinates: TypeAlias = tuple[Expr, ...]

# Windows of more elements than this would make an unrolled kernel too long.
_WINDOW = 32


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a pooling operator over its last dimensions, one number per dimension.

    shape, out: extents of the input and of the result in these dimensions.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    shape: tuple[Expr, ...]
    out: tuple[Expr, ...]

    @property
    def rank(self) -> int:
        return len(self.size)

    def position(self, dim: int, window: Expr, element: int) -> Expr:
        """The position in the input of a window's element; outside of the input if it is padding."""
        return window * self.stride[dim] + (element * self.dilation[dim] - self.padding[dim])

    def elements(self, kernel: KernelBuilder) -> Iterator[tuple[tuple[int, ...], tuple[Expr, ...], Value | None]]:
        """(index in each dimension, coordinates, whether it is inside) of each element of a kernel point's window."""
        windows = kernel.index[-self.rank :]
        for element in itertools.product(*map(range, self.size)):
            place = tuple(self.position(d, windows[d], element[d]) for d in range(self.rank))
            yield element, (*kernel.index[: -self.rank], *place), kernel.within(place, self.shape)

    def containing(self, kernel: KernelBuilder, at: Sequence[Expr]) -> Iterator[tuple[tuple[Expr, ...], Value | None]]:
        """(window, the condition that it exists) for all windows that can contain the input element `at`."""
        reach = [self.dilation[d] * (self.size[d] - 1) for d in range(self.rank)]
        counts = [reach[d] // self.stride[d] + 1 for d in range(self.rank)]
        for back in itertools.product(*map(range, counts)):
            masks: list[Value | None] = []
            windows: list[Expr] = []
            for d in range(self.rank):
                window = floordiv(at[d] + self.padding[d], self.stride[d], kernel.ranges) - back[d]
                gap = at[d] + self.padding[d] - window * self.stride[d]
                if gap.value is not None and gap.value > reach[d]:
                    break
                if gap.value is None and (back[d] + 1) * self.stride[d] > reach[d] + 1:
                    masks.append(kernel.position(gap) <= reach[d])
                masks.append(kernel.within([window], [self.out[d]]))
                windows.append(window)
            else:
                yield tuple(windows), both(masks)

    def blocks(self) -> tuple[int, ...]:
        """The block of neighbours that one point of a backward kernel computes: they share the windows around them."""
        divides = (exact_div(n, const(s)) is not None for n, s in zip(self.shape, self.stride, strict=True))
        return tuple(s if whole else 1 for s, whole in zip(self.stride, divides, strict=True))


def _windows(given: Any, x: TensorRef, out: Sequence[Expr], rank: int) -> _Windows:
    def numbers(value: Any, default: Any = None) -> tuple[int, ...]:
        value = value if value else default
        value = tuple(value) * rank if len(value) == 1 else tuple(value)
        if any(isinstance(number, Expr) for number in value):
            raise NotLowered("windows of dynamic size")
        return value

    size = numbers(given["kernel_size"])
    if math.prod(size) > _WINDOW:
        raise NotLowered(f"windows of {math.prod(size)} elements are too large to unroll")
    stride, padding = numbers(given["stride"], size), numbers(given["padding"])
    dilation = numbers(given.get("dilation"), (1,))
    return _Windows(size, stride, padding, dilation, x.shape[-rank:], tuple(out[-rank:]))


def _lowest(dtype: DType) -> float:
    if dtype.is_float:
        return -math.inf
    return 0 if dtype in (DType.U8, DType.BOOL) else -(1 << (8 * dtype.itemsize - 1))


@rule("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """(maximum of each window, its position in the flattened spatial dimensions); NaN counts as the maximum."""
    given = arguments(node, graph)
    x: TensorRef = given["self"]
    metas = node.meta["val"]
    windows = _windows(given, x, shape_of(metas[0]), _rank(node))
    if 1 not in extern_call(node).used:
        values = graph.new(metas[0], op_name(node))
        kernel = graph.kernel(node, values.shape)
        elements = [
            kernel.load(x.view, x.dtype, index, mask, _lowest(x.dtype)) for _, index, mask in windows.elements(kernel)
        ]
        kernel.store(values.view, values.dtype, kernel.index, reduce(lambda a, b: a.op("maximum", b), elements))
        graph.emit(kernel)
        return values, None
    if any(p and d > 1 for p, d in zip(windows.padding, windows.dilation, strict=True)):
        raise NotLowered("positions of the maxima in dilated windows that begin in the padding")
    values, positions = (graph.new(meta, op_name(node)) for meta in metas)
    kernel = graph.kernel(node, values.shape)
    best, place = _best(kernel, x, windows)
    kernel.store(values.view, values.dtype, kernel.index, best)
    kernel.store(positions.view, positions.dtype, kernel.index, place)
    graph.emit(kernel)
    return values, positions


def _best(kernel: KernelBuilder, x: TensorRef, windows: _Windows) -> tuple[Value, Value]:
    """The first maximum of a window (the last NaN, if there is one), and its flattened position.

    Positions are relative to the window's first element until the end. The maximum of a window of -inf alone is its
    first element inside the input.
    """
    strides = [product(windows.shape[d + 1 :]) for d in range(windows.rank)]
    plane = product(windows.shape).value
    counter = DType.I64 if plane is None or plane >= 1 << 31 else DType.I32
    starts = [windows.position(d, kernel.index[d - windows.rank], 0) for d in range(windows.rank)]
    skipped = kernel.const(0, DType.I64)
    for start, stride, padding in zip(starts, strides, windows.padding, strict=True):
        if padding:
            skipped = skipped + kernel.position(-start).op("maximum", 0) * kernel.size_value(stride, DType.I64)
    offset, best = skipped.to(counter), None
    for element, index, mask in windows.elements(kernel):
        value = kernel.load(x.view, x.dtype, index, mask, _lowest(x.dtype))
        if best is None:
            best = value
            continue
        steps = total(stride * (e * d) for stride, e, d in zip(strides, element, windows.dilation, strict=True))
        better = value > best
        better = better | value.op("isnan") if value.dtype.is_float else better
        offset = kernel.where(better, kernel.size_value(steps, counter), offset)
        best = best.op("maximum", value)
    assert best is not None
    first = total(start * stride for start, stride in zip(starts, strides, strict=True))
    return best, kernel.position(first) + offset.to(DType.I64)


@rule("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def max_pool_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Each element of the input sums the gradients of the windows whose maximum it is."""
    given = arguments(node, graph)
    grad, x, positions = given["grad_output"], given["self"], given["indices"]
    windows = _windows(given, x, grad.shape, _rank(node))
    strides = [product(windows.shape[d + 1 :]) for d in range(windows.rank)]

    def share(kernel: KernelBuilder, lead: Coordinates, at: Coordinates) -> Iterator[Value]:
        here = kernel.position(total(i * n for i, n in zip(at, strides, strict=True)))
        for window, mask in windows.containing(kernel, at):
            place = kernel.load(positions.view, positions.dtype, (*lead, *window), mask, -1)
            value = kernel.load(grad.view, grad.dtype, (*lead, *window), mask)
            yield kernel.where(place.op("eq", here), value, 0)

    return _collect(graph, node, x, windows, share)


def _collect(
    graph: ProgramBuilder,
    node: torch.fx.Node,
    x: TensorRef,
    windows: _Windows,
    share: Callable[[KernelBuilder, Coordinates, Coordinates], Iterator[Value]],
) -> Result:
    """The gradient of `x`: for each element the sum of `share` for its leading and its spatial coordinates."""
    result = graph.new(node.meta["val"], op_name(node))
    blocks = windows.blocks()
    lead = x.shape[: -windows.rank]
    counts = (floordiv(n, b) for n, b in zip(windows.shape, blocks, strict=True))
    kernel = graph.kernel(node, (*lead, *counts))
    for inside in itertools.product(*map(range, blocks)):
        points = zip(kernel.index[len(lead) :], blocks, inside, strict=True)
        at = tuple(i * block + within for i, block, within in points)
        parts = list(share(kernel, kernel.index[: len(lead)], at))
        value = reduce(lambda a, b: a + b, parts) if parts else kernel.const(0, result.dtype)
        kernel.store(result.view, result.dtype, (*kernel.index[: len(lead)], *at), value)
    graph.emit(kernel)
    return result


# ------------------------------------------------------------------------------------------------ averages


@rule("avg_pool2d.default", "avg_pool3d.default")
def average_pool(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    x: TensorRef = given["self"]
    if not x.dtype.is_float:
        raise NotLowered(f"averages of {x.dtype!r}")
    result_shape = shape_of(node.meta["val"])
    windows = _windows(given, x, result_shape, _rank(node))
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, result.shape)
    elements = [kernel.load(x.view, x.dtype, index, mask) for _, index, mask in windows.elements(kernel)]
    divisor = _divisor(kernel, given, windows, kernel.index[-windows.rank :], elements[0].dtype)
    kernel.store(result.view, result.dtype, kernel.index, reduce(lambda a, b: a + b, elements) / divisor)
    graph.emit(kernel)
    return result


@rule("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def average_pool_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    given = arguments(node, graph)
    grad, x = given["grad_output"], given["self"]
    windows = _windows(given, x, grad.shape, _rank(node))

    def share(kernel: KernelBuilder, lead: Coordinates, at: Coordinates) -> Iterator[Value]:
        for window, mask in windows.containing(kernel, at):
            value = kernel.load(grad.view, grad.dtype, (*lead, *window), mask)
            part = value / _divisor(kernel, given, windows, window, value.dtype)
            yield part if mask is None else kernel.where(mask, part, 0)

    return _collect(graph, node, x, windows, share)


def _divisor(kernel: KernelBuilder, given: Any, windows: _Windows, window: Sequence[Expr], dtype: DType) -> Value:
    """The number of a window's elements in the input, and in the padding if `count_include_pad`."""
    if given["divisor_override"] is not None:
        return kernel.const(given["divisor_override"], dtype)
    counted = given["count_include_pad"]
    constant = math.prod(windows.size)
    variable: list[Value] = []
    for d in range(windows.rank):
        reach = windows.padding[d] if counted else 0
        low = windows.padding[d] - reach
        start = windows.position(d, window[d], 0)
        last = windows.position(d, windows.out[d] - 1, windows.size[d] - 1).value
        extent = windows.shape[d].value
        over = last is None or extent is None or last >= extent + reach
        if not low and not over:
            continue
        end = kernel.position(start + windows.size[d])
        if over:
            end = end.op("minimum", kernel.size_value(windows.shape[d] + reach, DType.I64))
        begin = kernel.position(start)
        begin = begin.op("maximum", 0) if low else begin
        constant //= windows.size[d]
        variable.append((end - begin).to(dtype))
    return reduce(lambda a, b: a * b, variable, kernel.const(constant, dtype))


@rule("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default")
def adaptive_average_pool(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Windows of one size that do not overlap: a sum over two more dimensions."""
    x: TensorRef = graph.value(node.args[0])
    rank = _rank(node)
    result_shape = shape_of(node.meta["val"])
    size = [exact_div(x.shape[d], result_shape[d]) for d in range(-rank, 0)]
    if not x.dtype.is_float or any(n is None for n in size):
        raise NotLowered("adaptive windows of several sizes")
    result = graph.new(node.meta["val"], op_name(node))
    known = [n for n in size if n is not None]
    kernel = graph.kernel(node, (*result.shape, *known))
    outer = kernel.index[: len(result.shape)]
    inner = kernel.index[len(result.shape) :]
    place = (i * n + k for i, n, k in zip(outer[-rank:], known, inner, strict=True))
    value = kernel.load(x.view, x.dtype, (*outer[:-rank], *place))
    dims = tuple(range(len(result.shape), len(result.shape) + rank))
    answer = kernel.reduce("sum", value, dims) / kernel.size_value(kernel.count(dims), value.dtype)
    kernel.store(result.view, result.dtype, outer, answer)
    graph.emit(kernel)
    return result


@rule("_adaptive_avg_pool2d_backward.default", "_adaptive_avg_pool3d_backward.default")
def adaptive_average_pool_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Where windows do not overlap, each element has the gradient of its window divided by the window's size."""
    grad, x = (graph.value(arg) for arg in node.args[:2])
    rank = _rank(node)
    size = [exact_div(x.shape[d], grad.shape[d]) for d in range(-rank, 0)]
    if any(n is None for n in size):
        raise NotLowered("adaptive windows of several sizes")
    known = [n for n in size if n is not None]
    result = graph.new(node.meta["val"], op_name(node))
    kernel = graph.kernel(node, x.shape)
    place = (floordiv(i, n, kernel.ranges) for i, n in zip(kernel.index[-rank:], known, strict=True))
    value = kernel.load(grad.view, grad.dtype, (*kernel.index[:-rank], *place))
    kernel.store(result.view, result.dtype, kernel.index, value / kernel.size_value(product(known), value.dtype))
    graph.emit(kernel)
    return result


def _rank(node: torch.fx.Node) -> int:
    return 3 if "3d" in op_name(node) else 2
