"""The codegen stage: a kernel of the loop IR becomes a C++ function.

    copies -> canonical -> space -> plan (vector, tiles, stages) -> loops -> cpp

Each step is a value in, value out function in its own file; `plan` chooses, `cpp` prints.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from pellucid.codegen.canonical import Canonical, canonical_symbol, canonicalise
from pellucid.codegen.copies import raw_copies
from pellucid.codegen.cpp import print_kernel
from pellucid.codegen.linemap import annotate_source
from pellucid.codegen.loops import nest
from pellucid.codegen.plan import Plan, make_plan
from pellucid.codegen.space import simplify
from pellucid.codegen.target import Target, host
from pellucid.codegen.vector import base_lanes
from pellucid.ir.decision import Decision
from pellucid.ir.index import Atom, Expr, Sym, sym
from pellucid.ir.nodes import CheckIndex, Compute, Kernel, Reduce
from pellucid.ir.origin import Origin
from pellucid.options import Options

__all__ = ["CppKernel", "Plan", "Target", "annotate", "generate", "host"]

NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class CppKernel:
    """A kernel as C++ text, and what is needed to call it.

    name: C symbol, made from the content. Equal kernels over different buffers have equal names and sources.
    source: the text that follows `#include "prelude.h"`.
    params: names of the buffers whose pointers make up `p`. symbols: names of the sizes that make up `s`.
    extent: number of parallel iterations. grain: the least of them that are worth a thread.
    checks: the dimension that each index check is about, and the check's origin.
    line_map: origin of each line of the source.
    """

    name: str
    source: str
    params: tuple[str, ...]
    symbols: tuple[str, ...]
    extent: Expr
    grain: int
    checks: tuple[tuple[int, Origin], ...]
    line_map: tuple[Origin, ...]
    plan: Plan
    decisions: tuple[Decision, ...]


def generate(kernel: Kernel, options: Options, target: Target | None = None) -> CppKernel:
    """Vectorised C++ for `kernel`, on this machine unless another `target` is given."""
    target = target or host()
    named = canonicalise(raw_copies(kernel))
    simple = canonicalise(simplify(named.kernel, base_lanes(named.kernel, target))).after(named)
    plan = make_plan(simple.kernel, target, options)
    items = nest(plan)
    text = print_kernel(plan, items, "NAME").source
    name = f"{_stem(kernel)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    written = print_kernel(plan, items, name)
    original: dict[Atom, Expr] = {Sym(canonical_symbol(old, k)): sym(old) for k, old in enumerate(simple.symbols)}
    return CppKernel(
        name=name,
        source=written.source,
        params=simple.buffers,
        symbols=simple.symbols,
        extent=plan.extent.substitute(original),
        grain=plan.grain,
        checks=tuple((line.rhs.dim, line.origin) for line in plan.kernel.body if isinstance(line.rhs, CheckIndex)),
        line_map=tuple(written.origins),
        plan=plan,
        decisions=tuple(_with_original_names(decision, simple) for decision in plan.decisions),
    )


def _with_original_names(decision: Decision, canonical: Canonical) -> Decision:
    """Decisions are about the names that the caller knows: those of its buffers and values."""
    names = {f"p{k}": old for k, old in enumerate(canonical.buffers)}
    names |= {f"v{k}": old for k, old in enumerate(canonical.values)}
    first, *rest = decision.subject
    return replace(decision, subject=(first, *(names.get(name, name) for name in rest)))


def annotate(kernel: CppKernel) -> str:
    """The source of a kernel with the FX nodes and user lines of each line as a trailing comment."""
    return annotate_source(kernel.source, kernel.line_map)


def _stem(kernel: Kernel) -> str:
    """`k_` and the operators of the kernel in order, as many as fit in a name."""
    stem = "k"
    told: set[str] = set()
    for line in kernel.body:
        if isinstance(line.rhs, Compute | Reduce) and line.rhs.op != "cast" and line.rhs.op not in told:
            told.add(line.rhs.op)
            if len(stem) + len(line.rhs.op) + 1 <= NAME_LENGTH - 13:
                stem += f"_{line.rhs.op}"
    return stem if told else "k_copy"
