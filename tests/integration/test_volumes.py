"""Convolutions over three dimensions, which are convolutions of images."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.traced import check, runs_channels_last, said, traced, trains_like_eager, with_gradients
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last_3d
WIDE, NARROW = (2, 16, 5, 6, 7), (1, 2, 5, 6, 7)

CASES = {
    "summed": (WIDE, (6, 16, 3, 3, 3), {"padding": 1}),
    "gathered": (NARROW, (24, 2, 3, 3, 3), {"padding": 1}),
    "lines": (WIDE, (6, 16, 3, 1, 1), {"padding": (1, 0, 0), "stride": (2, 1, 1)}),
    "images": (WIDE, (6, 16, 1, 3, 3), {"padding": (0, 1, 1), "stride": (1, 2, 1)}),
    "one-tap": (WIDE, (6, 16, 1, 1, 1), {}),
    "one-tap-of-some": (WIDE, (6, 16, 1, 1, 1), {"stride": 2}),
    "steps": (WIDE, (6, 16, 3, 3, 3), {"padding": (2, 0, 1), "stride": (3, 1, 2)}),
    "gathered-steps": (NARROW, (24, 2, 2, 3, 3), {"padding": (1, 0, 1), "stride": (2, 1, 2)}),
    "apart": ((1, 16, 9, 6, 7), (6, 16, 3, 3, 2), {"padding": (1, 2, 2), "dilation": (3, 2, 1)}),
    "gathered-apart": ((1, 2, 9, 6, 7), (24, 2, 3, 3, 2), {"padding": (2, 2, 2), "dilation": (3, 2, 1)}),
    "no-whole-tap": (WIDE, (6, 16, 2, 3, 3), {"padding": 1}),
    "taps-that-meet-nothing": ((1, 16, 1, 6, 7), (6, 16, 3, 3, 3), {"padding": 1}),
    "gathered-that-meet-nothing": ((1, 2, 1, 6, 7), (24, 2, 3, 3, 3), {"padding": 1}),
    "same": (WIDE, (6, 16, 2, 3, 4), {"padding": "same"}),
    "many-taps": ((2, 3, 40, 3, 4), (5, 3, 33, 2, 3), {"padding": 1}),
    "valid": (WIDE, (6, 16, 2, 3, 4), {"padding": "valid"}),
    "groups": (WIDE, (6, 8, 3, 3, 3), {"padding": 1, "groups": 2}),
    "gathered-groups": (NARROW, (24, 1, 3, 3, 3), {"padding": 1, "groups": 2}),
    "depthwise": (WIDE, (16, 1, 3, 3, 3), {"padding": 1, "groups": 16}),
    "taps-as-large-as-the-volume": (WIDE, (6, 16, 5, 6, 7), {}),
    "one-channel": ((1, 1, 4, 6, 7), (1, 1, 3, 3, 3), {"padding": 1}),
    "one-pixel": ((2, 3, 4, 1, 1), (5, 3, 3, 1, 1), {"padding": (1, 0, 0)}),
    "unbatched": ((16, 5, 6, 7), (6, 16, 3, 3, 3), {"padding": 1}),
    "empty": ((0, 16, 5, 6, 7), (6, 16, 3, 3, 3), {"padding": 1}),
}
Case = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]


def volume_case(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], dict[str, Any]]:
    shape, kernel, options = CASES[name]
    return [torch.randn(each).to(dtype) for each in (shape, kernel, kernel[:1])], options


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_volumes_are_convolved_like_images(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    args, options = volume_case(name, dtype)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv3d(x, w, b, **options)

    result, rows = traced(function, tmp_path, *args)
    check(function, result, *args)
    assert result.stride() == function(*args).stride()
    if dtype is torch.float32 and name in ("summed", "gathered", "steps", "apart", "gathered-apart"):
        assert not said(rows, "lower.fallback")


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_volumes(name: str) -> None:
    args, options = volume_case(name)

    def function(*args: torch.Tensor) -> torch.Tensor:
        return F.conv3d(*args, **options)

    compiled = torch.compile(function, backend="pellucid", options={"verify": True})
    ours, eagers = with_gradients(compiled, *args), with_gradients(function, *args)
    assert_matches(ours, eagers, with_gradients(function, *widened(args)))
    assert [each.stride() for each in ours] == [each.stride() for each in eagers]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["summed", "gathered", "lines", "images"])
def test_layouts_of_volumes(tmp_path: Path, name: str) -> None:
    (x, w, b), options = volume_case(name)
    layouts = [torch.contiguous_format, LAST]
    for image, weight in product(layouts, layouts):
        args = x.contiguous(memory_format=image), w.contiguous(memory_format=weight), b

        def function(*args: torch.Tensor) -> torch.Tensor:
            return F.conv3d(*args, **options)

        compiled = torch.compile(function, backend="pellucid")
        ours, eagers = with_gradients(compiled, *args), with_gradients(function, *args)
        assert_matches(ours, eagers, with_gradients(function, *widened(args)))
        assert [each.stride() for each in ours] == [each.stride() for each in eagers]
        torch._dynamo.reset()


def test_what_lies_outside_of_a_volume_adds_nothing(tmp_path: Path) -> None:
    """Not even as 0 * infinity: where the first tap along depth is infinite, the first frame is still finite."""
    (x, w, b), options = volume_case("summed")
    w[2, 3, 0] = float("inf")
    result, _ = traced(lambda x, w, b: F.conv3d(x, w, b, **options), tmp_path, x, w, b)
    assert result[:, :, 0].isfinite().all() and not result[:, 2, 1:].isfinite().any()


def test_sizes_that_are_symbols() -> None:
    w = torch.randn(6, 4, 3, 3, 3)
    compiled = torch.compile(lambda x: F.conv3d(x, w, padding=1), backend="pellucid", dynamic=True)
    for size in (5, 9):
        x = torch.randn(2, 4, size, 6, size)
        check(lambda x: F.conv3d(x, w.to(x.dtype), padding=1), compiled(x), x)


class Volumes(nn.Module):
    """What networks of films repeat: taps over images and along depth, with norms, half as many frames, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 16, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2), bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm3d(16), nn.GroupNorm(4, 16), nn.BatchNorm3d(16)])
        self.whole = nn.Conv3d(16, 16, 3, padding=1)
        self.image = nn.Conv3d(16, 24, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.depth = nn.Conv3d(24, 16, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.down = nn.Conv3d(16, 16, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.stem(x)).relu()
        x = F.silu(self.norms[1](self.whole(x))) + x
        x = self.norms[2](self.depth(self.image(x).relu())) + x
        return F.avg_pool3d(self.down(F.gelu(x)), (1, 2, 2))


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_networks_of_volumes_are_laid_out(tmp_path: Path, batch: int, freeze: bool) -> None:
    rows = runs_channels_last(Volumes().eval(), tmp_path, torch.randn(batch, 3, 6, 16, 20), freeze=freeze)
    assert not [why for why in said(rows, "lower.fallback") if "oneDNN" in why]
    assert len(said(rows, "freeze.fold")) == (2 if freeze else 0)
    transformed = next(tmp_path.rglob("fx_graph_transformed.py")).read_text()
    assert transformed.count("torch.contiguous_format") <= 2, "volumes lie channels-last in between"


def test_networks_of_volumes_train_like_eagers(tmp_path: Path) -> None:
    trains_like_eager(Volumes(), tmp_path, torch.randn(2, 3, 6, 16, 20).requires_grad_())


class Twins(nn.Module):
    """A norm of the sum of two convolutions, or of one and itself."""

    def __init__(self, twice: bool, read: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv3d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.twice, self.read = nn.BatchNorm3d(16), twice, read
        nn.init.uniform_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.first(x)
        result = self.norm(first + (first if self.twice else self.second(x)))
        return (result, first.relu()) if self.read else (result,)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_scales_go_into_weights_that_nobody_else_needs(tmp_path: Path, twice: bool, read: bool) -> None:
    model, x = Twins(twice, read).eval(), torch.randn(1, 16, 5, 8, 8)
    result, rows = traced(model, tmp_path, x, freeze=True)
    with torch.no_grad():
        assert_matches(result, model(x), copy.deepcopy(model).double()(x.double()))
    assert len(said(rows, "freeze.fold")) == (0 if twice or read else 1)
