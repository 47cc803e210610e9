"""Is a compiled result wrong, or only rounded otherwise than eager's? float64 decides, and eager's own uncertainty.

A value's error is its largest distance from float64 in units of the reference's scale (the rms of its finite
elements). Eager's own error is that of its result, and of its results for inputs that differ in the last places
(`DRAWS` of them): so a value that a rounding can move far, such as the sign of a difference that is nearly zero, may
be moved as far by the compiler as well. A value is `wrong` when its error is more than `FACTOR` times that plus a few
roundings of its type.

A value that is within that only because of the other inputs is `unsure`: it is `FAR` times as far off as eager's result
alone allows. Healthy programs stay within twice of that, even where other inputs move eager's result a million times
as far. The exception are thresholds: a few elements may be far off where the other inputs move as many as far, and
no more than half. Integers and truth values are never a little off: there the numbers of elements decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from pellucid.kit.judge.bias import NARROW, is_lopsided, ulp

FACTOR = 4.0
FLOOR_ROUNDINGS = 8.0
DRAWS = 2
# Times what eager's result allows by itself: some four hundred times its distance from float64.
FAR = 100.0
# Results that are this close to eager's, in roundings of their type on the scale of the tensor, need no float64.
CLOSE_ROUNDINGS = 64.0
_PART = 1 << 18


class Verdict(str, Enum):
    """What is true of a result, from good to bad; the last three say how a run ended instead of returning.

    `unsure` is neither good nor bad: it cannot be judged.
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
    """The worst of several; `ok` for none."""
    return max(verdicts, key=ORDER.index, default=Verdict.OK)


@dataclass(frozen=True, slots=True)
class Judgement:
    """About one tensor.

    why: what is wrong, in words; empty when nothing is. error, allowed: see the module. max_error: the largest
    distance from eager's value. ulp: the same in units of the last place of eager's value, where that is finite; None:
    it was near enough not to be measured. where: the index of the worst element, and how many elements differ by more
    than is allowed. misplaced: the values are right, but lie otherwise in memory.
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
    seen = _Seen.of(eager, eager, exact, draws)
    return seen.allowed(eager.dtype) + seen.own


def distance(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """A value's largest distance from its float64, and the rms of that. Infinite where shapes or what is not finite
    differ.
    """
    if actual.shape != exact.shape:
        return math.inf, 0.0
    seen = _Seen.of(actual, exact, exact, ())
    return math.inf if seen.odd else seen.away, seen.rms


def judge(
    actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor] = ()
) -> Judgement:
    """Compare what compiled code made with eager's value.

    exact: the value in float64. draws: eager's values for inputs that differ in the last place.
    """
    if actual.shape != eager.shape:
        return Judgement(Verdict.WRONG, f"shape {tuple(actual.shape)}, eager's is {tuple(eager.shape)}")
    if actual.dtype != eager.dtype:
        return Judgement(Verdict.WRONG, f"dtype {actual.dtype}, eager's is {eager.dtype}")
    if torch.equal(actual, eager):
        return Judgement(Verdict.OK)
    seen = _Seen.of(actual, eager, exact, draws)
    if seen.alike:  # NaN in the same places
        return Judgement(Verdict.OK)
    shape = (*eager.shape, 2) if eager.is_complex() else eager.shape
    values, reference, truth = (_flat(each) for each in (actual, eager, exact))
    if seen.odd:
        at, where = seen.first_odd, _index(seen.first_odd, shape)
        why = f"{values[at].item()} where eager has {reference[at].item()}, at {list(where)}"
        return Judgement(Verdict.WRONG, why, math.inf, 0.0, math.inf, math.inf, where, seen.odd)
    allowed, at, where = seen.allowed(eager.dtype), seen.farthest, _index(seen.farthest, shape)
    numbers = (seen.away / seen.scale, allowed / seen.scale, seen.difference, seen.ulp, where)
    if seen.away <= allowed and _is_explained(seen, actual, eager, exact, draws):
        return Judgement(Verdict.ROUNDING, "", *numbers)
    if seen.away <= allowed:
        why = (
            f"eager is {seen.alone / seen.scale:.3g} off, and {seen.own / seen.scale:.3g} for inputs that differ in the"
        )
        return Judgement(Verdict.UNSURE, f"{why} last places: no error can be told from a rounding", *numbers)
    bad = sum(int((part.distance(0, 2) > allowed).sum()) for _, part in _parts(actual, eager, exact))
    ours, eagers, exactly = (_text(each[at]) for each in (values, reference, truth))
    counted = f"{bad} of {values.numel()} elements differ"
    why = f"{counted}, most at {list(where)}: {ours}, eager {eagers}, float64 {exactly}"
    return Judgement(Verdict.WRONG, why, *numbers, bad)


def _is_explained(
    seen: _Seen, actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor]
) -> bool:
    """Whether the elements that are far away are no more than roundings move as far."""
    inexact = eager.is_floating_point() or eager.is_complex()
    near = FAR * seen.allowed(eager.dtype, seen.alone) if inexact else 0.0
    if inexact and seen.away <= near:
        return True
    others = [eager, *(each for each in draws if each.shape == eager.shape)]
    counts = torch.zeros(1 + len(others), dtype=torch.int64)
    for _, part in _parts(actual, eager, exact, *others[1:]):
        counts += torch.stack([(part.distance(n, 2) > near).sum() for n in range(len(part.wide)) if n != 2])
    ours, theirs = int(counts[0]), int(counts[1:].max())
    return ours <= FACTOR * theirs and (not inexact or 2 * theirs <= eager.numel())


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
    if not difference <= bound or (eager.dtype in NARROW and is_lopsided(actual, eager)):  # also for NaN
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
    found = judge(ours, theirs, theirs)
    inexact = theirs.is_floating_point() and ours.dtype is theirs.dtype
    return found.verdict.good or (inexact and 0 < found.error < torch.finfo(theirs.dtype).eps ** 0.5)


class _Part:
    """Some neighbouring elements of several tensors, of which the first three are the actual value, eager's, and
    that in float64; the others are eager's for other inputs."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.wide = [each.double() for each in tensors]
        self.all_finite = math.isfinite(sum(each.sum().item() for each in self.wide))

    def distance(self, a: int, b: int) -> torch.Tensor:
        """Between two of the tensors, where float64, both and the first two are finite; 0 elsewhere."""
        if self.tensors[a].is_floating_point() or self.tensors[b].is_floating_point():
            away = (self.wide[a] - self.wide[b]).abs_()
            return away if self.all_finite else away.masked_fill_(~self.finite(a, b), 0.0)
        return (self.tensors[a].long() - self.tensors[b].long()).double().abs_()  # float64 has not all integers

    def finite(self, *more: int) -> torch.Tensor:
        """Where float64, the first two, and others are finite."""
        return torch.stack([self.wide[n].isfinite() for n in {0, 1, 2, *more}]).all(0)

    def odd(self) -> torch.Tensor:
        """Where NaN or an infinity stands in one and not in the other, unless float64 or another draw has it so too.

        An infinity may also stand for a number that is nearly too large for its type, as those of float16 soon are.
        """
        ours, *others = (
            torch.where(t.isfinite(), 0.0, t).nan_to_num(nan=3.0, posinf=1.0, neginf=2.0) for t in self.wide
        )
        odd = torch.stack([ours != other for other in others]).all(0)
        if self.tensors[1].dtype is torch.float16:
            large, sign = (1 - 1 / 64) * torch.finfo(torch.float16).max, self.wide[0].sign()
            odd &= ~(self.wide[0].isinf() & torch.stack([sign * other >= large for other in self.wide[1:]]).any(0))
        return odd


@dataclass(slots=True)
class _Seen:
    """What holds of all elements. One pass in parts: fresh memory for each step would cost more than computing it.

    alike: actual and eager's value are the same. odd, first_odd: how many elements are oddly not finite, and the
    first. squares, count: of the finite ones in float64. alone: eager's largest distance from float64; own: with that
    of the draws; away: the actual value's, at `farthest`. difference, ulp: the largest between actual and eager's.
    """

    alike: bool = True
    odd: int = 0
    first_odd: int = 0
    squares: float = 0.0
    count: int = 0
    alone: float = 0.0
    own: float = 0.0
    away: float = 0.0
    farthest: int = 0
    difference: float = 0.0
    ulp: float = 0.0

    @classmethod
    def of(cls, actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, draws: Sequence[torch.Tensor]) -> _Seen:
        seen = cls()
        for start, part in _parts(actual, eager, exact, *(each for each in draws if each.shape == eager.shape)):
            seen._add(start, part)
        return seen

    @property
    def scale(self) -> float:
        """The rms of the finite elements, in whose units errors are; 1 where that says nothing."""
        return self.rms if 0 < self.rms < math.inf else 1.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def allowed(self, dtype: torch.dtype, own: float | None = None) -> float:
        """How far from float64 a value may be. own: eager's own error; by default that of the draws too."""
        info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else None
        rounding = max(info.eps * self.scale, info.smallest_normal * info.eps) if info else 0.0  # or of subnormals
        return FACTOR * (self.own if own is None else own) + FLOOR_ROUNDINGS * rounding

    def _add(self, start: int, part: _Part) -> None:
        actual, eager, truth = part.wide[:3]
        if part.all_finite:
            self.count += truth.numel()
        else:
            odd, finite = part.odd(), part.finite()
            self.first_odd = self.first_odd if self.odd or not odd.any() else start + int(odd.int().argmax())
            self.odd += int(odd.sum())
            self.alike &= bool(((actual == eager) | (actual.isnan() & eager.isnan())).all())
            self.count += int(finite.sum())
            truth = truth[finite]
        self.squares += truth.square().sum().item()
        self.alone = max(self.alone, part.distance(1, 2).max().item())
        self.own = max(self.own, self.alone, *(part.distance(n, 2).max().item() for n in range(3, len(part.wide))))
        away = part.distance(0, 2)
        farthest = int(away.argmax())
        if away[farthest] > self.away:
            self.away, self.farthest = away[farthest].item(), start + farthest
        difference = part.distance(0, 1)
        largest = difference.max().item()
        if largest:
            self.alike, self.difference = False, max(self.difference, largest)
            dtype = part.tensors[1].dtype
            unit = ulp(eager, dtype) if dtype.is_floating_point or dtype.is_complex else 1.0
            self.ulp = max(self.ulp, (difference / unit).max().item())


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[int, _Part]]:
    """Tensors of as many elements each, in parts, each with the position of its first element."""
    flat = [_flat(each) for each in tensors]
    for start in range(0, flat[0].numel(), _PART):
        yield start, _Part([each[start : start + _PART] for each in flat])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _text(element: torch.Tensor) -> str:
    return f"{element.item():.9g}" if element.is_floating_point() else str(element.item())


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))
