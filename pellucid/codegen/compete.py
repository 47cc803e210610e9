"""Which kernels of a program are built in several ways: those that take part of its time and have plans that are close.

k of 8% has two plans, 64 and 32 lanes  ->  k with the other one in `others`; calls find out which is the faster
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from pellucid.ir.decision import Decision
from pellucid.ir.nodes import Kernel
from pellucid.machine import Machine, kernel_work, time

if TYPE_CHECKING:
    from pellucid.codegen import CppKernel

OFF, ON = "off", "on"
"""Values of the option `variants`; all others force one, see `_forced`."""

LEAST_SHARE = 0.02
"""The part of a program's time, by price, from which on a kernel is worth compiling twice."""

MOST = 3
"""Others that are tried."""


def compete(
    kernels: Mapping[str, CppKernel],
    nodes: Iterable[Kernel],
    all_of: Callable[[Kernel], Iterator[CppKernel]],
    asked: str,
    machine: Machine,
) -> tuple[dict[str, CppKernel], tuple[Decision, ...]]:
    """`kernels`, by the names of `nodes`, with the others that are tried or, if one of them is forced, that one.

    all_of: a kernel in all ways. asked: the option `variants`.
    """
    if asked == OFF:
        return dict(kernels), ()
    spent: dict[str, float] = {}
    for node in nodes:
        kernel = kernels[node.name]
        taken = time(kernel_work(node, kernel.plan.steps), machine, machine.cores).nanoseconds
        spent[kernel.name] = spent.get(kernel.name, 0.0) + taken
    whole = sum(spent.values())
    found: dict[str, CppKernel] = {}
    decisions: list[Decision] = []
    for node in nodes:
        kernel = kernels[node.name]
        refusal = _refusal(kernel, spent[kernel.name] / whole)
        others = () if refusal else tuple(islice(_others(kernel, all_of(node)), MOST))
        found[node.name], decision = _decided(node.name, replace(kernel, others=others), refusal, asked)
        decisions.append(decision)
    return found, tuple(decisions)


def _refusal(kernel: CppKernel, share: float) -> str:
    """Why other ways to run a kernel are not looked for; empty if they are."""
    if share < LEAST_SHARE:
        return f"it takes {share:.1%} of the program by its price, too little to be compiled twice"
    return "its sizes are not known" if kernel.symbols else ""


def _others(first: CppKernel, ways: Iterator[CppKernel]) -> Iterator[CppKernel]:
    """Different ones that are called as the first is."""
    seen = {first.name}
    for each in ways:
        if each.name not in seen and (each.params, each.offsets, each.checks) == (
            first.params,
            first.offsets,
            first.checks,
        ):
            seen.add(each.name)
            yield each


def _decided(name: str, kernel: CppKernel, refusal: str, asked: str) -> tuple[CppKernel, Decision]:
    rule, ways = "codegen.variants", kernel.ways
    facts = tuple((each.name, each.plan.way) for each in ways)
    if not kernel.others:
        return kernel, Decision(rule, (name,), False, refusal or "no plan with the same bits is close to it by price")
    forced = _forced(ways, asked)
    if forced is not None:
        return replace(forced, others=()), Decision(rule, (name,), True, f"the option asks for {forced.name}", facts)
    why = f"{len(ways)} plans are close by their price: the first calls find out which is the fastest"
    return kernel, Decision(rule, (name,), True, why, facts)


def _forced(ways: tuple[CppKernel, ...], asked: str) -> CppKernel | None:
    """The way that is asked for: by its name, of several that commas part, or by its place, the cheapest being 0."""
    if asked.isdigit():
        return ways[min(int(asked), len(ways) - 1)]
    return next((each for each in ways if each.name in asked.split(",")), None)
