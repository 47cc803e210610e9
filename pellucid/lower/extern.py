"""Calls of ATen: what has no lowering, and what ATen does best."""

from __future__ import annotations

from typing import Any

import torch

from pellucid.capture.graph import origin_of
from pellucid.errors import UnsupportedError
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Arg, Enum, Extern, View
from pellucid.lower.graph import GraphBuilder, Result, TensorRef, op_name, overlaps_itself
from pellucid.lower.registry import overload_name

# Why ATen computes an operator although it is known well; everything else lacks a lowering.
_GEMM = "matrix multiplication: ATen's BLAS computes it"
_CONVOLUTION = "convolution: oneDNN computes it"
_ATTENTION = "attention: ATen's fused kernel computes it"
_RANDOM = "random numbers come from eager's own stream"
CHOSEN: dict[str, str] = {
    **dict.fromkeys(("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "_int_mm.default"), _GEMM),
    **dict.fromkeys(("convolution.default", "convolution_backward.default"), _CONVOLUTION),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu.default",
            "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        ),
        _ATTENTION,
    ),
}

# These write their result into memory that the program gives them, instead of allocating at each call.
_OUT_VARIANTS = {
    name: f"{name.split('.')[0]}.out" for name in ("mm.default", "addmm.default", "bmm.default", "baddbmm.default")
}


def fallback_reason(node: torch.fx.Node) -> str:
    """Why `node` calls ATen, when no rule said more."""
    name = overload_name(node)
    if name in CHOSEN:
        return CHOSEN[name]
    if is_random(node):
        return _RANDOM
    return f"there is no lowering for {node.target}"


def is_random(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def lower_extern(graph: GraphBuilder, node: torch.fx.Node, reason: str) -> Result:
    """Call the operator as it is, and say why."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise UnsupportedError(
            f"the graph calls {target}, which is not an operator of the dispatcher",
            hint="keep this part out of the compiled function with torch.compiler.disable",
        )
    graph.decide(Decision("lower.fallback", (node.name,), False, reason, (("op", str(target)),)))
    meta = node.meta["val"]
    metas = list(meta) if isinstance(meta, list | tuple) else [meta]
    results = tuple(_result(graph, node, item) if _is_used(node, i) else None for i, item in enumerate(metas))
    out = _out_variant(node, metas)
    namespace, name = target.namespace, out or f"{target._opname}.{target._overloadname}"
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"{op_name(node)}_{suffix}",
            op=f"{namespace}::{name}",
            args=tuple(_argument(graph, arg) for arg in node.args),
            kwargs=tuple((key, _argument(graph, arg)) for key, arg in node.kwargs.items()),
            outputs=tuple(None if result is None else result.view for result in results),
            out=out is not None,
            reason=reason,
            mutates=_mutated(graph, node),
            ordered=is_random(node) or target._schema.is_mutable or not target._schema.returns,
            origin=origin_of(node).step("lower"),
        )
    )
    return results if isinstance(meta, list | tuple) else results[0]


def _is_used(node: torch.fx.Node, position: int) -> bool:
    """False if `node` returns several tensors and nobody picks this one."""
    if not isinstance(node.meta["val"], list | tuple):
        return True
    picks = [user.args[1] for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    return len(picks) < len(node.users) or position in picks


def _result(graph: GraphBuilder, node: torch.fx.Node, meta: Any) -> TensorRef | None:
    return graph.new(meta, op_name(node)) if isinstance(meta, torch.Tensor) else None


def _out_variant(node: torch.fx.Node, metas: list[Any]) -> str | None:
    name = overload_name(node)
    usable = len(metas) == 1 and not overlaps_itself(metas[0]) and not node.kwargs.get("out_dtype")
    return _OUT_VARIANTS.get(name) if name is not None and usable else None


def _mutated(graph: GraphBuilder, node: torch.fx.Node) -> tuple[str, ...]:
    """Buffers behind the arguments that the schema declares as written."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = []
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            tensors = graph.value(value)
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
            names += [tensor.view.buffer for tensor in tensors if isinstance(tensor, TensorRef)]
    return tuple(names)


def _argument(graph: GraphBuilder, value: Any) -> Arg:
    """An argument of an FX call as the IR writes it."""
    if isinstance(value, list | tuple):
        return tuple(_argument(graph, item) for item in value)
    resolved = graph.value(value)
    match resolved:
        case TensorRef(view, _):
            return view
        case Expr() | View() | None | bool() | int() | float() | str():
            return resolved
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind = type(resolved).__name__
            return Enum(kind, str(resolved).removeprefix("torch."))
        case torch.device():
            return Enum("device", str(resolved))
        case _:
            raise UnsupportedError(f"an argument of type {type(resolved).__name__} of an ATen call")
