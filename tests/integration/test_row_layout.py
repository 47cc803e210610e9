"""Sums of rows and columns lie row by row where norms and products read them; results have eager's strides."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.integration import traced
from tests.support import meaningful_strides, randn

F = torch.nn.functional


def check(function: Any, *calls: tuple[Tensor, ...], folder: Path | None = None) -> None:
    """Compiled once, results have eager's values and strides."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"verify": True} | ({"trace": str(folder)} if folder else {})
    compiled = torch.compile(function, backend="pellucid", fullgraph=True, options=options)
    for args in calls:
        expected, actual = function(*args), compiled(*args)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
        assert all(ours.stride() == theirs.stride() for ours, theirs in pairs)


def decisions(folder: Path) -> list[tuple[str, str]]:
    return [(row["ok"], row["why"]) for row in traced.decisions(folder) if row["rule"] == "transform.rows"]


def places_of_sums(folder: Path) -> list[str]:
    """The indices by which kernels store results of additions."""
    text = "\n".join(file.read_text() for file in folder.rglob("loops.txt"))
    return re.findall(r"store b\d+_add\w*\[(.*?)\]", text)


class Block(nn.Module):
    """A residual block, as of a transformer or of a perceptron over pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Pixels(nn.Module):
    """Pixels of an image as tokens: a transposed view, to which blocks add."""

    def __init__(self, size: int, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(size) for _ in range(blocks)))

    def forward(self, image: Tensor) -> Tensor:
        return self.blocks(image.flatten(2).transpose(1, 2))


def test_residual_sums_lie_row_by_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pixels(32), nn.LayerNorm(32))
    with torch.no_grad():
        check(model, (randn(2, 32, 6, 7),), folder=tmp_path)
    assert [ok for ok, _ in decisions(tmp_path)] == ["1"]
    places = places_of_sums(tmp_path)
    assert len(places) == 3 and all(re.search(r"\+ i\d$", place) for place in places)


def test_the_sum_that_is_returned_has_eagers_strides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, image = Pixels(32), randn(2, 32, 6, 7)
    assert model(image).stride() == (32 * 42, 1, 42)
    with torch.no_grad():
        check(model, (image,), folder=tmp_path)
    assert [ok for ok, _ in decisions(tmp_path)] == ["1"]


def test_every_sum_is_returned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pixels(32)

    def hidden(image: Tensor) -> list[Tensor]:
        states = [image.flatten(2).transpose(1, 2)]
        for block in model.blocks:
            states.append(block(states[-1]))
        return states

    with torch.no_grad():
        check(hidden, (randn(1, 32, 6, 7),), (randn(1, 32, 6, 7) * 3,), folder=tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients(batch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pixels(16, 2), nn.LayerNorm(16))
    torch._dynamo.reset()
    options = {"trace": str(tmp_path), "verify": True}
    compiled = torch.compile(model, backend="pellucid", fullgraph=True, options=options)

    def step(run: Any, image: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(image).square().sum(), [image, *model.parameters()])

    image = randn(batch, 16, 5, 6).requires_grad_()
    for ours, theirs in zip(step(compiled, image), step(model, image), strict=True):
        assert meaningful_strides(ours) == meaningful_strides(theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert "1" in [ok for ok, _ in decisions(tmp_path)]


def test_what_a_convolution_reads_stays_as_it_is(tmp_path: Path) -> None:
    """Lines of channels lie channels-last, in the order that a norm over the last dimension would not have."""
    torch.manual_seed(0)
    first, second = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)

    def run(x: Tensor, y: Tensor) -> Tensor:
        mixed = x.transpose(1, 2) + y
        return second(F.layer_norm(first(mixed), (20,)) + mixed)

    with torch.no_grad():
        check(run, (randn(2, 20, 16), randn(2, 16, 20)), folder=tmp_path)
    assert not any(ok == "1" for ok, _ in decisions(tmp_path))


def test_sums_that_nothing_reads_by_rows_stay(tmp_path: Path) -> None:
    check(lambda x, y: (x.t() + y).exp(), (randn(30, 40), randn(40, 30)), folder=tmp_path)
    assert decisions(tmp_path) == []


def test_a_graph_that_goes_by_strides_says_so(tmp_path: Path) -> None:
    weight = randn(30, 16)

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x.t() + y
        return total @ weight, torch.as_strided(total, (5,), (7,))

    check(run, (randn(30, 40), randn(40, 30)), folder=tmp_path)
    assert [(ok, "depends on the strides" in why) for ok, why in decisions(tmp_path)] == [("0", True)]


@pytest.mark.parametrize(
    "results",
    [
        lambda y, n: (y, n, y.transpose(1, 2)),
        lambda y, n: (y[:, 1:], n, y[:, 2:], y.unflatten(1, (4, 4))),
        lambda y, n: (*y.chunk(2, 1), n, y),
        lambda y, n: (y.detach(), y.transpose(1, 2), n.transpose(1, 2), n, torch.sort(y, 1).values),
    ],
)
def test_results_share_memory_as_eagers_do(results: Callable[..., tuple[Tensor, ...]], tmp_path: Path) -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x.transpose(1, 2) + y
        return results(total, F.layer_norm(total, (32,)))

    def shared(tensors: tuple[Tensor, ...]) -> list[list[bool]]:
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        return [[one == other for other in places] for one in places]

    x, y = randn(2, 32, 16), randn(2, 16, 32)
    with torch.no_grad():
        check(run, (x, y), folder=tmp_path)
        assert shared(torch.compile(run, backend="pellucid")(x, y)) == shared(run(x, y))
    assert [ok for ok, _ in decisions(tmp_path)] == ["1"]


def test_symbolic_sizes_are_laid_out_without_guards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pixels(32), nn.LayerNorm(32))
    compiled = torch.compile(model, backend="pellucid", dynamic=True, options={"trace": str(tmp_path)})
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for size in ((2, 32, 6, 7), (3, 32, 8, 5), (4, 32, 9, 9)):
            torch.testing.assert_close(compiled(randn(*size)), model(randn(*size)), rtol=1e-4, atol=1e-4)
    assert [ok for ok, _ in decisions(tmp_path)] == ["1"]


def test_operators_of_other_libraries_get_eagers_strides() -> None:
    """A call that is given the sum as eager lays it out, and its changes of an argument reach that."""
    weight = randn(30, 16)

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x.t() + y
        return total @ weight, torch.linalg.svdvals(total), total.sort(dim=0).values

    check(run, (randn(30, 40), randn(40, 30)))
