"""The loops that Inductor lowers a graph to, evaluated with PyTorch's own operators instead of generated code.

A loop is a function of indices that calls a handler: `load`, `add`, `reduction`. Here the handler computes with whole
tensors, one dimension per index. Unsupported loops raise NotImplementedError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any
from unittest import mock

import sympy
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer, ExternKernelOut, FlexibleLayout, Pointwise, Reduction, Scatter
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import OpsValue, V

_NAMES = {
    "and_": "logical_and",
    "or_": "logical_or",
    "truediv": "true_divide",
    "int_truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "fmod",
    "identity": "clone",
}

_EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *terms: reduce(operator.add, terms),
    "Mul": lambda *factors: reduce(operator.mul, factors),
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "ModularIndexing": lambda number, divisor, modulus: number // divisor % modulus,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Identity": lambda value: value,
}

_REDUCTIONS: dict[str, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {
    "sum": lambda x: [x.sum(-1)],
    "prod": lambda x: [x.prod(-1)],
    "max": lambda x: [x.amax(-1)],
    "min": lambda x: [x.amin(-1)],
    "any": lambda x: [x.any(-1)],
    "argmax": lambda x: [x.argmax(-1)],
    "argmin": lambda x: [x.argmin(-1)],
    "welford_reduce": lambda x: [
        x.mean(-1),
        x.var(-1, correction=0) * x.shape[-1],
        torch.full(x.shape[:-1], float(x.shape[-1])),
    ],
}


class Loops:
    """The buffers of a lowered graph during one run, as flat memory."""

    def __init__(self, lowering: GraphLowering, inputs: Sequence[Any]) -> None:
        self._lowering = lowering
        self._memory: dict[str, torch.Tensor] = {name: _flat(each) for name, each in lowering.constants.items()}
        self._sizes: dict[sympy.Symbol, int] = {}
        self._changed = {name for each in lowering.operations for name in each.get_mutation_names()}
        for name, value in zip(lowering.graph_input_names, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                self._memory[name] = _flat(value)
            elif isinstance(symbol := lowering.graph_inputs[name], sympy.Symbol):
                self._sizes[symbol] = int(value)

    def value(self, name: str, eager: torch.Tensor) -> torch.Tensor:
        """The value of a buffer computed by its loop, with eager's layout; eager's value if the loop is unsupported."""
        if not eager.numel():
            return eager
        try:
            with V.set_graph_handler(self._lowering), mock.patch.object(FlexibleLayout, "allow_indexing", True):
                made = self._computed(name)
        except NotImplementedError:
            made = eager
        layout = self._lowering.name_to_buffer[name].get_layout()
        shape, strides = (tuple(map(self._size, each)) for each in (layout.size, layout.stride))
        memory = torch.empty(1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), dtype=made.dtype)
        memory.as_strided(shape, strides).copy_(made)
        self._memory[name] = memory
        return torch.empty_like(eager).copy_(made) if made.dtype is eager.dtype else made

    def _computed(self, name: str) -> torch.Tensor:
        buffer: Any = self._lowering.name_to_buffer.get(name)
        if isinstance(buffer, ExternKernelOut):
            return self._called(buffer)
        if not isinstance(buffer, ComputedBuffer) or name in self._changed:
            raise NotImplementedError(name)
        loop: Any = buffer.data
        if not isinstance(loop, Pointwise | Reduction) or isinstance(loop, Scatter) or buffer.get_mutation_names():
            raise NotImplementedError(type(loop))
        indices = loop.inner_fn_args()
        extents = [*loop.ranges, *(loop.reduction_ranges if isinstance(loop, Reduction) else ())]
        shape = [self._size(extent) for extent in extents]
        handler = _Handler(self.memory, {**self._sizes, **_counters([*indices[0], *indices[-1]], shape)})
        with V.set_ops_handler(handler):  # type: ignore[arg-type]
            value = _plain(loop.inner_fn(*indices))
        if not isinstance(value, torch.Tensor):
            raise NotImplementedError("a reduction of several values")
        if not isinstance(loop, Reduction):
            return value.expand(shape).to(loop.dtype)
        if loop.reduction_type not in _REDUCTIONS:
            raise NotImplementedError(loop.reduction_type)
        rows = value.expand(shape).reshape(*shape[: len(loop.ranges)], -1)
        return _REDUCTIONS[loop.reduction_type](rows)[getattr(loop, "output_index", 0)].to(loop.dtype)

    def memory(self, name: str) -> torch.Tensor:
        """The memory of a buffer that a loop loads, computed if necessary."""
        if name in self._changed:
            raise NotImplementedError("memory that is written to twice")
        if name not in self._memory:
            self._memory[name] = self._computed(name).contiguous().flatten()
        return self._memory[name]

    def _called(self, call: ExternKernelOut) -> torch.Tensor:
        """The result of a library call."""
        function = getattr(extern_kernels, call.get_kernel_name().removeprefix("extern_kernels."), None)
        if function is None:
            raise NotImplementedError(call.get_kernel_name())
        layout = call.get_layout()
        result = torch.empty_strided(*(tuple(map(self._size, each)) for each in (layout.size, layout.stride)))
        result = result.to(layout.dtype)
        function(*map(self._argument, call.inputs), *call.constant_args, **call.kwargs, out=result)
        return result

    def _argument(self, node: Any) -> torch.Tensor:
        layout = node.get_layout()
        size, stride = (tuple(map(self._size, each)) for each in (layout.size, layout.stride))
        return self.memory(node.get_name()).as_strided(size, stride, self._size(layout.offset))

    def _size(self, extent: Any) -> int:
        return int(_evaluated(extent, self._sizes))


class _Handler(DefaultHandler):
    """Evaluates the operators of a loop."""

    def __init__(self, memory: Callable[[str], torch.Tensor], symbols: dict[sympy.Symbol, Any]) -> None:
        self._memory, self._symbols = memory, symbols

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = getattr(torch, _NAMES.get(name, name), None)
        if function is None or kwargs:
            raise NotImplementedError(name)
        return function(*args)

    def load(self, name: str, index: sympy.Expr) -> torch.Tensor:
        memory, at = self._memory(name), _evaluated(index, self._symbols)
        # Elements out of bounds are masked afterwards.
        return memory[torch.as_tensor(at).clamp(0, memory.numel() - 1)]

    def constant(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    def index_expr(self, expr: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(_evaluated(expr, self._symbols)).to(dtype)

    def to_dtype(self, x: torch.Tensor, dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
        return x.to(dtype)

    def indirect_indexing(self, x: torch.Tensor, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
        symbol = sympy.Symbol(f"indirect{len(self._symbols)}", integer=True, nonnegative=True)
        wrapped = torch.where(x < 0, x + _evaluated(size, self._symbols), x) if wrap_neg else x
        self._symbols[symbol] = wrapped.to(torch.int64)
        return symbol

    def masked(self, mask: torch.Tensor, body: Callable[[], Any], other: Any) -> torch.Tensor:
        value = _plain(body())
        return torch.where(mask, value, torch.tensor(other, dtype=value.dtype))


def _evaluated(expr: Any, symbols: Mapping[Any, Any]) -> Any:
    """An index expression as a tensor, or as a number if it is constant."""
    if not isinstance(expr, sympy.Basic):
        return expr
    if expr in symbols:
        return symbols[expr]
    if expr.is_Integer:
        return int(expr)  # type: ignore[call-overload]
    evaluate = _EXPRESSIONS.get(type(expr).__name__)
    if evaluate is None:
        raise NotImplementedError(f"{type(expr).__name__} in an index")
    return evaluate(*(_evaluated(arg, symbols) for arg in expr.args))


def _counters(indices: Sequence[Any], shape: Sequence[int]) -> dict[sympy.Symbol, torch.Tensor]:
    """The values of each index, each along its own dimension."""
    found: dict[sympy.Symbol, torch.Tensor] = {}
    for position, (index, extent) in enumerate(zip(indices, shape, strict=False)):
        if isinstance(index, sympy.Symbol):
            dims = [extent if at == position else 1 for at in range(len(shape))]
            found[index] = torch.arange(extent).reshape(dims)
    return found


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, OpsValue) else value


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first element on."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor.detach(), (reach + 1 if tensor.numel() else 0,), (1,), tensor.storage_offset())
