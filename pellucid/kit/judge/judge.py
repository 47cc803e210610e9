"""Decide whether a compiled result is wrong or only rounded differently, from float64 and eager's own uncertainty.

A value's error is its maximum distance from float64 in units of the reference's scale (the rms of its finite
elements). Eager's own error is the maximum over its result and its results for `DRAWS` inputs that differ in the last
places: if rounding can change a value a lot, such as the sign of a difference that is nearly zero, the compiled code
may change it as much. A value is `wrong` when its error exceeds `FACTOR` times eager's error plus a few roundings of
its type.

A value is `unsure` when it is within that bound only because of the perturbed inputs: it is `FAR` times as far off as
eager's result alone allows. Correct programs stay within twice of what it allows, even where perturbed inputs move
eager's result a million times as far. Thresholds are the exception: a few elements may be far off where the perturbed
inputs move as many elements as far, and no more than half of them. Integers and booleans are never slightly off: for
them the numbers of differing elements decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from pellucid.kit.judge.bias import NARROW, is_one_sided, ulp

FACTOR = 4.0
FLOOR_ROUNDINGS = 8.0
DRAWS = 2
# In multiples of what eager's result allows by itself: about four hundred times its distance from float64.
FAR = 100.0
# Results this close to eager's, in roundings of their type at the scale of the tensor, need no float64 reference.
CLOSE_ROUNDINGS = 64.0
_CHUNK_ELEMENTS = 1 << 18


class Verdict(str, Enum):
    """The verdict on a result, from good to bad; the last three say how a run ended instead of returning.

    `unsure` is neither good nor bad: the result cannot be judged.
    """

    OK = "ok"
    ROUNDING = "rounding"
    UNSURE = "unsure"
    WRONG = "wrong"
    ERROR = "error"
    CRASH = "crash"
    HANG = "hang"

    @property
    def good(self) -> bool:
        return self in (Verdict.OK, Verdict.ROUNDING)

    @property
    def bad(self) -> bool:
        return not self.good and self is not Verdict.UNSURE

    def __str__(self) -> str:
        return self.value


ORDER = tuple(Verdict)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several verdicts; `ok` for none."""
    return max(verdicts, key=ORDER.index, default=Verdict.OK)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on one tensor.

    why: what is wrong, in words; empty when nothing is. error, allowed: see the module. max_error: the maximum
    distance from eager's value. ulp: the same in units of the last place of eager's value, where that is finite; None:
    the values were close enough not to measure it. where: the index of the worst element. bad_elements: how many
    elements differ by more than is allowed. misplaced: the values are right, but their strides or shared memory differ.
    """

    verdict: Verdict
    why: str = ""
    error: float = 0.0
    allowed: float = 0.0
    max_error: float = 0.0
    ulp: float | None = 0.0
    where: tuple[int, ...] = ()
    bad_elements: int = 0
    misplaced: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a program returns, changes in place or (a gradient) accumulates.

    name: `output 0`, `input x (changed)`, `gradient of layer.weight`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    judgement: Judgement

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


def kind_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Shape and dtype, for display."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def tolerance(eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor] = ()) -> float:
    """The maximum distance from eager's value by rounding alone. The arguments are those of `judge`."""
    stats = _Stats.of(eager, eager, exact, draws)
    return stats.allowed(eager.dtype) + stats.draws_error


def distance(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """A value's maximum distance from its float64 reference, and the reference's rms.

    The distance is infinite where shapes, NaNs or infinities differ.
    """
    if actual.shape != exact.shape:
        return math.inf, 0.0
    stats = _Stats.of(actual, exact, exact, ())
    return math.inf if stats.mismatches else stats.actual_error, stats.rms


def judge(
    actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor] = ()
) -> Judgement:
    """Compare a result of compiled code with eager's value.

    exact: the value in float64. draws: eager's values for inputs that differ in the last place.
    """
    if actual.shape != eager.shape:
        return Judgement(Verdict.WRONG, f"shape {tuple(actual.shape)}, eager's is {tuple(eager.shape)}")
    if actual.dtype != eager.dtype:
        return Judgement(Verdict.WRONG, f"dtype {actual.dtype}, eager's is {eager.dtype}")
    if torch.equal(actual, eager):
        return Judgement(Verdict.OK)
    stats = _Stats.of(actual, eager, exact, draws)
    if stats.equal:  # with NaN at the same positions
        return Judgement(Verdict.OK)
    shape = (*eager.shape, 2) if eager.is_complex() else eager.shape
    values, reference, truth = (_flat(each) for each in (actual, eager, exact))
    if stats.mismatches:
        at, where = stats.first_mismatch, _index(stats.first_mismatch, shape)
        why = f"{values[at].item()} where eager has {reference[at].item()}, at {list(where)}"
        return Judgement(Verdict.WRONG, why, math.inf, 0.0, math.inf, math.inf, where, stats.mismatches)
    allowed, at, where = stats.allowed(eager.dtype), stats.worst_index, _index(stats.worst_index, shape)
    numbers = (stats.actual_error / stats.scale, allowed / stats.scale, stats.difference, stats.ulp, where)
    if stats.actual_error <= allowed and _is_explained(stats, actual, eager, exact, draws):
        return Judgement(Verdict.ROUNDING, "", *numbers)
    if stats.actual_error <= allowed:
        own, draws_error = stats.eager_error / stats.scale, stats.draws_error / stats.scale
        why = f"eager is {own:.3g} off, and {draws_error:.3g} for inputs that differ in the last places"
        return Judgement(Verdict.UNSURE, f"{why}: errors cannot be distinguished from rounding", *numbers)
    bad = sum(int((chunk.distance(0, 2) > allowed).sum()) for _, chunk in _chunks(actual, eager, exact))
    ours, eagers, exactly = (_text(each[at]) for each in (values, reference, truth))
    counted = f"{bad} of {values.numel()} elements differ"
    why = f"{counted}, most at {list(where)}: {ours}, eager {eagers}, float64 {exactly}"
    return Judgement(Verdict.WRONG, why, *numbers, bad)


def _is_explained(
    stats: _Stats, actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor]
) -> bool:
    """Whether the far-off elements are no more numerous than those that rounding alone moves as far."""
    inexact = eager.is_floating_point() or eager.is_complex()
    limit = FAR * stats.allowed(eager.dtype, stats.eager_error) if inexact else 0.0
    if inexact and stats.actual_error <= limit:
        return True
    others = [eager, *(each for each in draws if each.shape == eager.shape)]
    counts = torch.zeros(1 + len(others), dtype=torch.int64)
    for _, chunk in _chunks(actual, eager, exact, *others[1:]):
        counts += torch.stack([(chunk.distance(n, 2) > limit).sum() for n in range(len(chunk.wide)) if n != 2])
    ours, theirs = int(counts[0]), int(counts[1:].max())
    return ours <= FACTOR * theirs and (not inexact or 2 * theirs <= eager.numel())


def close(actual: torch.Tensor, eager: torch.Tensor) -> Judgement | None:
    """The judgement on results that are equal, or so close that no float64 reference is needed; None for all others."""
    if actual.shape != eager.shape or actual.dtype != eager.dtype:
        return None
    if torch.equal(actual, eager):
        return Judgement(Verdict.OK)
    if not eager.is_floating_point():
        return None
    wide = torch.promote_types(eager.dtype, torch.float32)
    difference = _largest_difference(actual, eager, wide)
    scale = torch.linalg.vector_norm(eager, dtype=wide).item() / max(eager.numel(), 1) ** 0.5
    bound = CLOSE_ROUNDINGS * torch.finfo(eager.dtype).eps * scale
    if not difference <= bound or (eager.dtype in NARROW and is_one_sided(actual, eager)):  # also for NaN
        return None
    return Judgement(Verdict.ROUNDING, "", difference / scale, bound / scale, difference, None)


def _largest_difference(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """NaN if there is one. In chunks: fresh memory for the whole difference would cost more than computing it."""
    pairs = [(a, b)]
    if a.is_contiguous() and b.is_contiguous():
        pairs = zip(a.view(-1).split(_CHUNK_ELEMENTS), b.view(-1).split(_CHUNK_ELEMENTS), strict=True)
    largest = [(x.to(dtype) - y.to(dtype)).abs_().max() for x, y in pairs if x.numel()]
    return torch.stack(largest).max().item() if largest else 0.0


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results are equal up to rounding, of intermediate values too, without a float64 reference."""
    found = judge(ours, theirs, theirs)
    inexact = theirs.is_floating_point() and ours.dtype is theirs.dtype
    return found.verdict.good or (inexact and 0 < found.error < torch.finfo(theirs.dtype).eps ** 0.5)


class _Chunk:
    """Adjacent elements of several tensors: the actual value, eager's, float64's, then eager's for other inputs."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.wide = [each.double() for each in tensors]
        self.all_finite = math.isfinite(sum(each.sum().item() for each in self.wide))

    def distance(self, a: int, b: int) -> torch.Tensor:
        """The distance between two of the tensors, where they and the first three are finite; 0 elsewhere."""
        if self.tensors[a].is_floating_point() or self.tensors[b].is_floating_point():
            difference = (self.wide[a] - self.wide[b]).abs_()
            return difference if self.all_finite else difference.masked_fill_(~self.finite(a, b), 0.0)
        return (self.tensors[a].long() - self.tensors[b].long()).double().abs_()  # float64 cannot hold all integers

    def finite(self, *more: int) -> torch.Tensor:
        """Where the first three tensors, and `more`, are finite."""
        return torch.stack([self.wide[n].isfinite() for n in {0, 1, 2, *more}]).all(0)

    def mismatches(self) -> torch.Tensor:
        """Where the actual value's kind (finite, NaN, inf, -inf) is that of none of the other tensors.

        In float16, which overflows early, an infinity may also replace a number just below the maximum.
        """
        ours, *others = (
            torch.where(t.isfinite(), 0.0, t).nan_to_num(nan=3.0, posinf=1.0, neginf=2.0) for t in self.wide
        )
        mismatch = torch.stack([ours != other for other in others]).all(0)
        if self.tensors[1].dtype is torch.float16:
            large, sign = (1 - 1 / 64) * torch.finfo(torch.float16).max, self.wide[0].sign()
            mismatch &= ~(self.wide[0].isinf() & torch.stack([sign * other >= large for other in self.wide[1:]]).any(0))
        return mismatch


@dataclass(slots=True)
class _Stats:
    """Statistics over all elements. One pass in chunks: fresh memory for each step would cost more than computing it.

    equal: the actual and eager's value are equal. mismatches, first_mismatch: the number of elements that differ in NaN
    or infinity, and the index of the first. squares, count: of the finite elements in float64. eager_error: eager's
    maximum distance from float64; draws_error: the maximum over eager and the draws; actual_error: the actual
    value's, at index `worst_index`. difference, ulp: the maxima between the actual and eager's value.
    """

    equal: bool = True
    mismatches: int = 0
    first_mismatch: int = 0
    squares: float = 0.0
    count: int = 0
    eager_error: float = 0.0
    draws_error: float = 0.0
    actual_error: float = 0.0
    worst_index: int = 0
    difference: float = 0.0
    ulp: float = 0.0

    @classmethod
    def of(
        cls, actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor]
    ) -> _Stats:
        stats = cls()
        for start, chunk in _chunks(actual, eager, exact, *(each for each in draws if each.shape == eager.shape)):
            stats._add(start, chunk)
        return stats

    @property
    def scale(self) -> float:
        """The rms of the finite elements, the unit of errors; 1 where the rms is 0 or infinite."""
        return self.rms if 0 < self.rms < math.inf else 1.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def allowed(self, dtype: torch.dtype, error: float | None = None) -> float:
        """The maximum distance from float64 that is allowed. error: eager's own; by default that of the draws too."""
        info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else None
        rounding = max(info.eps * self.scale, info.smallest_normal * info.eps) if info else 0.0  # or of subnormals
        return FACTOR * (self.draws_error if error is None else error) + FLOOR_ROUNDINGS * rounding

    def _add(self, start: int, chunk: _Chunk) -> None:
        actual, eager, truth = chunk.wide[:3]
        if chunk.all_finite:
            self.count += truth.numel()
        else:
            mismatch, finite = chunk.mismatches(), chunk.finite()
            if not self.mismatches and mismatch.any():
                self.first_mismatch = start + int(mismatch.int().argmax())
            self.mismatches += int(mismatch.sum())
            self.equal &= bool(((actual == eager) | (actual.isnan() & eager.isnan())).all())
            self.count += int(finite.sum())
            truth = truth[finite]
        self.squares += truth.square().sum().item()
        self.eager_error = max(self.eager_error, chunk.distance(1, 2).max().item())
        draws = (chunk.distance(n, 2).max().item() for n in range(3, len(chunk.wide)))
        self.draws_error = max(self.draws_error, self.eager_error, *draws)
        error = chunk.distance(0, 2)
        at = int(error.argmax())
        if error[at] > self.actual_error:
            self.actual_error, self.worst_index = error[at].item(), start + at
        difference = chunk.distance(0, 1)
        largest = difference.max().item()
        if largest:
            self.equal, self.difference = False, max(self.difference, largest)
            dtype = chunk.tensors[1].dtype
            unit = ulp(eager, dtype) if dtype.is_floating_point or dtype.is_complex else 1.0
            self.ulp = max(self.ulp, (difference / unit).max().item())


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[int, _Chunk]]:
    """Tensors of equal numbers of elements in chunks, each with the index of its first element."""
    flat = [_flat(each) for each in tensors]
    for start in range(0, flat[0].numel(), _CHUNK_ELEMENTS):
        yield start, _Chunk([each[start : start + _CHUNK_ELEMENTS] for each in flat])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one dimension, complex numbers as pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _text(element: torch.Tensor) -> str:
    return f"{element.item():.9g}" if element.is_floating_point() else str(element.item())


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))
