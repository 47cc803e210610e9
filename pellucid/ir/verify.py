"""The invariants of the IR: one `check_*` function each.

A check raises `InternalError`, naming the kernel or call and the line, when its invariant does not hold; the
later checks of a list rely on the earlier ones. Where sizes are symbols and the algebra cannot decide, the IR
passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from typing_extensions import assert_never

from pellucid.errors import InternalError
from pellucid.ir.derived import FUNCTIONS, Apply, Float, Term, names_in
from pellucid.ir.index import ONE, ZERO, Expr, sym, total, var
from pellucid.ir.nodes import (
    Arg,
    Extern,
    Kernel,
    Node,
    Program,
    View,
)
from pellucid.ir.printer import kernel_symbols, print_view
from pellucid.ir.types import DType
from pellucid.ir.verify_kernel import bounds_problem, listed, name_problem, verify_kernel

_OPERATOR = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)+(\.[A-Za-z_]\w*)?")


def verify_program(program: Program) -> None:
    """Raise InternalError unless `program` and each of its kernels satisfy every invariant."""
    for node in program.nodes:
        if isinstance(node, Kernel):
            verify_kernel(node)
    for check in PROGRAM_CHECKS:
        check(program)


def check_program_names(program: Program) -> None:
    """Symbols and buffers have unique names, and so have kernels and calls."""
    nodes = [node.name for node in program.nodes]
    supplied = program.supplied
    storage = [*program.symbols, *(each.name for each in program.derived if each.name not in supplied)]
    storage += [buffer.name for buffer in program.buffers]
    if problem := name_problem(nodes) or name_problem(storage):
        raise _program_error(problem)


def check_derived(program: Program) -> None:
    """Derived numbers are computed from symbols and earlier derived numbers, by functions that exist."""
    known = set(program.symbols)
    for each in program.derived:
        if unknown := names_in(each.term) - known:
            raise _program_error(f"the derived number {each.name} uses {listed(unknown)} before it is known")
        if problem := _term_problem(each.term):
            raise _program_error(f"the derived number {each.name}: {problem}")
        known.add(each.name)
    floats = {each.name for each in program.derived if each.is_float}
    for node in program.nodes:
        for arg in _call_args(node) if isinstance(node, Extern) else ():
            if unknown := set(_arg_floats(arg)) - floats:
                raise _program_error(f"{listed(unknown)} is not a derived float", node)
    for name in program.supplied:
        if (program.buffer(name).dtype, program.buffer(name).numel) != (DType.F64, ONE):
            raise _program_error(f"the buffer {name} of a derived float is not one f64")


def check_symbols(program: Program) -> None:
    """Every size is an expression over the program's symbols and derived integers."""
    known = {*program.symbols, *(each.name for each in program.derived if not each.is_float)}
    for where, size in program_sizes(program):
        if unknown := (size.syms() - known) | size.vars() | size.vals():
            raise _program_error(f"{listed(unknown)} in {size} is not a symbol of the program", where)


def check_inputs(program: Program) -> None:
    """The inputs list each symbol and each input buffer that the program does not supply, once, and nothing else."""
    given = [name for name in program.inputs if name is not None]
    if problem := name_problem(given):
        raise _program_error(f"inputs: {problem}")
    expected = {*program.symbols, *(buffer.name for buffer in program.buffers if buffer.role == "input")}
    expected -= set(program.supplied)
    if missing := expected - set(given):
        raise _program_error(f"{listed(missing)} is not among the inputs")
    if unknown := set(given) - expected:
        raise _program_error(f"the input {listed(unknown)} is neither a symbol nor a buffer with that role")


def check_buffers(program: Program) -> None:
    """Buffers have a role, all names refer to a buffer, and parameters have the buffer's type and size."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    for buffer in program.buffers:
        if buffer.role not in ("input", "temp", "output"):
            raise _program_error(f"buffer {buffer.name} has the unknown role {buffer.role!r}")
    for where, name in _buffer_uses(program):
        if name not in buffers:
            raise _program_error(f"there is no buffer {name}", where)
    for node in program.nodes:
        for param in node.params if isinstance(node, Kernel) else ():
            buffer = buffers[param.name]
            if (param.dtype, param.numel) != (buffer.dtype, buffer.numel):
                here, there = f"{param.dtype!r}[{param.numel}]", f"{buffer.dtype!r}[{buffer.numel}]"
                raise _program_error(f"{param.name} is {here}, but the buffer is {there}", node)


def check_calls(program: Program) -> None:
    """Calls name an operator as `namespace::name.overload`, and write inputs only through `mutates`."""
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    for node in program.nodes:
        if isinstance(node, Kernel):
            continue
        if not _OPERATOR.fullmatch(node.op):
            raise _program_error(f"{node.op!r} does not name an operator", node)
        for view in node.outputs:
            if view is not None and roles[view.buffer] == "input":
                raise _program_error(f"the output {view.buffer} is an input of the program", node)


def check_views(program: Program) -> None:
    """Views have one stride per dimension and stay inside their buffer, where the index algebra can decide."""
    numel = {buffer.name: buffer.numel for buffer in program.buffers}
    for where, view in _views(program):
        if len(view.shape) != len(view.strides):
            raise _program_error(f"{print_view(view)} has not one stride per dimension", where)
        if any(size == ZERO for size in view.shape):
            continue
        extents = {f"d{d}": size for d, size in enumerate(view.shape)}
        axes = (var(f"d{d}") * stride for d, stride in enumerate(view.strides))
        if problem := bounds_problem(total(axes) + view.offset, numel[view.buffer], extents):
            raise _program_error(f"{print_view(view)}: {problem}", where)


def check_written(program: Program) -> None:
    """A buffer is written before it is read, and temporary and output buffers are written if they have elements."""
    written = {buffer.name for buffer in program.buffers if buffer.role == "input" or buffer.numel == ZERO}
    for node in program.nodes:
        reads, writes = _effects(node)
        for name in reads:
            if name not in written:
                raise _program_error(f"reads {name} before anything is written to it", node)
        written |= writes
    for output in program.outputs:
        if isinstance(output, View) and output.buffer not in written:
            raise _program_error(f"the output {output.buffer} is never written")
    for buffer in program.buffers:
        if buffer.name not in written:
            raise _program_error(f"buffer {buffer.name} is never written")


PROGRAM_CHECKS: tuple[Callable[[Program], None], ...] = (
    check_program_names,
    check_derived,
    check_symbols,
    check_inputs,
    check_buffers,
    check_calls,
    check_views,
    check_written,
)


# ------------------------------------------------------------------------------------------------ details


def _program_error(problem: str, where: Node | None = None) -> InternalError:
    match where:
        case None:
            return InternalError(f"program: {problem}")
        case Kernel():
            return InternalError(f"kernel {where.name}: {problem}")
        case Extern():
            return InternalError(f"call {where.name}: {problem}", context={"op": where.op})
        case _:
            assert_never(where)


def _arg_views(arg: Arg) -> Iterator[View]:
    if isinstance(arg, View):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _arg_views(item)


def _arg_sizes(arg: Arg) -> Iterator[Expr]:
    if isinstance(arg, View):
        yield from (*arg.shape, *arg.strides, arg.offset)
    elif isinstance(arg, Expr):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _arg_sizes(item)


def _arg_floats(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Float):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _arg_floats(item)


def _term_problem(term: Term) -> str | None:
    if isinstance(term, Float):
        return f"{term.name} is no size"
    if isinstance(term, Expr):
        return f"{term} depends on more than size symbols" if term.vars() or term.vals() else None
    if not isinstance(term, Apply):
        return None
    if term.function not in FUNCTIONS:
        return f"there is no function {term.function}"
    arity = FUNCTIONS[term.function].arity
    if not term.args or arity not in (None, len(term.args)):
        return f"{term.function} takes {arity or 'at least 1'} arguments"
    return next(filter(None, map(_term_problem, term.args)), None)


def _call_args(extern: Extern) -> tuple[Arg, ...]:
    return (*extern.args, *(arg for _, arg in extern.kwargs))


def _views(program: Program) -> Iterator[tuple[Node | None, View]]:
    for node in program.nodes:
        if isinstance(node, Extern):
            for view in _arg_views((*_call_args(node), *node.outputs)):
                yield node, view
    for view in _arg_views(program.outputs):
        yield None, view


def program_sizes(program: Program) -> Iterator[tuple[Node | None, Expr]]:
    """Every size, stride, offset and integer argument, and the node that contains it."""
    for buffer in program.buffers:
        yield None, buffer.numel
    for node in program.nodes:
        if isinstance(node, Extern):
            for size in _arg_sizes((*_call_args(node), *node.outputs)):
                yield node, size
        else:
            yield from ((node, sym(name)) for name in kernel_symbols(node))
    for size in _arg_sizes(program.outputs):
        yield None, size


def _buffer_uses(program: Program) -> Iterator[tuple[Node | None, str]]:
    for node in program.nodes:
        names = (param.name for param in node.params) if isinstance(node, Kernel) else node.mutates
        for name in names:
            yield node, name
    for where, view in _views(program):
        yield where, view.buffer


def _effects(node: Node) -> tuple[set[str], set[str]]:
    """Buffers that a node reads and writes. A call may be the first to write what it mutates."""
    match node:
        case Kernel():
            return {load.buffer for _, load in node.loads()}, {store.buffer for _, store in node.stores()}
        case Extern():
            reads = {view.buffer for view in _arg_views(_call_args(node))} - set(node.mutates)
            return reads, {*node.mutates, *(view.buffer for view in node.outputs if view is not None)}
        case _:
            assert_never(node)
