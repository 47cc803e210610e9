"""Random numbers in compiled graphs are eager's own, and leave its generator where eager leaves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pellucid.native import random
from tests.integration.traced import names_of_kernels, said, traced
from tests.support import assert_matches


def drawn(run: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a function makes of a seed, and the state of the generator then."""
    torch.manual_seed(7)
    return run(*args), torch.get_rng_state()


def assert_draws_as_eager(function: Callable[..., torch.Tensor], *args: torch.Tensor, **options: bool) -> None:
    run = torch.compile(function, backend="pellucid", **options)  # type: ignore[call-overload]
    for _ in range(2):
        (made, after), (expected, state) = drawn(run, *args), drawn(function, *args)
        assert_matches(made, expected, expected)
        assert made.stride() == expected.stride() and torch.equal(after, state)


TENSORS = {
    "contiguous": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels-last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(5, 1).expand(5, 4),
    "strided": lambda: torch.randn(8, 8)[:, ::2],
    "permuted": lambda: torch.randn(4, 6, 2).permute(2, 0, 1),
    "empty": lambda: torch.randn(0, 3),
    "a number": lambda: torch.randn(()),
    "float64": lambda: torch.randn(33, dtype=torch.float64),
    "of several threads": lambda: torch.randn(70, 1001),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_dropout_keeps_the_elements_that_eager_keeps(kind: str, dynamic: bool) -> None:
    x = TENSORS[kind]()
    for p in (0.4, 1.0):
        assert_draws_as_eager(lambda x, p=p: F.dropout(x, p, True), x, dynamic=dynamic)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "of several threads"])
def test_numbers_that_are_drawn_one_after_another(kind: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kept = x.new_empty(x.shape[0], 1).bernoulli_(0.8)  # as drop paths are written
        return (torch.rand_like(x) + torch.bernoulli(x, 0.3)) * kept + torch.rand(3)[0] + F.dropout(x, 0.1, True)

    assert_draws_as_eager(function, TENSORS[kind]())


def test_equal_calls_draw_different_numbers() -> None:
    assert_draws_as_eager(lambda x: F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True), torch.randn(20, 30))


def test_gradients_of_dropout_keep_the_same_elements() -> None:
    def step(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x.sin(), 0.3, True).exp(), 0.2, True)

    run, x = torch.compile(function, backend="pellucid"), torch.randn(64, 100)
    (made, after), (expected, state) = drawn(lambda x: step(run, x), x), drawn(lambda x: step(function, x), x)
    assert_matches(made, expected, expected)
    assert torch.equal(after, state)


@pytest.mark.parametrize("noise", [lambda x: F.dropout(x, 0.5, True), lambda x: torch.rand_like(x) + x])
def test_what_is_computed_again_for_backward_draws_the_same_numbers(noise: Callable[..., torch.Tensor]) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return noise((x * 2).tanh()) * x

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False).square().sum()

    x = torch.randn(40, 50, requires_grad=True)
    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(function(x), x)
    torch.manual_seed(3)
    (made,) = torch.autograd.grad(torch.compile(function, backend="pellucid")(x), x)
    assert_matches(made, expected, expected)


def test_dropout_is_fused_with_what_surrounds_it(tmp_path: Path) -> None:
    """Only the booleans are drawn by a call; they are multiplied where the tensor is made."""
    _, rows = traced(lambda x: F.dropout(x.relu(), 0.1, True) + x, tmp_path, torch.randn(32, 64))
    assert len(said(rows, "lower.fallback")) == 1 and len(names_of_kernels(tmp_path)) == 2


def test_a_probability_that_is_none_raises_as_in_eager() -> None:
    run = torch.compile(lambda x: x.bernoulli_(1.5) + 1, backend="pellucid")
    with pytest.raises(RuntimeError, match="p to be in"):
        run(torch.randn(4))


@pytest.mark.parametrize("p", [0.0, 1e-300, 0.1, 0.5, 1 / 3, 0.9, 1.0])
def test_numbers_and_state_are_atens(p: float) -> None:
    """Wherever the words of a state end: between two numbers, in one, or at the first."""
    for before in (0, 1, 2, 311, 622, 623, 624, 625):
        for count in (0, 1, 311, 312, 313, 625, 5000, 70_001):
            ours, theirs = (torch.Generator().manual_seed(before) for _ in range(2))
            for generator in (ours, theirs):
                torch.rand(before, generator=generator)
            made, expected = (torch.empty(count, dtype=torch.bool) for _ in range(2))
            random.bernoulli_(made, p, ours)
            expected.bernoulli_(p, generator=theirs)
            assert torch.equal(made, expected) and torch.equal(ours.get_state(), theirs.get_state())


def test_aten_draws_where_its_numbers_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_draws_as_aten", lambda: False)
    monkeypatch.setattr(random, "_drawn", lambda *_: pytest.fail("numbers that are not ATen's"))
    mask = torch.empty(50, dtype=torch.bool)
    made, _ = drawn(lambda mask: random.bernoulli_(mask, 0.4).clone(), mask)
    expected, _ = drawn(lambda mask: mask.bernoulli_(0.4), mask)
    assert torch.equal(made, expected)


def test_elements_with_gaps_between_them_are_atens() -> None:
    def ours(mask: torch.Tensor) -> torch.Tensor:
        return random.bernoulli_(mask, 0.5)

    whole = torch.zeros(10, 10, dtype=torch.bool)
    made, _ = drawn(ours, whole[:, ::2])
    expected, _ = drawn(lambda mask: mask.bernoulli_(0.5), torch.zeros(10, 10, dtype=torch.bool)[:, ::2])
    assert torch.equal(made, expected) and not whole[:, 1::2].any()
