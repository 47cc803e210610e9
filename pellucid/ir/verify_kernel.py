"""The invariants of a kernel: one `check_*` function each, as in `verify`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from math import gcd

from typing_extensions import assert_never

from pellucid.errors import InternalError
from pellucid.ir.attention import find_attention
from pellucid.ir.index import ONE, ZERO, Expr, Sym, Var, bounds, nonnegative
from pellucid.ir.nodes import (
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Param,
    Reduce,
    Scalar,
    Store,
    axes_of,
    operands,
)
from pellucid.ir.ops import JOINS, OPS, REDUCTIONS, Domain, Op, Result
from pellucid.ir.printer import print_line, print_scalar
from pellucid.ir.types import DType

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def verify_kernel(kernel: Kernel) -> None:
    """Raise InternalError unless `kernel` satisfies every invariant."""
    for check in KERNEL_CHECKS:
        check(kernel)


def check_names(kernel: Kernel) -> None:
    """Axes, lines and buffers have names that are unique in the kernel and that the parser can read."""
    names = [axis.name for axis in kernel.space] + [line.out for line in kernel.body]
    names += [param.name for param in kernel.params]
    if problem := name_problem([kernel.name]) or name_problem(names):
        raise _kernel_error(kernel, None, problem)


def check_definitions(kernel: Kernel) -> None:
    """A line reads only values of earlier lines; a store has no value."""
    defined: set[str] = set()
    for line in kernel.body:
        for name in operands(line.rhs):
            if name not in defined:
                raise _kernel_error(kernel, line, f"reads {name}, which no earlier line defines")
        if not isinstance(line.rhs, Store):
            defined.add(line.out)


def check_indices(kernel: Kernel) -> None:
    """Index expressions use axes and `i64` values of the kernel, sizes only symbols; no symbol is an axis or value."""
    axes = {axis.name for axis in kernel.space}
    types = {line.out: line.dtype for line in kernel.body}
    for what, size in _sizes(kernel):
        if size.vars() or size.vals():
            raise _kernel_error(kernel, None, f"{what} {size} depends on more than size symbols")
    for line in kernel.body:
        for index in _line_exprs(line):
            if unknown := index.vars() - axes:
                raise _kernel_error(kernel, line, f"{listed(unknown)} is not an axis of the kernel")
            if clash := index.syms() & (axes | types.keys()):
                raise _kernel_error(kernel, line, f"the symbol {listed(clash)} is also an axis or a value")
            if wrong := {name for name in index.vals() if types.get(name) is not DType.I64}:
                raise _kernel_error(kernel, line, f"the index value {listed(wrong)} is not i64")
        if isinstance(line.rhs, CheckIndex) and (line.rhs.size.vars() or line.rhs.size.vals()):
            raise _kernel_error(kernel, line, "the size depends on more than size symbols")


def check_params(kernel: Kernel) -> None:
    """Each buffer that the body loads or stores is a parameter, once, and each parameter is used."""
    declared = {param.name for param in kernel.params}
    used: set[str] = set()
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store):
            used.add(line.rhs.buffer)
            if line.rhs.buffer not in declared:
                raise _kernel_error(kernel, line, f"{line.rhs.buffer} is not a parameter")
    if unused := declared - used:
        raise _kernel_error(kernel, None, f"parameter {listed(unused)} is never used")
    for param in kernel.params:
        if param.dtype.is_opaque:
            raise _kernel_error(kernel, None, f"parameter {param.name} is complex; only ATen handles these")


def check_types(kernel: Kernel) -> None:
    """Every line has the type that follows from its operator and arguments."""
    params = {param.name: param for param in kernel.params}
    types: dict[str, DType] = {}
    for line in kernel.body:
        problem = _type_problem(line, types, params)
        if line.dtype.compute is not line.dtype or line.dtype.is_opaque:
            problem = f"no value has the type {line.dtype!r}"
        if problem:
            raise _kernel_error(kernel, line, problem)
        types[line.out] = line.dtype


def check_reductions(kernel: Kernel) -> None:
    """All reductions have the same axes, at least one, except in attention; no maximum is over an empty axis."""
    first: Line | None = None
    is_attention = find_attention(kernel) is not None
    extents = kernel.ranges
    for line in kernel.body:
        if not isinstance(line.rhs, Reduce):
            continue
        axes = line.rhs.axes
        if not axes or len(set(axes)) != len(axes) or not extents.keys() >= set(axes):
            raise _kernel_error(kernel, line, "does not reduce over distinct axes of the kernel")
        first = first or line
        if isinstance(first.rhs, Reduce) and set(axes) != set(first.rhs.axes) and not is_attention:
            raise _kernel_error(kernel, line, f"reduces over other axes than {first.out} does")
        if line.rhs.op not in ("sum", "prod", "any", "all") and any(extents[axis] == ZERO for axis in axes):
            raise _kernel_error(kernel, line, f"{line.rhs.op} over no elements has no value")


def check_store_axes(kernel: Kernel) -> None:
    """A stored value does not vary along an axis that the store's index ignores, unless that has at most one point.

    A scatter may: several points may store the same element, and are executed in order.
    """
    scopes, extents = axes_of(kernel), kernel.ranges
    if ZERO in extents.values():
        return
    for line, store in kernel.stores():
        if store.index.vals():
            continue
        lost = {axis for axis in scopes[store.arg] - store.index.vars() if extents[axis] != ONE}
        if lost:
            problem = f"{store.arg} varies along {listed(lost)}, the index does not: points overwrite each other"
            raise _kernel_error(kernel, line, problem)


def check_store_collisions(kernel: Kernel) -> None:
    """No element is stored twice, by two points or by two lines, as far as constant strides show.

    A kernel that scatters does not reduce, and does not load the buffer that it scatters into.
    """
    scopes, extents = axes_of(kernel), kernel.ranges
    stored: set[tuple[str, Expr]] = set()
    for line, store in kernel.stores():
        if (store.buffer, store.index) in stored:
            raise _kernel_error(kernel, line, "an earlier line stores the same elements")
        stored.add((store.buffer, store.index))
        if store.index.vals():
            if kernel.reduced:
                raise _kernel_error(kernel, line, "a kernel cannot both scatter and reduce")
            if any(load.buffer == store.buffer for _, load in kernel.loads()):
                raise _kernel_error(kernel, line, f"loads {store.buffer}, which it scatters into")
            continue
        if any(extents[axis] == ZERO for axis in scopes[line.out]):
            continue  # it stores nothing, whatever the strides of an empty tensor are
        axes = [axis for axis in sorted(scopes[line.out]) if extents[axis] != ONE]
        for left, right in combinations(axes, 2):
            if _collide(store.index, left, right, extents):
                raise _kernel_error(kernel, line, f"two points along {left}, {right} store the same element")


def check_bounds(kernel: Kernel) -> None:
    """Stores, and loads without a mask, stay inside their buffer, where the index algebra can decide."""
    extents = kernel.ranges
    if any(extent == ZERO for extent in extents.values()):
        return
    numel = {param.name: param.numel for param in kernel.params}
    for line in kernel.body:
        match line.rhs:
            case Load(buffer, index, None) | Store(buffer, index):
                if problem := bounds_problem(index, numel[buffer], extents):
                    raise _kernel_error(kernel, line, problem)
            case _:
                pass


def check_in_place(kernel: Kernel) -> None:
    """A buffer that is stored is loaded only at the index of the store, by the same point."""
    stored: dict[str, set[Expr]] = {}
    for _, store in kernel.stores():
        stored.setdefault(store.buffer, set()).add(store.index)
    for line, load in kernel.loads():
        if load.buffer in stored and load.index not in stored[load.buffer]:
            raise _kernel_error(kernel, line, f"loads {load.buffer} at an index at which no line stores it")


KERNEL_CHECKS: tuple[Callable[[Kernel], None], ...] = (
    check_names,
    check_definitions,
    check_indices,
    check_params,
    check_types,
    check_reductions,
    check_store_axes,
    check_store_collisions,
    check_bounds,
    check_in_place,
)


# ------------------------------------------------------------------------------------------------ details


def _kernel_error(kernel: Kernel, line: Line | None, problem: str) -> InternalError:
    where = f"kernel {kernel.name}" if line is None else f"kernel {kernel.name}, line {line.out}"
    context = {} if line is None else {"line": print_line(line)}
    return InternalError(f"{where}: {problem}", context=dict[str, object](context))


def listed(names: Iterable[str]) -> str:
    """Names for a message, sorted."""
    return ", ".join(sorted(names))


def name_problem(names: Iterable[str]) -> str | None:
    """The problem of the first name that is invalid or a duplicate, or None."""
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            return f"{name!r} is not a name"
        if name in seen:
            return f"{name} is defined twice"
        seen.add(name)
    return None


def _sizes(kernel: Kernel) -> Iterator[tuple[str, Expr]]:
    for axis in kernel.space:
        yield f"the extent of {axis.name},", axis.extent
    for param in kernel.params:
        yield f"the size of {param.name},", param.numel


def _line_exprs(line: Line) -> tuple[Expr, ...]:
    match line.rhs:
        case IndexValue(index) | Load(_, index) | Store(_, index):
            return (index,)
        case CheckIndex(_, size):
            return (size,)
        case Const() | Compute() | Reduce():
            return ()
        case _:
            assert_never(line.rhs)


def _type_problem(line: Line, types: dict[str, DType], params: dict[str, Param]) -> str | None:
    match line.rhs:
        case Const(value):
            return _scalar_problem(value, line.dtype)
        case IndexValue():
            return None if line.dtype is DType.I64 else "an index value is i64"
        case CheckIndex(arg):
            return None if types[arg] is line.dtype is DType.I64 else "an index value is i64"
        case Load(buffer, _, mask, other):
            if line.dtype is not params[buffer].dtype.compute:
                return f"a load of {params[buffer].dtype!r} gives {params[buffer].dtype.compute!r}"
            if mask is not None and types[mask] is not DType.BOOL:
                return f"the mask {mask} is not bool"
            return _scalar_problem(other, line.dtype)
        case Store(buffer, _, arg, join):
            if types[arg] is not line.dtype:
                return f"{arg} is {types[arg]!r}"
            if join and (join not in JOINS or not _in_domain(line.dtype, OPS[join].domain)):
                return f"a store cannot join {line.dtype!r} with {join!r}"
            wanted = params[buffer].dtype.compute
            return None if line.dtype is wanted else f"a store to {params[buffer].dtype!r} takes {wanted!r}"
        case Reduce(op, arg):
            return _reduction_problem(op, types[arg], line.dtype)
        case Compute(op, args):
            if op not in OPS:
                return f"there is no operator {op}"
            return _operator_problem(OPS[op], [types[arg] for arg in args], line.dtype)
        case _:
            assert_never(line.rhs)


def _scalar_problem(value: Scalar, dtype: DType) -> str | None:
    """Floats accept every number, integers accept integers in range, bool also accepts 0 and 1."""
    if dtype.is_float:
        return None
    low, high = dtype.limits
    fits = not isinstance(value, float) and low <= value <= high
    return None if fits else f"{print_scalar(value)} is not a number of type {dtype!r}"


def _operator_problem(op: Op, args: list[DType], result: DType) -> str | None:
    if len(args) != op.arity:
        return f"{op.name} takes {op.arity} arguments"
    if op.result is Result.SELECT:
        if args[0] is not DType.BOOL:
            return "the condition is not bool"
        args = args[1:]
    if len(set(args)) != 1:
        return f"the arguments have several types: {', '.join(map(repr, args))}"
    if not _in_domain(args[0], op.domain):
        return f"{op.name} is not defined on {args[0]!r}, it takes {op.domain.value}"
    match op.result:
        case Result.SAME | Result.SELECT:
            expected = args[0]
        case Result.BOOL:
            expected = DType.BOOL
        case Result.CAST:
            expected = result
        case _:
            assert_never(op.result)
    return None if result is expected else f"{op.name} of {args[0]!r} gives {expected!r}"


def _in_domain(dtype: DType, domain: Domain) -> bool:
    match domain:
        case Domain.ANY:
            return True
        case Domain.NUMBER:
            return dtype.is_float or dtype.is_int
        case Domain.FLOAT:
            return dtype.is_float
        case Domain.INTEGRAL:
            return dtype.is_int or dtype is DType.BOOL
        case Domain.INTEGER:
            return dtype.is_int
        case _:
            assert_never(domain)


def _reduction_problem(op: str, arg: DType, result: DType) -> str | None:
    match op:
        case "any" | "all":
            allowed, expected = arg is DType.BOOL, DType.BOOL
        case "max" | "min":
            allowed, expected = True, arg
        case "argmax" | "argmin":
            allowed, expected = arg is not DType.BOOL, DType.I64
        case _:
            allowed, expected = op in REDUCTIONS and arg is not DType.BOOL, arg
    if not allowed:
        return f"there is no reduction {op} of {arg!r}"
    return None if result is expected else f"{op} of {arg!r} gives {expected!r}"


def _collide(index: Expr, left: str, right: str, extents: dict[str, Expr]) -> bool:
    """True if two points that differ only along these two axes certainly have the same index.

    With strides a and b, a step of b / gcd along one axis and of -a / gcd along the other does not change the index.
    """
    strides = [index.coefficient(axis) for axis in (left, right)]
    a, b = (None if stride is None else stride.value for stride in strides)
    size_a, size_b = extents[left].value, extents[right].value
    if a is None or b is None or size_a is None or size_b is None or not size_a or not size_b:
        return False
    common = gcd(a, b)
    return common == 0 or (abs(b) // common < size_a and abs(a) // common < size_b)


def bounds_problem(index: Expr, numel: Expr, extents: dict[str, Expr]) -> str | None:
    """Why `index` is certainly outside `[0, numel)` at some point, or None."""
    span = bounds(index, extents)
    if span is None:
        return None
    low, high = span
    # Bounds that may not be attained only prove that all points are outside, on one side.
    lowest, highest = (low, high) if _is_attained(index) else (high, low)
    if nonnegative(-lowest - 1):
        return f"the index goes down to {lowest}"
    if nonnegative(highest - numel):
        return f"the index goes up to {highest}, the buffer has {numel} elements"
    return None


def _is_attained(index: Expr) -> bool:
    """True if `bounds` is exact: each axis occurs once and all atoms are axes or symbols."""
    names: list[str] = []
    for monomial, _ in index.terms:
        for atom in monomial:
            if isinstance(atom, Var):
                names.append(atom.name)
            elif not isinstance(atom, Sym):
                return False
    return len(names) == len(set(names))
