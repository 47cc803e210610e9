"""An interpreter that defines the meaning of the IR: the oracle that native code is tested against.

Each line of a kernel is evaluated for all points at once, as a tensor with one dimension per axis of the
space: of the axis' extent where the line depends on the axis, of size 1 elsewhere. A value has exactly its
line's type, so results round as the IR specifies. Where the IR leaves behaviour undefined, the interpreter does this:

- An integer divided by zero (`floordiv`, `truncdiv`, `remainder`, `fmod`) is divided by one; eager raises
  ZeroDivisionError. The minimum integer divided by -1 wraps around to itself; eager may crash.
- A float cast to an integer type that cannot hold it becomes what `Tensor.to` returns on this machine.
- An element outside its buffer, loaded or stored, is a bug of the kernel: InternalError.
- Uninitialised memory holds NaN, 85 or true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import torch
from typing_extensions import assert_never

from pellucid.errors import InternalError
from pellucid.ir import unsigned
from pellucid.ir.analysis import operator_of
from pellucid.ir.derived import Float, Numbers, by_name
from pellucid.ir.index import Expr, Sym, Val, Var
from pellucid.ir.nodes import (
    Arg,
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
    Scalar,
    Store,
    View,
)
from pellucid.ir.ops import OPS, REDUCTIONS
from pellucid.ir.printer import print_line
from pellucid.ir.types import TORCH_DTYPES, DType

Tensor: TypeAlias = torch.Tensor


def run_kernel(kernel: Kernel, buffers: Mapping[str, Tensor], symbols: Mapping[str, int]) -> None:
    """Run `kernel` on flat tensors, one per parameter; it writes them after all its loads.

    Raises IndexError where a `CheckIndex` fails; then nothing has been stored.
    """
    run_lines(_frame(kernel, buffers, symbols), kernel.body)


def line_values(
    kernel: Kernel, buffers: Mapping[str, Tensor], symbols: Mapping[str, int], given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The value of every line but the stores, by name; see the top of this file for their shapes.

    given: values of some lines, which the lines that use them get in place of the computed ones.
    """
    frame = _frame(kernel, buffers, symbols)
    computed: dict[str, Tensor] = {}
    for line in kernel.body:
        if not isinstance(line.rhs, Store):
            computed[line.out] = value_of(frame, line)
            frame.values[line.out] = (given or {}).get(line.out, computed[line.out])
    return computed


def run_program(program: Program, inputs: Sequence[Tensor | int | None]) -> list[Tensor | int | None]:
    """Run `program` on the graph's arguments; it writes to the tensors that it mutates.

    Calls run the operator's own implementation. Results are views of new memory, or of an input.
    """
    given = dict(zip(program.inputs, inputs, strict=True))
    numbers = Numbers({name: int(cast(int, given[name])) for name in program.symbols}, by_name(program.derived))
    floats = {each.name: float(numbers.of(each.name)) for each in program.derived if each.is_float}
    names = [*program.symbols, *(each.name for each in program.derived if not each.is_float)]
    symbols = {name: int(numbers.of(name)) for name in names}
    memory: dict[str, Tensor] = {}
    for buffer in program.buffers:
        numel = size_of(buffer.numel, symbols)
        if buffer.name in floats:
            memory[buffer.name] = torch.tensor([floats[buffer.name]], dtype=torch.float64)
        elif buffer.role == "input":
            memory[buffer.name] = _flat(cast(Tensor, given[buffer.name]), numel)
        else:
            memory[buffer.name] = _fresh(buffer.dtype, numel)
    with torch.no_grad():
        for node in program.nodes:
            if isinstance(node, Kernel):
                run_kernel(node, {param.name: memory[param.name] for param in node.params}, symbols)
            else:
                _call(node, memory, symbols, floats)
    return [cast("Tensor | int | None", _argument(output, memory, symbols, floats)) for output in program.outputs]


# ------------------------------------------------------------------------------------------------ kernels


@dataclass(frozen=True, slots=True)
class Frame:
    """Points of a kernel that are being evaluated together.

    points: for each axis, in the order of dimensions, the positions along it, as a tensor with size 1 in all others.
    values: one tensor for each line so far, with the same number of dimensions. symbols: values of size symbols, and of
    other names in indices.
    """

    name: str
    buffers: Mapping[str, Tensor]
    symbols: Mapping[str, int]
    points: dict[str, Tensor]
    values: dict[str, Tensor]

    @property
    def extents(self) -> dict[str, int]:
        """The number of positions along each axis."""
        return {axis: points.numel() for axis, points in self.points.items()}


def positions(axes: Sequence[str], axis: str, first: int, last: int) -> Tensor:
    """The entry of `Frame.points` for positions of an axis from `first` up to, but excluding, `last`."""
    return torch.arange(first, last).reshape([-1 if each == axis else 1 for each in axes])


def memory_of(
    name: str, params: Sequence[Param], buffers: Mapping[str, Tensor], symbols: Mapping[str, int]
) -> dict[str, Tensor]:
    """The flat tensor of each parameter, cut to the parameter's size."""
    memory: dict[str, Tensor] = {}
    for param in params:
        buffer, numel = buffers[param.name], size_of(param.numel, symbols)
        expected = TORCH_DTYPES[param.dtype]
        if buffer.dtype != expected or buffer.dim() != 1 or buffer.numel() < numel:
            given = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
            raise InternalError(f"kernel {name}: {param.name} is {given}, not {numel} x {expected}")
        memory[param.name] = buffer[:numel]
    return memory


def _frame(kernel: Kernel, buffers: Mapping[str, Tensor], symbols: Mapping[str, int]) -> Frame:
    axes = [axis.name for axis in kernel.space]
    points = {axis.name: positions(axes, axis.name, 0, size_of(axis.extent, symbols)) for axis in kernel.space}
    return Frame(kernel.name, memory_of(kernel.name, kernel.params, buffers, symbols), symbols, points, {})


def run_lines(frame: Frame, lines: Iterable[Line]) -> None:
    """Evaluate `lines` at all points of `frame`; stores happen after all loads."""
    stores: list[tuple[Tensor, Tensor, Tensor, str]] = []
    for line in lines:
        if isinstance(line.rhs, Store):
            stores.append(_stored(frame, line, line.rhs, frame.values[line.rhs.arg]))
        else:
            frame.values[line.out] = value_of(frame, line)
    for stored in stores:
        _write(*stored)


def store(frame: Frame, line: Line, value: Tensor) -> None:
    """Write `value` to the elements that the store `line` addresses."""
    assert isinstance(line.rhs, Store)
    _write(*_stored(frame, line, line.rhs, value))


def value_of(frame: Frame, line: Line) -> Tensor:
    """The value of a line that is no store, at all points of `frame`."""
    values, dtype, rank = frame.values, TORCH_DTYPES[line.dtype], len(frame.points)
    match line.rhs:
        case Const(value):
            return torch.full([1] * rank, value, dtype=dtype)
        case IndexValue(index):
            return index_of(frame, index)
        case CheckIndex(arg, size, wrap, dim):
            return _checked(values[arg], size_of(size, frame.symbols), wrap, dim)
        case Load():
            return _loaded(frame, line, line.rhs)
        case Compute("cast", (arg,)):
            return OPS["cast"].evaluate(dtype, values[arg])
        case Compute(op, args):
            return _computed(op, [values[arg] for arg in args])
        case Reduce(op, arg, axes):
            return _reduced(frame, op, values[arg], axes)
        case Store():
            raise InternalError(f"a store has no value: {print_line(line)}")
        case _:
            assert_never(line.rhs)


def index_of(frame: Frame, index: Expr) -> Tensor:
    """The value of an index expression at each point."""

    def atom(atom: Sym | Var | Val) -> Any:
        match atom:
            case Sym(name):
                return frame.symbols[name]
            case Val(name):
                return frame.values[name]
            case Var(name):
                return frame.points[name] if name in frame.points else frame.symbols[name]

    value: Any = index.evaluate(atom)
    return value if isinstance(value, Tensor) else torch.full([1] * len(frame.points), value)


def _checked(value: Tensor, size: int, wrap: bool, dim: int) -> Tensor:
    outside = (value >= size) | (value < (-size if wrap else 0))
    if outside.any():
        raise IndexError(f"index {int(value[outside][0])} is out of bounds for dimension {dim} with size {size}")
    return torch.where(value < 0, value + size, value)


def _loaded(frame: Frame, line: Line, load: Load) -> Tensor:
    memory, dtype = frame.buffers[load.buffer], TORCH_DTYPES[line.dtype]
    index = index_of(frame, load.index)
    if load.mask is None:
        _check_inside(frame, line, index, memory)
        # Flattened, because indexing with a 0-d tensor returns a view, which a store would change.
        return memory[index.flatten()].reshape(index.shape).to(dtype)
    index, mask = _broadcast(index, frame.values[load.mask])
    loaded = index[mask]
    _check_inside(frame, line, loaded, memory)
    result = torch.full(index.shape, load.other, dtype=dtype)
    unsigned.as_signed(result)[mask] = unsigned.as_signed(memory[loaded].to(dtype))
    return result


def _broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    shape = [b if a == 1 else a for a, b in zip(left.shape, right.shape, strict=True)]
    return left.expand(shape), right.expand(shape)


def _computed(op: str, args: list[Tensor]) -> Tensor:
    if unsigned.is_unsigned(args[-1].dtype) and op != "where":
        return unsigned.evaluate(op, args)
    if op not in ("floordiv", "truncdiv", "remainder", "fmod") or args[0].is_floating_point():
        return OPS[op].evaluate(*args)
    num, den = args
    # Both cases trap in the processor. They are computed as num // 1 and num % 1.
    minus_one = (den == -1) & den.dtype.is_signed
    result = OPS[op].evaluate(num, torch.where((den == 0) | minus_one, 1, den))
    return torch.where(minus_one, -num, result) if op in ("floordiv", "truncdiv") else result


def _reduced(frame: Frame, op: str, value: Tensor, axes: tuple[str, ...]) -> Tensor:
    extents = frame.extents
    names = list(extents)
    dims = sorted(names.index(axis) for axis in axes)
    # A value that does not vary along a reduced axis still counts once per point of the axis.
    shape = [extents[names[dim]] if dim in dims else size for dim, size in enumerate(value.shape)]
    return reduce_dims(op, value.expand(shape), dims)


def reduce_dims(op: str, value: Tensor, dims: Sequence[int]) -> Tensor:
    """`value` reduced along `dims`, in ascending order, which keep size 1."""
    evaluate = partial(unsigned.reduce, op) if unsigned.is_unsigned(value.dtype) else REDUCTIONS[op].evaluate
    return reduce(lambda folded, dim: folded.unsqueeze(dim), dims, evaluate(value, tuple(dims)))


def _stored(frame: Frame, line: Line, store: Store, value: Tensor) -> tuple[Tensor, Tensor, Tensor, str]:
    """(memory, flat indices, values, join) of a store, for `_write`."""
    memory = frame.buffers[store.buffer]
    index, value = _broadcast(index_of(frame, store.index), value)
    if store.join and store.index.vals():  # it runs at each point of the space
        index, value = (each.expand(tuple(frame.extents.values())) for each in (index, value))
    index = index.flatten()
    _check_inside(frame, line, index, memory)
    if not store.index.vals() and _repeats(index):
        raise fault(frame, line, "two points store the same element")
    value = value.flatten()
    return memory, index, value if store.join else value.to(memory.dtype), store.join


def _write(memory: Tensor, index: Tensor, value: Tensor, join: str) -> None:
    """Write flat `value` to `memory`, or join it, element by element where indices repeat."""
    if not _repeats(index):
        new = _computed(join, [memory[index].to(value.dtype), value]).to(memory.dtype) if join else value
        unsigned.as_signed(memory)[index] = unsigned.as_signed(new)
        return
    for at, element in zip((int(each) for each in index), value, strict=True):
        old = memory[at].to(value.dtype)
        memory[at] = _computed(join, [old, element]) if join else element


def _repeats(index: Tensor) -> bool:
    """Whether some index occurs twice."""
    ordered = index.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _check_inside(frame: Frame, line: Line, index: Tensor, memory: Tensor) -> None:
    outside = (index < 0) | (index >= memory.numel())
    if outside.any():
        raise fault(frame, line, f"index {int(index[outside][0])} is outside of {memory.numel()} elements")


def fault(frame: Frame, line: Line, problem: str) -> InternalError:
    """The error for a line that violates an invariant of kernels."""
    context: dict[str, object] = {"line": print_line(line), "symbols": dict(frame.symbols)}
    return InternalError(f"kernel {frame.name}, line {line.out}: {problem}", context=context)


def size_of(size: Expr, symbols: Mapping[str, int]) -> int:
    """The value of a size."""

    def atom(atom: Sym | Var | Val) -> int:
        if isinstance(atom, Sym):
            return symbols[atom.name]
        raise InternalError(f"{size} is not a size: it depends on {atom.name}")

    return size.evaluate(atom)


# ------------------------------------------------------------------------------------------------ programs


def _flat(tensor: Tensor, numel: int) -> Tensor:
    """The memory of `tensor` from its first element on, whatever its shape and strides."""
    return torch.as_strided(tensor.detach(), (numel,), (1,), tensor.storage_offset())


def _fresh(dtype: DType, numel: int) -> Tensor:
    """Memory with contents that make reads before writes visible in results."""
    return torch.full(
        (numel,),
        math.nan if TORCH_DTYPES[dtype].is_floating_point or TORCH_DTYPES[dtype].is_complex else 85,
        dtype=TORCH_DTYPES[dtype],
    )


def _call(
    extern: Extern, memory: Mapping[str, Tensor], symbols: Mapping[str, int], floats: Mapping[str, float]
) -> None:
    operator = operator_of(extern.op)
    args = [_argument(arg, memory, symbols, floats) for arg in extern.args]
    kwargs = {name: _argument(arg, memory, symbols, floats) for name, arg in extern.kwargs}
    outputs = [_argument(output, memory, symbols, floats) for output in extern.outputs]
    if extern.out:
        names = [argument.name for argument in operator._schema.arguments if argument.is_out]
        operator(*args, **kwargs, **dict(zip(names, outputs, strict=True)))
        return
    returned = operator(*args, **kwargs)
    results = _tensors(returned) if operator._schema.returns else ()
    for output, result in zip(outputs, results, strict=True):
        if isinstance(output, Tensor) and isinstance(result, Tensor):
            if output.shape != result.shape:
                shapes = f"{tuple(result.shape)} instead of {tuple(output.shape)}"
                raise InternalError(f"call {extern.name}: {extern.op} returns {shapes}")
            output.copy_(result)


def _tensors(result: Any) -> list[Tensor | None]:
    """The tensors that an operator returns, with lists flattened, in schema order."""
    if result is None or isinstance(result, Tensor):
        return [result]
    if isinstance(result, Sequence):
        items = cast("Sequence[Any]", result)
        return [tensor for item in items if not isinstance(item, Scalar) for tensor in _tensors(item)]
    return []


def _argument(arg: Arg, memory: Mapping[str, Tensor], symbols: Mapping[str, int], floats: Mapping[str, float]) -> Any:
    match arg:
        case View(buffer, shape, strides, offset):
            flat = memory[buffer]
            sizes, steps = ([size_of(size, symbols) for size in sizes] for sizes in (shape, strides))
            return torch.as_strided(flat, sizes, steps, flat.storage_offset() + size_of(offset, symbols))
        case Expr():
            return size_of(arg, symbols)
        case Float(name):
            return floats[name]
        case Enum("device", name):
            return torch.device(name)
        case Enum(_, name):
            return getattr(torch, name)
        case tuple():
            return [_argument(item, memory, symbols, floats) for item in arg]
        case None | bool() | int() | float() | str():
            return arg
        case _:
            assert_never(arg)
