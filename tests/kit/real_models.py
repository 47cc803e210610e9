"""Programs of the size of a test that are models: what stands in one of their kernels stands among many operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.small_models import build_small

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def bert() -> Program:
    return _inference("bert")


def llama() -> Program:
    return _inference("llama")


def resnet() -> Program:
    return _inference("resnet")


def gpt2_training() -> Program:
    """A loss, to be differentiated; without dropout, so that every number is judged."""
    module, inputs = build_small("gpt2")
    return module, (), {**inputs, "labels": inputs["input_ids"]}


def gpt2() -> Program:
    return _inference("gpt2")


def bert_in_bfloat16() -> Program:
    module, inputs = build_small("bert", torch.bfloat16)
    return Inference(module), (), inputs


def resnet_training() -> Program:
    """To be differentiated; its batch norms use the running statistics."""
    module, inputs = build_small("resnet")
    return module, (), inputs


def streaming() -> Program:
    """Sound in pieces of several lengths: from the second on the compiled code is for any."""
    torch.manual_seed(0)
    return Streaming(12).eval(), tuple(torch.randn(2, 12, length) for length in (17, 9, 30)), {}


def unet() -> Program:
    """A U-Net as diffusion models have it: group norm, SiLU, a time embedding, attention, skips."""
    torch.manual_seed(0)
    return UNet(12).eval(), (torch.randn(2, 3, 16, 16), torch.tensor([3.0, 500.0])), {}


def experts() -> Program:
    """A mixture of experts: prefix sums give each token its place, sums by index its expert's input."""
    torch.manual_seed(0)
    return Experts(12, 3, 8).eval().requires_grad_(False), (torch.randn(19, 12),), {}


def convnext() -> Program:
    return _inference("convnext")


def mobilenet() -> Program:
    return _inference("mobilenet")


def t5() -> Program:
    return _inference("t5")


def vit() -> Program:
    return _inference("vit")


def whisper() -> Program:
    return _inference("whisper")


def _inference(name: str) -> Program:
    module, inputs = build_small(name)
    return Inference(module), (), inputs


class Inference(nn.Module):
    """A model whose parameters need no gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.model(**inputs)


class Block(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(3, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(3, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.skip = nn.Linear(time, out), nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.middle = Block(width, width, width), Block(width, 2 * width, width)
        self.up = Block(3 * width, width, width)
        self.norm = nn.GroupNorm(3, width)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2) * (-9.2 / (self.width // 2)))
        angles = time[:, None] * rates
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.enter(x)
        skip = self.down(x, t)
        h = self.middle(F.avg_pool2d(skip, 2), t)
        h = self.up(torch.cat([F.interpolate(h, scale_factor=2.0), skip], 1), t)
        return self.leave(F.silu(self.norm(h)))


class Streaming(nn.Module):
    """Gated convolutions over time; each channel's mean over a piece is taken away first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.gate = nn.Conv1d(width, 2 * width, 3, padding=1), nn.Conv1d(width, 2 * width, 1)

    def forward(self, *pieces: torch.Tensor) -> list[torch.Tensor]:
        return [self.piece(each) for each in pieces]

    def piece(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # else all of them are one graph
        x = x - x.mean(-1, keepdim=True)
        return x + F.glu(self.gate(F.glu(self.enter(x), 1)), 1)


class Experts(nn.Module):
    """Each token goes to one expert, as in a Switch transformer; who finds no room there passes by."""

    def __init__(self, width: int, count: int, room: int) -> None:
        super().__init__()
        self.count, self.room = count, room
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(x)
        gate, expert = self.router(h).softmax(-1).max(-1)
        chosen = F.one_hot(expert, self.count)
        places = chosen.cumsum(0)
        place = (places * chosen).sum(-1) - 1
        slot = torch.where(place < self.room, expert * self.room + place, self.count * self.room)
        queue = h.new_zeros(self.count * self.room + 1, h.shape[1]).index_copy(0, slot, h)
        inner = F.silu(queue[:-1].view(self.count, self.room, -1) @ self.up)
        outer = F.pad((inner @ self.down).flatten(0, 1), (0, 0, 0, 1))
        load = h.new_zeros(self.count).index_add(0, expert, gate)
        return x + gate[:, None] * outer[slot], load
