"""A compiled program that can be called: sizes become numbers, buffers get places, nodes become calls."""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from pellucid.capture.torch_compat import is_unshared
from pellucid.codegen import CppKernel
from pellucid.errors import InternalError, UserError
from pellucid.execution_plan import Arena, ExecutionPlan, Launch, Place, where
from pellucid.ir.derived import Float, Formulas, Numbers, by_name
from pellucid.ir.index import Expr, sym
from pellucid.ir.nodes import Arg, Enum, Extern, Node, Program, View
from pellucid.ir.types import ALIGNMENT, TORCH_DTYPES
from pellucid.native.build import build
from pellucid.native.encode import Template
from pellucid.native.instance import (
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
    Size,
    Slot,
    Strips,
    TensorView,
    Unknown,
    Way,
)
from pellucid.native.runtime import Instance
from pellucid.native.trials import Choices
from pellucid.schedule.memory import MemoryPlan
from pellucid.strips import Chain

# Instances for as many different sizes are kept; beyond it the one unused for longest is made again when needed.
_INSTANCES = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """What Python does during a run: `before` and `after` the call of a node.

    views: what `after` gets, as live tensors: it may read them and write to them, and must not keep them.
    observes: whether it gets them in this run. Then nodes run one by one, and no argument is overwritten.
    """

    before: Callable[[], None]
    views: tuple[View, ...]
    after: Callable[..., None]
    observes: Callable[[], bool]


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


@dataclass(frozen=True, eq=False)
class Sized:
    """A plan with its sizes, as an instance runs it: what its calls move and compute follows from it.

    nodes: the name of the node of each call, None for those of a probe. size: of the symbols.
    parameters: inputs that could be frozen, and are not.
    """

    plan: ExecutionPlan
    whole: Whole
    nodes: tuple[str | None, ...]
    size: Numbers
    parameters: frozenset[str]

    @property
    def kernels(self) -> Mapping[str, CppKernel]:
        return self.whole.made[1]

    @property
    def calls(self) -> tuple[Node | None, ...]:
        """The node of each call, None for those of a probe."""
        nodes = {node.name: node for node in self.whole.made[0].nodes}
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
        plan: ExecutionPlan,
        whole: Whole,
        addresses: Mapping[str, int],
        constants: tuple[torch.Tensor, ...],
        probes: Mapping[str, Probe] | None = None,
        *,
        checked: tuple[View, ...] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        """whole: what was planned. addresses: of its functions, by symbol.
        probes: by the name of the node.

        checked: arguments that no guard has looked at: those that lie in memory otherwise than these say are copied.
        parameters: what could be frozen, for profiles.
        """
        self._plan = plan
        self._whole = whole
        self._checked = checked
        self._parameters = frozenset(parameters)
        self._probes = probes or {}
        self._sources = {each.name: each.source for kernel in whole.made[1].values() for each in kernel.ways}
        self._constants = list(constants)
        self._load(addresses)

    def _load(self, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self.choices = Choices()
        self._positions = [self._plan.inputs.index(symbol) for symbol in self._plan.symbols]
        self._arenas: dict[tuple[bool, bool], Arena] = {}
        self._described: tuple[_Kind, _Described] | None = None
        self._instances: OrderedDict[_Key, _Ready] = OrderedDict()
        self._sized: dict[_Key, Sized] = {}
        made = None if self._plan.symbols else self._make_instance((), donated=True, observed=self._observed)
        self._static = None if self._probes else made

    def __getstate__(self) -> dict[str, Any]:
        """What a later process needs, which finds the kernels in the store."""
        if self._probes:
            raise InternalError(f"{self._plan.name} has probes, which are of this process")
        here = ("_addresses", "choices", "_positions", "_described", "_arenas", "_instances", "_sized", "_static")
        return {name: value for name, value in self.__dict__.items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(build(self._sources)[0])

    def __call__(self, args: list[Any]) -> list[Any]:
        run, supplied, expected, taken = self._static or self._instance(args)
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

    @property
    def _observed(self) -> bool:
        return any(probe.observes() for probe in self._probes.values())

    def _instance(self, args: list[Any], *, donated: bool = True) -> _Ready:
        sizes = tuple([int(args[position]) for position in self._positions])
        observed = self._observed
        instance = self._instances.get((sizes, donated, observed))
        if instance is None:
            instance = self._make_instance(sizes, donated=donated, observed=observed)
        else:
            self._instances.move_to_end((sizes, donated, observed))
        return instance

    def _make_instance(self, sizes: tuple[int, ...], *, donated: bool, observed: bool) -> _Ready:
        described = self._description(observed)
        numbers = described.formulas.values(*sizes)
        size = described.formulas.numbers(sizes, numbers)
        memory = self._memory(size, donated, observed)
        places = described.places
        instance = Instance.of(described.template, places.slots(size, memory), memory.arena_bytes, numbers)
        floats = [torch.tensor([size.of(name)], dtype=torch.float64) for name in self._plan.supplied]
        expected = [places.expected(view, size) for view in self._checked if view.buffer in places.numbers]
        taken = sorted({places.inputs[name] for name in memory.homes.values()})
        ready = instance.run, [*self._constants, *floats], expected, taken
        key = sizes, donated, observed
        self._instances[key] = ready
        sized = Sized(self._plan, self._whole, described.nodes, size, self._parameters)
        self._sized[key] = INSTANCES[instance.number] = sized
        if len(self._instances) > _INSTANCES:
            del self._sized[self._instances.popitem(last=False)[0]]
        return ready

    def _description(self, observed: bool) -> _Described:
        """The one that was made last, unless trials have ended since."""
        kind = observed, self.choices.settled
        last = self._described
        if last is None or last[0] != kind:
            describer = _Describer(self._plan, self._addresses, self._sources, self.choices)
            self._described = last = kind, describer.describe(self._probes, observed)
        return last[1]

    def _memory(self, size: Numbers, donated: bool, observed: bool) -> MemoryPlan:
        known = self._plan.memory
        if known is not None and (donated or not known.homes) and not observed:
            return known
        if (donated, observed) not in self._arenas:
            self._arenas[donated, observed] = self._plan.arena(donated=donated, observed=observed)
        return self._arenas[donated, observed].plan(size)


class Name(str):
    """The name of a compiled graph, unique in a process: what a later process reads back gets a new one there."""


# An argument's name, position, dtype, shape and strides.
_Expected: TypeAlias = "tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]]"
# How to run an instance, the tensors that it expects after the caller's, what it expects of some of the caller's, and
# which of these it overwrites.
_Ready: TypeAlias = "tuple[Callable[[list[Any]], list[Any]], list[torch.Tensor], list[_Expected], list[int]]"
# The sizes of an instance, whether it takes over donated inputs, and whether its nodes are observed.
_Key: TypeAlias = "tuple[tuple[int, ...], bool, bool]"


# Whether nodes are observed, and how many trials have ended.
_Kind: TypeAlias = "tuple[bool, int]"


@dataclass(frozen=True, slots=True)
class _Described:
    """Instances for any sizes. formulas: of the numbers that they are given. nodes: see `Sized`."""

    template: Template
    places: _Places
    formulas: Formulas
    nodes: tuple[str | None, ...]


def fitted(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """`tensor`, copied if it does not lie in memory as `strides` say. Raises UserError for another dtype or shape."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise UserError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {dtype} of shape {shape} when captured",
            hint="correct what makes it: the fake implementation of an operator, or a hook on saved tensors",
        )
    if lies(tensor, strides):
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:  # elements that share one place are written once
            tensor = tensor.narrow(dim, 0, 1)
    return torch.empty_strided(tensor.shape, strides, dtype=dtype).copy_(tensor).expand(shape)


def lies(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies in memory as strides say; those of dimensions of one element say nothing."""
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return not tensor.numel() or all(size == 1 or given == wanted for size, given, wanted in each)


def _may_be_overwritten(args: list[Any], position: int) -> bool:
    """Whether a temporary may lie in the memory of an argument: nobody else wants it, and it lies as kernels expect."""
    return args[position].data_ptr() % ALIGNMENT == 0 and is_unshared(args, position)


class _Places:
    """Where the buffers of a plan are. numbers: of the buffers. inputs: of the arguments."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self.inputs = {name: number for number, name in enumerate(plan.arguments)}
        self.numbers = {buffer.name: number for number, buffer in enumerate(plan.buffers)}
        self._fixed: list[Slot] = [
            InputSlot(self.inputs[buffer.name]) if buffer.place is Place.ARGUMENT else ExternSlot()
            for buffer in plan.buffers
        ]
        self._pool, self._arena = (
            [(self.numbers[buffer.name], buffer) for buffer in plan.buffers if buffer.place is place]
            for place in (Place.POOL, Place.ARENA)
        )

    @property
    def externs(self) -> set[int]:
        return {self.numbers[buffer.name] for buffer in self._plan.buffers if buffer.place is Place.OPERATOR}

    def slots(self, size: Numbers, memory: MemoryPlan) -> list[Slot]:
        """Of all buffers, for given sizes."""
        slots = self._fixed.copy()
        for number, buffer in self._pool:
            slots[number] = OutputSlot(buffer.nbytes(size))
        for number, buffer in self._arena:
            home = memory.homes.get(buffer.name)
            slots[number] = InputSlot(self.inputs[home]) if home else ArenaSlot(memory.offsets[buffer.name])
        return slots

    def expected(self, view: View, size: Numbers) -> _Expected:
        """What an argument must be, of which `view` is the whole."""
        dtype = TORCH_DTYPES[self._plan.buffers[self.numbers[view.buffer]].dtype]
        shape, strides = (tuple(map(size, each)) for each in (view.shape, view.strides))
        return view.buffer, self.inputs[view.buffer], dtype, shape, strides


class _Describer:
    """Turns a plan into calls and results that leave open what depends on sizes."""

    def __init__(
        self, plan: ExecutionPlan, addresses: Mapping[str, int], sources: Mapping[str, str], choices: Choices
    ) -> None:
        self.plan = plan
        self.addresses = addresses
        self.sources = sources
        self.choices = choices
        self.places = _Places(plan)
        self.slots = self.places.numbers
        self.dtypes = {buffer.name: TORCH_DTYPES[buffer.dtype] for buffer in plan.buffers}
        self.terms: dict[Expr | Float, int] = {}

    def describe(self, probes: Mapping[str, Probe], observed: bool) -> _Described:
        calls, strips = self.calls(probes, observed)
        template = Template(
            calls,
            [self._result(result) for result in self.plan.results],
            strips,
            slots=len(self.plan.buffers),
            externs=self.places.externs,
            inputs=len(self.plan.arguments),
            name=self.plan.name,
        )
        for buffer in self.plan.buffers:
            self.size(buffer.numel)  # where they lie depends on it
        formulas = Formulas(self.plan.symbols, by_name(self.plan.derived), self.terms)
        nodes = tuple(None if isinstance(call, PythonCall) else call.name for call in calls)
        return _Described(template, self.places, formulas, nodes)

    def size(self, term: Expr | Float) -> Size:
        """The integer, or the number of what is computed for each set of sizes."""
        if isinstance(term, Expr) and term.value is not None:
            return term.value
        return Unknown(self.terms.setdefault(term, len(self.terms)))

    def calls(self, probes: Mapping[str, Probe], observed: bool) -> tuple[list[Call], list[Strips]]:
        """The calls of the plan with those of probes; and which run strip by strip: none where all are observed."""
        chains = {} if observed else {chain.first: chain for chain in self.plan.chains}
        made: list[Call] = []
        strips: list[Strips] = []
        number = 0
        while number < len(self.plan.calls):
            chain = chains.get(number)
            last = chain.last if chain else number
            together = self.plan.calls[number : last + 1]
            probed = [(call.name, probes[call.name]) for call in together if call.name in probes]
            for name, probe in reversed(probed):  # so that the first one is the last to be told of
                made.append(PythonCall(probe.before, (), (), (), f"before {name}"))
            if chain:
                strips.append(self._strips(chain, len(made)))
            made += [self._call(call) for call in together]
            for name, probe in probed:
                views = tuple(self._view(view) for view in probe.views) if observed else ()
                made.append(PythonCall(probe.after, views, (), (), f"after {name}"))
            number = last + 1
        return made, strips

    def _strips(self, chain: Chain, first: int) -> Strips:
        """first: its number among the calls that are made."""
        windows = tuple((self.slots[window.buffer], window.nbytes) for window in chain.windows)
        return Strips(first, first + chain.last - chain.first, windows, chain.parts)

    def _call(self, call: Launch | Extern) -> Call:
        match call:
            case Launch():
                return self._kernel_call(call)
            case Extern(out=True):
                kwargs = (*self._kwargs(call), ("out", self._view(call.outputs[0])))
                return OutCall(operator_of(call.op), self._args(call), kwargs, call.name, where(call.origin))
            case Extern():
                outputs = tuple(None if view is None else self._view(view) for view in call.outputs)
                return FunctionalCall(
                    operator_of(call.op),
                    self._args(call),
                    self._kwargs(call),
                    outputs,
                    call.name,
                    where(call.origin),
                )

    def _kernel_call(self, launch: Launch) -> KernelCall:
        way, *others = ways = [Way(self.addresses[w.symbol], self.size(w.extent), w.grain) for w in launch.ways]
        trial = None
        if others:
            sources = {way.symbol: self.sources[way.symbol] for way in launch.ways}
            way, trial = self.choices.of(launch.name, sources, ways)
        return KernelCall(
            address=way.address,
            slots=tuple(self.slots[name] for name in launch.params),
            symbols=tuple(self.size(sym(name)) for name in launch.symbols),
            extent=way.extent,
            grain=way.grain,
            name=launch.name,
            checks=launch.checks,
            where=launch.where,
            reads=tuple(self._view(self.plan.buffers[self.slots[name]].whole) for name in launch.reads),
            trial=trial,
            offsets=tuple(map(self._bytes_before, launch.params, launch.offsets)) if any(launch.offsets) else (),
        )

    def _bytes_before(self, buffer: str, elements: int) -> int:
        return elements * self.plan.buffers[self.slots[buffer]].dtype.itemsize

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


def plain_argument(arg: Arg, size: Callable[[Expr | Float], Any]) -> Any:
    """What an operator is given for an argument that is neither a view nor a list. size: of the symbols."""
    match arg:
        case Expr() | Float():
            return size(arg)
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
