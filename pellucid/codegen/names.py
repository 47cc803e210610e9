"""Canonical names: structurally equal kernels become equal objects, so that they share one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pellucid.codegen.nest import Counter, Nest, Parallel, map_lines
from pellucid.ir.index import Atom, Expr, Sym, Val, Var, const, min_value, sym, val, var
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
)


@dataclass(frozen=True, slots=True)
class Canonical:
    """A kernel under canonical names, and the original names.

    buffers, symbols, values: the original names of `p0`, `p1`, ..., of `s0`, `s1`, ... and of `v0`, `v1`, ...
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    values: tuple[str, ...]

    def after(self, first: Canonical) -> Canonical:
        """This one, derived from the kernel of `first`, with the original names of `first`."""

        def original(names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(known[int(name[1:])] for name in names)

        return Canonical(
            self.kernel,
            original(self.buffers, first.buffers),
            original(self.symbols, first.symbols),
            original(self.values, first.values),
        )


def map_indices(rhs: Rhs, change: Callable[[Expr], Expr]) -> Rhs:
    """`rhs` with `change` applied to its index expressions."""
    match rhs:
        case IndexValue(index):
            return IndexValue(change(index))
        case Load(buffer, index, mask, other):
            return Load(buffer, change(index), mask, other)
        case Store(buffer, index, arg, join):
            return Store(buffer, change(index), arg, join)
        case CheckIndex(size=size):
            return replace(rhs, size=change(size))
        case Const() | Compute() | Reduce():
            return rhs


def indices(kernel: Kernel) -> list[Expr]:
    """The index expressions of all lines, in order."""
    found: list[Expr] = []
    for line in kernel.body:
        match line.rhs:
            case IndexValue(index) | Load(_, index) | Store(_, index):
                found.append(index)
            case _:
                pass
    return found


def canonicalise(kernel: Kernel) -> Canonical:
    """Number axes, values, buffers and symbols in order of appearance.

    before: `for x: a = load w[8*x + n]; store y[x], a`
    after:  `for i0: v0 = load p0[8*i0 + s0]; v1 = store p1[i0], v0`
    """
    axes = {axis.name: f"i{k}" for k, axis in enumerate(kernel.space)}
    values = {line.out: f"v{k}" for k, line in enumerate(kernel.body)}
    buffers: dict[str, str] = {}
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store):
            buffers.setdefault(line.rhs.buffer, f"p{len(buffers)}")
    symbols = {name: canonical_symbol(name, k) for k, name in enumerate(symbols_of(kernel))}
    mapping: dict[Atom, Expr] = {Var(old): var(new) for old, new in axes.items()}
    mapping |= {Val(old): val(new) for old, new in values.items()}
    mapping |= {Sym(old): sym(new) for old, new in symbols.items()}
    space = tuple(Axis(axes[axis.name], axis.extent.substitute(mapping)) for axis in kernel.space)
    ranges = {axis.name: axis.extent for axis in space}

    def change(index: Expr) -> Expr:
        return index.substitute(mapping, ranges)

    def rename(rhs: Rhs) -> Rhs:
        rhs = map_indices(rhs, change)
        match rhs:
            case Load(buffer, index, mask, other):
                return Load(buffers[buffer], index, None if mask is None else values[mask], other)
            case Store(buffer, index, arg, join):
                return Store(buffers[buffer], index, values[arg], join)
            case Compute(op, args):
                return Compute(op, tuple(values[arg] for arg in args))
            case Reduce(op, arg, over):
                return Reduce(op, values[arg], tuple(axes[name] for name in over))
            case CheckIndex(arg):
                return replace(rhs, arg=values[arg])
            case Const() | IndexValue():
                return rhs

    body = tuple(Line(values[line.out], rename(line.rhs), line.dtype, line.origin) for line in kernel.body)
    by_name = {param.name: param for param in kernel.params}
    params = tuple(
        replace(by_name[old], name=new, numel=by_name[old].numel.substitute(mapping)) for old, new in buffers.items()
    )
    return Canonical(Kernel(kernel.name, params, space, body), tuple(buffers), tuple(symbols), tuple(values))


def restore(nest: Nest, name: str, buffers: Sequence[str], offsets: Sequence[int], symbols: Sequence[str]) -> Nest:
    """The nest of a canonical kernel under the names of a program, with indices relative to whole buffers.

    buffers, offsets: the name of each parameter, and the element at which it begins. symbols: the name of each size.
    """
    known = {f"p{k}": (buffer, const(offset)) for k, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True))}
    sizes: dict[Atom, Expr] = {Sym(canonical_symbol(old, k)): sym(old) for k, old in enumerate(symbols)}

    def change(line: Line) -> Line:
        rhs = map_indices(line.rhs, lambda index: index.substitute(sizes))
        if isinstance(rhs, Load | Store) and rhs.buffer in known:
            buffer, offset = known[rhs.buffer]
            rhs = replace(rhs, buffer=buffer, index=rhs.index + offset)
        return replace(line, rhs=rhs)

    params = tuple(
        Param(known[param.name][0], param.dtype, param.numel.substitute(sizes) + known[param.name][1])
        for param in nest.params
    )
    space = tuple(Axis(axis.name, axis.extent.substitute(sizes)) for axis in nest.space)

    def counted(counter: Counter) -> Counter:
        return replace(counter, extent=counter.extent.substitute(sizes), step=counter.step.substitute(sizes))

    body = tuple(
        replace(item, counters=tuple(map(counted, item.counters))) if isinstance(item, Parallel) else item
        for item in map_lines(nest.body, change)
    )
    return replace(nest, name=name, params=params, space=space, body=body)


def canonical_symbol(name: str, position: int) -> str:
    """The name of the symbol at `position`, with the same minimum value as `name`."""
    return {1: "s", 0: "u", None: "n"}[min_value(name)] + str(position)


def symbols_of(kernel: Kernel) -> dict[str, None]:
    """The size symbols in the extents and indices of a kernel, in the order in which they first occur."""
    found: dict[str, None] = {}
    for axis in kernel.space:
        found.update(dict.fromkeys(sorted(axis.extent.syms())))
    for line in kernel.body:
        match line.rhs:
            case IndexValue(index) | Load(_, index) | Store(_, index) | CheckIndex(_, index):
                found.update(dict.fromkeys(sorted(index.syms())))
            case _:
                pass
    return found
