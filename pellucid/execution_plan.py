"""What a call of a compiled graph does, for any sizes: where its buffers are stored, and the calls in order.

It is built once, from the scheduled program and its kernels. The executable creates instances of it for the sizes that
it is called with; `output_code.py`, cosimulation and profiles read it too, so none of them walks the program by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from pellucid.codegen import CppKernel
from pellucid.ir.analysis import may_alias_arguments, reads, writes
from pellucid.ir.derived import Derived, Numbers, by_name, term_text
from pellucid.ir.index import Expr, const, text
from pellucid.ir.nodes import Buffer, Extern, Kernel, Node, Program, View
from pellucid.ir.origin import Origin
from pellucid.ir.printer import print_arg, with_comments
from pellucid.ir.types import DType
from pellucid.schedule.memory import (
    MIN_DONATED_BYTES,
    DonatedArgument,
    Lifetime,
    MemoryPlan,
    Span,
    donations,
    find_in_place,
    plan_memory,
    spans,
)
from pellucid.strips import Chain


class Place(Enum):
    """Where a buffer is stored."""

    ARGUMENT = "argument"
    """In the caller's tensor."""
    ARENA = "arena"
    """In the run's arena, shared by buffers that are not live at the same time, or in a donated argument."""
    POOL = "pool"
    """In a block of its own, which the caller gets if it is a result; also where an operator may return views of it."""
    OPERATOR = "operator"
    """In memory that the operator that computes it allocates."""


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer of `numel` elements.

    whole: a view of all of it, in the shape of a value of the graph that it holds.
    span: the first and the last call that uses it, None if none does.
    """

    name: str
    dtype: DType
    numel: Expr
    place: Place
    whole: View
    span: Span | None

    def nbytes(self, size: Numbers) -> int:
        """size: of the symbols. 0 if an extent is 0, where `numel`, computed from the last element, may be negative."""
        return max(0, size(self.numel)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlannedVariant:
    """A C++ function that implements a kernel. symbol: its name. The rest: see `CppKernel`."""

    symbol: str
    extent: Expr
    grain: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a kernel.

    name: of the kernel in the program. variants: the cheapest by estimated cost first. checks: messages of its index
    checks, see `native.instance.KernelCall`. where: the user's line. reads, writes: buffers. The rest: see `CppKernel`.
    """

    name: str
    variants: tuple[PlannedVariant, ...]
    params: tuple[str, ...]
    offsets: tuple[int, ...]
    symbols: tuple[str, ...]
    checks: tuple[str, ...]
    where: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


Call: TypeAlias = Launch | Extern

_LAYOUTS = 64
"""How many layouts of an arena are cached, for sizes that occur again."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A compiled graph as it is run.

    name: of the graph. symbols, inputs, derived: as those of the `Program`. results: its outputs.
    supplied: buffers with one derived float each, arguments that follow those of the caller.
    donated: arguments that temporaries may overwrite if the caller holds no other reference, see `donations`.
    in_place: temporaries that may reuse the memory of others, see `find_in_place`.
    chains: calls that run strip by strip, in order.
    memory: offsets in the arena, and donated arguments that are reused; None where they depend on sizes.
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
        """The layout of the arena, for any sizes.

        donated: whether arguments may be overwritten. observed: after each call its results and operands are complete
        in memory.
        """
        if observed:
            return Arena(self.buffers, {}, {}, ())
        return Arena(self.buffers, self.donated if donated else {}, self.in_place, self.chains)

    @property
    def memory_one_by_one(self) -> MemoryPlan | None:
        """`memory` for calls that run one after the other, none strip by strip."""
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

    values: the views that hold values of the graph. reuse: let temporaries that are not live at the same time share
    memory. donated: inputs whose memory temporaries may take over if there is no other reference to it. chains: calls
    that run strip by strip; needs `reuse`.
    """
    allocated = _allocated_by_calls(program.nodes)
    whole = _whole(program, values)
    calls = tuple(_launch(node, kernels[node.name]) if isinstance(node, Kernel) else node for node in program.nodes)
    used = spans([(*read_by(call), *written_by(call)) for call in calls], program.outputs)
    aliased = {name for node in program.nodes if may_alias_arguments(node) for name in reads(node)}

    def place(buffer: str, role: str) -> Place:
        if role == "input":
            return Place.ARGUMENT
        if buffer in allocated:
            return Place.OPERATOR
        return Place.ARENA if role == "temp" and reuse and buffer not in aliased else Place.POOL

    buffers = tuple(
        PlannedBuffer(b.name, b.dtype, b.numel, place(b.name, b.role), whole[b.name], used.get(b.name))
        for b in program.buffers
    )
    small = {buffer.name for buffer in program.buffers if _is_small(buffer)}
    free = [name for name in donated if name not in small and name not in aliased]
    reused = donations(program.nodes, used, free) if reuse else {}
    kinds = {b.name: (b.numel, b.dtype) for b in buffers if b.place is Place.ARENA and b.name in used}
    in_place = find_in_place(program.nodes, used, kinds)
    arena = Arena(buffers, reused, in_place, chains)
    return ExecutionPlan(
        name=name,
        symbols=program.symbols,
        derived=program.derived,
        inputs=program.inputs,
        supplied=program.supplied,
        buffers=buffers,
        calls=calls,
        results=program.outputs,
        donated=reused,
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
        tuple(PlannedVariant(each.name, each.extent, each.grain) for each in compiled.variants),
        compiled.params,
        compiled.offsets,
        compiled.symbols,
        tuple(_check_text(dim, origin) for dim, origin in compiled.checks),
        where(kernel.body[-1].origin),
        reads(kernel),
        writes(kernel),
    )


def _is_small(buffer: Buffer) -> bool:
    return buffer.numel.value is not None and buffer.numel.value * buffer.dtype.itemsize < MIN_DONATED_BYTES


def _check_text(dim: int, origin: Origin) -> str:
    return f"index {{index}} is out of bounds for dimension {dim} with size {{size}}, in {where(origin)}"


def _allocated_by_calls(nodes: Iterable[Node]) -> frozenset[str]:
    """Buffers whose memory comes from an ATen call that has no out= variant."""
    calls = (node for node in nodes if isinstance(node, Extern) and not node.out)
    return frozenset(view.buffer for call in calls for view in call.outputs if view is not None)


def _whole(program: Program, values: Iterable[View]) -> dict[str, View]:
    """By buffer, a view of all of it: in the shape of a value of the graph that it holds, else one-dimensional.

    AOTAutograd leaves out sizes that the graph does not use in computations, so that not every shape is known.
    """
    known = {*program.symbols, *by_name(program.derived)}
    shapes = {b.name: View(b.name, (b.numel,), (const(1),), const(0)) for b in program.buffers}
    whole = [view for view in values if all(size.syms() <= known for size in (*view.shape, *view.strides))]
    return shapes | {view.buffer: view for view in reversed(whole) if view.buffer in shapes}


class Arena:
    """Lays out temporaries for the sizes of each call.

    Calls of a chain count as one: all buffers that they use are live together; of those with windows, only the windows.
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

        in_arena = [b for b in buffers if b.name in used and b.place is Place.ARENA]
        self._lives = [life(b.name) for b in in_arena]
        self._donated = [
            DonatedArgument(name, life(name).last, 0, frozenset() if used[name][1] in chain_of else targets)
            for name, targets in donated.items()
        ]
        named = {b.name: b for b in buffers}
        self._buffers = [*in_arena, *(named[name] for name in donated)]
        self._in_place = {name: at for name, at in in_place.items() if used[name][0] not in chain_of}
        self._windows = {window.buffer: chain.window_bytes(window) for chain in chains for window in chain.windows}
        self._exact = bool(donated)  # buffers in arguments must fit
        self._plans: dict[tuple[int, ...], MemoryPlan] = {}

    def plan(self, size: Numbers) -> MemoryPlan:
        """size: of the symbols."""
        needed = tuple([self._nbytes(buffer, size) for buffer in self._buffers])
        plan = self._plans.get(needed)
        if plan is None:
            if len(self._plans) >= _LAYOUTS:
                self._plans.clear()
            plan = self._plans[needed] = self._lay_out(needed)
        return plan

    def _nbytes(self, buffer: PlannedBuffer, size: Numbers) -> int:
        nbytes = buffer.nbytes(size)
        if buffer.numel.value is None and not self._exact:
            nbytes = _rounded_up(nbytes)
        return self._windows.get(buffer.name, nbytes)

    def _lay_out(self, needed: Sequence[int]) -> MemoryPlan:
        count = len(self._lives)
        lives = [replace(life, nbytes=n) for life, n in zip(self._lives, needed[:count], strict=True)]
        donated = [replace(each, nbytes=n) for each, n in zip(self._donated, needed[count:], strict=True)]
        return plan_memory(lives, donated, self._in_place)


def _rounded_up(nbytes: int) -> int:
    """`nbytes` rounded up by at most 1/8, so that one layout serves sizes that grow from call to call."""
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
        yield f"  buffer {buffer.name}: {buffer.dtype!r}[{text(buffer.numel)}] {place}{_location(plan, buffer)}"
    yield ""
    for chain in plan.chains:
        yield f"  strips of calls {chain.first} to {chain.last}, {len(chain.parts)} parts{_windows_text(chain)}"
    lines = [f"  call {number} {_call_text(call)}" for number, call in enumerate(plan.calls)]
    yield from with_comments(lines, [_comment(call) for call in plan.calls])
    for result in plan.results:
        yield f"  result {print_arg(result)}"
    yield "}"


def _location(plan: ExecutionPlan, buffer: PlannedBuffer) -> str:
    """The arena offset of a buffer, or the argument that holds it, and its live range."""
    at = ""
    if plan.memory is not None and buffer.place is Place.ARENA and buffer.span is not None:
        donor = plan.memory.donors.get(buffer.name)
        at = f" in argument {donor}" if donor else f" at byte {plan.memory.offsets[buffer.name]}"
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
            params = (
                f"{name}[{first}:]" if first else name for name, first in zip(call.params, call.offsets, strict=True)
            )
            parameters = f"({', '.join(params)}){sizes}"
            variants = (
                f"{each.symbol}{parameters} extent {text(each.extent)} grain {each.grain}" for each in call.variants
            )
            return f"{call.name}: {' or '.join(variants)}"
        case Extern():
            arguments = [print_arg(arg) for arg in call.args] + [f"{k}={print_arg(arg)}" for k, arg in call.kwargs]
            outputs = ", ".join(map(print_arg, call.outputs))
            written = f" {'into' if call.out else 'makes'} {outputs}" if outputs else ""
            return f"{call.name}: {call.op}({', '.join(arguments)}){written}"


def _comment(call: Call) -> str:
    return call.where if isinstance(call, Launch) else f"{where(call.origin)}; {call.reason}"
