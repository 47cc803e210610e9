"""Convolutions: which of them are kernels, and of what shapes."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.ir.types import DType
from pellucid.machine.library import Library
from pellucid.native.build import default_toolchain
from pellucid.native.machine import REFERENCE, machine_for
from pellucid.native.toolchain import has_tiles
from tests.integration.traced import (
    check,
    decisions,
    names_of_kernels,
    runs_channels_last,
    said,
    traced,
    trains_like_eager,
)
from tests.support import assert_matches

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 8, 5, 7), torch.contiguous_format),
        ((3, 8, 5, 7), LAST),
        ((1, 8, 1, 1), torch.contiguous_format),
        ((3, 8, 5, 7), torch.contiguous_format),
    ],
)
def test_a_one_by_one_convolution_is_a_matrix_product(
    tmp_path: Path, shape: tuple[int, ...], layout: torch.memory_format, bias: bool
) -> None:
    x, w = torch.randn(shape).contiguous(memory_format=layout), torch.randn(6, 8, 1, 1)
    b = torch.randn(6) if bias else None
    result, rows = traced(lambda x, w, b: F.conv2d(x, w, b).relu(), tmp_path / "on", x, w, b)
    check(lambda x, w, b: F.conv2d(x, w, b).relu(), result, x, w, b)
    assert not said(rows, "lower.fallback") and bool(said(rows, "codegen.contract")) == (shape[2:] != (1, 1))
    result, rows = traced(lambda x, w, b: F.conv2d(x, w, b).relu(), tmp_path / "off", x, w, b, contract=False)
    check(lambda x, w, b: F.conv2d(x, w, b).relu(), result, x, w, b)
    (reason,) = said(rows, "lower.fallback")
    assert "because the option `contract` is off" in reason


@pytest.mark.parametrize("channels", [slice(2, 10), slice(0, 16, 2)])
def test_a_part_of_a_tensor_is_convolved_too(tmp_path: Path, channels: slice) -> None:
    x, w = torch.randn(1, 16, 5, 7), torch.randn(6, 8, 1, 1)
    result, _ = traced(lambda x, w: F.conv2d(x[:, channels], w), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x[:, channels], w), result, x, w)


def looped(rows: list[dict[str, str]]) -> int:
    """How many convolutions are loops over pixels, as blocks of few columns would take longer."""
    return sum(row["rule"] == "codegen.blocks" and row["ok"] == "0" for row in rows)


WINDOWS = [
    ((2, 16, 20, 20), (24, 16, 3, 3), {"padding": 1}),
    ((1, 13, 9, 11), (7, 13, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 3, 30, 31), (20, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((1, 40, 12, 13), (40, 40, 3, 3), {"padding": 2, "dilation": 2}),
    ((2, 9, 8, 8), (9, 9, 2, 2), {"stride": 3}),
    ((1, 4, 3, 3), (33, 4, 3, 3), {"padding": 5}),
    ((1, 1, 14, 14), (6, 1, 7, 7), {"padding": 2}),
    ((3, 32, 5, 5), (16, 32, 1, 1), {"stride": 2, "padding": 1}),
    ((1, 12, 4, 300), (17, 12, 1, 3), {"padding": (0, 1)}),
    ((0, 6, 4, 5), (17, 6, 3, 3), {"padding": 1}),
]


@pytest.mark.parametrize(("image", "kernel", "options"), WINDOWS)
def test_windows_are_kernels_with_what_follows(
    tmp_path: Path, image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    x, w, b = torch.randn(image).contiguous(memory_format=LAST), torch.randn(kernel), torch.randn(kernel[0])

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, **options).relu()

    for number, each in enumerate((w, w.contiguous(memory_format=LAST))):
        result, rows = traced(function, tmp_path / str(number), x, each, b)
        check(function, result, x, each, b)
        assert not said(rows, "lower.fallback")
        assert len(said(rows, "codegen.contract")) + looped(rows) == (1 if x.numel() else 0)


LINES = [
    ((2, 50, 16), (24, 16, 3), {"padding": 1}),
    ((1, 31, 12), (6, 12, 5), {"stride": 2, "dilation": 2, "padding": 3}),
    ((2, 20, 16), (16, 1, 4), {"groups": 16, "padding": 3}),
    ((1, 17, 32), (32, 8, 3), {"groups": 4, "padding": "same"}),
    ((3, 9, 8), (5, 8, 1), {}),
    ((40, 8), (24, 8, 4), {}),
    ((1, 3, 8), (24, 8, 4), {"padding": 2}),
    ((2, 40, 8), (1, 8, 5), {"padding": 2}),
    ((2, 5, 8), (6, 8, 5), {}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("line", "kernel", "options"), LINES)
def test_lines_are_convolved_like_images(
    tmp_path: Path, line: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """line: [N, length, channels], or one without N."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in (line, kernel, kernel[:1]))

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.transpose(-1, -2), w, b, **options).relu()

    result, rows = traced(function, tmp_path, x, w, b)
    check(function, result, x, w, b)
    if dtype is torch.float32 and kernel[0] > 1:
        assert not said(rows, "lower.fallback")
        assert len(said(rows, "codegen.contract")) + looped(rows) == 1


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("convolve", [F.conv1d, F.conv_transpose1d])
def test_results_of_lines_lie_as_the_weight_does(convolve: Any, order: tuple[int, ...], groups: int) -> None:
    weight = torch.randn(8, 8 // groups, 3).permute(order).contiguous().permute([order.index(k) for k in range(3)])
    for x in (torch.randn(2, 8, 16), torch.randn(2, 16, 8).mT):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: convolve(x, weight, padding=1, groups=groups), backend="pellucid")
        expected = convolve(x, weight, padding=1, groups=groups)
        result = compiled(x)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


TRANSPOSED = [
    ((1, 8, 20), (8, 6, 4), {"stride": 2, "padding": 1}),
    ((2, 8, 9), (8, 5, 16), {"stride": 8, "padding": 4}),
    ((2, 8, 9), (8, 6, 6), {"stride": 3, "padding": 4, "output_padding": 1}),
    ((2, 8, 5, 6), (8, 6, 2, 2), {"stride": 2}),
    ((1, 8, 5, 6), (8, 6, 4, 6), {"stride": (2, 3), "padding": (1, 2), "output_padding": (1, 0)}),
    ((1, 8, 5, 6), (8, 6, 3, 3), {"padding": 1}),
    ((1, 8, 5, 6), (8, 6, 3, 3), {"padding": 2}),
    ((1, 8, 5, 6), (8, 6, 4, 2), {"stride": (2, 1)}),
    ((0, 8, 5, 6), (8, 6, 2, 2), {"stride": 2, "padding": 1}),
    ((3, 8, 1, 1), (8, 6, 4, 4), {}),
    ((3, 8, 1, 1), (8, 6, 6, 6), {"stride": 2, "padding": 2, "output_padding": 1}),
    ((2, 8, 4, 4), (8, 6, 4, 4), {"stride": 2, "padding": 1}),
    ((2, 8, 3, 1), (8, 6, 4, 6), {"stride": (1, 2), "padding": (0, 2)}),
    ((1, 16, 24, 23), (16, 6, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ((2, 16, 20, 17), (16, 6, 5, 4), {"stride": (3, 2), "padding": (0, 3)}),
    ((4, 32, 12, 11), (32, 6, 7, 3), {"stride": (2, 3), "padding": (3, 0), "output_padding": (1, 2)}),
    ((2, 16, 300), (16, 6, 5), {"stride": 3, "padding": 4, "output_padding": 2}),
]


@pytest.mark.parametrize("step", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("convolve", [F.conv1d, F.conv_transpose1d])
def test_steps_may_be_known_at_the_call_alone(convolve: Any, step: str) -> None:
    compiled = torch.compile(lambda x, w, count: convolve(x, w, **{step: count}), backend="pellucid", dynamic=True)
    for count in (2, 3):
        x, w = torch.randn(1, 8, 20), torch.randn(8, 8, 4)
        torch.testing.assert_close(compiled(x, w, count), convolve(x, w, **{step: count}))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("image", "kernel", "options"), TRANSPOSED)
def test_transposed_convolutions_are_convolutions(
    tmp_path: Path, image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    convolve = F.conv_transpose1d if len(image) == 3 else F.conv_transpose2d
    x, w, b = (torch.randn(shape).to(dtype) for shape in (image, kernel, kernel[1:2]))
    layouts = [torch.contiguous_format, LAST] if x.dim() == 4 else [torch.contiguous_format]
    for number, (layout, weights) in enumerate(product(layouts, layouts)):
        args = x.contiguous(memory_format=layout), w.contiguous(memory_format=weights), b
        result, rows = traced(lambda *args: convolve(*args, **options).relu(), tmp_path / str(number), *args)
        check(lambda *args: convolve(*args, **options).relu(), result, *args)
        if layout is LAST and dtype is torch.float32 and x.numel():
            assert not said(rows, "lower.fallback")


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2}, {"dilation": 2}]
)
def test_other_transposed_convolutions_are_onednns(tmp_path: Path, options: dict[str, int]) -> None:
    x, w = torch.randn(1, 8, 5, 6), torch.randn(8, 6 // options.get("groups", 1), 3, 3)
    result, rows = traced(lambda x, w: F.conv_transpose2d(x, w, **options), tmp_path, x, w)
    check(lambda x, w: F.conv_transpose2d(x, w, **options), result, x, w)
    assert said(rows, "lower.fallback") == ["convolution: oneDNN computes it"]


class Upsampled(nn.Module):
    """What a vocoder repeats: pixels spread, then convolved, each step twice as long."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(16, 64, 3, padding=1)
        self.spread = nn.ModuleList(nn.ConvTranspose1d(64 >> i, 32 >> i, 4, stride=2, padding=1) for i in range(2))
        self.near = nn.ModuleList(nn.Conv1d(32 >> i, 32 >> i, 3, padding=1) for i in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for spread, near in zip(self.spread, self.near, strict=True):
            x = spread(F.leaky_relu(x, 0.1))
            x = x + near(F.gelu(x))
        return x


@pytest.mark.parametrize("freeze", [False, True])
def test_networks_with_transposed_convolutions_are_laid_out(tmp_path: Path, freeze: bool) -> None:
    model, x = Upsampled().eval(), torch.randn(1, 16, 100)
    rows = runs_channels_last(model, tmp_path, x, freeze=freeze)
    assert not said(rows, "lower.fallback")


def test_transposed_convolutions_train_like_eagers(tmp_path: Path) -> None:
    trains_like_eager(Upsampled(), tmp_path, torch.randn(1, 16, 100).requires_grad_())


def test_a_transposed_convolution_of_symbolic_sizes(tmp_path: Path) -> None:
    w = torch.randn(8, 6, 4)
    compiled = torch.compile(lambda x: F.conv_transpose1d(x, w, stride=2, padding=1), backend="pellucid", dynamic=True)
    for length in (5, 9):
        x = torch.randn(2, 8, length)
        check(lambda x: F.conv_transpose1d(x, w.to(x.dtype), stride=2, padding=1), compiled(x), x)


@pytest.mark.parametrize("where", ["image", "weight"])
def test_phases_reach_what_eager_reaches(tmp_path: Path, where: str) -> None:
    """Three taps with a stride of two: what is not finite is multiplied with no tap, or pixel, more than there."""

    def spread(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)

    x, w = torch.randn(2, 16, 16, 17), torch.randn(16, 6, 3, 3)
    (x[0, 3] if where == "image" else w[3, 2])[0, 0] = float("inf")
    result, rows = traced(spread, tmp_path, x, w)
    assert not said(rows, "lower.fallback")
    assert torch.equal(result.isfinite(), spread(x.double(), w.double()).isfinite())


def test_phases_of_symbolic_sizes() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose2d(x, w.to(x.dtype), stride=2, padding=1, output_padding=1)

    w = torch.randn(8, 6, 3, 3)
    compiled = torch.compile(spread, backend="pellucid", dynamic=True)
    for size in (5, 9):
        x = torch.randn(2, 8, size, size + 1)
        check(spread, compiled(x), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["image", "weight"])
def test_padding_adds_nothing_to_what_is_not_finite(tmp_path: Path, bad: float, where: str) -> None:
    """A tap that lies outside of the image does not count, not even as 0 * infinity."""
    x, w = torch.randn(1, 8, 6, 6).contiguous(memory_format=LAST), torch.randn(4, 8, 3, 3)
    (x[0, 3] if where == "image" else w[2, 3])[0, 0] = bad
    result, rows = traced(lambda x, w: F.conv2d(x, w, padding=1), tmp_path, x, w)
    known = x.double().isfinite().float()
    finite = F.conv2d(1 - known, torch.ones_like(w), padding=1) == 0
    if where == "weight":
        finite[:, 2, 1:, 1:] = False  # the tap above on the left lies outside in the first row and column
    exact = F.conv2d(x.double().nan_to_num(0, 0, 0), w.double().nan_to_num(0, 0, 0), padding=1)
    assert not said(rows, "lower.fallback")
    assert torch.equal(result.isfinite(), finite)
    torch.testing.assert_close(result[finite].double(), exact[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 20, 9, 11), 3, {"padding": 1}),
        ((1, 32, 16, 17), 3, {"padding": 1, "stride": 2}),
        ((1, 17, 8, 40), 5, {"padding": 2, "dilation": 2}),
        ((1, 40, 3, 3), 3, {"padding": 4}),
        ((2, 33, 10, 10), 2, {"stride": 3}),
        ((2, 33, 10, 10), 1, {"stride": 2}),
    ],
)
def test_depthwise_convolutions_are_kernels_with_what_follows(
    tmp_path: Path, image: tuple[int, ...], kernel: int, options: dict[str, Any]
) -> None:
    channels = image[1]
    x, w, b = (
        torch.randn(image).contiguous(memory_format=LAST),
        torch.randn(channels, 1, kernel, kernel),
        torch.randn(channels),
    )

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu6(F.conv2d(x, w, b, groups=channels, **options))

    result, rows = traced(function, tmp_path, x, w, b)
    check(function, result, x, w, b)
    assert not said(rows, "lower.fallback")
    assert len(said(rows, "codegen.contract")) == (kernel > 1)


FEW_RESULTS = [
    ((2, 1, 60, 70), (2, 1, 3, 3), {"padding": 1}),
    ((1, 1, 64, 64), (1, 1, 5, 5), {"padding": 4, "dilation": 2}),
    ((1, 3, 40, 50), (3, 3, 3, 3), {"padding": (0, 2), "stride": (1, 2)}),
    ((2, 33, 20, 30), (1, 33, 3, 3), {"padding": 1}),
    ((1, 2, 37, 41), (4, 2, 7, 7), {"padding": 3, "stride": 3}),
    ((3, 1, 1, 900), (1, 1, 1, 31), {"padding": (0, 15)}),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("image", "kernel", "options"), FEW_RESULTS)
def test_few_results_for_each_pixel_are_loops(
    tmp_path: Path, image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], last: bool
) -> None:
    """Where channels lie side by side, blocks may take less time. Pixels that are not finite count as in eager mode."""
    how = LAST if last else torch.contiguous_format
    x, w, b = torch.randn(image).contiguous(memory_format=how), torch.randn(kernel), torch.randn(kernel[0])

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, **options).relu()

    result, rows = traced(function, tmp_path, x, w, b)
    check(function, result, x, w, b)
    assert not said(rows, "lower.fallback")
    assert kernel[0] == 1 or last or looped(rows) == 1
    x[0, 0, 0, 5], x[-1, -1, -1, -1] = float("nan"), float("-inf")
    again = torch.compile(function, backend="pellucid")(x, w, b)
    check(function, again, x, w, b)
    assert torch.equal(again.isfinite(), function(x, w, b).isfinite())


@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        ((1, 8, 3, 3), {"stride": 2}, "one pixel, or one channel"),
        ((6, 8, 1, 3), {}, "few terms"),
    ],
)
def test_other_convolutions_are_onednns(
    tmp_path: Path, shape: tuple[int, ...], options: dict[str, int], why: str
) -> None:
    x, w = torch.randn(1, 8, 6, 6).contiguous(memory_format=LAST), torch.randn(shape)
    result, rows = traced(lambda x, w: F.conv2d(x, w, **options), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x, w, **options), result, x, w)
    (reason,) = said(rows, "lower.fallback")
    assert why in reason


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("outputs", "taps", "options"),
    [
        (3, (3, 3), {"padding": 1}),
        (1, (5, 5), {"padding": (3, 0)}),
        (4, (3, 2), {"dilation": (2, 3), "padding": (2, 4)}),
        (2, (1, 7), {"padding": (2, 3)}),
    ],
)
def test_few_outputs_are_products_of_taps(
    tmp_path: Path, outputs: int, taps: tuple[int, int], options: dict[str, Any], last: bool
) -> None:
    """What is not finite reaches as far as taps do, and what lies beside the image adds nothing."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.relu(), w.to(x.dtype), b.to(x.dtype), **options)

    x, w, b = torch.randn(2, 32, 9, 11), torch.randn(outputs, 32, *taps), torch.randn(outputs)
    x = x.contiguous(memory_format=LAST) if last else x
    result, rows = traced(function, tmp_path, x, w, b)
    check(function, result, x, w, b)
    assert result.stride() == function(x, w, b).stride()
    assert len(said(rows, "codegen.contract")) == 1 and not said(rows, "lower.fallback")
    x[0, 0, 3, 5] = float("nan")
    again = torch.compile(function, backend="pellucid")(x, w, b)
    check(function, again, x, w, b)
    assert torch.equal(again.isfinite(), function(x, w, b).isfinite())


def test_few_outputs_train_like_eagers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())
    trains_like_eager(model, tmp_path, torch.randn(2, 32, 8, 9).requires_grad_())


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(tmp_path: Path, dtype: torch.dtype, freeze: bool) -> None:
    """Terms that are whole units or not, steps, dilation, one tap, one channel each; a weight that is not finite."""
    layers = [(3, 32, 7, 2, 3, 1, 1), (33, 40, 3, 1, 2, 2, 1), (64, 48, 3, 1, 1, 1, 1), (50, 50, 3, 2, 1, 1, 50)]
    layers += [(64, 33, 1, 2, 0, 1, 1), (16, 16, 1, 1, 0, 1, 1)]
    models = [nn.Conv2d(*layer[:6], groups=layer[6], bias=k % 2 == 0).to(dtype) for k, layer in enumerate(layers)]
    # Eager multiplies zeros around the image with it in f16, and in bf16 where it has units for tiles.
    if dtype is torch.bfloat16 and not has_tiles(default_toolchain().isa):
        models[2].weight.data[3, 5, 0, 0] = models[3].weight.data[7, 0, 0, 0] = float("inf")
    args = [torch.randn(2, layer[0], 13, 11).to(dtype).to(memory_format=LAST) for layer in layers]
    models = [model.eval().to(memory_format=LAST) for model in models]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        return [model(x).relu() for model, x in zip(models, args, strict=True)]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pellucid", options={"trace": str(tmp_path), "freeze": freeze})
    wide = [copy.deepcopy(model).double()(x.double()).relu() for model, x in zip(models, args, strict=True)]
    with torch.no_grad():
        assert_matches(compiled(*args), function(*args), wide)
    rows = decisions(tmp_path)
    assert not said(rows, "lower.fallback") and len(said(rows, "codegen.contract")) == len(layers)


# Channels that fill tiles of bf16 and such that do not; short lines and long ones; parts of several images.
COPIED = [
    ((2, 64, 9, 13), (40, 64, 3, 3), {"padding": 1}),
    ((1, 96, 12, 17), (33, 96, 3, 3), {"padding": 1, "stride": 2}),
    ((1, 32, 8, 20), (16, 32, 1, 5), {"padding": (0, 4), "dilation": 2}),
    ((2, 128, 7, 7), (64, 128, 3, 3), {"padding": 1}),
    ((1, 64, 10, 40), (17, 64, 2, 4), {"stride": 3, "dilation": (1, 2)}),
    ((1, 48, 10, 30), (70, 48, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 3, 29, 40), (20, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((3, 21, 6, 9), (8, 21, 2, 3), {"padding": (1, 0)}),
    ((1, 11, 4, 90), (12, 11, 3, 1), {"padding": (2, 0), "dilation": (2, 1)}),
]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(("image", "kernel", "options"), COPIED)
def test_windows_of_bf16_overlap_as_in_the_image(
    tmp_path: Path, image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], finite: bool
) -> None:
    """finite: else a pixel is NaN and one infinite, which nothing but their own windows may see."""
    x, w = torch.randn(image).bfloat16().to(memory_format=LAST), torch.randn(kernel).bfloat16()
    if not finite:
        x[-1, 0, 1, 2], x[0, 1, -1, -3] = float("nan"), float("inf")
    model = nn.Conv2d(image[1], kernel[0], kernel[2:], bias=False, **options).bfloat16().requires_grad_(False)
    model.weight.data = w.to(memory_format=LAST)
    wide = F.conv2d(x.double(), w.double(), **options)
    for freeze in (False, True):
        result, rows = traced(model, tmp_path / str(freeze), x, freeze=freeze)
        torch.testing.assert_close(result.double(), wide, rtol=1e-2, atol=1e-2, equal_nan=True)
        assert not said(rows, "lower.fallback") and len(said(rows, "codegen.contract")) == 1


def test_a_parameter_per_channel_is_loaded_once_per_row_under_a_mask_that_depends_on_the_column(tmp_path: Path) -> None:
    """Inlined under a padding's mask, its load needs no mask of its own, as its element always exists."""

    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.pad(x * scale[:, None, None], (0, 1, 0, 1))

    x, scale = torch.randn(1, 4, 20, 20), torch.randn(4)
    result, _ = traced(scaled, tmp_path, x, scale)
    check(scaled, result, x, scale)
    (program,) = tmp_path.rglob("ir_post_fusion.txt")
    masked = [line for line in program.read_text().splitlines() if " load " in line and " if " in line]
    assert len(masked) == 1, "only the load of x may be masked"


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(17, 33, 3, 3), (8, 64, 5, 5), (4, 40, 7, 1), (3, 70, 3, 2), (1, 16, 4, 4)])
def test_weights_are_laid_out_in_squares_that_fit_their_taps(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights = torch.randint(-9, 9, (shape[0] + 1, *shape[1:])).to(dtype)[1:]
    result, rows = traced(lambda w: w.clone(memory_format=LAST), tmp_path, weights)
    assert result.is_contiguous(memory_format=LAST) and torch.equal(result, weights)
    if shape[2] * shape[3] == 9 and dtype is torch.bfloat16:
        assert said(rows, "codegen.tile"), rows


@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_weights_are_laid_out_before_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freeze: bool
) -> None:
    """So that small images pay for it in bf16 too, where each call would have to copy the weights."""
    monkeypatch.setenv("PELLUCID_MACHINE", REFERENCE)
    model = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3)).eval().bfloat16()
    x = torch.randn(1, 128, 4, 4, dtype=torch.bfloat16)
    if freeze or Library(machine_for()).lacks_type(DType.BF16):
        assert not said(runs_channels_last(model, tmp_path, x, freeze=freeze), "lower.fallback")
    else:
        _, rows = traced(model, tmp_path, x)
        assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["0"]


LEFT_IN_F16 = {
    "groups": (nn.Conv2d(16, 32, 3, padding=1, groups=4), (2, 16, 7, 6)),
    "lines": (nn.Conv1d(16, 24, 5, stride=2, groups=2), (2, 16, 31)),
    "transposed": (nn.ConvTranspose2d(8, 12, 4, stride=3, padding=1), (2, 8, 5, 6)),
    "volumes": (nn.ConvTranspose3d(3, 4, 3, stride=2), (1, 3, 3, 4, 5)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", LEFT_IN_F16)
def test_what_no_kernel_computes_in_f16_is_computed_in_f32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, train: bool
) -> None:
    """ATen would convert each number by itself, and take up to a hundred times as long.

    Convolutions of several groups are kernels, but for the gradients of their images with wider steps.
    """
    monkeypatch.setenv("PELLUCID_MACHINE", REFERENCE)
    model, shape = LEFT_IN_F16[name]
    model, x = copy.deepcopy(model).half().train(train), torch.randn(shape).half().requires_grad_(train)
    if train:
        trains_like_eager(model, tmp_path, x)
    else:
        result, _ = traced(model, tmp_path, x)
        with torch.no_grad():
            assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    reasons = said(decisions(tmp_path), "lower.fallback")
    assert bool(reasons) == ((train and name != "groups") or name not in ("groups", "lines"))
    assert all("in f32: ATen reaches 2.5 operations" in reason for reason in reasons)


@pytest.mark.parametrize("channels", [8, 16, 24, 40])
@pytest.mark.parametrize(("width", "height"), [(3, 3), (7, 5)])
def test_depthwise_convolutions_within_the_image(tmp_path: Path, channels: int, width: int, height: int) -> None:
    """All taps of all pixels count, so that each line is one run."""
    x = torch.randn(2, channels, 20, 21).to(memory_format=torch.channels_last)
    w = torch.randn(channels, 1, height, width)
    result, _ = traced(lambda x: F.conv2d(x, w, groups=channels), tmp_path, x)
    torch.testing.assert_close(result, F.conv2d(x, w, groups=channels))


@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize(
    ("pads", "value"), [((0, 1, 0, 1), 0.5), ((1, 2, 2, 0), float("inf")), ((3, 3, 3, 3), float("inf"))]
)
def test_an_image_that_was_padded_with_zeros_is_read_itself(
    groups: int, pads: tuple[int, ...], value: float, tmp_path: Path
) -> None:
    """Zeros that the user put there count: times a weight that is not finite they are NaN, as in eager mode."""
    x = torch.randn(2, 32, 9, 11).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(32, 32 // groups, 3, 3)
    weight[5, 0, 0, 0] = value

    def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, pads), weight, stride=2, groups=groups)

    result, _ = traced(padded, tmp_path, x, weight)
    expected = padded(x.double(), weight.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not [name for name in names_of_kernels(tmp_path) if "pad" in name]


FEW_CHANNELS = [
    ((1, 3, 33, 34), (24, 3, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 3, 29, 30), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    ((2, 3, 16, 20), (40, 3, 4, 4), {"stride": 4}),
    ((1, 4, 9, 40), (33, 4, 3, 5), {"dilation": 2, "padding": (2, 1)}),
    ((2, 2, 5, 6), (17, 2, 3, 3), {"padding": 4}),
    ((3, 1, 14, 15), (6, 1, 7, 7), {"padding": 2}),
    ((1, 3, 1, 30), (16, 3, 1, 8), {"stride": (1, 3), "padding": (0, 2)}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("image", "kernel", "options"), FEW_CHANNELS)
def test_images_of_few_channels_are_read_as_they_lie(
    tmp_path: Path, image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], freeze: bool
) -> None:
    """Channels-last or plane by plane, and with weights that lie either way: nothing is copied or gathered."""
    convolution = nn.Conv2d(kernel[1], kernel[0], kernel[2:], **options)
    model = nn.Sequential(convolution, nn.ReLU6(), nn.Conv2d(kernel[0], 16, 1), nn.ReLU(), nn.Conv2d(16, 32, 1)).eval()
    for number, (lies, weights) in enumerate([(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)]):
        model, x = model.to(memory_format=weights), torch.randn(image).contiguous(memory_format=lies)
        result, rows = traced(model, tmp_path / str(number), x, freeze=freeze)
        with torch.no_grad():
            assert_matches(result, model(x), copy.deepcopy(model).double()(x.double()))
        names = names_of_kernels(tmp_path / str(number))
        assert not said(rows, "lower.fallback") and not [name for name in names if name.startswith("clone")]
        sources = [file.read_text() for file in (tmp_path / str(number)).rglob("*.cpp")]
        assert sum(text.count("contract_spread") for text in sources) == (kernel[1] > 1), "one channel has no axis"


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding", [0, 2])
def test_images_of_few_channels_that_are_transposed_are_multiplied_block_by_block(
    tmp_path: Path, padding: int, channels: int, dynamic: bool | None
) -> None:
    """As spectrograms are; their taps follow one another in another order than those of the weight."""
    convolution = nn.Conv2d(channels, 24, (5, 7), stride=3, padding=padding).eval()

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = convolution

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convolution(x.transpose(2, 3)).flatten(2).transpose(1, 2)

    model, x = Transposed().eval(), torch.randn(2, channels, 41, 30)
    result, rows = traced(model, tmp_path, x, dynamic=dynamic)
    with torch.no_grad():
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    assert not said(rows, "lower.fallback") and said(rows, "codegen.contract")


@pytest.mark.parametrize(("size", "copied"), [(4, False), (7, False), (24, True)])
def test_a_weight_of_many_taps_is_copied_for_many_pixels(tmp_path: Path, size: int, copied: bool) -> None:
    """A kernel packs few of its channels at a time, and gathers windows in runs as short."""
    model, x = nn.Conv2d(32, 64, 5, padding=2).eval(), torch.randn(1, 32, size, size)
    x = x.contiguous(memory_format=LAST)
    result, _ = traced(model, tmp_path, x)
    with torch.no_grad():
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    assert any(name.startswith("clone") for name in names_of_kernels(tmp_path)) == copied


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("channels", [3, 20])
@pytest.mark.parametrize("where", ["image", "weight"])
@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_not_finite_meets_only_what_it_is_multiplied_with(
    tmp_path: Path, bad: float, channels: int, where: str, zeros: bool
) -> None:
    """Of an image of few channels, and of depthwise convolutions: padding adds nothing, zeros of the user's do."""
    groups = 1 if channels == 3 else channels
    x = torch.randn(2, channels, 20, 37).contiguous(memory_format=LAST)
    w = torch.randn(40 if groups == 1 else channels, channels // groups, 3, 3)
    (x[1, 2] if where == "image" else w[7, 0])[0, 1] = bad

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, (1, 1, 1, 1)) if zeros else x
        return F.conv2d(padded, w, padding=0 if zeros else 1, groups=groups)

    result, rows = traced(function, tmp_path, x, w)
    assert not said(rows, "lower.fallback")
    ones = function(x.isfinite().float(), w.isfinite().float())
    whole = function(torch.ones_like(x), torch.ones_like(w))
    if zeros and where == "weight":
        spoilt = torch.zeros_like(result, dtype=torch.bool)
        spoilt[:, 7] = True
    else:
        spoilt = ones != whole
    exact = function(x.double().nan_to_num(0, 0, 0), w.double().nan_to_num(0, 0, 0))
    assert torch.equal(~result.isfinite(), spoilt)
    torch.testing.assert_close(result[~spoilt].double(), exact[~spoilt], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((1, 40, 30, 31), (3, 3), {"padding": 1}),
        ((2, 40, 31, 40), (3, 3), {"padding": 1, "stride": 2}),
        ((1, 33, 15, 61), (7, 7), {"padding": 3}),
        ((1, 48, 9, 17), (5, 5), {"padding": 2, "stride": 2}),
        ((1, 48, 12, 20), (3, 3), {"padding": 2, "stride": 3}),
        ((1, 48, 12, 20), (3, 3), {"padding": 2, "dilation": 2}),
        ((1, 48, 12, 20), (3, 3), {"padding": (0, 3), "dilation": (1, 2), "stride": (1, 2)}),
        ((1, 20, 1, 50), (1, 9), {"padding": (0, 4)}),
        ((1, 20, 40, 1), (5, 1), {"padding": (2, 0), "stride": (2, 1)}),
        ((3, 160, 7, 7), (3, 3), {"padding": 1}),
        ((2, 20, 2, 2), (3, 3), {"padding": 3}),
    ],
)
def test_taps_of_depthwise_convolutions_share_the_reads_of_pixels(
    tmp_path: Path,
    image: tuple[int, ...],
    kernel: tuple[int, int],
    options: dict[str, Any],
    dtype: torch.dtype,
    freeze: bool,
) -> None:
    """Where windows move by one tap or two; elsewhere taps are read one by one."""
    channels = image[1]
    model = nn.Sequential(nn.Conv2d(channels, channels, kernel, groups=channels, **options), nn.ReLU()).to(dtype).eval()
    x = torch.randn(image).to(dtype).contiguous(memory_format=LAST)
    result, rows = traced(model, tmp_path, x, freeze=freeze)
    with torch.no_grad():
        assert_matches(result, model(x), copy.deepcopy(model).double()(x.double()))
    assert not said(rows, "lower.fallback")
    assert any("contract_channels" in file.read_text() for file in tmp_path.rglob("*.cpp"))
