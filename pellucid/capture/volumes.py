"""Decomposes convolutions over three dimensions (depth first) into convolutions of images, in one of three ways:

- Where only depth has several taps, the frames of a volume become the lines of an image.
- Where volumes are small compared to results, having few channels, all frames that the taps along depth read become
  channels of one image.
- Else a result is the sum, over the taps along depth, of frames convolved with a slice of the weight.

Each function returns NotImplemented for calls that stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch

from pellucid.capture.torch_compat import contiguous_strides, convolution_format, is_symbolic

aten = torch.ops.aten
Gradients: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
"""The gradients of a volume and of a weight, None if not wanted."""

DIMENSIONS = 5
"""The rank of the input: batch, channels, depth, height and width."""

_LAST = torch.channels_last_3d
_MAX_TAPS = 16
"""Maximum number of taps along depth: each is a separate call, or a copy."""


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *steps: Any) -> torch.Tensor:
    """x: [N, C, D, H, W]. weight: [O, C / groups, taps, taps, taps]. steps: as in ATen, not transposed."""
    way = _way(x, weight, *steps)
    if way is None:
        return NotImplemented
    return _with_format(way.convolved(x, weight, bias), convolution_format(x, weight, bias, *steps))


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _sizes: list[int] | None, *more: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of such a convolution. more: the steps, then which gradients are wanted."""
    *steps, (*wanted, of_bias) = more
    way = _way(x, weight, *steps)
    if way is None:
        return NotImplemented
    layout = convolution_format(x, weight, None, *steps)
    volume, taps = way.gradients(grad, x, weight, wanted)
    given = (None if each is None else _with_format(each, layout) for each in (volume, taps))
    return (*given, grad.sum((0, 2, 3, 4)) if of_bias else None)


def _with_format(x: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """`x` in that memory format, with ATen's strides in dimensions of one element."""
    if x.shape[1] == 1 or {*x.shape[2:]} == {1}:
        layout = torch.contiguous_format  # which is channels-last as well
    if layout is torch.contiguous_format and x.stride() == contiguous_strides(x.shape):
        return x
    return x.clone(memory_format=layout)


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap along depth, the frames of the volume that it reads, and the range of frames of the result that it adds to.

    last: the frame of the result after that range.
    """

    position: int
    reads: slice
    first: int
    last: int

    @property
    def frames(self) -> int:
        return self.last - self.first

    @classmethod
    def of(cls, position: int, begin: int, step: int, frames: int, depth: int) -> Tap | None:
        """begin: the index of the frame of the volume that it reads for the first frame of the result.

        frames, depth: the numbers of frames of the volume and of the result. None for a tap that reads no frame.
        """
        first, last = max(-(begin // step), 0), min((frames - 1 - begin) // step + 1, depth)
        start = begin + first * step
        return (
            cls(position, slice(start, start + (last - first - 1) * step + 1, step), first, last)
            if first < last
            else None
        )


def _way(x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> _Lines | _Gathered | _Summed | None:
    stride, padding, dilation = map(list, steps[:3])
    groups = steps[-1]
    if any(map(is_symbolic, (*x.shape, *weight.shape))) or 0 in (*x.shape, *weight.shape):
        return None
    if {*weight.shape[3:], *stride[1:]} == {1} and not any(padding[1:]):
        return _Lines(([stride[0], 1], [padding[0], 0], [dilation[0], 1], False, [0, 0], groups))
    if weight.shape[2] > _MAX_TAPS:
        return None
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    depth, *size = ((extent + 2 * pad - gap * (taps - 1) - 1) // step + 1 for extent, taps, step, pad, gap in sizes)
    moved = [tap * dilation[0] - padding[0] for tap in range(weight.shape[2])]
    taps = [Tap.of(position, begin, stride[0], x.shape[2], depth) for position, begin in enumerate(moved)]
    reading = [tap for tap in taps if tap is not None]
    if not reading:
        return None
    images = (*([*each[1:]] for each in (stride, padding, dilation)), False, [0, 0], groups)
    if x.shape[1] * math.prod(x.shape[3:]) * len(moved) < weight.shape[0] * math.prod(size) * (len(moved) - 1):
        return _Gathered(images, reading, depth)
    if len(moved) > 1 and x.dtype.itemsize < 4:
        return None  # each partial sum would be rounded
    return _Summed(images, reading, depth)


@dataclass(frozen=True, slots=True)
class _Lines:
    """steps: of a convolution of images whose lines are the frames."""

    steps: tuple[Any, ...]

    def convolved(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return aten.convolution(_lines(x), _lines(weight), bias, *self.steps).unflatten(3, x.shape[3:])

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> Gradients:
        given = (_lines(each) for each in (grad, x, weight))
        image, taps, _ = aten.convolution_backward(*given, None, *self.steps, [*wanted, False])
        return None if image is None else image.view(x.shape), None if taps is None else taps.view(weight.shape)


@dataclass(frozen=True, slots=True)
class _OfTaps:
    """steps: of a convolution of images. taps: those along depth that read a frame. depth: frames of the result."""

    steps: tuple[Any, ...]
    taps: Sequence[Tap]
    depth: int


class _Gathered(_OfTaps):
    __slots__ = ()

    def convolved(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _volume(aten.convolution(self._images(x, weight), weight.flatten(1, 2), bias, *self.steps), self.depth)

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> Gradients:
        given = _images(_frames(grad)), self._images(x, weight), weight.flatten(1, 2)
        images, taps, _ = aten.convolution_backward(*given, None, *self.steps, [*wanted, False])
        placed = None
        if images is not None:
            met = images.view(-1, self.depth, x.shape[1], weight.shape[2], *x.shape[3:])
            parts = ((tap, _frames(met[:, tap.first : tap.last, :, tap.position])) for tap in self.taps)
            placed = reduce(torch.add, [_placed(x, tap, part) for tap, part in parts])
        return placed, None if taps is None else taps.view(weight.shape)

    def _images(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N * depth, C * taps, H, W]: channels and taps in the order of the weight."""
        frames = {tap.position: _padded(x[:, :, tap.reads], tap, self.depth) for tap in self.taps}
        return _images(_frames(_by_tap(frames, weight.shape[2]).flatten(1, 2)))


class _Summed(_OfTaps):
    __slots__ = ()

    def convolved(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # A tap that reads a frame for every frame of the result comes last: the other sums are added in its kernel.
        taps, x = sorted(self.taps, key=lambda tap: tap.frames), _laid_out(x)
        whole = taps[-1].frames == self.depth
        parts = []
        for tap in taps:
            added = bias if whole and tap is taps[-1] else None
            made = aten.convolution(_frames_of(x, tap), weight[:, :, tap.position], added, *self.steps)
            parts.append(_padded(_volume(made, tap.frames), tap, self.depth))
        total = reduce(torch.add, parts)
        return total if whole or bias is None else total + bias.view(-1, 1, 1, 1)

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> Gradients:
        outs, volume, made = _laid_out(grad), _laid_out(x), {}
        for tap in self.taps:
            given = _stacked(outs[:, :, tap.first : tap.last]), _frames_of(volume, tap), weight[:, :, tap.position]
            made[tap.position] = aten.convolution_backward(*given, None, *self.steps, [*wanted, False])
        placed = slices = None
        if wanted[0]:
            images = [(tap, _volume(made[tap.position][0], tap.frames)) for tap in self.taps]
            placed = reduce(torch.add, [_placed(x, tap, each) for tap, each in images])
        if wanted[1]:
            slices = _by_tap({position: each[1] for position, each in made.items()}, weight.shape[2])
        return placed, slices


def _by_tap(made: Mapping[int, torch.Tensor], taps: int) -> torch.Tensor:
    """The tensors of all taps along depth, stacked as dimension 2; zeros for taps that read no frame."""
    zeros = torch.zeros_like(next(iter(made.values())))
    return torch.stack([made.get(position, zeros) for position in range(taps)], 2)


def _laid_out(volume: torch.Tensor) -> torch.Tensor:
    """Channels-last: copied once, not the frames of each tap."""
    return volume.contiguous(memory_format=_LAST)


def _frames_of(volume: torch.Tensor, tap: Tap) -> torch.Tensor:
    """The frames of a volume that a tap reads, as images."""
    return _stacked(volume[:, :, tap.reads])


def _stacked(volume: torch.Tensor) -> torch.Tensor:
    """The frames of a volume as channels-last images: a copy, if they are some frames of several volumes."""
    return _images(_frames(_laid_out(volume)))


def _padded(volume: torch.Tensor, tap: Tap, depth: int) -> torch.Tensor:
    """Pad with zeros for the frames of the result for which a tap reads none."""
    before, after = tap.first, depth - tap.last
    return torch.constant_pad_nd(volume, [0, 0, 0, 0, before, after]) if before or after else volume


def _placed(x: torch.Tensor, tap: Tap, volume: torch.Tensor) -> torch.Tensor:
    """The gradient of `x` by one tap, from the gradient of the frames that it reads."""
    return torch.slice_scatter(torch.zeros_like(x), volume, 2, tap.reads.start, tap.reads.stop, tap.reads.step)


def _volume(images: torch.Tensor, frames: int) -> torch.Tensor:
    """[N, C, frames, H, W] of [N * frames, C, H, W]."""
    return _frames(images.view(-1, frames, *images.shape[1:]))


def _frames(volume: torch.Tensor) -> torch.Tensor:
    """[N, D, C, H, W] of [N, C, D, H, W], and back."""
    return volume.transpose(1, 2)


def _lines(volume: torch.Tensor) -> torch.Tensor:
    """Images whose lines are the frames of a volume, or of a weight: [N, C, D, H * W]."""
    return volume.flatten(3)


def _images(frames: torch.Tensor) -> torch.Tensor:
    """[N * D, C, H, W] of [N, D, C, H, W]."""
    return frames.flatten(0, 1)
