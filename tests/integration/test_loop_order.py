"""Kernels that disagree about the order of loops, or divide their ranges otherwise: one kernel, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pellucid.backend import last_compilations
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

Function = Callable[..., Any]


def transposed_consumer(x: Tensor, y: Tensor) -> Tensor:
    return (x + 1).t() * y.t()


def both_are_stored(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x * y
    return a, (a.t() + 1).contiguous()


def the_same_input_in_two_orders(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.relu(x) + y, torch.sigmoid(x).t().contiguous()


def flat_against_not(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.sin().view(-1) + y.reshape(-1), x.cos()


def rows_and_then_transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x - x.amax(1, keepdim=True) + y).t().contiguous()


def softmax_transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).softmax(1).t().contiguous()


def norm_transposed(x: Tensor, y: Tensor) -> Tensor:
    return functional.layer_norm(x + y, x.shape[1:]).t().contiguous()


def norm_of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return functional.layer_norm((x * y).t(), x.shape[:1]).contiguous()


def columns_of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x.t() + y.t().contiguous()).sum(1)


def rows_of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return (x.t() + y.t().contiguous()).sum(0)


def copies_for_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    c = (x * 3).t().contiguous()
    return c + y.t(), c.t() * 2


def broadcast_between(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x + y[0]
    return (a.t() * y[:, 0]).contiguous(), a


def half_of_a_row(x: Tensor, y: Tensor) -> Tensor:
    """A sum of whole rows, of which masked loads read a part."""
    return functional.pad(x + y, (3, 5)).softmax(1).t().contiguous()


ONE_KERNEL: tuple[Function, ...] = (
    transposed_consumer,
    both_are_stored,
    the_same_input_in_two_orders,
    flat_against_not,
    rows_and_then_transposed,
    softmax_transposed,
    norm_transposed,
    norm_of_transposed,
    columns_of_transposed,
    rows_of_transposed,
    copies_for_two,
    broadcast_between,
    half_of_a_row,
)


def compiled(function: Function, *, dynamic: bool, loop_orders: bool = True) -> Function:
    torch._dynamo.reset()
    options = {"verify": True, "loop_orders": loop_orders}
    return torch.compile(function, backend="pellucid", dynamic=dynamic, options=options, fullgraph=True)


def inputs(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    x, y = (torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2))
    return x, y


@pytest.mark.parametrize("function", ONE_KERNEL)
def test_one_kernel_does_it(function: Function) -> None:
    run = compiled(function, dynamic=False)
    args = inputs(83, 130)
    assert_matches(run(*args), function(*args), function(*widened(args)))
    assert last_compilations()[-1].kernels == 1


@pytest.mark.parametrize("function", [both_are_stored, softmax_transposed, norm_transposed])
def test_different_orders_stay_apart_where_they_shall(function: Function) -> None:
    run = compiled(function, dynamic=False, loop_orders=False)
    args = inputs(83, 130)
    assert_matches(run(*args), function(*args), function(*widened(args)))
    assert last_compilations()[-1].kernels == 2


@pytest.mark.sampled
@pytest.mark.parametrize("function", ONE_KERNEL)
def test_sizes_may_change_and_be_short(function: Function) -> None:
    run = compiled(function, dynamic=True)
    for size in ((64, 48), (33, 17), (7, 200), (16, 16)):
        args = inputs(*size)
        assert_matches(run(*args), function(*args), function(*widened(args)))


@pytest.mark.parametrize("function", [softmax_transposed, norm_of_transposed, rows_of_transposed, half_of_a_row])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(function: Function, dtype: torch.dtype) -> None:
    run, args = compiled(function, dynamic=False), inputs(40, 75, dtype)
    assert_matches(run(*args), function(*args), function(*widened(args)))


@pytest.mark.parametrize("function", [softmax_transposed, norm_of_transposed, rows_and_then_transposed])
def test_nan_and_infinities_stay_in_their_rows(function: Function) -> None:
    run, (x, y) = compiled(function, dynamic=False), inputs(40, 75)
    x[3, 70], x[20, 0], x[39, 74] = float("nan"), float("inf"), float("-inf")
    assert_matches(run(x, y), function(x, y), function(*widened((x, y))))


@pytest.mark.parametrize("function", [transposed_consumer, both_are_stored, flat_against_not, rows_of_transposed])
def test_empty(function: Function) -> None:
    args = inputs(0, 5)
    torch.testing.assert_close(compiled(function, dynamic=False)(*args), function(*args))


def test_what_stands_in_squares_does_not_depend_on_threads() -> None:
    run, args = compiled(softmax_transposed, dynamic=False), inputs(200, 333)
    before, results = torch.get_num_threads(), list[Tensor]()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(run(*args))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_an_update_in_place_reads_before_it_writes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.sub_(x.amax(1, keepdim=True))
        return (x + y).t().contiguous()

    (x, y), run = inputs(48, 65), compiled(function, dynamic=False)
    mine, wide = x.clone(), x.double()
    expected, exact = function(x, y), function(wide, y.double())
    assert_matches(run(mine, y), expected, exact)
    assert torch.equal(mine, x)


def test_two_orders_that_no_loop_serves_stay_apart() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x.exp()
        return a.permute(2, 1, 0).contiguous(), a.permute(0, 2, 1).contiguous()

    run, x = compiled(function, dynamic=False), torch.randn(96, 96, 96)
    assert_matches(run(x), function(x), function(x.double()))
    assert last_compilations()[-1].kernels == 2


@pytest.mark.parametrize("shape", [(100, 0), (0, 100), (3, 0, 5)])
def test_copies_of_empty_tensors_whose_sizes_no_stride_shows(shape: tuple[int, ...]) -> None:
    """An axis without a point that no index names: the others alone must not be walked."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.clone(), x.to(torch.float64), x.sum(0), torch.cat([x.clone(), x[:, :0].clone()], 1)

    x = torch.randn([min(size, 1) or 1 for size in shape]).expand(shape)
    for made, eager in zip(compiled(function, dynamic=False)(x), function(x), strict=True):
        assert torch.equal(made, eager) and made.stride() == eager.stride() and made.dtype is eager.dtype
