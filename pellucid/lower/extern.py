"""Calls of ATen: operators without a lowering, and those that ATen computes best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.fx import DTYPES, dtype_of, origin_of
from pellucid.capture.operators import may_draw
from pellucid.capture.torch_compat import fake_mode_of
from pellucid.errors import UnsupportedError, UserError
from pellucid.ir.decision import Decision
from pellucid.ir.derived import Float
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Arg, Enum, Extern, View
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, overlaps_itself
from pellucid.lower.registry import overload_name

# Why ATen computes an operator on purpose; all other operators lack a lowering.
_GEMM = "matrix multiplication of integers: ATen's BLAS computes it"
RANDOM = "random numbers come from eager's random number stream"
LEFT_TO_ATEN: dict[str, str] = {
    "_int_mm.default": _GEMM,
}

# Types of quantized tensors, which fake tensors take for floats.
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

# Overloads that write their result into memory of the program, instead of allocating in every call.
_OUT_VARIANTS = {f"{name}.default": f"{name}.out" for name in ("mm", "addmm", "bmm", "baddbmm")}
# Sums of products, which ATen computes slowly in types that it has no instructions for.
_PRODUCTS = {"convolution.default", "convolution_backward.default", *_OUT_VARIANTS}


@dataclass(frozen=True, slots=True)
class ExternCall:
    """A call of a dispatcher operator: by an FX node, or by a higher-order operator on its behalf.

    metas: the fake results, none for an operator that returns nothing.
    several: whether the operator returns a sequence of tensors. used: which of them are read.
    """

    node: torch.fx.Node
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    metas: tuple[Any, ...]
    several: bool
    used: frozenset[int]


def extern_call(node: torch.fx.Node) -> ExternCall:
    """The call that `node` makes; raises `UnsupportedError` if it is not one of the dispatcher's operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        raise UnsupportedError(
            f"the graph calls {node.target}, which is not an operator of the dispatcher",
            hint="keep this part out of the compiled function with torch.compiler.disable",
        )
    meta = node.meta.get("val")  # absent where an operator returns nothing
    several = isinstance(meta, list | tuple)
    metas = tuple(meta) if several else (meta,) if node.target._schema.returns else ()
    return ExternCall(node, node.target, node.args, dict(node.kwargs), metas, several, _used(node, len(metas), several))


def _used(node: torch.fx.Node, count: int, several: bool) -> frozenset[int]:
    """The positions of the results of `node` that are read: those selected by `getitem`, or all if it is used whole."""
    picks = [user.args[1] for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    if not several or len(picks) < len(node.users):
        return frozenset(range(count))
    return frozenset(int(pick) % count for pick in picks)  # type: ignore[arg-type]


def lower_conjugate(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Eager's lazy conjugate is a flag on a view; buffers have no flags, so it is computed at once."""
    call = replace(extern_call(node), target=torch.ops.aten.conj_physical.default)
    return lower_extern(graph, call, "complex numbers are left to ATen")


def fallback_reason(node: torch.fx.Node) -> str:
    """Why `node` calls ATen, if no rule gave a reason."""
    name = overload_name(node)
    if name in LEFT_TO_ATEN:
        return LEFT_TO_ATEN[name]
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return RANDOM
    return f"there is no lowering for {node.target}"


def lower_effect(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """`with_effects(token, operator, ...)`: call the operator, in order. Tokens have no value: callers pass None."""
    _, target, *args = node.args
    metas = tuple(node.meta["val"])[1:] if target._schema.returns else ()  # type: ignore[union-attr]
    used = frozenset(pick - 1 for pick in _used(node, len(metas) + 1, True) if pick > 0)
    call = ExternCall(node, target, tuple(args), dict(node.kwargs), metas, True, used)  # type: ignore[arg-type]
    results = lower_extern(graph, call, f"{target} has an effect, and is called in order", ordered=True)
    return (None, *results)  # type: ignore[misc]


def lower_extern(graph: ProgramBuilder, call: ExternCall, reason: str, *, ordered: bool = False) -> Result:
    """Call the operator, and record why; sums of products are computed in f32 where ATen lacks their type."""
    node, target = call.node, call.target
    lacking = _lacking_type(graph, call)
    if lacking:
        return _in_f32(graph, call, f"{reason}, in f32: {lacking}")
    graph.decide(Decision("lower.fallback", (node.name,), False, reason, (("op", str(target)),)))
    results = tuple(
        graph.new(meta, target._opname) if isinstance(meta, torch.Tensor) and position in call.used else None
        for position, meta in enumerate(call.metas)
    )
    out = _out_variant(call)
    schema = target._schema
    graph.emit_extern(
        lambda suffix: Extern(
            name=f"{target._opname}_{suffix}",
            op=f"{target.namespace}::{out or f'{target._opname}.{target._overloadname}'}",
            args=tuple(_argument(graph, arg) for arg in call.args),
            kwargs=tuple((key, _argument(graph, arg)) for key, arg in call.kwargs.items()),
            outputs=tuple(None if result is None else result.view for result in results),
            out=out is not None,
            reason=reason,
            mutates=_mutated(graph, call),
            ordered=ordered or may_draw(target) or schema.is_mutable or not schema.returns,
            origin=origin_of(node).step("lower"),
        )
    )
    return results if call.several else results[0] if results else None


def _lacking_type(graph: ProgramBuilder, call: ExternCall) -> str:
    """Why the call is faster in f32; empty if it is not."""
    if overload_name(call.node) not in _PRODUCTS or not graph.contract:
        return ""
    return max(graph.library.lacks_type(dtype_of(each)) for each in call.metas if isinstance(each, torch.Tensor))


def _in_f32(graph: ProgramBuilder, call: ExternCall, reason: str) -> Result:
    """The call with its operands widened before it, and its results rounded after it."""

    def fake(arg: torch.fx.Node) -> Any:
        value = arg.meta["val"]
        return value.float() if isinstance(value, torch.Tensor) else value

    with fake_mode_of(call.node.graph), torch.no_grad():
        fakes = pytree.tree_map_only(torch.fx.Node, fake, call.args)
        made = call.target(*fakes, **call.kwargs)
    args = tuple(
        _converted(graph, call.node, graph.value(arg), wide) if isinstance(wide, torch.Tensor) else arg
        for arg, wide in zip(call.args, fakes, strict=True)
    )
    results = lower_extern(graph, replace(call, args=args, metas=tuple(made) if call.several else (made,)), reason)
    rounded = tuple(
        _converted(graph, call.node, each, meta) if isinstance(each, TensorRef) else each
        for each, meta in zip(results if isinstance(results, tuple) else (results,), call.metas, strict=True)
    )
    return rounded if call.several else rounded[0]


def _converted(graph: ProgramBuilder, node: torch.fx.Node, source: TensorRef, meta: torch.Tensor) -> TensorRef:
    """A copy of a tensor, of the type and with the strides of `meta`."""
    copy = graph.new(meta, "converted")
    graph.copy(node, source, copy)
    return copy


def _out_variant(call: ExternCall) -> str | None:
    variant = _OUT_VARIANTS.get(f"{call.target._opname}.{call.target._overloadname}")
    return variant if call.target.namespace == "aten" and variant and not overlaps_itself(call.metas[0]) else None


def _mutated(graph: ProgramBuilder, call: ExternCall) -> tuple[str, ...]:
    """The buffers of arguments that the schema declares as written."""
    names: list[str] = []
    given = {argument.name: value for argument, value in zip(call.target._schema.arguments, call.args, strict=False)}
    given.update(call.kwargs)
    for argument in call.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
            tensors = graph.value(given[argument.name])
            tensors = tensors if isinstance(tensors, tuple) else (tensors,)
            names += [tensor.view.buffer for tensor in tensors if isinstance(tensor, TensorRef)]
    return tuple(names)


def _argument(graph: ProgramBuilder, value: Any) -> Arg:
    """An argument of an FX call in the IR's form."""
    if isinstance(value, list | tuple):
        return tuple(_argument(graph, item) for item in value)
    resolved = graph.value(value)
    match resolved:
        case TensorRef(view, _):
            return view
        case Float() if not graph.is_derived(resolved):
            raise UnsupportedError("an argument of an ATen call that is a float known only at run time")
        case Expr() | Float() | View() | None | bool() | int() | float() | str():
            return resolved
        case torch.dtype() if resolved in _QUANTIZED:
            raise UserError(
                f"PyTorch's fake tensors have wrong results for operators with the dtype {resolved}",
                hint="keep it out of the compiled function with torch.compiler.disable",
            )
        case torch.dtype() if resolved not in DTYPES:
            raise UnsupportedError(f"an argument of an ATen call that is the element type {resolved}")
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind = type(resolved).__name__
            return Enum(kind, str(resolved).removeprefix("torch."))
        case torch.device():
            return Enum("device", str(resolved))
        case _:
            raise UnsupportedError(f"an argument of type {type(resolved).__name__} of an ATen call")
