"""Attention as the loop IR writes it: softmax of a product, times values.

With rows i, keys t, terms e and columns d:

    score  = sum over e of query[i, e] * key[t, e], times a scale, plus a mask[i, t], -inf where t > i + c
    base   = max over t of score, 0 where that is -inf
    weight = exp(score - base)
    total  = sum over t of weight
    store out[i, d], (sum over t of weight * value[t, d]) / total, divided by 1 where total is 0
    store logsumexp[i], base + log(total), 0 where total is 0

Mask, `t > i + c` and logsumexp may be absent. It is the one kernel whose reductions name different axes: no loops could
run it as it stands, so nothing rewrites it, and code generation takes it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pellucid.ir.contraction import DTYPES, is_affine
from pellucid.ir.index import ONE, ZERO, Atom, Expr, Var, product
from pellucid.ir.nodes import Compute, Const, IndexValue, Kernel, Line, Load, Reduce, Store, axes_of
from pellucid.ir.types import DType

_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Attention:
    """What an attention reads and writes, and over which axes.

    dtype: of queries, keys, values and results in memory. added: of the mask; `dtype` where there is none.
    term, key: the axes that are reduced. rows: the axes of queries that share keys and values. column: that of values
    and results. limit: the position of a key must not be greater than this one; None if all keys count.
    position: the position of a key, where there is a limit.
    """

    dtype: DType
    added: DType
    query: Load
    keys: Load
    values: Load
    mask: Load | None
    scale: float
    limit: Expr | None
    position: Expr | None
    out: Store
    logsumexp: Store | None
    term: str
    key: str
    rows: tuple[str, ...]
    column: str


def reduces_in_turn(kernel: Kernel) -> bool:
    """True if reductions name different axes: what an attention alone may do."""
    return len({frozenset(line.rhs.axes) for line in kernel.body if isinstance(line.rhs, Reduce)}) > 1


def find_attention(kernel: Kernel) -> Attention | None:
    """The attention that `kernel` is, written as above and computed in f32; None if it is anything else.

    Queries, keys, values and results are of one type: f32, or a narrower float in memory. The mask is of this type or
    f32, logarithms are f32.
    """
    if not reduces_in_turn(kernel):
        return None
    try:
        return _Matcher(kernel).attention()
    except _OtherError:
        return None


def share_of_scores(kernel: Kernel, size: Callable[[Expr], int]) -> float:
    """The part of the scores of an attention that count; 1 for all that has no limit. size: of an expression."""
    found = find_attention(kernel)
    if found is None or found.limit is None or found.position is None:
        return 1.0
    rows, keys = (product(kernel.ranges[name] for name in axes) for axes in (sorted(found.limit.vars()), (found.key,)))
    origin: dict[Atom, Expr] = {Var(axis.name): ZERO for axis in kernel.space}
    first = size(found.limit.substitute(origin) - found.position.substitute(origin)) + 1
    seen = sum(min(max(first + row, 0), size(keys)) for row in range(size(rows)))
    return seen / max(1, size(rows) * size(keys))


class _OtherError(Exception):
    """A line is not what the formula has in its place."""


class _Matcher:
    """Follows the formula from the stores to the loads; raises `_OtherError` where a line is another one."""

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
        total = self.unless(divisor, 0.0, 1.0)
        weight, key = self.reduced(total, "sum")
        parts, along = self.reduced(sums, "sum")
        weighted, value = self.operands(parts, "mul")
        (less,) = self.operands(weight, "exp")
        score, base = self.operands(less, "sub")
        _expect(
            self.reduced(self.unless(base, -_INF, 0.0), "max") == (score, key) and (weighted, along) == (weight, key)
        )
        _expect(len(others) <= 1)
        for store in others:
            left, right = self.operands(self.unless(store.arg, 0.0, 0.0, compared=total), "add")
            _expect(left == base and self.operands(right, "log") == (total,))
        logsumexp = others[0] if others else None

        score, position, limit = self.limited(score)
        for index in (position, limit):
            _expect(index is None or [index.coefficient(name) for name in index.vars()] in ([], [ONE]))
        _expect(position is None or position.vars() == frozenset((key,)))
        mask = None
        if self.does(score, "add"):
            score, added = self.operands(score, "add")
            mask = self.load(added)
        scale = 1.0
        if self.does(score, "mul"):
            score, factor = self.operands(score, "mul")
            scale = self.number(factor)
        parts, term = self.reduced(score, "sum")
        query, keys = (self.load(name) for name in self.operands(parts, "mul"))
        values = self.load(value)
        for access in (query, keys, values, mask, out, logsumexp):
            _expect(access is None or is_affine(access.index))
        shared = values.index.vars() | keys.index.vars() | {term, key}
        rows = tuple(axis.name for axis in self.kernel.space if axis.name not in shared)
        columns = values.index.vars() - self.scopes[weight] - {key}
        _expect(len(columns) == 1)
        (column,) = columns
        dtype = self.dtypes[query.buffer]
        added = self.dtypes[mask.buffer] if mask else dtype
        _expect({self.dtypes[each.buffer] for each in (query, keys, values, out)} == {dtype} <= DTYPES)
        _expect(added in (dtype, DType.F32) and (not logsumexp or self.dtypes[logsumexp.buffer] is DType.F32))
        return Attention(
            dtype, added, query, keys, values, mask, scale, limit, position, out, logsumexp, term, key, rows, column
        )

    def does(self, name: str, op: str) -> bool:
        rhs = self.lines[name].rhs
        return isinstance(rhs, Compute) and rhs.op == op

    def operands(self, name: str, op: str) -> tuple[str, ...]:
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Compute) or rhs.op != op:
            raise _OtherError
        return rhs.args

    def reduced(self, name: str, op: str) -> tuple[str, str]:
        """What is reduced, and the one axis over which it is."""
        rhs = self.lines[name].rhs
        if not isinstance(rhs, Reduce) or rhs.op != op or len(rhs.axes) != 1:
            raise _OtherError
        return rhs.arg, rhs.axes[0]

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
        """The value that `name` is, but for `instead` where that, or `compared`, is `number`."""
        condition, other, value = self.operands(name, "where")
        left, right = self.operands(condition, "eq")
        _expect(left == (compared or value) and (self.number(right), self.number(other)) == (number, instead))
        return value

    def limited(self, name: str) -> tuple[str, Expr | None, Expr | None]:
        """A score, and where keys are left out the position of its key, and that of the last key that counts."""
        if not self.does(name, "where"):
            return name, None, None
        condition, score, other = self.operands(name, "where")
        at, last = (self.lines[each].rhs for each in self.operands(condition, "le"))
        if not isinstance(at, IndexValue) or not isinstance(last, IndexValue):
            raise _OtherError
        _expect(self.number(other) == -_INF)
        return score, at.index, last.index


def _expect(met: bool) -> None:
    if not met:
        raise _OtherError
