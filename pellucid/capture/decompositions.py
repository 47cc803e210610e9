"""Which composite operators are decomposed into smaller ones at capture.

The list is explicit: operators that are not named here stay whole, and are either lowered by a rule of `pellucid.lower`
or call ATen. Operators that are lowered to one kernel (softmax, layer norm, GELU) must not be listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from pellucid.capture.convolutions import convolution, convolution_backward
from pellucid.capture.eager_strides import with_eagers_strides
from pellucid.capture.fx import computed
from pellucid.capture.resize import resizes
from pellucid.capture.torch_compat import decomposition_table, suggested_format
from pellucid.capture.transformer_layers import encoder_layer, multi_head_attention
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
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward native_batch_norm
    _weight_norm_interface _native_batch_norm_legit _native_batch_norm_legit_functional
"""

_SHAPES = """
    diag_embed diagonal_backward eye new_empty new_full new_ones new_zeros ones ones_like
    pixel_shuffle pixel_unshuffle select_backward slice_backward stack tril triu unfold_backward zeros
    zeros_like _unsafe_index linspace roll diagonal_copy im2col
"""

_LINEAR_ALGEBRA = "addr dot mv vdot addmv"

NAMES: tuple[str, ...] = tuple(
    name for group in (_POINTWISE, _LOSSES, _REDUCTIONS, _NORMS, _SHAPES, _LINEAR_ALGEBRA) for name in group.split()
)


_MEAN = 1  # ATen's number for this reduction of a loss


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition table, in the form that AOTAutograd expects."""
    table = decomposition_table(NAMES)
    aten = torch.ops.aten
    own = {
        aten.aminmax.default: _signed_only(table[aten.aminmax.default]),
        aten.nan_to_num.default: _by_parts(table[aten.nan_to_num.default]),
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
        aten._native_batch_norm_legit_no_training.default: _batch_norm_without_training,
        aten.native_group_norm.default: _group_norm,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        aten._euclidean_dist.default: _euclidean_dist,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
        aten._native_multi_head_attention.default: multi_head_attention,
        aten._transformer_encoder_layer_fwd.default: encoder_layer,
        aten.index_add.default: _with_wide_sums(aten.index_add.default),
        aten.scatter_add.default: _with_wide_sums(aten.scatter_add.default),
        aten.scatter_reduce.two: _with_wide_sums(aten.scatter_reduce.two),
    }
    return {**table, **with_eagers_strides(), **resizes(), **own}


def _with_wide_sums(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`scatter` with sums of bf16 and f16 in f32, as in eager mode: rounded at each addition, their error would grow
    with the number of terms."""

    def added(
        x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        wide, reduction = computed(x.dtype), next((each for each in args if isinstance(each, str)), "sum")
        if wide is x.dtype or source.dtype is not x.dtype or reduction != "sum":
            return NotImplemented
        return scatter(x.to(wide), dim, index, source.to(wide), *args, **options).to(x.dtype)

    return added


def _batch_norm_without_training(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    _momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Like PyTorch's decomposition, in ten calls instead of eighteen: convolutional models have many of them."""
    wide = computed(x.dtype)

    def along_channels(values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, *[1] * (x.dim() - 2))

    result = (x - along_channels(mean.to(wide))) * along_channels((variance.to(wide) + eps).rsqrt())
    if weight is not None:
        result = result * along_channels(weight)
    if bias is not None:
        result = result + along_channels(bias)
    empty = x.new_zeros(0)
    return result.to(x.dtype).contiguous(memory_format=suggested_format(x)), empty, empty


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
    """Group norm by statistics of channels, combined over a group (Chan, Golub and LeVeque 1979), in either layout.

    PyTorch's decomposition fixes strides (`as_strided`), so that the layout of images could not be changed.
    """
    values = x.to(computed(x.dtype))
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
    dtype = next((given.dtype for given in (weight, bias) if given is not None), x.dtype)
    statistics = (each.to(dtype).squeeze(2) for each in (mean, reciprocal))
    return result.to(x.dtype).contiguous(memory_format=suggested_format(x)), *statistics


def _of_groups(variances: torch.Tensor, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean, [N, groups, 1], from those of channels, [N, groups, channels of a group], of equal counts."""
    if means.shape[2] == 1:
        return variances, means
    mean = means.mean(2, keepdim=True)
    return (variances + (means - mean).square()).mean(2, keepdim=True), mean


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `v` and `g` from that of the weight `v * (g / norms)`: norms over all dimensions but `dim`."""
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    wide = computed(norms.dtype)
    grad, values, scale, norms = (each.to(wide) for each in (grad, v, g, norms))
    along = (grad * values).sum(others, keepdim=True) / norms
    of_v = (grad - values * (along / norms)) * (scale / norms)
    return of_v.to(v.dtype).contiguous(), along.to(g.dtype)


def _euclidean_dist(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distances of rows by their norms and products, as in ATen, but without concatenating the rows and norms."""
    of_x, of_y = (each.square().sum(-1, keepdim=True) for each in (x, y))
    return (of_x + of_y.mT - 2 * (x @ y.mT)).clamp_min(0).sqrt()


def _nll_loss_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Zeros except for one element per row, as in eager mode. PyTorch's multiplies whole rows: 0 * inf is NaN."""
    dim = 0 if x.dim() < 2 else 1
    target = target.unsqueeze(dim)
    used = target != ignore_index
    index = torch.where(used, target, 0)
    grad = grad_output.unsqueeze(dim) if grad_output.dim() else grad_output
    if reduction == _MEAN:
        grad = grad / total_weight
    element = -grad if weight is None else -weight[index] * grad
    element = torch.where(used, element, 0).to(x.dtype)
    return x.new_zeros(x.shape).scatter(dim, index, element)


def _by_parts(decomposition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Extend a decomposition of real numbers to complex ones: applied to real and imaginary parts separately."""

    def call(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not x.is_complex():
            return decomposition(x, *args, **options)
        return torch.complex(*(decomposition(part, *args, **options) for part in (x.real, x.imag)))

    return call


def _signed_only(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Leave wide unsigned integers to the operator: ATen has it for them, but not the operators it decomposes into."""

    def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return NotImplemented if is_unsigned(x.dtype) else decomposition(x, *args, **options)

    return call
