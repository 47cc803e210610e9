"""What one call of a step moves and computes: the facts that its time is held against."""

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

    graph, step: which call it is. symbol: the function that is called: a kernel's, or an operator as the dispatcher
    names it. kind: `kernel`, or of library calls `product`, `convolution`, `attention` or `call`. reads, writes:
    shapes, `f32[128, 768]`. loaded, stored: bytes of the different elements that it reads and writes, each once. flops:
    operations on floats. touched: bytes of the different elements that it reads or writes, or both. Each None where
    nobody knows. instructions: of vectors, that a kernel is estimated to issue; 0 where nobody knows.
    dtype: the float type in which it computes, `f32`; empty where it computes no floats.
    threads: that share the work; None where the library decides. counts_as: `product`, `convolution` or
    `attention` of a kernel whose work is that.
    fetched: bytes of the lines of the cache that it touches; None where nobody knows. scalar: why a kernel has no
    vectors; empty where it has. reason: why a library call is none. parts: its bytes by buffer, where it is known
    what was touched before. packed: elements of a parameter that a kernel packs anew at each call. uncounted: work of a
    kernel's plan that is neither in its flops nor in its instructions, in words.
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
        """Bytes that it moves."""
        return None if self.loaded is None or self.stored is None else self.loaded + self.stored


def shape_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """`f32[128, 768]`."""
    return f"{dtype_text(dtype)}{list(shape)}"


def dtype_text(dtype: torch.dtype) -> str:
    """`f32`."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def widest_float(dtypes: Sequence[torch.dtype]) -> str:
    """The float type with the most bytes, by its short name; empty where there is none."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return dtype_text(max(floats, key=lambda dtype: dtype.itemsize)) if floats else ""


def library_facts(
    step: StepFacts, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]
) -> StepFacts:
    """A step completed by the operator that it calls with tensors (which may have no memory) and those that it returns.

    What it changes in place counts as read only.
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
    """The different tensors of a tree."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values())


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor_bytes(each.shape, each.stride(), each.dtype.itemsize) for each in tensors)


def library_flops(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> tuple[str, int | None]:
    """The kind of a library call and its FLOPs, by PyTorch's formulas (`torch.utils.flop_counter`), which count a
    multiplication and an addition each; None where it has no formula."""
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
    """The kind of an operator of a library, by its name without namespace and overload."""
    return "product" if name in _PRODUCTS else next((each for each in _KINDS if each in name), "call")


def _in_order(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the schema's order, as the formulas want them."""
    rest = packet.default._schema.arguments[len(args) :]
    return [*args, *(kwargs[each.name] for each in rest if each.name in kwargs and not each.kwarg_only)]


_PRODUCTS = frozenset("mm addmm bmm baddbmm _int_mm _scaled_mm linear _linear_pointwise mv addmv dot".split())
_KINDS = ("attention", "convolution")


def _convolution_backward(gradient: Any, image: Any, weight: Any, *rest: Any) -> int:
    """As many as forward for each of the two gradients that are wanted; PyTorch's formula counts groups twice."""
    transposed, mask = rest[4], rest[7]
    points = prod((image if transposed else gradient).shape)  # each meets each weight of its group once
    return sum(map(bool, mask[:2])) * 2 * points * prod(weight.shape[1:])


def _attention(shapes: Sequence[tuple[int, ...]], along_keys: int, along_values: int) -> int:
    """Of matrix products between the shapes of queries, keys and values: over the size of a key, and of a value."""
    (batch, heads, queries, size), (*_, keys, _), (*_, width) = shapes
    return 2 * batch * heads * queries * keys * (along_keys * size + along_values * width)
