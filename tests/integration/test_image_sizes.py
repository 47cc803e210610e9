"""Convolutions of images whose sizes are known at the call alone: kernels compute them, as they do those of others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration import traced
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last
SIZES = ((2, 30, 33), (3, 4, 4), (2, 9, 300), (5, 41, 4), (2, 4, 481), (4, 14, 240), (2, 61, 7))
"""Images, lines and pixels of a line: in a block of lines, and of pieces of one, whole or not."""

LAYERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "one tap": (16, lambda: nn.Conv2d(16, 40, 1)),
    "every second pixel": (32, lambda: nn.Conv2d(32, 40, 1, 2)),
    "windows": (16, lambda: nn.Sequential(nn.Conv2d(16, 40, 3, 2, 1), nn.ReLU())),
    "without padding": (16, lambda: nn.Conv2d(16, 40, (1, 2))),
    "tiles": (32, lambda: nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU())),
    "apart": (32, lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2)),
    "depthwise": (24, lambda: nn.Conv2d(24, 24, 5, padding=2, groups=24)),
    "depthwise, in steps": (24, lambda: nn.Conv2d(24, 24, 3, 2, 1, groups=24)),
    "groups": (32, lambda: nn.Conv2d(32, 64, 3, padding=1, groups=4)),
    "few channels": (3, lambda: nn.Conv2d(3, 32, 7, 2, 3)),
    "many taps": (16, lambda: nn.Conv2d(16, 40, 5, padding=2)),
    "transposed": (16, lambda: nn.ConvTranspose2d(16, 24, 4, 2, 1)),
    "residual": (24, lambda: Residual()),
    "tokens": (16, lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Flatten(2), nn.GELU())),
}


class Residual(nn.Module):
    """Sums, concatenations and parts of what convolutions give."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(48, 24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x).relu() + x
        return self.other(torch.cat([x, y], 1))[:, 4:, 1:, :-1] * 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def of_any_size(module: nn.Module, folder: Path, x: torch.Tensor, **options: Any) -> Any:
    """The module, compiled for images of any sizes."""
    for dim in (0, *range(2, x.dim())):
        torch._dynamo.mark_dynamic(x, dim)
    chosen = {"trace": str(folder), "verify": True, **options}
    return torch.compile(module, backend="pellucid", fullgraph=True, options=chosen)


def decisions(folder: Path, rule: str) -> list[dict[str, str]]:
    return [row for row in traced.decisions(folder) if row["rule"] == rule]


def graphs(folder: Path) -> int:
    return len(list(folder.rglob("decisions.csv")))


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_compute_images_of_any_size(name: str, freeze: bool, tmp_path: Path) -> None:
    channels, make = LAYERS[name]
    module = make().eval()
    wide = copy.deepcopy(module).double()
    given = [torch.randn(images, channels, *size).to(memory_format=LAST) for images, *size in SIZES]
    run = of_any_size(module, tmp_path, given[0], freeze=freeze)
    with torch.no_grad():
        for x in given:
            result, eager = run(x), module(x)
            assert result.stride() == eager.stride()
            assert_matches([result], [eager], [wide(x.double())])
    assert graphs(tmp_path) == 1
    assert not decisions(tmp_path, "lower.fallback") and decisions(tmp_path, "codegen.contract")


def test_a_network_lies_channels_last_for_images_of_any_size(tmp_path: Path) -> None:
    """Results lie as eager's do, views of what lies otherwise too."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
            self.last = nn.Conv2d(32, 64, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.layers(x)
            pooled = F.max_pool2d(y, 2)
            larger = F.interpolate(pooled, scale_factor=2.0)
            z = self.last(pooled)
            return y, z.flatten(2).transpose(1, 2), larger[:, :, 1:], z.mean((2, 3)), *z.chunk(2, 1)

    module = Network().eval()
    given = [torch.randn(2, 3, *size) for size in ((30, 42), (8, 8), (700, 12), (9, 66))]
    run = of_any_size(module, tmp_path, given[0])
    with torch.no_grad():
        for x in given:
            results, eager = run(x), module(x)
            assert [each.stride() for each in results] == [each.stride() for each in eager]
            assert_matches([*results], [*eager], [*copy.deepcopy(module).double()(x.double())])
    assert graphs(tmp_path) == 1
    assert [row["ok"] for row in decisions(tmp_path, "transform.channels-last")] == ["1"]


def test_a_view_whose_sizes_were_rounded_keeps_what_it_was_captured_with(tmp_path: Path) -> None:
    """Nothing says of sizes that come from floats whether there is such a view; where nothing moved, there is."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.last(self.first(x).relu())
            high, wide = math.ceil(y.shape[2] / 2), math.ceil(y.shape[3] / 2)
            return y.view(y.shape[0] * 32 * high, 2, wide, 2).transpose(1, 2).flatten(1)

    module = Patches().eval()
    given = [torch.randn(2, 16, *size) for size in ((30, 42), (8, 8), (60, 12))]
    run = of_any_size(module, tmp_path, given[0])
    with torch.no_grad():
        for x in given:
            assert_matches([run(x)], [module(x)], [copy.deepcopy(module).double()(x.double())])
    assert [row["ok"] for row in decisions(tmp_path, "transform.channels-last")] == ["1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lines_of_any_length(dtype: torch.dtype, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv1d(16, 48, 7, padding=3), nn.GELU(), nn.Conv1d(48, 64, 4, stride=2)).eval().to(dtype)
    given = [torch.randn(2, 16, length).to(dtype) for length in (301, 8, 240, 1000)]
    run = of_any_size(module, tmp_path, given[0])
    with torch.no_grad():
        for x in given:
            assert_matches([run(x)], [module(x)], [copy.deepcopy(module).double()(x.double())])
    assert graphs(tmp_path) == 1 and not decisions(tmp_path, "lower.fallback")


@pytest.mark.parametrize("name", ["tiles", "windows"])
def test_what_is_not_finite_stays_where_it_is(name: str, tmp_path: Path) -> None:
    channels, make = LAYERS[name]
    module, x = make().eval(), torch.randn(2, channels, 9, 300)
    run = of_any_size(module, tmp_path, x)
    for pixels in (300, 30):
        image = x[..., :pixels].clone()
        image[0, 1, 4, 7], image[1, 0, 0, -1] = torch.inf, torch.nan
        with torch.no_grad():
            result, eager = run(image), module(image)
        assert torch.equal(result.isnan(), eager.isnan()) and torch.equal(result.isinf(), eager.isinf())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_images_of_any_size(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = (
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Conv2d(32, 32, 5, padding=2, groups=32),
        nn.Conv2d(32, 48, 1),
    )
    module = nn.Sequential(*layers).to(dtype)
    given = [torch.randn(images, 3, *size).to(dtype).requires_grad_() for images, *size in SIZES[:4]]
    run = of_any_size(module, tmp_path, given[0])
    for x in given:
        wide, image = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
        found = [
            gradients(each, at, of) for each, at, of in ((run, x, module), (module, x, module), (wide, image, wide))
        ]
        assert_matches(*found)
    reasons = {row["why"] for row in decisions(tmp_path, "lower.fallback")}
    assert not any("known sizes" in why for why in reasons)
    if dtype is torch.float32:
        assert len(decisions(tmp_path, "codegen.contract")) >= 3 * len(layers) - 2  # not the image's of the first one


def gradients(run: Any, x: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    """The result of a mean over pixels, and the gradients of the image and all parameters."""
    values = [x, *module.parameters()]
    for each in values:
        each.grad = None
    result = run(x).square().mean((2, 3))
    result.sum().backward()
    return [result.detach(), *(each.grad.clone() for each in values if each.grad is not None)]


def test_sizes_that_depend_on_data_keep_the_layout(tmp_path: Path) -> None:
    def chosen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x.abs().sum((1, 2, 3)).nonzero()[:, 0]
        torch._check(rows.numel() >= 1)
        return F.conv2d(x[rows].contiguous(), w, padding=1).relu()

    x, w = torch.randn(5, 16, 9, 12), torch.randn(24, 16, 3, 3)
    x[2] = 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(chosen, backend="pellucid", fullgraph=True, options={"trace": str(tmp_path)})
        result = run(x, w)
    assert_matches([result], [chosen(x, w)], [chosen(*widened((x, w)))])
    (row,) = decisions(tmp_path, "transform.channels-last")
    assert row["ok"] == "0" and "depend on data" in row["why"]


def test_a_part_of_a_length_is_not_nothing(tmp_path: Path) -> None:
    """A guess of 256 samples would have no tokens: blocks are chosen for some."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(1, 32, 16, stride=16)
            self.second = nn.Conv1d(32, 64, 32, stride=32)
            self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = self.second(self.first(x)).transpose(1, 2)
            return self.attention(tokens, tokens, tokens)[0]

    module = Tokens().eval()
    given = [torch.randn(2, 1, length) for length in (9000, 2048, 16000)]
    run = of_any_size(module, tmp_path, given[0])
    with torch.no_grad():
        for x in given:
            assert_matches([run(x)], [module(x)], [copy.deepcopy(module).double()(x.double())])
