"""Attention as a kernel: the formula of `ir/attention.py`, which `codegen/attention.py` knows how to run.

ATen keeps what the kernel does not cover, and what it computes faster by the machine model.
"""

from __future__ import annotations

import math

import torch

from pellucid.ir.contraction import DTYPES
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, as_expr, exact_div, product
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import Value, broadcast_index
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule
from pellucid.machine import Work, time
from pellucid.machine.attention import MOST_COLUMNS, Heads
from pellucid.machine.work import estimate

_OFF = "attention: ATen's fused kernel computes it, as the option `contract` asks"
_OTHER = "attention: kernels compute it in f32, bf16 and f16, ATen's fused kernel in other types"
_MASK = "attention: kernels add masks of the operands' type, or f32; ATen's fused kernel others"
_DROPOUT = "attention: dropout draws from eager's own stream, in ATen's fused kernel"
_SIZE = (
    f"attention: kernels have head sizes from 2 to {MOST_COLUMNS}, known when compiled; ATen's fused kernel has others"
)
_KEYS = "attention: of a single key, or of none, ATen's fused kernel computes it"
_ALIKE = "attention: heads or batches have the same queries and keys, whose weights ATen's fused kernel computes again"
_GROUPS = "attention: heads of queries are no multiple of those of keys that is known; ATen's fused kernel checks them"


@rule("_scaled_dot_product_flash_attention_for_cpu.default")
def attention(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """softmax(scale * query @ key^T + mask) @ value, and the logarithm of the softmax's sum where that is read.

    query: (batch, heads, rows, size). key, value: (batch, heads or a divisor of it, keys, size). All of one type: f32,
    bf16 or f16. mask: of this type or f32, and broadcast to (batch, heads, rows, keys).
    """
    given = arguments(node, graph)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    group = _check(graph, query, key, value, mask, given["dropout_p"])
    _check_speed(graph, node, query, key, given["is_causal"])
    results = tuple(
        graph.new(meta, hint) if _is_read(node, position) else None
        for position, (meta, hint) in enumerate(zip(node.meta["val"], ("attention", "logsumexp"), strict=True))
    )
    batch, _, rows, size = query.shape
    kernel = graph.kernel(node, (batch, key.shape[1], as_expr(group), rows, size, key.shape[2], size))
    b, shared, each, row, column, t, term = kernel.index
    h = shared * group + each
    products = kernel.load(query.view, query.dtype, (b, h, row, term)) * kernel.load(
        key.view, key.dtype, (b, shared, t, term)
    )
    score = kernel.reduce("sum", products, (6,))
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(estimate(size))
    score = score * float(scale)
    if mask is not None:
        score = score + kernel.load(mask.view, mask.dtype, broadcast_index(mask.shape, (b, h, row, t)))
    if given["is_causal"]:
        score = kernel.where(kernel.position(t) <= kernel.position(row), score, -math.inf)
    # A row of which no key counts is zero, and so is the logarithm of its sum.
    base = _unless(kernel.reduce("max", score, (5,)), -math.inf, 0.0)
    weight = (score - base).op("exp")
    total = kernel.reduce("sum", weight, (5,))
    sums = kernel.reduce("sum", weight * kernel.load(value.view, value.dtype, (b, shared, t, column)), (5,))
    out, logsumexp = results
    if out is not None:
        kernel.store(out.view, out.dtype, (b, h, row, column), sums / _unless(total, 0.0, 1.0))
    if logsumexp is not None:
        empty = total.op("eq", 0.0)
        kernel.store(logsumexp.view, logsumexp.dtype, (b, h, row), kernel.where(empty, 0.0, base + total.op("log")))
    graph.emit(kernel)
    return results


def _unless(value: Value, number: float, instead: float) -> Value:
    """`value`, but `instead` where it is `number`."""
    return value.builder.where(value.op("eq", number), value.builder.const(instead, value.dtype), value)


def _is_read(node: torch.fx.Node, position: int) -> bool:
    return position == 0 or any(user.args[1] == position for user in node.users)


def _check(
    graph: ProgramBuilder, query: TensorRef, key: TensorRef, value: TensorRef, mask: TensorRef | None, dropout: float
) -> int:
    """The number of heads of queries that share a head of keys. Raises `NotLowered` for what no kernel covers."""
    if not graph.contract:
        raise NotLowered(_OFF)
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise NotLowered(_OTHER)
    if mask is not None and mask.dtype not in (query.dtype, DType.F32):
        raise NotLowered(_MASK)
    if dropout != 0:
        raise NotLowered(_DROPOUT)
    size = query.shape[3].value
    if size is None or not 2 <= size <= MOST_COLUMNS or {key.shape[3], value.shape[3]} != {query.shape[3]}:
        raise NotLowered(_SIZE)
    if any(key.view.strides[dim] == query.view.strides[dim] == ZERO and query.shape[dim] != ONE for dim in (0, 1)):
        raise NotLowered(_ALIKE)
    if key.shape[2] in (ZERO, ONE):
        raise NotLowered(_KEYS)
    group = exact_div(query.shape[1], key.shape[1]) if key.shape[1] != ZERO else None
    if group is None or group.value is None or value.shape[1] != key.shape[1]:
        raise NotLowered(_GROUPS)
    return group.value


def _check_speed(graph: ProgramBuilder, node: torch.fx.Node, query: TensorRef, key: TensorRef, causal: bool) -> None:
    """Leave to ATen what the machine model says it computes faster on one thread; symbols are guessed."""
    batch, heads, rows, size = query.shape
    count, keys = estimate(batch * heads), estimate(key.shape[2])
    work = Heads(count, estimate(rows), keys, estimate(size), causal, query.dtype)
    read = estimate(product(query.shape) + 2 * product(key.shape)) * query.dtype.itemsize
    written = estimate(product(query.shape)) * query.dtype.itemsize
    ours = Work(read, written, read + written, work.flops, query.dtype, work.steps(graph.machine))
    library = Work(read, written, read + written, work.library_flops, query.dtype, kind="attention")
    mine, other = (time(each, graph.machine).nanoseconds for each in (ours, library))
    facts = (("kernel_ns", round(mine)), ("aten_ns", round(other)))
    if mine > other:
        why = f"attention: the kernel takes about {mine:.3g} ns on one thread, ATen's fused kernel {other:.3g} ns"
        graph.decide(Decision("lower.attention", (node.name,), False, why, facts))
        raise NotLowered(why)
    why = f"the kernel takes about {mine:.3g} ns on one thread, ATen's fused kernel {other:.3g} ns"
    graph.decide(Decision("lower.attention", (node.name,), True, why, facts))
