"""Convolutions: which of them are matrix products, and how the activations of a network lie in memory."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.capture import layout as layout_pass
from pellucid.capture.convolution_trial import convolution_seconds
from pellucid.ir.types import DType
from pellucid.machine.library import Library
from pellucid.native.build import default_toolchain
from pellucid.native.machine import REFERENCE, machine_for
from pellucid.native.toolchain import has_tiles
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last


def traced(
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    contract: bool = True,
    freeze: bool = False,
    **options: Any,
) -> tuple[Any, list[dict[str, str]]]:
    """The result of the compiled function, and the compiler's decisions."""
    torch._dynamo.reset()
    chosen = {"trace": str(folder), "verify": True, "contract": contract, "freeze": freeze}
    compiled = torch.compile(function, backend="pellucid", options=chosen, **options)
    with torch.no_grad():
        result = compiled(*args)
    return result, decisions(folder)


def decisions(folder: Path) -> list[dict[str, str]]:
    return [row for file in sorted(folder.rglob("decisions.csv")) for row in csv.DictReader(file.open())]


def said(rows: list[dict[str, str]], rule: str) -> list[str]:
    return [row["why"] for row in rows if row["rule"] == rule]


def runs_channels_last(model: nn.Module, folder: Path, x: torch.Tensor, **options: Any) -> list[dict[str, str]]:
    """Compare a model with eager's, whose convolutions must lie channels-last; returns the compiler's decisions."""
    result, rows = traced(model, folder, x, **options)
    with torch.no_grad():
        eager = model(x)
        assert result.stride() == eager.stride()
        assert_matches([result], [eager], [copy.deepcopy(model).double()(x.double())])
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    return rows


def check(function: Callable[..., Any], result: Any, *args: Any) -> None:
    with torch.no_grad():
        assert_matches(result, function(*args), function(*widened(args)))


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
    assert "as the option `contract` asks" in reason


@pytest.mark.parametrize("channels", [slice(2, 10), slice(0, 16, 2)])
def test_a_part_of_a_tensor_is_convolved_too(tmp_path: Path, channels: slice) -> None:
    x, w = torch.randn(1, 16, 5, 7), torch.randn(6, 8, 1, 1)
    result, _ = traced(lambda x, w: F.conv2d(x[:, channels], w), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x[:, channels], w), result, x, w)


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
        assert len(said(rows, "codegen.contract")) == (1 if x.numel() else 0)


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
        assert len(said(rows, "codegen.contract")) == 1


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


class Lines(nn.Module):
    """What models of sound begin with: windows that move on, normalised, each number of samples half of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Conv1d(32, 32, 4, stride=2, bias=False) for _ in range(3))
        self.norm = nn.GroupNorm(32, 32)
        self.near = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3, padding=1, groups=32), dim=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = F.gelu(self.norm(step(x)))
        return (x + self.near(x)).transpose(1, 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_lines_are_laid_out_and_return_eagers_strides(tmp_path: Path, batch: int) -> None:
    model, x = Lines().eval(), torch.randn(batch, 32, 200)
    rows = runs_channels_last(model, tmp_path, x)
    assert not said(rows, "lower.fallback")
    transformed = next(tmp_path.rglob("fx_graph_transformed.py")).read_text()
    assert transformed.count("torch.contiguous_format") == 1, "lines lie channels-last in between"


def test_lines_train_like_eagers(tmp_path: Path) -> None:
    trains_like_eager(Lines(), tmp_path, torch.randn(2, 32, 200).requires_grad_())


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


@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        ((1, 8, 3, 3), {}, "one pixel or one channel"),
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


def test_a_convolution_between_planar_tensors_is_a_kernels_unless_they_have_to_be_planar(tmp_path: Path) -> None:
    x, w = torch.randn(1, 8, 6, 6), torch.randn(6, 8, 3, 3)
    result, rows = traced(F.conv2d, tmp_path / "free", x, w)
    check(F.conv2d, result, x, w)
    assert result.is_contiguous() and not said(rows, "lower.fallback")

    def planar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.as_strided(x.shape, x.stride()), w)

    result, rows = traced(planar, tmp_path / "planar", x, w)
    check(planar, result, x, w)
    (reason,) = said(rows, "lower.fallback")
    assert "channels do not lie side by side" in reason


class Separable(nn.Module):
    """A depthwise convolution and a pointwise one, with what surrounds them in networks."""

    def __init__(self, groups: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)
        self.last = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = F.pad(F.relu6(self.norm(self.first(x))), (0, 1, 0, 1))
        y = self.second(x)[:, :, :-1, :-1]
        return y, self.last(y.reshape(-1, 4 * 6 * 6)), x.mean((2, 3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_depthwise_networks_run_channels_last_and_return_eagers_strides(
    tmp_path: Path, layout: torch.memory_format
) -> None:
    model, x = Separable().eval(), torch.randn(2, 8, 6, 6).contiguous(memory_format=layout)
    result, rows = traced(model, tmp_path, x)
    with torch.no_grad():
        eager = model(x)
        assert [t.stride() for t in result] == [t.stride() for t in eager]
        assert_matches(result, eager, copy.deepcopy(model).double()(x.double()))
    (why,) = said(rows, "transform.channels-last")
    assert why.startswith("spares oneDNN 3,480 copied elements of activations")
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    assert said(rows, "codegen.contract")


def in_double(x: torch.Tensor) -> torch.Tensor:
    """Kernels read weights in f32 as they lie, others are copied: here many for few pixels."""
    x = F.conv2d(x.double(), torch.ones(512, 8, 3, 3, dtype=torch.float64), padding=1)
    return F.conv2d(x, torch.ones(8, 512, 3, 3, dtype=torch.float64), stride=2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (in_double, "costs 74,368 of weights and at the ends"),
        (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), groups=8).as_strided((2, 2), (3, 1)), "how its argument lies"),
        (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), groups=8).transpose(1, 3) * 2, "must have the strides"),
    ],
)
def test_a_layout_that_is_refused_has_a_reason(tmp_path: Path, function: Callable[..., Any], why: str) -> None:
    x = torch.randn(2, 8, 6, 6)
    result, rows = traced(function, tmp_path, x)
    with torch.no_grad():
        assert_matches(result, function(x), function(x))
    assert why in said(rows, "transform.channels-last")[0]


@pytest.mark.parametrize(("seconds", "ok"), [((1.0, 1.5), "0"), ((1.0, 1.0), "1")])
def test_grouped_convolutions_are_tried_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], ok: str
) -> None:
    tried: list[tuple[Any, ...]] = []
    monkeypatch.setattr(layout_pass, "convolution_seconds", lambda *key: tried.append(key) or seconds)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, groups=4), nn.ReLU(), nn.Conv2d(32, 8, 1)).eval().bfloat16()
    x = torch.randn(2, 16, 40, 40).bfloat16()
    result, rows = traced(model, tmp_path, x)
    with torch.no_grad():
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    assert tried == [((2, 16, 40, 40), (32, 4, 3, 3), (1, 1), (0, 0), (1, 1), 4, torch.bfloat16)]
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == [ok]
    if ok == "0":
        (why,) = said(rows, "transform.channels-last")
        assert why == "grouped convolutions take 1.50 times as long channels-last on this machine"


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
    rows = [row for file in tmp_path.rglob("decisions.csv") for row in csv.DictReader(file.open())]
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


def test_a_trial_of_a_convolution_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    seconds = convolution_seconds((9, 8, 12, 12), (8, 2, 3, 3), (1, 1), (1, 1), (1, 1), 4, torch.bfloat16)
    assert min(seconds) > 0 and torch.equal(torch.get_rng_state(), before)


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


def gradients(model: nn.Module, call: Callable[..., Any], *args: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a training step leaves in each parameter and buffer, and in each argument that wants a gradient."""
    model.zero_grad(set_to_none=True)
    for arg in args:
        arg.grad = None
    torch.manual_seed(7)
    call(*args).square().sum().backward()
    named = {f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    named |= {f"grad of argument {i}": arg.grad for i, arg in enumerate(args) if arg.grad is not None}
    return named | {name: buffer.clone() for name, buffer in model.named_buffers()}


def trains_like_eager(model: nn.Module, folder: Path, *args: torch.Tensor, **options: Any) -> list[dict[str, str]]:
    """Compare a training step with eager's, values and strides; returns the decisions about the layout."""
    torch._dynamo.reset()
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    settings = {"trace": str(folder), "verify": True}
    compiled = torch.compile(model, backend="pellucid", options=settings, **options)
    copies = [tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args) for _ in range(2)]
    ours, theirs = gradients(model, compiled, *copies[0]), gradients(eager, eager, *copies[1])
    exact = gradients(wide, wide, *(widened(arg.detach()).requires_grad_(arg.requires_grad) for arg in args))
    for name in theirs:
        assert_matches(ours[name], theirs[name], exact[name])
    return [row for row in decisions(folder) if row["rule"] == "transform.channels-last"]


class Block(nn.Module):
    """What residual networks repeat, with what they begin and end with."""

    def __init__(self, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.narrow = nn.Conv2d(8, 4, 1, bias=bias)
        self.middle = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=bias)
        self.drop = nn.Dropout(dropout)
        self.widen = nn.Conv2d(4, 8, 1, bias=bias)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(x + self.widen(self.drop(F.relu(self.middle(self.narrow(x))))))
        return self.last(x.mean((2, 3)))


def _kind(file: Path) -> str:
    return file.parent.name.split("-")[-1]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("bias", [True, False])
def test_training_runs_channels_last_and_returns_eagers_strides(
    tmp_path: Path, bias: bool, layout: torch.memory_format
) -> None:
    x = torch.randn(2, 3, 30, 26).contiguous(memory_format=layout).requires_grad_()
    (row,) = trains_like_eager(Block(bias), tmp_path, x)
    assert row["ok"] == "1", row
    backward, forward = (file.read_text() for file in sorted(tmp_path.rglob("fx_graph_transformed.py"), key=_kind))
    weights = 2  # of more than one tap
    copies = weights + (layout is torch.contiguous_format)
    assert forward.count("channels_last)") == copies, "of weights, and of what lies otherwise"
    assert backward.count("aten.convolution_backward") == 4
    assert "channels_last" not in backward, "what is saved lies as it is wanted"


def test_dropout_between_convolutions_draws_eagers_numbers(tmp_path: Path) -> None:
    """Random numbers are drawn in the order of memory: what lies channels-last would get others."""
    (row,) = trains_like_eager(Block(dropout=0.5), tmp_path, torch.randn(2, 3, 30, 26))
    assert row["ok"] == "1", row


@torch.library.custom_op("pellucid_test::first_row_in_memory", mutates_args=())
def first_row_in_memory(x: torch.Tensor) -> torch.Tensor:
    """An operator that goes by strides."""
    assert x.is_contiguous(), x.stride()
    return x.clone()


@first_row_in_memory.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


first_row_in_memory.register_autograd(lambda ctx, grad: grad)


@pytest.mark.parametrize("train", [False, True])
def test_a_custom_operator_between_convolutions_sees_eagers_strides(tmp_path: Path, train: bool) -> None:
    class Net(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.stem(x))
            x = torch.ops.pellucid_test.first_row_in_memory(x)
            x = F.relu(self.narrow(x))
            for _ in range(4):
                x = F.relu(self.middle(x))
            return x.mean((2, 3))

    model, x = Net(), torch.randn(2, 3, 30, 26)
    model.middle = nn.Conv2d(4, 4, 3, padding=1, groups=4)
    if train:
        (row,) = trains_like_eager(model, tmp_path, x)
        assert row["ok"] == "1", row
        return
    result, rows = traced(model.eval(), tmp_path, x)
    with torch.no_grad():
        assert_matches(result, model(x), copy.deepcopy(model).double()(x.double()))
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]


def test_a_view_between_convolutions_that_channels_last_has_not_gets_a_copy(tmp_path: Path) -> None:
    class Net(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.instance_norm(F.relu(self.narrow(F.relu(self.stem(x)))))
            return self.widen(F.relu(self.middle(F.group_norm(x, 2)))).mean((2, 3))

    (row,) = trains_like_eager(Net(), tmp_path, torch.randn(2, 3, 30, 26))
    assert row["ok"] == "1", row


@pytest.mark.sampled
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("affine", [False, True])
def test_group_norms_between_convolutions_keep_channels_last(tmp_path: Path, groups: int, affine: bool) -> None:
    norms = [nn.GroupNorm(groups, 16, affine=affine) for _ in range(2)]
    for norm in norms if affine else []:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    parts = [nn.Conv2d(8, 16, 3, padding=1), norms[0], nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), norms[1], nn.SiLU()]
    model, x = nn.Sequential(*parts), torch.randn(2, 8, 21, 20)
    (row,) = trains_like_eager(copy.deepcopy(model), tmp_path / "training", x)
    assert row["ok"] == "1", row
    rows = runs_channels_last(model.eval(), tmp_path / "inference", x)
    assert not said(rows, "lower.fallback")


def test_small_images_with_large_weights_run_channels_last_in_f32(tmp_path: Path) -> None:
    """Kernels read weights as they lie: they need not be outweighed."""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    runs_channels_last(model, tmp_path, torch.randn(1, 64, 8, 8))


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
    """ATen would convert each number by itself, and take up to a hundred times as long."""
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
    assert reasons and all("in f32: ATen reaches 2.5 operations" in reason for reason in reasons)


def copied_twice(x: torch.Tensor, net: nn.Module) -> tuple[torch.Tensor, ...]:
    copy = x.contiguous().contiguous(memory_format=LAST)
    y = net(x)
    x.add_(1)
    return y, copy


def copied_before_it_changes(x: torch.Tensor, net: nn.Module) -> tuple[torch.Tensor, ...]:
    copy = x.contiguous()
    y = net(x)
    x.zero_()
    return y, copy


def two_copies(x: torch.Tensor, net: nn.Module) -> tuple[torch.Tensor, ...]:
    y = net(x)
    return y.clone(memory_format=LAST), y.clone(memory_format=LAST)[:, 1:], x.contiguous()


def copies_in_between(x: torch.Tensor, net: nn.Module) -> tuple[torch.Tensor, ...]:
    y = net(x.contiguous())
    rows = y.flatten(2).transpose(1, 2).contiguous() * 2
    return net(y.permute(0, 2, 3, 1).contiguous().tanh().permute(0, 3, 1, 2)), rows


@pytest.mark.parametrize("function", [copied_twice, copied_before_it_changes, two_copies, copies_in_between])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_copies_are_left_out_only_where_nobody_can_tell(
    tmp_path: Path, function: Callable[..., tuple[torch.Tensor, ...]], layout: torch.memory_format
) -> None:
    net = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)).eval()
    given = torch.randn(2, 32, 12, 12).contiguous(memory_format=layout)
    ours, theirs = given.clone(), given.clone()
    result, rows = traced(lambda x: function(x, net), tmp_path, ours)
    with torch.no_grad():
        eager = function(theirs, net)
        assert_matches(result, eager, function(given.double(), copy.deepcopy(net).double()))
    assert torch.equal(ours, theirs)
    assert {row["ok"] for row in rows if row["rule"] == "transform.channels-last"} == {"1"}
    assert shared(*result, ours) == shared(*eager, theirs)


def shared(*tensors: torch.Tensor) -> list[bool]:
    """For each pair whether the two lie in one memory."""
    return [one.untyped_storage()._cdata == other.untyped_storage()._cdata for one, other in combinations(tensors, 2)]


def test_a_view_across_a_dimension_of_one_element_gets_a_copy(tmp_path: Path) -> None:
    x, w = torch.randn(2, 3, 6, 7), torch.randn(3, 4, 2, 2)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w.reshape(3, 4, 1, 2, 2, 1).permute(3, 5, 1, 0, 2, 4).reshape(8, 3, 1, 2))

    result, _ = traced(function, tmp_path, x, w)
    check(function, result, x, w)


class After(nn.Module):
    """A call after convolutions, enough of them for a layout of their own."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = F.conv2d(x.tanh(), self.weight, padding=1)
        return self.function(x, self.weight)


def weight_normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = torch._weight_norm(weight, weight.detach().sum((1, 2, 3), keepdim=True), 0)
    return F.conv2d(F.conv2d(x.tanh(), weight * 1.0, padding=1).tanh(), weight, padding=1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: F.scaled_dot_product_attention(x, x, x),
        weight_normed,
        lambda x, _: F.grid_sample(x, torch.linspace(-1, 1, 256).reshape(2, 8, 8, 2).to(x.dtype), align_corners=False),
        lambda x, _: F.pad(x, (1, 2, 3, 4), mode="reflect"),
        lambda x, _: torch.cdist(x, x + 1),
        lambda x, _: torch.view_as_real(torch.view_as_complex(x.unflatten(3, (-1, 2))) * 1j),
        lambda x, _: F.interpolate(x, scale_factor=2.0, mode="bicubic"),
        lambda x, _: F.max_pool3d(x, 2, dilation=2),
    ],
)
def test_calls_of_aten_get_arguments_that_lie_as_in_eager(tmp_path: Path, function: Callable[..., Any]) -> None:
    """Those that only PyTorch makes, of the gradients above all, trust them to be contiguous."""
    (row,) = trains_like_eager(After(function), tmp_path, torch.randn(2, 8, 24, 24).requires_grad_())
    assert row["ok"] == "1", row


def twice(x: torch.Tensor) -> torch.Tensor:
    """Enough depthwise convolutions for a layout of their own."""
    weight = torch.linspace(-1, 1, 8 * 9).reshape(8, 1, 3, 3)
    return F.conv2d(F.conv2d(x, weight, padding=1, groups=8), weight, padding=1, groups=8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(twice(x).chunk(2, 1)[0], 0.5, True),
        lambda x: torch.rand_like(twice(x).transpose(2, 3).sort(1)[0]),
        lambda x: twice(x).chunk(2, 1)[0],
        lambda x: twice(x).split([3, 5], 1)[1],
        lambda x: twice(x).unbind(1)[0],
        lambda x: twice(x).transpose(2, 3).sort(1)[0],
        lambda x: first_row_in_memory(twice(x).chunk(2, 0)[1]),
    ],
)
def test_what_operators_with_several_results_give_has_eagers_strides(
    tmp_path: Path, function: Callable[..., Any]
) -> None:
    x = torch.randn(2, 8, 16, 12)
    torch.manual_seed(1)
    result, _ = traced(function, tmp_path, x)
    torch.manual_seed(1)
    eager = function(x)
    assert result.stride() == eager.stride()
    torch.testing.assert_close(result, eager)


@pytest.mark.sampled
def test_training_with_symbolic_sizes_lies_channels_last(tmp_path: Path) -> None:
    (row,) = trains_like_eager(Block(), tmp_path, torch.randn(2, 3, 30, 26), dynamic=True)
    assert row["ok"] == "1"


def test_weights_that_outweigh_activations_keep_the_layout_of_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten())
    (row,) = trains_like_eager(model, tmp_path, torch.randn(1, 16, 6, 6))
    assert row["ok"] == "0"
    assert row["why"].startswith("spares oneDNN")


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
    (table,) = tmp_path.rglob("kernels.csv")
    assert not [row["kernel"] for row in csv.DictReader(table.open()) if "pad" in row["kernel"]]


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
        (table,) = (tmp_path / str(number)).rglob("kernels.csv")
        names = [row["kernel"] for row in csv.DictReader(table.open())]
        assert not said(rows, "lower.fallback") and not [name for name in names if name.startswith("clone")]
        sources = [file.read_text() for file in (tmp_path / str(number)).rglob("*.cpp")]
        assert sum(text.count("contract_spread") for text in sources) == (kernel[1] > 1), "one channel has no axis"


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
