"""Lowers attention and its gradients to kernels: formulas of `ir/attention.py`, compiled by `codegen/attention.py`.

ATen computes the fused operator where no kernel supports it, and where ATen is faster. The calls that
`capture/attention.py` inserted for attention that was written out are always supported, and faster as kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pellucid.capture.written_attention import repeated_from
from pellucid.ir.attention import Masking
from pellucid.ir.contraction import DTYPES
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr, as_expr, exact_div
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import KernelBuilder, Value, broadcast_index
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments
from pellucid.lower.registry import NotLowered, rule
from pellucid.machine.attention import MAX_HEAD_SIZE, Heads
from pellucid.machine.work import estimate

_OFF = "attention: ATen's fused kernel computes it, because the option `contract` is off"
_OTHER = "attention: kernels compute it in f32, bf16 and f16, ATen's fused kernel in other types"
_MASK = "attention: kernels add masks of the operands' type, or f32; ATen's fused kernel others"
_DROPOUT = "attention: dropout draws from eager's random number stream, in ATen's fused kernel"
_SIZE = (
    f"attention: kernels have head sizes from 2 to {MAX_HEAD_SIZE}, known when compiled; ATen's fused kernel has others"
)
_KEYS = "attention: of a single key, or of none, ATen's fused kernel computes it"
_REPEATED = "attention: heads or batches have the same queries and keys, whose weights ATen's fused kernel recomputes"
_GROUPS = "attention: query heads are no known multiple of key heads; ATen's fused kernel checks them"
_UNREAD = "gradients of attention: the kernel computes all three, ATen's fused kernel computes it where one is not read"
_FASTER = "the kernel computes gradients of attention faster than ATen's fused kernel at all sizes"
_ROW = "gradients of attention: of a single query, ATen's fused kernel computes them"


@rule("_scaled_dot_product_flash_attention_for_cpu.default")
def attention(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """softmax(scale * query @ key^T + mask) @ value, and the logarithm of the softmax's sum if that is read.

    query: (batch, heads, rows, size). key, value: (batch, heads or a divisor of it, keys, size). All of one type: f32,
    bf16 or f16. mask: of this type or f32, and broadcast to (batch, heads, rows, keys).
    """
    given = _unrepeated(graph, node)
    formula = _Formula.of(graph, node, given)
    _check_speed(graph, node, given["query"], given["key"], given["is_causal"])
    first, second = node.meta["val"]
    out, logsumexp = graph.new(first, "attention"), graph.new(second, "logsumexp") if _is_read(node, 1) else None
    base, total = formula.result(out, zero=True)
    if logsumexp is not None:
        logarithm = formula.kernel.where(total.op("eq", 0.0), 0.0, base + total.op("log"))
        formula.store(logsumexp, ROW, None, logarithm)
    graph.emit(formula.kernel)
    return out, logsumexp


@rule("pellucid::attention.default")
def own_attention(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """Like `attention`, as `capture/operators.py` defines it: a row whose keys are all masked out is NaN."""
    formula = _Formula.of(graph, node, arguments(node, graph))
    first, *others = node.meta["val"]
    out, read = graph.new(first, "attention"), any(_is_read(node, position) for position in (1, 2))
    maximum, logarithm = (graph.new(meta, "statistics") if read else None for meta in others)
    base, total = formula.result(out, zero=False)
    if maximum is not None and logarithm is not None:
        formula.store(maximum, ROW, None, base)
        formula.store(logarithm, ROW, None, total.op("log"))
    graph.emit(formula.kernel)
    return out, maximum, logarithm


@rule("_scaled_dot_product_flash_attention_for_cpu_backward.default", "pellucid::attention_backward.default")
def attention_backward(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The gradients of query, key and value, from that of the result; shapes and types as in `attention`."""
    given = arguments(node, graph)
    formula = _Formula.of(graph, node, given)
    query = given["query"]
    if not all(_is_read(node, position) for position in range(3)):
        raise NotLowered(_UNREAD)
    if query.shape[2] == ONE:
        raise NotLowered(_ROW)
    results = tuple(graph.new(meta, "gradient") for meta in node.meta["val"])
    # Blocks of keys are accumulated into the gradient of queries, in f32.
    narrow = query.dtype is not DType.F32
    sums = graph.new(node.meta["val"][0].float(), "sums") if narrow else results[0]
    kernel, scale = formula.kernel, formula.scale
    weight = formula.log_weight().op("exp")
    grad_out = formula.load("grad_out", ROW, COLUMN)
    through = kernel.reduce("sum", grad_out * formula.load("value", KEY, COLUMN), (COLUMN,))
    delta = kernel.reduce("sum", grad_out * formula.load("out", ROW, COLUMN), (COLUMN,))
    change = formula.unless_replaced(weight * (through - delta) * scale)
    formula.store(sums, ROW, TERM, kernel.reduce("sum", change * formula.load("key", KEY, TERM), (KEY,)))
    for result, parts, term in (
        (results[1], change * formula.load("query", ROW, TERM), TERM),
        (results[2], weight * grad_out, COLUMN),
    ):
        formula.store(result, KEY, term, kernel.reduce("sum", parts, (HEAD, ROW)))
    graph.emit(kernel)
    if narrow:
        graph.copy(node, sums, results[0])
    graph.decide(Decision("lower.attention", (node.name,), True, _FASTER))
    return results


# The axes of an attention. HEAD: of those that share keys.
BATCH, SHARED, HEAD, ROW, COLUMN, KEY, TERM = range(7)


@dataclass(frozen=True, slots=True)
class _Formula:
    """The parts that attention and its gradients share. given: the arguments of the call by name."""

    kernel: KernelBuilder
    given: Mapping[str, Any]
    scale: float

    @classmethod
    def of(cls, graph: ProgramBuilder, node: torch.fx.Node, given: Mapping[str, Any]) -> _Formula:
        query, key = given["query"], given["key"]
        group = _check(graph, query, key, given["value"], given["attn_mask"], given.get("dropout_p", 0.0))
        batch, _, rows, size = query.shape
        kernel = graph.kernel(node, (batch, key.shape[1], as_expr(group), rows, size, key.shape[2], size))
        scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(estimate(size))
        return cls(kernel, given, float(scale))

    @property
    def masking(self) -> Masking:
        """How the mask is applied to scores."""
        return "adds" if self.given["attn_mask"] is None else self.given.get("masking", "adds")

    def mask(self) -> Value:
        mask = self.given["attn_mask"]
        return self.kernel.load(mask.view, mask.dtype, broadcast_index(mask.shape, self.index(ROW, KEY)))

    def unless_replaced(self, gradient: Value) -> Value:
        """The gradient of a score, zero where the mask replaces the score."""
        return gradient if self.masking == "adds" else self.unless_masked(self.mask(), gradient, 0.0)

    def unless_masked(self, mask: Value, value: Value, instead: Value | float) -> Value:
        """`value`, but `instead` where the mask replaces the score."""
        if self.masking == "replaces":
            return self.kernel.where(mask.op("eq", 0.0), value, instead)
        return self.kernel.where(mask.op("eq", -math.inf), instead, value)

    def result(self, out: TensorRef, *, zero: bool) -> tuple[Value, Value]:
        """Store the result; return the maximum score of each row, and the sum of its weights.

        zero: a row whose keys are all masked out is zero, else NaN.
        """
        kernel, score, sink = self.kernel, self.scores(), self.sink()
        maximum = kernel.reduce("max", score, (KEY,))
        base = _unless(maximum if sink is None else maximum.op("maximum", sink), -math.inf, 0.0)
        weight = (score - base).op("exp")
        total = kernel.reduce("sum", weight, (KEY,))
        if sink is not None:
            total = total + (sink - base).op("exp")
        sums = kernel.reduce("sum", weight * self.load("value", KEY, COLUMN), (KEY,))
        self.store(out, ROW, COLUMN, sums / (_unless(total, 0.0, 1.0) if zero else total))
        return base, total

    def log_weight(self) -> Value:
        """The logarithm of a weight, from the statistics that forward stored."""
        if "greatest" not in self.given:
            return self.scores() - self.load("logsumexp", ROW, None)
        return self.scores() - self.load("greatest", ROW, None) - self.load("logarithm", ROW, None)

    def scores(self) -> Value:
        products = self.load("query", ROW, TERM) * self.load("key", KEY, TERM)
        score, cap = self.kernel.reduce("sum", products, (TERM,)), self.given.get("cap")
        score = score * self.scale if cap is None else (score * (self.scale / cap)).op("tanh") * cap
        if self.given["attn_mask"] is not None:
            added = self.mask()
            score = score if self.masking == "replaces" else score + added
            score = score if self.masking == "adds" else self.unless_masked(added, score, added)
        if self.given.get("is_causal", False):
            key, row = (self.kernel.position(self.kernel.index[axis]) for axis in (KEY, ROW))
            score = self.kernel.where(key <= row, score, -math.inf)
        return score

    def sink(self) -> Value | None:
        """The sink of a row: its score that belongs to no key."""
        sinks = self.given.get("sinks")
        if sinks is None:
            return None
        return self.kernel.load(sinks.view, sinks.dtype, broadcast_index(sinks.shape, self.index(ROW, None)))

    def load(self, name: str, row: int, column: int | None) -> Value:
        """The element of an argument in this row (of queries or of keys) and column."""
        tensor = self.given[name]
        return self.kernel.load(tensor.view, tensor.dtype, self.index(row, column))

    def store(self, to: TensorRef, row: int, column: int | None, value: Value) -> None:
        self.kernel.store(to.view, to.dtype, self.index(row, column), value)

    def index(self, row: int, column: int | None) -> tuple[Expr, ...]:
        index = self.kernel.index
        head = index[SHARED] if row == KEY else index[SHARED] * self.kernel.shape[HEAD] + index[HEAD]
        return (index[BATCH], head, index[row], *(() if column is None else (index[column],)))


def _unless(value: Value, number: float, instead: float) -> Value:
    """`value`, but `instead` where it is `number`."""
    return value.builder.where(value.op("eq", number), value.builder.const(instead, value.dtype), value)


def _unrepeated(graph: ProgramBuilder, node: torch.fx.Node) -> Mapping[str, Any]:
    """The arguments of a call, with the keys and values from before they were repeated for the heads of a group."""
    given = arguments(node, graph)
    found: dict[str, TensorRef] = {}
    for name, argument in zip(("key", "value"), node.args[1:3], strict=True):
        source = repeated_from(argument, given[name].shape)  # type: ignore[arg-type]
        if source is not None:
            tensor = graph.value(source)
            shape, strides = ((*each[:2], *each[3:]) for each in (tensor.view.shape, tensor.view.strides))
            found[name] = TensorRef(replace(tensor.view, shape=shape, strides=strides), tensor.dtype)
    return {**given, **found} if len({each.shape for each in found.values()}) == 1 and len(found) == 2 else given


def _is_read(node: torch.fx.Node, position: int) -> bool:
    return any(user.args[1] == position for user in node.users)


def _check(
    graph: ProgramBuilder, query: TensorRef, key: TensorRef, value: TensorRef, mask: TensorRef | None, dropout: float
) -> int:
    """The number of query heads that share a key head. Raises `NotLowered` if no kernel supports the call."""
    if not graph.contract:
        raise NotLowered(_OFF)
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise NotLowered(_OTHER)
    if mask is not None and mask.dtype not in (query.dtype, DType.F32):
        raise NotLowered(_MASK)
    if dropout != 0:
        raise NotLowered(_DROPOUT)
    size = query.shape[3].value
    if size is None or not 2 <= size <= MAX_HEAD_SIZE or {key.shape[3], value.shape[3]} != {query.shape[3]}:
        raise NotLowered(_SIZE)
    if any(key.view.strides[dim] == query.view.strides[dim] == ZERO and query.shape[dim] != ONE for dim in (0, 1)):
        raise NotLowered(_REPEATED)
    if key.shape[2] in (ZERO, ONE):
        raise NotLowered(_KEYS)
    group = exact_div(query.shape[1], key.shape[1]) if key.shape[1] != ZERO else None
    if group is None or group.value is None or value.shape[1] != key.shape[1]:
        raise NotLowered(_GROUPS)
    return group.value


def _check_speed(graph: ProgramBuilder, node: torch.fx.Node, query: TensorRef, key: TensorRef, causal: bool) -> None:
    """Leave calls to ATen that it computes faster on one thread; symbolic sizes are estimated."""
    (batch, heads, rows, size), shared = query.shape, key.shape[1]
    sharing = max(1, estimate(heads) // max(1, estimate(shared)))
    count, keys = estimate(batch * heads), estimate(key.shape[2])
    called = Heads(count, estimate(rows), keys, estimate(size), causal, query.dtype, sharing)
    mine, other = graph.library.attention_times(called)
    facts = (("kernel_ns", round(mine)), ("aten_ns", round(other)))
    why = f"the kernel takes about {mine:.3g} ns on one thread, ATen's fused kernel {other:.3g} ns"
    graph.decide(Decision("lower.attention", (node.name,), mine <= other, why, facts))
    if mine > other:
        raise NotLowered(f"attention: {why}")
