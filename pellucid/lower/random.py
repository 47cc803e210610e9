"""Operators that draw booleans: a call draws them, from eager's own stream, and kernels compute the rest."""

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
_OTHER = "dropout of numbers that are no floats, or in evaluation, is ATen's"
_GIVEN = "a generator, or a probability that is known only when the graph is called: ATen draws"


@rule("native_dropout.default")
def dropout(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """(x * kept / (1 - p), kept). Where nothing is kept eager's `dropout` draws nothing."""
    given = arguments(node, graph)
    x, p = given["input"], _number(given["p"])
    if not x.dtype.is_float or given["train"] is False:
        raise NotLowered(_OTHER)
    of_result, of_kept = node.meta["val"]
    result = graph.new(of_result, "dropout")
    kernel = graph.kernel(node, x.shape)
    value = kernel.load(x.view, x.dtype, kernel.index)
    if p == 1:
        kept = graph.new(of_kept, "kept")
        kernel.store(kept.view, kept.dtype, kernel.index, kernel.const(False, DType.BOOL))
        value = value * 0.0
    else:
        kept = _drawn(graph, node, of_kept, 1 - p)
        value = value * kernel.load(kept.view, kept.dtype, kernel.index).to(value.dtype) * (1 / (1 - p))
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result, kept


@rule("bernoulli.p")
def bernoulli(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """One with probability p, else zero, in the type of the argument."""
    given, meta = arguments(node, graph), node.meta["val"]
    if given["generator"] is not None:
        raise NotLowered(_GIVEN)
    kept = _drawn(graph, node, meta.new_empty_strided(meta.shape, meta.stride(), dtype=torch.bool), _number(given["p"]))
    result = graph.new(meta, "bernoulli")
    graph.copy(node, kept, result)
    return result


def _number(p: Any) -> float:
    if not isinstance(p, int | float):
        raise NotLowered(_GIVEN)
    return float(p)


def _drawn(graph: ProgramBuilder, node: torch.fx.Node, meta: torch.Tensor, p: float) -> TensorRef:
    """Booleans that are true with probability `p`, drawn in the order in which they lie in memory, as ATen's are."""
    kept = graph.new(meta, "kept")
    graph.decide(Decision("lower.fallback", (node.name,), False, RANDOM, (("op", _DRAW),)))
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"bernoulli_{suffix}",
            op=_DRAW,
            args=(p,),
            kwargs=(),
            outputs=(kept.view,),
            out=True,
            reason=RANDOM,
            ordered=True,
            origin=origin_of(node).step("lower"),
        )
    )
    return kept
