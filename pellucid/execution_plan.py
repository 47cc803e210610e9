"""What a call of a compiled graph does, for any sizes: where its buffers lie, and the calls in order.

It is made once, of the scheduled program and its kernels. The executable makes instances of it for the sizes that it
meets; `output_code.py`, cosimulation and profiles read it too, so none of them walks the program by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from pellucid.codegen import CppKernel
from pellucid.ir.analysis import hands_on, reads, writes
from pellucid.ir.derived import Derived, Numbers, by_name, term_text
from pellucid.ir.index import Expr, const, text
from pellucid.ir.nodes import Buffer, Extern, Kernel, Node, Program, View
from pellucid.ir.origin import Origin
from pellucid.ir.printer import print_arg, with_comments
from pellucid.ir.types import DType
from pellucid.schedule.memory import (
    WORTH_TAKING,
    Lifetime,
    MemoryPlan,
    Room,
    Span,
    donations,
    made_in_place,
    plan_memory,
    spans,
)
from pellucid.strips import Chain


class Place(Enum):
    """Where a buffer lies."""

    ARGUMENT = "argument"
    """The caller's."""
    ARENA = "arena"
    """In the run's memory, shared by buffers that are not alive at once, or in that of a donated argument."""
    POOL = "pool"
    """A block of its own, which goes to the caller if it is a result: also of what an operator may make a view of."""
    OPERATOR = "operator"
    """What the operator that makes it has allocated."""


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer of `numel` elements.

    whole: a view of all of it, in the shape of a value that the graph has there.
    span: the first and the last call that uses it, None if none does.
    """

    name: str
    dtype: DType
    numel: Expr
    place: Place
    whole: View
    span: Span | None

    def nbytes(self, size: Numbers) -> int:
        """size: of the symbols. Zero where an extent is: the position of the last element is then below zero."""
        return max(0, size(self.numel)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlannedWay:
    """A function that does what a kernel does. symbol: its name. The rest: see `CppKernel`."""

    symbol: str
    extent: Expr
    grain: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a kernel.

    name: of the kernel in the program. ways: to do it, the cheapest by price first. checks: messages of its index
    checks, see `native.instance.KernelCall`. where: the user's line. reads, writes: buffers. The rest: see `CppKernel`.
    """

    name: str
    ways: tuple[PlannedWay, ...]
    params: tuple[str, ...]
    offsets: tuple[int, ...]
    symbols: tuple[str, ...]
    checks: tuple[str, ...]
    where: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Call: TypeAlias = Launch | Extern

_LAYOUTS = 64
"""Layouts of an arena that are kept, for sizes that come back."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A compiled graph as it is run.

    name: of the graph. symbols, inputs, derived: as those of the `Program`. results: its outputs.
    supplied: buffers with one derived float each, arguments that follow those of the caller.
    donated: arguments that temporaries may overwrite where the caller does not want them any more, see `donations`.
    in_place: temporaries that may lie where others do, see `made_in_place`.
    chains: calls that run strip by strip, in order.
    memory: the places in the arena and in donated arguments; None where they depend on sizes.
    """

    name: str
    symbols: tuple[str, ...]
    derived: tuple[Derived, ...]
    inputs: tuple[str | None, ...]
    supplied: tuple[str, ...]
    buffers: tuple[PlannedBuffer, ...]
    calls: tuple[Call, ...]
    results: tuple[View | Expr | None, ...]
    donated: Mapping[str, frozenset[str]]
    in_place: Mapping[str, str]
    chains: tuple[Chain, ...]
    memory: MemoryPlan | None

    @property
    def arguments(self) -> tuple[str | None, ...]:
        return (*self.inputs, *self.supplied)

    def arena(self, *, donated: bool, observed: bool) -> Arena:
        """The places in the arena, for any sizes.

        donated: whether arguments may be overwritten. observed: after each call its results are there, whole, and what
        it has read.
        """
        if observed:
            return Arena(self.buffers, {}, {}, ())
        return Arena(self.buffers, self.donated if donated else {}, self.in_place, self.chains)

    @property
    def memory_one_by_one(self) -> MemoryPlan | None:
        """`memory` where calls run one after the other, and none strip by strip."""
        if self.memory is None or not self.chains:
            return self.memory
        return Arena(self.buffers, self.donated, self.in_place, ()).plan(Numbers({}, by_name(self.derived)))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan_execution(
    program: Program,
    kernels: Mapping[str, CppKernel],
    *,
    name: str = "program",
    values: Iterable[View] = (),
    reuse: bool = True,
    donated: Iterable[str] = (),
    chains: tuple[Chain, ...] = (),
) -> ExecutionPlan:
    """The plan of a scheduled program with its kernels, by their names in it.

    values: where it puts what the graph computes. reuse: let temporaries that are not alive at once share memory.
    donated: inputs whose memory temporaries may take over where nobody else holds it. chains: calls that run strip by
    strip; needs `reuse`.
    """
    allocated = _allocated_by_calls(program.nodes)
    whole = _whole(program, values)
    calls = tuple(_launch(node, kernels[node.name]) if isinstance(node, Kernel) else node for node in program.nodes)
    used = spans([(*read_by(call), *written_by(call)) for call in calls], program.outputs)
    handed_on = {name for node in program.nodes if hands_on(node) for name in reads(node)}

    def place(buffer: str, role: str) -> Place:
        if role == "input":
            return Place.ARGUMENT
        if buffer in allocated:
            return Place.OPERATOR
        return Place.ARENA if role == "temp" and reuse and buffer not in handed_on else Place.POOL

    buffers = tuple(
        PlannedBuffer(b.name, b.dtype, b.numel, place(b.name, b.role), whole[b.name], used.get(b.name))
        for b in program.buffers
    )
    small = {buffer.name for buffer in program.buffers if _is_small(buffer)}
    free = [name for name in donated if name not in small and name not in handed_on]
    taken = donations(program.nodes, used, free) if reuse else {}
    kinds = {b.name: (b.numel, b.dtype) for b in buffers if b.place is Place.ARENA and b.name in used}
    in_place = made_in_place(program.nodes, used, kinds)
    arena = Arena(buffers, taken, in_place, chains)
    return ExecutionPlan(
        name=name,
        symbols=program.symbols,
        derived=program.derived,
        inputs=program.inputs,
        supplied=program.supplied,
        buffers=buffers,
        calls=calls,
        results=program.outputs,
        donated=taken,
        in_place=in_place,
        chains=chains,
        memory=None if program.symbols else arena.plan(Numbers({}, by_name(program.derived))),
    )


def read_by(call: Call) -> tuple[str, ...]:
    """Buffers whose contents a call reads, each once, in order of first use."""
    return call.reads if isinstance(call, Launch) else reads(call)


def written_by(call: Call) -> tuple[str, ...]:
    """Buffers that a call writes, wholly or in part, each once."""
    return call.writes if isinstance(call, Launch) else writes(call)


def where(origin: Origin) -> str:
    """FX node and user line, for messages: `embedding at model.py:12`."""
    nodes = ", ".join(origin.nodes) or "generated code"
    return f"{nodes} at {origin.users[-1]}" if origin.users else nodes


def _launch(kernel: Kernel, compiled: CppKernel) -> Launch:
    return Launch(
        kernel.name,
        tuple(PlannedWay(each.name, each.extent, each.grain) for each in compiled.ways),
        compiled.params,
        compiled.offsets,
        compiled.symbols,
        tuple(_check_text(dim, origin) for dim, origin in compiled.checks),
        where(kernel.body[-1].origin),
        reads(kernel),
        writes(kernel),
    )


def _is_small(buffer: Buffer) -> bool:
    return buffer.numel.value is not None and buffer.numel.value * buffer.dtype.itemsize < WORTH_TAKING


def _check_text(dim: int, origin: Origin) -> str:
    return f"index {{index}} is out of bounds for dimension {dim} with size {{size}}, in {where(origin)}"


def _allocated_by_calls(nodes: Iterable[Node]) -> frozenset[str]:
    """Buffers whose memory comes from an ATen call that has no out= variant."""
    calls = (node for node in nodes if isinstance(node, Extern) and not node.out)
    return frozenset(view.buffer for call in calls for view in call.outputs if view is not None)


def _whole(program: Program, values: Iterable[View]) -> dict[str, View]:
    """By buffer, a view that shows its shape: of a value that the graph has there, else of its elements in a row.

    AOTAutograd leaves out sizes that the graph does not compute with, so that not every shape is known.
    """
    known = {*program.symbols, *by_name(program.derived)}
    shapes = {b.name: View(b.name, (b.numel,), (const(1),), const(0)) for b in program.buffers}
    whole = [view for view in values if all(size.syms() <= known for size in (*view.shape, *view.strides))]
    return shapes | {view.buffer: view for view in reversed(whole) if view.buffer in shapes}


class Arena:
    """Lays out temporaries for the sizes that it meets.

    Calls of a chain count as one: all that they use is alive together, and of what has a window that is.
    """

    def __init__(
        self,
        buffers: Iterable[PlannedBuffer],
        donated: Mapping[str, frozenset[str]],
        in_place: Mapping[str, str],
        chains: Sequence[Chain],
    ) -> None:
        """donated, in_place, chains: see `ExecutionPlan`."""
        chain_of = {call: chain for chain in chains for call in range(chain.first, chain.last + 1)}
        used = {b.name: b.span for b in buffers if b.span is not None}

        def life(name: str) -> Lifetime:
            first, last = used[name]
            begin = chain_of[first].first if first in chain_of else first
            return Lifetime(name, begin, chain_of[last].last if last in chain_of else last, 0)

        placed = [b for b in buffers if b.name in used and b.place is Place.ARENA]
        self._lives = [life(b.name) for b in placed]
        self._rooms = [
            Room(name, life(name).last, 0, frozenset() if used[name][1] in chain_of else targets)
            for name, targets in donated.items()
        ]
        named = {b.name: b for b in buffers}
        self._buffers = [*placed, *(named[name] for name in donated)]
        self._in_place = {name: at for name, at in in_place.items() if used[name][0] not in chain_of}
        self._windows = {window.buffer: chain.room(window) for chain in chains for window in chain.windows}
        self._exact = bool(donated)  # what lies in an argument must fit
        self._made: dict[tuple[int, ...], MemoryPlan] = {}

    def plan(self, size: Numbers) -> MemoryPlan:
        """size: of the symbols."""
        needed = tuple([self._room(buffer, size) for buffer in self._buffers])
        plan = self._made.get(needed)
        if plan is None:
            if len(self._made) >= _LAYOUTS:
                self._made.clear()
            plan = self._made[needed] = self._laid_out(needed)
        return plan

    def _room(self, buffer: PlannedBuffer, size: Numbers) -> int:
        nbytes = buffer.nbytes(size)
        if buffer.numel.value is None and not self._exact:
            nbytes = _roomy(nbytes)
        return self._windows.get(buffer.name, nbytes)

    def _laid_out(self, needed: Sequence[int]) -> MemoryPlan:
        count = len(self._lives)
        lives = [replace(life, nbytes=n) for life, n in zip(self._lives, needed[:count], strict=True)]
        rooms = [replace(room, nbytes=n) for room, n in zip(self._rooms, needed[count:], strict=True)]
        return plan_memory(lives, rooms, self._in_place)


def _roomy(nbytes: int) -> int:
    """At most an eighth more, and the same for many numbers: one layout serves sizes that grow from call to call."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


# ------------------------------------------------------------------------------------------------ text


def _lines(plan: ExecutionPlan) -> Iterator[str]:
    yield f"plan {plan.name} {{"
    if plan.symbols:
        yield f"  symbols {', '.join(plan.symbols)}"
    for each in plan.derived:
        yield f"  derived {each.name}: {'float' if each.is_float else 'int'} = {term_text(each.term)}"
    if plan.memory is not None:
        yield f"  arena {plan.memory.arena_bytes} bytes"
    arguments = {name: number for number, name in enumerate(plan.arguments)}
    for buffer in plan.buffers:
        place = buffer.place.value
        if buffer.place is Place.ARGUMENT:
            place += f" {arguments[buffer.name]}"
        yield f"  buffer {buffer.name}: {buffer.dtype!r}[{text(buffer.numel)}] {place}{_time_and_place(plan, buffer)}"
    yield ""
    for chain in plan.chains:
        yield f"  strips of calls {chain.first} to {chain.last}, {len(chain.parts)} parts{_windows_text(chain)}"
    lines = [f"  call {number} {_call_text(call)}" for number, call in enumerate(plan.calls)]
    yield from with_comments(lines, [_comment(call) for call in plan.calls])
    for result in plan.results:
        yield f"  result {print_arg(result)}"
    yield "}"


def _time_and_place(plan: ExecutionPlan, buffer: PlannedBuffer) -> str:
    """Where in the arena or in which argument a buffer lies, and which calls need it."""
    at = ""
    if plan.memory is not None and buffer.place is Place.ARENA and buffer.span is not None:
        home = plan.memory.homes.get(buffer.name)
        at = f" in argument {home}" if home else f" at byte {plan.memory.offsets[buffer.name]}"
    if buffer.place is Place.ARGUMENT or buffer.span is None:
        return " donated" if buffer.name in plan.donated else at
    first, last = buffer.span
    return f"{at}, from call {first} to {'the end' if last == len(plan.calls) else last}"


def _windows_text(chain: Chain) -> str:
    return "".join(f", {window.nbytes} bytes of {window.buffer}" for window in chain.windows)


def _call_text(call: Call) -> str:
    match call:
        case Launch():
            sizes = f" sizes {', '.join(call.symbols)}" if call.symbols else ""
            given = (
                f"{name}[{first}:]" if first else name for name, first in zip(call.params, call.offsets, strict=True)
            )
            parameters = f"({', '.join(given)}){sizes}"
            ways = (f"{way.symbol}{parameters} extent {text(way.extent)} grain {way.grain}" for way in call.ways)
            return f"{call.name}: {' or '.join(ways)}"
        case Extern():
            arguments = [print_arg(arg) for arg in call.args] + [f"{k}={print_arg(arg)}" for k, arg in call.kwargs]
            outputs = ", ".join(map(print_arg, call.outputs))
            made = f" {'into' if call.out else 'makes'} {outputs}" if outputs else ""
            return f"{call.name}: {call.op}({', '.join(arguments)}){made}"


def _comment(call: Call) -> str:
    return call.where if isinstance(call, Launch) else f"{where(call.origin)}; {call.reason}"
