"""Attention and its gradients in the loop IR: softmax of a product, times values.

With rows i, keys t, terms e and columns d:

    score  = sum over e of query[i, e] * key[t, e], times a scale, or cap * tanh(of that / cap);
             plus a mask[i, t]; or that, but the mask itself where it is -inf; or the mask itself where it is not 0;
             -inf where t > i + c
    base   = max over t of score, and of sink[i], 0 where that is -inf
    weight = exp(score - base)
    total  = sum over t of weight, plus exp(sink[i] - base)
    store out[i, d], (sum over t of weight * value[t, d]) / total, divided by 1 where total is 0
    store logsumexp[i], base + log(total), 0 where total is 0; or base alone, and
    store logarithm[i], log(total)

Cap, mask, `t > i + c`, sink and logsumexp are optional, and so are both tests whether total is 0: without them a row
without a visible key is NaN, as in softmax. The gradients, as in FlashAttention-2 (Dao 2023, algorithm 2), where i may
be the rows of several heads that share keys, without cap or sink:

    weight = exp(score - logsumexp[i]), or exp(score - logsumexp[i] - logarithm[i])
    change = weight * (sum over d of grad_out[i, d] * value[t, d] - sum over d of grad_out[i, d] * out[i, d]) * scale,
             0 where the mask replaces the score: where it is not 0, or is -inf
    store grad_query[i, e], sum over t of change * key[t, e]
    store grad_key[t, e], sum over i of change * query[i, e]
    store grad_value[t, d], sum over i of weight * grad_out[i, d]

These are the only kernels whose reductions have different axes: loop nests of the IR cannot express them, so no pass
rewrites them, and code generation handles each as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pellucid.ir.contraction import DTYPES, is_affine
from pellucid.ir.index import ONE, ZERO, Atom, Expr, Var, product
from pellucid.ir.nodes import Compute, Const, IndexValue, Kernel, Line, Load, Reduce, Store, axes_of
from pellucid.ir.types import DType

Masking: TypeAlias = Literal["adds", "hides", "replaces"]
"""How a mask changes scores. adds: it is added. hides: it is added, but where it is -inf it replaces the score, which
may be NaN. replaces: it replaces the score wherever it is not zero."""

_INF = float("inf")
_MASKING: dict[float, Masking] = {0.0: "replaces", -_INF: "hides"}


@dataclass(frozen=True, slots=True)
class Scores:
    """Products of queries and keys, with scale, cap and mask.

    dtype: of queries, keys, values and results in memory. added: dtype of the mask; `dtype` where there is none.
    cap: maximum magnitude of scores before the mask is applied; None if unbounded.
    term: the axis that is summed over. key: the axis of keys. limit: the last visible position of a key; None if all
    keys are visible. position: the position of a key, where there is a limit.
    """

    dtype: DType
    added: DType
    query: Load
    keys: Load
    mask: Load | None
    masking: Masking
    scale: float
    cap: float | None
    limit: Expr | None
    position: Expr | None
    term: str
    key: str


@dataclass(frozen=True, slots=True)
class Attention:
    """The loads, stores and axes of an attention.

    rows: the axes of queries that share keys and values. column: the axis of columns of values and results.
    sinks: for each row an additional score of the softmax, without a key, in f32.
    zero: a row without a visible key is zero; else NaN. logsumexp: only the maximum score where `logarithm` is stored,
    the logarithm of the sum relative to it.
    """

    scores: Scores
    values: Load
    sinks: Load | None
    out: Store
    logsumexp: Store | None
    logarithm: Store | None
    rows: tuple[str, ...]
    column: str
    zero: bool


@dataclass(frozen=True, slots=True)
class AttentionBackward:
    """The loads and stores of the gradients of an attention, see `Attention`. grad_query: in the compute type."""

    scores: Scores
    values: Load
    out: Load
    grad_out: Load
    logsumexp: Load
    logarithm: Load | None
    grad_query: Store
    grad_key: Store
    grad_value: Store
    rows: tuple[str, ...]
    column: str


def may_cap(cap: float | None) -> bool:
    """Whether `cap` can be computed accurately in f32; True without a cap."""
    return cap is None or 1e-6 <= abs(cap) <= 1e6


def mixes_reduction_axes(kernel: Kernel) -> bool:
    """True if reductions have different axes, which only attention may have."""
    return len({frozenset(line.rhs.axes) for line in kernel.body if isinstance(line.rhs, Reduce)}) > 1


def find_attention(kernel: Kernel) -> Attention | AttentionBackward | None:
    """The attention, or its gradients, that `kernel` computes in the form above; None for any other kernel.

    It computes in f32. Queries, keys, values and results have one type: f32, or a narrower float in memory. The mask
    has this type or f32, logarithms are f32.
    """
    if not mixes_reduction_axes(kernel):
        return None
    matcher = _Matcher(kernel)
    try:
        forward = any(isinstance(line.rhs, Reduce) and line.rhs.op == "max" for line in kernel.body)
        return matcher.attention() if forward else matcher.backward()
    except _OtherError:
        return None


def visible_share(kernel: Kernel, size: Callable[[Expr], int]) -> float:
    """The share of the scores of an attention that the limit leaves visible; 1 for other kernels or without a limit.

    size: evaluates an expression.
    """
    found = find_attention(kernel)
    if found is None or found.scores.limit is None or found.scores.position is None:
        return 1.0
    limit, position = found.scores.limit, found.scores.position
    rows, keys = (product(kernel.ranges[name] for name in axes) for axes in (sorted(limit.vars()), (found.scores.key,)))
    origin: dict[Atom, Expr] = {Var(axis.name): ZERO for axis in kernel.space}
    first = size(limit.substitute(origin) - position.substitute(origin)) + 1
    visible = sum(min(max(first + row, 0), size(keys)) for row in range(size(rows)))
    return visible / max(1, size(rows) * size(keys))


class _OtherError(Exception):
    """A line does not match the formula."""


class _Matcher:
    """Follows the formula from the stores to the loads; raises `_OtherError` where a line does not match."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.lines: Mapping[str, Line] = {line.out: line for line in kernel.body}
        self.scopes = axes_of(kernel)
        self.dtypes = {param.name: param.dtype for param in kernel.params}

    def attention(self) -> Attention:
        stores = sorted(self.kernel.stores(), key=lambda each: -len(self.scopes[each[0].out]))
        _expect(bool(stores))
        out, *others = (store for _, store in stores)
        sums, divisor = self.operands(out.arg, "div")
        zero = self.is_op(divisor, "where")
        total = self.unless(divisor, 0.0, 1.0) if zero else divisor
        weights, base_of_sink, sink = self.split_sink(total)
        weight, along = self.reduced(weights, "sum")
        weighted, values, over = self.summed(sums)
        (shifted,) = self.operands(weight, "exp")
        score, base = self.operands(shifted, "sub")
        _expect((weighted, over) == (weight, along))
        maximum = self.unless(base, -_INF, 0.0)
        if sink is not None:
            maximum, other = self.operands(maximum, "maximum")
            _expect((base_of_sink, other) == (base, sink))
        _expect(self.reduced(maximum, "max") == (score, along))
        _expect(len(others) <= 2)
        logsumexp, logarithm = (*others, None, None)[:2]
        if logsumexp is not None and logarithm is not None:
            _expect(logsumexp.arg == base and self.operands(logarithm.arg, "log") == (total,))
        elif logsumexp is not None:
            added = self.unless(logsumexp.arg, 0.0, 0.0, compared=total) if zero else logsumexp.arg
            left, right = self.operands(added, "add")
            _expect(left == base and self.operands(right, "log") == (total,))

        scores = self.scores(score, along)
        shared = values.index.vars() | scores.keys.index.vars() | {scores.term, scores.key}
        rows = tuple(axis.name for axis in self.kernel.space if axis.name not in shared)
        columns = values.index.vars() - self.scopes[weight] - {scores.key}
        _expect(len(columns) == 1)
        (column,) = columns
        self.check((values, out), scores.dtype)
        sinks = None if sink is None else self.load(sink)
        self.check((sinks, logsumexp, logarithm), DType.F32)
        return Attention(scores, values, sinks, out, logsumexp, logarithm, rows, column, zero)

    def backward(self) -> AttentionBackward:
        stores = [store for _, store in self.kernel.stores()]
        _expect(len(stores) == 3)
        grad_query, grad_key, grad_value = stores
        change, keys, along = self.summed(grad_query.arg)
        changed, query, rows = self.summed(grad_key.arg)
        weight, grad_out, over = self.summed(grad_value.arg)
        _expect((changed, over) == (change, rows))
        change, mask, masking = self.split_mask(change, instead=0.0)
        change, scale = self.split_scale(change)
        weighs, centred = self.operands(change, "mul")
        through, delta = self.operands(centred, "sub")
        out_gradient, values, columns = self.summed(through)
        read, out, summed = self.summed(delta)
        _expect(weighs == weight and columns == summed and len(columns) == 1)
        _expect(self.load(out_gradient) == self.load(read) == grad_out)
        (shifted,) = self.operands(weight, "exp")
        score, base = self.operands(shifted, "sub")
        logarithm = None
        if self.is_op(score, "sub"):
            logarithm = self.load(base)
            score, base = self.operands(score, "sub")
        logsumexp = self.load(base)

        scores = self.scores(score, along)
        _expect((scores.query, scores.keys, scores.scale, scores.cap) == (query, keys, scale, None))
        _expect((mask, masking) == ((None, "adds") if scores.masking == "adds" else (scores.mask, scores.masking)))
        self.check((values, out, grad_out, grad_key, grad_value), scores.dtype)
        self.check((logsumexp, logarithm, grad_query), DType.F32)
        return AttentionBackward(
            scores, values, out, grad_out, logsumexp, logarithm, grad_query, grad_key, grad_value, rows, columns[0]
        )

    def scores(self, score: str, along: tuple[str, ...]) -> Scores:
        """The scores; the keys must have one axis."""
        score, position, limit = self.split_limit(score)
        for index in (position, limit):
            _expect(index is None or [index.coefficient(name) for name in index.vars()] in ([], [ONE]))
        _expect(len(along) == 1 and (position is None or position.vars() == frozenset(along)))
        score, mask, masking = self.split_mask(score)
        if self.is_op(score, "add"):
            score, added = self.operands(score, "add")
            _expect(masking != "replaces" and mask in (None, self.load(added)))
            mask = self.load(added)
        else:
            _expect(masking != "hides")
        score, scale = self.split_scale(score)
        cap = None
        if self.is_op(score, "tanh"):
            (score,), cap = self.operands(score, "tanh"), scale
            score, scale = self.split_scale(score)
            scale *= cap
        query, keys, terms = self.summed(score)
        _expect(len(terms) == 1 and may_cap(cap))
        first = self.load(query)
        dtype = self.dtypes[first.buffer]
        added = self.dtypes[mask.buffer] if mask else dtype
        _expect(dtype in DTYPES and added in (dtype, DType.F32))
        self.check((first, keys), dtype)
        self.check((mask,), added)
        return Scores(dtype, added, first, keys, mask, masking, scale, cap, limit, position, terms[0], along[0])

    def split_sink(self, total: str) -> tuple[str, str | None, str | None]:
        """The sum of the weights of keys; if a sink's weight is added, also the base it is relative to and the sink."""
        if not self.is_op(total, "add"):
            return total, None, None
        weights, other = self.operands(total, "add")
        (shifted,) = self.operands(other, "exp")
        sink, base = self.operands(shifted, "sub")
        return weights, base, sink

    def check(self, accesses: Iterable[Load | Store | None], dtype: DType) -> None:
        """Expect all of them to have affine indices, and this type in memory."""
        for access in accesses:
            _expect(access is None or (is_affine(access.index) and self.dtypes[access.buffer] is dtype))

    def split_scale(self, name: str) -> tuple[str, float]:
        """The value that is multiplied by a constant, and the constant; the value itself and 1.0 without one."""
        if self.is_op(name, "mul"):
            value, factor = self.operands(name, "mul")
            if isinstance(self.lines[factor].rhs, Const):
                return value, self.number(factor)
        return name, 1.0

    def summed(self, name: str) -> tuple[str, Load, tuple[str, ...]]:
        """The left factor of a sum of products, the load that is the right one, and the axes."""
        parts, axes = self.reduced(name, "sum")
        left, right = self.operands(parts, "mul")
        return left, self.load(right), axes

    def is_op(self, name: str, op: str) -> bool:
        rhs = self.lines[name].rhs
        return isinstance(rhs, Compute) and rhs.op == op

    def operands(self, name: str, op: str) -> tuple[str, ...]:
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Compute) or rhs.op != op:
            raise _OtherError
        return rhs.args

    def reduced(self, name: str, op: str) -> tuple[str, tuple[str, ...]]:
        """The argument and the axes of a reduction."""
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Reduce) or rhs.op != op:
            raise _OtherError
        return rhs.arg, rhs.axes

    def load(self, name: str) -> Load:
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Load) or rhs.mask is not None:
            raise _OtherError
        return rhs

    def number(self, name: str) -> float:
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Const):
            raise _OtherError
        return float(rhs.value)

    def unless(self, name: str, number: float, instead: float, *, compared: str | None = None) -> str:
        """The value `x` of `name = instead if x == number else x`; if given, `compared` is compared in place of `x`."""
        condition, other, value = self.operands(name, "where")
        left, right = self.operands(condition, "eq")
        _expect(left == (compared or value) and (self.number(right), self.number(other)) == (number, instead))
        return value

    def split_mask(self, name: str, *, instead: float | None = None) -> tuple[str, Load | None, Masking]:
        """The value before masking, the mask that replaces it (or selects the number `instead`), and how."""
        if not self.is_op(name, "where"):
            return name, None, "adds"
        condition, first, second = self.operands(name, "where")
        mask, compared = self.operands(condition, "eq")
        masking = _MASKING.get(self.number(compared), "adds")
        _expect(masking != "adds")
        value, other = (first, second) if masking == "replaces" else (second, first)
        _expect(other == mask if instead is None else self.number(other) == instead)
        return value, self.load(mask), masking

    def split_limit(self, name: str) -> tuple[str, Expr | None, Expr | None]:
        """A score, and if there is a limit, the position of its key and the last visible position."""
        if not self.is_op(name, "where"):
            return name, None, None
        condition, score, other = self.operands(name, "where")
        if not self.is_op(condition, "le"):
            return name, None, None
        at, last = (self.lines[each].rhs for each in self.operands(condition, "le"))
        if not isinstance(at, IndexValue) or not isinstance(last, IndexValue):
            raise _OtherError
        _expect(self.number(other) == -_INF)
        return score, at.index, last.index


def _expect(met: bool) -> None:
    if not met:
        raise _OtherError
