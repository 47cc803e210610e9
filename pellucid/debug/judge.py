"""Is a compiled result wrong, or only rounded otherwise than eager's? float64 decides, and eager's own uncertainty.

A value's error is its largest distance from float64 in units of the reference's scale (the rms of its finite
elements). Eager's own error is that of its result, and of its results for inputs that differ in the last places
(`DRAWS` of them): so a value that a rounding can move far, such as the sign of a difference that is nearly zero, may
be moved as far by the compiler as well. A value is `wrong` when its error is more than `FACTOR` times that plus a few
roundings of its type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

FACTOR = 4.0
FLOOR_ROUNDINGS = 8.0
DRAWS = 2
# Results that are this close to eager's, in roundings of their type on the scale of the tensor, need no float64.
CLOSE_ROUNDINGS = 64.0
_PART = 1 << 20


class Verdict(str, Enum):
    """What is true of a result, from good to bad; the last three say how a run ended instead of returning."""

    OK = "ok"
    ROUNDING = "rounding"
    WRONG = "wrong"
    ERROR = "error"
    CRASH = "crash"
    HANG = "hang"

    @property
    def good(self) -> bool:
        return self in (Verdict.OK, Verdict.ROUNDING)

    def __str__(self) -> str:
        return self.value


ORDER = tuple(Verdict)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several; `ok` for none."""
    return max(verdicts, key=ORDER.index, default=Verdict.OK)


@dataclass(frozen=True, slots=True)
class Judgement:
    """About one tensor.

    why: what is wrong, in words; empty when nothing is. error, allowed: see the module. max_error: the largest
    distance from eager's value. ulp: the same in units of the last place of eager's value, where that is finite; None:
    it was near enough not to be measured. where: the index of the worst element, and how many elements differ by more
    than is allowed.
    """

    verdict: Verdict
    why: str = ""
    error: float = 0.0
    allowed: float = 0.0
    max_error: float = 0.0
    ulp: float | None = 0.0
    where: tuple[int, ...] = ()
    bad_elements: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a program returns, changes or (as a gradient) leaves behind.

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
    """Shape and dtype, for people."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def tolerance(eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor] = ()) -> float:
    """How far from eager's value a result may be that differs by rounding only. The arguments are those of `judge`."""
    reference, truth = _real(eager.detach()), _real(exact.detach()).reshape_as(_real(eager.detach()))
    others = [_real(draw) for draw in draws if draw.shape == eager.shape]
    finite = truth.isfinite() & reference.isfinite()
    scale = _scale(truth[finite])
    own = _own_error(reference, truth, others, finite) / scale
    return (_allowed(own, eager.dtype) + own) * scale


def judge(
    actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor] = ()
) -> Judgement:
    """Compare what compiled code made with eager's value.

    exact: the value in float64. draws: eager's values for inputs that differ in the last place.
    """
    actual, eager, exact = actual.detach(), eager.detach(), exact.detach()
    if actual.shape != eager.shape:
        return Judgement(Verdict.WRONG, f"shape {tuple(actual.shape)}, eager's is {tuple(eager.shape)}")
    if actual.dtype != eager.dtype:
        return Judgement(Verdict.WRONG, f"dtype {actual.dtype}, eager's is {eager.dtype}")
    if _identical(actual, eager):
        return Judgement(Verdict.OK)
    values, reference, truth = _real(actual), _real(eager), _real(exact).reshape_as(_real(eager))
    others = [_real(draw) for draw in draws if draw.shape == eager.shape]
    odd = _not_finite(values, reference, truth, others)
    if odd.any():
        first = _first(odd)
        why = f"{values[first].item()} where eager has {reference[first].item()}, at {list(first)}"
        return Judgement(Verdict.WRONG, why, math.inf, 0.0, math.inf, math.inf, first, int(odd.sum()))
    return _distances(values, reference, truth, others, eager.dtype)


def close(actual: torch.Tensor, eager: torch.Tensor) -> Judgement | None:
    """The judgement on results that are equal, or so near that float64 need not be asked; None for all others."""
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
    if not difference <= bound:  # also for NaN
        return None
    return Judgement(Verdict.ROUNDING, "", difference / scale, bound / scale, difference, None)


def _largest_difference(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> float:
    """NaN if there is one. In parts: fresh memory for a whole difference would cost more than computing it."""
    pairs = [(a, b)]
    if a.is_contiguous() and b.is_contiguous():
        pairs = zip(a.view(-1).split(_PART), b.view(-1).split(_PART), strict=True)
    largest = [(x.to(dtype) - y.to(dtype)).abs_().max() for x, y in pairs if x.numel()]
    return torch.stack(largest).max().item() if largest else 0.0


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two results that nothing is known of are the same up to rounding, on the way to them as well."""
    found = judge(ours, theirs, theirs.double() if theirs.is_floating_point() else theirs)
    inexact = theirs.is_floating_point() and ours.dtype is theirs.dtype
    return found.verdict.good or (inexact and 0 < found.error < torch.finfo(theirs.dtype).eps ** 0.5)


def _distances(
    values: torch.Tensor,
    reference: torch.Tensor,
    truth: torch.Tensor,
    others: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> Judgement:
    finite = truth.isfinite() & values.isfinite() & reference.isfinite()
    scale = _scale(truth[finite])
    zero = torch.zeros((), dtype=torch.float64)
    away = torch.where(finite, (values - truth).abs(), zero) / scale
    allowed = _allowed(_own_error(reference, truth, others, finite) / scale, dtype)
    worst_at = _index(away, int(away.argmax()))
    difference = torch.where(finite, (values - reference).abs(), zero)
    step = _ulp(reference, dtype)
    bad = int((away > allowed).sum())
    found = Judgement(
        Verdict.WRONG if bad else Verdict.ROUNDING,
        "",
        away.max().item(),
        allowed,
        difference.max().item(),
        (difference / step).max().item(),
        worst_at,
        bad,
    )
    if not bad:
        return found
    why = (
        f"{bad} of {values.numel()} elements differ, most at {list(worst_at)}: {values[worst_at].item():.9g}, "
        f"eager {reference[worst_at].item():.9g}, float64 {truth[worst_at].item():.9g}"
    )
    return replace(found, why=why)


def _scale(finite: torch.Tensor) -> float:
    """The rms of the finite elements, in whose units errors are; 1 where that says nothing."""
    scale = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    return scale if scale > 0 and math.isfinite(scale) else 1.0


def _own_error(
    reference: torch.Tensor, truth: torch.Tensor, others: Sequence[torch.Tensor], finite: torch.Tensor
) -> float:
    """How far eager's values are from float64, at most."""
    zero = torch.zeros((), dtype=torch.float64)
    distances = [torch.where(finite & each.isfinite(), (each - truth).abs(), zero) for each in (reference, *others)]
    return max(each.max().item() for each in distances) if reference.numel() else 0.0


def _allowed(own: float, dtype: torch.dtype) -> float:
    return FACTOR * own + (FLOOR_ROUNDINGS * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b)) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """As float64, complex numbers as pairs; bool as 0 and 1."""
    tensor = tensor.resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def _not_finite(
    values: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor, others: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Where NaN or an infinity stands in one and not in the other, unless float64 or another draw has it so too."""

    def kind(t: torch.Tensor) -> torch.Tensor:
        return torch.where(t.isnan(), 3, torch.where(t == math.inf, 1, torch.where(t == -math.inf, 2, 0)))

    ours = kind(values)
    odd = ours != kind(reference)
    for other in (truth, *others):
        odd &= ours != kind(other)
    return odd


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return _index(mask, int(mask.flatten().int().argmax()))


def _index(tensor: torch.Tensor, flat: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)) if tensor.dim() else ()


def _ulp(reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours in `dtype` at each value; 1 for integers."""
    if not dtype.is_floating_point:
        return torch.ones_like(reference)
    info = torch.finfo(dtype)
    exponent = torch.frexp(reference.abs().clamp(min=info.tiny)).exponent.to(torch.float64)
    return torch.exp2(exponent - 1) * info.eps
