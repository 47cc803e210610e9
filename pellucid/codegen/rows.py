"""What one parallel iteration of an attention works on: some rows of a head, and all keys of it."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.codegen.blocks import Operand, stride_along
from pellucid.ir.attention import Attention
from pellucid.ir.index import ZERO, Atom, Expr, Var, var
from pellucid.ir.nodes import Load, Store


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows from `lo` to `hi` of one head: at most `height` of them, along the axis `row` (None: there is one).

    size: elements of a query, and columns. keys: how many there are. block: keys at a time.
    seen: how many keys the first row sees; None if all rows see all. triangular: each row sees one more.
    """

    attention: Attention
    row: str | None
    height: int
    size: int
    block: int
    keys: Expr
    seen: Expr | None
    triangular: bool

    @property
    def query(self) -> Operand:
        return self._part(self.attention.query, self.row, self.attention.term)

    @property
    def key(self) -> Operand:
        return self._part(self.attention.keys, self.attention.key, self.attention.term)

    @property
    def value(self) -> Operand:
        return self._part(self.attention.values, self.attention.key, self.attention.column)

    @property
    def mask(self) -> Operand | None:
        mask = self.attention.mask
        return self._part(mask, self.row, self.attention.key) if mask else None

    @property
    def out(self) -> Operand:
        return self._part(self.attention.out, self.row, self.attention.column)

    @property
    def logsumexp(self) -> Operand | None:
        """Of which there is one column."""
        store = self.attention.logsumexp
        return self._part(store, self.row, None) if store else None

    def _part(self, access: Load | Store, row: str | None, column: str | None) -> Operand:
        first = first_of(access.index, self.attention, self.row)
        steps = (stride_along(access.index, name) if name else ZERO for name in (row, column))
        return Operand(access.buffer, first, *steps)


def first_of(index: Expr, found: Attention, row: str | None) -> Expr:
    """`index` at the first row, key, term and column of a block."""
    first: dict[Atom, Expr] = {Var(name): ZERO for name in (found.key, found.term, found.column)}
    return index.substitute({**first, Var(row): var("lo")} if row else first)
