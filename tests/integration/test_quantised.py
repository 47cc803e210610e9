"""Weights that are integers in memory: their conversions, and products that compute what they multiply."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid.ir.contraction import find_contraction
from pellucid.ir.nodes import Kernel, Node
from pellucid.ir.types import DType
from tests.support import assert_matches, recorded, recorded_fallbacks, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = nn.functional
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
TYPES = (*INTEGERS, torch.float32, torch.float64)


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", options={"verify": True})


def nodes_of(function: Callable[..., Any], *args: Any) -> list[Node]:
    """What the program of `function` consists of; its result is compared with eager's and float64's."""
    with recorded() as records, torch.no_grad():
        assert_matches(compiled(function)(*args), function(*args), function(*widened(args)))
    return [node for record in records for program in record.programs for node in program.scheduled.nodes]


def integers(dtype: torch.dtype, size: int) -> Tensor:
    """All over the range of the type, its ends among them."""
    info = torch.iinfo(dtype)
    drawn = torch.randint(info.min, info.max, (size,), dtype=dtype)
    drawn[:4] = torch.tensor([info.min, info.max, 0, info.max // 2 + 1], dtype=dtype)
    return drawn


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 15, 64, 133])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_conversions_follow_eager(dtype: torch.dtype, size: int) -> None:
    """Of all lanes alike: in kernels of one step of four bytes, in narrower ones, and where reductions unroll them."""
    x = integers(dtype, 4 * size).reshape(4, size)

    def together(x: Tensor) -> list[Tensor]:
        return [x.to(other) for other in TYPES if other is not dtype]

    def narrow(x: Tensor) -> list[Tensor]:
        return [x.to(other) for other in (torch.int8, torch.uint8, torch.int16) if other is not dtype]

    def reduced(x: Tensor) -> list[Tensor]:
        return [x.to(other).amax(-1) for other in TYPES]

    for function in (together, narrow, reduced):
        for result, expected in zip(compiled(function)(x), function(x), strict=True):
            assert result.dtype is expected.dtype
            assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_numbers_that_are_stored_narrow_follow_eager(dtype: torch.dtype) -> None:
    x, scale = torch.randn(7, 133) * 40, torch.rand(7, 1) + 0.5

    def quantised(x: Tensor) -> Tensor:
        return (x / scale + 60).round().clamp(0, 120).to(dtype)

    assert torch.equal(compiled(quantised)(x), quantised(x))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_are_kernels(dtype: torch.dtype) -> None:
    x, by = integers(dtype, 133), torch.arange(133).remainder(7).to(dtype)

    def shifted(x: Tensor, by: Tensor) -> list[Tensor]:
        return [x >> 3, x << 2, x >> by, x << by, 100 >> by, 3 << by, torch.bitwise_and(77, x), torch.bitwise_xor(5, x)]

    with recorded_fallbacks() as fallbacks:
        results = compiled(shifted)(x, by)
    assert not fallbacks
    for result, expected in zip(results, shifted(x, by), strict=True):
        assert result.dtype is expected.dtype
        assert torch.equal(result, expected)


class ByRow(nn.Module):
    """int8, with a scale for each output that is applied to weights, or to results."""

    def __init__(self, inputs: int, outputs: int, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.register_buffer("weight", torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outputs) / 100)

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.weight.to(x.dtype), self.scale.to(x.dtype)
        return F.linear(x, weight * scale[:, None]) if self.weights else F.linear(x, weight) * scale


class ByGroup(nn.Module):
    """Two numbers of four bits in a byte, with a scale and a zero for each group of `size`."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (outputs, inputs // size, size // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(outputs, inputs // size, 1) / 100)
        self.register_buffer("zero", torch.randint(0, 16, (outputs, inputs // size, 1), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.cat((self.weight & 15, self.weight >> 4), -1)
        weight = (numbers.to(x.dtype) - self.zero.to(x.dtype)) * self.scale.to(x.dtype)
        return F.linear(x, weight.flatten(1))


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [False, True])
def test_weights_of_few_rows_are_not_written_as_floats(weights: bool, dtype: torch.dtype, rows: int) -> None:
    nodes = nodes_of(ByRow(200, 96, weights), torch.randn(rows, 200, dtype=dtype))
    assert all(isinstance(node, Kernel) for node in nodes)
    assert not any(
        param.numel.value == 200 * 96 and param.dtype is not DType.I8 for node in nodes for param in node.params
    )
    assert rows > 1 or len(nodes) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [2, 4, 5, 8, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integer", [torch.int8, torch.uint8])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("terms", [200, 131])
def test_products_cast_bytes_as_they_read_them(
    rows: int, dtype: torch.dtype, integer: torch.dtype, layout: str, terms: int
) -> None:
    weight = integers(integer, 70 * terms * 2).view(70, 2 * terms)
    weight = {"rows": weight[:, :terms], "columns": weight[:, :terms].T.contiguous().T, "strided": weight[:, ::2]}[
        layout
    ]
    nodes = nodes_of(lambda x, q: F.linear(x, q.to(x.dtype)).relu(), torch.randn(rows, terms, dtype=dtype), weight)
    assert all(isinstance(node, Kernel) for node in nodes)
    assert not any(param.numel.value == 70 * terms and param.dtype.is_float for node in nodes for param in node.params)
    found = [find_contraction(node) for node in nodes if isinstance(node, Kernel)]
    if rows > 4 or layout == "rows":
        assert [each and each.cast for each in found] == [DType.I8 if integer is torch.int8 else DType.U8]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, q: F.linear(x, q.to(torch.uint8).to(x.dtype)),  # negative numbers become others
        lambda x, q: F.linear(x, q.to(torch.bool).to(x.dtype)),
        lambda x, q: F.linear(x, q.to(x.dtype) * 0.5),
        lambda x, q: F.linear(x, q.to(torch.int16).to(x.dtype)),
        lambda x, q: F.linear(x.to(torch.int8).to(x.dtype), q.to(x.dtype)),
        lambda x, q: q.to(x.dtype) @ x.T,
        lambda x, q: F.linear(x, q.to(x.dtype)) + q.to(x.dtype).sum(1),
        lambda x, q: torch.einsum("ik,jk->ji", x, q.to(x.dtype)).contiguous(),
    ],
)
@pytest.mark.parametrize("rows", [7, 40])
def test_other_casts_are_those_of_eager(function: Callable[..., Tensor], rows: int) -> None:
    nodes_of(function, torch.randn(rows, 200) * 20, integers(torch.int8, 96 * 200).view(96, 200))


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_bytes_are_cast_in_networks_that_are_frozen_or_dynamic_or_train(freeze: bool, dynamic: bool) -> None:
    model = nn.Sequential(ByRow(200, 96, False), nn.GELU(), ByRow(96, 64, False))
    torch._dynamo.reset()
    run = torch.compile(model, backend="pellucid", dynamic=dynamic, options={"freeze": freeze, "verify": True})
    for rows in (9, 40, 3):
        x = torch.randn(rows, 200)
        with torch.no_grad():
            assert_matches(run(x), model(x), copy.deepcopy(model)(x.double()))
    if not freeze:
        one, other, exact = (torch.randn(9, 200).requires_grad_() for _ in range(3))
        other.data, exact = one.data.clone(), one.detach().double().requires_grad_()
        made = [torch.autograd.grad(call(x).sum(), x)[0] for call, x in ((run, one), (model, other), (model, exact))]
        assert_matches([made[0]], [made[1]], [made[2]])


def test_weights_of_more_rows_or_of_floats_are_read_as_they_lie() -> None:
    more = nodes_of(ByRow(200, 96, True), torch.randn(5, 200))
    assert any(param.numel.value == 200 * 96 and param.dtype is DType.F32 for node in more for param in node.params)
    scaled = nodes_of(lambda x, weight: F.linear(x, weight * 0.5), torch.randn(4, 200), torch.randn(96, 200))
    assert [find_contraction(node) is not None for node in scaled] == [False, True]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(
    "make", [lambda: ByRow(256, 64, True), lambda: ByRow(256, 64, False), lambda: ByGroup(256, 64, 32)]
)
def test_products_with_integers_are_those_of_eager(make: Callable[[], nn.Module], rows: int) -> None:
    nodes = nodes_of(make(), torch.randn(rows, 256))
    assert all(isinstance(node, Kernel) for node in nodes)


@pytest.mark.parametrize("columns", [1, 3])
def test_a_product_with_few_columns_computes_its_operands(columns: int) -> None:
    weight = torch.randint(-128, 128, (70, 300), dtype=torch.int8)
    nodes = nodes_of(lambda x: weight.to(x.dtype) @ x.sin(), torch.randn(300, columns))
    assert all(isinstance(node, Kernel) for node in nodes)
    assert all(param.numel.value != 70 * 300 or param.dtype is DType.I8 for node in nodes for param in node.params)
