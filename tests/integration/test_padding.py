"""Padded rows in whole programs: eager's results and layouts, and only where sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid import pipeline
from pellucid.debug import Program
from pellucid.ir import nodes
from pellucid.ir.decision import Decision
from pellucid.machine import AVX2
from pellucid.machine.model import to_text
from pellucid.schedule.pad import pad


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nodes.Program, nodes.Program, list[Decision]]]:
    """What the pass was given, what it made of it and why, one for each program."""
    seen: list[tuple[nodes.Program, nodes.Program, list[Decision]]] = []

    def watched(program: nodes.Program, *rest: Any) -> Any:
        result = pad(program, *rest)
        seen.append((program, result[0], result[2]))
        return result

    monkeypatch.setattr(pipeline, "pad", watched)
    return seen


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same caches wherever the tests run: a second one of a MiB, of whose lines a set holds 8."""
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    path.write_text(to_text(AVX2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELLUCID_MACHINE", str(path))
        yield


def compiled(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", options={"verify": True, **options})


def balance(x: Tensor) -> Tensor:
    """Columns of rows that sum up to one."""
    y = x / x.sum(1, keepdim=True)
    return y / y.sum(0, keepdim=True)


def arena(program: nodes.Program) -> int:
    return sum((b.numel.value or 0) * b.dtype.itemsize for b in program.buffers if b.role == "temp")


ROWS = 512
"""More rows of 2048 or 4096 bytes than that cache holds of one column."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("row_bytes", [4096, 2048])
def test_padded_rows_give_what_eager_gives(told: Any, row_bytes: int, dtype: torch.dtype) -> None:
    columns = row_bytes // dtype.itemsize
    x = torch.rand(ROWS, columns).to(dtype) + 0.5
    result = compiled(balance)(x)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.double(), balance(x.double()), rtol=tolerance, atol=0)
    assert result.stride() == (columns, 1) and result.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    ((before, after, decisions),) = told
    assert [decision.ok for decision in decisions] == [True]
    assert arena(before) < arena(after) < 1.125 * arena(before)


def test_the_option_switches_it_off(told: Any) -> None:
    x = torch.rand(ROWS, 1024) + 0.5
    off, on = compiled(balance, pad=False)(x), compiled(balance)(x)
    assert len(told) == 1, "only the second program was asked about"
    torch.testing.assert_close(off, on, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(ROWS, 1000), (ROWS, 1001), (100, 1024), (0, 1024), (ROWS, 0), (1, 1024)])
def test_rows_that_spread_by_themselves_stay(told: Any, shape: tuple[int, int]) -> None:
    x = torch.rand(shape) + 0.5
    torch.testing.assert_close(compiled(balance)(x), balance(x), rtol=1e-5, atol=1e-6)
    assert all(before == after and not decisions for before, after, decisions in told)


def test_batches_are_padded_row_by_row(told: Any) -> None:
    def run(x: Tensor) -> Tensor:
        y = x / x.sum(2, keepdim=True)
        return y / y.sum(1, keepdim=True)

    x = torch.rand(2, ROWS, 512) + 0.5
    torch.testing.assert_close(compiled(run)(x), run(x), rtol=1e-5, atol=0)
    assert [decision.ok for decision in told[0][2]] == [True]


def test_rows_of_unknown_length_stay(told: Any) -> None:
    step = torch.compile(balance, backend="pellucid", dynamic=True, options={"verify": True})
    for rows in (ROWS, 7):
        x = torch.rand(rows, 1024) + 0.5
        torch.testing.assert_close(step(x), balance(x), rtol=1e-5, atol=1e-7)
    assert told and all(before == after for before, after, _ in told)


def test_any_number_of_rows_is_padded(told: Any) -> None:
    step = compiled(balance)
    for rows in (ROWS, 7, 600):
        x = torch.rand(rows, 4096) + 0.5
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(x), balance(x), rtol=1e-5, atol=1e-7)
    assert [[decision.ok for decision in decisions] for _, _, decisions in told] == [[True]]


def test_results_and_what_backward_gets_lie_as_in_eager(told: Any) -> None:
    x = (torch.rand(ROWS, 512) + 0.5).requires_grad_()
    twin = x.detach().clone().requires_grad_()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x / x.sum(1, keepdim=True)
        return y, y / y.sum(0, keepdim=True)

    ours, theirs = compiled(run)(x), run(twin)
    for one, other in zip(ours, theirs, strict=True):
        assert one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    sum((each * each).sum() for each in ours).backward()  # type: ignore[union-attr]
    sum((each * each).sum() for each in theirs).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-3, atol=1e-6)
    for before, after, _ in told:
        for one, other in zip(before.buffers, after.buffers, strict=True):
            assert one == other or one.role == "temp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_read_padded_rows(told: Any, dtype: torch.dtype) -> None:
    layers = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)).to(dtype)
    x = torch.randn(40, 64, dtype=dtype)
    with torch.no_grad():
        result, expected = compiled(layers)(x), layers.double()(x.double())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=5e-2 if dtype is torch.bfloat16 else 1e-5)
    ((before, after, decisions),) = told
    assert [decision.ok for decision in decisions] == [True]
    grown = 40 * 64  # a line for each row
    assert arena(after) == arena(before) + grown


def test_debuggers_find_values_in_padded_rows(told: Any) -> None:
    found = Program(balance, (torch.rand(ROWS, 1024) + 0.5,)).cosim()
    assert [decision.ok for _, _, decisions in told for decision in decisions] == [True]
    assert found.good and {each.fx_node for each in found.differences} >= {"div", "div_1"}
