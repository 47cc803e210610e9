"""Convolutions that are computed by tiles of 2 x 2 pixels."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.integration.traced import decisions
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def compiled(module: nn.Module, folder: Path, **options: object) -> nn.Module:
    return torch.compile(module, backend="pellucid", options={"trace": str(folder), "verify": True, **options})  # type: ignore[return-value]


def decisions_on_tiles(folder: Path) -> list[dict[str, str]]:
    """One for each convolution that may be computed so."""
    return [row for row in decisions(folder) if row["rule"] == "codegen.tiles"]


def decided(folder: Path) -> list[bool]:
    """For each convolution that may be computed so, whether it is."""
    return [row["ok"] == "1" for row in decisions_on_tiles(folder)]


def facts_of_tiles(folder: Path) -> list[dict[str, str]]:
    """The facts of each of these decisions, by name."""
    facts = (row["facts"].split("; ") for row in decisions_on_tiles(folder))
    return [dict(each.split("=", 1) for each in row) for row in facts]


def convolution(
    inputs: int, outputs: int, padding: int = 1, layout: torch.memory_format = torch.contiguous_format
) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=padding).to(memory_format=layout).eval()


def image(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=LAST)


def agrees_by_tiles(module: nn.Module, x: Tensor, folder: Path, freeze: bool) -> None:
    with torch.no_grad():
        result = compiled(module, folder, freeze=freeze)(x)
        assert decided(folder) == [True]
        exact = copy.deepcopy(module).double()(x.double())
        assert_matches(result, module(x), exact)
        terms = max(1.0, x.shape[1] / 256)  # errors grow with the root of their number
        assert (result - exact).abs().max() < 5e-6 * terms**0.5 * exact.square().mean().sqrt()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    ("shape", "outputs", "padding", "layout"),
    [
        ((1, 64, 56, 56), 64, 1, LAST),
        ((1, 64, 12, 30), 40, 1, torch.contiguous_format),  # columns that fill no panel
        ((1, 256, 14, 14), 96, 1, torch.contiguous_format),  # weights in several pieces
        ((1, 256, 14, 14), 96, 1, LAST),
        ((3, 32, 21, 19), 64, 1, torch.contiguous_format),  # odd sizes, several images
        ((2, 48, 18, 9), 64, 2, LAST),
        ((1, 64, 33, 2), 128, 1, torch.contiguous_format),
    ],
)
def test_results_are_those_of_windows(
    tmp_path: Path, shape: tuple[int, ...], outputs: int, padding: int, layout: torch.memory_format, freeze: bool
) -> None:
    module = nn.Sequential(convolution(shape[1], outputs, padding, layout), nn.ReLU())
    x = image(*shape)
    agrees_by_tiles(module, x, tmp_path, freeze)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    ("shape", "dilation", "padding"),
    [
        ((1, 64, 28, 28), 2, 2),
        ((2, 64, 24, 32), 4, 4),
        ((1, 96, 30, 18), 3, 3),  # phases of odd sizes
        ((1, 64, 20, 20), 2, 0),
        ((1, 64, 26, 26), 2, 5),
    ],
)
def test_taps_that_lie_apart_are_neighbours_in_a_phase(
    tmp_path: Path, shape: tuple[int, ...], dilation: int, padding: int, freeze: bool
) -> None:
    module = nn.Sequential(nn.Conv2d(shape[1], 64, 3, padding=padding, dilation=dilation), nn.ReLU()).eval()
    x = image(*shape)
    agrees_by_tiles(module, x, tmp_path, freeze)


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    ("shape", "outputs", "dilation"),
    [
        ((1, 640, 5, 72), 64, 1),
        ((2, 640, 8, 72), 40, 1),  # several images, columns that fill no panel
        ((1, 768, 4, 128), 32, 2),  # pieces of phases
    ],
)
def test_lines_that_the_cache_does_not_hold_lie_in_pieces(
    tmp_path: Path, shape: tuple[int, ...], outputs: int, dilation: int, freeze: bool
) -> None:
    module = nn.Sequential(nn.Conv2d(shape[1], outputs, 3, padding=dilation, dilation=dilation), nn.ReLU()).eval()
    x = image(*shape)
    agrees_by_tiles(module, x, tmp_path, freeze)
    (facts,) = facts_of_tiles(tmp_path)
    assert int(facts["pieces"]) > 1
    x[0, 7, 2, 5] = math.nan
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(module, backend="pellucid", options={"freeze": freeze})(x),
            module(x),
            equal_nan=True,
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.sampled
@pytest.mark.parametrize("where", [(0, 0), (3, 4), (10, 13)])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize(("dilation", "lines", "pixels"), [(1, 11, 14), (2, 24, 28)])
def test_numbers_that_are_not_finite_stay_in_their_windows(
    tmp_path: Path, dilation: int, lines: int, pixels: int, value: float, where: tuple[int, int]
) -> None:
    module = nn.Conv2d(64, 64, 3, padding=dilation, dilation=dilation).eval()
    x = image(1, 64, lines, pixels)
    x[0, 5, where[0], where[1]] = value
    with torch.no_grad():
        expected = module(x)
        for freeze in (False, True):
            torch._dynamo.reset()
            result = compiled(module, tmp_path / str(freeze), freeze=freeze)(x)
            assert decided(tmp_path / str(freeze)) == [True]
            assert torch.equal(result.isnan(), expected.isnan())
            assert torch.equal(result.isinf(), expected.isinf())
            torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "outputs", "dilation"), [((3, 128, 32, 30), 160, 1), ((1, 64, 32, 32), 96, 2)])
def test_blocks_of_the_same_columns_share_their_weights(
    tmp_path: Path, shape: tuple[int, ...], outputs: int, dilation: int
) -> None:
    module = nn.Conv2d(shape[1], outputs, 3, padding=dilation, dilation=dilation).eval()
    x = image(*shape)
    x[0, 3, 9, 11] = math.nan
    run = compiled(module, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), module(x), equal_nan=True, rtol=1e-4, atol=1e-4)
            module.weight.mul_(-2)
    (facts,) = facts_of_tiles(tmp_path)
    assert facts["kept"] == "1"
    assert any("pv::KeptTiles" in each.read_text() for each in tmp_path.rglob("*.cpp"))


def test_weights_that_are_not_finite_are_noticed(tmp_path: Path) -> None:
    module, x = convolution(64, 64, padding=0), image(1, 64, 11, 14)
    with torch.no_grad():
        module.weight[3, 7, 1, 2] = math.inf
        run = compiled(module, tmp_path, freeze=True)
        torch.testing.assert_close(run(x), module(x), equal_nan=True, rtol=1e-4, atol=1e-4)
        module.weight[3, 7, 1, 2] = 0.5
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dilation", [1, 2])
def test_gradients_of_images_are_computed_by_tiles_too(tmp_path: Path, dilation: int) -> None:
    first, second = (
        nn.Conv2d(*channels, 3, padding=dilation, dilation=dilation).to(memory_format=LAST)
        for channels in ((64, 96), (96, 64))
    )
    module = nn.Sequential(first, nn.Tanh(), second)
    x = image(2, 64, 16 + dilation % 2, 20)

    def gradients(run: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        run.zero_grad()
        run(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad.clone(), *(p.grad.clone() for p in run.parameters() if p.grad is not None)]

    result = gradients(compiled(module, tmp_path), x)
    assert decided(tmp_path) == [True] * 4
    assert_matches(result, gradients(module, x), gradients(copy.deepcopy(module).double(), x.double()))


def test_bits_do_not_depend_on_threads(tmp_path: Path) -> None:
    module, x = convolution(64, 128), image(2, 64, 30, 30)
    run = compiled(module, tmp_path)
    results: list[Tensor] = []
    with torch.no_grad():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(x))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_other_convolutions_are_computed_by_windows(tmp_path: Path) -> None:
    modules = [
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.Conv2d(64, 64, 3, dilation=3),  # phases of 14 lines differ
        nn.Conv2d(64, 64, 3, dilation=(1, 2)),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.Conv2d(64, 64, (3, 1)),
        nn.Conv2d(20, 64, 3),
        nn.Conv2d(64, 8, 3),
    ]
    for number, module in enumerate(modules):
        torch._dynamo.reset()
        x, folder = image(1, module.in_channels, 20, 20), tmp_path / str(number)
        with torch.no_grad():
            result = compiled(module.to(memory_format=LAST), folder, freeze=True)(x)
            assert_matches(result, module(x), copy.deepcopy(module).double()(*widened((x,))))
        assert decided(folder) in ([], [False])
