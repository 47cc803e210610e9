"""What a program should leave: eager's results, and in float64 and for inputs that differ in the last place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from pellucid.kit.judge.judge import DRAWS, Judgement, judge, tolerance

Outcome = Mapping[str, torch.Tensor]


class Expected:
    """Tensors by name. Only eager's are there at once; the others are computed when they are first asked for.

    exactly: in float64; None, or without a tensor, where there is no such thing: then eager's is taken for it.
    draw: eager's for inputs that differ in the last place, by seed.
    """

    def __init__(self, eager: Outcome, exactly: Callable[[], Outcome | None], draw: Callable[[int], Outcome]) -> None:
        self.eager = eager
        self._exactly, self._draw = exactly, draw

    @cached_property
    def exact(self) -> Outcome:
        return self._exactly() or {}

    @cached_property
    def draws(self) -> Sequence[Outcome]:
        return [self._draw(seed) for seed in range(DRAWS)]

    def compute(self) -> Expected:
        """Compute all of it now."""
        _ = self.exact, self.draws
        return self

    def judge(self, name: str, actual: torch.Tensor) -> Judgement:
        return judge(actual, *self._of(name))

    def tolerance(self, name: str) -> float:
        """How far from eager's a result may be that differs by rounding only."""
        return tolerance(*self._of(name))

    def _of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        eager = self.eager[name]
        return eager, self.exact.get(name, eager), [draw[name] for draw in self.draws if name in draw]
