"""The loop IR: a closed set of frozen nodes.

A `Program` is a list of `Kernel`s and `Extern`s over named buffers. A kernel says *what* is computed, for every
point of its iteration space, with no loop order: its body is a flat list of SSA lines, and the loops around a line
follow from the axes that the line depends on (see `axes_of`). The grammar:

    Program = Derived*  Buffer*  (Kernel | Extern)*  View*       -- sizes, inputs, nodes, outputs
    Kernel  = Param* Axis* Line*                                  -- buffers used, iteration space, body
    Line    = out: dtype = Rhs
    Rhs     = Const value | IndexValue index | CheckIndex val, size
            | Load buffer[index] mask? | Compute op(val*) | Reduce op(val) over axes
            | Store join? buffer[index], val

Meaning of a kernel: each line is a function from the axes it depends on to a scalar. `Reduce` folds its argument
over all points of the named axes; a line that depends on those axes as well as on the result runs in a second sweep
over them, which is how softmax and layer norm are one kernel. Stores happen after all loads of the same point; no
kernel may load an element that another point of the same kernel stores.

A store at an index that depends on values is a scatter. Its points run in the order of the space (the last axis
fastest), so that the result is the same in every run where several points store one element: the last one wins, or
all are combined with the old element, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pellucid.ir.derived import Derived, Float
from pellucid.ir.index import Expr
from pellucid.ir.origin import GLUE, Origin
from pellucid.ir.types import DType

Scalar: TypeAlias = bool | int | float
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of an iteration space: a counter `name` from 0 to `extent` (an expression over symbols)."""

    name: str
    extent: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """The same scalar at every point; NaN and infinities are values like any other.

    Equality is that of the written form, so that NaN equals NaN, and 0.0, -0.0, 0 and False all differ.
    """

    value: Scalar

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True, slots=True)
class IndexValue:
    """The value of an index expression, as `i64`: iota, positions, operands of masks."""

    index: Expr


@dataclass(frozen=True, slots=True)
class CheckIndex:
    """The `i64` value `arg`, with `size` added where it is negative; the line raises IndexError unless
    `-size <= arg < size`. With `wrap` false, a negative value fails as well. dim: for the message.
    """

    arg: str
    size: Expr
    wrap: bool = True
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Element `index` (counted in elements from the start of the buffer) of `buffer`, widened to `DType.compute`.

    mask: a bool value; where it is false the memory is not accessed and the result is `other`.
    """

    buffer: str
    index: Expr
    mask: str | None = None
    other: Scalar = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """A scalar operator of `ops.OPS` on earlier values."""

    op: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduction of `ops.REDUCTIONS` of `arg` over `axes`; all of a kernel have the same axes, except in attention."""

    op: str
    arg: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Write `arg`, narrowed to the buffer's type, to element `index`: once per point of the axes it depends on.

    Two points never store the same element, unless the index depends on values.

    join: a scalar operator of `ops.JOINS`; the element becomes join(element, arg), narrowed at each store.
    """

    buffer: str
    index: Expr
    arg: str
    join: str = ""


Rhs: TypeAlias = Const | IndexValue | CheckIndex | Load | Compute | Reduce | Store


@dataclass(frozen=True, slots=True)
class Line:
    """One SSA line. `out` is unique in the kernel; for a `Store` it names the line only.

    dtype: type of the value; for a `Store` the type of the argument. Never `bf16` or `f16`.
    """

    out: str
    rhs: Rhs
    dtype: DType
    origin: Origin = field(default=GLUE, compare=False)


@dataclass(frozen=True, slots=True)
class Param:
    """A buffer as a kernel sees it: `numel` elements of `dtype` from its data pointer on."""

    name: str
    dtype: DType
    numel: Expr


class _Sites(NamedTuple):
    """The loads and stores of a body, and the axes that it reduces over."""

    loads: tuple[tuple[Line, Load], ...]
    stores: tuple[tuple[Line, Store], ...]
    reduced: frozenset[str]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`body` for every point of `space`. `params` lists each buffer that the body loads or stores, once.

    cache: results of `memoized` functions.
    """

    name: str
    params: tuple[Param, ...]
    space: tuple[Axis, ...]
    body: tuple[Line, ...]
    cache: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the results of `memoized` functions."""
        return Kernel, (self.name, self.params, self.space, self.body)

    @property
    def ranges(self) -> dict[str, Expr]:
        """Extent of each axis by name, as the index algebra takes it."""
        return {axis.name: axis.extent for axis in self.space}

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes over which the kernel reduces, in space order; empty for a pointwise kernel."""
        names = _sites(self).reduced
        return tuple([axis.name for axis in self.space if axis.name in names]) if names else ()

    def loads(self) -> Iterator[tuple[Line, Load]]:
        return iter(_sites(self).loads)

    def stores(self) -> Iterator[tuple[Line, Store]]:
        return iter(_sites(self).stores)


def memoized(function: Callable[[Kernel], _R]) -> Callable[[Kernel], _R]:
    """`function`, computed once per kernel: fusion calls it again and again. Callers must not change the result."""

    @wraps(function)
    def cached(kernel: Kernel) -> _R:
        cache = kernel.cache
        if function not in cache:
            cache[function] = function(kernel)
        return cache[function]

    return cached


@memoized
def _sites(kernel: Kernel) -> _Sites:
    loads = tuple([(line, line.rhs) for line in kernel.body if isinstance(line.rhs, Load)])
    stores = tuple([(line, line.rhs) for line in kernel.body if isinstance(line.rhs, Store)])
    reduced = frozenset([name for line in kernel.body if isinstance(line.rhs, Reduce) for name in line.rhs.axes])
    return _Sites(loads, stores, reduced)


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a buffer; sizes, strides and offset in elements, relative to the buffer's data pointer."""

    buffer: str
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr


@dataclass(frozen=True, slots=True)
class Enum:
    """An argument that names a torch constant: `Enum("dtype", "float32")`, `Enum("layout", "strided")`."""

    kind: str
    name: str


Arg: TypeAlias = "View | Expr | Float | Scalar | str | Enum | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of an ATen (or custom) operator.

    op: the overload that is called, `namespace::name.overload`: `aten::addmm.out`, `aten::sort.default`.
    args, kwargs: in the operator's schema order.
    outputs: one view per tensor that the operator returns, None where the schema returns None or it is unused;
        each view's buffer is written whole. When `out` is true, `op` is an out= variant that writes into these
        views, which are not repeated in `kwargs`; otherwise it allocates its results.
    reason: why this is not compiled; it is shown to the user.
    mutates: buffers that the call writes besides its outputs.
    ordered: it draws random numbers or has another side effect; such calls keep their order and are never removed.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[View | None, ...]
    out: bool
    reason: str
    mutates: tuple[str, ...] = ()
    ordered: bool = False
    origin: Origin = field(default=GLUE, compare=False)


Node: TypeAlias = Kernel | Extern


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of `numel` elements.

    role: `input` (owned by the caller), `temp` (in the arena) or `output` (from the pool, handed to the caller).
    """

    name: str
    dtype: DType
    numel: Expr
    role: str


@dataclass(frozen=True, slots=True)
class Program:
    """A whole graph.

    symbols: size symbols, bound at each call by the integer inputs of these names.
    inputs: in the order of the graph's arguments: the name of an input buffer, or of a symbol, or None (unused).
    outputs: views, integers (`Expr`) or None, in the order of the graph's results.
    derived: numbers computed from the symbols, each after those that it depends on. A float that kernels read has an
        input buffer of its name, of one f64, which the program supplies itself.
    """

    symbols: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[str | None, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[View | Expr | None, ...]
    derived: tuple[Derived, ...] = ()

    @property
    def supplied(self) -> tuple[str, ...]:
        """The input buffers that hold derived floats, in order; they follow the other inputs."""
        floats = {each.name for each in self.derived if each.is_float}
        return tuple(buffer.name for buffer in self.buffers if buffer.name in floats)

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)


def operands(rhs: Rhs) -> tuple[str, ...]:
    """Names of the values that `rhs` reads, those inside index expressions included."""
    match rhs:
        case Const():
            return ()
        case IndexValue(index):
            return _vals(index)
        case CheckIndex(arg, _):
            return (arg,)
        case Load(_, index, mask, _):
            return _vals(index) if mask is None else (*_vals(index), mask)
        case Compute(_, args):
            return args
        case Reduce(_, arg, _):
            return (arg,)
        case Store(_, index, arg, _):
            return (*_vals(index), arg)


def _vals(index: Expr) -> tuple[str, ...]:
    names = index.vals()
    return tuple(sorted(names)) if names else ()


@memoized
def axes_of(kernel: Kernel) -> Mapping[str, frozenset[str]]:
    """For each line, the axes its value depends on: the loops that must enclose it.

    A store is in the loops of its value and of its index. A scatter that joins is in all loops: it runs at each point,
    also where neither its value nor its index changes.
    """
    result: dict[str, frozenset[str]] = {}
    every = frozenset(axis.name for axis in kernel.space)
    for line in kernel.body:
        axes: frozenset[str] = frozenset()
        for name in operands(line.rhs):
            axes |= result[name]
        match line.rhs:
            case Store(_, index, join=join) if join and index.vals():
                axes = every
            case IndexValue(index) | Load(_, index) | Store(_, index):
                axes |= index.vars()
            case Reduce(_, _, reduced):
                axes -= frozenset(reduced)
            case _:
                pass
        result[line.out] = axes
    return result
