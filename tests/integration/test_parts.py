"""Results that are put together from parts, as users write them: `cat`, `stack`, `roll`, `pad` and slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import compiled

Function = Callable[..., torch.Tensor]
X, Y = torch.linspace(-3, 3, 240).view(4, 6, 10), torch.linspace(2, 5, 240).view(4, 6, 10)


def rotary(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return x * y.cos() + torch.cat([-other, one], -1) * y.sin()


def border(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[1:-1, 2:] = y[1:-1, 2:] + x[:-2, :-2]
    return z


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Into memory that the caller sees."""
    x[:, 1:].copy_(y[:, :-1].exp())
    return torch.cat([x, y])


CASES: dict[str, Function] = {
    "rotary": rotary,
    "border": border,
    "written": written,
    "cat": lambda x, y: torch.cat([x.exp(), y.sqrt(), x * 2], 1),
    "cat-of-types": lambda x, y: torch.cat([x.double(), y.half() * 2, x.round().int()], 2),
    "cat-of-nothing": lambda x, y: torch.cat([x[:, :0], y.exp(), torch.empty(0)], 1),
    "read-again": lambda x, y: torch.cat([x.exp(), y], 0).relu() + torch.cat([y, x.exp()], 0),
    "twice": lambda x, y: torch.cat([torch.cat([x, y.exp()], 1), torch.cat([y, x.exp()], 1)], 2),
    "summed": lambda x, y: torch.cat([x.exp(), y], 2).sum(2),
    "normed": lambda x, y: torch.cat([x.softmax(-1), y.softmax(-1)], 1),
    "product": lambda x, y: torch.cat([x @ y.mT, y @ x.mT], 2).tanh(),
    "stack": lambda x, y: torch.stack([x.sin(), y, x + y], -1),
    "split": lambda x, y: torch.stack([each.sin() for each in (x + y).unbind(1)], 0),
    "roll": lambda x, y: x.roll(1, 0) + x.roll(-1, 1) - y.roll((2, 3), (1, 2)),
    "pad": lambda x, y: F.pad(x * y, (1, 2, 0, 3), value=float("inf")) * 2,
    "scattered": lambda x, y: torch.cat([x.exp(), y]).index_add(0, torch.tensor([1, 1, 7]), y[:3]),
    "channels-last": lambda x, y: torch.cat([x[None].permute(0, 3, 1, 2), y[None].permute(0, 3, 1, 2)], 1).exp(),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("times", [1, 40], ids=["small", "large"])
def test_equals_eager(name: str, times: int) -> None:
    """Times: there, larger tensors pay for more kernels."""
    x, y = (each.repeat(times, 1, 1) for each in (X, Y))
    expected = CASES[name](x.clone(), y.clone())
    result = compiled(CASES[name])(x.clone(), y.clone())
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, equal_nan=True)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 2),
    st.sampled_from([(7, 9, 33), (64, 3, 16), (1, 200, 2)]),
)
@settings(max_examples=12, deadline=None)
def test_any_parts_of_any_axis(sizes: list[int], dim: int, shape: tuple[int, ...]) -> None:
    whole = [torch.randn(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]

    def put_together(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part * (k + 1) for k, part in enumerate(parts)], dim)

    torch._dynamo.reset()
    assert torch.equal(compiled(put_together)(*whole), put_together(*whole))


def test_gradients_of_parts() -> None:
    def step(function: Function) -> list[torch.Tensor]:
        x, y = (each.repeat(40, 1, 1).requires_grad_() for each in (X, Y))
        function(x, y).square().sum().backward()
        return [each.grad for each in (x, y) if each.grad is not None]

    for name in ("rotary", "cat", "stack", "roll"):
        for mine, eager in zip(step(compiled(CASES[name])), step(CASES[name]), strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, i: torch.cat([w, w[i]])[:60] * 1,
        lambda w, i: w[i].roll(3)[:10] * 1,
        lambda w, i: F.pad(w[i], (-25, 3)) * 1,
        lambda w, i: w[i][:10] * 1,
    ],
)
def test_positions_that_no_part_needs_are_checked(function: Function) -> None:
    positions = torch.arange(40)
    assert torch.equal(compiled(function)(torch.arange(50), positions), function(torch.arange(50), positions))
    positions[20] = 50
    with pytest.raises(IndexError):
        compiled(function)(torch.arange(50), positions)


def test_unknown_sizes_choose_at_each_point() -> None:
    function = torch.compile(lambda x, y: torch.cat([x * 2, y], 0), backend="pellucid", dynamic=True)
    for size in (3, 70, 1):
        x, y = torch.randn(size, 33), torch.randn(5, 33)
        assert torch.equal(function(x, y), torch.cat([x * 2, y]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [(3, {"padding": 1}), ((2, 3), {"stride": 2}), (3, {"stride": 2, "padding": (1, 2), "dilation": 2}), ((4, 2), {})],
)
def test_windows_are_laid_out_and_added_up(kernel: int, options: dict[str, int], dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.fold(F.unfold(x, kernel, **options).sin(), x.shape[2:], kernel, **options)  # type: ignore[arg-type]

    torch._dynamo.reset()
    run = compiled(function, dynamic=dynamic)
    for size in ((2, 3, 13, 11), (1, 1, 9, 8)):
        x, y = (torch.randn(size, generator=torch.manual_seed(1), requires_grad=True) for _ in range(2))
        result, expected = run(x), function(y)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
