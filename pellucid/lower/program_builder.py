"""The program under construction: buffers, nodes, and the value of each FX node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from pellucid.capture.fx import dtype_of, origin_of, shape_of, strides_of, whole
from pellucid.capture.torch_compat import derived_in, expr_of, is_symbolic, term_of
from pellucid.errors import InternalError, UnsupportedError
from pellucid.ir.analysis import arguments_of, reads, writes
from pellucid.ir.decision import Decision, DecisionLog
from pellucid.ir.derived import Apply, Derived, Float, names_in, number_name
from pellucid.ir.index import ONE, ZERO, Expr, nonnegative, product, sym, total
from pellucid.ir.nodes import Buffer, Extern, Kernel, Node, Program, View
from pellucid.ir.types import DType
from pellucid.ir.verify import program_sizes
from pellucid.lower.kernel_builder import KernelBuilder
from pellucid.machine.library import REFERENCE, Library


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the graph: a view of a buffer and the type of its elements."""

    view: View
    dtype: DType

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.view.shape


@dataclass(frozen=True, slots=True)
class Condition:
    """A truth value that is known only at run time. Programs cannot represent one."""


Result: TypeAlias = "TensorRef | Expr | Float | Condition | bool | float | tuple[Result, ...] | None"


class ProgramBuilder:
    """Builds the program while the FX graph is traversed in order."""

    def __init__(
        self, derived: Mapping[str, Derived] | None = None, *, contract: bool = True, library: Library = REFERENCE
    ) -> None:
        """derived: the derived integers that sizes may name, each after those that it is computed from.

        contract: whether matrix products, convolutions and attention become kernels. library: the speed of ATen, to
        choose between it and kernels. counters: buffers that hold an `arange`, each with its start and step.
        """
        self.contract = contract
        self.library = library
        self.decisions = DecisionLog()
        self.counters: dict[str, tuple[Expr, Expr]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._values: dict[torch.fx.Node, Result] = {}
        self._buffers: dict[str, Buffer] = {}
        self._nodes: list[Node] = []
        self._inputs: list[str | None] = []
        self._symbols: list[str] = []
        self._offsets: dict[str, Expr] = {}
        self._derived: dict[str, Derived] = dict(derived or {})
        self._floats: set[str] = set()  # float arguments

    # Values of FX nodes.

    def bind(self, node: torch.fx.Node, value: Result) -> None:
        self._values[node] = value

    def value(self, arg: Any) -> Any:
        """`arg` of an FX node with every node in it replaced by its value."""
        if isinstance(arg, torch.fx.Node):
            return self._values[arg]
        if isinstance(arg, list | tuple):
            return tuple(self.value(item) for item in arg)
        return self.number(arg) if is_symbolic(arg) else arg

    def computed(self) -> dict[str, View]:
        """The view of the tensor that each call computes, by the name of its FX node."""
        calls = {node.name: value for node, value in self._values.items() if node.op == "call_function"}
        return {name: value.view for name, value in calls.items() if isinstance(value, TensorRef)}

    def number(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Expr | Float | float | Condition:
        """The value of a symbolic number; a float becomes a derived number of the program, or is an input."""
        if isinstance(value, torch.SymInt):
            return expr_of(value)
        if isinstance(value, torch.SymBool):
            return Condition()
        term = term_of(value)
        if not isinstance(term, Apply | Float | Expr):
            return term
        for each in derived_in(value).values():
            self._derived.setdefault(each.name, each)
        name = number_name(term)
        if name not in self._floats:
            self._derived.setdefault(name, Derived(name, True, term))
        return Float(name)

    # Buffers.

    def add_symbol(self, value: Expr) -> None:
        """Add an integer argument: it determines a symbol, unless it is no symbol or an earlier argument does."""
        names = [name for name in value.syms() if value == sym(name) and name not in self._symbols]
        self._inputs.append(names[0] if names else None)
        self._symbols += names

    def add_float(self, name: str) -> None:
        """Add a float argument, which is passed as a tensor of one f64."""
        del self._derived[name]
        self._floats.add(name)
        self._buffers[name] = Buffer(name, DType.F64, ONE, "input")
        self._inputs.append(name)

    def float_ref(self, number: Float) -> TensorRef:
        """The memory that holds a float."""
        if number.name not in self._buffers:
            self._buffers[number.name] = Buffer(number.name, DType.F64, ONE, "input")
        return TensorRef(View(number.name, (), (), ZERO), DType.F64)

    def is_derived(self, number: Float) -> bool:
        """Whether the program computes `number`; otherwise it is an argument, which only kernels can read."""
        return number.name in self._derived

    def add_unused_input(self) -> None:
        self._inputs.append(None)

    def add_input(self, name: str, tensor: torch.Tensor) -> TensorRef:
        """Add a tensor that the caller owns; addresses are relative to its data pointer."""
        view = whole(name, tensor)
        self._buffers[name] = Buffer(name, dtype_of(tensor), storage_extent(view), "input")
        self._offsets[name] = expr_of(tensor.storage_offset())
        self._inputs.append(name)
        return TensorRef(view, dtype_of(tensor))

    def add_constant(self, name: str, tensor: torch.Tensor) -> TensorRef:
        """Add a tensor that belongs to the graph: an input that the compiled program supplies itself."""
        self.constants[name] = tensor
        return self.add_input(name, tensor)

    def new(self, meta: torch.Tensor, hint: str) -> TensorRef:
        """A new buffer with eager's layout, that of `meta`."""
        name = f"b{len(self._buffers)}_{hint}"
        view = whole(name, meta)
        self._buffers[name] = Buffer(name, dtype_of(meta), storage_extent(view), "temp")
        # Some fake results, such as those of slice_scatter, have an offset: offsets of their views include it.
        self._offsets[name] = expr_of(meta.storage_offset())
        return TensorRef(view, dtype_of(meta))

    def temporary(self, shape: Sequence[Expr], dtype: DType, hint: str) -> TensorRef:
        """A new, contiguous buffer that is the value of no FX node."""
        name, extent = f"b{len(self._buffers)}_{hint}", product(shape)
        strides = tuple(product(shape[d + 1 :]) for d in range(len(shape)))
        self._buffers[name] = Buffer(name, dtype, extent, "temp")
        self._offsets[name] = ZERO
        return TensorRef(View(name, tuple(shape), strides, ZERO), dtype)

    def alias(self, base: TensorRef, meta: torch.Tensor) -> TensorRef:
        """Another view of `base`'s buffer, laid out like `meta`.

        Buffers have eager's layout, so the view has the sizes, strides and offset of `meta`.
        """
        start = self._offsets[base.view.buffer]
        offset = expr_of(meta.storage_offset()) - start
        if start != ZERO and not nonnegative(offset):
            raise UnsupportedError("a view that may begin before the memory of the input it is a view of")
        view = View(base.view.buffer, shape_of(meta), strides_of(meta), offset)
        self._reach(view)
        return TensorRef(view, dtype_of(meta))

    def _reach(self, view: View) -> None:
        """Enlarge an input's buffer: `as_strided` may reach past the elements of its argument, in the same memory."""
        buffer, extent = self._buffers[view.buffer], storage_extent(view)
        end = view.offset + extent
        if buffer.role == "input" and extent != ZERO and nonnegative(end - buffer.numel - 1):
            self._buffers[view.buffer] = replace(buffer, numel=end)

    # Nodes.

    def kernel(self, node: torch.fx.Node, shape: Sequence[Expr]) -> KernelBuilder:
        """A kernel over `shape` that computes `node`."""
        return KernelBuilder(f"{op_name(node)}", shape, origin_of(node).step("lower"))

    def emit(self, kernel: KernelBuilder) -> None:
        """Add a finished kernel to the program."""
        finished = kernel.finish()
        self._nodes.append(replace(finished, name=f"{finished.name}_{len(self._nodes)}"))

    def copy(self, node: torch.fx.Node, source: TensorRef, result: TensorRef) -> None:
        """Add a kernel that copies a tensor into another one of its shape, of any type and strides."""
        kernel = self.kernel(node, result.shape)
        kernel.store(result.view, result.dtype, kernel.index, kernel.load(source.view, source.dtype, kernel.index))
        self.emit(kernel)

    def emit_extern(self, make: Callable[[str], Node]) -> None:
        """Add a call; `make` is passed the position in the program, as a suffix for a unique name."""
        self._nodes.append(make(str(len(self._nodes))))

    def decide(self, decision: Decision) -> Decision:
        return self.decisions.add(decision)

    def finish(self, outputs: Iterable[Result]) -> Program:
        """The program that returns `outputs`, without unused inputs, symbols and buffers."""
        views = tuple(_output(value) for value in outputs)
        returned = {view.buffer for view in views if isinstance(view, View)}
        used = returned.union(*((*reads(node), *writes(node)) for node in self._nodes))
        buffers = tuple(
            replace(buffer, role="output") if buffer.role == "temp" and buffer.name in returned else buffer
            for buffer in self._buffers.values()
            if buffer.name in used
        )
        nodes = tuple(self._sized(node) if isinstance(node, Kernel) else node for node in self._nodes)
        program = Program((), buffers, (), nodes, views)
        derived, needed = self._derived_in(program)
        symbols = tuple(name for name in self._symbols if name in needed)
        inputs = tuple(name if name in used or name in symbols else None for name in self._inputs)
        return replace(program, symbols=symbols, inputs=inputs, derived=derived)

    def _sized(self, kernel: Kernel) -> Kernel:
        """`kernel` with the sizes of its buffers, now that all views of them are known."""
        params = tuple(replace(param, numel=self._buffers[param.name].numel) for param in kernel.params)
        return replace(kernel, params=params)

    def _derived_in(self, program: Program) -> tuple[tuple[Derived, ...], set[str]]:
        """The derived numbers that `program` needs, in order, and the names of all numbers and symbols it needs."""
        needed = {name for _, size in program_sizes(program) for name in size.syms()}
        needed |= {buffer.name for buffer in program.buffers}
        for node in program.nodes:
            given = arguments_of(node) if isinstance(node, Extern) else ()
            needed.update(each.name for each in given if isinstance(each, Float))
        found: list[Derived] = []
        for each in reversed(self._derived.values()):
            if each.name in needed and each.name not in self._symbols:
                needed |= names_in(each.term)
                found.append(each)
        return tuple(reversed(found)), needed


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
    """The number of elements that `view` spans, from its first one on. Strides are not negative.

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


def arguments(node: torch.fx.Node, graph: ProgramBuilder) -> Mapping[str, Any]:
    """The arguments of a call by their names in the operator's schema, with defaults."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: graph.value(value) for argument, value in zip(schema.arguments, node.args, strict=False)}
    given.update({name: graph.value(value) for name, value in node.kwargs.items()})
    for argument in schema.arguments:
        if argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given
