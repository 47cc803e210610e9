"""Convolutions whose image is one sum, and those of a laid out network whose result is stored planar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.traced import check, said, traced, with_gradients
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional

COVERED = {
    "square": ((2, 8, 7, 7), (6, 8, 7, 7), {}),
    "one-image": ((1, 8, 7, 5), (6, 8, 7, 5), {"stride": 3}),
    "line": ((2, 3, 1, 7), (4, 3, 1, 7), {}),
    "one-channel": ((2, 1, 7, 7), (1, 1, 7, 7), {}),
    "unbatched": ((3, 4, 7), (4, 3, 4, 7), {}),
    "expanded": ((1, 3, 4, 7), (4, 3, 4, 7), {}),
    "one-dimension": ((2, 8, 9), (6, 8, 9), {}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_taps_that_cover_the_image_are_a_product(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    shape, kernel, options = COVERED[name]
    x, w, b = (torch.randn(each).to(dtype) for each in (shape, kernel, kernel[:1]))
    x = x.expand(5, *shape[1:]) if name == "expanded" else x
    convolve = F.conv1d if len(kernel) == 3 else F.conv2d

    def function(*args: torch.Tensor) -> torch.Tensor:
        return convolve(*args, **options)

    result, rows = traced(function, tmp_path, x, w, b)
    check(function, result, x, w, b)
    if dtype is torch.float32 and name in ("square", "line"):
        assert len(said(rows, "codegen.contract")) == 1
    compiled = torch.compile(function, backend="pellucid")
    ours, eagers = with_gradients(compiled, x, w, b), with_gradients(function, x, w, b)
    assert_matches(ours, eagers, with_gradients(function, *widened((x, w, b))))
    if name != "expanded":  # in narrow types PyTorch's fake result lies otherwise than its real one
        assert [each.stride() for each in ours] == [each.stride() for each in eagers]


@pytest.mark.parametrize(
    "options", [{"padding": 1}, {"groups": 2}, {"layout": torch.channels_last}, {"dtype": torch.float64}]
)
def test_what_covers_an_image_otherwise(tmp_path: Path, options: dict[str, Any]) -> None:
    settings = {name: options[name] for name in options if name in ("padding", "groups")}
    x, w = torch.randn(2, 8, 7, 7), torch.randn(6, 8 // settings.get("groups", 1), 7, 7)
    x = x.contiguous(memory_format=options.get("layout", torch.contiguous_format))
    x, w = (each.to(options.get("dtype", torch.float32)) for each in (x, w))
    result, _ = traced(lambda x, w: F.conv2d(x, w, **settings), tmp_path, x, w)
    check(lambda x, w: F.conv2d(x, w, **settings), result, x, w)


class Tail(nn.Module):
    """Two convolutions, the second of which is stored as the caller wants it."""

    def __init__(self, taps: int, step: int, padding: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 64, 3, padding=1)
        self.last = nn.Conv2d(64, 64, taps, stride=step, padding=padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize(("taps", "step", "padding"), [(3, 1, 1), (3, 1, 0), (4, 4, 0), (2, 2, 0)])
def test_a_result_that_is_stored_planar_is_still_a_product(tmp_path: Path, taps: int, step: int, padding: int) -> None:
    model, x = Tail(taps, step, padding).eval(), torch.randn(1, 16, 36, 44)
    result, rows = traced(model, tmp_path, x)
    with torch.no_grad():
        assert_matches([result], [model(x)], [Tail.forward(model.double(), x.double())])
    assert len(said(rows, "codegen.contract")) == 2


@pytest.mark.parametrize("size", [(32, 32), (30, 34), (7, 64), (512,), (300,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_planar_results_are_stored_by_vectors_along_pixels(
    tmp_path: Path, size: tuple[int, ...], dtype: torch.dtype, dynamic: bool
) -> None:
    """Also where channels lie 4096 bytes apart, in one set of the first cache, as those of 32 x 32 pixels do."""
    layer = (nn.Conv2d if len(size) == 2 else nn.Conv1d)(64, 70, 3, padding=1, dtype=dtype).requires_grad_(False)
    x, planar = (torch.randn(2, channels, *size, dtype=dtype) for channels in (64, 70))

    def function(x: torch.Tensor, planar: torch.Tensor) -> torch.Tensor:
        return layer.to(x.dtype)(x).relu() + planar

    result, _ = traced(function, tmp_path, x, planar, dynamic=dynamic)
    check(function, result, x, planar)
    assert result.is_contiguous()
    (epilogue,) = (text for text in loops(tmp_path) if "call contract" in text)
    (vector,) = re.findall(r"vector (i\d+)", epilogue)
    assert re.search(rf"\bstore b\d+_\w+\[(?:.* \+ )?{vector}\]", epilogue), epilogue


def test_columns_that_meet_in_one_set_are_loaded_by_themselves(tmp_path: Path) -> None:
    """What is added lies plane by plane, some 4096 bytes apart, and the result does not."""
    tensors = torch.randn(1, 16, 32, 32), torch.randn(64, 16, 3, 3), torch.randn(1, 64, 32, 32)

    def function(x: torch.Tensor, w: torch.Tensor, planar: torch.Tensor) -> torch.Tensor:
        return (F.conv2d(x, w, padding=1) + planar).contiguous(memory_format=torch.channels_last)

    result, rows = traced(function, tmp_path, *tensors)
    check(function, result, *tensors)
    assert any("map to few sets of the first cache" in row["why"] for row in rows)


def loops(folder: Path) -> list[str]:
    """The texts of nests."""
    return "\n".join(file.read_text() for file in folder.rglob("loops.txt")).split("nest ")


@pytest.mark.parametrize("clone", [torch.Tensor.contiguous, torch.Tensor.clone])
def test_what_backward_needs_is_not_what_the_caller_may_change(clone: Any) -> None:
    """A copy keeps them apart, though it only lays out anew what it copies."""

    def function(x: torch.Tensor, w: torch.Tensor, again: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = F.conv2d(x, w, padding=1).permute(0, 2, 3, 1).contiguous()
        return first, F.conv2d(clone(first.permute(0, 3, 1, 2)), again).sum()

    def gradient(run: Any) -> torch.Tensor:
        given = [each.clone().requires_grad_() for each in (w, again)]
        first, total = run(x, *given)
        first.detach().zero_()
        total.backward()
        assert given[1].grad is not None
        return given[1].grad

    x, w, again = torch.randn(2, 3, 16, 16), torch.randn(8, 3, 3, 3), torch.randn(8, 8, 3, 3)
    torch.testing.assert_close(gradient(torch.compile(function, backend="pellucid")), gradient(function))
