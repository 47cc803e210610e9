"""Running a case in eager mode, and comparing what a compiled program made of it with that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from tests.operators.cases import WIDEST, Case
from tests.support import assert_matches, error, tensors

# What these return is not defined.
UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}

# Draws of inputs that differ from the given ones in the last place, to see how far a result in float64 may move.
_DRAWS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What eager makes of a case, and what it makes of it in float64.

    random: another seed gives another result, so the compiled program must start from the same one.
    """

    result: list[torch.Tensor]
    exact: list[torch.Tensor]
    random: bool


def outcomes(cases: Sequence[Case], states: Sequence[list[Any]], results: Sequence[Any]) -> list[list[torch.Tensor]]:
    """All that can be compared after `results` were made from `states`: results, changed inputs, gradients.

    The gradients are those of a fixed random weighting of the results, zeros for what does not contribute. They are
    taken of all cases at once, because a program has one backward graph. Their strides are autograd's own affair.
    """
    found = [tensors(result) + [t.detach() for item in state for t in _tensors_of(item)] for state, result in
             zip(states, results, strict=True)]  # fmt: skip
    if cases[0].task.direction == "training":
        differentiable = [[t for t in tensors(result) if t.requires_grad] for result in results]
        weights = [_weights(these) for these in differentiable]
        leaves = [case.leaves(state) for case, state in zip(cases, states, strict=True)]
        flat = [list(chain.from_iterable(part)) for part in (differentiable, leaves, weights)]
        given = iter(torch.autograd.grad(*flat, allow_unused=True, materialize_grads=True) if flat[0] else ())
        for one, own in zip(found, leaves, strict=True):
            one += [gradient.contiguous() for gradient in islice(given, len(own))]
    return [[_real(tensor.detach()) for tensor in one] for one in found]


def _weights(results: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = [torch.complex128 if r.is_complex() else torch.float64 for r in results]
    return [torch.randn(r.shape, generator=generator, dtype=w).to(r.dtype) for r, w in zip(results, wide, strict=True)]


def eager(case: Case, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor, seed: int = 0) -> Any:
    """The outcome of a case in eager mode, its tensors changed by `change` first."""
    state = case.fresh(change)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(case.task.direction == "training"):
        return outcomes([case], [state], [case.function(state)])[0]


def expect(case: Case) -> Expected | str:
    """What to expect of a case; or, beginning with `skip: `, why nothing is."""
    if case.task.name in UNINITIALISED:
        return "skip: the result is uninitialised memory"
    if any(tensor.layout is not torch.strided for item in case.state for tensor in _tensors_of(item)):
        return "skip: an argument is sparse"
    try:
        if case.task.direction == "training" and not case.leaves(case.fresh()):
            return "skip: there is nothing to differentiate by"
        result = eager(case)
        again = eager(case)
        other = eager(case, seed=1)
    except Exception as failure:
        return f"skip: eager raises {type(failure).__name__}"
    if any(tensor.layout is not torch.strided for tensor in result):
        return "skip: the result is sparse"
    if not _same(result, again):
        return "skip: eager is not deterministic"
    try:
        exact = eager(case, _widened)
        if any(a.shape != b.shape for a, b in zip(exact, result, strict=True)):
            exact = result
    except Exception:
        exact = result
    return Expected(result, exact, random=not _same(result, other))


def verdict(case: Case, expected: Expected, actual: list[torch.Tensor]) -> str:
    """`ok`, or `mismatch: ` and where."""
    try:
        assert_matches(actual, expected.result, expected.exact)
        return "ok"
    except Exception as failure:
        problem = f"mismatch: {str(failure).strip().splitlines()[0][:200]}"
    try:
        assert_matches(actual, expected.result, expected.exact, _errors_nearby(case, expected))
        return "ok"
    except Exception:
        return problem


def _errors_nearby(case: Case, expected: Expected) -> list[float]:
    """Eager's errors on inputs that differ from the given ones in the last place only, the largest for each tensor.

    On a single input eager may be right by luck. In float64, where nothing more exact stands by to judge, it is how
    far such a change moves the result, or the error of eager in float32 on the same scale, where that is larger.
    """
    found = [0.0] * len(expected.result)
    if case.task.dtype in WIDEST:
        narrow, exact = eager(case, _narrowed), eager(case, lambda x: _widened(_narrowed(x)))
        scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        found = [scale * _distance(n, e) for n, e in zip(narrow, exact, strict=True)]
    for seed in range(_DRAWS):
        nudge, again = _nudge(seed), _nudge(seed)
        moved = eager(case, nudge)
        exact = expected.result if case.task.dtype in WIDEST else eager(case, lambda x, n=again: _widened(n(x)))
        found = [max(limit, _distance(m, e)) for limit, m, e in zip(found, moved, exact, strict=True)]
    return found


def _nudge(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Moves each element of a float tensor, or part of a complex one, up or down to its neighbour, or not at all."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return torch.view_as_complex(nudge(_real(tensor)).contiguous())
        if not tensor.is_floating_point():
            return tensor
        steps = torch.randint(-1, 2, tensor.shape, generator=generator).double()
        return (tensor.double() * (1 + steps * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)

    return nudge


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The error of `a`, where it is one that can be told; NaN in other places means that a limit was crossed."""
    found = error(a, b.double()) if a.is_floating_point() and a.shape == b.shape else 0.0
    return found if found < float("inf") else 0.0


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_NARROWER.get(tensor.dtype, tensor.dtype))


def _tensors_of(item: Any) -> list[torch.Tensor]:
    return [*item.parameters(), *item.buffers()] if isinstance(item, torch.nn.Module) else [item]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Equal bit for bit, NaN included; tensors that cannot be compared count as equal."""
    try:
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    except Exception:
        return True
    return True
