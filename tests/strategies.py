"""Kernels and data for property tests, and the rule by which two runs of a kernel agree.

    @given(st.data())
    def test_native(data):
        kernel = data.draw(kernels())
        symbols = data.draw(symbols_for(kernel))
        inputs = data.draw(inputs_for(kernel, symbols))
        expected = expect(kernel, inputs, symbols)
        actual = {name: tensor.clone() for name, tensor in inputs.items()}
        run_native(kernel, actual, symbols)
        assert_close(kernel, expected, actual)

A kernel may contain any operator on any value: what cannot be compared is found by `expect`, which runs the
interpreter and an error analysis beside it. See `expect` for its rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st

from pellucid.ir.index import ONE, ZERO, Expr, as_expr, const, floordiv, mod, sym, val, var
from pellucid.ir.interp import TORCH_DTYPES, line_values, run_kernel
from pellucid.ir.nodes import (
    Axis,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Param,
    Reduce,
    Rhs,
    Store,
    axes_of,
    operands,
)
from pellucid.ir.ops import EXPENSIVE, JOINS, OPS, Domain, Result
from pellucid.ir.printer import print_kernel
from pellucid.ir.types import DType

Tensor: TypeAlias = torch.Tensor

FLOATS = (DType.F32, DType.F64)
INTS = (DType.I64, DType.I32, DType.I16, DType.I8, DType.U64, DType.U32, DType.U16, DType.U8)
VALUE_TYPES = (*FLOATS, *INTS, DType.BOOL)
BUFFER_TYPES = (DType.F32, DType.BF16, DType.F16, DType.F64, *INTS, DType.BOOL)
MAX_POINTS = 6000  # of one iteration space: the interpreter and the error analysis stay at milliseconds
DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

_DOMAINS = {
    Domain.ANY: VALUE_TYPES,
    Domain.NUMBER: (*FLOATS, *INTS),
    Domain.FLOAT: FLOATS,
    Domain.INTEGRAL: (*INTS, DType.BOOL),
    Domain.INTEGER: INTS,
}


# ------------------------------------------------------------------------------------------------ kernels


@st.composite
def kernels(draw: Any, reductions: bool = True, symbolic: bool = False, max_ops: int = 8) -> Kernel:
    """A well-formed kernel with up to three axes.

    It loads from one to four buffers of any type, contiguous, transposed, strided, reversed, broadcast, through a
    floor-div or mod, under a mask or through a checked index; computes; reduces over any of its axes, and computes
    on with the results and with values along the reduced axes; stores one to three results, possibly in place.
    Lines that no store depends on are left out.

    symbolic: extents are size symbols; `symbols_for` draws their values.
    """
    writer = _Writer(draw, draw(_spaces(symbolic)))
    for _ in range(draw(st.integers(1, 3))):
        writer.add_load()
    for _ in range(draw(st.integers(1, max_ops))):
        writer.add_anything()
    if reductions and writer.space and draw(st.integers(0, 2)):
        writer.add_reductions()
        for _ in range(draw(st.integers(0, max_ops))):
            writer.add_anything()
    writer.add_stores()
    return without_dead_lines(Kernel("k", tuple(writer.params), writer.space, tuple(writer.lines)))


def symbols_for(kernel: Kernel) -> st.SearchStrategy[dict[str, int]]:
    """Values for the size symbols of a kernel from `kernels(symbolic=True)`."""
    names = sorted({name for axis in kernel.space for name in axis.extent.syms()})
    largest = 70 if len(names) < 3 else 17
    return st.fixed_dictionaries({name: st.integers(1, largest) for name in names})


def without_dead_lines(kernel: Kernel) -> Kernel:
    """`kernel` without the lines that no store depends on and the parameters that only they use."""
    needed: set[str] = set()
    kept: list[Line] = []
    for line in reversed(kernel.body):
        if isinstance(line.rhs, Store) or line.out in needed:
            kept.append(line)
            needed.update(operands(line.rhs))
    used = {line.rhs.buffer for line in kept if isinstance(line.rhs, Load | Store)}
    params = tuple(param for param in kernel.params if param.name in used)
    return Kernel(kernel.name, params, kernel.space, tuple(reversed(kept)))


@st.composite
def _spaces(draw: Any, symbolic: bool) -> tuple[Axis, ...]:
    rank = draw(st.sampled_from([1, 2, 3, 1, 2, 3, 0]))
    if symbolic:
        extents = (draw(st.one_of(st.just(sym(f"s{d}")), st.integers(1, 17).map(const))) for d in range(rank))
        return tuple(Axis(f"i{d}", extent) for d, extent in enumerate(extents))
    budget, axes = MAX_POINTS, []
    for d in range(rank):
        most = max(1, min(70, budget))
        corners = [extent for extent in (1, 8, 15, 16, 17, 31, 32, 33, 64, 65) if extent <= most]
        extent = draw(st.one_of(st.integers(1, most), st.sampled_from(corners), st.integers(0, most)))
        budget //= max(1, extent)
        axes.append(Axis(f"i{d}", const(extent)))
    return tuple(axes)


class _Writer:
    """A kernel in the making; every `add_*` draws one thing and appends its lines."""

    def __init__(self, draw: Any, space: tuple[Axis, ...]) -> None:
        self.draw = draw
        self.space = space
        self.extents = {axis.name: axis.extent for axis in space}
        self.params: list[Param] = []
        self.lines: list[Line] = []
        self.types: dict[str, DType] = {}
        self.reduced: tuple[str, ...] = ()
        self.in_place: dict[str, Expr] = {}  # loaded at this index only, which differs at each point

    def rarely(self, times: int = 4) -> bool:
        """True once in so many times; shrinks to False."""
        return self.draw(st.integers(1, times)) == times

    # --------------------------------------------------------------------------------------- lines

    def line(self, rhs: Rhs, dtype: DType) -> str:
        name = f"{'st' if isinstance(rhs, Store) else 'v'}{len(self.lines)}"
        self.lines.append(Line(name, rhs, dtype))
        if not isinstance(rhs, Store):
            self.types[name] = dtype
        return name

    def const(self, value: float, dtype: DType) -> str:
        return self.line(Const(value), dtype)

    def compute(self, op: str, *args: str) -> str:
        dtype = self.types[args[-1]]
        return self.line(Compute(op, args), DType.BOOL if OPS[op].result is Result.BOOL else dtype)

    def cast(self, name: str, dtype: DType) -> str:
        """Floats are clamped first, most of the time: beyond its range an integer type holds anything."""
        if self.types[name] is dtype:
            return name
        if self.types[name].is_float and dtype.is_int and not self.rarely():
            low = self.const(max(-100.0, float(dtype.limits[0])), self.types[name])
            name = self.compute("maximum", name, low)
            name = self.compute("minimum", name, self.const(100.0, self.types[name]))
        return self.line(Compute("cast", (name,)), dtype)

    def pick(self, dtype: DType) -> str:
        """A value of this type: an earlier one, or a cast of one, or a constant."""
        same = [name for name in reversed(self.types) if self.types[name] is dtype]
        others = [name for name in reversed(self.types) if self.types[name] is not dtype]
        ways = ["value"] * 6 * bool(same) + ["cast"] * (1 if same else 6) * bool(others) + ["const"]
        match self.draw(st.sampled_from(ways)):
            case "value":
                return self.draw(st.sampled_from(same[:3] + same))
            case "cast":
                return self.cast(self.draw(st.sampled_from(others)), dtype)
            case _:
                return self.const(self.draw(scalars(dtype)), dtype)

    def pick_type(self, allowed: Sequence[DType]) -> DType:
        """One of these types, more often one that values have already, above all the newest."""
        present = [dtype for dtype in dict.fromkeys(reversed(self.types.values())) if dtype in allowed]
        return self.draw(st.sampled_from([*present[:1] * 4, *present, *allowed]))

    # ---------------------------------------------------------------------------------- statements

    def add_anything(self) -> None:
        match self.draw(st.sampled_from(["op"] * 8 + ["load", "iota"])):
            case "load" if len(self.params) < 4:
                self.add_load()
            case "iota":
                self.line(IndexValue(self.layout(overlap=True)[0] - self.draw(st.integers(0, 9))), DType.I64)
            case _:
                self.add_op()

    def add_op(self) -> None:
        op = OPS[self.draw(st.sampled_from(sorted(OPS)))]
        dtype = self.pick_type(_DOMAINS[op.domain])
        if op.result is Result.CAST:
            self.cast(self.pick(dtype), self.draw(st.sampled_from(VALUE_TYPES)))
            return
        args = [self.pick(dtype) for _ in range(op.arity)]
        if op.result is Result.SELECT:
            args[0] = self.pick(DType.BOOL)
        if op.name in DIVISIONS and dtype.is_int:
            args[1] = self.divisor(args[1])
        self.compute(op.name, *args)

    def divisor(self, name: str) -> str:
        """An integer other than 0 and -1, by which division may trap."""
        dtype = self.types[name]
        name = self.compute("bitwise_and", name, self.const(62, dtype))
        name = self.compute("bitwise_or", name, self.const(3, dtype))
        return self.compute("neg", name) if self.draw(st.booleans()) else name

    def add_reductions(self) -> None:
        names = [axis.name for axis in self.space]
        suffixes = [tuple(names[start:]) for start in range(len(names))]
        subsets = st.lists(st.sampled_from(names), min_size=1, unique=True).map(lambda s: tuple(sorted(s)))
        self.reduced = self.draw(st.one_of(st.sampled_from(suffixes), subsets))
        for _ in range(self.draw(st.integers(1, 2))):
            result = self.add_reduction()
            if not self.rarely(3):
                self.add_broadcast_back(result)

    def add_reduction(self) -> str:
        ops = ["sum", "prod", "any", "all"]
        if all(self.extents[axis] != ZERO for axis in self.reduced):
            ops = ["sum", "max", "min", "prod", "any", "all", "argmax", "argmin"]
        op = self.draw(st.sampled_from(ops))
        allowed = {"any": (DType.BOOL,), "all": (DType.BOOL,), "max": VALUE_TYPES, "min": VALUE_TYPES}
        types = allowed.get(op, _DOMAINS[Domain.NUMBER])
        along = self.along_reduced()
        if along and not self.rarely(6):
            arg = self.draw(st.sampled_from(along))
            arg = arg if self.types[arg] in types else self.cast(arg, self.draw(st.sampled_from(types)))
        else:  # an argument that is the same all along the axes is reduced like any other
            arg = self.pick(self.pick_type(types))
        return self.line(Reduce(op, arg, self.reduced), DType.I64 if "arg" in op else self.types[arg])

    def along_reduced(self) -> list[str]:
        """The values that depend on a reduced axis, newest first."""
        scopes = axes_of(Kernel("", (), self.space, tuple(self.lines)))
        return [name for name in reversed(self.types) if scopes[name] & set(self.reduced)]

    def add_broadcast_back(self, result: str) -> None:
        """Join the result of a reduction with a value along the reduced axes, as softmax does."""
        if along := self.along_reduced():
            other = self.draw(st.sampled_from(along))
            result = self.cast(result, self.types[other])
            logical = self.types[other] is DType.BOOL
            ops = ["bitwise_xor", "maximum", "eq"] if logical else ["sub", "add", "mul", "lt", "maximum"]
            self.compute(self.draw(st.sampled_from(ops)), other, result)

    # -------------------------------------------------------------------------------------- memory

    def param(self, dtype: DType, numel: Expr) -> str:
        self.params.append(Param(f"buf{len(self.params)}", dtype, numel))
        return self.params[-1].name

    def layout(self, needed: frozenset[str] = frozenset(), overlap: bool = False) -> tuple[Expr, Expr]:
        """(index, numel): the axes of `needed` and some others, with strides in any order, padding and an offset.

        overlap: strides may be anything, 0 and negative included; otherwise no two points have the same index.
        """
        index, stride, numel = ZERO, as_expr(self.draw(st.sampled_from([1, 1, 1, 2, 3]))), ONE
        names = sorted(self.extents, reverse=True)
        if self.rarely(3):  # most buffers have all axes, and in order
            names = [name for name in self.draw(st.permutations(names)) if name in needed or self.draw(st.booleans())]
        for name in names:
            extent = self.extents[name]
            last = ZERO if extent == ZERO else extent - 1
            step, backwards = stride, False
            if overlap and self.rarely():
                step, backwards = as_expr(self.draw(st.integers(0, 4))), self.draw(st.booleans())
            index = index + (last - var(name) if backwards else var(name)) * step
            numel = numel + last * step
            stride = stride * (last + 1) + self.draw(st.sampled_from([0, 0, 0, 1, 5]))
        offset = self.draw(st.sampled_from([0, 0, 0, 1, 7]))
        return index + offset, numel + offset + self.draw(st.sampled_from([0, 0, 2]))

    def add_load(self) -> None:
        dtype = self.draw(st.sampled_from(BUFFER_TYPES))
        match self.draw(st.sampled_from(["plain"] * 5 + ["overlap"] * 2 + ["mask", "pad", "divmod", "indirect"])):
            case "pad" if self.space:
                self.add_padded_load(dtype)
            case "divmod" if self.space:
                self.add_divmod_load(dtype)
            case "overlap":
                index, numel = self.layout(overlap=True)
                self.load(dtype, index, numel)
            case "mask" if self.types:
                index, numel = self.layout()
                self.load(dtype, index, numel, self.pick(DType.BOOL))
            case "indirect":
                self.add_indirect_load(dtype)
            case _:
                index, numel = self.layout()
                self.load(dtype, index, numel)
                self.in_place[self.params[-1].name] = index

    def load(self, dtype: DType, index: Expr, numel: Expr, mask: str | None = None) -> str:
        other = 0 if mask is None else self.draw(scalars(dtype.compute))
        return self.line(Load(self.param(dtype, numel), index, mask, other), dtype.compute)

    def add_padded_load(self, dtype: DType) -> None:
        """A load shifted along one axis, masked where that leaves the buffer: padding, or one part of a cat."""
        index, numel = self.layout()
        name, shift = self.draw(st.sampled_from(sorted(self.extents))), self.draw(st.integers(1, 9))
        stride = index.coefficient(name)
        assert stride is not None
        counter = self.line(IndexValue(var(name)), DType.I64)
        if self.draw(st.booleans()):
            mask = self.compute("ge", counter, self.const(shift, DType.I64))
            self.load(dtype, index - stride * shift, numel, mask)
        else:
            limit = self.line(IndexValue(self.extents[name] - shift), DType.I64)
            self.load(dtype, index + stride * shift, numel, self.compute("lt", counter, limit))

    def add_divmod_load(self, dtype: DType) -> None:
        """An axis that runs over two dimensions of the buffer, as a reshape of a transposed tensor gives."""
        name, inner = self.draw(st.sampled_from(sorted(self.extents))), self.draw(st.integers(1, 20))
        extent, pitch = self.extents[name], inner + self.draw(st.integers(0, 3))
        outer, left = floordiv(var(name), inner, self.extents), mod(var(name), inner, self.extents)
        whole = ONE if extent == ZERO else floordiv(extent - 1, inner) + 1
        if self.draw(st.booleans()):
            self.load(dtype, outer * pitch + left, whole * pitch)
        else:
            self.load(dtype, left * whole + outer, whole * inner)

    def add_indirect_load(self, dtype: DType) -> None:
        """An embedding: rows of a table, chosen by a buffer of checked indices."""
        index, numel = self.layout()
        rows, wrap = self.draw(st.integers(1, 9)), self.draw(st.booleans())
        position = self.load(self.draw(st.sampled_from([DType.I64, DType.I32, DType.U32, DType.U8])), index, numel)
        position = self.cast(position, DType.I64)
        row = self.line(CheckIndex(position, const(rows), wrap), DType.I64)
        column, width = self.layout(overlap=True)
        self.load(dtype, val(row) * width + column, width * rows)

    def add_stores(self) -> None:
        """Store values that nothing else uses, so that much of the kernel matters; one from a reduction first."""
        used, folded = set[str](), set[str]()
        for line in self.lines:
            used.update(operands(line.rhs))
            if isinstance(line.rhs, Reduce) or folded.intersection(operands(line.rhs)):
                folded.add(line.out)
        unused = [name for name in reversed(self.types) if name not in used]
        unused.sort(key=lambda name: name not in folded)
        count = self.draw(st.integers(1, 3))
        for name in [*unused[:1], *self.draw(st.permutations(unused[1:]))][:count]:
            self.add_store(name)

    def add_store(self, name: str) -> None:
        value_type = self.types[name]
        scope = axes_of(Kernel("", (), self.space, tuple(self.lines)))[name]
        needed = frozenset(axis for axis in scope if self.extents[axis] != ONE)
        fits = {param for param, index in self.in_place.items() if self.fits_in_place(index, needed)}
        free = [p.name for p in self.params if p.name in fits and p.dtype.compute is value_type]
        if free and self.rarely(3):
            buffer = self.draw(st.sampled_from(free))
            self.line(Store(buffer, self.in_place.pop(buffer), name), value_type)
            return
        dtype = self.draw(st.sampled_from([d for d in BUFFER_TYPES if d.compute is value_type]))
        joins = JOINS[2:] if value_type is DType.BOOL else JOINS
        join = self.draw(st.sampled_from(joins)) if self.rarely(6) else ""
        if not self.reduced and self.rarely(3):
            index, numel = self.scattered(needed)
            self.line(Store(self.param(dtype, numel), index, name, join), value_type)
            return
        if self.rarely():
            layout = self.layout(needed)  # perhaps with more axes than the value has: it is repeated along them
        else:
            layout = self.restricted(needed).layout(needed)
        self.line(Store(self.param(dtype, layout[1]), layout[0], name, join), value_type)

    def scattered(self, needed: frozenset[str]) -> tuple[Expr, Expr]:
        """(index, numel): rows chosen by a buffer of checked indices, which may name a row twice or overlap others."""
        moved = frozenset(name for name in sorted(needed) if self.draw(st.booleans()))
        index, numel = self.layout(moved)
        rows = self.draw(st.integers(1, 9))
        position = self.cast(self.load(self.draw(st.sampled_from([DType.I64, DType.I32])), index, numel), DType.I64)
        row = self.line(CheckIndex(position, const(rows), self.draw(st.booleans())), DType.I64)
        column, width = self.restricted(needed - moved).layout(needed - moved)
        pitch = self.draw(st.sampled_from([width, width, width, ONE]))
        return val(row) * pitch + column, pitch * (rows - 1) + width

    def restricted(self, axes: frozenset[str]) -> _Writer:
        """A writer for indices over these axes only."""
        return _Writer(self.draw, tuple(axis for axis in self.space if axis.name in axes))

    def fits_in_place(self, index: Expr, needed: frozenset[str]) -> bool:
        """Whether a buffer may be overwritten: each of its elements belongs to one point, or to one result."""
        axes = {name for name in index.vars() if self.extents[name] != ONE}
        every = {name for name in self.extents if self.extents[name] != ONE}
        return needed <= axes and axes in (every, every - set(self.reduced))


def scalars(dtype: DType) -> st.SearchStrategy[Any]:
    """Constants of a value type: small ones first, then extremes."""
    if dtype is DType.BOOL:
        return st.booleans()
    if dtype.is_float:
        special = [-0.0, math.nan, math.inf, -math.inf, 1e-30, 3e38]
        return st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 3.5]), st.floats(-4, 4), st.sampled_from(special))
    low, high = dtype.limits
    return st.one_of(st.integers(0, 5), st.integers(max(low, -5), 70), st.sampled_from([low, high]))


def exprs(
    axes: Sequence[str] = ("i", "j"), symbols: Sequence[str] = ("n", "m"), values: Sequence[str] = ()
) -> st.SearchStrategy[Expr]:
    """Index expressions over these names; what they divide by is positive for positive symbols."""
    numbers = st.integers(-20, 20).map(const)
    sizes = st.one_of(st.integers(1, 9).map(const), st.sampled_from(symbols).map(sym))
    divisors = st.one_of(sizes, st.tuples(sizes, sizes).map(lambda two: two[0] * two[1]), sizes.map(lambda n: n + 1))
    leaves = [numbers, st.sampled_from(axes).map(var), st.sampled_from(symbols).map(sym)]
    leaves += [st.sampled_from(values).map(val)] if values else []

    def larger(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        pairs, divided = st.tuples(inner, inner), st.tuples(inner, divisors)
        return st.one_of(
            pairs.map(lambda two: two[0] + two[1]),
            pairs.map(lambda two: two[0] - two[1]),
            pairs.map(lambda two: two[0] * two[1]),
            divided.map(lambda two: floordiv(*two)),
            divided.map(lambda two: mod(*two)),
        )

    return st.recursive(st.one_of(leaves), larger, max_leaves=8)


# ------------------------------------------------------------------------------------------------ data


@st.composite
def inputs_for(draw: Any, kernel: Kernel, symbols: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """Contents for every buffer of `kernel`, those that are only stored included.

    Each buffer has one style: small numbers, the unit interval, wide ones, or wide with specials (NaN, infinities,
    -0.0, extremes). Buffers that feed a `CheckIndex` hold indices in range.
    """
    symbols = symbols or {}
    limits = _index_limits(kernel, symbols)
    result: dict[str, Tensor] = {}
    for param in kernel.params:
        numel = param.numel.evaluate(lambda atom: symbols[atom.name])
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
        if param.name in limits:
            low, high = limits[param.name]
            low = max(low, param.dtype.limits[0])
            data = torch.randint(low, high, (numel,), generator=generator).to(TORCH_DTYPES[param.dtype])
        else:
            style = draw(st.sampled_from(["small", "unit", "wide", "special"]))
            data = _random(param.dtype, numel, style, generator)
        result[param.name] = data
    return result


def _index_limits(kernel: Kernel, symbols: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """For each buffer whose elements are checked as indices, the range that they must lie in."""
    lines = {line.out: line.rhs for line in kernel.body}
    limits: dict[str, tuple[int, int]] = {}
    for rhs in lines.values():
        if isinstance(rhs, CheckIndex):
            source, size = lines[rhs.arg], rhs.size.evaluate(lambda atom: symbols[atom.name])
            while isinstance(source, Compute):
                source = lines[source.args[0]]
            if isinstance(source, Load):
                low, high = limits.get(source.buffer, (-size, size))
                limits[source.buffer] = (max(low, -size if rhs.wrap else 0), min(high, size))
    return limits


def _random(dtype: DType, numel: int, style: str, generator: torch.Generator) -> Tensor:
    target = TORCH_DTYPES[dtype]

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (numel,), generator=generator)

    if dtype is DType.BOOL:
        return integers(0, 2).to(target)
    if dtype.is_float:
        info = torch.finfo(target)
        specials = [math.nan, math.inf, -math.inf, -0.0, 0.0, info.max, info.min, info.smallest_normal, 1.0, -1.0]
        plain: dict[str, Callable[[], Tensor]] = {
            "small": lambda: integers(-6, 7) / 2,
            "unit": lambda: torch.rand(numel, generator=generator),
        }
        data = plain.get(style, lambda: torch.randn(numel, generator=generator) * 4)().to(target)
    else:
        low, high = dtype.limits
        specials = [low, high, 0, 1, high - 1, (high + low) // 2 + 1]
        if style in ("small", "unit"):
            return integers(0 if style == "unit" else -3, 4).to(target)
        signed = 1 << (8 * dtype.itemsize - 1)
        data = integers(-signed, signed - 1).to(target)
    if style != "special":
        return data
    chosen = torch.tensor(specials, dtype=target)[integers(0, len(specials))]
    return torch.where(integers(0, 8) == 0, chosen, data)


# ------------------------------------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class Expected:
    """What a kernel should leave in its buffers, and how far from it each element may be.

    errors: absolute, in float64; 0 where the element must be equal, inf where nothing can be said.
    """

    buffers: dict[str, Tensor]
    errors: dict[str, Tensor]

    @property
    def known(self) -> float:
        """The share of stored elements that are compared at all."""
        stored = [error for error in self.errors.values() if error.numel()]
        total = sum(error.numel() for error in stored)
        return 1.0 if not total else sum(int(error.isfinite().sum()) for error in stored) / total


def assert_close(kernel: Kernel, expected: Expected, actual: Mapping[str, Tensor]) -> None:
    """Fail, with the kernel's text, unless every buffer is as `expected` allows.

    NaN agrees with NaN only, an infinity with itself, and 0.0 with -0.0.
    """
    for name, wanted in expected.buffers.items():
        got, error = actual[name], expected.errors[name]
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, (name, got.dtype, got.shape)
        same = (got == wanted) | (got.isnan() & wanted.isnan()) if got.is_floating_point() else got == wanted
        near = (got.double() - wanted.double()).abs() <= error
        wrong = ~(same | near | error.isinf())
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{name}[{at}] is {got[at].item()!r}, expected {wanted[at].item()!r} within {error[at].item():.3g}; "
                f"{int(wrong.sum())} of {wrong.numel()} elements differ\n{print_kernel(kernel)}"
            )


def expect(kernel: Kernel, inputs: Mapping[str, Tensor], symbols: Mapping[str, int] | None = None) -> Expected:
    """Run the interpreter on copies of `inputs` and bound the difference of any faithful implementation.

    Each value carries an absolute error. It starts at 0; a float operator adds a few ulp of its own (none where
    it is exact: `neg`, `maximum`, `floor`, ...) and passes on the errors of its arguments, found by evaluating it
    in float64 at the ends of their ranges. A sum may err relative to the sum of magnitudes. An error is infinite,
    so that the element is not compared, where

    - a comparison, a choice, a cast to an integer or an index falls differently within the error;
    - a float is cast to an integer type that cannot hold it, which C++ leaves undefined;
    - one end of the range is NaN or infinite and the other is not: poles, ends of domains, overflow;
    - the argument is less certain than 1% (see `_is_vague`), or too large for a periodic function;
    - anything that it is computed from is infinite in this sense.

    The sign of a zero is uncertain after operators that may give either; 1/x is not compared there.
    """
    symbols = symbols or {}
    buffers = {name: tensor.clone() for name, tensor in inputs.items()}
    # The flat index of each store is one more value of the kernel, under the store's name.
    places = [Line(line.out, IndexValue(store.index), DType.I64) for line, store in kernel.stores()]
    body = [line for line in kernel.body if not isinstance(line.rhs, Store)]
    probe = Kernel(kernel.name, kernel.params, kernel.space, (*body, *places))
    values = line_values(probe, buffers, symbols)
    extents = {axis.name: axis.extent.evaluate(lambda atom: symbols[atom.name]) for axis in kernel.space}
    errors: dict[str, Tensor] = {}
    for line in body:
        shape = values[line.out].shape
        errors[line.out] = (_exactly(0) + _line_error(line.rhs, line.out, values, errors, extents)).expand(shape)
    bounds = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in buffers.items()}
    for line, store in kernel.stores():
        error = _cast_error(buffers[store.buffer].dtype, values[store.arg], errors[store.arg])
        places_, error = torch.broadcast_tensors(values[line.out], error)
        # What is joined is exact, in the order of the points, or unknown.
        error = torch.where(error == 0, error, _INF) if store.join else error
        bounds[store.buffer].scatter_reduce_(0, places_.flatten(), error.flatten(), "amax")
    run_kernel(kernel, buffers, symbols)
    return Expected(buffers, bounds)


_INF = math.inf
_ZERO_SIGN = 1e-300  # an error that says: this zero may have the other sign
_EXACT = {
    *("neg", "abs", "sign", "maximum", "minimum", "floor", "ceil", "trunc", "round", "round_bf16", "round_f16"),
    *("fmod", "max", "min"),
}
_LINEAR = {"add", "sub", "mul", "fma", *_EXACT, "remainder", "floordiv", "truncdiv"}
_SINGULAR_AT_ZERO = {"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "pow", "div", "lgamma", "atan2", "acosh"}
_ABSOLUTE = {"lgamma", "erf"}  # accurate relative to 1 rather than to the result
_ULPS = 8  # of transcendental functions; both sides may be off by half of it


def _exactly(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _unless(certain: Tensor) -> Tensor:
    """Error 0 where `certain`, infinite elsewhere."""
    return torch.where(certain, _exactly(0), _exactly(_INF))


def _all_zero(errors: Sequence[Tensor]) -> Tensor:
    result = torch.tensor(True)
    for error in errors:
        result = result & (error == 0)
    return result


def _line_error(
    rhs: Rhs, out: str, values: dict[str, Tensor], errors: dict[str, Tensor], extents: dict[str, int]
) -> Tensor:
    match rhs:
        case Const():
            return _exactly(0)
        case IndexValue() | CheckIndex() | Load():
            return _unless(_all_zero([errors[name] for name in operands(rhs)]))
        case Compute("cast", (arg,)):
            return _cast_error(values[out].dtype, values[arg], errors[arg])
        case Compute(op, args):
            return _compute_error(op, values[out], [values[a] for a in args], [errors[a] for a in args])
        case Reduce(op, arg, axes):
            dims = tuple(dim for dim, name in enumerate(extents) if name in axes)
            shape = [n if d in dims else values[arg].shape[d] for d, n in enumerate(extents.values())]
            return _reduce_error(op, values[out], values[arg].expand(shape), errors[arg].expand(shape), dims)
        case Store():
            raise AssertionError("a store has no value")


def _cast_error(target: torch.dtype, x: Tensor, error: Tensor) -> Tensor:
    if not x.is_floating_point() or target == x.dtype:
        return error
    x, source = x.double(), torch.finfo(x.dtype)
    if target.is_floating_point:
        info = torch.finfo(target)
        if info.bits >= source.bits:
            return error
        rounding = x.abs() * info.eps + info.smallest_normal
        near_overflow = x.isfinite() & (x.abs() + error >= info.max * (1 - info.eps))
        wider = torch.where(near_overflow, _INF, torch.where(x.isfinite(), error + rounding, error))
        return torch.where(error == 0, 0.0, wider)
    low, high = x - error, x + error
    if target == torch.bool:
        return _unless((error == 0) | (low > 0) | (high < 0) | (x.isnan() & error.isfinite()))
    info = torch.iinfo(target)
    low, high = low.trunc(), high.trunc()
    return _unless((low >= info.min) & (high < float(info.max + 1)) & (low == high))


def _compute_error(op: str, out: Tensor, args: list[Tensor], errors: list[Tensor]) -> Tensor:
    if op == "where":
        chosen = torch.where(args[0], errors[1], errors[2])
        return torch.where(errors[0] > 0, _INF, chosen)
    if out.is_floating_point():
        return _float_error(op, out, args, errors)
    exact = _all_zero(errors)
    if not args[0].is_floating_point():
        return _unless(exact)
    if op in COMPARISONS:
        (a, b), error = (arg.double() for arg in args), errors[0] + errors[1]
        return _unless(exact | ((a - b).abs() > error) | ((a.isnan() | b.isnan()) & error.isfinite()))
    x, error = args[0].double(), errors[0]  # isnan, isinf
    far = x.abs() + error < torch.finfo(args[0].dtype).max * 0.99
    return _unless(exact | far | (~x.isfinite() & error.isfinite()))


def _float_error(op: str, out: Tensor, args: list[Tensor], errors: list[Tensor]) -> Tensor:
    info, row = torch.finfo(out.dtype), OPS[op]
    x = [arg.double() for arg in args]
    radii = [torch.where(error.isfinite(), error, 0.0) for error in errors]
    if row.cost >= EXPENSIVE and row.arity == 1:  # implementations may be off by an ulp of the argument instead
        radii[0] = radii[0] + finite(x[0].abs()) * info.eps
    center = row.evaluate(*x)
    spread = torch.zeros_like(center)
    for signs in itertools.product((-1, 1), repeat=row.arity):
        moved = row.evaluate(*(a + sign * radius for a, sign, radius in zip(x, signs, radii, strict=True)))
        spread = torch.maximum(spread, _distance(moved, center))
    error = spread + _own_error(op, info, x, finite(center.abs()))
    # Near the largest number, or where an intermediate result overflowed, some may say infinity and some not.
    low, high = center.abs() - error, center.abs() + error
    overflow = (error > 0) & (high >= info.max * 0.999) & (low <= info.max * 1.001) & center.isfinite()
    overflow |= (center.abs() < info.max * 0.999) & ~out.isfinite()
    overflow |= out.isnan() & ~center.isnan()
    error = torch.where(overflow | _is_vague(op, x, radii), _INF, error)
    for given in errors:
        error = torch.where(given.isfinite(), error, _INF)
    return _with_open_zero(op, out, error)


def finite(x: Tensor) -> Tensor:
    """`x` with 0 for NaN and infinities."""
    return torch.where(x.isfinite(), x, 0.0)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, torch.where(a.isfinite() & b.isfinite(), (a - b).abs(), _INF))


def _with_open_zero(op: str, out: Tensor, error: Tensor) -> Tensor:
    if op not in _EXACT or op in ("neg", "abs"):
        return error
    return torch.where((out == 0) & (error == 0), _ZERO_SIGN, error)


def _own_error(op: str, info: torch.finfo, x: list[Tensor], magnitude: Tensor) -> Tensor:
    """The rounding of one operator."""
    if op in _EXACT:
        return torch.zeros_like(magnitude)
    if op == "fma":  # one rounding or two
        magnitude = finite((x[0] * x[1]).abs()) + finite(x[2].abs())
    if op in _ABSOLUTE:
        magnitude = magnitude.clamp(min=1)
    ulps = _ULPS if OPS[op].cost >= EXPENSIVE else 2
    return magnitude * (ulps * info.eps) + info.smallest_normal


def _is_vague(op: str, x: list[Tensor], radii: list[Tensor]) -> Tensor:
    """Where the ends of an argument's range say too little about what lies between them."""
    vague = torch.zeros((), dtype=torch.bool)
    if op in ("sin", "cos", "tan"):
        vague = x[0].abs() > 1e4
    if op in ("remainder", "fmod"):
        quotient = x[0] / x[1]
        slack = (radii[0] + quotient.abs() * radii[1]) / x[1].abs()
        jumps = (slack > 0) & ((quotient - quotient.round()).abs() <= 2 * slack)  # by the divisor, at a multiple of it
        vague = jumps | (slack > 0.25)
    if op in _LINEAR:
        return vague
    for position, (value, radius) in enumerate(zip(x, radii, strict=True)):
        scale = value.abs() if op in _SINGULAR_AT_ZERO else value.abs() + 1
        if (op, position) != ("div", 0):
            vague = vague | (radius > scale * 0.01)
    return vague


def _reduce_error(op: str, out: Tensor, x: Tensor, error: Tensor, dims: tuple[int, ...]) -> Tensor:
    exact = (error == 0).all(dims, keepdim=True)
    if op in ("any", "all"):
        decisive = (x == (op == "any")) & (error == 0)
        return _unless(exact | decisive.any(dims, keepdim=True))
    if not x.is_floating_point():
        return _unless(exact)
    x = x.double()
    match op:
        case "sum":
            return _sum_error(torch.finfo(out.dtype), x, error, dims)
        case "prod":
            return _prod_error(torch.finfo(out.dtype), out, x, error, dims)
        case "max" | "min":
            return _with_open_zero(op, out, error.amax(dims, keepdim=True))
        case _:  # argmax and argmin: certain if one element alone can be the greatest
            x = x if op == "argmax" else -x
            possible = x + error >= (x - error).amax(dims, keepdim=True)
            alone = (possible.sum(dims, keepdim=True) == 1) & ~x.isnan().any(dims, keepdim=True)
            return _unless(exact | alone)


def _sum_error(info: torch.finfo, x: Tensor, error: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A sum in any order: each partial sum rounds, and may overflow on the way."""
    count = math.prod(x.shape[dim] for dim in dims)
    magnitude = finite(x).abs().sum(dims, keepdim=True)
    bound = error.sum(dims, keepdim=True) + magnitude * (info.eps * (4 + count / 4)) + info.smallest_normal
    return torch.where(magnitude + bound >= info.max * 0.99, _INF, bound)


def _prod_error(info: torch.finfo, out: Tensor, x: Tensor, error: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A product in any order: no partial product may overflow or underflow."""
    count = math.prod(x.shape[dim] for dim in dims)
    scale = torch.where((x == 0) | ~x.isfinite(), 0.0, x.abs().log2())
    limit = math.log2(info.max) - 2
    far = (scale.clamp(min=0).sum(dims, keepdim=True) > limit) | (scale.clamp(max=0).sum(dims, keepdim=True) < -limit)
    relative = torch.where(error == 0, 0.0, error / x.abs()).sum(dims, keepdim=True)
    bound = finite(out.double().abs()) * (2 * relative + 2 * count * info.eps) + info.smallest_normal
    return torch.where(far | ~(relative <= 0.01), _INF, bound)
