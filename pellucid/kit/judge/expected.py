"""What a program should leave: eager's results, in float64 as well, and for inputs that are a little different."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import torch

from pellucid.kit.judge.bias import LEAST, NARROW, OTHERS, Lean, is_biased, lean
from pellucid.kit.judge.judge import DRAWS, FACTOR, Judgement, Verdict, distance, judge, tolerance
from pellucid.kit.judge.vary import InPlace, nudging, scaling, unchanged

Outcome: TypeAlias = Mapping[str, torch.Tensor]

# A result of no more elements may be exact in eager by chance, where compiled code rounds less often and is not.
_FEW = 16
_LIKE = 4


class Expected:
    """Tensors by name. Only eager's are there at once; the others are computed when they are first asked for.

    exactly: in float64, no value on the way rounded to a shorter type, for inputs that are changed first; None, or
    without a tensor, where there is no such thing: then eager's is taken for it. eagerly: eager's, in the same way.
    """

    def __init__(
        self, eager: Outcome, exactly: Callable[[InPlace], Outcome | None], eagerly: Callable[[InPlace], Outcome]
    ) -> None:
        self.eager = eager
        self._exactly, self._eagerly = exactly, eagerly
        self._others: dict[int, tuple[Outcome, Outcome]] = {}

    @cached_property
    def exact(self) -> Outcome:
        return self._exactly(unchanged) or {}

    @cached_property
    def draws(self) -> Sequence[Outcome]:
        """Eager's for inputs that differ in the last place."""
        return [self._eagerly(nudging(seed)) for seed in range(DRAWS)]

    def compute(self) -> Expected:
        """Compute now what every judgement needs."""
        _ = self.exact, self.draws
        return self

    def judge(self, name: str, actual: torch.Tensor) -> Judgement:
        eager, exact, draws = self._of(name)
        found = judge(actual, eager, exact, draws)
        if name not in self.exact:
            return found
        if found.verdict is Verdict.ROUNDING and actual.dtype in NARROW:
            return self._unbiased(name, actual, found)
        return self._usual(name, found) if found.verdict is Verdict.WRONG and eager.numel() <= _FEW else found

    def tolerance(self, name: str) -> float:
        """How far from eager's a result may be that differs by rounding only."""
        return tolerance(*self._of(name))

    def _of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        eager = self.eager[name]
        return eager, self.exact.get(name, eager), [draw[name] for draw in self.draws if name in draw]

    def _unbiased(self, name: str, actual: torch.Tensor, found: Judgement) -> Judgement:
        """The same unless its roundings lean to one side."""
        exact = self.exact[name]
        ours = lean(actual, exact)
        if not is_biased(ours, self._leans(name)):
            return found
        inward, down = ours
        way = "zero" if abs(inward) >= abs(down) else "minus infinity"
        mean = max(ours, key=abs)
        side = f"{'towards' if mean > 0 else 'away from'} {way}"
        why = f"rounded {side}, by {abs(mean):.2g} of the last place more than to the nearest, as eager rounds"
        return replace(found, verdict=Verdict.WRONG, why=why, error=abs(mean), allowed=LEAST)

    def _leans(self, name: str) -> Iterator[Lean]:
        yield lean(self.eager[name], self.exact[name])
        for eager, exact in self._like(name, OTHERS):
            yield lean(eager, exact)

    def _usual(self, name: str, found: Judgement) -> Judgement:
        """Rounding, if eager is usually as far off for inputs like these."""
        errors = sorted(away / (rms or 1.0) for away, rms in (distance(*each) for each in self._like(name, _LIKE)))
        usual = FACTOR * errors[len(errors) // 2] if errors else 0.0
        return replace(found, verdict=Verdict.ROUNDING, why="", allowed=usual) if found.error <= usual else found

    def _like(self, name: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Eager's and float64's result for other inputs like the given ones, as far as there is one."""
        for seed in range(count):
            if seed not in self._others:
                self._others[seed] = (self._eagerly(scaling(seed)), self._exactly(scaling(seed)) or {})
            eager, exact = self._others[seed]
            there = name in eager and name in exact and eager[name].shape == exact[name].shape
            if there and not torch.equal(eager[name], self.eager[name]):  # else nothing of it was scaled
                yield eager[name], exact[name]
