"""The codegen stage: a kernel of the loop IR becomes a C++ function.

    copies -> names -> space -> offsets
        -> plan (vector, tiles, sweeps), contraction (blocks) or attention (rows) -> loops -> cpp
                                                                                  -> reach

Each step is a pure function in its own file: `plan` makes every choice, `variants` finds plans of about the same
estimated cost, `cpp` only prints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from pellucid.codegen.attention import plan_attention
from pellucid.codegen.compete import compete
from pellucid.codegen.contraction import compared_with_loops, plan_contraction
from pellucid.codegen.copies import raw_copies
from pellucid.codegen.cpp import print_kernel
from pellucid.codegen.linemap import annotate_source
from pellucid.codegen.loops import nest
from pellucid.codegen.names import Canonical, canonical_symbol, canonicalise, restore
from pellucid.codegen.nest import Nest
from pellucid.codegen.offsets import from_first_touched
from pellucid.codegen.operands import print_packing
from pellucid.codegen.plan import Plan
from pellucid.codegen.prefix import plan_prefix
from pellucid.codegen.reach import Reaches, reaches
from pellucid.codegen.roles import Roles
from pellucid.codegen.space import simplify
from pellucid.codegen.variants import plan_loops
from pellucid.codegen.vector import base_lanes
from pellucid.ir.decision import Decision
from pellucid.ir.index import Atom, Expr, Sym, sym
from pellucid.ir.nodes import CheckIndex, Compute, Kernel, Reduce
from pellucid.ir.origin import Origin
from pellucid.machine import Machine
from pellucid.options import Options

__all__ = [
    "CppKernel",
    "CppPacking",
    "Plan",
    "Roles",
    "annotate",
    "compete",
    "functions_of",
    "generate",
    "generate_all",
    "packings_of",
    "unstreamed",
]

NAME_LENGTH = 60
NO_ROLES = Roles()
_NAME = "NAME"  # placeholder for a function's name, which is a hash of its text


@dataclass(frozen=True, slots=True)
class CppPacking:
    """A function that packs a buffer for a kernel, once before the program runs.

    name, source: like those of `CppKernel`; `p[0]` is the buffer, `p[1]` the panels: `numel` f32.
    """

    buffer: str
    name: str
    source: str
    numel: int

    @property
    def panels(self) -> str:
        """The name of the packed buffer among a program's inputs."""
        return f"{self.buffer}.{self.name}"


@dataclass(frozen=True, slots=True)
class CppKernel:
    """A kernel as C++ text, and what is needed to call it.

    name: C symbol, derived from the content. Equal kernels over different buffers have equal names and sources.
    source: the text that follows `#include "prelude.h"`.
    params: names of the buffers whose pointers `p` holds. offsets: the element at which each of them begins.
    symbols: names of the sizes that `s` holds.
    packing: how the parameter that it reads packed is packed; that parameter has the name of the panels.
    extent: number of parallel iterations. grain: the minimum number of iterations that are worth a thread.
    checks: the dimension that each index check is about, and the check's origin.
    line_map: origin of each line of the source.
    computes: the whole kernel, over `p0`, `p1` and so on; `plan.kernel` may be only the part that runs over each block.
    others: variants with the same parameters, bitwise equal results and about the same estimated cost.
    """

    name: str
    source: str
    params: tuple[str, ...]
    offsets: tuple[int, ...]
    symbols: tuple[str, ...]
    extent: Expr
    grain: int
    checks: tuple[tuple[int, Origin], ...]
    line_map: tuple[Origin, ...]
    plan: Plan
    decisions: tuple[Decision, ...]
    computes: Kernel
    packing: CppPacking | None = None
    others: tuple[CppKernel, ...] = ()

    @property
    def variants(self) -> tuple[CppKernel, ...]:
        """All variants of the kernel, this one first."""
        return (self, *self.others)

    @property
    def nest(self) -> Nest:
        """Its loop nest, over `p0`, `p1` and so on."""
        return nest(self.plan)

    def nest_of(self, name: str) -> Nest:
        """Its loop nest under the program's names, as the kernel `name`; packed buffers appear unpacked."""
        packed = {self.packing.panels: self.packing.buffer} if self.packing else {}
        buffers = [packed.get(each, each) for each in self.params]
        return restore(self.nest, name, buffers, self.offsets, self.symbols)

    @property
    def reaches(self) -> Reaches | None:
        """Which elements each of its iterations touches, see `codegen/reach.py`."""
        return reaches(self.computes, self.plan, self.offsets)

    @property
    def streamed(self) -> frozenset[str]:
        """Buffers that it writes with non-temporal stores, past the caches."""
        return frozenset(self.params[int(name[1:])] for name in self.plan.streamed)


def generate(kernel: Kernel, options: Options, machine: Machine, roles: Roles = NO_ROLES) -> CppKernel:
    """Vectorised C++ for `kernel`: the plan that is cheapest on `machine`, in its instruction set."""
    return next(generate_all(kernel, options, machine, roles))


def generate_all(kernel: Kernel, options: Options, machine: Machine, roles: Roles = NO_ROLES) -> Iterator[CppKernel]:
    """Like `generate`, followed by variants: other plans of similar cost with bitwise equal results."""
    named = canonicalise(raw_copies(kernel))
    simple = canonicalise(simplify(named.kernel, base_lanes(named.kernel, machine))).after(named)
    mine = roles.renamed({name: f"p{k}" for k, name in enumerate(simple.buffers)})
    part, offsets = from_first_touched(simple.kernel, mine.frozen)
    for plan in _plans(part, machine, options, mine):
        yield _written(kernel, part, replace(plan, guarded=mine.given), simple, offsets, machine)


def _plans(kernel: Kernel, machine: Machine, options: Options, roles: Roles) -> Iterator[Plan]:
    attention = plan_attention(kernel, machine, options)
    whole = attention or plan_prefix(kernel, machine, options)
    if whole is not None:
        yield whole
        return
    blocks, decisions = plan_contraction(kernel, machine, options, roles), tuple[Decision, ...]()
    first = next(blocks, None)
    if first is not None:
        decisions = compared_with_loops(kernel, first, machine)
        if all(each.ok for each in decisions):
            yield replace(first, decisions=(*first.decisions, *decisions))
            yield from blocks
            return
    for plan in plan_loops(kernel, machine, options):
        yield replace(plan, decisions=(*decisions, *plan.decisions))


def _written(
    kernel: Kernel, part: Kernel, plan: Plan, simple: Canonical, offsets: tuple[int, ...], machine: Machine
) -> CppKernel:
    packing = _packing(plan, simple, machine)
    name, source, line_map = _printed(_stem(kernel), plan)
    original: dict[Atom, Expr] = {Sym(canonical_symbol(old, k)): sym(old) for k, old in enumerate(simple.symbols)}
    return CppKernel(
        name=name,
        source=source,
        params=tuple(packing.panels if packing and name == packing.buffer else name for name in simple.buffers),
        offsets=offsets,
        symbols=simple.symbols,
        extent=plan.extent.substitute(original),
        grain=plan.grain,
        checks=tuple((line.rhs.dim, line.origin) for line in plan.kernel.body if isinstance(line.rhs, CheckIndex)),
        line_map=line_map,
        plan=plan,
        decisions=tuple(_with_original_names(decision, simple) for decision in plan.decisions),
        computes=part,
        packing=packing,
    )


def unstreamed(kernel: CppKernel, buffers: Collection[str]) -> CppKernel:
    """The kernel with ordinary stores to these buffers, instead of stores past the caches."""
    names = {f"p{k}" for k, name in enumerate(kernel.params) if name in buffers}
    plan = replace(kernel.plan, streamed=kernel.plan.streamed - names)
    name, source, line_map = _printed(kernel.name.rpartition("_")[0], plan)
    return replace(kernel, name=name, source=source, line_map=line_map, plan=plan)


def _printed(stem: str, plan: Plan) -> tuple[str, str, tuple[Origin, ...]]:
    """A function's name, its source, and the origin of each line."""
    written = print_kernel(plan, nest(plan), _NAME)
    name = f"{stem}_{_digest(written.source)}"
    return name, written.source.replace(_NAME, name, 1), tuple(written.origins)


def _packing(plan: Plan, simple: Canonical, machine: Machine) -> CppPacking | None:
    found = plan.blocks and plan.blocks.packing()
    if not found:
        return None
    numel = found.numel(machine)
    text = print_packing(found, numel, _NAME)
    name = f"pack_{_digest(text)}"
    buffer = simple.buffers[int(found.operand.buffer[1:])]
    return CppPacking(buffer, name, text.replace(_NAME, name, 1), numel)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _with_original_names(decision: Decision, canonical: Canonical) -> Decision:
    """The decision with the caller's names of buffers and values in its subject."""
    names = {f"p{k}": old for k, old in enumerate(canonical.buffers)}
    names |= {f"v{k}": old for k, old in enumerate(canonical.values)}
    first, *rest = decision.subject
    return replace(decision, subject=(first, *(names.get(name, name) for name in rest)))


def packings_of(kernels: Mapping[str, CppKernel]) -> list[CppPacking]:
    """The distinct packings of these kernels."""
    return list({kernel.packing.panels: kernel.packing for kernel in kernels.values() if kernel.packing}.values())


def functions_of(kernels: Mapping[str, CppKernel]) -> list[CppKernel | CppPacking]:
    """All functions to build: the kernels, their variants, and the packing functions."""
    return [*(each for kernel in kernels.values() for each in kernel.variants), *packings_of(kernels)]


def annotate(kernel: CppKernel) -> str:
    """The source of a kernel with the FX nodes and user lines of each line as a trailing comment."""
    return annotate_source(kernel.source, kernel.line_map)


def _stem(kernel: Kernel) -> str:
    """`k_` and the operators of the kernel in order, as many as fit in a name."""
    stem = "k"
    named: set[str] = set()
    for line in kernel.body:
        if isinstance(line.rhs, Compute | Reduce) and line.rhs.op != "cast" and line.rhs.op not in named:
            named.add(line.rhs.op)
            if len(stem) + len(line.rhs.op) + 1 <= NAME_LENGTH - 13:
                stem += f"_{line.rhs.op}"
    return stem if named else "k_copy"
