"""Planted faults: programs whose compiled form is wrong because a part of the compiler was changed at run time.

Each name in `FAULTS` is also a function of this module, so that `tests/kit/planted.py:pellucid_neg_wrong` is a target
for every command of the kit: calling it plants the fault for the rest of the process and returns the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and what a tool should say of it.

    subject: the backend. verdict: of `check`. component: of `bisect`. culprit: the ATen operator that is to blame.
    """

    name: str
    subject: str
    verdict: str
    component: str
    culprit: str
    plant: Callable[[], None]
    program: Callable[[], Program]


FAULTS: dict[str, Fault] = {}


def __getattr__(name: str) -> Callable[[], Program]:
    if name not in FAULTS:
        raise AttributeError(name)
    fault = FAULTS[name]

    def make() -> Program:
        fault.plant()
        return fault.program()

    return make


def planted(
    subject: str, verdict: str, component: str, culprit: str, program: Callable[[], Program]
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a planting function into the library under its own name."""

    def enter(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.removeprefix("plant_")
        FAULTS[name] = Fault(name, subject, verdict, component, culprit, plant, program)
        return plant

    return enter


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` makes of it, for good."""
    mock.patch.object(owner, name, make(getattr(owner, name))).start()


# ------------------------------------------------------------------------------------------------ programs


def negated() -> Program:
    """The tutorial's: neg, maximum, cat."""

    def foo(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        a = torch.neg(x1)
        b = torch.maximum(x2, a)
        return torch.cat([b], dim=0)

    torch.manual_seed(0)
    return foo, (torch.randn(1, 8), torch.randn(8390, 8))


def mixed() -> Program:
    """Pointwise operators, a matrix product, reductions, flip: most parts of a compiler have a share."""

    def mix(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ w + b)
        h = h - h.mean(-1, keepdim=True)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        t = torch.flip(h, [1]).sigmoid()
        return torch.softmax(t * 2 - h.exp().clamp(max=3.0), -1)

    torch.manual_seed(0)
    return mix, (torch.randn(37, 45), torch.randn(45, 83), torch.randn(83))


def summed() -> Program:
    """A reduction over everything, long enough for several threads."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()

    torch.manual_seed(0)
    return total, (torch.rand(2000, 1000),)


# ------------------------------------------------------------------------------------------------ Pellucid


def printed(change: Callable[[Any, str, tuple[str, ...], str], str]) -> None:
    """Change the C++ of scalar operators: change(printer, op, arguments, text)."""
    from pellucid.codegen.cpp import _Printer
    from pellucid.ir.nodes import Compute

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def value(self: Any, line: Any) -> str:
            text = original(self, line)
            if not isinstance(line.rhs, Compute):
                return text
            wide = self.is_wide(line.out)
            return change(self, line.rhs.op, tuple(self.arg(arg, wide) for arg in line.rhs.args), text)

        return value

    patch(_Printer, "value", make)


def instead(op: str, text: str) -> None:
    """Print `text` for an operator; `{0}` is its first argument, `{it}` what stood there."""
    printed(lambda printer, name, args, it: text.format(*args, it=it) if name == op else it)


@planted("pellucid", "wrong", "codegen", "neg", negated)
def plant_pellucid_neg_wrong() -> None:
    instead("neg", "{0}")


@planted("pellucid", "error", "codegen", "neg", negated)
def plant_pellucid_neg_does_not_compile() -> None:
    instead("neg", "pv::neg({0}, 1)")


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_crashes() -> None:
    instead("neg", "(*(volatile int*)nullptr = 1, {it})")


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_aborts() -> None:
    instead("neg", "(__builtin_trap(), {it})")


@planted("pellucid", "hang", "codegen", "neg", negated)
def plant_pellucid_neg_hangs() -> None:
    instead("neg", '([&] {{ while (true) asm volatile(""); }}(), {it})')


@planted("pellucid", "crash", "codegen", "neg", negated)
def plant_pellucid_neg_eats_memory() -> None:
    grow = (
        "while (true) for (char *p = new char[1 << 26], *e = p + (1 << 26); p < e; p += 4096) *(volatile char*)p = 1;"
    )
    instead("neg", f"([&] {{{{ {grow} }}}}(), {{it}})")


@planted("pellucid", "wrong", "vectorisation", "exp", mixed)
def plant_pellucid_vector_exp() -> None:
    def change(printer: Any, op: str, args: tuple[str, ...], text: str) -> str:
        wide = printer.plan.vector is not None and "splat" not in text
        return f"pv::exp(pv::mul({args[0]}, {args[0]}))" if op == "exp" and wide else text

    printed(change)


@planted("pellucid", "wrong", "lowering", "sigmoid", mixed)
def plant_pellucid_lowering_sigmoid() -> None:
    from pellucid.lower.registry import RULES

    RULES["sigmoid.default"] = RULES["tanh.default"]


@planted("pellucid", "wrong", "lowering", "flip", mixed)
def plant_pellucid_lowering_flip() -> None:
    from pellucid.lower.registry import RULES

    RULES["flip.default"] = lambda graph, node: RULES["clone.default"](graph, node)


@planted("pellucid", "wrong", "memory", "", mixed)
def plant_pellucid_memory_plan() -> None:
    from dataclasses import replace

    from pellucid import executable

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            return replace(made, offsets=dict.fromkeys(made.offsets, 0))

        return plan

    patch(executable, "plan_memory", make)


@planted("pellucid", "wrong", "decompositions", "softmax", mixed)
def plant_pellucid_decomposition() -> None:
    from pellucid import backend

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def table() -> dict[Any, Any]:
            wrong = dict(original())
            wrong[torch.ops.aten._softmax.default] = lambda x, dim, half: x.exp() / (x.exp().sum(dim, True) + 1)
            return wrong

        return table

    patch(backend, "decompositions", make)
    from pellucid.debug import pellucid_subject

    patch(pellucid_subject, "decompositions", make)


# ------------------------------------------------------------------------------------------------ Inductor


def overridden(name: str, text: Callable[..., str], *, vector: bool = True, scalar: bool = True) -> None:
    """Change the C++ that Inductor prints for an operator, as the tutorial does with `neg`."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    for owner in [CppVecOverrides] * vector + [CppOverrides] * scalar:
        mock.patch.object(owner, name, staticmethod(text)).start()


@planted("inductor", "wrong", "codegen", "neg", negated)
def plant_inductor_neg_wrong() -> None:
    overridden("neg", lambda x: f"{x}")


@planted("inductor", "error", "codegen", "neg", negated)
def plant_inductor_neg_does_not_compile() -> None:
    overridden("neg", lambda x: f"-{x}.no_such_member()")


@planted("inductor", "crash", "codegen", "neg", negated)
def plant_inductor_neg_crashes() -> None:
    overridden("neg", lambda x: f"(*(volatile int*)nullptr = 1, {x}.neg())", scalar=False)


@planted("inductor", "hang", "codegen", "neg", negated)
def plant_inductor_neg_hangs() -> None:
    overridden("neg", lambda x: f'([&] {{ while (true) asm volatile(""); }}(), {x}.neg())', scalar=False)


@planted("inductor", "wrong", "vectorisation", "exp", mixed)
def plant_inductor_vector_exp() -> None:
    overridden("exp", lambda x: f"({x} * {x}).exp()", scalar=False)


@planted("inductor", "wrong", "lowering", "sigmoid", mixed)
def plant_inductor_lowering_sigmoid() -> None:
    from torch._inductor.lowering import lowerings

    lowerings[torch.ops.aten.sigmoid.default] = lowerings[torch.ops.aten.tanh.default]
