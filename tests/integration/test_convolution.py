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

from pellucid.capture import layout as layout_pass
from pellucid.capture.convolution_trial import convolution_seconds
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
    (why,) = said(rows, "transform.channels-last")
    assert why.startswith("spares oneDNN 3,480 copied elements of activations")
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == ["1"]
    assert any("matrix product" in why for why in said(rows, "lower.fallback"))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Separable(groups=1).eval(), "costs 1,544 of weights and at the ends"),
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
    model = nn.Sequential(nn.Conv2d(16, 32, 3, groups=4), nn.ReLU(), nn.Conv2d(32, 8, 1)).eval()
    x = torch.randn(2, 16, 40, 40)
    result, rows = traced(model, tmp_path, x)
    with torch.no_grad():
        assert_matches([result], [model(x)], [copy.deepcopy(model).double()(x.double())])
    assert tried == [((2, 16, 40, 40), (32, 4, 3, 3), (1, 1), (0, 0), (1, 1), 4, torch.float32)]
    assert [row["ok"] for row in rows if row["rule"] == "transform.channels-last"] == [ok]
    if ok == "0":
        (why,) = said(rows, "transform.channels-last")
        assert why == "grouped convolutions take 1.50 times as long channels-last on this machine"


def test_a_trial_of_a_convolution_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    seconds = convolution_seconds((9, 8, 12, 12), (8, 2, 3, 3), (1, 1), (1, 1), (1, 1), 4, torch.bfloat16)
    assert min(seconds) > 0 and torch.equal(torch.get_rng_state(), before)


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
    rows = [row for file in sorted(folder.rglob("decisions.csv")) for row in csv.DictReader(file.open())]
    return [row for row in rows if row["rule"] == "transform.channels-last"]


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


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("bias", [True, False])
def test_training_runs_channels_last_and_returns_eagers_strides(
    tmp_path: Path, bias: bool, layout: torch.memory_format
) -> None:
    x = torch.randn(2, 3, 30, 26).contiguous(memory_format=layout).requires_grad_()
    (row,) = trains_like_eager(Block(bias), tmp_path, x)
    assert row["ok"] == "1", row
    backward, forward = (file.read_text() for file in sorted(tmp_path.glob("*/fx_graph_transformed.py"), key=_kind))
    weights = 2  # of more than one tap
    copies = weights + (layout is torch.contiguous_format)
    assert forward.count("channels_last)") == copies, "of weights, and of what lies otherwise"
    assert backward.count("aten.convolution_backward") == 4
    assert "channels_last" not in backward, "what is saved lies as it is wanted"


def test_gradients_of_a_one_by_one_convolution_are_matrix_products(tmp_path: Path) -> None:
    for number, layout in enumerate((torch.contiguous_format, LAST)):
        x = torch.randn(1, 8, 5, 7).contiguous(memory_format=layout).requires_grad_()
        model = nn.Conv2d(8, 6, 1, bias=False)
        trains_like_eager(model, tmp_path / str(number), x)
    products = [
        row["subject"]
        for file in tmp_path.rglob("decisions.csv")
        for row in csv.DictReader(file.open())
        if "matrix product" in row["why"]
    ]
    assert sum("backward" in subject for subject in products) == 4, products


def test_training_with_a_bias_leaves_the_gradients_to_onednn(tmp_path: Path) -> None:
    trains_like_eager(nn.Conv2d(8, 6, 1), tmp_path, torch.randn(1, 8, 5, 7, requires_grad=True))


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


def test_training_with_symbolic_sizes_keeps_the_layout(tmp_path: Path) -> None:
    (row,) = trains_like_eager(Block(), tmp_path, torch.randn(2, 3, 30, 26), dynamic=True)
    assert (row["ok"], row["why"]) == ("0", "the sizes are symbolic")


def test_weights_that_outweigh_activations_keep_the_layout_of_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten())
    (row,) = trains_like_eager(model, tmp_path, torch.randn(1, 16, 6, 6))
    assert row["ok"] == "0"
    assert row["why"].startswith("spares oneDNN")
