"""Values that depend only on inner axes are computed once, in a separate kernel, instead of again for each outer point.

Code generation hoists a line out of loops inside those that it depends on, but not out of the loops around them:

    before: `y[i, c] = x[i, c] * rsqrt(var[c])`    for each of 50176 rows i
    after:  `row[c] = rsqrt(var[c])`
            `y[i, c] = x[i, c] * row[c]`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pellucid.ir.decision import Decision
from pellucid.ir.index import product
from pellucid.ir.nodes import (
    Axis,
    Buffer,
    CheckIndex,
    Compute,
    Kernel,
    Line,
    Load,
    Node,
    Param,
    Program,
    Reduce,
    Store,
    axes_of,
    operands,
)
from pellucid.ir.ops import EXPENSIVE
from pellucid.machine import Machine, issuing, moving, starting
from pellucid.machine.work import estimate, evaluations, op_cost
from pellucid.schedule.cleanup import clean_kernel
from pellucid.schedule.rewrite import make_kernel, row_major, unique_name

STEP = "hoist"
# Maximum elements of a row: a larger one would not stay in the first caches.
_MAX_ROW = 16384


def hoist(program: Program, machine: Machine) -> tuple[Program, list[Decision]]:
    """`program`, whose kernels are in canonical form, with expensive rows computed once, in separate kernels."""
    nodes: list[Node] = []
    buffers = list(program.buffers)
    decisions: list[Decision] = []
    taken = {*program.symbols, *(buffer.name for buffer in buffers), *(node.name for node in program.nodes)}
    for node in program.nodes:
        while isinstance(node, Kernel):
            found = find_rows(node, machine)
            best = next((rows for rows in found if rows.decision.ok), None)
            if best is None:
                decisions += [rows.decision for rows in found]
                break
            first, node, made = best.extract(taken)  # the rest is renamed: it is searched for rows again
            nodes.append(first)
            buffers += made
            decisions.append(best.decision)
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=tuple(buffers)), decisions


@dataclass(frozen=True, slots=True)
class Rows:
    """Values over `axes` that the rest of `kernel` uses repeatedly, and whether a separate kernel for them pays."""

    kernel: Kernel
    axes: tuple[Axis, ...]
    values: tuple[Line, ...]
    decision: Decision

    def extract(self, taken: set[str]) -> tuple[Kernel, Kernel, list[Buffer]]:
        """The kernel that stores the values, the one that loads them, and the buffers between the two."""
        kernel = self.kernel
        params = {param.name: param for param in kernel.params}
        index, numel = row_major(self.axes), product(axis.extent for axis in self.axes)
        made: list[Buffer] = []
        loads: dict[str, Line] = {}
        stores: list[Line] = []
        for line in self.values:
            buffer = Buffer(unique_name(f"{kernel.name}_row", taken), line.dtype, numel, "temp")
            made.append(buffer)
            params[buffer.name] = Param(buffer.name, line.dtype, numel)
            origin = line.origin.step(STEP)
            loads[line.out] = replace(line, rhs=Load(buffer.name, index), origin=origin)
            stores.append(Line(f"{line.out}.store", Store(buffer.name, index, line.out), line.dtype, origin))
        body = [*_needed_by(self.values, kernel), *stores]
        first = make_kernel(unique_name(f"{kernel.name}_rows", taken), self.axes, body, params)
        rest = tuple(loads.get(line.out, line) for line in kernel.body)
        return clean_kernel(first), clean_kernel(make_kernel(kernel.name, kernel.space, rest, params)), made


def find_rows(kernel: Kernel, machine: Machine) -> list[Rows]:
    """The rows of a kernel that are expensive to compute, by the axes that they depend on."""
    scopes, movable = axes_of(kernel), _movable(kernel)
    users: dict[frozenset[str], dict[str, Line]] = {}
    lines = {line.out: line for line in kernel.body}
    for line in kernel.body:
        for name in operands(line.rhs):
            value = lines[name]
            if not isinstance(value.rhs, Compute) or not value.dtype.is_float:
                continue  # masks and positions are cheaper to compute than to load
            if name in movable and scopes[name] < scopes[line.out]:
                users.setdefault(scopes[name], {})[name] = value
    found = (_weigh(kernel, scopes, scope, tuple(values.values()), machine) for scope, values in users.items() if scope)
    return [rows for rows in found if rows is not None]


def _movable(kernel: Kernel) -> set[str]:
    """Lines that have the same value before the kernel: they need no reduction and no buffer that it stores."""
    stored = {store.buffer for _, store in kernel.stores()}
    movable: set[str] = set()
    for line in kernel.body:
        match line.rhs:
            case Reduce() | Store() | CheckIndex():
                continue
            case Load(buffer, index) if buffer in stored or index.vals():
                continue
            case _ if all(name in movable for name in operands(line.rhs)):
                movable.add(line.out)
            case _:
                continue
    return movable


def _weigh(
    kernel: Kernel,
    scopes: Mapping[str, frozenset[str]],
    scope: frozenset[str],
    values: tuple[Line, ...],
    machine: Machine,
) -> Rows | None:
    """The rows over the axes `scope`, and whether a kernel for them pays; None if they are cheap."""
    axes = tuple(axis for axis in kernel.space if axis.name in scope)
    points = estimate(product(axis.extent for axis in axes))
    times = estimate(evaluations(scope, kernel.space)) // max(points, 1)
    cost = sum(op_cost(line.rhs) for line in _needed_by(values, kernel) if scopes[line.out] == scope)
    if times < 2 or cost < EXPENSIVE:
        return None
    nbytes, threads = points * sum(line.dtype.itemsize for line in values), machine.cores
    spent = starting(machine, threads) + moving(machine, nbytes, nbytes, nbytes)
    saved = issuing(machine, cost * points * (times - 1) / machine.lanes, threads)
    names = ", ".join(axis.name for axis in axes)
    facts = (("ns_saved", round(saved)), ("ns_spent", round(spent)), ("values", len(values)))

    def rows(ok: bool, why: str) -> Rows:
        return Rows(kernel, axes, values, Decision("schedule.hoist", (kernel.name,), ok, why, facts))

    if points > _MAX_ROW:
        return rows(False, f"{points} points of {names} are too many to stay in the cache")
    if saved <= spent:
        return rows(False, f"computing what depends only on {names} {times} times costs less than another kernel")
    return rows(True, f"what depends only on {names} is computed once instead of {times} times")


def _needed_by(values: Iterable[Line], kernel: Kernel) -> list[Line]:
    """The values and all lines that they depend on, in order."""
    needed = {line.out for line in values}
    kept: list[Line] = []
    for line in reversed(kernel.body):
        if line.out in needed:
            needed.update(operands(line.rhs))
            kept.append(line)
    return kept[::-1]
