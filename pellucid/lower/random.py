"""Lowers operators that draw booleans: a call draws them, from eager's random number stream, kernels do the rest."""

from __future__ import annotations

from typing import Any

import torch

from pellucid.capture.fx import origin_of
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Extern
from pellucid.ir.types import DType
from pellucid.lower.extern import RANDOM
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule

_DRAW = "pellucid::bernoulli.out"  # native/random.py
_OTHER = "dropout of types other than floats, or in evaluation mode: ATen computes it"
_GIVEN = "a generator, or a probability that is known only at run time: ATen draws"


@rule("native_dropout.default")
def dropout(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """(x * mask / (1 - p), mask). With p = 1 eager's `dropout` draws nothing."""
    given = arguments(node, graph)
    x, p = given["input"], _number(given["p"])
    if not x.dtype.is_float or given["train"] is False:
        raise NotLowered(_OTHER)
    result_meta, mask_meta = node.meta["val"]
    result = graph.new(result_meta, "dropout")
    kernel = graph.kernel(node, x.shape)
    value = kernel.load(x.view, x.dtype, kernel.index)
    if p == 1:
        mask = graph.new(mask_meta, "kept")
        kernel.store(mask.view, mask.dtype, kernel.index, kernel.const(False, DType.BOOL))
        value = value * 0.0
    else:
        mask = _drawn(graph, node, mask_meta, 1 - p)
        value = value * kernel.load(mask.view, mask.dtype, kernel.index).to(value.dtype) * (1 / (1 - p))
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result, mask


@rule("bernoulli.p")
def bernoulli(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """One with probability p, else zero, in the type of the argument."""
    given, meta = arguments(node, graph), node.meta["val"]
    if given["generator"] is not None:
        raise NotLowered(_GIVEN)
    mask = _drawn(graph, node, meta.new_empty_strided(meta.shape, meta.stride(), dtype=torch.bool), _number(given["p"]))
    result = graph.new(meta, "bernoulli")
    graph.copy(node, mask, result)
    return result


def _number(p: Any) -> float:
    if not isinstance(p, int | float):
        raise NotLowered(_GIVEN)
    return float(p)


def _drawn(graph: ProgramBuilder, node: torch.fx.Node, meta: torch.Tensor, p: float) -> TensorRef:
    """Booleans that are true with probability `p`, drawn in memory order, like ATen's."""
    mask = graph.new(meta, "kept")
    graph.decide(Decision("lower.fallback", (node.name,), False, RANDOM, (("op", _DRAW),)))
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"bernoulli_{suffix}",
            op=_DRAW,
            args=(p,),
            kwargs=(),
            outputs=(mask.view,),
            out=True,
            reason=RANDOM,
            ordered=True,
            origin=origin_of(node).step("lower"),
        )
    )
    return mask
