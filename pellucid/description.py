"""From a plan to what the runtime executes: calls and results in which numbers that depend on sizes are left open.

They are described once for all sizes; the executable creates instances of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pellucid.execution_plan import ExecutionPlan, Launch, Place, where
from pellucid.ir.analysis import operator_of
from pellucid.ir.derived import Float, Formulas, Numbers, by_name
from pellucid.ir.index import ONE, Expr, sym
from pellucid.ir.nodes import Arg, Enum, Extern, View
from pellucid.ir.types import TORCH_DTYPES
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
    Variant,
)
from pellucid.native.trials import Choices
from pellucid.schedule.memory import MemoryPlan
from pellucid.strips import Chain

Expected: TypeAlias = "tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]]"
"""An argument's name, position, dtype, shape and strides."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What Python does during a run: `before` and `after` the call of a node.

    views: passed to `after`, as live tensors: it may read and write them, and must not keep references to them.
    observes: whether they are passed in this run. Then nodes run one by one, and no argument is overwritten.
    """

    before: Callable[[], None]
    views: tuple[View, ...]
    after: Callable[..., None]
    observes: Callable[[], bool]


class Places:
    """Where the buffers of a plan are stored. numbers: of the buffers, by name. inputs: of the arguments, by name."""

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
            donor = memory.donors.get(buffer.name)
            slots[number] = InputSlot(self.inputs[donor]) if donor else ArenaSlot(memory.offsets[buffer.name])
        return slots

    def expected(self, view: View, size: Numbers) -> Expected:
        """The dtype and layout that the argument of which `view` is the whole must have.

        The stride of a dimension of one element is irrelevant, and may be a size that the graph is not passed.
        """
        dtype = TORCH_DTYPES[self._plan.buffers[self.numbers[view.buffer]].dtype]
        strides = (ONE if extent == ONE else stride for extent, stride in zip(view.shape, view.strides, strict=True))
        return view.buffer, self.inputs[view.buffer], dtype, tuple(map(size, view.shape)), tuple(map(size, strides))


@dataclass(frozen=True, slots=True)
class Description:
    """A template for instances of any sizes. formulas: of the numbers that it leaves open. nodes: see `Sized`."""

    template: Template
    places: Places
    formulas: Formulas
    nodes: tuple[str | None, ...]


class Describer:
    """Turns a plan into calls and results in which numbers that depend on sizes are left open."""

    def __init__(
        self, plan: ExecutionPlan, addresses: Mapping[str, int], sources: Mapping[str, str], choices: Choices
    ) -> None:
        self.plan = plan
        self.addresses = addresses
        self.sources = sources
        self.choices = choices
        self.places = Places(plan)
        self.slots = self.places.numbers
        self.dtypes = {buffer.name: TORCH_DTYPES[buffer.dtype] for buffer in plan.buffers}
        self.terms: dict[Expr | Float, int] = {}

    def describe(self, probes: Mapping[str, Probe], observed: bool) -> Description:
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
            self.size(buffer.numel)  # the layout of the arena depends on it
        formulas = Formulas(self.plan.symbols, by_name(self.plan.derived), self.terms)
        nodes = tuple(None if isinstance(call, PythonCall) else call.name for call in calls)
        return Description(template, self.places, formulas, nodes)

    def size(self, term: Expr | Float) -> Size:
        """A constant integer, or the number of a term that is evaluated for each set of sizes."""
        if isinstance(term, Expr) and term.value is not None:
            return term.value
        return Unknown(self.terms.setdefault(term, len(self.terms)))

    def calls(self, probes: Mapping[str, Probe], observed: bool) -> tuple[list[Call], list[Strips]]:
        """The calls of the plan and of probes; and those that run strip by strip, none if calls are observed."""
        chains = {} if observed else {chain.first: chain for chain in self.plan.chains}
        made: list[Call] = []
        strips: list[Strips] = []
        number = 0
        while number < len(self.plan.calls):
            chain = chains.get(number)
            last = chain.last if chain else number
            together = self.plan.calls[number : last + 1]
            probed = [(call.name, probes[call.name]) for call in together if call.name in probes]
            for name, probe in reversed(probed):  # `before` of the first node is called last, right before it runs
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
        """first: the number of the chain's first call among all calls, those of probes included."""
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
        variant, *others = variants = [
            Variant(self.addresses[each.symbol], self.size(each.extent), each.grain) for each in launch.variants
        ]
        trial = None
        if others:
            sources = {each.symbol: self.sources[each.symbol] for each in launch.variants}
            variant, trial = self.choices.of(launch.name, sources, variants)
        return KernelCall(
            address=variant.address,
            slots=tuple(self.slots[name] for name in launch.params),
            symbols=tuple(self.size(sym(name)) for name in launch.symbols),
            extent=variant.extent,
            grain=variant.grain,
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
    """The value of an operator's argument that is neither a view nor a list. size: of the symbols."""
    match arg:
        case Expr() | Float():
            return size(arg)
        case Enum("device", name):
            return torch.device(name)
        case Enum(_, name):
            return getattr(torch, name)
        case _:
            return arg
