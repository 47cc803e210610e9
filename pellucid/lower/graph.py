"""The program under construction: buffers, nodes, and what each FX node stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from pellucid.capture.graph import dtype_of, origin_of, shape_of, strides_of
from pellucid.capture.torch_compat import expr_of, is_symbolic
from pellucid.errors import InternalError, UnsupportedError
from pellucid.ir.decision import Decision, DecisionLog
from pellucid.ir.index import ONE, ZERO, Expr, product, total
from pellucid.ir.nodes import Buffer, Extern, Kernel, Node, Program, View
from pellucid.ir.types import DType
from pellucid.lower.builder import KernelBuilder


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the graph: a view of a buffer and the type of its elements."""

    view: View
    dtype: DType

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.view.shape


Result: TypeAlias = "TensorRef | Expr | bool | float | tuple[Result, ...] | None"


class GraphBuilder:
    """Collects the program while the FX graph is walked in order."""

    def __init__(self) -> None:
        self.decisions = DecisionLog()
        self.constants: dict[str, torch.Tensor] = {}
        self._values: dict[torch.fx.Node, Result] = {}
        self._buffers: dict[str, Buffer] = {}
        self._nodes: list[Node] = []
        self._inputs: list[str | None] = []
        self._symbols: list[str] = []
        self._offsets: dict[str, Expr] = {}

    # What FX nodes stand for.

    def bind(self, node: torch.fx.Node, value: Result) -> None:
        self._values[node] = value

    def value(self, arg: Any) -> Any:
        """`arg` of an FX node with every node in it replaced by what it stands for."""
        if isinstance(arg, torch.fx.Node):
            return self._values[arg]
        if isinstance(arg, list | tuple):
            return tuple(self.value(item) for item in arg)
        if is_symbolic(arg):
            return expr_of(arg)
        return arg

    # Buffers.

    def add_symbol(self, name: str) -> None:
        self._inputs.append(name)
        if name not in self._symbols:
            self._symbols.append(name)

    def add_unused_input(self) -> None:
        self._inputs.append(None)

    def add_input(self, name: str, tensor: torch.Tensor) -> TensorRef:
        """A tensor that the caller owns; addresses are relative to its data pointer."""
        view = View(name, shape_of(tensor), strides_of(tensor), ZERO)
        self._buffers[name] = Buffer(name, dtype_of(tensor), storage_extent(view), "input")
        self._offsets[name] = expr_of(tensor.storage_offset())
        self._inputs.append(name)
        return TensorRef(view, dtype_of(tensor))

    def add_constant(self, name: str, tensor: torch.Tensor) -> TensorRef:
        """A tensor that belongs to the graph: an input that the compiled program supplies itself."""
        self.constants[name] = tensor
        return self.add_input(name, tensor)

    def new(self, meta: torch.Tensor, hint: str) -> TensorRef:
        """A fresh buffer with the layout that eager gives to `meta`."""
        name = f"b{len(self._buffers)}_{hint}"
        view = View(name, shape_of(meta), strides_of(meta), ZERO)
        self._buffers[name] = Buffer(name, dtype_of(meta), storage_extent(view), "temp")
        self._offsets[name] = ZERO
        return TensorRef(view, dtype_of(meta))

    def alias(self, base: TensorRef, meta: torch.Tensor) -> TensorRef:
        """Another view of `base`'s buffer, laid out like `meta`.

        Buffers have eager's layout, so a view operator needs no arithmetic of ours.
        """
        offset = expr_of(meta.storage_offset()) - self._offsets[base.view.buffer]
        if offset.value is not None and offset.value < 0:
            raise UnsupportedError("a view that begins before the memory of the input it is made from")
        view = View(base.view.buffer, shape_of(meta), strides_of(meta), offset)
        return TensorRef(view, dtype_of(meta))

    # Nodes.

    def kernel(self, node: torch.fx.Node, shape: Sequence[Expr]) -> KernelBuilder:
        """A kernel over `shape` that computes `node`."""
        return KernelBuilder(f"{op_name(node)}", shape, origin_of(node).step("lower"))

    def emit(self, kernel: KernelBuilder) -> None:
        """Add a finished kernel to the program."""
        finished = kernel.finish()
        params = tuple(replace(param, numel=self._buffers[param.name].numel) for param in finished.params)
        self._nodes.append(Kernel(f"{finished.name}_{len(self._nodes)}", params, finished.space, finished.body))

    def emit_extern(self, make: Callable[[str], Node]) -> None:
        """Add a call; `make` gets the position in the program, to build a unique name from."""
        self._nodes.append(make(str(len(self._nodes))))

    def decide(self, decision: Decision) -> Decision:
        return self.decisions.add(decision)

    def finish(self, outputs: Iterable[Result]) -> Program:
        """The program that returns `outputs`. Inputs and buffers that nothing uses are left out of it."""
        views = tuple(_output(value) for value in outputs)
        returned = {view.buffer for view in views if isinstance(view, View)}
        used = returned.union(*(buffers_of(node) for node in self._nodes))
        buffers = tuple(
            replace(buffer, role="output") if buffer.role == "temp" and buffer.name in returned else buffer
            for buffer in self._buffers.values()
            if buffer.name in used
        )
        inputs = tuple(name if name in used or name in self._symbols else None for name in self._inputs)
        return Program(tuple(self._symbols), buffers, inputs, tuple(self._nodes), views)


def buffers_of(node: Node) -> frozenset[str]:
    """Every buffer that `node` reads or writes."""
    match node:
        case Kernel():
            return frozenset(param.name for param in node.params)
        case Extern():
            views = (*node.outputs, *_views(node.args), *_views(tuple(value for _, value in node.kwargs)))
            return frozenset((*node.mutates, *(view.buffer for view in views if view is not None)))


def _views(arg: object) -> Iterator[View]:
    if isinstance(arg, View):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _views(item)


def _output(value: Result) -> View | Expr | None:
    match value:
        case TensorRef(view, _):
            return view
        case Expr() | None:
            return value
        case bool() | int():
            return ONE * value
        case _:
            raise InternalError(f"a graph cannot return {value!r}")


def storage_extent(view: View) -> Expr:
    """How many elements of its buffer `view` spans, from the data pointer on. Strides are not negative.

    With a symbolic extent that turns out to be 0 this is an upper bound.
    """
    if any(extent == ZERO for extent in view.shape):
        return ZERO
    return ONE + total((extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True))


def overlaps_itself(meta: torch.Tensor) -> bool:
    """True if two elements of a tensor laid out like `meta` may share memory (a stride of 0)."""
    return any(
        stride == ZERO and extent not in (ONE, ZERO)
        for extent, stride in zip(shape_of(meta), strides_of(meta), strict=True)
    )


def numel(shape: Sequence[Expr]) -> Expr:
    return product(shape)


def op_name(node: torch.fx.Node) -> str:
    """A short name of the operator that `node` calls, fit for identifiers."""
    target = node.target
    name = target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return re.sub(r"\W+", "_", name).strip("_") or "op"


def arguments(node: torch.fx.Node, graph: GraphBuilder) -> Mapping[str, Any]:
    """The arguments of a call by their names in the operator's schema, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: graph.value(value) for argument, value in zip(schema.arguments, node.args, strict=False)}
    given.update({name: graph.value(value) for name, value in node.kwargs.items()})
    for argument in schema.arguments:
        if argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
