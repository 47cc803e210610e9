"""Convolutions of one tap are matrix products, where BLAS is no slower at them; all others are oneDNN's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from pellucid.capture.graph import origin_of
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, const, nonnegative, product
from pellucid.ir.nodes import Extern, View
from pellucid.ir.types import DType
from pellucid.lower.graph import GraphBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_REASON = "a 1x1 convolution is a matrix product: BLAS computes it where the tensors lie"
_ONEDNN = "convolution: oneDNN computes it"
_SLOW = "convolution: oneDNN computes it, at twice the rate of this machine's BLAS"
# Multiplications up to which a slow BLAS gains more by having less to prepare than it loses.
_FEW = 4_000_000


@rule("convolution.default")
def convolution(graph: GraphBuilder, node: torch.fx.Node) -> Result:
    """A 1x1 convolution in f32: with rows of pixels, y = x @ transposed weight. That spares oneDNN's preparations."""
    given = arguments(node, graph)
    _check_one_by_one(given)
    result = graph.new(node.meta["val"], "convolution")
    x, y = _pixels(given["input"]), _pixels(result)
    if x is None or y is None:
        raise NotLowered(_ONEDNN)
    _check_rate(x, y)
    bias: TensorRef | None = given["bias"]
    args = (x, _transposed(_weight(given["weight"])))
    _emit(graph, node, args if bias is None else (bias.view, *args), y)
    return result


@rule("convolution_backward.default")
def convolution_backward(graph: GraphBuilder, node: torch.fx.Node) -> Result:
    """Gradients of a 1x1 convolution in f32: those of x are dy @ weight, those of weight transposed dy @ x."""
    given = arguments(node, graph)
    _check_one_by_one(given)
    of_x, of_weight, of_bias = given["output_mask"]
    metas = node.meta["val"]
    x, dy = _pixels(given["input"]), _pixels(given["grad_output"])
    if x is None or dy is None or of_bias:
        raise NotLowered(_ONEDNN)
    _check_rate(x, dy)
    dx = graph.new(metas[0], "convolution_backward") if of_x else None
    if dx is not None:
        rows = _pixels(dx)
        if rows is None:
            raise NotLowered(_ONEDNN)
        _emit(graph, node, (dy, _weight(given["weight"])), rows)
    dweight = graph.new(metas[1], "convolution_backward") if of_weight else None
    if dweight is not None:
        _emit(graph, node, (_transposed(dy), x), _weight(dweight))
    return (dx, dweight, None)


def _check_one_by_one(given: Mapping[str, Any]) -> None:
    weight: TensorRef = given["weight"]
    steps = (*given["stride"], *given["dilation"])
    plain = (
        weight.dtype is DType.F32
        and len(weight.shape) == 4
        and weight.shape[2:] == (ONE, ONE)
        and all(step == 1 for step in steps)
        and all(padding == 0 for padding in given["padding"])
        and not given["transposed"]
        and given["groups"] == 1
    )
    if not plain:
        raise NotLowered(_ONEDNN)


def _check_rate(x: View, y: View) -> None:
    """Leave large products to oneDNN where BLAS is slower at them. Sizes that are symbols may be large."""
    if _blas_is_slow() and not nonnegative(const(_FEW) - product((*x.shape, y.shape[1]))):
        raise NotLowered(_SLOW)


@cache
def _blas_is_slow() -> bool:
    """True where MKL has AVX-512 and does not use it: on processors that are not Intel's it keeps to AVX2."""
    machine = torch.cpu.get_capabilities()
    return torch.backends.mkl.is_available() and machine.get("avx512_f", False) and "Intel" not in machine["cpu_name"]


def _pixels(tensor: TensorRef) -> View | None:
    """[N, channels, H, W] as a matrix [pixels, channels]: if channels-last, or one contiguous image; else None."""
    count, channels = product((tensor.shape[0], *tensor.shape[2:])), tensor.shape[1]
    if _lies(tensor, (0, 2, 3, 1)):
        strides = (channels, ONE)
    elif tensor.shape[0] == ONE and _lies(tensor, (0, 1, 2, 3)):
        strides = (ONE, count)
    else:
        return None
    return View(tensor.view.buffer, (count, channels), strides, tensor.view.offset)


def _lies(tensor: TensorRef, order: Sequence[int]) -> bool:
    """True if the tensor is dense with its dimensions in this order, the last one innermost."""
    expected = ONE
    for dim in reversed(order):
        extent, stride = tensor.shape[dim], tensor.view.strides[dim]
        if extent != ONE and stride != expected:
            return False
        expected = expected * extent
    return True


def _weight(weight: TensorRef) -> View:
    """[outputs, channels, 1, 1] without its last two dimensions."""
    return View(weight.view.buffer, weight.shape[:2], weight.view.strides[:2], weight.view.offset)


def _transposed(matrix: View) -> View:
    return View(matrix.buffer, matrix.shape[::-1], matrix.strides[::-1], matrix.offset)


def _emit(graph: GraphBuilder, node: torch.fx.Node, args: tuple[View, ...], result: View) -> None:
    """result = left @ right, for args (left, right); a bias before them is added to each row."""
    graph.decide(Decision("lower.fallback", (node.name,), False, _REASON, (("op", str(node.target)),)))
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"convolution_{suffix}",
            op="aten::mm.out" if len(args) == 2 else "aten::addmm.out",
            args=args,
            kwargs=(),
            outputs=(result,),
            out=True,
            reason=_REASON,
            origin=origin_of(node).step("lower"),
        )
    )
