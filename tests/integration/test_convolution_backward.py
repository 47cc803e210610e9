"""Gradients of convolutions: which of them are kernels, and that all are eager's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.native.build import default_toolchain
from pellucid.native.toolchain import has_tiles
from tests.integration.traced import decisions
from tests.support import assert_matches

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
    ((2, 24, 9, 7), (40, 12, 3, 3), {"padding": 1, "groups": 2}, ""),
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_what_is_not_finite_spreads_to_gradients_as_in_eager(
    bad: float, where: int, groups: int, dtype: torch.dtype, near: float
) -> None:
    """Taps beyond the edge add nothing, but to the gradient of the weight, where they are zeros times what is there.

    Eager has it otherwise in f16, and in bf16 where it has units for tiles.
    """
    if dtype is torch.bfloat16 and has_tiles(default_toolchain().isa):
        pytest.skip("eager multiplies whole tiles")
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
