"""Which composite operators PyTorch breaks into smaller ones before Pellucid sees them.

The list is explicit: what is not named here arrives whole, and is either lowered by a rule of `pellucid.lower` or
calls ATen. Operators that the lowering writes as one kernel (softmax, layer norm, GELU) must not stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from pellucid.capture.eager_strides import with_eagers_strides
from pellucid.capture.torch_compat import decomposition_table, suggested_format
from pellucid.ir.unsigned import is_unsigned

_POINTWISE = """
    celu clamp_max clamp_min elu_backward fill frac gelu_backward glu glu_backward hardshrink
    hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh_backward heaviside isneginf isposinf
    leaky_relu_backward lerp log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logit logit_backward
    masked_fill mish mish_backward nan_to_num rsub selu sgn sigmoid_backward silu_backward sinc softplus
    softplus_backward softshrink tanh_backward threshold threshold_backward xlogy deg2rad rad2deg special_entr
    special_xlog1py special_log_ndtr native_dropout_backward
"""

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_backward huber_loss huber_loss_backward mse_loss
    mse_loss_backward nll_loss_forward nll_loss2d_forward smooth_l1_loss smooth_l1_loss_backward
    soft_margin_loss _softmax_backward_data _log_softmax_backward_data
"""

_REDUCTIONS = "aminmax all count_nonzero logsumexp norm std std_mean nansum linalg_vector_norm trace"

_NORMS = """
    _weight_norm_interface
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
"""

_SHAPES = """
    diag_embed diagonal_backward eye new_empty new_full new_ones new_zeros ones ones_like
    pixel_shuffle pixel_unshuffle select_backward slice_backward stack tril triu unfold_backward zeros
    zeros_like _unsafe_index linspace roll diagonal_copy
"""

_LINEAR_ALGEBRA = "addr dot mv vdot addmv"

NAMES: tuple[str, ...] = tuple(
    name for group in (_POINTWISE, _LOSSES, _REDUCTIONS, _NORMS, _SHAPES, _LINEAR_ALGEBRA) for name in group.split()
)


_MEAN = 1  # of the reductions of a loss, as ATen counts them
_LINES, _IMAGES = 3, 4  # dimensions of what a convolution over one dimension gets, and over two
_KERNELS = (torch.float32, torch.bfloat16, torch.float16)  # of these convolutions are kernels


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table in the form that AOTAutograd takes."""
    table = decomposition_table(NAMES)
    aten = torch.ops.aten
    own = {
        aten.aminmax.default: _signed_only(table[aten.aminmax.default]),
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
        aten._native_batch_norm_legit_no_training.default: _batch_norm_without_training,
        aten.native_group_norm.default: _group_norm,
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
    }
    return {**table, **with_eagers_strides(), **own}


def _batch_norm_without_training(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    _momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """What PyTorch's computes, in ten calls where that has eighteen: a model of convolutions is made of them."""
    wide = _wide(x.dtype)

    def along_channels(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, *[1] * (x.dim() - 2))

    result = (x - along_channels(mean.to(wide))) * along_channels((variance.to(wide) + eps).rsqrt())
    if weight is not None:
        result = result * along_channels(weight)
    if bias is not None:
        result = result + along_channels(bias)
    empty = x.new_zeros(0)
    return result.to(x.dtype).contiguous(memory_format=suggested_format(x)), empty, empty


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    more: list[int],
    groups: int,
) -> torch.Tensor:
    """Over one dimension as over two, of images of one line, as ATen does: what is known of images serves both.

    The result is contiguous, as eager's is.
    """
    if x.dim() == _IMAGES and transposed and groups == 1 and set(dilation) == {1}:
        return _transposed(x, weight, bias, stride, padding, more)
    if x.dim() != _LINES:
        return NotImplemented
    steps = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], groups
    return torch.ops.aten.convolution(x.unsqueeze(2), weight.unsqueeze(2), bias, *steps).squeeze(2).contiguous()


def _transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    more: list[int],
) -> torch.Tensor:
    """A transposed convolution as one whose channels are the pixels that each pixel of the image spreads to.

    Pixel `s * q + r` of the whole result is the sum over `j` of pixel `q - j` times tap `s * j + r`: so each `r` has a
    window of `taps / s` pixels. Channels are in the order of `r`, so that pixels lie side by side where channels do.

    x: [N, inputs, H, W]. weight: [inputs, outputs, taps, taps]; as many taps as fill such windows, others are ATen's.
    """
    sizes = [*zip(weight.shape[2:], stride, padding, more, strict=True)]
    if not all(isinstance(size, int) for size in weight.shape):
        return NotImplemented
    if x.dtype not in _KERNELS or any(pad < after or taps % step for taps, step, pad, after in sizes):
        return NotImplemented
    windows = [taps // step for taps, step, _, _ in sizes]
    # Windows before the result, and as many after it, that need not be computed.
    skipped = [
        min((pad - after) // step, window - 1) for (_, step, pad, after), window in zip(sizes, windows, strict=True)
    ]
    (inputs, outputs, *_), (down, right) = weight.shape, stride
    taps = weight.reshape(inputs, outputs, windows[0], down, windows[1], right).flip(2, 4).permute(3, 5, 1, 0, 2, 4)
    spread = taps.reshape(down * right * outputs, inputs, *windows)
    around = [window - 1 - skip for window, skip in zip(windows, skipped, strict=True)]
    added = None if bias is None else bias.repeat(down * right)
    made = torch.ops.aten.convolution(x, spread, added, [1, 1], around, [1, 1], False, [0, 0], 1)
    batch, _, height, width = made.shape
    placed = made.reshape(batch, down, right, outputs, height, width).permute(0, 3, 4, 1, 5, 2)
    result = placed.reshape(batch, outputs, height * down, width * right)
    for dim, (size, skip, (count, step, pad, after)) in enumerate(zip(x.shape[2:], skipped, sizes, strict=True), 2):
        result = result.narrow(dim, pad - skip * step, (size - 1) * step - 2 * pad + count + after)
    return result.contiguous(memory_format=suggested_format(x))


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    more: list[int],
    groups: int,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the same."""
    if x.dim() != _LINES:
        return NotImplemented
    images = (each.unsqueeze(2) for each in (grad, x, weight))
    steps = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], groups
    made = torch.ops.aten.convolution_backward(*images, bias_sizes, *steps, mask)
    return tuple(each if each is None or each.dim() == 1 else each.squeeze(2).contiguous() for each in made)


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """By statistics of channels, then of the channels of a group (Chan, Golub and LeVeque 1979): sums in either layout.

    PyTorch's decomposition asks for strides (`as_strided`), so that images could not lie otherwise than captured.
    """
    values = x.to(_wide(x.dtype))
    variances, means = torch.var_mean(values.reshape(batch, channels, pixels), dim=2, correction=0)
    grouped = batch, groups, channels // groups
    variance, mean = _of_groups(variances.view(grouped), means.view(grouped))
    reciprocal = (variance + eps).rsqrt()

    def by_group(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view(1, groups, channels // groups)

    def along_channels(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(grouped).reshape(batch, channels, *[1] * (x.dim() - 2))

    scale = reciprocal if weight is None else reciprocal * by_group(weight)
    result = (values - along_channels(mean)) * along_channels(scale)
    if bias is not None:
        result = result + along_channels(by_group(bias))
    statistics = (each.to(x.dtype).squeeze(2) for each in (mean, reciprocal))
    return result.to(x.dtype).contiguous(memory_format=suggested_format(x)), *statistics


def _of_groups(variances: torch.Tensor, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean, [N, groups, 1], of as many values for each channel of [N, groups, channels of a group]."""
    if means.shape[2] == 1:
        return variances, means
    mean = means.mean(2, keepdim=True)
    return (variances + (means - mean).square()).mean(2, keepdim=True), mean


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type that a normalisation is computed in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _nll_loss_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Zeros but for one element per row, as eager has it. PyTorch's multiplies whole rows: 0 * inf is NaN."""
    dim = 0 if x.dim() < 2 else 1
    target = target.unsqueeze(dim)
    counts = target != ignore_index
    index = torch.where(counts, target, 0)
    grad = grad_output.unsqueeze(dim) if grad_output.dim() else grad_output
    if reduction == _MEAN:
        grad = grad / total_weight
    element = -grad if weight is None else -weight[index] * grad
    element = torch.where(counts, element, 0).to(x.dtype)
    return x.new_zeros(x.shape).scatter(dim, index, element)


def _signed_only(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """For an operator that ATen has for wide unsigned integers where it lacks what the decomposition is made of."""

    def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return NotImplemented if is_unsigned(x.dtype) else decomposition(x, *args, **options)

    return call
