"""In which sweep over the reduced axes each line runs, and which values are saved from one sweep for the next.

A line's depth is the number of nested reductions it depends on. Softmax has three sweeps: for the maximum, the sum of
the exponentials, and the quotient.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pellucid.ir.analysis import depth_of
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Compute, Kernel, Line, Load, Reduce, Store, axes_of, operands
from pellucid.ir.ops import EXPENSIVE, OPS
from pellucid.machine.work import estimate

SCRATCH_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Sweep:
    """One pass over the reduced axes.

    lines: the lines it evaluates, in order, stores last. keep: those that it saves to scratch memory for a later sweep.
    recall: values that it reads from scratch memory.
    """

    lines: tuple[str, ...]
    keep: tuple[str, ...]
    recall: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The depth of each line, the sweeps in their order, and why values are saved or recomputed."""

    depth: Mapping[str, int]
    order: tuple[Sweep, ...]
    decisions: tuple[Decision, ...]


def plan_sweeps(kernel: Kernel, lanes_kept: int, gathered: Set[str] = frozenset()) -> Sweeps:
    """Distribute the lines of a kernel over sweeps.

    lanes_kept: lanes of a kept vector axis (1 if there is none): scratch memory is needed for each of them.
    gathered: loads whose lanes are not adjacent in memory.
    """
    depth = depth_of(kernel)
    depends = axes_of(kernel)
    reduced = frozenset(kernel.reduced)
    by_name = {line.out: line for line in kernel.body}
    roots = _roots(kernel, depth, depends, reduced)
    count = max(roots.values(), default=-1) + 1
    evaluated: list[dict[str, None]] = []
    keep: list[dict[str, None]] = []
    recalled: list[dict[str, None]] = []
    decisions: dict[str, Decision] = {}

    for now in range(count):
        lines: dict[str, None] = {}
        recall: dict[str, None] = {}
        stack = [name for name, sweep in roots.items() if sweep == now]
        while stack:
            name = stack.pop()
            if name in lines or name in recall:
                continue
            home = next((k for k, before in enumerate(evaluated) if name in before), None)
            if home is not None:
                decision = _keep_or_repeat(kernel, by_name[name], by_name, depends, reduced, lanes_kept, gathered)
                decisions.setdefault(name, decision)
                if decision.ok:
                    keep[home][name] = None
                    recall[name] = None
                    continue
            lines[name] = None
            for operand in operands(by_name[name].rhs):
                if depends[operand] & reduced:
                    stack.append(operand)
        evaluated.append(lines)
        keep.append({})
        recalled.append(recall)

    order = {line.out: (isinstance(line.rhs, Store), k) for k, line in enumerate(kernel.body)}
    sweeps = tuple(
        Sweep(*(tuple(sorted(names, key=lambda name: order[name])) for names in (lines, kept, recall)))
        for lines, kept, recall in zip(evaluated, keep, recalled, strict=True)
    )
    decided = tuple(decision for decision in decisions.values() if decision.facts or decision.ok)
    return Sweeps(depth, sweeps, decided)


def _roots(
    kernel: Kernel, depth: Mapping[str, int], depends: Mapping[str, frozenset[str]], reduced: frozenset[str]
) -> dict[str, int]:
    """The lines that require a sweep (reductions, and stores over reduced axes), and the sweep of each.

    A store to a buffer that is also loaded runs in the last sweep, so that no sweep loads what an earlier one stored.
    """
    loaded = {load.buffer for _, load in kernel.loads()}
    roots: dict[str, int] = {}
    for line in kernel.body:
        if isinstance(line.rhs, Reduce):
            roots[line.out] = depth[line.out] - 1
        elif isinstance(line.rhs, Store) and depends[line.out] & reduced:
            roots[line.out] = depth[line.out]
    last = max(roots.values(), default=0)
    for line in kernel.body:
        if line.out in roots and isinstance(line.rhs, Store) and line.rhs.buffer in loaded:
            roots[line.out] = last
    return roots


def _keep_or_repeat(
    kernel: Kernel,
    line: Line,
    by_name: dict[str, Line],
    depends: Mapping[str, frozenset[str]],
    reduced: frozenset[str],
    lanes_kept: int,
    gathered: Set[str],
) -> Decision:
    """Whether a value that several sweeps need is saved in scratch memory or recomputed."""
    seen: set[str] = set()
    stack = [line.out]
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack += [operand for operand in operands(by_name[name].rhs) if depends[operand] & reduced]
    work = sum(_repeat_cost(by_name[name], gathered) for name in seen)
    size = scratch_elements(kernel, depends[line.out]) * line.dtype.itemsize * lanes_kept
    static = all(axis.extent.value is not None for axis in kernel.space if axis.name in reduced)
    rule, subject = "codegen.keep", (kernel.name, line.out)
    if work < EXPENSIVE:
        return Decision(rule, subject, False, "computing it again is cheap")
    facts = (("work", work), ("bytes", size))
    if not static:
        return Decision(rule, subject, False, "its size is not known when the kernel is compiled", facts)
    if size > SCRATCH_BYTES:
        return Decision(rule, subject, False, f"it would need more than {SCRATCH_BYTES} bytes of scratch memory", facts)
    return Decision(rule, subject, True, "computing it again in a later sweep is expensive", facts)


def _repeat_cost(line: Line, gathered: Set[str]) -> int:
    match line.rhs:
        case Compute(op):
            return OPS[op].cost
        case Load(_, index) if index.vals() or line.out in gathered:
            return EXPENSIVE
        case _:
            return 0


def scratch_elements(kernel: Kernel, axes: frozenset[str]) -> int:
    """Points of the reduced axes among `axes`."""
    size = 1
    for axis in kernel.space:
        if axis.name in kernel.reduced and axis.name in axes:
            size *= estimate(axis.extent)
    return size
