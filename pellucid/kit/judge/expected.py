"""The expected results of a program: eager's, in float64 as well, and for slightly different inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import torch

from pellucid.kit.judge.bias import MIN_BIAS, NARROW, SAMPLES, Bias, bias_of, is_biased
from pellucid.kit.judge.judge import DRAWS, FACTOR, Judgement, Verdict, distance, judge, tolerance
from pellucid.kit.judge.vary import InPlace, nudging, scaling, unchanged

Outcome: TypeAlias = Mapping[str, torch.Tensor]

# A result of at most this many elements may be exact in eager by chance, and inexact in code that rounds less often.
_FEW_ELEMENTS = 16
_ERROR_SAMPLES = 4


class Expected:
    """Expected tensors by name. Eager's are passed in; the others are computed when first used.

    exactly: computes them in float64, with no intermediate value rounded to a narrower type, after changing the inputs;
    None, or without a tensor, where that is impossible: then eager's is used instead. eagerly: likewise eager's.
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
        """Eager's results for inputs that differ in the last place."""
        return [self._eagerly(nudging(seed)) for seed in range(DRAWS)]

    def compute(self) -> Expected:
        """Compute now what each judgement uses."""
        _ = self.exact, self.draws
        return self

    def judge(self, name: str, actual: torch.Tensor) -> Judgement:
        eager, exact, draws = self._of(name)
        found = judge(actual, eager, exact, draws)
        if name not in self.exact:
            return found
        if found.verdict is Verdict.ROUNDING and actual.dtype in NARROW:
            return self._check_bias(name, actual, found)
        few = eager.numel() <= _FEW_ELEMENTS
        return self._rejudge_small(name, found) if found.verdict is Verdict.WRONG and few else found

    def tolerance(self, name: str) -> float:
        """The maximum distance from eager's result by rounding alone."""
        return tolerance(*self._of(name))

    def _of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        eager = self.eager[name]
        return eager, self.exact.get(name, eager), [draw[name] for draw in self.draws if name in draw]

    def _check_bias(self, name: str, actual: torch.Tensor, found: Judgement) -> Judgement:
        """The judgement unchanged, or `wrong` if the rounding is biased."""
        exact = self.exact[name]
        ours = bias_of(actual, exact)
        if not is_biased(ours, self._biases(name)):
            return found
        inward, down = ours
        limit = "zero" if abs(inward) >= abs(down) else "minus infinity"
        mean = max(ours, key=abs)
        direction = f"{'towards' if mean > 0 else 'away from'} {limit}"
        why = f"the rounding is biased {direction}: by {abs(mean):.2g} ulp on average; eager rounds to nearest"
        return replace(found, verdict=Verdict.WRONG, why=why, error=abs(mean), allowed=MIN_BIAS)

    def _biases(self, name: str) -> Iterator[Bias]:
        """Eager's bias for the given inputs, then for similar ones."""
        yield bias_of(self.eager[name], self.exact[name])
        for eager, exact in self._samples(name, SAMPLES):
            yield bias_of(eager, exact)

    def _rejudge_small(self, name: str, found: Judgement) -> Judgement:
        """`rounding` if eager's error for similar inputs is typically as large, else the judgement unchanged."""
        samples = (distance(*each) for each in self._samples(name, _ERROR_SAMPLES))
        errors = sorted(error / (rms or 1.0) for error, rms in samples)
        allowed = FACTOR * errors[len(errors) // 2] if errors else 0.0
        return replace(found, verdict=Verdict.ROUNDING, why="", allowed=allowed) if found.error <= allowed else found

    def _samples(self, name: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Eager's and float64's results for up to `count` similar inputs."""
        for seed in range(count):
            if seed not in self._others:
                self._others[seed] = (self._eagerly(scaling(seed)), self._exactly(scaling(seed)) or {})
            eager, exact = self._others[seed]
            usable = name in eager and name in exact and eager[name].shape == exact[name].shape
            if usable and not torch.equal(eager[name], self.eager[name]):  # else scaling did not affect it
                yield eager[name], exact[name]
