"""Scatters and pooling as loops: what the comparison with eager, case by case, does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.ir.nodes import Extern, Kernel, Program
from tests.support import interpreted

aten = torch.ops.aten


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", options={"verify": True}, fullgraph=True)


def rows_of(program: Program) -> list[Kernel]:
    """The kernels that store where values say."""
    kernels = (node for node in program.nodes if isinstance(node, Kernel))
    return [kernel for kernel in kernels if any(store.index.vals() for _, store in kernel.stores())]


def test_scatters_give_the_same_bits_for_every_number_of_threads(threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    at = torch.randint(50, (4000,))
    table, source, line = torch.randn(50, 200), torch.randn(4000, 200), torch.randn(4000)

    def function(at: Tensor, table: Tensor, source: Tensor, line: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.index_add(table, 0, at, source),
            aten.embedding_dense_backward(source, at, 50, 3, False),
            torch.scatter_add(table[:, 0].contiguous(), 0, at, line),
            torch.index_copy(table, 0, at, source),
        )

    run = compiled(function)
    results: list[tuple[Tensor, ...]] = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(at, table, source, line))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    last = {int(row): k for k, row in enumerate(at)}
    assert torch.equal(results[0][3][list(last)], source[list(last.values())])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: torch.index_add(x, 0, i, x[: len(i)]),
        lambda x, i: torch.scatter(x, 0, i[:, None].expand(-1, 4), x),
        lambda x, i: torch.scatter(x, 1, i[:, None], 1.0),
        lambda x, i: aten.index_put(x, [i], x[: len(i)], True),
    ],
    ids=["index_add", "scatter", "choice", "index_put"],
)
@pytest.mark.parametrize("position", [99, -99])
def test_positions_outside_of_the_tensor_are_errors(function: Callable[..., Any], position: int) -> None:
    with pytest.raises(IndexError):
        compiled(function)(torch.randn(4, 4), torch.tensor([0, 1, position, 0]))


def test_cross_entropy_scatters_nothing_backward() -> None:
    programs: list[Program] = []
    x, target = torch.randn(6, 10, requires_grad=True), torch.tensor([0, 3, 9, 2, -100, 1])
    interpreted(F.cross_entropy, programs)(x, target).backward()
    expected = torch.autograd.grad(F.cross_entropy(x, target), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert not any(isinstance(node, Extern) for program in programs for node in program.nodes)
    assert not any(rows_of(program) for program in programs)


def test_positions_of_maxima_are_left_out_where_nobody_reads_them() -> None:
    programs: list[Program] = []
    interpreted(lambda x: F.max_pool2d(x, 3, 2, 1), programs)(torch.randn(1, 2, 8, 8))
    (kernel,) = programs[0].nodes
    assert isinstance(kernel, Kernel) and len(list(kernel.stores())) == 1


def test_elements_share_the_windows_that_they_lie_in() -> None:
    """Backward, a block of as many elements as the stride is long loads each gradient once."""
    programs: list[Program] = []

    def function(x: Tensor) -> Tensor:
        y, at = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
        return aten.max_pool2d_with_indices_backward(y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, at)

    interpreted(function, programs)(torch.randn(1, 2, 8, 8))
    backward = programs[0].nodes[-1]
    assert isinstance(backward, Kernel) and len(list(backward.stores())) == 4
    assert len({(load.buffer, load.index) for _, load in backward.loads()}) == 2 * 4


BACKWARDS = "x.flip(1)"
PERMUTED = "x.index_select(1, torch.arange(x.shape[1]) * 3 % x.shape[1])"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(6, 4), (5, 7), (16, 8), (33, 4), (2, 16)])
@pytest.mark.parametrize("order", [BACKWARDS, PERMUTED])
def test_sums_in_another_order_than_that_in_memory(order: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """With the flags that kernels are built with: GCC 12 made wrong vectors of these loops."""
    x = torch.randn(rows, width + 3).to(dtype)[:, :width]
    function = eval(f"lambda x: {order}.sum()", {"torch": torch})
    torch._dynamo.reset()
    result = torch.compile(function, backend="pellucid", options={"verify": True})(x)
    torch.testing.assert_close(result.double(), x.double().sum(), rtol=1e-2, atol=1e-2)
