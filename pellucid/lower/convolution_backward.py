"""Lowers gradients of convolutions: those that are sums of products become kernels, oneDNN computes the others.

The gradient of the image is a convolution of the result's gradient; with strides above one, only for a single tap. The
gradient of the weight is, for each tap, a product of two matrices, summed over pixels. That of the bias is a sum over
pixels. For depthwise convolutions, both are sums for each channel; for several groups, the gradient of the weight is a
sum for each pair of channels of a group (that of the image: `capture/convolutions.py`). In bf16 and f16, kernels
compute these, and gradients of one tap, which are matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pellucid.ir.index import ONE, ZERO, Expr, const, floordiv, mod, nonnegative, product
from pellucid.ir.strides import is_dense
from pellucid.ir.types import DType
from pellucid.lower.contraction import DTYPES, check_rate
from pellucid.lower.convolution import FEW_TERMS, OFF, by_dimension, is_matrix
from pellucid.lower.extern import extern_call, lower_extern
from pellucid.lower.kernel_builder import KernelBuilder, Value, both
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_KIND = "gradients of convolutions that are transposed or not two-dimensional: oneDNN computes them"
_GROUPED = "gradient of an image of groups of several channels: oneDNN computes it"
_OTHER = "gradients of convolutions: kernels compute them in f32, bf16 and f16"
_TAPS = "gradients of convolutions: for several taps kernels compute them in f32 alone"
_PIXELS = "gradient of a weight: where pixels are not the rows of two matrices, kernels compute it in f32 alone"
_DYNAMIC = "gradients of convolutions: kernels have weights of known sizes, oneDNN computes others"
_SPREAD = "gradient of an image: where a window moves by more than a pixel, kernels have images of known sizes"
_PLANAR = "gradients of convolutions: channels are not adjacent in memory, oneDNN computes them"
_STRIDED = "gradient of an image: where a window moves by more than a pixel, oneDNN computes it"
_OUTSIDE = "gradient of an image: one tap with padding, oneDNN computes it"
_NARROW = "gradient of a weight: panels of few channels would be mostly empty, oneDNN computes it"
_WIDE = "gradient of a weight: of groups of many channels in bf16 oneDNN multiplies pairs, kernels do not"
_SMALL = "gradients of convolutions: with few terms or few sums, they are no matrix product worth a kernel"
_LONG = "gradient of a weight: few channels leave threads idle, oneDNN divides the pixels among threads"
# From this many channels of a group on, oneDNN is faster in bf16.
_MANY_CHANNELS = 48
# This many channels of an image fill half a panel.
_FEW_CHANNELS = 16
# Up to this many elements a weight is too small for several threads, which matters from this many pixels on.
_FEW_ELEMENTS = 1024
_MANY_PIXELS = 4096


@dataclass(frozen=True, slots=True)
class _Call:
    """The tensors of a call, and its steps (down, right)."""

    gradient: TensorRef
    image: TensorRef
    weight: TensorRef
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def depthwise(self) -> bool:
        return self.groups == self.image.shape[1].value == self.weight.shape[0].value != 1

    @property
    def one_tap(self) -> bool:
        return self.weight.shape[2:] == (ONE, ONE)

    @property
    def steps(self) -> bool:
        return self.stride != (1, 1)

    @property
    def narrow(self) -> bool:
        """Whether it is in bf16 or f16."""
        return self.gradient.dtype is not DType.F32

    @property
    def by_loops(self) -> bool:
        """Whether the image or the result has one channel: then sums over taps are loops over pixels."""
        several = not self.one_tap and self.pixels != ONE
        return several and self.groups == 1 and ONE in self.weight.shape[:2] and not self.narrow and not self.steps

    @property
    def pixels(self) -> Expr:
        """The number of pixels of the result."""
        return product((self.gradient.shape[0], *self.gradient.shape[2:]))

    def read_pixel(self, pixel: Sequence[Expr], tap: Sequence[Expr]) -> list[Expr]:
        """The pixel of the image that a tap reads for a pixel of the result."""
        moves = zip(pixel, tap, self.stride, self.padding, self.dilation, strict=True)
        return [at * stride + step * dilation - padding for at, step, stride, padding, dilation in moves]


@rule("convolution_backward.default")
def convolution_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The gradients of image, weight and bias that `output_mask` selects."""
    given = by_dimension(arguments(node, graph))
    call = _check(graph, given)
    wanted = given["output_mask"]
    results: list[TensorRef | None] = [None, None, None]
    refusal: NotLowered | None = None
    left_to_onednn = [False, False, False]
    gradients = (_of_image, _of_weight)
    if call.groups > 1:
        gradients = (_of_image_by_channel, _of_weight_by_channel if call.depthwise else _of_weight_by_group)
    for position, compute in enumerate(gradients):
        try:
            results[position] = compute(graph, node, call) if wanted[position] else None
        except NotLowered as error:
            refusal, left_to_onednn[position] = error, True
    if all(left_to_onednn[position] or not wanted[position] for position in (0, 1)) and refusal:
        raise refusal
    if wanted[2]:
        left_to_onednn[2] = left_to_onednn[1]  # the bias's is a by-product of the weight's
        results[2] = None if left_to_onednn[2] else _of_bias(graph, node, call)
    if refusal:
        whole = extern_call(node)
        used = frozenset(k for k in range(3) if left_to_onednn[k])
        part = replace(whole, args=(*whole.args[:-1], left_to_onednn), used=used)
        others = lower_extern(graph, part, str(refusal))
        assert isinstance(others, tuple)
        return tuple(mine or other for mine, other in zip(results, others, strict=True))
    return tuple(results)


def _check(graph: ProgramBuilder, given: Mapping[str, Any]) -> _Call:
    """The call, if kernels support some of its gradients; else raises `NotLowered`."""
    if not graph.contract:
        raise NotLowered(OFF)
    tensors = gradient, image, weight = tuple(given[name] for name in ("grad_output", "input", "weight"))
    if len(image.shape) != 4 or given["transposed"]:
        raise NotLowered(_KIND)
    if gradient.dtype not in DTYPES or len({each.dtype for each in tensors}) > 1:
        raise NotLowered(_OTHER)
    check_rate(graph, gradient.dtype, "gradients of convolutions")
    if any(extent.value is None for extent in weight.shape) or not isinstance(given["groups"], int):
        raise NotLowered(_DYNAMIC)
    stride, padding, dilation = (given[name] for name in ("stride", "padding", "dilation"))
    call = _Call(gradient, image, weight, stride, padding, dilation, given["groups"])
    if call.narrow and call.groups == 1 and not call.one_tap:
        raise NotLowered(_TAPS)
    counts = (*weight.shape[: 1 if call.depthwise else 2], call.pixels)
    if ZERO in (*counts, *weight.shape) or (ONE in counts and not call.by_loops):
        raise NotLowered(_SMALL)
    if call.groups > 1 and any(each.view.strides[1] != ONE for each in (gradient, image)):
        raise NotLowered(_PLANAR)
    return call


def _of_image(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    """sum over outputs and taps of the weight times the gradient of the pixel that reads this one with the tap."""
    if call.one_tap and any(call.padding):
        raise NotLowered(_OUTSIDE)
    if not call.one_tap and call.steps:
        raise NotLowered(_STRIDED)
    if call.steps and any(extent.value is None for extent in call.gradient.shape):
        raise NotLowered(_SPREAD)
    terms_of_each = product((call.weight.shape[0], *call.weight.shape[2:]))
    if not call.by_loops and nonnegative(const(FEW_TERMS - 1) - terms_of_each):
        raise NotLowered(_SMALL)
    planes = call.one_tap and is_dense(call.gradient.view, (0, 1, 2, 3)) and call.gradient.shape[0] == ONE
    if call.gradient.view.strides[1] != ONE and not planes and not call.by_loops:
        raise NotLowered(_PLANAR)
    if not call.one_tap and not call.by_loops and not is_dense(call.weight.view, (0, 2, 3, 1)):
        raise NotLowered(_PLANAR)
    result = graph.new(node.meta["val"][0], "gradient")
    dense = _like(graph, call.gradient, call.weight.shape[1]) if call.steps else result
    outputs, _, *taps = call.weight.shape
    kernel = graph.kernel(node, (*dense.shape, outputs, *taps))
    image, channel, *pixel, output, height, width = kernel.index
    moves = zip(pixel, (height, width), call.padding, call.dilation, strict=True)
    place = [at + padding - tap * dilation for at, tap, padding, dilation in moves]
    inside = kernel.within(place, call.gradient.shape[2:])
    terms = kernel.load(call.gradient.view, call.gradient.dtype, (image, output, *place), inside) * kernel.load(
        call.weight.view, call.weight.dtype, (output, channel, height, width), inside
    )
    kernel.store(dense.view, dense.dtype, kernel.index[:4], kernel.reduce("sum", terms, (4, 5, 6)))
    graph.emit(kernel)
    if call.steps:
        _spread(graph, node, call, dense, result)
    return result


def _of_weight(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    """sum over pixels of the gradient times the image, for each output, channel and tap."""
    outputs, channels, *taps = call.weight.shape
    if call.by_loops:
        raise NotLowered(_SMALL)
    few = nonnegative(const(_FEW_ELEMENTS) - product(call.weight.shape))
    if few and nonnegative(call.pixels - _MANY_PIXELS):
        raise NotLowered(_LONG)
    if nonnegative(const(_FEW_CHANNELS - 1) - channels):
        raise NotLowered(_NARROW)
    operands = (call.gradient, call.image)
    matrices = call.one_tap and not call.steps and not any(call.padding) and all(map(is_matrix, operands))
    if not matrices and call.narrow:
        raise NotLowered(_PIXELS)
    if not matrices and any(each.view.strides[1] != ONE for each in operands):
        raise NotLowered(_PLANAR)
    result = graph.new(node.meta["val"][1], "gradient")
    kernel = graph.kernel(node, (outputs, channels, *taps, call.gradient.shape[0], *call.gradient.shape[2:]))
    output, channel, height, width, image, *pixel = kernel.index
    place = call.read_pixel(pixel, (height, width))
    inside = kernel.within(place, call.image.shape[2:])
    terms = kernel.load(call.gradient.view, call.gradient.dtype, (image, output, *pixel)) * kernel.load(
        call.image.view, call.image.dtype, (image, channel, *place), inside
    )
    kernel.store(result.view, result.dtype, kernel.index[:4], kernel.reduce("sum", terms, (4, 5, 6)))
    graph.emit(kernel)
    return result


def _of_image_by_channel(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    """For each channel, the sum over taps of the weight times the gradient of the pixel that reads this one with it.

    Taps are indexed from the last one, so that addresses increase with both. With strides, loops test each tap: in f32
    oneDNN is faster than that, in bf16 it takes four times as long.
    """
    if not call.depthwise:
        raise NotLowered(_GROUPED)
    if call.steps and not call.narrow:
        raise NotLowered(_STRIDED)
    result = graph.new(node.meta["val"][0], "gradient")
    taps = call.weight.shape[2:]
    kernel = graph.kernel(node, (*result.shape, *taps))
    image, channel, *pixel, height, width = kernel.index
    tap = [extent - 1 - at for extent, at in zip(taps, (height, width), strict=True)]
    moves = zip(pixel, tap, call.padding, call.dilation, strict=True)
    place, is_step = _at_steps(kernel, call, [at + padding - step * dilation for at, step, padding, dilation in moves])
    inside = both((kernel.within(place, call.gradient.shape[2:]), is_step))
    terms = kernel.load(call.gradient.view, call.gradient.dtype, (image, channel, *place), inside) * kernel.load(
        call.weight.view, call.weight.dtype, (channel, ZERO, *tap), inside
    )
    kernel.store(result.view, result.dtype, kernel.index[:4], kernel.reduce("sum", terms, (4, 5)))
    graph.emit(kernel)
    return result


def _of_weight_by_channel(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    """For each channel and tap, the sum over pixels of the gradient times the image."""
    channels, _, *taps = call.weight.shape
    result = graph.new(node.meta["val"][1], "gradient")
    kernel = graph.kernel(node, (channels, *taps, call.gradient.shape[0], *call.gradient.shape[2:]))
    channel, height, width, image, *pixel = kernel.index
    place = call.read_pixel(pixel, (height, width))
    inside = kernel.within(place, call.image.shape[2:])
    terms = kernel.load(call.gradient.view, call.gradient.dtype, (image, channel, *pixel), inside) * kernel.load(
        call.image.view, call.image.dtype, (image, channel, *place), inside
    )
    total = kernel.reduce("sum", terms, (3, 4, 5))
    kernel.store(result.view, result.dtype, (channel, ZERO, height, width), total)
    graph.emit(kernel)
    return result


def _of_weight_by_group(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    """For each output, channel of its group and tap, the sum over pixels of the gradient times the image."""
    outputs, channels, *taps = call.weight.shape
    if call.gradient.dtype is DType.BF16 and nonnegative(channels - _MANY_CHANNELS):
        raise NotLowered(_WIDE)
    each = floordiv(outputs, call.groups)
    result = graph.new(node.meta["val"][1], "gradient")
    space = (const(call.groups), each, channels, *taps, call.gradient.shape[0], *call.gradient.shape[2:])
    kernel = graph.kernel(node, space)
    group, number, channel, height, width, image, *pixel = kernel.index
    output, place = group * each + number, call.read_pixel(pixel, (height, width))
    inside = kernel.within(place, call.image.shape[2:])
    terms = kernel.load(call.image.view, call.image.dtype, (image, group * channels + channel, *place), inside) * (
        kernel.load(call.gradient.view, call.gradient.dtype, (image, output, *pixel), inside)
    )
    total = kernel.reduce("sum", terms, (5, 6, 7))
    kernel.store(result.view, result.dtype, (output, channel, height, width), total)
    graph.emit(kernel)
    return result


def _of_bias(graph: ProgramBuilder, node: torch.fx.Node, call: _Call) -> TensorRef:
    result = graph.new(node.meta["val"][2], "gradient")
    kernel = graph.kernel(node, call.gradient.shape)
    value = kernel.load(call.gradient.view, call.gradient.dtype, kernel.index)
    kernel.store(result.view, result.dtype, kernel.index[1:2], kernel.reduce("sum", value, (0, 2, 3)))
    graph.emit(kernel)
    return result


def _spread(graph: ProgramBuilder, node: torch.fx.Node, call: _Call, dense: TensorRef, result: TensorRef) -> None:
    """result = dense at the pixels that a single tap reads, and zero at the others."""
    kernel = graph.kernel(node, result.shape)
    image, channel, *pixel = kernel.index
    place, is_step = _at_steps(kernel, call, pixel)
    is_read = both((kernel.within(place, dense.shape[2:]), is_step))
    value = kernel.load(dense.view, dense.dtype, (image, channel, *place), is_read)
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)


def _at_steps(kernel: KernelBuilder, call: _Call, pixel: Sequence[Expr]) -> tuple[list[Expr], Value | None]:
    """A pixel divided by the stride, and the condition that the division is exact; None if it always is."""
    steps = list(zip(pixel, call.stride, strict=True))
    hits = [kernel.position(mod(at, step, kernel.ranges)).op("eq", 0) if step > 1 else None for at, step in steps]
    return [floordiv(at, step, kernel.ranges) for at, step in steps], both(hits)


def _like(graph: ProgramBuilder, gradient: TensorRef, channels: Expr) -> TensorRef:
    """A new tensor with this many channels for each pixel of `gradient`, channels-last or planar like it."""
    images, _, height, width = (extent.value for extent in gradient.shape)
    last = gradient.view.strides[1] == ONE
    shape = (images, channels.value, height, width)
    layout = torch.channels_last if last else torch.contiguous_format
    return graph.new(torch.empty(shape, device="meta", memory_format=layout), "pixels")  # type: ignore[arg-type]
