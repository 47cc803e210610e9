"""Convolutions of several groups are kernels, whose registers hold columns of one group or of several."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.traced import decisions, said
from tests.support import assert_matches

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compiled(module: Any, folder: Path, **options: bool) -> Any:
    torch._dynamo.reset()
    chosen: dict[str, Any] = {"trace": str(folder), "verify": True, **options}
    return torch.compile(module, backend="pellucid", options=chosen)


def rules(folder: Path, rule: str) -> list[str]:
    return said(decisions(folder), rule)


def calls(folder: Path, function: str) -> int:
    """How often kernels call a function of `native/kernel/`."""
    return sum(file.read_text().count(f"pv::{function}<") for file in folder.rglob("*.cpp"))


def is_by_groups(folder: Path) -> bool:
    return calls(folder, "contract_groups") > 0


class Block(nn.Module):
    """A grouped convolution with what follows it in a network."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(*args, **options)
        self.norm = nn.BatchNorm2d(args[1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x)).relu()
        return y + x if y.shape == x.shape else y


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(
    ("shape", "outputs", "groups", "taps", "options"),
    [
        ((2, 128, 9, 15), 128, 32, 3, {"padding": 1}),  # four groups in a register of AVX-512
        ((1, 48, 14, 13), 48, 6, 3, {"padding": 1, "stride": 2}),
        ((1, 24, 9, 9), 24, 8, 1, {}),  # registers with lanes to spare
        ((1, 30, 9, 9), 30, 5, 3, {"padding": 2, "dilation": 2}),
        ((1, 48, 9, 10), 48, 2, 3, {"padding": 1}),  # one register and a half for a group
        ((1, 64, 7, 7), 128, 2, 3, {}),  # two registers share a pixel
        ((3, 12, 6, 5), 24, 12, (1, 3), {"padding": (0, 1)}),  # two outputs for a channel
        ((1, 24, 8, 8), 8, 8, 5, {"padding": 2}),  # one output of three channels
        ((1, 42, 6, 6), 64, 2, 3, {"padding": 1}),  # an odd number of channels, which are no pairs
        ((1, 40, 3, 260), 16, 4, 3, {"padding": (1, 4), "bias": False}),  # a line is more than a block
    ],
)
def test_grouped_convolutions_are_kernels_with_what_follows(
    tmp_path: Path,
    shape: tuple[int, ...],
    outputs: int,
    groups: int,
    taps: Any,
    options: dict[str, Any],
    freeze: bool,
    dtype: torch.dtype,
) -> None:
    model = Block(shape[1], outputs, taps, groups=groups, **options).to(dtype).to(memory_format=LAST).eval()
    x = torch.randn(shape).to(dtype).to(memory_format=LAST)
    with torch.no_grad():
        result = compiled(model, tmp_path, freeze=freeze)(x)
        assert is_by_groups(tmp_path) and not rules(tmp_path, "lower.fallback")
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["image", "weight"])
@pytest.mark.parametrize("channels", [4, 7, 24])
def test_what_is_not_finite_stays_in_its_group(
    tmp_path: Path, channels: int, where: str, bad: float, dtype: torch.dtype
) -> None:
    """A tap outside of the image adds nothing, and other groups do not see what is not finite."""
    sizes = (1, 2 * channels, 6, 7), (2 * channels, channels, 3, 3)
    x, w = (torch.randn(each).to(dtype).to(memory_format=LAST) for each in sizes)
    (x[0, channels] if where == "image" else w[channels, 3])[0, 0] = bad
    result = compiled(lambda x, w: F.conv2d(x, w, padding=1, groups=2), tmp_path)(x, w)
    expected = torch.zeros(2 * channels, 6, 7, dtype=torch.bool)
    if where == "image":
        expected[channels:, :2, :2] = True
    else:
        expected[channels, 1:, 1:] = True
    assert is_by_groups(tmp_path)
    assert torch.equal(~result[0].isfinite(), expected)


def test_channels_are_shuffled_after_a_grouped_convolution_and_not_within(tmp_path: Path) -> None:
    def shuffled(x: Tensor, w: Tensor) -> Tensor:
        y = F.conv2d(x, w, groups=3).relu()
        return y.view(1, 3, 8, 9, 9).transpose(1, 2).reshape(1, 24, 9, 9) * 2

    x, w = torch.randn(1, 24, 9, 9).to(memory_format=LAST), torch.randn(24, 8, 1, 1)
    result = compiled(shuffled, tmp_path)(x, w)
    assert is_by_groups(tmp_path)
    assert_matches([result], [shuffled(x, w)], [shuffled(x.double(), w.double())])


def test_groups_whose_weights_do_not_fit_are_onednns(tmp_path: Path) -> None:
    x, w = torch.randn(1, 500, 4, 4).to(memory_format=LAST), torch.randn(500, 250, 3, 3)
    result = compiled(lambda x, w: F.conv2d(x, w, groups=2), tmp_path)(x, w)
    (why,) = rules(tmp_path, "lower.fallback")
    assert "too large to be packed" in why
    assert_matches([result], [F.conv2d(x, w, groups=2)], [F.conv2d(x.double(), w.double(), groups=2)])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "taps", "options"),
    [
        (32, 32, 8, 3, {"padding": 1}),
        (32, 64, 2, 3, {"padding": 1}),
        (24, 36, 4, (3, 5), {"padding": (0, 2), "dilation": (1, 2)}),
        (30, 15, 5, 1, {"bias": False}),
        (40, 20, 20, 3, {"padding": 2}),  # the gradient of the image has an edge without zeros around
    ],
)
def test_gradients_are_kernels(
    tmp_path: Path,
    channels: int,
    outputs: int,
    groups: int,
    taps: Any,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = nn.Conv2d(channels, outputs, taps, groups=groups, **options).to(dtype).to(memory_format=LAST)
    x = torch.randn(2, channels, 12, 13).to(dtype).to(memory_format=LAST).requires_grad_()
    g = torch.randn_like(model(x))
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    def gradients(module: Any, x: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(module(x), [x, *model_of[module].parameters()], g.to(x.dtype))]

    run = compiled(model, tmp_path)
    model_of = {run: model, eager: eager, wide: wide}
    results = gradients(run, x)
    expected = [gradients(eager, x), gradients(wide, x.detach().double().requires_grad_())]
    assert_matches(results, *expected)
    assert calls(tmp_path, "contract_groups") == 2 and calls(tmp_path, "contract_group_gradients") == 1
    assert not rules(tmp_path, "lower.fallback")


@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1}, {"padding": 3}])
def test_gradients_of_other_images_are_onednns(tmp_path: Path, options: dict[str, int]) -> None:
    """With wider steps, or zeros around that only zeros meet; that of the weight is a kernel."""
    model = nn.Conv2d(32, 32, 3, groups=8, **options).to(memory_format=LAST)
    x = torch.randn(2, 32, 12, 12).to(memory_format=LAST).requires_grad_()
    compiled(model, tmp_path)(x).square().mean().backward()
    (reason,) = rules(tmp_path, "lower.fallback")
    assert "of an image of groups of several channels" in reason
    assert calls(tmp_path, "contract_group_gradients") > 0
    reference, y = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    reference(y).square().mean().backward()
    for mine, exact in ((x, y), (model.weight, reference.weight), (model.bias, reference.bias)):
        assert mine is not None and mine.grad is not None and exact is not None and exact.grad is not None
        torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-3, atol=1e-6)


def gradients_of(g: Tensor, x: Tensor, w: Tensor, groups: int) -> list[Tensor]:
    steps = [1, 1], [1, 1], [1, 1], False, [0, 0], groups
    return list(torch.ops.aten.convolution_backward(g, x, w, None, *steps, [True, True, False])[:2])


@pytest.mark.parametrize("where", ["gradient", "image"])
@pytest.mark.parametrize("groups", [2, 4, 16])
def test_gradients_that_are_not_finite_are_eagers(tmp_path: Path, groups: int, where: str) -> None:
    """Beside an edge, where a tap outside of the image adds nothing, and within."""
    g, x = (torch.randn(1, 32, 9, 9).to(memory_format=LAST) for _ in range(2))
    w = torch.randn(32, 32 // groups, 3, 3)
    bad = g if where == "gradient" else x
    bad[0, 5, 0, 3], bad[0, 31, 4, 8] = math.inf, math.nan
    results = compiled(gradients_of, tmp_path)(g, x, w, groups)
    for result, expected in zip(results, gradients_of(g, x, w, groups), strict=True):
        assert torch.equal(result.isnan(), expected.isnan()) and torch.equal(result.isinf(), expected.isinf())


@pytest.mark.parametrize(
    ("channels", "outputs", "groups"), [(16, 96, 2), (64, 64, 4), (18, 36, 3), (96, 96, 2), (16, 16, 16)]
)
def test_many_taps_are_as_exact_as_eagers(tmp_path: Path, channels: int, outputs: int, groups: int) -> None:
    """Of a line, as of wav2vec 2.0's positions: sums of thousands of terms, and weights that lie along channels."""
    x, w = torch.randn(2, channels, 80), torch.randn(outputs, channels // groups, 128)

    def gradients(x: Tensor, w: Tensor, seed: Tensor) -> list[Tensor]:
        steps = [1], [64], [1], False, [0], groups
        of = torch.ops.aten.convolution_backward(seed, x, w, None, *steps, [True, True, False])[:2]
        return [nn.functional.conv1d(x, w, padding=64, groups=groups), *of]

    seed = torch.randn(2, outputs, 81)
    wide = gradients(x.double(), w.double(), seed.double())
    assert_matches(compiled(gradients, tmp_path)(x, w, seed), gradients(x, w, seed), wide)


@pytest.mark.parametrize(("channels", "outputs", "groups"), [(16, 16, 16), (4, 2, 2), (8, 24, 4)])
def test_gradients_of_weights_over_long_lines_are_exact(
    tmp_path: Path, channels: int, outputs: int, groups: int
) -> None:
    """A sum of 60,000 terms one after the other would be off by some 1e-5 of the largest gradient."""
    options = {"stride": 3, "padding": 1, "dilation": 2}
    generator = torch.Generator().manual_seed(7)
    x, w = (
        torch.randn(*shape, generator=generator) for shape in ((1, channels, 60001), (outputs, channels // groups, 3))
    )
    seed = torch.randn(F.conv1d(x, w, groups=groups, **options).shape, generator=generator)
    wide = w.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.conv1d(x.double(), wide, groups=groups, **options), wide, seed.double())
    convolved = compiled(lambda x, w: F.conv1d(x, w, groups=groups, **options), tmp_path)
    leaf = w.detach().requires_grad_()
    (found,) = torch.autograd.grad(convolved(x, leaf), leaf, seed)
    assert calls(tmp_path, "contract_tap_gradients") + calls(tmp_path, "contract_group_gradients") == 1
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_gradients_of_any_number_of_images_of_any_size(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"trace": str(tmp_path)}
    run = torch.compile(lambda g, x, w: gradients_of(g, x, w, 4), backend="pellucid", dynamic=True, options=options)
    w = torch.randn(24, 6, 3, 3)
    torch._dynamo.mark_static(w)
    for shape in ((2, 24, 9, 7), (3, 24, 5, 30), (1, 24, 60, 2)):
        g, x = (torch.randn(shape).to(memory_format=LAST) for _ in range(2))
        wide = gradients_of(g.double(), x.double(), w.double(), 4)
        assert_matches(run(g, x, w), gradients_of(g, x, w, 4), wide)
    assert not rules(tmp_path, "lower.fallback")


def test_what_the_call_says_of_groups_is_left_to_onednn() -> None:
    """Of groups, and of sizes of weights, that are known at the call alone."""
    torch._dynamo.reset()
    run = torch.compile(gradients_of, backend="pellucid", dynamic=True)
    forward = torch.compile(lambda x, w, groups: F.conv2d(x, w, groups=groups), backend="pellucid", dynamic=True)
    for groups in (2, 4):
        g, x = (torch.randn(1, 24, 9, 7).to(memory_format=LAST) for _ in range(2))
        w = torch.randn(24, 24 // groups, 3, 3)
        wide = gradients_of(g.double(), x.double(), w.double(), groups)
        assert_matches(run(g, x, w, groups), gradients_of(g, x, w, groups), wide)
        exact = F.conv2d(x.double(), w.double(), groups=groups)
        assert_matches([forward(x, w, groups)], [F.conv2d(x, w, groups=groups)], [exact])


def test_gradients_of_wide_groups_in_bf16_are_onednns(tmp_path: Path) -> None:
    g, x = (torch.randn(1, 96, 6, 6).bfloat16().to(memory_format=LAST) for _ in range(2))
    w = torch.randn(96, 48, 3, 3).bfloat16()
    results = compiled(gradients_of, tmp_path)(g, x, w, 2)
    (reason,) = rules(tmp_path, "lower.fallback")
    assert "oneDNN multiplies pairs" in reason
    assert_matches(results, gradients_of(g, x, w, 2), gradients_of(g.double(), x.double(), w.double(), 2))


# Images whose lines, or whose steps from line to line, are too short for their strides to say which axis is which.
DEGENERATE = [
    ((2, 4, 1, 1), (4, 2, 1, 3), {"padding": (0, 1), "groups": 2}),
    ((1, 16, 1, 60), (16, 2, 1, 1), {"padding": (0, 1), "groups": 8}),
    ((1, 4, 5, 1), (4, 2, 3, 3), {"padding": 1, "groups": 2}),
    ((1, 4, 5, 3), (4, 2, 3, 3), {"padding": (1, 0), "groups": 2}),
    ((1, 4, 1, 1), (4, 2, 5, 3), {"padding": (3, 2), "stride": (1, 2), "groups": 2}),
    ((2, 16, 8, 1), (16, 2, 3, 3), {"padding": 1, "groups": 8}),
    ((2, 4, 1, 8), (4, 1, 3, 3), {"padding": (2, 1), "stride": 2, "groups": 4}),
    ((2, 4, 2, 8), (4, 2, 3, 3), {"padding": (2, 1), "stride": 3, "groups": 2}),
    ((2, 4, 2, 8), (4, 1, 3, 3), {"padding": (2, 1), "stride": 3, "groups": 4}),
    ((2, 48, 2, 8), (48, 48, 3, 3), {"padding": (2, 1), "stride": 3}),
]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("image", "kernel", "options"), DEGENERATE)
def test_images_of_few_pixels(
    image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    x, w = (torch.randn(each).to(dtype) for each in (image, kernel))

    def results(function: Any, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
        x, w = (each.detach().clone().requires_grad_() for each in (x, w))
        y = function(x, w)
        return [y, *torch.autograd.grad(y, (x, w), g)]

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, **options)

    torch._dynamo.reset()
    g = torch.randn_like(convolved(x, w))
    made = results(torch.compile(convolved, backend="pellucid"), x, w, g)
    assert_matches(made, results(convolved, x, w, g), results(convolved, *(each.double() for each in (x, w, g))))
