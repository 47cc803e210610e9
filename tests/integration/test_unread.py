"""Networks that look at a part of what they compute: the rest is not computed, and the part is fused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pellucid.ir.nodes import Kernel
from tests.integration.traced import said, traced
from tests.support import assert_matches, recorded

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = nn.functional


class Causal(nn.Module):
    """A convolution that pads both ends of a line, and drops what its last taps made."""

    def __init__(self, channels: int, taps: int, dilation: int, groups: int) -> None:
        super().__init__()
        self.late = (taps - 1) * dilation
        self.layer = nn.Conv1d(channels, channels, taps, padding=self.late, dilation=dilation, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layer(x)[..., : x.shape[2]])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("taps", "dilation", "groups"), [(3, 1, 1), (2, 4, 1), (4, 1, 32), (3, 2, 4)])
def test_causal_convolutions_are_one_kernel_with_what_follows(
    taps: int, dilation: int, groups: int, dynamic: bool
) -> None:
    model = nn.Sequential(*(Causal(32, taps, dilation, groups) for _ in range(3)))
    torch._dynamo.reset()
    run = torch.compile(model, backend="pellucid", dynamic=dynamic, options={"verify": True})
    wide = copy.deepcopy(model).double()
    with recorded() as records:
        for size in (64, 50):
            x, seed = torch.randn(2, 32, size), torch.randn(2, 32, size)
            args = [x.clone().requires_grad_(), x.clone().requires_grad_(), x.double().requires_grad_()]
            made = [call(each) for call, each in zip((run, model, wide), args, strict=True)]
            assert_matches(*([each] for each in made))
            gradients = [torch.autograd.grad(y, each, seed.to(y.dtype)) for y, each in zip(made, args, strict=True)]
            assert_matches(*gradients)
        with torch.no_grad():
            assert_matches([run(x)], [model(x)], [wide(x.double())])
    (program,) = records[-1].programs
    convolutions = [node for node in program.scheduled.nodes if isinstance(node, Kernel) and "convolution" in node.name]
    assert len(convolutions) == 3
    if groups != 4 or not dynamic:  # groups are an axis of their own, which the slice of a line of any length has not
        assert all("silu" in node.name for node in convolutions)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 300)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, -1].softmax(-1)


def test_scores_of_the_last_token_take_no_others(tmp_path: Path) -> None:
    model, x = Scores().eval(), torch.randn(3, 20, 16)
    result, rows = traced(model, tmp_path, x)
    with torch.no_grad():
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    reasons = said(rows, "schedule.unread")
    assert len(reasons) == 5 and sum("every 20 from 19 to 59" in why for why in reasons) == 3, reasons


def test_scores_of_the_last_token_where_sizes_are_symbols() -> None:
    model = Scores().eval()
    torch._dynamo.reset()
    run = torch.compile(model, backend="pellucid", dynamic=True, options={"verify": True})
    with recorded() as records, torch.no_grad():
        for shape in ((3, 20, 16), (5, 7, 16), (2, 31, 16)):
            x = torch.randn(shape)
            assert_matches([run(x)], [model(x)], [copy.deepcopy(model).double()(x.double())])
    (record,) = records
    assert sum(each.rule == "schedule.unread" for each in record.decisions) == 5
    assert all(len(axis.extent.syms()) < 2 for node in record.scheduled.nodes for axis in node.space)


def test_what_is_returned_is_whole() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y, y[:, -1].relu()

    x, w = torch.randn(2, 5, 8), torch.randn(7, 8)
    torch._dynamo.reset()
    made = torch.compile(function, backend="pellucid", options={"verify": True})(x, w)
    assert_matches(made, function(x, w), function(x.double(), w.double()))
