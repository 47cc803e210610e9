"""Lowers convolutions to kernels: sums of products, compiled by `codegen/contraction.py`.

oneDNN computes those without a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pellucid.capture.fx import elements_of, whole
from pellucid.ir.contraction import (
    DTYPES,
    GROUP_WEIGHTS,
    MAX_SPREAD_CHANNELS,
    MAX_SPREAD_TERMS,
    MAX_TAPS,
    packs_taps,
)
from pellucid.ir.index import ONE, ZERO, const, floordiv, mod, nonnegative, product
from pellucid.ir.nodes import View
from pellucid.ir.strides import is_dense
from pellucid.ir.types import DType
from pellucid.lower.contraction import check_rate
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule
from pellucid.machine.work import estimate

_ONEDNN = "convolution: oneDNN computes it"
OFF = "convolution: oneDNN computes it, because the option `contract` is off"
_OTHER = "convolution: kernels compute it in f32, bf16 and f16, oneDNN in other types"
_DYNAMIC = "convolution: kernels have weights of known sizes, oneDNN computes others"
_PLANAR = "convolution: channels are not adjacent in memory, oneDNN computes it"
_SINGLE = "convolution: of one pixel, or one channel of another type than f32, oneDNN computes it"
_SHORT = "convolution: a sum of few terms is mostly reading and writing, oneDNN computes it"
_WEIGHT = "convolution: neither channels nor (in f32) all taps of the weight are adjacent, oneDNN computes it"
_LARGE = "convolution: the weights of a group are too large to be packed at once, oneDNN computes it"
# The minimum number of terms for which gathering windows is worth it; and where that also avoids a padded copy.
FEW_TERMS = 32
_FEW_UNPADDED = 16
# That minimum where nothing is gathered, as channels are few.
_FEW_SPREAD = 8
# That minimum for an image of one channel and at least this many outputs, for which oneDNN is slow.
_FEW_OF_MANY, _MANY_OUTPUTS = 2, 64
# Columns whose weights a kernel packs together if groups fill registers of this many lanes; else it packs one group's.
_WIDTH, _LANES = 32, 16


@rule("convolution.default")
def convolution(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """One kernel over images, groups, their outputs, pixels, channels of a group and taps.

    Before: `%conv = aten.convolution(%x, %w, ...)`.
    After: `v: f32 = sum p over i5, i6, i7` with `p: f32 = mul x, w`, both loaded where the tap is inside the image.
    Where `%x` is an image that was padded with zeros, the image itself is read: there the weight is loaded everywhere,
    as zeros times a weight that is not finite are NaN.
    """
    given = by_dimension(arguments(node, graph))
    if not graph.contract:
        raise NotLowered(OFF)
    check_rate(graph, given["input"].dtype, "convolution")
    given = {**given, "weight": _uncopied(graph, node, given)}
    unpadded = _unpadded(graph, node, given)
    if unpadded is None:
        _check_direct(given, whole(node.name, node.meta["val"]))
    else:
        given = unpadded
    x, weight, bias = given["input"], given["weight"], given["bias"]
    result = graph.new(node.meta["val"], "convolution")
    groups, (outputs, *terms) = const(given["groups"]), weight.shape
    each = floordiv(outputs, groups)
    kernel = graph.kernel(node, (result.shape[0], groups, each, *result.shape[2:], *terms))
    image, group, number, *pixel, channel, height, width = kernel.index
    output = group * each + number
    steps = zip(pixel, (height, width), given["stride"], given["dilation"], given["padding"], strict=True)
    source = [at * stride + tap * dilation - padding for at, tap, stride, dilation, padding in steps]
    inside = kernel.within(source, x.shape[2:])
    pairs = kernel.load(x.view, x.dtype, (image, group * terms[0] + channel, *source), inside) * kernel.load(
        weight.view, weight.dtype, (output, channel, height, width), None if unpadded else inside
    )
    value = kernel.reduce("sum", pairs, (5, 6, 7))
    if bias is not None:
        value = value + kernel.load(bias.view, bias.dtype, (output,))
    kernel.store(result.view, result.dtype, (image, output, *pixel), value)
    graph.emit(kernel)
    return result


def _uncopied(graph: ProgramBuilder, node: torch.fx.Node, given: Mapping[str, Any]) -> TensorRef:
    """The weight; or, if it is a channels-last copy, its source where kernels read that too: contiguous, few taps."""
    source, weight = node.args[1], given["weight"]
    if not isinstance(source, torch.fx.Node) or source.target is not torch.ops.aten.clone.default:
        return weight
    original, shape = graph.value(source.args[0]), [estimate(size) for size in weight.shape]
    by_plane = _is_planar_weight(original) and original.dtype is weight.dtype is DType.F32
    return original if by_plane and packs_taps(shape, given["groups"], elements_of(node)) else weight


def _is_planar_weight(weight: TensorRef) -> bool:
    few = nonnegative(const(MAX_TAPS) - product(weight.shape[2:]))
    return len(weight.shape) == 4 and is_dense(weight.view, (0, 1, 2, 3)) and few


def by_dimension(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a convolution or its gradients, with single-element steps expanded to one per dimension."""
    rank = len(given["weight"].shape) - 2
    steps = {name: tuple(given[name]) for name in ("stride", "padding", "dilation")}
    return {**given, **{name: each * rank if len(each) == 1 else each for name, each in steps.items()}}


def _unpadded(graph: ProgramBuilder, node: torch.fx.Node, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments of a convolution of a zero-padded image, changed to pad itself; None for other convolutions.

    padding: the number of zeros before the image; the number after it follows from the shape of the result.
    """
    source = node.args[0]
    if not isinstance(source, torch.fx.Node) or source.target is not torch.ops.aten.constant_pad_nd.default:
        return None
    padded = arguments(source, graph)
    right_first = padded["pad"]
    known = all(isinstance(amount, int) and amount >= 0 for amount in right_first)
    if not known or len(right_first) != 4 or padded["value"] != 0 or any(given["padding"]):
        return None
    made = {**given, "input": padded["self"], "padding": (right_first[2], right_first[0])}
    try:
        _check_direct(made, whole(node.name, node.meta["val"]), _FEW_UNPADDED)
    except NotLowered:
        return None
    return made


def _check_direct(given: Mapping[str, Any], result: View, few: int = FEW_TERMS) -> None:
    """Leave to oneDNN convolutions that it computes faster, and those without a kernel."""
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if x.dtype not in DTYPES or {weight.dtype, (bias or x).dtype} != {x.dtype}:
        raise NotLowered(_OTHER)
    if len(weight.shape) != 4 or len(x.shape) != 4 or given["transposed"]:
        raise NotLowered(_ONEDNN)
    if any(extent == ZERO for extent in weight.shape):
        raise NotLowered(_ONEDNN)
    if any(extent.value is None for extent in weight.shape) or not isinstance(given["groups"], int):
        raise NotLowered(_DYNAMIC)
    if _is_one_by_one(given) and given["groups"] == 1:
        if not is_matrix(x) and not is_dense(x.view, (0, 1, 2, 3)) and x.view.strides[1] != ONE:
            raise NotLowered(_PLANAR)
        return
    if _is_one_sum(given, result):
        return
    spread = x.dtype is DType.F32 and _is_spread(given)
    planar = x.view.strides[1] != ONE and x.shape[1] != ONE
    if planar and not (spread and is_dense(result, (0, 2, 3, 1))):
        raise NotLowered(_PLANAR)
    if spread:
        many = weight.shape[1] == ONE and nonnegative(weight.shape[0] - _MANY_OUTPUTS)
        few = _FEW_OF_MANY if many else _FEW_SPREAD
    if given["groups"] == 1 and nonnegative(const(few - 1) - product(weight.shape[1:])):
        raise NotLowered(_SHORT)
    each = floordiv(weight.shape[0], given["groups"])
    packed = _WIDTH if mod(each, _LANES) == ZERO else (floordiv(each - 1, _WIDTH) + 1) * _WIDTH
    if given["groups"] != 1 and nonnegative(packed * product(weight.shape[1:]) - GROUP_WEIGHTS - 1):
        raise NotLowered(_LARGE)
    if ONE in (weight.shape[0], product((result.shape[0], *result.shape[2:]))):
        raise NotLowered(_SINGLE)
    by_plane = x.dtype is DType.F32 and _is_planar_weight(weight)
    by_column = given["groups"] == 1 and is_dense(weight.view, (2, 3, 1, 0))
    if not (by_plane or by_column or is_dense(weight.view, (0, 2, 3, 1))):
        raise NotLowered(_WEIGHT)


def _is_spread(given: Mapping[str, Any]) -> bool:
    """True if a kernel reads the image in any layout, as its channels are few."""
    shape = given["weight"].shape
    few = nonnegative(const(MAX_SPREAD_CHANNELS) - shape[1])
    return given["groups"] == 1 and few and nonnegative(const(MAX_SPREAD_TERMS) - product(shape[1:]))


def _is_one_sum(given: Mapping[str, Any], result: View) -> bool:
    """True if the result has one channel, in f32: a reduction over lines of pixels."""
    pixels = nonnegative(result.shape[2] * result.shape[3] - FEW_TERMS)
    return given["input"].dtype is DType.F32 and given["weight"].shape[0] == ONE and pixels


def _is_one_by_one(given: Mapping[str, Any]) -> bool:
    """True if each pixel of the result depends on one pixel of the image."""
    steps = (*given["stride"], *given["dilation"])
    one_tap = len(given["weight"].shape) == 4 and given["weight"].shape[2:] == (ONE, ONE)
    return one_tap and all(step == 1 for step in steps) and not any(given["padding"])


def is_matrix(tensor: TensorRef) -> bool:
    """True if the pixels of [N, channels, H, W] are rows, or columns, of one matrix."""
    return is_dense(tensor.view, (0, 2, 3, 1)) or (tensor.shape[0] == ONE and is_dense(tensor.view, (0, 1, 2, 3)))
