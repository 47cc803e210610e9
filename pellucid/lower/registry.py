"""The table of lowering rules: one row per overload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from pellucid.lower.program_builder import ProgramBuilder, Result

Rule: TypeAlias = Callable[[ProgramBuilder, torch.fx.Node], Result]

RULES: dict[str, Rule] = {}

# Overloads whose rules accept a `Float`, a number that is known only at run time, instead of a Python number.
TAKES_FLOATS: set[str] = set()


class NotLowered(Exception):
    """Raised by a rule for arguments that it does not support; ATen is called then, with this reason."""


def rule(*names: str, floats: bool = False) -> Callable[[Rule], Rule]:
    """Register a lowering for overloads by their `overload_name`; see `TAKES_FLOATS` for `floats`."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two lowerings for {name}"
            RULES[name] = function
        TAKES_FLOATS.update(names if floats else ())
        return function

    return register


def overload_name(node: torch.fx.Node) -> str | None:
    """`add.Tensor` for an ATen (or prims) call, `pellucid::attention.default` for any other operator, else None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = f"{target._opname}.{target._overloadname}"
    return name if target.namespace in ("aten", "prims") else f"{target.namespace}::{name}"
