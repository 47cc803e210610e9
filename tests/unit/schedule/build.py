"""A tiny eager-like language for programs as the lowering makes them: one kernel per operator, views for free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pellucid.ir.analysis import reads, writes
from pellucid.ir.index import ONE, ZERO, Expr, as_expr, product, total, var
from pellucid.ir.interp import TORCH_DTYPES, run_program
from pellucid.ir.nodes import (
    Axis,
    Buffer,
    Compute,
    Const,
    Extern,
    IndexValue,
    Kernel,
    Line,
    Load,
    Node,
    Param,
    Program,
    Reduce,
    Rhs,
    Scalar,
    Store,
    View,
)
from pellucid.ir.origin import Origin, UserLine
from pellucid.ir.types import DType
from pellucid.ir.verify import verify_program
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.memory import Lifetime, spans

Size = Expr | int
_MASKED = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Tensor:
    """A view of a buffer."""

    view: View
    dtype: DType

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.view.shape

    def permute(self, *dims: int) -> Tensor:
        shape, strides = (tuple(items[d] for d in dims) for items in (self.view.shape, self.view.strides))
        return self._view(shape, strides, self.view.offset)

    def slice(self, dim: int, start: int, stop: int) -> Tensor:
        shape = tuple(as_expr(stop - start) if d == dim else size for d, size in enumerate(self.shape))
        return self._view(shape, self.view.strides, self.view.offset + self.view.strides[dim] * start)

    def select(self, dim: int, at: int) -> Tensor:
        shape, strides = (items[:dim] + items[dim + 1 :] for items in (self.view.shape, self.view.strides))
        return self._view(shape, strides, self.view.offset + self.view.strides[dim] * at)

    def split(self, dim: int, inner: int) -> Tensor:
        """The dimension of extent `n * inner` as two."""
        extent, stride = self.shape[dim].value, self.view.strides[dim]
        assert extent is not None and extent % inner == 0
        shape = (*self.shape[:dim], as_expr(extent // inner), as_expr(inner), *self.shape[dim + 1 :])
        strides = (*self.view.strides[:dim], stride * inner, stride, *self.view.strides[dim + 1 :])
        return self._view(shape, strides, self.view.offset)

    def merge(self, dim: int) -> Tensor | None:
        """The dimensions `dim` and `dim + 1` as one, where the layout allows it."""
        if self.view.strides[dim] != self.view.strides[dim + 1] * self.shape[dim + 1]:
            return None
        shape = (*self.shape[:dim], self.shape[dim] * self.shape[dim + 1], *self.shape[dim + 2 :])
        return self._view(shape, (*self.view.strides[:dim], *self.view.strides[dim + 1 :]), self.view.offset)

    def unsqueeze(self, dim: int) -> Tensor:
        shape = (*self.shape[:dim], ONE, *self.shape[dim:])
        return self._view(shape, (*self.view.strides[:dim], ZERO, *self.view.strides[dim:]), self.view.offset)

    def _view(self, shape: Sequence[Expr], strides: Sequence[Expr], offset: Expr) -> Tensor:
        return replace(self, view=View(self.view.buffer, tuple(shape), tuple(strides), offset))


class ProgramBuilder:
    """Programs of f32 and i64 tensors."""

    def __init__(self, symbols: Sequence[str] = ()) -> None:
        self.symbols = tuple(symbols)
        self.nodes: list[Node] = []
        self.buffers: dict[str, Buffer] = {}
        self.inputs: list[str | None] = list(symbols)

    def input(self, *shape: Size, dtype: DType = DType.F32) -> Tensor:
        tensor = self._buffer(f"in{len(self.inputs)}", shape, dtype, "input")
        self.inputs.append(tensor.view.buffer)
        return tensor

    def op(self, name: str, *args: Tensor | Scalar, dtype: DType | None = None) -> Tensor:
        """A pointwise operator with broadcasting; a line of `dtype` is stored as that type."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        shape = _broadcast([tensor.shape for tensor in tensors])
        kernel = _Kernel(self, name, shape)
        values = [kernel.load(arg) if isinstance(arg, Tensor) else kernel.const(arg, args) for arg in args]
        result = DType.BOOL if name in _MASKED else kernel.types[values[-1]]
        value = kernel.line(Compute(name, tuple(values)), result)
        return kernel.store(value, shape, dtype or result)

    def reduce(self, name: str, x: Tensor, *dims: int) -> Tensor:
        kernel = _Kernel(self, name, x.shape)
        axes = tuple(f"i{d}" for d in dims if x.shape[d] != ONE)
        value = kernel.load(x)
        result = DType.I64 if name.startswith("arg") else kernel.types[value]
        value = kernel.line(Reduce(name, value, axes), result) if axes else value
        index = tuple(ZERO if d in dims else i for d, i in enumerate(kernel.index))
        shape = tuple(ONE if d in dims else size for d, size in enumerate(x.shape))
        return kernel.store(value, shape, result, index)

    def copy(self, x: Tensor) -> Tensor:
        kernel = _Kernel(self, "clone", x.shape)
        return kernel.store(kernel.load(x), x.shape, x.dtype)

    def full(self, value: float, *shape: Size) -> Tensor:
        sizes = tuple(map(as_expr, shape))
        kernel = _Kernel(self, "full", sizes)
        return kernel.store(kernel.line(Const(float(value)), DType.F32), sizes, DType.F32)

    def iota(self, size: Size) -> Tensor:
        kernel = _Kernel(self, "iota", (as_expr(size),))
        return kernel.store(kernel.line(IndexValue(kernel.index[0]), DType.I64), kernel.shape, DType.I64)

    def cat(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        extent = total(part.shape[dim] for part in parts)
        shape = tuple(extent if d == dim else size for d, size in enumerate(parts[0].shape))
        kernel = _Kernel(self, "cat", shape)
        start: Expr = ZERO
        result: str | None = None
        for part in parts:
            position = kernel.line(IndexValue(kernel.index[dim]), DType.I64)
            low = kernel.line(Const(start.value or 0), DType.I64)
            inside = kernel.line(Compute("ge", (position, low)), DType.BOOL)
            index = tuple(i - start if d == dim else i for d, i in enumerate(kernel.index))
            start = start + part.shape[dim]
            high = kernel.line(Const(start.value or 0), DType.I64)
            below = kernel.line(Compute("lt", (position, high)), DType.BOOL)
            mask = kernel.line(Compute("bitwise_and", (inside, below)), DType.BOOL)
            value = kernel.load(part, index, mask)
            result = value if result is None else kernel.line(Compute("where", (mask, value, result)), part.dtype)
        assert result is not None
        return kernel.store(result, shape, parts[0].dtype)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        out = self._buffer(f"b{len(self.buffers)}_mm", (a.shape[0], b.shape[1]), DType.F32, "temp")
        name = f"mm_{len(self.nodes)}"
        origin = Origin((name,), (), ("lower",))
        views = (a.view, b.view)
        self.nodes.append(Extern(name, "aten::mm.out", views, (), (out.view,), True, "a GEMM", origin=origin))
        return out

    def write(self, target: Tensor, value: Tensor) -> None:
        """`target.copy_(value)` for an input or a part of one."""
        kernel = _Kernel(self, "copy", target.shape)
        kernel.store_at(target, kernel.load(value))

    def finish(self, *outputs: Tensor) -> Program:
        names = {output.view.buffer for output in outputs}
        buffers = tuple(
            replace(buffer, role="output") if buffer.name in names and buffer.role == "temp" else buffer
            for buffer in self.buffers.values()
        )
        views = tuple(output.view for output in outputs)
        program = Program(self.symbols, buffers, tuple(self.inputs), tuple(self.nodes), views)
        verify_program(program)
        return program

    def _buffer(self, name: str, shape: Sequence[Size], dtype: DType, role: str) -> Tensor:
        sizes = tuple(map(as_expr, shape))
        self.buffers[name] = Buffer(name, dtype, product(sizes), role)
        strides = tuple(product(sizes[d + 1 :]) for d in range(len(sizes)))
        return Tensor(View(name, sizes, strides, ZERO), dtype)


class _Kernel:
    """One kernel over `shape`, with an axis for each dimension that is not 1."""

    def __init__(self, program: ProgramBuilder, name: str, shape: tuple[Expr, ...]) -> None:
        self.program = program
        self.name = f"{name}_{len(program.nodes)}"
        self.shape = shape
        self.index = tuple(ZERO if size == ONE else var(f"i{d}") for d, size in enumerate(shape))
        self.lines: list[Line] = []
        self.types: dict[str, DType] = {}

    def line(self, rhs: Rhs, dtype: DType) -> str:
        prefix = "s" if isinstance(rhs, Store) else "v"
        line = len(self.program.nodes) + 1
        origin = Origin((self.name,), (UserLine("model.py", line),), ("lower",))
        self.lines.append(Line(f"{prefix}{len(self.lines)}", rhs, dtype, origin))
        self.types[self.lines[-1].out] = dtype
        return self.lines[-1].out

    def const(self, value: Scalar, args: Sequence[Tensor | Scalar]) -> str:
        dtype = next(arg.dtype for arg in reversed(args) if isinstance(arg, Tensor)).compute
        return self.line(Const(float(value) if dtype.is_float else value), dtype)

    def load(self, x: Tensor, index: Sequence[Expr] | None = None, mask: str | None = None) -> str:
        at = self.index[len(self.index) - len(x.shape) :] if index is None else index
        pairs = zip(at, x.shape, x.view.strides, strict=True)
        address = total(i * stride for i, size, stride in pairs if size != ONE) + x.view.offset
        return self.line(Load(x.view.buffer, address, mask), x.dtype.compute)

    def store(self, value: str, shape: Sequence[Expr], dtype: DType, index: Sequence[Expr] | None = None) -> Tensor:
        out = self.program._buffer(f"b{len(self.program.buffers)}_{self.name}", shape, dtype, "temp")
        self.store_at(out, value, index)
        return out

    def store_at(self, out: Tensor, value: str, index: Sequence[Expr] | None = None) -> None:
        at = self.index if index is None else index
        address = total(i * stride for i, stride in zip(at, out.view.strides, strict=True)) + out.view.offset
        self.line(Store(out.view.buffer, address, value), self.types[value])
        used = dict.fromkeys(line.rhs.buffer for line in self.lines if isinstance(line.rhs, Load | Store))
        buffers = (self.program.buffers[name] for name in used)
        params = tuple(Param(buffer.name, buffer.dtype, buffer.numel) for buffer in buffers)
        space = tuple(Axis(f"i{d}", size) for d, size in enumerate(self.shape) if size != ONE)
        self.program.nodes.append(Kernel(self.name, params, space, tuple(self.lines)))


def _broadcast(shapes: Sequence[tuple[Expr, ...]]) -> tuple[Expr, ...]:
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != ONE), ONE) for sizes in zip(*padded, strict=True))


# ------------------------------------------------------------------------------------------------ judging


def kernels(program: Program) -> list[Kernel]:
    return [node for node in program.nodes if isinstance(node, Kernel)]


def lives(program: Program) -> list[Lifetime]:
    """Of the temporaries of a program of known sizes."""
    used = spans([(*reads(node), *writes(node)) for node in program.nodes], program.outputs)
    temps = [buffer for buffer in program.buffers if buffer.role == "temp" and buffer.name in used]
    return [Lifetime(b.name, *used[b.name], (b.numel.value or 0) * b.dtype.itemsize) for b in temps]


def random_inputs(program: Program, sizes: dict[str, int] | None = None) -> list[torch.Tensor | int | None]:
    """Small whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    symbols = sizes or {}
    buffers = {buffer.name: buffer for buffer in program.buffers}
    result: list[torch.Tensor | int | None] = []
    for name in program.inputs:
        if name in symbols:
            result.append(symbols[name])
        elif name is not None:
            numel = buffers[name].numel.evaluate(lambda atom: symbols[atom.name])
            values = torch.randint(-3, 4, (numel,), generator=generator)
            result.append(values.to(TORCH_DTYPES[buffers[name].dtype]))
    return result


def scheduled(program: Program, sizes: dict[str, int] | None = None, **options: int | bool) -> Program:
    """`program` after the stage, checked to be well-formed and to compute the same."""
    after, _ = schedule(program, Options(**options))
    verify_program(after)
    check_same(program, after, sizes)
    return after


def check_same(before: Program, after: Program, sizes: dict[str, int] | None = None) -> None:
    """Equal results, and equal inputs afterwards."""
    inputs = random_inputs(before, sizes)
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    expected, actual = run_program(before, inputs), run_program(after, copies)
    for one, other in zip([*expected, *inputs], [*actual, *copies], strict=True):
        torch.testing.assert_close(other, one, equal_nan=True, rtol=1e-4, atol=1e-4)
