"""The first layers of an image network are computed for some images at a time: right, and where it is allowed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid import pipeline
from pellucid.backend import last_compilations
from pellucid.capture import images
from pellucid.capture.images import in_images
from pellucid.ir.decision import Decision
from pellucid.machine import Machine
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

Function = Callable[..., Any]

SMALL = cast(Machine, SimpleNamespace(cores=1, own_cache=1 << 10, last_cache=16 << 10))


@pytest.fixture(autouse=True)
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """What was decided, for a machine of which the last cache holds 4096 numbers, and whatever weights are read."""
    found: list[Decision] = []

    def seen(graph: torch.fx.GraphModule, _: Machine, has_loops: Function) -> tuple[Decision, ...]:
        decisions = in_images(graph, SMALL, has_loops)
        found.extend(decisions)
        return decisions

    monkeypatch.setattr(pipeline, "in_images", seen)
    monkeypatch.setattr(images, "_TIMES", 0)
    return found


class Squeeze(nn.Module):
    """Channels are weighed by what a whole image holds."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Branches(nn.Module):
    """What several layers read, pooled, joined and padded, with a mask for each image and a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(12, 4, 1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.first((x - 0.5) / 0.2)) * self.scale
        z = self.second(F.pad(y, (1, 1, 1, 1))) * x[:, :1].sigmoid()
        pooled, where = F.max_pool2d(z, 2, return_indices=True)
        joined = torch.cat([self.up(pooled), y], 1)
        return self.last(joined), y, where, F.avg_pool2d(z, 3, 2), z.amax((2, 3))


class AcrossImages(nn.Module):
    """Batch statistics, neighbours and sums over the images need all of what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.second(F.relu(self.first(x)))
        normed = F.batch_norm(y, None, None, training=True)
        return normed, y + y.roll(1, 0), y.softmax(0), y.sum(0), self.second(y.flip(0)), F.conv2d(y, y[:2, :, :3, :3])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.bernoulli(torch.sigmoid(self.first(x))))


class Masked(Noisy):
    """Random numbers that the second layer's result needs, drawn after the first one's."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y * torch.rand(6, 8, 14, 14))


def plain(channels: int = 8, **options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, **options), nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 8, 3), nn.ReLU()
    )


def batch(count: int = 6, size: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count)).to(dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "dilated": lambda: plain(dilation=2),
    "squeeze": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Squeeze(), nn.Conv2d(8, 8, 3), Squeeze(), nn.Conv2d(8, 4, 1)),
    "branches": Branches,
    "across": AcrossImages,
}


def judge(model: nn.Module, x: Tensor, **options: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="pellucid", fullgraph=True, options={"verify": True, **options})
    with torch.no_grad():
        ours, eager = compiled(x.clone()), model(x.clone())
        exact = model.double()(widened(x))
    assert_matches(ours, eager, exact)
    for mine, theirs in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(eager), strict=True):
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("freeze", [False, True], ids=["default", "frozen"])
@pytest.mark.parametrize("name", MODELS)
def test_some_images_at_a_time(name: str, freeze: bool, decided: list[Decision]) -> None:
    torch.manual_seed(0)
    judge(MODELS[name]().eval(), batch(), freeze=freeze)
    (decision,) = decided
    assert decision.ok and dict(decision.facts)["chunks"] == 6, decision


def test_bf16(decided: list[Decision]) -> None:
    torch.manual_seed(0)
    judge(plain().eval().bfloat16(), batch(dtype=torch.bfloat16))
    assert decided[0].ok


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(batch(4).to(memory_format=torch.channels_last), id="channels-last"),
        pytest.param(batch(1).expand(4, 3, 16, 16), id="one-image-four-times"),
        pytest.param(batch(8)[::2], id="every-other"),
        pytest.param(batch(4).transpose(2, 3), id="transposed"),
    ],
)
def test_however_images_lie(x: Tensor, decided: list[Decision]) -> None:
    torch.manual_seed(0)
    judge(plain().eval(), x)
    assert decided[0].ok


def test_parts_are_as_large_as_the_cache_allows_and_their_kernels_are_the_same(decided: list[Decision]) -> None:
    """8 channels of 8 x 8 numbers of an image make 2 kB: two images fit into a third of 16 kB."""
    torch.manual_seed(0)
    judge(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).eval(), batch(8, 10))
    assert dict(decided[0].facts)["chunks"] == 4
    made = last_compilations()[-1]
    assert (made.kernels, made.distinct) == (9, 3)  # one lays out a weight


@pytest.mark.parametrize(
    ("make", "x", "why"),
    [
        (plain, batch(4, 8), "the last cache holds what a layer makes of them"),
        (plain, batch(11), "no equal parts"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(1568, 8)), batch(), "no two layers"),
        (Noisy, batch(), "no two layers"),
        (Masked, batch(), "has to stay in its place"),
        (lambda: plain().double(), batch(dtype=torch.float64), "is ATen's"),
    ],
)
def test_what_stays_together(make: Callable[[], nn.Module], x: Tensor, why: str, decided: list[Decision]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(make().eval(), backend="pellucid", fullgraph=True)(x)
    assert not decided[0].ok and why in decided[0].why, decided


def test_large_weights_end_it(decided: list[Decision], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part would read them again."""
    monkeypatch.setattr(images, "_TIMES", 4)
    torch.manual_seed(0)
    judge(plain(64).eval(), batch(6, 12))
    assert "reads a large weight" in decided[0].why


@pytest.mark.parametrize("options", [{"chunk": False}, {"contract": False}])
def test_options_switch_it_off(options: dict[str, bool], decided: list[Decision]) -> None:
    judge(plain().eval(), batch(), **options)
    assert decided == []


def test_sizes_that_change_and_training_stay_together(decided: list[Decision]) -> None:
    torch._dynamo.reset()
    model = plain().eval()
    compiled = torch.compile(model, backend="pellucid", dynamic=True)
    with torch.no_grad():
        for count in (3, 6):
            torch.testing.assert_close(compiled(batch(count)), model(batch(count)))
    compiled(batch()).sum().backward()
    assert not any(decision.ok for decision in decided)
