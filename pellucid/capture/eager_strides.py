"""Decompositions whose results have eager's strides, where PyTorch's decomposition or fake result has others.

Each returns NotImplemented if strides are right already, as for the operator that it calls itself: that stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from pellucid.capture.torch_compat import (
    contiguous_strides,
    decomposition_table,
    elementwise_strides,
    suggested_format,
)

_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional")
_PADS = ("reflection_pad3d", "replication_pad3d")


def with_eagers_strides() -> dict[Any, Callable[..., Any]]:
    """The decompositions by operator."""
    aten = torch.ops.aten
    log_sigmoid, roll, fold = (decomposition_table([name]) for name in ("log_sigmoid_forward", "roll", "col2im"))
    return {
        **{norm: _first_in(suggested_format, made) for norm, made in decomposition_table(_NORMS).items()},
        **{pad: _padded(decomposition) for pad, decomposition in decomposition_table(_PADS).items()},
        aten.roll.default: _rolled(roll[aten.roll.default]),
        aten.log_sigmoid_forward.default: _first_in(_contiguous, log_sigmoid[aten.log_sigmoid_forward.default]),
        aten.col2im.default: _folded(fold[aten.col2im.default]),
        aten.as_strided_scatter.default: _scattered,
        aten.native_dropout_backward.default: _dropout_backward,
        aten.angle.default: _angle,
        aten.isin.Tensor_Tensor: _isin,
        aten.isin.Tensor_Scalar: _isin,
        aten.channel_shuffle.default: _channel_shuffle,
        aten.max_unpool2d.default: _max_unpool,
        aten.copysign.Tensor: _in_eagers_order(aten.copysign.Tensor),
        aten.floor_divide.default: _in_eagers_order(aten.floor_divide.default),
        aten.div.Tensor_mode: _in_eagers_order(aten.div.Tensor_mode),
    }


def _in_eagers_order(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`copysign` or integer division, with the dimension order of the first argument, as in eager mode.

    PyTorch's fake result of floats follows the second argument. So the second is copied to that order, inside a kernel;
    a zero-dim second one stays, as it takes no part in type promotion, and the first is permuted instead.
    """

    def call(x: Any, y: Any, **options: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            return NotImplemented
        shape = torch.broadcast_shapes(x.shape, y.shape)
        first, second = (tensor.expand(shape) if tensor.dim() else tensor for tensor in (x, y))
        strides = elementwise_strides(first, second)
        others = elementwise_strides(second, first) if y.dim() else contiguous_strides(shape)
        wanted = strides if y.shape == shape else contiguous_strides(shape)
        if _same_strides(shape, strides, others) and _same_strides(shape, strides, wanted):
            return NotImplemented
        if y.dim():
            laid_out = y.new_empty_strided(shape, strides, dtype=torch.result_type(x, y))
            return operator(x, torch.ops.aten.copy(laid_out, y), **options)
        order = sorted(range(x.dim()), key=lambda dim: strides[dim], reverse=True)
        return operator(x.permute(order), y, **options).permute([order.index(dim) for dim in range(x.dim())])

    return call


def _same_strides(shape: Sequence[Any], strides: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether strides are equal, except in dimensions of size 1."""
    return all(size == 1 or one == other for size, one, other in zip(shape, strides, others, strict=True))


def _angle(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, for complex numbers."""
    return torch.angle(x.contiguous()) if x.is_complex() and not x.is_contiguous() else NotImplemented


def _isin(elements: torch.Tensor, wanted: Any, **options: Any) -> torch.Tensor:
    """Contiguous."""
    return NotImplemented if elements.is_contiguous() else torch.isin(elements.contiguous(), wanted, **options)


def _channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Channels-last where its argument is."""
    shuffled = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return shuffled.contiguous(memory_format=suggested_format(x))


def _max_unpool(x: torch.Tensor, indices: torch.Tensor, size: Any) -> torch.Tensor:
    """Channels-last where its argument is."""
    layout = suggested_format(x)
    if layout is torch.contiguous_format:
        return NotImplemented
    unpooled = torch.ops.aten.max_unpool2d(x.contiguous(), indices.contiguous(), size)
    return unpooled.contiguous(memory_format=layout)


def _first_in(
    layout: Callable[[torch.Tensor], torch.memory_format], decomposition: Callable[..., Any]
) -> Callable[..., Any]:
    """A decomposition whose first result gets the layout that eager's has, which depends on the argument's.

    For a normalisation that is contiguous or channels-last, also where the argument's dimensions are permuted.
    """

    def call(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        first, *more = decomposition(x, *args)
        return first.contiguous(memory_format=layout(x)), *more

    return call


def _contiguous(_x: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """With the layout of the gradient, as in eager mode; PyTorch's decomposition makes it contiguous."""
    return grad * (mask.type_as(grad) * scale)


def _padded(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A padding that keeps volumes channels-last, as eager's does. PyTorch's fake result of the operator does not."""

    def pad(x: torch.Tensor, padding: Any) -> torch.Tensor:
        return NotImplemented if suggested_format(x) is torch.contiguous_format else decomposition(x, padding)

    return pad


def _folded(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`fold` with a contiguous result, where PyTorch's is a slice of a padded image."""

    def fold(*args: Any) -> torch.Tensor:
        made = decomposition(*args)
        empty = any(isinstance(size, int) and size == 0 for size in made.shape)
        return made.new_empty(made.shape) if empty else made.contiguous()

    return fold


def _scattered(x: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> torch.Tensor:
    """`as_strided_scatter` of an expanded tensor scatters into a dense copy of it, as eager does.

    PyTorch's fake result is expanded too.
    """
    expanded = any(
        type(step) is int and step == 0 and extent != 1 for step, extent in zip(x.stride(), x.shape, strict=True)
    )
    return torch.as_strided_scatter(x.clone(), src, size, stride, offset) if expanded else NotImplemented


def _rolled(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """`roll` as a concatenation of the end and the beginning of each row: two contiguous loads; PyTorch gathers.

    Eager does the same, so strides are eager's. PyTorch's decomposition is used for symbolic sizes or shifts, whose
    slices would need guards, and for its special cases. It is contiguous; eager's result is channels-last where its
    argument is, except where a shift is a multiple of the size, which is not worth a guard.
    """

    def roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
        static = all(type(size) is int for size in (*x.shape, *shifts)) and x.numel() > 0
        if dims and static and len(shifts) == len(dims):
            return reduce(_rolled_once, zip(shifts, dims, strict=True), x)
        result = decomposition(x, shifts, dims)
        return result.contiguous(memory_format=suggested_format(x)) if dims else result

    return roll


def _rolled_once(x: torch.Tensor, turn: tuple[int, int]) -> torch.Tensor:
    shift, dim = turn
    size = x.shape[dim]
    start = -shift % size
    return torch.cat((x.narrow(dim, start, size - start), x.narrow(dim, 0, start)), dim)
