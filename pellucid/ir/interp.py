"""The meaning of the IR as a program: the oracle that native code is tested with.

Each line of a kernel is evaluated for all points at once, as a tensor with one dimension per axis of the
space: as long as the axis where the line depends on it, of size 1 elsewhere. A value has exactly its line's
type, so results round as the IR says. Where the IR leaves something open, this is what happens here:

- An integer divided by zero (`floordiv`, `truncdiv`, `remainder`, `fmod`) is divided by one; eager raises
  ZeroDivisionError. The least integer divided by -1 wraps around to itself; eager may crash.
- A float cast to an integer type that cannot hold it gives what `Tensor.to` gives on this machine.
- An element outside its buffer, loaded or stored, is a bug of the kernel: InternalError.
- Memory that nothing was written to holds NaN, 85 or true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import torch
from typing_extensions import assert_never

from pellucid.errors import InternalError
from pellucid.ir import unsigned
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
    """Run `kernel` on flat tensors, one per parameter; it stores into them after all its loads.

    Raises IndexError where a `CheckIndex` fails; then nothing has been stored.
    """
    frame = _frame(kernel, buffers, symbols)
    stores: list[tuple[Tensor, Tensor, Tensor, str]] = []
    for line in kernel.body:
        if isinstance(line.rhs, Store):
            stores.append((*_stored(frame, line, line.rhs), line.rhs.join))
        else:
            frame.values[line.out] = _value(frame, line)
    for memory, index, value, join in stores:
        _write(memory, index, value, join)


def line_values(
    kernel: Kernel, buffers: Mapping[str, Tensor], symbols: Mapping[str, int], given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The value of every line but the stores, by name; see the top of this file for their shapes.

    given: values of some lines, of which those that use them are computed instead.
    """
    frame = _frame(kernel, buffers, symbols)
    computed: dict[str, Tensor] = {}
    for line in kernel.body:
        if not isinstance(line.rhs, Store):
            computed[line.out] = _value(frame, line)
            frame.values[line.out] = (given or {}).get(line.out, computed[line.out])
    return computed


def run_program(program: Program, inputs: Sequence[Tensor | int | None]) -> list[Tensor | int | None]:
    """Run `program` on the graph's arguments; it writes into the tensors that it mutates.

    Calls go to the operator's own implementation. Results are views of fresh memory, or of an input.
    """
    given = dict(zip(program.inputs, inputs, strict=True))
    numbers = Numbers({name: int(cast(int, given[name])) for name in program.symbols}, by_name(program.derived))
    floats = {each.name: float(numbers.of(each.name)) for each in program.derived if each.is_float}
    names = [*program.symbols, *(each.name for each in program.derived if not each.is_float)]
    symbols = {name: int(numbers.of(name)) for name in names}
    memory: dict[str, Tensor] = {}
    for buffer in program.buffers:
        numel = _size(buffer.numel, symbols)
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
class _Frame:
    """A kernel that is being run. `values` has one tensor per line so far, of as many dimensions as axes."""

    kernel: Kernel
    buffers: Mapping[str, Tensor]
    symbols: Mapping[str, int]
    extents: dict[str, int]
    values: dict[str, Tensor]


def _frame(kernel: Kernel, buffers: Mapping[str, Tensor], symbols: Mapping[str, int]) -> _Frame:
    memory: dict[str, Tensor] = {}
    for param in kernel.params:
        buffer, numel = buffers[param.name], _size(param.numel, symbols)
        wanted = TORCH_DTYPES[param.dtype]
        if buffer.dtype != wanted or buffer.dim() != 1 or buffer.numel() < numel:
            given = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
            raise InternalError(f"kernel {kernel.name}: {param.name} is {given}, not {numel} x {wanted}")
        memory[param.name] = buffer[:numel]
    extents = {axis.name: _size(axis.extent, symbols) for axis in kernel.space}
    return _Frame(kernel, memory, symbols, extents, {})


def _value(frame: _Frame, line: Line) -> Tensor:
    values, dtype, rank = frame.values, TORCH_DTYPES[line.dtype], len(frame.extents)
    match line.rhs:
        case Const(value):
            return torch.full([1] * rank, value, dtype=dtype)
        case IndexValue(index):
            return _index(frame, index)
        case CheckIndex(arg, size, wrap, dim):
            return _checked(values[arg], _size(size, frame.symbols), wrap, dim)
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


def _index(frame: _Frame, index: Expr) -> Tensor:
    """The value of an index expression at each point."""

    def atom(atom: Sym | Var | Val) -> Any:
        match atom:
            case Sym(name):
                return frame.symbols[name]
            case Val(name):
                return frame.values[name]
            case Var(name):
                dims = [extent if axis == name else 1 for axis, extent in frame.extents.items()]
                return torch.arange(frame.extents[name]).reshape(dims)

    value: Any = index.evaluate(atom)
    return value if isinstance(value, Tensor) else torch.full([1] * len(frame.extents), value)


def _checked(value: Tensor, size: int, wrap: bool, dim: int) -> Tensor:
    outside = (value >= size) | (value < (-size if wrap else 0))
    if outside.any():
        raise IndexError(f"index {int(value[outside][0])} is out of bounds for dimension {dim} with size {size}")
    return torch.where(value < 0, value + size, value)


def _loaded(frame: _Frame, line: Line, load: Load) -> Tensor:
    memory, dtype = frame.buffers[load.buffer], TORCH_DTYPES[line.dtype]
    index = _index(frame, load.index)
    if load.mask is None:
        _check_inside(frame, line, index, memory)
        # Flattened, because indexing with a tensor of no dimensions gives a view, which a store would change.
        return memory[index.flatten()].reshape(index.shape).to(dtype)
    index, mask = _broadcast(index, frame.values[load.mask])
    touched = index[mask]
    _check_inside(frame, line, touched, memory)
    result = torch.full(index.shape, load.other, dtype=dtype)
    unsigned.as_signed(result)[mask] = unsigned.as_signed(memory[touched].to(dtype))
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
    # Both cases trap in the processor. Without them num // 1 and num % 1 are what is left.
    minus_one = (den == -1) & den.dtype.is_signed
    result = OPS[op].evaluate(num, torch.where((den == 0) | minus_one, 1, den))
    return torch.where(minus_one, -num, result) if op in ("floordiv", "truncdiv") else result


def _reduced(frame: _Frame, op: str, value: Tensor, axes: tuple[str, ...]) -> Tensor:
    names = list(frame.extents)
    dims = sorted(names.index(axis) for axis in axes)
    # A value that is the same all along a reduced axis counts once per point of the axis all the same.
    shape = [frame.extents[names[dim]] if dim in dims else size for dim, size in enumerate(value.shape)]
    evaluate = partial(unsigned.reduce, op) if unsigned.is_unsigned(value.dtype) else REDUCTIONS[op].evaluate
    result = evaluate(value.expand(shape), tuple(dims))
    return reduce(lambda folded, dim: folded.unsqueeze(dim), dims, result)


def _stored(frame: _Frame, line: Line, store: Store) -> tuple[Tensor, Tensor, Tensor]:
    """(memory, flat indices, values): what the store is going to write."""
    memory = frame.buffers[store.buffer]
    index, value = _broadcast(_index(frame, store.index), frame.values[store.arg])
    if store.join and store.index.vals():  # each point of the space counts
        index, value = (each.expand(tuple(frame.extents.values())) for each in (index, value))
    index = index.flatten()
    _check_inside(frame, line, index, memory)
    written = torch.zeros(memory.numel(), dtype=torch.bool)
    written[index] = True
    if not store.index.vals() and int(written.sum()) != index.numel():
        raise _fault(frame, line, "two points store the same element")
    value = value.flatten()
    return memory, index, value if store.join else value.to(memory.dtype)


def _write(memory: Tensor, index: Tensor, value: Tensor, join: str) -> None:
    """Write or join flat `value` into `memory`, one after the other where elements repeat."""
    places = index.sort().values
    if not bool((places[1:] == places[:-1]).any()):
        new = _computed(join, [memory[index].to(value.dtype), value]).to(memory.dtype) if join else value
        unsigned.as_signed(memory)[index] = unsigned.as_signed(new)
        return
    for at, element in zip((int(place) for place in index), value, strict=True):
        old = memory[at].to(value.dtype)
        memory[at] = _computed(join, [old, element]) if join else element


def _check_inside(frame: _Frame, line: Line, index: Tensor, memory: Tensor) -> None:
    outside = (index < 0) | (index >= memory.numel())
    if outside.any():
        raise _fault(frame, line, f"index {int(index[outside][0])} is outside of {memory.numel()} elements")


def _fault(frame: _Frame, line: Line, problem: str) -> InternalError:
    context: dict[str, object] = {"line": print_line(line), "symbols": dict(frame.symbols)}
    return InternalError(f"kernel {frame.kernel.name}, line {line.out}: {problem}", context=context)


def _size(size: Expr, symbols: Mapping[str, int]) -> int:
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
    """Memory with contents that show when they are used."""
    return torch.full(
        (numel,),
        math.nan if TORCH_DTYPES[dtype].is_floating_point or TORCH_DTYPES[dtype].is_complex else 85,
        dtype=TORCH_DTYPES[dtype],
    )


def _call(
    extern: Extern, memory: Mapping[str, Tensor], symbols: Mapping[str, int], floats: Mapping[str, float]
) -> None:
    namespace, name, overload = _operator_path(extern.op)
    operator: Any = getattr(getattr(getattr(torch.ops, namespace), name), overload)
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


def _operator_path(op: str) -> tuple[str, str, str]:
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    return namespace, name, overload or "default"


def _tensors(result: Any) -> list[Tensor | None]:
    """The tensors that an operator returns, lists of them in line, in schema order."""
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
            sizes, steps = ([_size(size, symbols) for size in sizes] for sizes in (shape, strides))
            return torch.as_strided(flat, sizes, steps, flat.storage_offset() + _size(offset, symbols))
        case Expr():
            return _size(arg, symbols)
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
