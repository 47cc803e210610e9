"""A compiled program that can be called: sizes become numbers, buffers get places, nodes become calls."""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from pellucid.capture.torch_compat import is_unshared
from pellucid.codegen import CppKernel
from pellucid.errors import InternalError, UserError
from pellucid.ir.derived import Float, Numbers, by_name
from pellucid.ir.index import Expr, const
from pellucid.ir.nodes import Arg, Enum, Extern, Kernel, Line, Load, Node, Program, Store, View
from pellucid.ir.origin import Origin
from pellucid.ir.types import TORCH_DTYPES, DType
from pellucid.native.build import build
from pellucid.native.execution_plan import (
    ArenaSlot,
    Call,
    ExternSlot,
    FunctionalCall,
    InputSlot,
    KernelCall,
    OutCall,
    OutputSlot,
    PythonCall,
    Result,
    Slot,
    TensorView,
    Way,
)
from pellucid.native.runtime import Instance
from pellucid.native.trials import Choices
from pellucid.schedule.deps import reads
from pellucid.schedule.memory import ALIGNMENT, plan_memory

# Instances for as many different sizes are kept; beyond it the one unused for longest is made again when needed.
_INSTANCES = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """What Python does during a run: `before` and `after` the call of a node.

    views: what `after` gets, as live tensors: it may read them and write to them, and must not keep them.
    """

    before: Callable[[], None]
    views: tuple[View, ...]
    after: Callable[..., None]


class Whole:
    """A program and its kernels as the compiler made them, for those who look into them.

    Those of an earlier process are read when somebody does.
    """

    def __init__(self, made: tuple[Program, Mapping[str, CppKernel]] | None, data: bytes = b"") -> None:
        self._made = made
        self._data = data

    def __reduce__(self) -> tuple[Callable[..., Whole], tuple[Any, ...]]:
        return Whole, (None, self._data or zlib.compress(pickle.dumps(self._made), 1))

    @property
    def made(self) -> tuple[Program, Mapping[str, CppKernel]]:
        if self._made is None:
            self._made = pickle.loads(zlib.decompress(self._data))
        return self._made


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is called. ways: functions that do it, the cheapest by price first, each with its extent and grain.
    checks: messages of its index checks. reads: buffers.

    The rest: see `KernelCall` and `CppKernel`.
    """

    ways: tuple[tuple[str, Expr, int], ...]
    params: tuple[str, ...]
    symbols: tuple[str, ...]
    checks: tuple[str, ...]
    where: str
    reads: tuple[str, ...]

    @classmethod
    def of(cls, kernel: Kernel, compiled: CppKernel) -> Launch:
        return cls(
            tuple((each.name, each.extent, each.grain) for each in compiled.ways),
            compiled.params,
            compiled.symbols,
            tuple(_check_text(dim, origin) for dim, origin in compiled.checks),
            where(kernel.body[-1].origin),
            reads(kernel),
        )


@dataclass(frozen=True, eq=False)
class Sized:
    """A program with its sizes, as an instance runs it: what its calls move and compute follows from it.

    nodes: the name of the node of each call of the plan, None for those of a probe. size: of the symbols. shapes: by
    buffer, a view that shows its shape. name: of the program. parameters: inputs that could be frozen, and are not.
    """

    name: str
    whole: Whole
    nodes: tuple[str | None, ...]
    size: Numbers
    shapes: Mapping[str, View]
    parameters: frozenset[str]

    @property
    def program(self) -> Program:
        return self.whole.made[0]

    @property
    def kernels(self) -> Mapping[str, CppKernel]:
        return self.whole.made[1]

    @property
    def calls(self) -> tuple[Node | None, ...]:
        """The node of each call of the plan, None for those of a probe."""
        nodes = {node.name: node for node in self.program.nodes}
        return tuple(None if name is None else nodes[name] for name in self.nodes)


INSTANCES: WeakValueDictionary[int, Sized] = WeakValueDictionary()
"""The program of each instance that is alive, by its number in timelines."""


class Executable:
    """Runs a program; for dynamic shapes it keeps one `Instance` per set of sizes seen lately.

    Called with the list of the graph's arguments (the boxed calling convention: the list is emptied).
    """

    _boxed_call = True

    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, CppKernel],
        addresses: Mapping[str, int],
        constants: tuple[torch.Tensor, ...],
        probes: Mapping[str, Probe] | None = None,
        *,
        reuse: bool = True,
        checked: tuple[View, ...] = (),
        name: str = "program",
        values: Sequence[View] = (),
        parameters: Sequence[str] = (),
        donated: Sequence[str] = (),
    ) -> None:
        """probes: by the name of the node. reuse: let temporaries that are not alive at once share memory.
        donated: inputs whose memory temporaries take over at calls where nobody else holds it (`is_unshared`).
        name, values, parameters: of the program, of what it computes, and of what could be frozen, for profiles.

        checked: arguments that no guard has looked at: those that lie in memory otherwise than these say are copied.
        """
        self.program = program
        self._name = name
        self._checked = checked
        self._shapes = _shapes(program, values)
        self._parameters = frozenset(parameters)
        self._donated = tuple(donated) if reuse and not probes else ()
        self._probes = probes or {}
        self._reuse = reuse
        self._whole = Whole((program, kernels))
        self._launches = {
            node.name: Launch.of(node, kernels[node.name]) for node in program.nodes if isinstance(node, Kernel)
        }
        self._sources = {each.name: each.source for kernel in kernels.values() for each in kernel.ways}
        self._constants = list(constants)
        self._load(addresses)

    def _load(self, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self.choices = Choices()
        self._positions = [self.program.inputs.index(symbol) for symbol in self.program.symbols]
        self._instances: OrderedDict[_Key, _Ready] = OrderedDict()
        self._sized: dict[_Key, Sized] = {}
        if not self.program.symbols:
            self._static = self._make_instance((), donated=True)

    def __getstate__(self) -> dict[str, Any]:
        """What a later process needs, which finds the kernels in the store."""
        if self._probes:
            raise InternalError(f"{self._name} has probes, which are of this process")
        here = ("_addresses", "choices", "_positions", "_instances", "_sized", "_static")
        state = {name: value for name, value in self.__dict__.items() if name not in here}
        return {**state, "program": _bare(self.program)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(build(self._sources)[0])

    def __call__(self, args: list[Any]) -> list[Any]:
        run, supplied, expected, taken = self._instance(args) if self._positions else self._static
        if not all(_may_be_overwritten(args, position) for position in taken):
            run, supplied, expected, _ = self._instance(args, donated=False)
        for name, position, dtype, shape, strides in expected:
            given = args[position]
            if given.stride() != strides or given.shape != shape or given.dtype is not dtype:
                args[position] = fitted(name, given, dtype, shape, strides)
        if supplied:
            args.extend(supplied)
        outputs = run(args)
        args.clear()
        return outputs

    def _instance(self, args: list[Any], *, donated: bool = True) -> _Ready:
        sizes = tuple([int(args[position]) for position in self._positions])
        instance = self._instances.get((sizes, donated))
        if instance is None:
            instance = self._make_instance(sizes, donated=donated)
        else:
            self._instances.move_to_end((sizes, donated))
        return instance

    def _make_instance(self, sizes: tuple[int, ...], *, donated: bool) -> _Ready:
        assembler = _Assembler(
            self.program,
            self._whole,
            self._launches,
            self._sources,
            self._addresses,
            self.choices,
            self._probes,
            sizes,
            self._reuse,
            self._name,
            self._shapes,
            self._parameters,
            self._donated if donated else (),
        )
        floats = [torch.tensor([assembler.size.of(name)], dtype=torch.float64) for name in self.program.supplied]
        expected = [assembler.expected(view) for view in self._checked if view.buffer in assembler.slots]
        instance = assembler.instance()
        taken = sorted({assembler.inputs[name] for name in assembler.memory.homes.values()})
        ready = instance.run, [*self._constants, *floats], expected, taken
        self._instances[sizes, donated] = ready
        self._sized[sizes, donated] = INSTANCES[instance.number] = assembler.sized()
        if len(self._instances) > _INSTANCES:
            del self._sized[self._instances.popitem(last=False)[0]]
        return ready


class Name(str):
    """The name of a compiled graph, unique in a process: what a later process reads back gets a new one there."""


def _bare(program: Program) -> Program:
    """The program with kernels that only tell what they read and write."""

    def bare(node: Node) -> Node:
        if not isinstance(node, Kernel):
            return node
        sites = {(type(rhs), rhs.buffer): rhs for line in node.body if isinstance(rhs := line.rhs, Load | Store)}
        lines = [replace(rhs, index=const(0)) for rhs in sites.values()]
        return Kernel(node.name, (), (), tuple(Line("", rhs, DType.F32) for rhs in lines))

    return replace(program, nodes=tuple(map(bare, program.nodes)))


# An argument's name, position, dtype, shape and strides.
_Expected: TypeAlias = "tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]]"
# How to run an instance, the tensors that it expects after the caller's, what it expects of some of the caller's, and
# which of these it overwrites.
_Ready: TypeAlias = "tuple[Callable[[list[Any]], list[Any]], list[torch.Tensor], list[_Expected], list[int]]"
# The sizes of an instance, and whether it takes over donated inputs.
_Key: TypeAlias = "tuple[tuple[int, ...], bool]"


def fitted(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """`tensor`, copied if it does not lie in memory as `strides` say. Raises UserError for another dtype or shape."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise UserError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {dtype} of shape {shape} when captured",
            hint="correct what makes it: the fake implementation of an operator, or a hook on saved tensors",
        )
    steps = zip(shape, strides, tensor.stride(), strict=True)
    if not tensor.numel() or all(size == 1 or wanted == given for size, wanted, given in steps):
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:  # elements that share one place are written once
            tensor = tensor.narrow(dim, 0, 1)
    return torch.empty_strided(tensor.shape, strides, dtype=dtype).copy_(tensor).expand(shape)


def _may_be_overwritten(args: list[Any], position: int) -> bool:
    """Whether a temporary may lie in the memory of an argument: nobody else wants it, and it lies as kernels expect."""
    return args[position].data_ptr() % ALIGNMENT == 0 and is_unshared(args, position)


class _Assembler:
    """Turns a program into an `Instance` for one binding of its symbols."""

    def __init__(
        self,
        program: Program,
        whole: Whole,
        launches: Mapping[str, Launch],
        sources: Mapping[str, str],
        addresses: Mapping[str, int],
        choices: Choices,
        probes: Mapping[str, Probe],
        sizes: tuple[int, ...],
        reuse: bool,
        name: str,
        shapes: Mapping[str, View],
        parameters: frozenset[str],
        donated: Sequence[str],
    ) -> None:
        self.program = program
        self.name = name
        self.shapes = shapes
        self.parameters = parameters
        self.probes = probes
        self.reuse = reuse
        self.whole = whole
        self.launches = launches
        self.sources = sources
        self.addresses = addresses
        self.choices = choices
        self.size = Numbers(dict(zip(program.symbols, sizes, strict=True)), by_name(program.derived))
        self.inputs = {name: number for number, name in enumerate((*program.inputs, *program.supplied))}
        self.slots = {buffer.name: number for number, buffer in enumerate(program.buffers)}
        self.dtypes = {buffer.name: TORCH_DTYPES[buffer.dtype] for buffer in program.buffers}
        self.allocated = allocated_by_calls(program)
        apart = () if reuse else [buffer.name for buffer in program.buffers]
        self.memory = plan_memory(program, self.size, self.allocated.union(apart), donated)

    def instance(self) -> Instance:
        slots = [self._slot(buffer.name) for buffer in self.program.buffers]
        calls = [call for node in self.program.nodes for call in self._calls(node)]
        results = [self._result(output) for output in self.program.outputs]
        count = len(self.program.inputs) + len(self.program.supplied)
        return Instance(slots, calls, results, inputs=count, arena=self.memory.arena_bytes, name=self.name)

    def sized(self) -> Sized:
        """What the calls of the instance are."""
        names = [node.name for node in self.program.nodes]
        calls = [(None, name, None) if name in self.probes else (name,) for name in names]
        flat = tuple(call for group in calls for call in group)
        return Sized(self.name, self.whole, flat, self.size, self.shapes, self.parameters)

    def expected(self, view: View) -> _Expected:
        """What an argument must be, of which `view` is the whole."""
        given = self._view(view)
        return view.buffer, self.inputs[view.buffer], given.dtype, given.shape, given.strides

    def _slot(self, name: str) -> Slot:
        buffer = self.program.buffers[self.slots[name]]
        home = self.memory.homes.get(name, name)
        if home in self.inputs:
            return InputSlot(self.inputs[home])
        if name in self.allocated:
            return ExternSlot()
        if buffer.role == "output" or not self.reuse:  # a block of its own
            return OutputSlot(self.size(buffer.numel) * buffer.dtype.itemsize)
        return ArenaSlot(self.memory.offsets[name])

    def _calls(self, node: Node) -> Iterator[Call]:
        """The call of a node, and those of its probe."""
        probe = self.probes.get(node.name)
        if probe is None:
            yield self._call(node)
            return
        views = tuple(self._view(view) for view in probe.views)
        yield PythonCall(probe.before, (), (), (), f"before {node.name}")
        yield self._call(node)
        yield PythonCall(probe.after, views, (), (), f"after {node.name}")

    def _call(self, node: Node) -> Call:
        match node:
            case Kernel():
                return self._kernel_call(node)
            case Extern(out=True):
                kwargs = (*self._kwargs(node), ("out", self._view(node.outputs[0])))
                return OutCall(operator_of(node.op), self._args(node), kwargs, node.name, where(node.origin))
            case Extern():
                outputs = tuple(None if view is None else self._view(view) for view in node.outputs)
                return FunctionalCall(
                    operator_of(node.op),
                    self._args(node),
                    self._kwargs(node),
                    outputs,
                    node.name,
                    where(node.origin),
                )

    def _kernel_call(self, kernel: Kernel) -> KernelCall:
        launch, trial = self.launches[kernel.name], None
        way, *others = ways = [Way(self.addresses[each], self.size(extent), n) for each, extent, n in launch.ways]
        if others:
            sources = {symbol: self.sources[symbol] for symbol, _, _ in launch.ways}
            way, trial = self.choices.of(kernel.name, sources, ways)
        return KernelCall(
            address=way.address,
            slots=tuple(self.slots[name] for name in launch.params),
            symbols=tuple(int(self.size.of(name)) for name in launch.symbols),
            extent=way.extent,
            grain=way.grain,
            name=kernel.name,
            checks=launch.checks,
            where=launch.where,
            reads=tuple(self._view(self.shapes[name]) for name in launch.reads),
            trial=trial,
        )

    def _args(self, extern: Extern) -> tuple[Any, ...]:
        return tuple(self._arg(arg) for arg in extern.args)

    def _kwargs(self, extern: Extern) -> tuple[tuple[str, Any], ...]:
        return tuple((name, self._arg(arg)) for name, arg in extern.kwargs)

    def _arg(self, arg: Arg) -> Any:
        match arg:
            case View():
                return self._view(arg)
            case tuple():
                return tuple(self._arg(item) for item in arg)
            case _:
                return plain_argument(arg, self.size)

    def _view(self, view: View | None) -> TensorView:
        assert view is not None
        return TensorView(
            self.slots[view.buffer],
            tuple(self.size(extent) for extent in view.shape),
            tuple(self.size(stride) for stride in view.strides),
            self.size(view.offset),
            self.dtypes[view.buffer],
        )

    def _result(self, output: View | Expr | None) -> Result:
        match output:
            case View():
                return self._view(output)
            case Expr():
                return self.size(output)
            case None:
                return None


def _shapes(program: Program, values: Iterable[View]) -> dict[str, View]:
    """By buffer, a view that shows its shape: of a value that the graph has there, else of its elements in a row.

    AOTAutograd leaves out sizes that the graph does not compute with, so that not every shape is known.
    """
    known = {*program.symbols, *by_name(program.derived)}
    shapes = {b.name: View(b.name, (b.numel,), (const(1),), const(0)) for b in program.buffers}
    whole = [view for view in values if all(size.syms() <= known for size in (*view.shape, *view.strides))]
    return shapes | {view.buffer: view for view in reversed(whole) if view.buffer in shapes}


def allocated_by_calls(program: Program) -> frozenset[str]:
    """Buffers whose memory comes from an ATen call that has no out= variant."""
    return frozenset(
        view.buffer
        for node in program.nodes
        if isinstance(node, Extern) and not node.out
        for view in node.outputs
        if view is not None
    )


def plain_argument(arg: Arg, size: Numbers) -> Any:
    """What an operator is given for an argument that is neither a view nor a list. size: of the symbols."""
    match arg:
        case Expr():
            return size(arg)
        case Float(name):
            return size.of(name)
        case Enum("device", name):
            return torch.device(name)
        case Enum(_, name):
            return getattr(torch, name)
        case _:
            return arg


def operator_of(name: str) -> torch._ops.OpOverload:
    """The dispatcher's operator for `aten::addmm.out`."""
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return operator  # type: ignore[return-value]


def _check_text(dim: int, origin: Origin) -> str:
    return f"index {{index}} is out of bounds for dimension {dim} with size {{size}}, in {where(origin)}"


def where(origin: Origin) -> str:
    """FX node and user line, for messages: `embedding at model.py:12`."""
    nodes = ", ".join(origin.nodes) or "generated code"
    return f"{nodes} at {origin.users[-1]}" if origin.users else nodes
