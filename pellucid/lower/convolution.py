"""Convolutions: one by one, they are matrix products; all others are oneDNN's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pellucid.capture.graph import origin_of
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, product
from pellucid.ir.nodes import Extern, View
from pellucid.ir.types import DType
from pellucid.lower.extern import CONVOLUTION
from pellucid.lower.graph import GraphBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_REASON = "a 1x1 convolution is a matrix product: BLAS computes it where the tensors lie"


@dataclass(frozen=True, slots=True)
class _Product:
    """result = left @ right (+ bias), all of them two-dimensional views."""

    left: View
    right: View
    result: View
    bias: View | None


@rule("convolution.default")
def convolution(graph: GraphBuilder, node: torch.fx.Node) -> Result:
    """A 1x1 convolution in f32 as one matrix product, which spares oneDNN's copies into blocked layouts."""
    given = arguments(node, graph)
    _check_one_by_one(given)
    result = graph.new(node.meta["val"], "convolution")
    matrices = _rows_of_pixels(given["input"], given["weight"], given["bias"], result)
    matrices = matrices or _rows_of_channels(given["input"], given["weight"], given["bias"], result)
    if matrices is None:
        raise NotLowered(CONVOLUTION)
    graph.decide(Decision("lower.fallback", (node.name,), False, _REASON, (("op", str(node.target)),)))
    args = (matrices.left, matrices.right)
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"convolution_{suffix}",
            op="aten::mm.out" if matrices.bias is None else "aten::addmm.out",
            args=args if matrices.bias is None else (matrices.bias, *args),
            kwargs=(),
            outputs=(matrices.result,),
            out=True,
            reason=_REASON,
            origin=origin_of(node).step("lower"),
        )
    )
    return result


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
        raise NotLowered(CONVOLUTION)


def _rows_of_pixels(x: TensorRef, weight: TensorRef, bias: TensorRef | None, result: TensorRef) -> _Product | None:
    """Channels-last: [pixels, channels] @ [channels, outputs]; None if the tensors lie otherwise."""
    if not (_lies(x, (0, 2, 3, 1)) and _lies(result, (0, 2, 3, 1))):
        return None
    pixels = product((x.shape[0], *x.shape[2:]))
    return _Product(
        _matrix(x, (pixels, x.shape[1])),
        _weight(weight, transposed=True),
        _matrix(result, (pixels, result.shape[1])),
        None if bias is None else bias.view,
    )


def _rows_of_channels(x: TensorRef, weight: TensorRef, bias: TensorRef | None, result: TensorRef) -> _Product | None:
    """One contiguous image: [outputs, channels] @ [channels, pixels]; None if the tensors lie otherwise."""
    if not (x.shape[0] == ONE and _lies(x, (0, 1, 2, 3)) and _lies(result, (0, 1, 2, 3))):
        return None
    pixels = product(x.shape[2:])
    column = (
        None
        if bias is None
        else View(bias.view.buffer, (*bias.shape, ONE), (*bias.view.strides, ONE), bias.view.offset)
    )
    return _Product(
        _weight(weight, transposed=False),
        _matrix(x, (x.shape[1], pixels)),
        _matrix(result, (result.shape[1], pixels)),
        column,
    )


def _lies(tensor: TensorRef, order: Sequence[int]) -> bool:
    """True if the tensor is dense with its dimensions in this order, the last one innermost."""
    expected = ONE
    for dim in reversed(order):
        extent, stride = tensor.shape[dim], tensor.view.strides[dim]
        if extent != ONE and stride != expected:
            return False
        expected = expected * extent
    return True


def _matrix(tensor: TensorRef, shape: tuple[Expr, Expr]) -> View:
    return View(tensor.view.buffer, shape, (shape[1], ONE), tensor.view.offset)


def _weight(weight: TensorRef, *, transposed: bool) -> View:
    """[outputs, channels, 1, 1] without its last two dimensions."""
    shape, strides = weight.shape[:2], weight.view.strides[:2]
    if transposed:
        shape, strides = shape[::-1], strides[::-1]
    return View(weight.view.buffer, shape, strides, weight.view.offset)
