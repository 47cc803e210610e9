"""Prefix sums are one loop that adds vectors, with what stands before and behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid.codegen.nest import Advance, steps_of
from tests.support import assert_matches, check, compiled, recorded, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def loops(function: Function, *args: Tensor) -> list[str]:
    """The kernels that are prefix sums as they run, after a comparison of the results with eager's."""
    with recorded() as records:
        check(function, args)
    kernels = [kernel for record in records for kernel in record.kernels.values()]
    return [each.name for each in kernels if any(isinstance(step, Advance) for step in steps_of(each.nest.body))]


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((3, 17, 40), 1), ((300, 9), 0), ((2, 5, 1, 33), -3), ((1, 64, 8), 1)])
def test_types_and_shapes(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul(3).to(dtype)
    assert len(loops(lambda x: x.cumsum(dim), x)) == 1


def segments(x: Tensor) -> Tensor:
    """Sums over all stretches, as state-space models compute them."""
    size = x.shape[-1]
    x = x[..., None].expand(*x.shape, size)
    x = x.masked_fill(~torch.ones(size, size).tril(-1).bool(), 0).cumsum(-2)
    return x.masked_fill(~torch.ones(size, size).tril(0).bool(), -torch.inf).exp()


PROGRAMS: dict[str, Function] = {
    "before-and-behind": lambda x: (x * 2 + 1).cumsum(1).relu() - x,
    "masked": lambda x: x.masked_fill(x > 0, 0).cumsum(0),
    "segments": lambda x: segments(x[:, :, :12]),
    "expanded": lambda x: x[:, :1].expand_as(x).cumsum(1),
    "summed": lambda x: x.cumsum(1).sum(2),
    "mean": lambda x: x.cumsum(1) / torch.arange(1, 15)[:, None],
    "normed": lambda x: x.cumsum(1).softmax(-1),
    "twice": lambda x: x.cumsum(1).cumsum(0),
    "several": lambda x: (x.cumsum(1), x.cumsum(1).sum(), x.cumsum(0)),
    "last": lambda x: x.cumsum(1)[:, -1],
    "backwards": lambda x: x.flip(1).cumsum(1).flip(1),
    "attention": lambda x: (x[..., None] * x[..., None, :]).cumsum(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_neighbours(name: str) -> None:
    assert loops(PROGRAMS[name], torch.randn(4, 14, 24)) or name == "last"


def test_arguments_that_are_changed() -> None:
    def function(x: Tensor) -> Tensor:
        x.copy_(x.cumsum(0))
        return x * 2

    check(function, (torch.randn(20, 16),))


def test_sizes_that_are_not_known() -> None:
    run = compiled(lambda x: (x + 1).cumsum(1) * 2, dynamic=True)
    for shape in ((3, 17, 40), (2, 5, 9), (4, 100, 33)):
        x = torch.randn(shape)
        assert_matches(run(x), (x + 1).cumsum(1) * 2, (widened(x) + 1).cumsum(1) * 2)


def test_gradients() -> None:
    x = torch.randn(6, 50, 16)
    found = []
    for function in (compiled(lambda x: (x.cumsum(1) ** 2).sum()), lambda x: (x.cumsum(1) ** 2).sum()):
        leaf = x.clone().requires_grad_()
        function(leaf).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)
