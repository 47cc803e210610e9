"""Convolutions: which of them are matrix products, and how the activations of a network lie in memory."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_matches, widened

F = torch.nn.functional
LAST = torch.channels_last


def traced(function: Callable[..., Any], folder: Path, *args: Any, **options: Any) -> tuple[Any, list[dict[str, str]]]:
    """The result of the compiled function, and the compiler's decisions."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pellucid", options={"trace": str(folder), "verify": True}, **options)
    with torch.no_grad():
        result = compiled(*args)
    rows = [row for file in sorted(folder.rglob("decisions.csv")) for row in csv.DictReader(file.open())]
    return result, rows


def said(rows: list[dict[str, str]], rule: str) -> list[str]:
    return [row["why"] for row in rows if row["rule"] == rule]


def check(function: Callable[..., Any], result: Any, *args: Any) -> None:
    with torch.no_grad():
        assert_matches(result, function(*args), function(*widened(args)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "layout", "product"),
    [
        ((1, 8, 5, 7), torch.contiguous_format, True),
        ((3, 8, 5, 7), LAST, True),
        ((1, 8, 1, 1), torch.contiguous_format, True),
        ((3, 8, 5, 7), torch.contiguous_format, False),
    ],
)
def test_a_one_by_one_convolution_is_a_matrix_product(
    tmp_path: Path, shape: tuple[int, ...], layout: torch.memory_format, product: bool, bias: bool
) -> None:
    x, w = torch.randn(shape).contiguous(memory_format=layout), torch.randn(6, 8, 1, 1)
    b = torch.randn(6) if bias else None
    result, rows = traced(lambda x, w, b: F.conv2d(x, w, b).relu(), tmp_path, x, w, b)
    check(lambda x, w, b: F.conv2d(x, w, b).relu(), result, x, w, b)
    (reason,) = said(rows, "lower.fallback")
    assert ("matrix product" in reason) == product


@pytest.mark.parametrize("channels", [slice(2, 10), slice(0, 16, 2)])
def test_a_part_of_a_tensor_is_convolved_too(tmp_path: Path, channels: slice) -> None:
    x, w = torch.randn(1, 16, 5, 7), torch.randn(6, 8, 1, 1)
    result, _ = traced(lambda x, w: F.conv2d(x[:, channels], w), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x[:, channels], w), result, x, w)


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}, {"groups": 2}])
def test_other_convolutions_of_one_tap_are_onednns(tmp_path: Path, options: dict[str, int]) -> None:
    x, w = torch.randn(1, 8, 6, 6), torch.randn(6, 8 // options.get("groups", 1), 1, 1)
    result, rows = traced(lambda x, w: F.conv2d(x, w, **options), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x, w, **options), result, x, w)
    assert said(rows, "lower.fallback") == ["convolution: oneDNN computes it"]


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
    assert said(rows, "transform.channels-last") == ["1 depthwise convolutions and 0 dense ones of more than one tap"]
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    assert any("matrix product" in why for why in said(rows, "lower.fallback"))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Separable(groups=1).eval(), "0 depthwise convolutions and 1 dense ones of more than one tap"),
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


def test_symbolic_sizes_keep_the_layout(tmp_path: Path) -> None:
    model, x = Separable().eval(), torch.randn(2, 8, 6, 6)
    result, rows = traced(model, tmp_path, x, dynamic=True)
    with torch.no_grad():
        assert_matches(result, model(x), model(x))
    assert said(rows, "transform.channels-last") == ["the sizes are symbolic"]


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
