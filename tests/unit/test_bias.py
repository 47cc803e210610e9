"""Truncation is told from rounding, and healthy code is never blamed: it rounds where eager does, or less often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import Verdict, close
from pellucid.kit.judge.vary import InPlace, changed, unchanged

Round = Callable[[torch.Tensor], torch.Tensor]

# By name, what becomes of two matrices of one shape; `r` rounds, or not.
PROGRAMS: dict[str, Callable[[Round, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda r, x, y: r(x * y),
    "chain": lambda r, x, y: r(r(r(r(x * y) + x) * 1.1) - y),
    "steps": lambda r, x, y: r(r(r(r(x * 1.001) * 1.002) * 1.003) + 0.001 * y),
    "constants": lambda r, x, y: r(r(r(r(x * 1.1) * 1.3) / 1.7) + 0.3),
    "mean": lambda r, x, y: r(r(x - r(x.mean())) / r(y.abs().mean())),
    "rows": lambda r, x, y: r(r(x - r(x.mean(1, True))) * r(1 / (r(y.square().mean(1, True)) + 1e-5).sqrt())),
    "columns": lambda r, x, y: r(r(x * r(y.mean(0))) + r(x.mean(0))),
    "softmax": lambda r, x, y: r(r((r(x - x.amax(1, True))).exp()) / r(r(r(x - x.amax(1, True)).exp()).sum(1, True))),
    "scale": lambda r, x, y: r(r(x * r(y[0, 0])) * r(r(x[0, 0] * 1.7) + 1)),
    "product of matrices": lambda r, x, y: r(r(x @ r(y.T * 0.1)) * 1.3) + 0 * x[:, :1],
    "halves": lambda r, x, y: r(r(r(x + y) / 2) * 1.5),
    "activation": lambda r, x, y: r(r(r(x.sigmoid()) * x) * r(y.tanh())),
    "small": lambda r, x, y: r(r(r(x + 0.003) + 0.003) + 0.003),
}
# By name, how a matrix is drawn: also as values that lie alike between those that the type holds.
DATA: dict[str, Callable[..., torch.Tensor]] = {
    "normal": torch.randn,
    "positive": torch.rand,
    "integers": lambda *shape: torch.randint(1, 300, shape).float(),
    "few": lambda *shape: torch.randint(1, 5, shape) / 7,
    "constant": lambda *shape: torch.full(shape, torch.rand(()).item() + 0.5),
    "large": lambda *shape: torch.randn(shape) * 50 + 100,
    "relu": lambda *shape: torch.randn(shape).relu(),
}


def rounding_to(dtype: torch.dtype) -> Round:
    return lambda x: x.to(dtype).to(x.dtype)


def truncating_to(dtype: torch.dtype, down: bool = False) -> Round:
    """Towards zero, or minus infinity."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        near = x.to(dtype)
        towards = torch.full_like(near, -torch.inf if down else 0)
        beyond = (near.double() > x) if down else (near.double().abs() > x.abs())
        return torch.where(beyond, torch.nextafter(near, towards), near).to(x.dtype)

    return cut


def sometimes(number: int, rounding: Round) -> Round:
    """Only where a bit of `number` is set."""
    count = iter(range(64))
    return lambda x: rounding(x) if number >> next(count) & 1 else x


def judged(name: str, data: str, dtype: torch.dtype, seed: int, compiled: Round, shape: tuple[int, int]) -> Verdict:
    """What is said of a program whose intermediate roundings are `compiled`; the last is always there."""
    torch.manual_seed(seed)
    given = [DATA[data](*shape).to(dtype) for _ in range(2)]
    narrow = rounding_to(dtype)

    def eagerly(change: InPlace) -> dict[str, torch.Tensor]:
        return {"it": PROGRAMS[name](narrow, *(each.float() for each in changed(given, change))).to(dtype)}

    def exactly(change: InPlace) -> dict[str, torch.Tensor]:
        return {"it": PROGRAMS[name](lambda x: x, *(each.double() for each in changed(given, change)))}

    eager = eagerly(unchanged)
    made = PROGRAMS[name](compiled, *(each.float() for each in given)).to(dtype)
    found = close(made, eager["it"]) or Expected(eager, exactly, eagerly).judge("it", made)
    return found.verdict


CASES = [(name, data) for name in PROGRAMS for data in DATA]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_healthy_code_is_not_blamed(dtype):
    wrong = []
    for number, (name, data) in enumerate(CASES):
        subset, shape = 7919 * (number + 1) % 64, ((40, 50), (2, 700), (300, 3))[number % 3]
        verdict = judged(name, data, dtype, 0, sometimes(subset, rounding_to(dtype)), shape)
        wrong += [(name, data, subset, shape)] * (not verdict.good)
    assert not wrong


# Those that share no rounding, or by row or column only: what is shared may lean without a fault.
TOLD = ["product", "chain", "rows", "columns", "product of matrices", "halves", "activation"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("name", TOLD)
def test_truncation_is_wrong(name, down, dtype):
    assert judged(name, "normal", dtype, 0, truncating_to(dtype, down), (40, 50)) is Verdict.WRONG


def test_a_few_numbers_that_eager_has_exactly_by_chance():
    """Of the roundings before a sum, compiled code may make some; eager's may cancel."""
    x = torch.full((64,), 1 + 2**-9)
    x[::2] = 1 - 2**-9 + 2**-12

    def eagerly(change: InPlace) -> dict[str, torch.Tensor]:
        return {"it": changed(x, change).bfloat16().float().sum()}

    expected = Expected(eagerly(unchanged), lambda change: {"it": changed(x, change).double().sum()}, eagerly)
    error = (expected.eager["it"] - x.sum()).abs().item()
    assert error < 0.01 and expected.judge("it", x.sum() + 0.06).verdict is Verdict.ROUNDING
    assert expected.judge("it", x.sum() + 5).verdict is Verdict.WRONG
