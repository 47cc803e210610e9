"""Gradients of convolutions: which of them are kernels, and that all are eager's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.capture import convolutions
from pellucid.ir.types import DType
from pellucid.machine.library import Library
from pellucid.native.build import default_toolchain
from pellucid.native.machine import machine_for
from pellucid.native.toolchain import has_tiles
from tests.integration.traced import decisions
from tests.support import assert_matches, recorded_fallbacks

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last

# Image, weight, and what says how the window moves; which gradients are kernels where channels lie side by side.
GRADIENTS = [
    ((2, 24, 9, 7), (40, 24, 3, 3), {"padding": 1}, "image weight"),
    ((1, 40, 14, 15), (33, 40, 3, 3), {"padding": 2, "dilation": 2}, "image weight"),
    ((1, 40, 9, 10), (33, 40, 3, 3), {"padding": [2], "dilation": [2], "stride": [1]}, "image weight"),
    ((3, 17, 8, 9), (32, 17, 2, 3), {}, "image weight"),
    ((2, 24, 9, 8), (40, 24, 3, 3), {"padding": 1, "stride": 2}, "weight"),
    ((2, 24, 9, 8), (40, 24, 1, 1), {}, "image weight"),
    ((2, 24, 9, 8), (40, 24, 1, 1), {"stride": (2, 3)}, "image weight"),
    ((2, 24, 9, 8), (40, 24, 1, 1), {"stride": 2, "padding": 1}, "weight"),
    ((1, 24, 3, 3), (40, 24, 3, 3), {"padding": 4}, "image weight"),
    ((2, 3, 9, 9), (40, 3, 3, 3), {"padding": 1}, "image"),
    ((2, 24, 9, 7), (40, 12, 3, 3), {"padding": 1, "groups": 2}, "image weight"),
    ((1, 130, 6, 6), (260, 130, 3, 3), {"padding": 1}, "image weight"),
    ((2, 40, 9, 7), (40, 1, 3, 3), {"padding": 1, "groups": 40}, "image weight"),
    ((1, 19, 15, 14), (19, 1, 7, 7), {"padding": 3, "groups": 19}, "image weight"),
    ((1, 33, 15, 14), (33, 1, 5, 4), {"padding": (3, 1), "dilation": (1, 2), "groups": 33}, "image weight"),
    ((3, 16, 9, 8), (16, 1, 3, 3), {"padding": 1, "stride": (2, 3), "groups": 16}, "weight"),
    ((1, 20, 3, 2), (20, 1, 5, 9), {"padding": (4, 5), "groups": 20}, "image weight"),
    ((2, 20, 9, 1), (20, 1, 3, 1), {"padding": (1, 0), "groups": 20}, "image weight"),
    ((2, 20, 6, 8), (20, 1, 1, 3), {"padding": (1, 1), "groups": 20}, "image weight"),
    ((2, 20, 6, 8), (20, 1, 1, 1), {"groups": 20}, "image weight"),
    ((2, 20, 6, 8), (40, 1, 3, 3), {"groups": 20}, ""),
]


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that matter."""
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def gradients(
    function: Callable[..., torch.Tensor], *args: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in args]
    result = function(*leaves)
    return torch.autograd.grad(result, leaves, seed.to(result.dtype))


@pytest.mark.sampled
@pytest.mark.parametrize(("image", "kernel", "options", "ours"), GRADIENTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_that_are_sums_of_products_are_kernels(
    tmp_path: Path,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    ours: str,
    layout: torch.memory_format,
    bias: bool,
) -> None:
    """oneDNN computes the others, and those of images whose channels do not lie side by side."""
    tensors = [torch.randn(image).contiguous(memory_format=layout), torch.randn(kernel).contiguous(memory_format=LAST)]
    tensors += [torch.randn(kernel[0])] if bias else []

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return F.conv2d(*tensors, **options)

    assert_kernels(function, tensors, layout, ours, tmp_path)


def assert_loops(
    x: torch.Tensor, weight: torch.Tensor, options: dict[str, Any], wanted: torch.Tensor, dynamic: tuple[int, ...]
) -> None:
    """The gradient of `wanted`, the image or the weight, is a kernel's and right. dynamic: dimensions of the image."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, **options).square().sum()

    def gradient(call: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        leaf = wanted.to(dtype, copy=True).requires_grad_()
        image = leaf if wanted is x else x.to(dtype)
        if dynamic:
            torch._dynamo.mark_dynamic(image, dynamic)
        return torch.autograd.grad(call(image, leaf if wanted is weight else weight.to(dtype)), leaf)[0]

    torch._dynamo.reset()
    run = torch.compile(function, backend="pellucid", options={"verify": True})
    with recorded_fallbacks() as found:
        ours = gradient(run, torch.float32)
    eagers, exact = gradient(function, torch.float32), gradient(function, torch.float64)
    assert_matches([ours], [eagers], [exact])
    assert ours.stride() == eagers.stride() and "aten::convolution_backward.default" not in found


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 1, 13, 17), (2, 1, 3, 3), {"padding": 1}),
        ((1, 8, 9, 11), (1, 8, 5, 3), {"padding": (2, 1)}),
        ((1, 1, 9, 9), (1, 1, 7, 7), {"padding": 3}),
        ((2, 1, 20, 9), (16, 1, 3, 2), {"dilation": 2}),
        ((1, 3, 5, 6), (1, 3, 4, 4), {"padding": 3}),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_images_are_loops_where_image_or_result_has_one_channel(
    image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], layout: torch.memory_format, dynamic: bool
) -> None:
    x, weight = torch.randn(image).contiguous(memory_format=layout), torch.randn(kernel)
    assert_loops(x, weight, options, x, (2, 3) if dynamic else ())


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((2, 1, 13, 17), (1, 1, 3, 3), {"padding": 1}),
        ((1, 8, 9, 11), (1, 8, 5, 3), {"padding": (2, 1)}),
        ((1, 1, 9, 9), (1, 1, 7, 7), {"padding": 3}),
        ((3, 33, 6, 5), (1, 33, 3, 2), {"dilation": 2}),
        ((1, 1, 1, 50000), (1, 1, 1, 4), {}),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_weights_of_one_output_are_kernels(
    image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any], layout: torch.memory_format, dynamic: bool
) -> None:
    x, weight = torch.randn(image).contiguous(memory_format=layout), torch.randn(kernel)
    assert_loops(x, weight, options, weight, (3,) if dynamic else ())


@pytest.mark.parametrize(
    ("image", "kernel", "options", "ours"),
    [
        ((1, 64, 16, 15), (64, 32, 2, 2), {"stride": 2}, "image weight"),
        ((2, 40, 13, 17), (40, 36, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, "image weight"),
        ((1, 24, 9, 11), (24, 20, 3, 3), {"padding": 2, "dilation": 2}, "image weight"),
        ((1, 48, 1, 100), (48, 32, 1, 16), {"stride": (1, 8), "padding": (0, 4)}, "image weight"),
        (
            (2, 48, 6, 7),
            (48, 32, 5, 4),
            {"stride": (3, 2), "padding": (2, 1), "output_padding": (2, 0)},
            "image weight",
        ),
        ((2, 24, 9, 11), (24, 3, 4, 4), {"stride": 2, "padding": 1}, "image"),
        ((1, 24, 9, 11), (24, 20, 3, 3), {"stride": 2, "dilation": 3, "output_padding": 2}, ""),
        ((2, 24, 9, 7), (24, 12, 3, 3), {"stride": 2, "groups": 2}, ""),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_transposed_convolutions_are_those_of_convolutions(
    tmp_path: Path,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    ours: str,
    layout: torch.memory_format,
    bias: bool,
) -> None:
    tensors = [torch.randn(image).contiguous(memory_format=layout), torch.randn(kernel).contiguous(memory_format=LAST)]
    tensors += [torch.randn(kernel[1] * options.get("groups", 1))] if bias else []
    assert_kernels(lambda *tensors: F.conv_transpose2d(*tensors, **options), tensors, layout, ours, tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("image", "kernel", "options", "ours"),
    [
        ((2, 24, 9, 8), (40, 24, 1, 1), {}, "image weight"),
        ((1, 17, 9, 7), (33, 17, 1, 1), {}, "image weight"),
        ((1, 70, 13, 11), (66, 70, 1, 1), {}, "image weight"),
        ((3, 24, 3, 1), (40, 24, 1, 1), {}, "image weight"),
        ((2, 24, 9, 8), (40, 24, 1, 1), {"stride": (2, 3)}, "image"),
        ((2, 24, 9, 8), (40, 24, 1, 1), {"stride": 2, "padding": 1}, ""),
        ((2, 24, 9, 7), (40, 24, 3, 3), {"padding": 1}, ""),
        ((2, 40, 9, 7), (40, 1, 1, 1), {"groups": 40}, "image weight"),
        ((1, 19, 15, 14), (19, 1, 7, 7), {"padding": 3, "groups": 19}, "image weight"),
        ((1, 33, 15, 14), (33, 1, 5, 4), {"padding": (3, 1), "dilation": (1, 2), "groups": 33}, "image weight"),
        ((3, 16, 9, 8), (16, 1, 3, 3), {"padding": 1, "stride": (2, 3), "groups": 16}, "image weight"),
        (
            (1, 40, 9, 10),
            (40, 1, 3, 5),
            {"padding": (1, 4), "stride": 2, "dilation": (3, 2), "groups": 40},
            "image weight",
        ),
        ((1, 20, 3, 2), (20, 1, 5, 9), {"padding": (4, 5), "groups": 20}, "image weight"),
        ((2, 20, 9, 1), (20, 1, 3, 1), {"padding": (1, 0), "stride": (3, 1), "groups": 20}, "image weight"),
    ],
)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(torch.contiguous_format, torch.bfloat16), (LAST, torch.bfloat16), (LAST, torch.float16)],
)
def test_gradients_of_one_tap_and_of_depthwise_convolutions_are_kernels_in_narrow_types(
    tmp_path: Path,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    ours: str,
    layout: torch.memory_format,
    dtype: torch.dtype,
) -> None:
    shapes = image, kernel, kernel[:1]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors[0] = tensors[0].contiguous(memory_format=layout)
    assert_kernels(lambda *tensors: F.conv2d(*tensors, **options), tensors, layout, ours, tmp_path)


def assert_kernels(
    function: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    layout: torch.memory_format,
    ours: str,
    folder: Path,
) -> None:
    """A convolution's gradients match eager's; where channels lie side by side, `ours` of them are kernels."""
    seed = torch.randn(function(*tensors).shape).to(tensors[0].dtype).contiguous(memory_format=layout)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pellucid", options={"trace": str(folder), "verify": True})
    made = gradients(compiled, *tensors, seed=seed)
    eager = gradients(function, *tensors, seed=seed)
    assert_matches(made, eager, gradients(function, *(each.double() for each in tensors), seed=seed))
    assert list(map(strides, made)) == list(map(strides, eager))
    left = [row["facts"] for row in decisions(folder) if row["rule"] == "lower.fallback" and "backward" in row["facts"]]
    if layout is LAST:
        assert bool(left) == (ours != "image weight"), left


# Image, weight and how the window moves; whether its taps share what is packed of a line of pixels.
TAPS = [
    ((1, 32, 1, 500), (32, 32, 1, 11), {"padding": (0, 25), "dilation": (1, 5)}, True),
    ((2, 33, 1, 57), (40, 33, 1, 7), {"padding": (0, 3)}, True),
    ((2, 32, 20, 33), (48, 32, 3, 5), {"padding": (1, 2), "stride": (1, 2)}, True),
    ((2, 20, 19, 33), (17, 20, 3, 5), {"padding": (4, 8), "dilation": (4, 4), "stride": (1, 2)}, True),
    ((1, 24, 9, 1500), (70, 24, 3, 2), {"padding": (1, 60), "dilation": (1, 130)}, True),
    ((1, 40, 300, 1), (16, 40, 5, 1), {"padding": (2, 0)}, True),
    ((3, 40, 14, 14), (40, 40, 3, 3), {"dilation": 2}, True),
    ((1, 24, 9, 700), (24, 24, 3, 3), {"padding": 1}, True),
    # Few units of what is packed count; taps reach too far, or do not meet the pixels of a line; much would be zeros.
    ((1, 96, 30, 40), (96, 96, 1, 3), {"padding": (0, 1), "stride": (1, 9)}, False),
    ((1, 24, 5, 400), (24, 24, 1, 3), {"padding": (0, 190), "dilation": (1, 190)}, False),
    ((1, 24, 9, 400), (24, 24, 3, 1), {"padding": (1, 0)}, False),
    ((1, 256, 7, 7), (256, 256, 3, 3), {"padding": 1}, False),
]


@pytest.mark.parametrize(("image", "kernel", "options", "shared"), TAPS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dynamic", [False, True])
def test_taps_that_move_as_pixels_do_share_what_is_packed(
    tmp_path: Path,
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    shared: bool,
    layout: torch.memory_format,
    dynamic: bool,
) -> None:
    """Lines, pieces of them, lines of taps, steps, dilation and edges; images of any size; both layouts of weights."""
    x, w = torch.randn(image).to(memory_format=LAST), torch.randn(kernel).to(memory_format=layout)
    seed = torch.randn_like(F.conv2d(x, w, **options)).to(memory_format=LAST)

    def function(seed: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.grad.conv2d_weight(x, w.shape, seed * 2, **options)

    torch._dynamo.reset()
    for tensor in (x, seed):
        if dynamic and tensor.shape[3] > 1:
            torch._dynamo.mark_dynamic(tensor, 3)
    compiled = torch.compile(function, backend="pellucid", options={"trace": str(tmp_path), "verify": True})
    made = compiled(seed, x, w)
    assert_matches(made, function(seed, x, w), function(seed.double(), x.double(), w.double()))
    facts = [row["facts"] for row in decisions(tmp_path) if row["rule"] == "codegen.contract"]
    assert len(facts) == 1 and ("share what is packed" in facts[0]) == shared, facts


# Line, weight, and what says how the window moves; whether the gradient of the weight is a product with windows.
LINES = [
    ((2, 1, 300), (40, 1, 10), {"stride": 5}, True),
    ((1, 1, 90), (64, 1, 7), {"padding": 3}, True),
    ((3, 3, 50), (33, 3, 5), {"padding": (4,), "dilation": 2, "stride": 2}, True),
    ((2, 15, 40), (64, 15, 3), {"padding": 1}, True),
    ((2, 1, 40), (32, 1, 40), {}, True),
    ((2, 3, 40), (32, 3, 11), {}, False),  # windows would be larger than the result
    ((2, 16, 40), (64, 16, 3), {}, False),
    ((2, 4, 40), (16, 4, 3), {}, False),
    ((2, 4, 40), (64, 2, 3), {"groups": 2}, False),
]


@pytest.mark.parametrize(("line", "kernel", "options", "by_windows"), LINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_weights_over_lines_of_few_channels_are_products_with_windows(
    line: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict[str, Any],
    by_windows: bool,
    dtype: torch.dtype,
    dynamic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products, of_weight = [], convolutions._of_weight_by_windows
    monkeypatch.setattr(convolutions, "_of_weight_by_windows", lambda *args: products.append(args) or of_weight(*args))
    tensors = [torch.randn(line, dtype=dtype), torch.randn(kernel, dtype=dtype), torch.randn(kernel[0], dtype=dtype)]

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, b, **options).tanh()

    compiled = torch.compile(function, backend="pellucid")

    def run(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        if dynamic:
            torch._dynamo.maybe_mark_dynamic(x, 2)
        return compiled(x, *others)

    torch._dynamo.reset()
    seed = torch.randn_like(function(*tensors))
    with recorded_fallbacks() as found:
        made = gradients(run, *tensors, seed=seed)
    wide = gradients(function, *(each.double() for each in tensors), seed=seed.double())
    for one, other, exact in zip(made, gradients(function, *tensors, seed=seed), wide, strict=True):
        assert_matches(one, other, exact)
        assert one.stride() == other.stride()
    refused = (dtype is torch.bfloat16 and line[0] > 1) or (dynamic and "padding" in options)
    assert len(products) == (by_windows and dtype is not torch.float64 and not refused)
    if products and dtype is torch.float32 and "stride" not in options:  # oneDNN computes images' gradients of those
        assert "aten::convolution_backward.default" not in found


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("taps", "options"),
    [
        (3, {"padding": 1}),
        (10, {"padding": 3, "stride": 2}),
        (5, {}),
        (1, {"padding": 2, "stride": 2}),  # places all of whose taps lie beyond
        (1, {"padding": 12, "stride": 2}),
        (2, {"padding": 5, "stride": 5}),
        (3, {"padding": 7, "stride": 4, "dilation": 2}),
    ],
)
def test_taps_beyond_a_line_of_few_channels_add_nothing(
    bad: float, channels: int, taps: int, options: dict[str, Any]
) -> None:
    """Eager's zeros beyond some lines make NaN of an infinite gradient: there are fewer of these here, never more."""
    tensors = torch.randn(2, channels, 40), torch.randn(64, channels, taps)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, **options)

    seed = torch.randn_like(function(*tensors))
    seed[0, 0, 0], seed[1, 3, -1], seed[0, 5, 7] = bad, bad, bad
    torch._dynamo.reset()
    made = gradients(torch.compile(function, backend="pellucid"), *tensors, seed=seed)
    for one, other in zip(made, gradients(function, *tensors, seed=seed), strict=True):
        known = other.isfinite()
        assert one[known].isfinite().all()
        torch.testing.assert_close(one[known], other[known], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_what_is_not_finite_spreads_to_gradients_as_in_eager(
    bad: float, where: int, groups: int, dtype: torch.dtype, near: float
) -> None:
    """Taps beyond the edge add nothing, but to the gradient of the weight, where they are zeros times what is there.

    Eager has it otherwise in f16, and in bf16 where it has units for tiles, or where oneDNN is called in f32.
    """
    if dtype is torch.bfloat16 and has_tiles(default_toolchain().isa):
        pytest.skip("eager multiplies whole tiles")
    if dtype is torch.bfloat16 and groups == 1 and Library(machine_for()).lacks_type(DType.BF16):
        pytest.skip("the gradient of the weight is computed in f32")
    image, weight, seed = torch.randn(1, 24, 6, 6), torch.randn(24, 24 // groups, 3, 3), torch.randn(1, 24, 6, 6)
    tensors, seed = [image.to(dtype, memory_format=LAST), weight.to(dtype)], seed.to(dtype, memory_format=LAST)
    (*tensors, seed)[where][0, 0 if where == 1 else 3, 0, 0] = bad

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w.contiguous(memory_format=LAST), padding=1, groups=groups)

    torch._dynamo.reset()
    made = gradients(torch.compile(function, backend="pellucid"), *tensors, seed=seed)
    for one, other in zip(made, gradients(function, *tensors, seed=seed), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        torch.testing.assert_close(one, other, equal_nan=True, atol=near, rtol=near)
