"""Errors that eager raises while it computes: the compiled program raises the same kind, and says where."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch


@pytest.mark.parametrize(
    "divide",
    [
        torch.remainder,
        torch.fmod,
        torch.floor_divide,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ],
    ids=["remainder", "fmod", "floor_divide", "div_floor", "div_trunc"],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integers_divided_by_a_tensor_that_holds_a_zero(divide: Callable[..., torch.Tensor], dtype) -> None:
    compiled = torch.compile(lambda x, y: divide(x + 1, y), backend="pellucid")
    x, y = torch.tensor([5, 7], dtype=dtype), torch.tensor([2, 3], dtype=dtype)
    assert torch.equal(compiled(x, y), divide(x + 1, y))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, torch.zeros_like(y))


@pytest.mark.parametrize(
    ("function", "argument", "kind", "message"),
    [
        (lambda x: x.max(1).values, torch.ones(3, 0), IndexError, "Expected reduction dim 1 to have non-zero size"),
        (torch.linalg.cholesky, -torch.eye(3), torch.linalg.LinAlgError, "not positive-definite"),
        (torch.linalg.inv, torch.zeros(3, 3), torch.linalg.LinAlgError, "singular"),
        (lambda x: torch.nn.functional.one_hot(x, 5), torch.tensor([0, 5]), RuntimeError, "smaller than num_classes"),
    ],
    ids=["max", "cholesky", "inv", "one_hot"],
)
def test_an_operator_of_aten_fails(function, argument, kind: type[Exception], message: str) -> None:
    for run in (function, torch.compile(function, backend="pellucid")):
        with pytest.raises(kind, match=message):
            run(argument)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x,
        lambda x: -x,
        lambda x: x < 3,
        lambda x: x.amax(),
        lambda x: x.argmax(),
        lambda x: x.sum(dtype=x.dtype),
        lambda x: x.flip(0),
        lambda x: x.scatter(0, torch.tensor([0]), 1),
        lambda x: x * torch.tensor([1, 2]),
        lambda x: x == torch.tensor([1, 2]),
        lambda x: torch.where(x == 1, x, torch.tensor([1, 2])),
        lambda x: torch.cat([x, torch.tensor([1, 2])]),
        lambda x: torch.ones(9).index_select(0, x),
    ],
)
def test_what_eager_refuses_of_wide_unsigned_integers(function: Callable[..., torch.Tensor], dtype) -> None:
    x = torch.tensor([1, 2], dtype=torch.int32).to(dtype)
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        function(x)
    with pytest.raises(eager.type, match=re.escape(str(eager.value))):
        torch.compile(function, backend="pellucid")(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.index_add(0, torch.tensor([0]), torch.tensor(1.0)),
        lambda x: torch.index_put(x, (torch.tensor([True]),), torch.tensor(1.0)),
    ],
    ids=["index_add", "index_put"],
)
def test_shapes_that_eager_refuses(function: Callable[..., torch.Tensor]) -> None:
    for run in (function, torch.compile(function, backend="pellucid")):
        with pytest.raises((RuntimeError, IndexError), match="shape"):
            run(torch.ones(3))


def test_an_error_of_aten_names_the_operator_and_the_line() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match=r"(?s)_linalg_check_errors.*at .*test_errors\.py:\d+"):
        torch.compile(lambda x: torch.linalg.cholesky(x) + 1, backend="pellucid")(-torch.eye(3))
