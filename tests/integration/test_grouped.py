"""Products of groups of rows, each with a matrix of its own: forward, gradients, frozen, what is fused with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  registers the operators of experts
from torch import nn

from pellucid.ir.interp import run_kernel
from pellucid.ir.nodes import Extern, Kernel
from tests.integration.freezing import agrees, frozen
from tests.support import assert_matches, error, randn, recorded, run_loops, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

SHAPES = {
    "even": (256, 64, 96, (32, 64, 96, 128, 160, 192, 224, 256)),
    "few rows": (16, 64, 128, (2, 4, 6, 16)),
    "empty groups": (40, 33, 70, (0, 3, 17, 17, 40)),
    "rows behind the last group": (50, 100, 96, (0, 20, 31)),
    "no rows in any group": (20, 64, 64, (0, 0)),
    "one group": (30, 64, 64, (25,)),
    "one row": (1, 64, 64, (0, 1)),
    "several blocks": (1100, 40, 64, (10, 900, 1000)),
    "long sums": (30, 1000, 64, (7, 30)),
}


def experts(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def operands(name: str, dtype: torch.dtype, across: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrices whose columns lie side by side unless they lie `across`, and where groups end."""
    rows, terms, columns, ends = SHAPES[name]
    shape = (len(ends), columns, terms) if across else (len(ends), terms, columns)
    weight = randn(*shape, dtype=dtype) / terms**0.5
    return randn(rows, terms, dtype=dtype), weight.mT if across else weight, torch.tensor(ends, dtype=torch.int32)


def ran(records: Sequence[Any]) -> tuple[int, int, int]:
    """How many kernels of a run choose matrices by rows and by terms; and how many calls are left to ATen."""
    programs = [program for record in records for program in record.programs]
    plans = [kernel.plan.blocks for program in programs for kernel in program.kernels.values()]
    found = [blocks.contraction for blocks in plans if blocks is not None]
    left = [node for program in programs for node in program.scheduled.nodes if isinstance(node, Extern)]
    by_terms = [bool(each.choice.batch) for each in found if each.choice]
    return by_terms.count(False), by_terms.count(True), len(left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(name: str, dtype: torch.dtype) -> None:
    for across in (False, True):
        args = operands(name, dtype, across)
        torch._dynamo.reset()
        with recorded() as records:
            made = torch.compile(experts, backend="pellucid", options={"verify": True})(*args)
        assert_matches(made, experts(*args), experts(*widened(args)))
        assert ran(records) == (int(name != "one row"), 0, 0), "a product with one row is a reduction"


def test_what_follows_is_fused_with_the_product() -> None:
    def function(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(experts(rows, weight, ends)) * scale[:, None]

    args = (*operands("even", torch.float32, True), randn(256))
    with recorded() as records:
        made = torch.compile(function, backend="pellucid")(*args)
    assert_matches(made, function(*args), function(*widened(args)))
    (record,) = records
    assert len(record.programs[0].scheduled.nodes) == 2, "what finds the groups of rows, and the product"


def test_rows_of_no_group_are_zero_whatever_they_hold() -> None:
    rows, weight, ends = operands("rows behind the last group", torch.float32, False)
    rows[40], rows[5] = float("inf"), float("nan")
    weight[0] = float("inf")  # a group without rows
    made = torch.compile(experts, backend="pellucid")(rows, weight, ends)
    assert torch.equal(made[31:], torch.zeros(19, 96)) and made[5].isnan().all()
    assert made[:31].isfinite().all(1).sum() == 30


def test_sizes_and_groups_may_differ_from_call_to_call() -> None:
    compiled = torch.compile(experts, backend="pellucid", dynamic=True)
    with recorded() as records:
        for rows, ends in ((64, (10, 20, 64)), (300, (0, 299, 300)), (7, (3, 3, 3)), (64, (64, 64, 64))):
            args = (randn(rows, 48), randn(3, 48, 64), torch.tensor(ends))
            assert_matches(compiled(*args), experts(*args), experts(*widened(args)))
    assert len(records) == 1


class Experts(nn.Module):
    def __init__(self, groups: int, terms: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, columns, terms) / terms**0.5)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return experts(rows, self.weight.mT, ends).relu()


@pytest.mark.parametrize(("rows", "packed"), [(200, True), (12, False)])
def test_frozen_matrices_are_packed_where_many_rows_share_them(rows: int, packed: bool) -> None:
    model, ends = Experts(3, 80, 70), torch.tensor([rows // 3, rows // 2, rows])
    with recorded() as records:
        compiled = frozen(model)
        agrees(compiled, model, randn(rows, 80), ends)
        model.weight.data *= 2
        agrees(compiled, model, randn(rows, 80), ends)
        with torch.no_grad():
            model.weight.copy_(torch.randn(3, 70, 80))
        agrees(compiled, model, randn(rows, 80), torch.tensor([0, rows - 1, rows]))
    kernels = [each for record in records for program in record.programs for each in program.kernels.values()]
    assert any(kernel.packing for kernel in kernels) is packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_rows_and_matrices(name: str, dtype: torch.dtype) -> None:
    rows, weight, ends = operands(name, dtype, True)

    def gradients(function: Any, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, weight = rows.clone().requires_grad_(), weight.mT.clone().requires_grad_()
        result = function(rows, weight.mT, ends)
        return torch.autograd.grad(result, (rows, weight), torch.cos(torch.arange(result.numel())).view_as(result))

    torch._dynamo.reset()
    with recorded() as records:
        made = gradients(torch.compile(experts, backend="pellucid", options={"verify": True}), rows, weight)
    exact = gradients(experts, rows.double(), weight.double())
    assert_matches(made, gradients(experts, rows, weight), exact)
    single = name in ("one row", "one group")
    assert ran(records) == (2 * (name != "one row"), int(not single), 0)


def test_torchs_own_operator_in_both_its_forms() -> None:
    def function(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, weight.mT, offs=ends)

    rows, weight = randn(64, 32, dtype=torch.bfloat16), randn(3, 48, 32, dtype=torch.bfloat16)
    ends = torch.tensor([10, 10, 64], dtype=torch.int32)

    def gradients(function: Any) -> tuple[torch.Tensor, ...]:
        leaves = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*leaves, ends)
        return result, *torch.autograd.grad(result.float().square().sum(), leaves)

    with recorded() as records:
        made = gradients(torch.compile(function, backend="pellucid"))
    for one, other in zip(made, gradients(function), strict=True):
        assert error(one, other) <= 1e-2 and one.stride() == other.stride()
    assert ran(records) == (2, 1, 0)


def test_groups_of_columns_are_left_to_aten() -> None:
    def function(weight: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(weight, columns.mT, offs=ends)

    args = (randn(3, 48, 32, dtype=torch.bfloat16), randn(64, 32, dtype=torch.bfloat16))
    ends = torch.tensor([10, 10, 64], dtype=torch.int32)
    with recorded() as records:
        made = torch.compile(function, backend="pellucid")(*args, ends)
    assert torch.equal(made, function(*args, ends))
    assert ran(records) == (0, 0, 1)
    (why,) = [each.why for each in records[0].programs[0].decisions if each.rule == "lower.fallback"]
    assert "ATen the other forms" in why


def test_nests_run_as_the_interpreter_says_in_any_order_of_groups() -> None:
    """Neighbours of one group are computed together; nothing says that these are all of it."""
    rows, weight, ends = operands("empty groups", torch.float32, True)
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    torch._dynamo.reset()
    with recorded() as records:
        torch.compile(experts, backend="pellucid")(rows, weight, ends).sum().backward()
    checked = 0
    programs = [program for record in records for program in record.programs]
    for program, node in [(each, node) for each in programs for node in each.scheduled.nodes]:
        if isinstance(node, Kernel) and program.kernels[node.name].plan.blocks is not None:
            buffers = {
                param.name: torch.arange(40) * 7 // 3 % 6 if "groups" in param.name else randn(param.numel.value or 0)
                for param in node.params
            }
            expected = {name: tensor.clone() for name, tensor in buffers.items()}
            run_kernel(node, expected, {})
            actual = run_loops(program.kernels[node.name], buffers, {}, backwards=False)
            assert all(error(actual[name], tensor) <= 1e-5 for name, tensor in expected.items())
            checked += 1
    assert checked == 3


def test_terms_that_choose_are_not_packed() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 96).bfloat16())

        def forward(self, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(columns, self.weight, offs=ends)

    model, args = Sums(), (randn(48, 64, dtype=torch.bfloat16), torch.tensor([10, 64], dtype=torch.int32))
    with recorded() as records, torch.no_grad():
        assert error(frozen(model)(*args), model(*args)) <= 1e-2
    assert ran(records) == (0, 1, 0)
