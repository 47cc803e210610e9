"""Which kernels of a program get variants: those with a relevant share of its time and other plans of similar cost.

A kernel of 8% with two plans, of 64 and 32 lanes, gets the second one in `others`; calls find out which is faster.
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

MIN_SHARE = 0.02
"""The share of a program's estimated time from which on a kernel is worth compiling twice."""

MAX_OTHERS = 3
"""Maximum number of variants in addition to the first."""


def compete(
    kernels: Mapping[str, CppKernel],
    nodes: Iterable[Kernel],
    all_of: Callable[[Kernel], Iterator[CppKernel]],
    option: str,
    machine: Machine,
) -> tuple[dict[str, CppKernel], tuple[Decision, ...]]:
    """`kernels`, by the names of `nodes`, each with its variants, or replaced by the variant that the option forces.

    all_of: all variants of a kernel. option: the option `variants`.
    """
    if option == OFF:
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
        others = () if refusal else tuple(islice(_others(kernel, all_of(node)), MAX_OTHERS))
        found[node.name], decision = _decided(node.name, replace(kernel, others=others), refusal, option)
        decisions.append(decision)
    return found, tuple(decisions)


def _refusal(kernel: CppKernel, share: float) -> str:
    """Why a kernel gets no variants; empty if it may get some."""
    if share < MIN_SHARE:
        return f"it takes about {share:.1%} of the program's time, too little to be compiled twice"
    return "its sizes are not known" if kernel.symbols else ""


def _others(first: CppKernel, variants: Iterator[CppKernel]) -> Iterator[CppKernel]:
    """The distinct variants that are called with the same arguments as the first."""
    seen = {first.name}
    for each in variants:
        if each.name not in seen and (each.params, each.offsets, each.checks) == (
            first.params,
            first.offsets,
            first.checks,
        ):
            seen.add(each.name)
            yield each


def _decided(name: str, kernel: CppKernel, refusal: str, option: str) -> tuple[CppKernel, Decision]:
    rule, variants = "codegen.variants", kernel.variants
    facts = tuple((each.name, each.plan.way) for each in variants)
    if not kernel.others:
        return kernel, Decision(rule, (name,), False, refusal or "no plan with the same bits has about the same cost")
    forced = _forced(variants, option)
    if forced is not None:
        return replace(forced, others=()), Decision(rule, (name,), True, f"the option selects {forced.name}", facts)
    why = f"{len(variants)} plans are close by estimated cost: the first calls find out which is the fastest"
    return kernel, Decision(rule, (name,), True, why, facts)


def _forced(variants: tuple[CppKernel, ...], option: str) -> CppKernel | None:
    """The variant that the option names, as one of several comma-separated names or by its rank (0: the cheapest)."""
    if option.isdigit():
        return variants[min(int(option), len(variants) - 1)]
    return next((each for each in variants if each.name in option.split(",")), None)
