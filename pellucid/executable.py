"""A compiled program that can be called: described once, with one instance for each set of sizes."""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from pellucid.capture.torch_compat import is_unshared
from pellucid.codegen import CppKernel
from pellucid.description import Describer, Description, Expected, Probe
from pellucid.errors import InternalError, UserError
from pellucid.execution_plan import Arena, ExecutionPlan
from pellucid.ir.derived import Numbers
from pellucid.ir.nodes import Node, Program, View
from pellucid.ir.types import ALIGNMENT
from pellucid.native.build import build
from pellucid.native.runtime import Instance
from pellucid.native.trials import Choices
from pellucid.schedule.memory import MemoryPlan

# How many instances, for different sizes, are cached; the least recently used one is evicted.
_INSTANCES = 64


# The attributes that `_load` creates.
_OF_THIS_PROCESS = frozenset("_addresses choices _positions _lock _arenas _described _instances _sized _static".split())


class LazyProgram:
    """A scheduled program and its kernels, for the kit.

    Those that an earlier process compiled are unpickled at the first access.
    """

    def __init__(self, value: tuple[Program, Mapping[str, CppKernel]] | None, data: bytes = b"") -> None:
        self._value = value
        self._data = data

    def __reduce__(self) -> tuple[Callable[..., LazyProgram], tuple[Any, ...]]:
        return LazyProgram, (None, self._data or zlib.compress(pickle.dumps(self._value), 1))

    @property
    def value(self) -> tuple[Program, Mapping[str, CppKernel]]:
        if self._value is None:
            self._value = pickle.loads(zlib.decompress(self._data))
        return self._value


@dataclass(frozen=True, eq=False)
class Sized:
    """A plan with the sizes of one instance: determines how much its calls move and compute.

    nodes: the name of the node of each call, None for those of a probe. size: of the symbols.
    parameters: inputs that could be frozen, and are not.
    """

    plan: ExecutionPlan
    program: LazyProgram
    nodes: tuple[str | None, ...]
    size: Numbers
    parameters: frozenset[str]

    @property
    def kernels(self) -> Mapping[str, CppKernel]:
        return self.program.value[1]

    @property
    def calls(self) -> tuple[Node | None, ...]:
        """The node of each call, None for those of a probe."""
        nodes = {node.name: node for node in self.program.value[0].nodes}
        return tuple(None if name is None else nodes[name] for name in self.nodes)


INSTANCES: WeakValueDictionary[int, Sized] = WeakValueDictionary()
"""The plan and sizes of each live instance, by its number in timelines."""


class Executable:
    """Runs a program; for dynamic shapes it caches one `Instance` per set of recent sizes.

    Called with the list of the graph's arguments (the boxed calling convention: the list is emptied).
    """

    _boxed_call = True

    def __init__(
        self,
        plan: ExecutionPlan,
        program: LazyProgram,
        addresses: Mapping[str, int],
        constants: tuple[torch.Tensor, ...],
        probes: Mapping[str, Probe] | None = None,
        *,
        checked: tuple[View, ...] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        """program: the one that was planned. addresses: of its functions, by symbol.
        probes: by the name of the node.

        checked: arguments that no guard has checked: those with other strides than these views are copied.
        parameters: inputs that could be frozen, for profiles.
        """
        self._plan = plan
        self._program = program
        self._checked = checked
        self._parameters = frozenset(parameters)
        self._probes = probes or {}
        self._sources = {each.name: each.source for kernel in program.value[1].values() for each in kernel.variants}
        self._constants = list(constants)
        self._load(addresses)

    def _load(self, addresses: Mapping[str, int]) -> None:
        self._addresses = addresses
        self.choices = Choices()
        self._positions = [self._plan.inputs.index(symbol) for symbol in self._plan.symbols]
        self._lock = Lock()  # of the instances
        self._arenas: dict[tuple[bool, bool], Arena] = {}
        self._described: tuple[_Kind, Description] | None = None
        self._instances: OrderedDict[_Key, _Ready] = OrderedDict()
        self._sized: dict[_Key, Sized] = {}
        ready = None if self._plan.symbols else self._make_instance((), True, self._observed)
        self._static = None if self._probes else ready

    def __getstate__(self) -> dict[str, Any]:
        """The state for a later process, which finds the kernels in the store."""
        if self._probes:
            raise InternalError(f"{self._plan.name} has probes, which belong to this process")
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load(build(self._sources)[0])

    def __call__(self, args: list[Any]) -> list[Any]:
        run, supplied, expected, donated = self._static or self._instance(args)
        if not all(_may_be_overwritten(args, position) for position in donated):
            run, supplied, expected, _ = self._instance(args, donated=False)
        for name, position, dtype, shape, strides in expected:
            tensor = args[position]
            if tensor.stride() != strides or tensor.shape != shape or tensor.dtype is not dtype:
                args[position] = fitted(name, tensor, dtype, shape, strides)
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
        key = sizes, donated, self._observed
        with self._lock:
            if key in self._instances:
                self._instances.move_to_end(key)
                return self._instances[key]
        return self._make_instance(*key)

    def _make_instance(self, sizes: tuple[int, ...], donated: bool, observed: bool) -> _Ready:
        described = self._description(observed)
        numbers = described.formulas.values(*sizes)
        size = described.formulas.numbers(sizes, numbers)
        memory = self._memory(size, donated, observed)
        places = described.places
        instance = Instance.of(described.template, places.slots(size, memory), memory.arena_bytes, numbers)
        floats = [torch.tensor([size.of(name)], dtype=torch.float64) for name in self._plan.supplied]
        expected = [places.expected(view, size) for view in self._checked if view.buffer in places.numbers]
        overwritten = sorted({places.inputs[name] for name in memory.donors.values()})
        ready = instance.run, [*self._constants, *floats], expected, overwritten
        key = sizes, donated, observed
        sized = Sized(self._plan, self._program, described.nodes, size, self._parameters)
        with self._lock:
            self._instances[key] = ready
            self._sized[key] = INSTANCES[instance.number] = sized
            if len(self._instances) > _INSTANCES:
                del self._sized[self._instances.popitem(last=False)[0]]
        return ready

    def _description(self, observed: bool) -> Description:
        """The latest description, unless trials have ended since."""
        kind = observed, self.choices.settled
        last = self._described
        if last is None or last[0] != kind:
            describer = Describer(self._plan, self._addresses, self._sources, self.choices)
            self._described = last = kind, describer.describe(self._probes, observed)
        return last[1]

    def _memory(self, size: Numbers, donated: bool, observed: bool) -> MemoryPlan:
        known = self._plan.memory
        if known is not None and (donated or not known.donors) and not observed:
            return known
        if (donated, observed) not in self._arenas:
            self._arenas[donated, observed] = self._plan.arena(donated=donated, observed=observed)
        return self._arenas[donated, observed].plan(size)


class Name(str):
    """The name of a compiled graph, unique in a process: a later process that unpickles it gives it a new name."""


# How to run an instance, the tensors that it expects after the caller's arguments, the layouts that it expects of some
# of these, and the positions of those that it overwrites.
_Ready: TypeAlias = "tuple[Callable[[list[Any]], list[Any]], list[torch.Tensor], list[Expected], list[int]]"
# The sizes of an instance, whether it overwrites donated inputs, and whether its nodes are observed.
_Key: TypeAlias = "tuple[tuple[int, ...], bool, bool]"
# Whether nodes are observed, and how many trials have ended.
_Kind: TypeAlias = "tuple[bool, int]"


def fitted(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """`tensor`, copied if it has other strides. Raises UserError for another dtype or shape."""
    if tensor.shape != shape or tensor.dtype is not dtype:
        raise UserError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {dtype} of shape {shape} when captured",
            hint="correct what produces it: the fake implementation of an operator, or a hook on saved tensors",
        )
    if has_strides(tensor, strides):
        return tensor
    for dim, stride in enumerate(strides):
        if stride == 0:  # elements at the same address are written once
            tensor = tensor.narrow(dim, 0, 1)
    return torch.empty_strided(tensor.shape, strides, dtype=dtype).copy_(tensor).expand(shape)


def has_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides; those of dimensions of one element are ignored."""
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return not tensor.numel() or all(size == 1 or stride == wanted for size, stride, wanted in each)


def _may_be_overwritten(args: list[Any], position: int) -> bool:
    """Whether an argument's memory may be overwritten: there is no other reference to it, and it is aligned."""
    return args[position].data_ptr() % ALIGNMENT == 0 and is_unshared(args, position)
