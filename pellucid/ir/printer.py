"""The text form of kernels and programs, which `parser` parses.

The text of a kernel is self-contained, so that a kernel cut out of a program can be replayed alone:

    kernel scale<s0>(in0: f32[s0], out0: bf16[s0]) {
      axes i0: s0
      v0: f32 = load in0[i0]      # mul  model.py:12
      v1: f32 = const 0.5         # mul  model.py:12
      v2: f32 = mul v0, v1        # mul  model.py:12
      st0: f32 = store out0[i0], v2
    }

`<s0>` declares the size symbols; in an index, `[v3]` is the value `v3`. A float always has a point, an
exponent or a name (`1.0`, `1e-05`, `nan`, `-inf`), an integer never does. A comment runs from `#` to the end
of its line; the printer writes the origin there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from typing_extensions import assert_never

from pellucid.ir.derived import Float, term_text
from pellucid.ir.index import Expr, text
from pellucid.ir.nodes import (
    Arg,
    Axis,
    Buffer,
    CheckIndex,
    Compute,
    Const,
    Enum,
    Extern,
    IndexValue,
    Kernel,
    Line,
    Load,
    Param,
    Program,
    Reduce,
    Rhs,
    Scalar,
    Store,
    View,
)
from pellucid.ir.origin import Origin

_WIDTH = 100
_COMMENT_COLUMN = 60  # comments are aligned no further right than this


def print_kernel(kernel: Kernel, origins: bool = True) -> str:
    """`kernel` as text, without a newline at the end."""
    return "\n".join(_kernel_lines(kernel, origins))


def print_program(program: Program, origins: bool = True) -> str:
    """`program` as text, without a newline at the end."""
    return "\n".join(_program_lines(program, origins))


def print_line(line: Line) -> str:
    """One line of a kernel body, without its origin."""
    return f"{line.out}: {line.dtype!r} = {_rhs_text(line.rhs)}"


def print_view(view: View) -> str:
    """`view buf3 (128, 512) strides (512, 1) offset 0`"""
    shape, strides = _tuple_text(map(text, view.shape)), _tuple_text(map(text, view.strides))
    return f"view {view.buffer} {shape} strides {strides} offset {text(view.offset)}"


def print_scalar(value: Scalar) -> str:
    """A scalar as text that parses to the same value of the same Python type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def print_origin(origin: Origin) -> str:
    """`add, mul  model.py:12`, or the compiler's steps in parentheses for glue."""
    if origin.is_glue:
        words = f"({', '.join(origin.steps)})" if origin.steps else ""
    else:
        words = ", ".join(origin.nodes) + "".join(f"  {user}" for user in origin.users)
    return " ".join(words.splitlines())  # a line break would end the comment


def kernel_symbols(kernel: Kernel) -> tuple[str, ...]:
    """Names of the size symbols that a kernel uses, sorted."""
    return symbols_of(kernel.params, kernel.space, kernel.body)


def symbols_of(params: Iterable[Param], space: Iterable[Axis], lines: Iterable[Line]) -> tuple[str, ...]:
    """Names of the size symbols that these use, sorted."""
    names: set[str] = set()
    for size in [axis.extent for axis in space] + [param.numel for param in params]:
        names |= size.syms()
    for line in lines:
        match line.rhs:
            case IndexValue(index) | Load(_, index) | Store(_, index):
                names |= index.syms()
            case CheckIndex(_, size):
                names |= size.syms()
            case Const() | Compute() | Reduce():
                pass
            case _:
                assert_never(line.rhs)
    return tuple(sorted(names))


def _rhs_text(rhs: Rhs) -> str:
    match rhs:
        case Const(value):
            return f"const {print_scalar(value)}"
        case IndexValue(index):
            return f"index {text(index)}"
        case CheckIndex(arg, size, wrap, dim):
            return f"check {arg}, {text(size)}" + ("" if wrap else " nowrap") + (f" dim {dim}" if dim else "")
        case Load(buffer, index, None, other) if _same_scalar(other, 0):
            return f"load {buffer}[{text(index)}]"
        case Load(buffer, index, mask, other):
            condition = "" if mask is None else f" if {mask}"
            return f"load {buffer}[{text(index)}]{condition} else {print_scalar(other)}"
        case Compute(op, args):
            return f"{op} {', '.join(args)}"
        case Reduce(op, arg, axes):
            return f"{op} {arg} over {', '.join(axes)}"
        case Store(buffer, index, arg, join):
            return f"store {join}{' ' if join else ''}{buffer}[{text(index)}], {arg}"
        case _:
            assert_never(rhs)


def _same_scalar(left: Scalar, right: Scalar) -> bool:
    return repr(left) == repr(right)


def _kernel_lines(kernel: Kernel, origins: bool) -> list[str]:
    head = print_head("kernel", kernel.name, kernel_symbols(kernel), kernel.params, kernel.space)
    body = [f"  {print_line(line)}" for line in kernel.body]
    comments = [print_origin(line.origin) if origins else "" for line in kernel.body]
    return [*head, *with_comments(body, comments), "}"]


def print_head(
    word: str, name: str, symbols: Sequence[str], params: Sequence[Param], space: Sequence[Axis]
) -> list[str]:
    """The lines of a kernel above its body."""
    head = f"{word} {name}" + (f"<{', '.join(symbols)}>" if symbols else "")
    declared = [f"{param.name}: {param.dtype!r}[{text(param.numel)}]" for param in params]
    line = f"{head}({', '.join(declared)}) {{"
    lines = [line] if len(line) <= _WIDTH else [f"{head}(", *(f"    {param}," for param in declared), ") {"]
    axes = [f"  axes {', '.join(f'{axis.name}: {text(axis.extent)}' for axis in space)}"] if space else []
    return [*lines, *axes]


def with_comments(lines: Sequence[str], comments: Sequence[str]) -> Iterator[str]:
    """Each line with its comment, if it has one; the comments are aligned."""
    widths = [len(line) for line, comment in zip(lines, comments, strict=True) if comment]
    column = min(max(widths, default=0), _COMMENT_COLUMN)
    for line, comment in zip(lines, comments, strict=True):
        yield f"{line:<{column}}  # {comment}" if comment else line


def _program_lines(program: Program, origins: bool) -> Iterator[str]:
    yield "program {"
    if program.symbols:
        yield f"  symbols {', '.join(program.symbols)}"
    for each in program.derived:
        yield f"  derived {each.name}: {'float' if each.is_float else 'int'} = {term_text(each.term)}"
    for buffer in program.buffers:
        yield f"  {_buffer_text(buffer)}"
    if program.inputs:
        yield f"  inputs {', '.join('-' if name is None else name for name in program.inputs)}"
    for node in program.nodes:
        yield ""
        lines = _kernel_lines(node, origins) if isinstance(node, Kernel) else _extern_lines(node, origins)
        for line in lines:
            yield f"  {line}"
    if program.nodes and program.outputs:
        yield ""
    for output in program.outputs:
        yield f"  output {print_arg(output)}"
    yield "}"


def _buffer_text(buffer: Buffer) -> str:
    return f"buffer {buffer.name}: {buffer.dtype!r}[{text(buffer.numel)}] {buffer.role}"


def _extern_lines(extern: Extern, origins: bool) -> Iterator[str]:
    comment = print_origin(extern.origin) if origins else ""
    yield f"extern {extern.name} = {extern.op} {{" + (f"  # {comment}" if comment else "")
    for arg in extern.args:
        yield f"  arg {print_arg(arg)}"
    for name, arg in extern.kwargs:
        yield f"  kwarg {name} = {print_arg(arg)}"
    for output in extern.outputs:
        yield f"  output {print_arg(output)}"
    if extern.out:
        yield "  out"
    if extern.mutates:
        yield f"  mutates {', '.join(extern.mutates)}"
    if extern.ordered:
        yield "  ordered"
    if extern.reason:
        yield f"  reason {json.dumps(extern.reason, ensure_ascii=False)}"
    yield "}"


def print_arg(arg: Arg) -> str:
    """An argument of a call, or a result.

    `size` marks an `Expr`, to distinguish the expression 4 from the number 4.
    """
    match arg:
        case None:
            return "none"
        case View():
            return print_view(arg)
        case Expr():
            return f"size {text(arg)}"
        case Float(name):
            return f"number {name}"
        case Enum(kind, name):
            return f"{kind}.{name}"
        case str():
            return json.dumps(arg, ensure_ascii=False)
        case tuple():
            return _tuple_text(map(print_arg, arg))
        case bool() | int() | float():
            return print_scalar(arg)
        case _:
            assert_never(arg)


def _tuple_text(items: Iterable[str]) -> str:
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
