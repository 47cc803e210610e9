"""Decomposes resizing of images (`interpolate`) and its gradients, one axis after the other.

PyTorch's decompositions gather the elements of a result along all axes at once, and their gradients scatter. Weights
are products of those along each axis: axis by axis, 2 K elements are read instead of K * K. Along the last axis of an
image that becomes n times as large, neighbours are adjacent and have the same weights for every n-th result.
In a gradient each element sums over the results near it, with weight 0 for those that do not read the element.

Both are decomposed after layouts are decided, as they depend on the layout of images; except gradients of symbolic
sizes, which are decomposed at capture, since PyTorch cannot compute their fake results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
import torch

from pellucid.capture.fx import computed
from pellucid.capture.torch_compat import (
    decomposition_table,
    is_known,
    is_symbolic,
    resized_shape,
    suggested_format,
)
from pellucid.capture.transform import decompose

aten = torch.ops.aten

_CUBIC = -0.75  # the coefficient of ATen's cubic convolution (Keys 1981)
_SLACK = 0.05
"""In results: ATen rounds the positions of results to float32."""
_REGISTER = 16
"""With this many adjacent channels, which fill a register, no axis is more expensive than another."""

Number = Any  # a tensor or a constant number


@dataclass(frozen=True, slots=True)
class _Interpolation:
    """How a result is computed from the elements of an axis around its position.

    first: the first of these elements, relative to the one below the position. weights: their weights, as a function of
    the distance from the element below to the position. below, above: the maximum distance of the results below and
    above an element that read it. clamped: positions before the first element are moved to it.
    """

    first: int
    weights: Callable[[Number], list[Number]]
    below: int
    above: int
    clamped: bool = False


def _cubic(share: Number) -> list[Number]:
    return [_far(share + 1), _near(share), _near(1 - share), _far(2 - share)]


def _near(distance: Number) -> Number:
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: Number) -> Number:
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


_NEAREST = _Interpolation(0, lambda share: [1], below=0, above=1)
_LINEAR = _Interpolation(0, lambda share: [1 - share, share], below=1, above=1, clamped=True)
_BICUBIC = _Interpolation(-1, _cubic, below=2, above=2)
_KINDS = {
    **{f"upsample_nearest{dims}d": _NEAREST for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": _NEAREST for dims in (1, 2, 3)},
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _LINEAR),
    "upsample_bicubic2d": _BICUBIC,
}


def resizes() -> dict[Any, Callable[..., Any]]:
    """Decompositions at capture: of gradients of symbolic sizes, and of `.vec`, the overload that `interpolate` calls.

    That of `.vec` calls the operator, undecomposed, if it has no gradient or one that is decomposed here, else
    PyTorch's decomposition.
    """
    table: dict[Any, Callable[..., Any]] = {}
    theirs = decomposition_table(tuple(_KINDS))
    for name, kind in _KINDS.items():
        operator, axes = getattr(aten, name), partial(_axes, kind, "exact" in name)
        table[_backward(name)] = _unless_known(_gradient(kind, axes))
        table[operator.vec] = _by_scales(operator.default, axes, theirs[operator.default])
    return table


def expand_resizes(graph: torch.fx.Graph) -> bool:
    """Decompose all resizes, once the layouts of their arguments are final; return whether there are any."""
    table = _expansions()
    resized = [node for node in graph.nodes if node.op == "call_function" and node.target in table]
    for node in resized:
        decompose(graph, node, table)
    return bool(resized)


@lru_cache(maxsize=1)
def _expansions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the operators and their gradients, and of operators in these that have no lowering rule."""
    table = decomposition_table((*_KINDS, "_unsafe_index", "rsub"))
    for name, kind in _KINDS.items():
        operator, axes = getattr(aten, name).default, partial(_axes, kind, "exact" in name)
        table[operator] = _resize(kind, axes, table[operator])
        table[_backward(name)] = _gradient(kind, axes)
    return table


def _backward(name: str) -> Any:
    """The operator that computes the gradients of the operator of this name."""
    return getattr(aten, f"{name}_backward").default


def _unless_known(gradient: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Apply the decomposition of a gradient only if a size is symbolic."""

    def decomposed(grad: torch.Tensor, after: Sequence[Any], before: Sequence[Any], *rest: Any) -> torch.Tensor:
        symbolic = any(map(is_symbolic, (*grad.shape, *before)))
        return gradient(grad, after, before, *rest) if symbolic else NotImplemented

    return decomposed


# ------------------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of `before` elements and `after` results: the position of result k is (k + shift) * step - drop."""

    before: Any
    after: Any
    step: float
    shift: float
    drop: float

    def positions(self, results: Number) -> Number:
        """The positions of the results of these indices, in elements."""
        return (results + self.shift) * self.step - self.drop

    @property
    def start(self) -> float:
        """The position of the first result."""
        return float(self.positions(0))

    @property
    def is_regular(self) -> bool:
        """Whether there are n results per element, or n elements per result, at the same relative positions."""
        more, less = self.more, self.less
        return abs(self.step * more - less) < 1e-9 and is_known(self.before * more == self.after * less)

    @property
    def more(self) -> int:
        """Results per element, if the axis is regular."""
        return max(round(1 / self.step), 1)

    @property
    def less(self) -> int:
        """Elements per result, if the axis is regular."""
        return max(round(self.step), 1)


Axes = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[_Axis]]
"""A function from sizes before and after and an operator's other arguments to its axes; none if not decomposed here."""


def _axes(
    kind: _Interpolation, exact: bool, before: Sequence[Any], after: Sequence[Any], rest: Sequence[Any]
) -> list[_Axis]:
    aligned, scales = (False, rest) if kind is _NEAREST else (rest[0], rest[1:])
    shift = 0.0 if aligned or (kind is _NEAREST and not exact) else 0.5
    scales = [*scales, *[None] * (len(before) - len(scales))]
    axes = [
        _Axis(old, new, _step(old, new, aligned, scale), shift, 0.0 if kind is _NEAREST else shift)
        for old, new, scale in zip(before, after, scales, strict=True)
    ]
    return axes if all(_is_supported(kind, axis) for axis in axes) else []


def _step(before: Any, after: Any, aligned: bool, scale: float | None) -> Any:
    """The step as in ATen. Any step is right for a single result, or for a single element."""
    if aligned and is_known(after == 1):
        return before
    if aligned:
        return 1 / after if is_known(before == 1) else (before - 1) / (after - 1)
    return 1 / scale if scale else before / after


def _is_supported(kind: _Interpolation, axis: _Axis) -> bool:
    if is_symbolic(axis.step) or axis.step <= 0:
        return False
    sizes_known = not is_symbolic(axis.before) and not is_symbolic(axis.after)
    return (sizes_known or axis.is_regular) and (kind is not _NEAREST or _is_exact(axis))


def _keeps_size(kind: _Interpolation, axis: _Axis) -> bool:
    """Whether an axis keeps its size: ATen then weights each element by one and, in addition, by zero."""
    return kind.clamped and is_known(axis.before == axis.after)


def _is_within(axis: _Axis) -> bool:
    """Whether all positions are within the elements: operators may be called with scales that do not match sizes."""
    return axis.is_regular or bool(axis.positions(axis.after - 1) < axis.before)


def _is_exact(axis: _Axis) -> bool:
    """Whether nearest elements are the same as in ATen, which computes positions in float32."""
    if not axis.is_regular or axis.more & (axis.more - 1) == 0:
        return True
    if is_symbolic(axis.after):
        return False
    results = np.arange(axis.after)
    found = axis.positions(results.astype(np.float32)).astype(np.int64)
    return np.array_equal(found, results // axis.more)


# -------------------------------------------------------------------------------------------------- operators


def _by_scales(operator: Any, axes: Axes, theirs: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The overload that `interpolate` calls, with sizes or with scales, the last of its arguments."""

    def call(x: torch.Tensor, sizes: Sequence[Any] | None, *rest: Any) -> torch.Tensor:
        *aligned, scales = rest
        after = resized_shape(x.shape, sizes, scales)
        given = *aligned, *(scales or [None] * len(after))
        whole = not x.is_floating_point() or axes(x.shape[2:], after, given)
        # Fake results of operators without elements fail.
        return (theirs if not whole or is_known(x.numel() == 0) else operator)(x, after, *given)

    return call


def _resize(kind: _Interpolation, axes: Axes, theirs: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The decomposition of an operator; theirs: PyTorch's, for other cases. ATen computes bytes differently."""

    def resize(x: torch.Tensor, after: Sequence[Any], *rest: Any) -> torch.Tensor:
        if kind is not _NEAREST and not x.is_floating_point():
            return NotImplemented
        found = axes(x.shape[2:], after, rest)
        if not found:
            return theirs(x, after, *rest)
        layout = suggested_format(x)
        if kind is not _BICUBIC and layout is not torch.contiguous_format and not is_known(x.shape[1] < _REGISTER):
            return _at_once(kind, x.to(computed(x.dtype)), found).to(x.dtype).contiguous(memory_format=layout)
        return _by_axes(x, layout, found, [axis.step < 1 for axis in found], partial(_resized, kind))

    return resize


def _gradient(kind: _Interpolation, axes: Axes) -> Callable[..., torch.Tensor]:
    """The decomposition of a gradient. ATen's of cubic weights is contiguous."""

    def gradient(grad: torch.Tensor, after: Sequence[Any], before: Sequence[Any], *rest: Any) -> torch.Tensor:
        found = axes(before[2:], after, rest)
        if not found or not all(map(_is_within, found)):
            return NotImplemented
        layout = torch.contiguous_format if kind is _BICUBIC else suggested_format(grad)
        return _by_axes(grad, layout, found, [axis.step > 1 for axis in found], partial(_summed, kind))

    return gradient


def _by_axes(
    x: torch.Tensor,
    layout: torch.memory_format,
    axes: list[_Axis],
    grow: list[bool],
    along: Callable[[torch.Tensor, int, _Axis], torch.Tensor],
) -> torch.Tensor:
    """`x` with `along` applied to each axis: first to those that shrink, and to the last one, whose neighbours are
    expensive to read, while there are few elements.
    """
    channels_last = suggested_format(x) is not torch.contiguous_format
    result = (x.movedim(1, -1) if channels_last else x).to(computed(x.dtype))
    order = sorted(range(len(axes)), key=lambda number: (grow[number], -number if grow[number] else number))
    for number in order:
        result = along(result, number + (1 if channels_last else 2), axes[number])
    return (result.movedim(-1, 1) if channels_last else result).to(x.dtype).clone(memory_format=layout)


def _at_once(kind: _Interpolation, x: torch.Tensor, axes: list[_Axis], *found: torch.Tensor) -> torch.Tensor:
    """Results along all axes. found: indices of elements along the first of them."""
    if len(found) == len(axes):
        return aten._unsafe_index(x, [None, None, *found])
    axis, behind = axes[len(found)], len(axes) - len(found) - 1
    taps = _taps(kind, axis, torch.arange(axis.after, device=x.device), x.dtype)
    return _sum(
        _weighted(_at_once(kind, x, axes, *found, index.view(-1, *[1] * behind)), weight, behind)
        for index, weight in taps
    )


def _resized(kind: _Interpolation, x: torch.Tensor, dim: int, axis: _Axis) -> torch.Tensor:
    """Results along one dimension."""
    behind = x.dim() - dim - 1
    if _keeps_size(kind, axis):
        return x + 0 * x
    if kind is _NEAREST and axis.is_regular and axis.more > 1:
        return x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], axis.more, *x.shape[dim + 1 :]).flatten(dim, dim + 1)
    if not axis.is_regular or (axis.more > 1 and behind):
        taps = _taps(kind, axis, torch.arange(axis.after, device=x.device), x.dtype)
        return _sum(_weighted(_select(x, dim, index), weight, behind) for index, weight in taps)
    if axis.more == 1:
        below = math.floor(axis.start)
        weights = enumerate(kind.weights(axis.start - below), below + kind.first)
        return _sum(_weighted(_neighbours(kind, x, dim, by, axis.less), weight) for by, weight in weights)
    position = axis.positions(torch.arange(axis.more, device=x.device).to(x.dtype))
    lowest = position.floor()
    parts = []
    for by, weight in enumerate(kind.weights(position - lowest), kind.first):
        lower, upper = (_neighbours(kind, x, dim, each).unsqueeze(-1) for each in (by - 1, by))
        parts.append(torch.where(lowest < 0, lower, upper) * weight)
    return _sum(parts).flatten(-2)


def _neighbours(kind: _Interpolation, x: torch.Tensor, dim: int, by: int, step: int = 1) -> torch.Tensor:
    """For every `step`-th element along a dimension: the one `by` later, or the outermost one."""
    if 0 <= by < step:
        return aten.slice(x, dim, by, None, step)
    size = x.shape[dim]
    outside = abs(by) if is_symbolic(size) else min(abs(by), size)
    edge = x.narrow(dim, size - 1 if by > 0 else 0, 1)
    if kind.clamped and by < 0:  # a result clamped to the first element weights the second one by zero
        edge = edge + 0 * x.narrow(dim, min(1, size - 1), 1)
    inside = x.narrow(dim, outside if by > 0 else 0, size - outside)
    parts = [inside, *[edge] * outside] if by > 0 else [*[edge] * outside, inside]
    return aten.slice(torch.cat(parts, dim), dim, 0, None, step)


def _summed(kind: _Interpolation, grad: torch.Tensor, dim: int, axis: _Axis) -> torch.Tensor:
    """The gradient of elements along one dimension, from the gradient of results."""
    if kind is _NEAREST and axis.is_regular and axis.more > 1:
        return grad.unflatten(dim, (axis.before, axis.more)).sum(dim + 1)
    if _keeps_size(kind, axis):
        return grad + 0 * grad
    element = torch.arange(axis.before, device=grad.device)
    lowest = ((element - kind.below - axis.start) / axis.step - _SLACK).ceil().clamp(min=0)
    # Results before the first element are clamped to it: there the first result is the lowest.
    lowest = torch.where(element <= kind.below, 0, lowest).to(torch.int64)
    many = math.floor((kind.below + kind.above + max(-axis.start, 0)) / axis.step + 2 * _SLACK) + 1
    results = lowest + torch.arange(many, device=grad.device).unsqueeze(1)
    there, results = results < axis.after, results.clamp(max=axis.after - 1)
    taps = [((index == element) & there, weight) for index, weight in _taps(kind, axis, results, grad.dtype)]
    hit = reduce(torch.logical_or, (hit for hit, _ in taps))
    weight = _sum(torch.where(hit, weight, 0) for hit, weight in taps).to(grad.dtype)
    hit, weight = (each.view(*results.shape, *[1] * (grad.dim() - dim - 1)) for each in (hit, weight))
    return torch.where(hit, _select(grad, dim, results) * weight, 0).sum(dim)


def _taps(
    kind: _Interpolation, axis: _Axis, results: torch.Tensor, dtype: torch.dtype
) -> list[tuple[torch.Tensor, Number]]:
    """The elements that the results of these indices are computed from: their indices, and their weights."""
    if _keeps_size(kind, axis):
        return [(results, 1), (results, 0)]
    position = axis.positions(results.to(torch.float32 if kind is _NEAREST else dtype))
    if kind.clamped:
        position = position.clamp(min=0)
    lowest = position.floor().clamp(max=axis.before - 1)
    weights = enumerate(kind.weights((position - lowest).clamp(0, 1)), kind.first)
    return [((lowest.to(torch.int64) + by).clamp(0, axis.before - 1), weight) for by, weight in weights]


def _weighted(x: torch.Tensor, weight: Number, behind: int = 0) -> torch.Tensor:
    """`x` times weights along the dimension that has `behind` dimensions after it."""
    if isinstance(weight, torch.Tensor):
        return x * weight.view(-1, *[1] * behind)
    return x if weight == 1 else x * weight


def _select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The elements of these indices along a dimension, which is replaced by the dimensions of `index`."""
    return aten._unsafe_index(x, [*[None] * dim, index])


def _sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, parts)
