"""Decomposes convolutions over one and three dimensions, and transposed ones, into convolutions of images, and those
whose taps cover the whole image into matrix products: there are kernels for both.

Each function returns NotImplemented for calls that stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from pellucid.capture import volumes
from pellucid.capture.torch_compat import (
    contiguous_strides,
    convolution_format,
    is_known,
    is_symbolic,
    suggested_format,
)
from pellucid.ir.contraction import DTYPES
from pellucid.ir.types import TORCH_DTYPES

_LINES, _IMAGES = 3, 4  # rank of the input of a convolution over one dimension, and over two
_EXCESS = 1.5
"""Minimum ratio of windows to pixels at which a transposed convolution is one product whose results are summed."""
_MAX_PARTS = 16
"""Maximum number of results that are summed for a pixel."""
_MANY_PIXELS = 512
"""Minimum pixels for phases: copying a weight takes as long as its products with 70 pixels (AMD EPYC, Zen 4)."""
_MAX_PHASE_OUTPUTS = 32
"""Maximum output channels of a transposed convolution that is computed by phases."""
_FEW_INPUTS = 32
"""Fewer input channels in bf16 or f16 leave half a register or more unused in the products of a phase."""
_MAX_TAP_OUTPUTS = 16
"""Maximum output channels of a convolution that is computed by taps: more fill a block of columns by themselves."""
_MAX_TAP_ROWS = 1.25
"""Maximum size of the result of such a product, relative to the image."""
_FEW_CHANNELS, _MANY_OUTPUTS = 16, 32
"""A weight's gradient is a product with windows of lines if it has fewer channels, and at least this many outputs."""
_KERNELS = frozenset(TORCH_DTYPES[each] for each in DTYPES)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *steps: Any) -> torch.Tensor:
    """Decompose a convolution; one over one dimension becomes one of images of one line, as in ATen.

    steps: stride, padding, dilation, whether transposed, output padding and groups, as in ATen. The result over one
    dimension has eager's strides: they follow the layout of the weight, whatever that of the input is.
    """
    stride, padding, dilation, transposed, more, groups = steps = _by_dimension(x.dim() - 2, steps)
    if x.dim() == _IMAGES and transposed and groups == 1:
        return _transposed(x, weight, bias, stride, padding, dilation, more)
    if x.dim() == volumes.DIMENSIONS and not transposed and x.dtype in _KERNELS:
        return volumes.convolution(x, weight, bias, *steps)
    if x.dim() == _IMAGES and _is_covered(x, weight, *steps):
        made = _rows(x) @ _rows(weight).t() if bias is None else torch.addmm(bias, _rows(x), _rows(weight).t())
        return made.view(*made.shape, 1, 1)
    if x.dim() == _IMAGES and _has_few_outputs(x, weight, *steps):
        return _by_taps(x, weight, bias, padding, dilation)
    if x.dim() != _LINES:
        return NotImplemented
    image = torch.ops.aten.convolution(x.unsqueeze(2), weight.unsqueeze(2), bias, *_of_images(*steps))
    if suggested_format(weight.unsqueeze(2)) is torch.channels_last:
        return image.contiguous(memory_format=torch.channels_last).squeeze(2)
    return _line(image)


def _by_dimension(rank: int, steps: Sequence[Any]) -> tuple[Any, ...]:
    """The steps, with single-element lists expanded to one element per dimension."""
    return tuple(each * rank if isinstance(each, list | tuple) and len(each) == 1 else each for each in steps)


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *more: Any
) -> tuple[torch.Tensor | None, ...]:
    """Decompose the gradients of a convolution, where there are kernels for them: not for several large groups.

    more: the steps, then which gradients are wanted.
    """
    mask = more[-1]
    *_, transposed, _, groups = steps = _by_dimension(x.dim() - 2, more[:-1])
    if x.dim() == volumes.DIMENSIONS and not transposed and x.dtype in _KERNELS:
        return volumes.convolution_backward(grad, x, weight, bias_sizes, *steps, mask)
    if x.dim() == _IMAGES and _is_covered(x, weight, *steps):
        rows = _rows(grad)
        return (
            (rows @ _rows(weight)).view(x.shape) if mask[0] else None,
            (rows.t() @ _rows(x)).view(weight.shape) if mask[1] else None,
            rows.sum(0) if mask[2] else None,
        )
    if x.dim() == _IMAGES and transposed and groups == 1 and x.dtype in _KERNELS:
        return _transposed_backward(grad, x, weight, *steps, mask)
    if x.dim() == _IMAGES and mask[0] and _spreads_in_groups(x, weight, *steps):
        others = torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *steps, [False, *mask[1:]])
        of_image = _of_image_by_groups(grad, weight, *steps)
        return of_image.contiguous(memory_format=convolution_format(x, weight, None, *steps)), *others[1:]
    if x.dim() != _LINES or (groups > 1 and transposed):
        return NotImplemented
    if mask[1] and _has_few_channels(grad, x, weight, *steps):
        others = [mask[0], False, False]
        of_image = (
            torch.ops.aten.convolution_backward(grad, x, weight, bias_sizes, *steps, others)[0] if mask[0] else None
        )
        return of_image, _of_weight_by_windows(grad, x, weight, *steps), grad.sum((0, 2)) if mask[2] else None
    images = (each.unsqueeze(2) for each in (grad, x, weight))
    made = torch.ops.aten.convolution_backward(*images, bias_sizes, *_of_images(*steps), mask)
    return tuple(each if each is None or each.dim() == 1 else _line(each) for each in made)


def _has_few_channels(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> bool:
    """Whether the gradient of a weight over lines is computed as a product with the windows of `x`: oneDNN is slow for
    so few channels. With one channel, windows are views of `x`; else they are copied, and are no larger than `grad`.

    Products are rounded for each line, so types narrower than f32 are restricted to one line.
    """
    (stride,), (padding,), (dilation,), transposed, _, groups = steps
    if transposed or groups != 1 or x.dtype not in _KERNELS or weight.dtype is not x.dtype:
        return False
    if any(map(is_symbolic, (*weight.shape, stride, padding, dilation))) or 0 in (*x.shape, *weight.shape):
        return False
    if x.dtype.itemsize < torch.float32.itemsize and not is_known(x.shape[0] == 1):
        return False
    outputs, channels, taps = weight.shape
    if channels >= _FEW_CHANNELS or outputs < _MANY_OUTPUTS or (channels > 1 and channels * taps > outputs):
        return False
    if is_symbolic(x.shape[2]) and padding:  # whether a window is inside `x` is not known
        return False
    first, last = _whole_windows(x, weight, *steps)
    count = (x.shape[2] + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    return is_known(count == grad.shape[2]) and is_known(first < last)


def _whole_windows(x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> tuple[Any, Any]:
    """The range of result positions whose taps are all inside `x`: the first one, and the one after the last."""
    (stride,), (padding,), (dilation,), *_ = steps
    return -(-padding // stride), (x.shape[2] + padding - dilation * (weight.shape[2] - 1) - 1) // stride + 1


def _of_weight_by_windows(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> torch.Tensor:
    """The gradient of the weight as a product, for each line, of the result's gradient and the windows of `x`.

    `w[o, c, k] = sum over n and q of g[n, o, q] * x[n, c, s * q + d * k - p]`. Taps outside `x` add nothing, whatever
    `g` is there: positions with such taps are summed separately.
    """
    (stride,), (padding,), (dilation,), *_ = steps
    span = dilation * (weight.shape[2] - 1) + 1

    def windows(line: torch.Tensor) -> torch.Tensor:
        return line.unfold(-1, span, stride)[..., ::dilation]  # [..., positions, taps]

    def at_edge(gradient: torch.Tensor, line: torch.Tensor, *pads: Any) -> torch.Tensor:
        inside = windows(torch.ops.aten.constant_pad_nd(line.new_ones(line.shape[2], dtype=torch.bool), pads))
        elements = windows(torch.ops.aten.constant_pad_nd(line, pads))
        return torch.where(inside, gradient[:, :, None, :, None] * elements[:, None], 0).sum((0, 3))

    first, last = _whole_windows(x, weight, *steps)
    begin, end = first * stride - padding, (last - 1) * stride - padding + span
    elements = windows(x[:, :, begin:end]).permute(0, 2, 1, 3).flatten(2)
    total = torch.bmm(grad[:, :, first:last], elements).sum(0).view(weight.shape)
    if first:
        total = total + at_edge(grad[:, :, :first], x[:, :, : max(0, begin - stride + span)], padding, 0)
    if after := grad.shape[2] - last:
        rest = x[:, :, end - span + stride :]
        total = total + at_edge(grad[:, :, last:], rest, 0, (after - 1) * stride + span - rest.shape[2])
    return total


def _spreads_in_groups(x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> bool:
    """Whether the gradient of an image is itself a convolution of several groups, with more than one channel each."""
    stride, padding, dilation, transposed, _, groups = steps
    if groups == 1 or transposed or groups == x.shape[1] == weight.shape[0] or x.dtype not in _KERNELS:
        return False
    if any(map(is_symbolic, (*weight.shape, *stride, *padding, *dilation))) or 0 in (*x.shape, *weight.shape):
        return False
    reach = zip(weight.shape[2:], padding, dilation, strict=True)
    return set(stride) == {1} and all(pad <= (taps - 1) * step for taps, pad, step in reach)


def _of_image_by_groups(grad: torch.Tensor, weight: torch.Tensor, *steps: Any) -> torch.Tensor:
    """The gradient of an image as a convolution of `grad` with the flipped taps, inputs and outputs exchanged.

    weight: [outputs, channels of a group, H, W]; it is copied to channels-last.
    """
    stride, padding, dilation, *_, groups = steps
    outputs, channels, *taps = weight.shape
    by_group = weight.reshape(groups, outputs // groups, channels, *taps).flip(3, 4).permute(0, 2, 3, 4, 1)
    turned = by_group.reshape(groups * channels, *taps, outputs // groups).permute(0, 3, 1, 2)
    around = [(count - 1) * step - pad for count, pad, step in zip(taps, padding, dilation, strict=True)]
    return torch.ops.aten.convolution(grad, turned, None, stride, around, dilation, False, [0, 0], groups)


def _is_covered(x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> bool:
    """Whether the taps cover a planar image exactly once: each channel of the result is then a single sum."""
    _, padding, _, transposed, _, groups = steps
    if transposed or groups != 1 or any(padding) or x.dtype not in _KERNELS or any(map(is_symbolic, x.shape[1:])):
        return False
    planar = all(each.stride() == contiguous_strides(each.shape) for each in (x, weight))
    return planar and x.shape[2:] == weight.shape[2:] != (1, 1) and 0 not in x.shape


def _has_few_outputs(x: torch.Tensor, weight: torch.Tensor, *steps: Any) -> bool:
    """Whether a convolution has so few outputs that it is faster by taps. The results of all taps take about as much
    memory as the image, which oneDNN would copy."""
    stride, padding, dilation, transposed, _, groups = steps
    if transposed or groups != 1 or x.dtype is not torch.float32 or weight.dtype is not x.dtype:
        return False
    if any(map(is_symbolic, (*weight.shape, *stride, *padding, *dilation))) or set(stride) != {1}:
        return False
    outputs, inputs, *taps = weight.shape
    reach = [step * (count - 1) for count, step in zip(taps, dilation, strict=True)]
    small = any(not is_symbolic(size) and size <= far for size, far in zip(x.shape[2:], reach, strict=True))
    count = math.prod(taps)
    return not small and count > 1 and 0 < outputs <= _MAX_TAP_OUTPUTS and outputs * count <= _MAX_TAP_ROWS * inputs


def _by_taps(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: list[int], dilation: list[int]
) -> torch.Tensor:
    """A convolution of few outputs as one product of all taps and pixels, whose results are shifted and summed.

    Before: `y[o, q] = sum over c and taps t of w[o, c, t] * x[c, q + t]`.
    After: `p[t, o, q] = sum over c of w[o, c, t] * x[c, q]`, and `y[o, q] = sum over t of p[t, o, q + t]`.
    """
    batch, _, height, width = x.shape
    outputs, inputs, *taps = weight.shape
    rows = weight.permute(2, 3, 0, 1).reshape(-1, inputs)
    made = torch.matmul(rows, x.flatten(2)).view(batch, *taps, outputs, height, width)
    around = [
        [(pad - step * at, pad - step * (count - 1 - at)) for at in range(count)]
        for count, pad, step in zip(taps, padding, dilation, strict=True)
    ]
    pad = torch.ops.aten.constant_pad_nd
    moved = (pad(made[:, i, j], [*around[1][j], *around[0][i]]) for i in range(taps[0]) for j in range(taps[1]))
    total = reduce(torch.add, moved)
    return _as_eagers(total if bias is None else total + bias.view(-1, 1, 1), x, weight)


def _rows(images: torch.Tensor) -> torch.Tensor:
    """A matrix with a row for each image, or for each output channel of a weight."""
    return images.flatten(1)


def _of_images(
    stride: list[int], padding: list[int], dilation: list[int], transposed: bool, more: list[int], groups: int
) -> tuple[Any, ...]:
    """The steps of a convolution over one dimension, for images of one line."""
    return [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], groups


def _line(image: torch.Tensor) -> torch.Tensor:
    """[N, C, L] of an image of one line, with contiguous strides even where C or L is 1 and any stride would do."""
    line = image.squeeze(2).contiguous()
    one = any(isinstance(size, int) and size == 1 for size in line.shape[1:])
    return line.flatten().view(line.shape) if one else line


def _transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    more: list[int],
) -> torch.Tensor:
    """A transposed convolution as a convolution whose output channels are the `s` result pixels per image pixel.

    Pixel `s * q + r` of the whole result is the sum over `j` of pixel `q - j` times tap `s * j + r`: so each `r` has a
    window of `taps / s` pixels. Channels are in the order of `r`, so that pixels are adjacent where channels are; in
    the weight, which is copied anyway, they are adjacent too, which is fastest for the columns of a product.

    x: [N, inputs, H, W]. weight: [inputs, outputs, taps, taps], with a number of taps divisible by the stride. Other
    taps, dilated ones, and symbolic steps are left to ATen.
    """
    sizes = [*zip(weight.shape[2:], stride, padding, more, strict=True)]
    empty = any(isinstance(size, int) and size == 0 for size in x.shape)
    symbolic = any(map(is_symbolic, (*weight.shape, *stride, *padding, *dilation, *more)))
    if empty or x.dtype not in _KERNELS or symbolic or set(dilation) != {1}:
        return NotImplemented
    if any(pad < after or taps % step for taps, step, pad, after in sizes):
        return _by_phase(x, weight, bias, sizes) if _has_phases(x, weight, sizes) else NotImplemented
    windows = [taps // step for taps, step, _, _ in sizes]
    # The number of windows before the result, and as many after it, that need not be computed.
    skipped = [
        min((pad - after) // step, window - 1) for (_, step, pad, after), window in zip(sizes, windows, strict=True)
    ]
    if _has_few_pixels(x, windows, skipped):
        return _spread(x, weight, bias, sizes, windows)
    (inputs, outputs, *_), (down, right) = weight.shape, stride
    taps = weight.reshape(inputs, outputs, windows[0], down, windows[1], right).flip(2, 4).permute(2, 4, 0, 3, 5, 1)
    spread = taps.reshape(*windows, inputs, down * right * outputs).permute(3, 2, 0, 1)
    around = [window - 1 - skip for window, skip in zip(windows, skipped, strict=True)]
    added = None if bias is None else bias.repeat(down * right)
    made = torch.ops.aten.convolution(x, spread, added, [1, 1], around, [1, 1], False, [0, 0], 1)
    batch, _, height, width = made.shape
    placed = made.reshape(batch, down, right, outputs, height, width).permute(0, 3, 4, 1, 5, 2)
    result = placed.reshape(batch, outputs, height * down, width * right)
    begins = [pad - skip * step for skip, (_, step, pad, _) in zip(skipped, sizes, strict=True)]
    return _cut(result, x, weight, sizes, begins)


@dataclass(frozen=True, slots=True)
class _Phase:
    """Every `step`-th pixel of a result along one dimension: a convolution with every `step`-th tap, in reverse order.

    taps: these taps. padding: of the image, at both ends. begin: the offset of the phase in the convolution's result.
    """

    taps: slice
    padding: int
    begin: int


def _phases(taps: int, step: int, pad: int, more: int) -> list[_Phase]:
    """The phases of a dimension, each with as many pixels as the first one, which may be one more than needed.

    Pixel `m` of phase `at` is pixel `f = step * m + at + pad` of the whole result: the sum over pixels `i` of the
    image, times tap `f - step * i`.
    """
    found: list[_Phase] = []
    for at in range(step):
        ahead, first = divmod(at + pad, step)
        window = len(range(first, taps, step))
        padding = max(0, window - 1 - ahead, _pixels_of_phase(0, taps, step, pad, more) + ahead)
        found.append(_Phase(slice(first, None, step), padding, ahead + 1 - window + padding))
    return found


def _pixels_of_phase(size: Any, taps: int, step: int, pad: int, more: int) -> Any:
    """The pixels of the first phase of a dimension, which has the most. size: of the image."""
    return size - 1 - (2 * pad - taps - more) // step


def _has_phases(x: torch.Tensor, weight: torch.Tensor, sizes: list[tuple[int, int, int, int]]) -> bool:
    """Whether each phase has at least one tap, and phases are faster than oneDNN, which is slow for few outputs: there
    must be enough pixels to outweigh copying the weight at every call."""
    inputs, outputs, *_ = weight.shape
    if any(taps < step for taps, step, _, _ in sizes) or outputs > _MAX_PHASE_OUTPUTS:
        return False
    if x.dtype is not torch.float32 and inputs < _FEW_INPUTS:
        return False
    pixels = (x.shape[0], *x.shape[2:])
    return any(map(is_symbolic, pixels)) or math.prod(pixels) >= _MANY_PIXELS


def _by_phase(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sizes: list[tuple[int, int, int, int]]
) -> torch.Tensor:
    """A transposed convolution whose taps are no multiple of the stride, as a convolution for each phase.

    Before: `y = conv_transpose(x, w)` of 3 taps with stride 2 and padding 1, in one dimension.
    After: `y[0::2] = conv(x, w[1:2])` and `y[1::2] = conv(x, w[0::2].flip(0))`.
    """
    down, right = (_phases(*each) for each in sizes)
    counts = [_pixels_of_phase(size, *each) for size, each in zip(x.shape[2:], sizes, strict=True)]
    lines: list[torch.Tensor] = []
    for one in down:
        parts: list[torch.Tensor] = []
        for other in right:
            taps = weight[:, :, one.taps, other.taps].flip(2, 3).transpose(0, 1)
            around = [one.padding, other.padding]
            made = torch.ops.aten.convolution(x, taps, bias, [1, 1], around, [1, 1], False, [0, 0], 1)
            parts.append(made.narrow(2, one.begin, counts[0]).narrow(3, other.begin, counts[1]))
        lines.append(torch.stack(parts, 4).flatten(3))
    result = torch.stack(lines, 3).flatten(2, 3)
    return _cut(result, x, weight, sizes, [0, 0])


def _cut(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    sizes: list[tuple[int, int, int, int]],
    begins: list[int],
) -> torch.Tensor:
    """Crop the result from a larger one, with eager's strides.

    sizes: taps, step, padding and output padding of both dimensions. begins: the offsets of the result in both.
    """
    for dim, (size, begin, (count, step, pad, after)) in enumerate(zip(x.shape[2:], begins, sizes, strict=True), 2):
        result = result.narrow(dim, begin, (size - 1) * step - 2 * pad + count + after)
    return _as_eagers(result, x, weight)


def _as_eagers(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A result with eager's strides: channels-last if either operand is."""
    last = torch.channels_last in (suggested_format(x), suggested_format(weight))
    return result.clone(memory_format=torch.channels_last) if last else result.contiguous()


def _has_few_pixels(x: torch.Tensor, windows: list[int], skipped: list[int]) -> bool:
    """Whether windows that are only partly inside the image are a large share of all; only for f32, as partial sums are
    rounded to the type before they are added."""
    if x.dtype is not torch.float32 or any(map(is_symbolic, x.shape[2:])):
        return False
    if x.shape[2:] != (1, 1) and math.prod(windows) > _MAX_PARTS:
        return False
    positions = [size + window - 1 - 2 * skip for size, window, skip in zip(x.shape[2:], windows, skipped, strict=True)]
    return math.prod(positions) >= _EXCESS * math.prod(x.shape[2:])


def _spread(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: list[tuple[int, int, int, int]],
    windows: list[int],
) -> torch.Tensor:
    """A transposed convolution as one product of all pixels and taps, whose results are shifted and summed."""
    batch, inputs, height, width = x.shape
    (taps_down, down, *_), (taps_right, right, *_) = sizes
    rows = x.permute(0, 2, 3, 1).reshape(-1, inputs) @ weight.reshape(inputs, -1)
    spread = rows.view(batch, height, width, -1, windows[0], down, windows[1], right)
    if height == width == 1:
        total = spread.reshape(batch, -1, taps_down, taps_right)
    else:
        parts = (_placed(spread, k, j) for k in range(windows[0]) for j in range(windows[1]))
        total = reduce(torch.add, parts)
    begins = [pad for _, _, pad, _ in sizes]
    return _cut(total if bias is None else total + bias.view(-1, 1, 1), x, weight, sizes, begins)


def _placed(spread: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """What each pixel adds to the windows `down` and `right` of it, padded to the whole result.

    spread: [N, H, W, outputs, windows down, steps down, windows right, steps right].
    """
    batch, height, width, _, windows_down, steps_down, windows_right, steps_right = spread.shape
    part = spread[:, :, :, :, down, :, right].permute(0, 3, 1, 4, 2, 5)
    part = part.reshape(batch, -1, height * steps_down, width * steps_right)
    after_right, after_down = (windows_right - 1 - right) * steps_right, (windows_down - 1 - down) * steps_down
    return torch.nn.functional.pad(part, [right * steps_right, after_right, down * steps_down, after_down])


def _transposed_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *more: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a transposed convolution: it is the gradient of a convolution, whose image is `grad`.

    If the output padding is a step or more, which dilation allows, that has results outside `x`: left to ATen.
    """
    stride, padding, dilation, _, after, groups, mask = more
    symbolic = any(map(is_symbolic, (*stride, *after)))
    if symbolic or any(size >= step for size, step in zip(after, stride, strict=True)):
        return NotImplemented
    steps = stride, padding, dilation, False, [0, 0], groups
    of_weight = (False, True, False)
    return (
        torch.ops.aten.convolution(grad, weight, None, *steps) if mask[0] else None,
        torch.ops.aten.convolution_backward(x, grad, weight, None, *steps, of_weight)[1] if mask[1] else None,
        grad.sum((0, 2, 3)) if mask[2] else None,
    )
