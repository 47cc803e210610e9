"""Plan a prefix sum: the innermost loop, over its axis, adds the term of each point to a running sum."""

from __future__ import annotations

from dataclasses import replace

from pellucid.codegen.plan import Plan, make_plan
from pellucid.codegen.vector import choose, gathered
from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Kernel, axes_of
from pellucid.ir.prefix import find_prefix
from pellucid.machine import Machine
from pellucid.machine.tiles import Tiling
from pellucid.options import Options


def plan_prefix(kernel: Kernel, machine: Machine, options: Options) -> Plan | None:
    """The plan of a kernel that is a prefix sum; None for any other."""
    prefix = find_prefix(kernel)
    if prefix is None:
        return None
    several = len(prefix.kernel.space) > 1
    choice = choose(prefix.kernel, machine, options.vectorize and several, serial=prefix.axis)
    wide = frozenset(name for name, axes in axes_of(prefix.kernel).items() if choice.axis in axes)
    if gathered(prefix.kernel, choice.axis, wide):
        choice = choose(prefix.kernel, machine, False)
    plan = make_plan(prefix.kernel, machine, options, replace(choice, tiles=Tiling()), prefix)
    why = f"each point along {prefix.axis} adds its term to the sum of all preceding points"
    return replace(plan, decisions=(*plan.decisions, Decision("codegen.prefix", (kernel.name,), True, why)))
