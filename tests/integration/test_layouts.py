"""Networks whose activations lie channels-last in memory: which do, and what nobody may notice of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.traced import check, runs_channels_last, said, traced, trains_like_eager
from tests.support import assert_matches

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
LAST = torch.channels_last


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
    assert "channels are not adjacent in memory" in reason


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
    assert why.startswith("spares oneDNN copies of 3,480 elements of activations")
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    assert said(rows, "codegen.contract")


def in_double(x: torch.Tensor) -> torch.Tensor:
    """Kernels read weights in f32 as they lie, others are copied: here many for few pixels."""
    x = F.conv2d(x.double(), torch.ones(512, 8, 3, 3, dtype=torch.float64), padding=1)
    return F.conv2d(x, torch.ones(8, 512, 3, 3, dtype=torch.float64), stride=2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (in_double, "adds 74,368 of weights, inputs and results"),
        (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), groups=8).as_strided((2, 2), (3, 1)), "strides of its argument"),
        (lambda x: F.conv2d(x, torch.ones(8, 1, 3, 3), groups=8).transpose(1, 3) * 2, "must have the strides"),
    ],
)
def test_a_layout_that_is_refused_has_a_reason(tmp_path: Path, function: Callable[..., Any], why: str) -> None:
    x = torch.randn(2, 8, 6, 6)
    result, rows = traced(function, tmp_path, x)
    with torch.no_grad():
        assert_matches(result, function(x), function(x))
    assert why in said(rows, "transform.channels-last")[0]


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
    torch.manual_seed(0)  # the gradient of a bias that a norm takes away again is nothing but rounding
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


@pytest.mark.parametrize(("dtype", "ok"), [(torch.float32, "1"), (torch.bfloat16, "0"), (torch.float64, "0")])
def test_weights_that_outweigh_activations_keep_the_layout_of_training_unless_kernels_compute_gradients(
    tmp_path: Path, dtype: torch.dtype, ok: str
) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten()).to(dtype)
    (row,) = trains_like_eager(model, tmp_path, torch.randn(1, 16, 6, 6, dtype=dtype))
    assert row["ok"] == ok
    assert row["why"].startswith("spares oneDNN")
