"""The rows that one parallel iteration of an attention, or of its gradients, computes."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.codegen.blocks import Operand
from pellucid.ir.attention import Attention, AttentionBackward
from pellucid.ir.contraction import stride_along
from pellucid.ir.index import ZERO, Atom, Expr, Var, var
from pellucid.ir.nodes import Load, Store


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of queries that share keys and values.

    Of an attention: rows `lo` to `hi` of one head, at most `height`, along the axis `row` (None: a single row). Of
    gradients: all rows, `height` at a time, of all heads along the axis `head` (None: a single head).

    size: elements of a query, and columns. keys: their number. block: keys at a time.
    visible: how many keys the first row attends to; None if every row attends to all. triangular: each row attends to
    one key more than the row before.
    """

    attention: Attention | AttentionBackward
    row: str | None
    height: int
    size: int
    block: int
    keys: Expr
    visible: Expr | None
    triangular: bool
    head: str | None = None

    def operand(self, access: Load | Store, row: str | None, column: str | None) -> Operand:
        """The operand that `access` reads or writes, with these axes as rows and columns."""
        steps = (stride_along(access.index, name) if name else ZERO for name in (row, column))
        return Operand(access.buffer, self.first(access.index), *steps)

    def step(self, access: Load | Store) -> Expr:
        """The stride between heads that share keys."""
        return stride_along(access.index, self.head) if self.head else ZERO

    def first(self, index: Expr) -> Expr:
        """`index` at the first row, key, term and column of a block."""
        scores = self.attention.scores
        first: dict[Atom, Expr] = {Var(name): ZERO for name in (scores.key, scores.term, self.attention.column)}
        if self.row:
            first[Var(self.row)] = var("lo") if isinstance(self.attention, Attention) else ZERO
        if self.head:
            first[Var(self.head)] = ZERO
        return index.substitute(first)
