"""What one call of a step moves and computes: the facts that its time is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from pellucid.ir.origin import GLUE, Origin
from pellucid.ir.traffic import tensor_bytes
from pellucid.machine import Part

_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One call of a compiled graph, at the sizes of a run.

    graph, step: the graph and the name of the call. symbol: the called function: a kernel's, or an operator as the
    dispatcher names it. kind: `kernel`, or of library calls `product`, `convolution`, `attention` or `call`. reads,
    writes: shapes, `f32[128, 768]`. loaded, stored: bytes of the distinct elements that it reads and writes. flops:
    operations on floats. touched: bytes of the distinct elements that it reads or writes. Each None if unknown.
    instructions: the estimated number of vector instructions of a kernel; 0 if unknown.
    dtype: the float type in which it computes, `f32`; empty if it computes no floats.
    threads: that share the work; None if the library decides. counts_as: `product`, `convolution` or `attention` for a
    kernel that implements one.
    fetched: bytes of the cache lines that it touches; None if unknown. scalar: why a kernel is not vectorised; empty if
    it is. reason: why a library call is not compiled. parts: its bytes by buffer with reuse distances, if these are
    known. packed: elements of a parameter that a kernel packs again in each call. uncounted: work of a kernel's plan
    that is neither in its flops nor in its instructions, in words.
    """

    graph: str
    step: str
    symbol: str
    kind: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    loaded: int | None = None
    stored: int | None = None
    flops: int | None = None
    touched: int | None = None
    instructions: float = 0.0
    dtype: str = ""
    threads: int | None = None
    counts_as: str = ""
    fetched: int | None = None
    scalar: str = ""
    reason: str = ""
    parts: tuple[Part, ...] = ()
    packed: int = 0
    uncounted: tuple[str, ...] = ()
    origin: Origin = GLUE

    @property
    def nbytes(self) -> int | None:
        """The bytes that it moves."""
        return None if self.loaded is None or self.stored is None else self.loaded + self.stored


def shape_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """`f32[128, 768]`."""
    return f"{dtype_text(dtype)}{list(shape)}"


def dtype_text(dtype: torch.dtype) -> str:
    """`f32`."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def widest_float(dtypes: Sequence[torch.dtype]) -> str:
    """The widest float type, by its short name; empty if there is none."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return dtype_text(max(floats, key=lambda dtype: dtype.itemsize)) if floats else ""


def library_facts(
    step: StepFacts, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]
) -> StepFacts:
    """A step completed with the facts of a library call, from its arguments and results (possibly meta tensors).

    Arguments that are changed in place count as read only.
    """
    given = {name: value for name, value in kwargs.items() if name != "out"}
    read = _tensors((args, given))
    written = [*results, *_tensors(kwargs.get("out"))]
    kind, flops = library_flops(op, args, given, written)
    return replace(
        step,
        kind=kind,
        reads=tuple(shape_text(each.dtype, each.shape) for each in read),
        writes=tuple(shape_text(each.dtype, each.shape) for each in written),
        loaded=_bytes(read),
        stored=_bytes(written),
        flops=flops,
        dtype=widest_float([each.dtype for each in (*read, *written)]),
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The distinct tensors of a tree."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values())


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor_bytes(each.shape, each.stride(), each.dtype.itemsize) for each in tensors)


def library_flops(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> tuple[str, int | None]:
    """The kind of a library call and its FLOPs by PyTorch's formulas (`torch.utils.flop_counter`), which count a
    multiplication and an addition as two; None without a formula."""
    packet = op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op
    name = str(packet).removeprefix("aten.").removeprefix("aten::")
    kind = kind_of(name)
    shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return kind, _attention(shapes[:3], 1, 1)
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return kind, _attention(shapes[1:4], 3, 2)
    if name == "convolution_backward":
        return kind, _convolution_backward(*_in_order(packet, args, kwargs))
    formula = flop_registry.get(packet)
    if formula is None:
        return kind, None
    result = results[0] if len(results) == 1 else tuple(results)
    return kind, int(formula(*_in_order(packet, args, kwargs), out_val=result))


def kind_of(name: str) -> str:
    """The kind of a library operator, by its name without namespace and overload."""
    return "product" if name in _PRODUCTS else next((each for each in _KINDS if each in name), "call")


def _in_order(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the schema's order, as the formulas require."""
    rest = packet.default._schema.arguments[len(args) :]
    return [*args, *(kwargs[each.name] for each in rest if each.name in kwargs and not each.kwarg_only)]


_PRODUCTS = frozenset("mm addmm bmm baddbmm _int_mm _scaled_mm linear _linear_pointwise mv addmv dot".split())
_KINDS = ("attention", "convolution")


def _convolution_backward(gradient: Any, image: Any, weight: Any, *rest: Any) -> int:
    """The FLOPs of forward for each requested gradient of image and weight; PyTorch's formula counts groups twice."""
    transposed, mask = rest[4], rest[7]
    points = prod((image if transposed else gradient).shape)  # each is multiplied with each weight of its group
    return sum(map(bool, mask[:2])) * 2 * points * prod(weight.shape[1:])


def _attention(shapes: Sequence[tuple[int, ...]], along_keys: int, along_values: int) -> int:
    """The FLOPs of attention: `along_keys` products over the size of a key, `along_values` over that of a value."""
    (batch, heads, queries, size), (*_, keys, _), (*_, width) = shapes
    return 2 * batch * heads * queries * keys * (along_keys * size + along_values * width)
