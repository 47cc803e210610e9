"""Rows of temporaries that map to few sets of a cache get one more line, so that they spread over all sets.

    before: `y[1024*i0 + i1]` over 1024 rows of 4096 bytes: a column maps to 32 of the second cache's 2048 sets
    after:  `y[1040*i0 + i1]`: a column maps to all sets

Only buffers that no node other than kernels accesses are padded: never inputs, results, tensors saved for backward, or
arguments of library calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pellucid.ir.analysis import depth_of, reads, writes
from pellucid.ir.attention import find_attention
from pellucid.ir.contraction import Contraction, find_contraction
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, FloorDiv, Mod, const, exact_div, floordiv, total, var
from pellucid.ir.nodes import Kernel, Line, Load, Node, Param, Program, Store, View, axes_of, operands
from pellucid.ir.traffic import LINE
from pellucid.machine import Machine, issuing, moving
from pellucid.machine.kernels import FEW_ROWS, SAME_SET
from pellucid.machine.work import estimate, estimated_bytes
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.normalize import split_axes

# A row may grow by at most this share.
MAX_GROWTH = 1 / 8
# Bytes of a row that a kernel processes at a time while it walks along columns: what `codegen.vector` unrolls to.
COLUMN_BYTES = 4 * LINE
# Extra instructions per row of a kernel that looped over all elements without rows before.
ROW_STEPS = 16


@dataclass(frozen=True, slots=True)
class Walk:
    """A kernel's accesses to `buffer` across rows of `row` elements, and the nanoseconds that padding saves."""

    buffer: str
    row: int
    saved: float
    why: str


def pad(
    program: Program, values: Mapping[str, View], machine: Machine
) -> tuple[Program, Mapping[str, View], list[Decision]]:
    """`program`, whose kernels are in canonical form, with rows of temporaries padded where that pays.

    values: where the program stores values, by name; they are returned for the padded program.
    """
    decisions: list[Decision] = []
    found: dict[str, list[Walk]] = {}
    temporaries = {buffer.name for buffer in program.buffers if buffer.role == "temp"}
    for node in program.nodes:
        for walk in find_walks(node, temporaries, machine) if isinstance(node, Kernel) else ():
            found.setdefault(walk.buffer, []).append(walk)
    fixed = _fixed(program)
    for name, walks in found.items():
        program, values, decision = _weigh(program, values, walks, fixed.get(name, ""), machine)
        decisions.append(decision)
    return program, values, decisions


def _weigh(
    program: Program, values: Mapping[str, View], walks: list[Walk], refusal: str, machine: Machine
) -> tuple[Program, Mapping[str, View], Decision]:
    """The program with one buffer padded, or unchanged. refusal: why the buffer must not be padded; empty if it may."""
    best = max(walks, key=lambda walk: walk.saved)
    buffer = program.buffer(best.buffer)
    padding = Padding.of(buffer.name, best.row, buffer.dtype.itemsize)
    nodes = {node.name: node for node in program.nodes if buffer.name in (*reads(node), *writes(node))}
    views = {name: view for name, view in values.items() if view.buffer == buffer.name}
    saved, spent, looping = sum(walk.saved for walk in walks if walk.row == best.row), 0.0, 0
    refusal = refusal or padding.refusal(buffer.numel)
    if not refusal:
        kernels = {name: padding.node(node) for name, node in nodes.items()}
        moved = {name: padding.view(view) for name, view in views.items()}
        looping = sum(_axes(after) > _axes(nodes[name]) for name, after in kernels.items())
        spent = issuing(machine, ROW_STEPS * looping * estimate(buffer.numel) / padding.row)
        if None in kernels.values() or None in moved.values():
            refusal = "an access, or a value that a debugger reads, crosses its rows"
        elif saved <= spent:
            refusal = f"{looping} kernels would need a loop over rows: that costs more than it saves"
        else:
            grown = replace(buffer, numel=padding.numel(buffer.numel))
            program = replace(
                program,
                nodes=tuple(kernels.get(node.name) or node for node in program.nodes),
                buffers=tuple(grown if each is buffer else each for each in program.buffers),
            )
            values = {**values, **{name: view for name, view in moved.items() if view is not None}}
    facts = (("row", best.row), ("padded", padding.padded), ("ns_saved", round(saved)), ("ns_spent", round(spent)))
    return program, values, Decision("schedule.pad", (buffer.name,), not refusal, refusal or best.why, facts)


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows of `row` elements of `buffer`, padded to `padded` elements each."""

    buffer: str
    row: int
    padded: int

    @classmethod
    def of(cls, buffer: str, row: int, itemsize: int) -> Padding:
        """Padding to an odd number of lines, which is coprime to any power of two of sets."""
        lines = -(-row * itemsize // LINE) | 1
        return cls(buffer, row, lines * LINE // itemsize)

    def refusal(self, numel: Expr) -> str:
        if exact_div(numel, const(self.row)) is None:
            return f"its size is not a multiple of rows of {self.row}"
        if self.padded - self.row > MAX_GROWTH * self.row:
            return f"rows of {self.row} would grow to {self.padded}"
        return ""

    def numel(self, numel: Expr) -> Expr:
        return floordiv(numel, self.row) * self.padded

    def index(self, index: Expr, ranges: Mapping[str, Expr]) -> Expr:
        return index + floordiv(index, self.row, ranges) * (self.padded - self.row)

    def view(self, view: View) -> View | None:
        """`view` of the padded buffer; None if it has no constant strides there."""
        names = [f"d{number}" for number in range(len(view.shape))]
        ranges = dict(zip(names, view.shape, strict=True))
        index = total(var(name) * stride for name, stride in zip(names, view.strides, strict=True)) + view.offset
        index = self.index(index, ranges)
        strides = [index.coefficient(name) for name in names]
        if any(stride is None or stride.vars() for stride in strides) or _divided(index):
            return None
        offset = index
        for name in names:
            offset = offset.without(name)
        return replace(view, strides=tuple(stride for stride in strides if stride is not None), offset=offset)

    def node(self, node: Node) -> Kernel | None:
        """The kernel on the padded buffer; None if an index would need a division."""
        assert isinstance(node, Kernel)
        body = tuple(self._line(line, node.ranges) for line in node.body)
        params = {param.name: param for param in node.params}
        params[self.buffer] = replace(params[self.buffer], numel=self.numel(params[self.buffer].numel))
        kernel = split_axes(replace(node, body=body, params=tuple(params.values())))
        accesses = (line.rhs for line in kernel.body if isinstance(line.rhs, Load | Store))
        if any(access.buffer == self.buffer and _divided(access.index) for access in accesses):
            return None
        return canonical_kernel(kernel)

    def _line(self, line: Line, ranges: Mapping[str, Expr]) -> Line:
        if not isinstance(line.rhs, Load | Store) or line.rhs.buffer != self.buffer:
            return line
        return replace(line, rhs=replace(line.rhs, index=self.index(line.rhs.index, ranges)))


def find_walks(kernel: Kernel, temporaries: Collection[str], machine: Machine) -> list[Walk]:
    """The kernel's reads across rows that map to few sets; unknown sizes are estimated."""
    params = {param.name: param for param in kernel.params if param.name in temporaries}
    contraction = find_contraction(kernel)
    if contraction is not None:
        param = params.get(contraction.loads[0].buffer)
        walks = [_copied(contraction, param, machine)] if param else []
    else:
        loads = [load for _, load in kernel.loads() if load.buffer in params]
        walks = [_column_walk(kernel, load, params[load.buffer], machine) for load in loads]
    return list({walk.buffer: walk for walk in walks if walk is not None}.values())


def _copied(contraction: Contraction, param: Param, machine: Machine) -> Walk | None:
    """The walk of a product that copies its left operand because rows map to one set of the first cache."""
    load, _ = contraction.loads
    steps = [load.index.coefficient(name) for name in contraction.rows]
    row = min((step.value for step in steps if step is not None and step.value), default=0)
    contiguous = any(load.index.coefficient(name) == ONE for name in contraction.inner)
    numel = estimate(param.numel)
    if contraction.windowed or not contiguous or not row:
        return None
    if row * param.dtype.itemsize % SAME_SET or numel <= FEW_ROWS * row:
        return None
    size = numel * param.dtype.itemsize
    why = f"rows of {row} elements map to one set of the first cache: a product would copy them"
    return Walk(param.name, row, moving(machine, size, size, size) / machine.cores, why)


def _column_walk(kernel: Kernel, load: Load, param: Param, machine: Machine) -> Walk | None:
    """The walk of a reduction over columns, several times, which have been evicted from the second cache in between."""
    steps = {name: load.index.coefficient(name) for name in kernel.ranges}
    known = {name: step.value or 0 for name, step in steps.items() if step is not None}
    down = [name for name in kernel.reduced if known.get(name, 0) > 0]
    if not down or any(known[name] == 1 for name in down) or 1 not in known.values() or load.mask is not None:
        return None
    row, rows = min((known[name], estimate(kernel.ranges[name])) for name in down)
    again, own = sweeps(kernel, param.name) - 1, machine.own_level
    if again < 1 or rows < own.holds(row * param.dtype.itemsize) or rows * COLUMN_BYTES > own.size:
        return None
    size = estimated_bytes(param)
    outer = machine.level(max(size, own.size + 1))
    saved = again * size * (1 / outer.read.one - 1 / own.read.one) / machine.cores
    why = f"{rows} rows of {row} elements keep a column in the second cache between {again + 1} sweeps over it"
    return Walk(param.name, row, saved, why) if saved > 0 else None


def sweeps(kernel: Kernel, buffer: str) -> int:
    """How many times the kernel sweeps over `buffer`: once before a reduction, and again with its result."""
    reduced, scopes, depth = set(kernel.reduced), axes_of(kernel), depth_of(kernel)
    dependent: set[str] = set()
    for line in kernel.body:
        loaded = isinstance(line.rhs, Load) and line.rhs.buffer == buffer
        if (loaded or not dependent.isdisjoint(operands(line.rhs))) and scopes[line.out] & reduced:
            dependent.add(line.out)
    return len({depth[name] for name in dependent})


def _fixed(program: Program) -> dict[str, str]:
    """The buffers whose layout must not change, each with the reason."""
    found: dict[str, str] = {view.buffer: "it is a result" for view in program.outputs if isinstance(view, View)}
    for node in program.nodes:
        if not isinstance(node, Kernel):
            why = f"{node.name} requires its layout"
        elif find_attention(node) is not None:
            why = "attention packs its operands, and gains nothing"
        elif (contraction := find_contraction(node)) is not None and contraction.windowed:
            why = "a convolution reads or writes it"
        else:
            accesses = (line.rhs for line in node.body if isinstance(line.rhs, Load | Store))
            found |= {each.buffer: "an index depends on values" for each in accesses if each.index.vals()}
            continue
        found |= dict.fromkeys((*reads(node), *writes(node)), why)
    return found


def _divided(index: Expr) -> bool:
    return any(isinstance(atom, FloorDiv | Mod) for atom in index.atoms())


def _axes(node: Node | None) -> int:
    return len(node.space) if isinstance(node, Kernel) else 0
