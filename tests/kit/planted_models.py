"""Faults in small real models: wrong decompositions, partitions and captures, and those of small programs again.

As in `planted.py`, each is a target: `tests/kit/planted_models.py:bert_gelu_backward`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit import real_models
from tests.kit.planted import FAULTS, drop_relu, in_transform, make_of, mix_up_saved, patch, planted
from tests.small_models import build_small

aten = torch.ops.aten
Model = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def __getattr__(name: str) -> Callable[[], Any]:
    return make_of(FAULTS, name)


def small(name: str) -> Callable[[], Model]:
    """A model of the suite with two narrow layers, in evaluation mode."""

    def make() -> Model:
        module, inputs = build_small(name)
        return module, (), inputs

    return make


class Windows(nn.Module):
    """Two blocks as in a Swin transformer: attention within windows, in the second block shifted ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(24, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift, norm, attention in zip((0, 2), self.norms, self.attentions, strict=True):
            h = torch.roll(norm(x), (-shift, -shift), (1, 2)) if shift else norm(x)
            h = h.view(-1, 2, 4, 2, 4, 24).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 24)
            h = attention(h, h, h, need_weights=False)[0]
            h = h.view(-1, 2, 2, 4, 4, 24).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 8, 24)
            x = x + (torch.roll(h, (shift, shift), (1, 2)) if shift else h)
        return x


def windows() -> Model:
    """A small Swin."""
    torch.manual_seed(0)
    return Windows(), (torch.randn(2, 8, 8, 24),), {}


class UNet(nn.Module):
    """Down once, up once, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.inner = (
            nn.Conv2d(3, 8, 3, 1, 1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(16, 16, 3, 1, 1),
        )
        self.norm, self.up, self.leave = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.silu(self.enter(x))
        second = F.silu(self.norm(self.inner(self.down(first))))
        return self.leave(torch.cat([first, F.silu(self.up(second))], 1))


def unet() -> Model:
    """A small U-Net."""
    torch.manual_seed(0)
    return UNet(), (torch.randn(2, 3, 16, 16),), {}


def decompose(subject: str, operator: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a decomposition of a backend by what `make` makes of it."""
    if subject == "pellucid":
        from pellucid.capture.decompositions import decompositions

        table: Any = decompositions()
    else:
        from torch._inductor.decomposition import decompositions as table
    table[operator] = make(table[operator])


# ------------------------------------------------------------------------------------------------ decompositions


def cubic(original: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of GELU without its second term."""
    return lambda grad, x, approximate="none": grad * 0.5 * (1 + torch.erf(x * 0.7071067811865476))


@planted("pellucid", "wrong", "decompositions", "gelu_backward", small("bert"), backward=True, file=__file__)
def plant_bert_gelu_backward() -> None:
    decompose("pellucid", aten.gelu_backward.default, cubic)


@planted("inductor", "wrong", "decompositions", "gelu_backward", small("bert"), backward=True, file=__file__)
def plant_inductor_bert_gelu_backward() -> None:
    decompose("inductor", aten.gelu_backward.default, cubic)


@planted("pellucid", "wrong", "decompositions", "roll", windows, file=__file__)
def plant_swin_roll() -> None:
    """One too far, along the last of several dimensions."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, shifts, dims=(): original(x, [*shifts[:-1], shifts[-1] + 1], dims)

    decompose("pellucid", aten.roll.default, make)


@planted("inductor", "wrong", "decompositions", "native_layer_norm", windows, file=__file__)
def plant_inductor_swin_no_epsilon() -> None:
    """Layer norm without its epsilon."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, shape, weight, bias, eps: original(x, shape, weight, bias, 0.0)

    from torch._inductor.decomposition import decompositions

    decompositions.setdefault(
        aten.native_layer_norm.default, torch._decomp.decomposition_table[aten.native_layer_norm.default]
    )
    decompose("inductor", aten.native_layer_norm.default, make)


@planted(
    "pellucid", "wrong", "decompositions", "native_layer_norm_backward", small("gpt2"), backward=True, file=__file__
)
def plant_gpt2_layer_norm_backward() -> None:
    """The weight's gradient is twice as large."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any) -> Any:
            x, weight, bias = original(*args)
            return x, None if weight is None else weight * 2, bias

        return wrong

    decompose("pellucid", aten.native_layer_norm_backward.default, make)


@planted("inductor", "wrong", "decompositions", "silu", unet, file=__file__)
def plant_inductor_unet_silu() -> None:
    decompose("inductor", aten.silu.default, lambda original: lambda x: x * torch.sigmoid(1.01 * x))


@planted("pellucid", "wrong", "decompositions", "silu_backward", unet, backward=True, file=__file__)
def plant_unet_silu_backward() -> None:
    decompose("pellucid", aten.silu_backward.default, lambda original: lambda grad, x: grad * torch.sigmoid(x))


# ------------------------------------------------------------------------------------------------ before them


@planted("pellucid", "wrong", "joint graph", "convolution_backward", unet, backward=True, file=__file__)
def plant_unet_partition() -> None:
    """Two tensors that the backward pass needs are handed over in the wrong order."""
    from pellucid.capture import torch_compat

    patch(torch_compat, "min_cut_rematerialization_partition", mix_up_saved)


@planted("inductor", "wrong", "joint graph", "convolution_backward", unet, backward=True, file=__file__)
def plant_inductor_unet_partition() -> None:
    from torch._inductor import compile_fx

    patch(compile_fx, "min_cut_rematerialization_partition", mix_up_saved)


def captured(change: Callable[[str, Any, Any, Any], tuple[Any, Any, Any]]) -> None:
    """Change what Dynamo writes down: change(kind, target, args, kwargs)."""
    from torch._dynamo.output_graph import SubgraphTracer

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
            return original(self, kind, *change(kind, target, args, kwargs), *more, **named)

        return create

    patch(SubgraphTracer, "create_proxy", make)


@planted("pellucid", "wrong", "dynamo", "silu", unet, file=__file__)
def plant_unet_lost_call() -> None:
    """Dynamo takes SiLU for an operator that does nothing."""

    def change(kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        return (torch.clone, args[:1], {}) if target is F.silu else (target, args, kwargs)

    captured(change)


@planted("inductor", "wrong", "dynamo", "cat", unet, file=__file__)
def plant_inductor_unet_turned_cat() -> None:
    """Dynamo turns the operands of a concatenation."""

    def change(kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        return (target, (list(args[0])[::-1], *args[1:]), kwargs) if target is torch.cat else (target, args, kwargs)

    captured(change)


# ------------------------------------------------------------------------------------------------ small faults again


def inside(model: str, name: str, culprit: str, *, backward: bool = False) -> None:
    """Enter a fault of the small programs once more, in a model of `real_models`; its culprit there."""
    fault, program = FAULTS[name], getattr(real_models, model)
    name = f"{name}_in_{model}"
    FAULTS[name] = replace(fault, name=name, culprit=culprit, program=program, backward=backward, file=__file__)


inside("gpt2", "pellucid_wrong_row", "embedding")
inside("gpt2_training", "pellucid_lost_gradients", "embedding_dense_backward", backward=True)
inside("gpt2_training", "pellucid_decomposition_of_a_gradient", "_log_softmax_backward_data", backward=True)
inside("gpt2_training", "pellucid_partitioner", "", backward=True)
inside("llama", "pellucid_neg_wrong", "neg")
inside("llama", "pellucid_neg_does_not_compile", "neg")
inside("llama", "pellucid_neg_aborts", "neg")
inside("bert", "pellucid_stale_weight", "t")
inside("bert_in_bfloat16", "pellucid_truncation", "add")
inside("streaming", "pellucid_burned_size", "mean")
inside("experts", "pellucid_rule_fails", "cumsum")
inside("resnet_training", "pellucid_layout", "convolution", backward=True)

inside("gpt2", "inductor_wrong_row", "embedding")
inside("gpt2_training", "inductor_decomposition", "_log_softmax")
inside("gpt2_training", "inductor_partitioner", "", backward=True)
inside("llama", "inductor_neg_wrong", "neg")
inside("llama", "inductor_neg_does_not_compile", "neg")
inside("llama", "inductor_neg_aborts", "neg")
inside("bert", "inductor_stale_weight", "permute")
inside("bert_in_bfloat16", "inductor_truncation", "convert_element_type")  # add is not rounded in a kernel
inside("resnet", "inductor_lost_relu", "relu")
inside("resnet_training", "inductor_decomposition_of_a_gradient", "threshold_backward", backward=True)
inside("streaming", "inductor_burned_size", "mean")
inside("experts", "inductor_rule_fails", "cumsum")


@planted("pellucid", "wrong", "graph passes", "relu", real_models.resnet, file=__file__)
def plant_resnet_lost_relu() -> None:
    in_transform(drop_relu)


@planted("pellucid", "error", "lowering", "max_pool2d_with_indices", real_models.resnet, file=__file__)
def plant_resnet_rule_fails() -> None:
    from pellucid.lower.registry import RULES

    def fail(graph: Any, node: torch.fx.Node) -> Any:
        raise AssertionError("no such case")

    RULES["max_pool2d_with_indices.default"] = fail


@planted("inductor", "error", "lowering", "relu", real_models.resnet, file=__file__)
def plant_inductor_resnet_rule_fails() -> None:
    from torch._inductor.lowering import lowerings

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no such case")

    lowerings[aten.relu.default] = fail


def turned_by_sine() -> None:
    """Dynamo takes a cosine for a sine."""

    def change(kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        return ("sin" if target == "cos" else target), args, kwargs

    captured(change)


@planted("pellucid", "wrong", "dynamo", "cos", real_models.llama, file=__file__)
def plant_llama_sine() -> None:
    turned_by_sine()


@planted("inductor", "wrong", "dynamo", "cos", real_models.llama, file=__file__)
def plant_inductor_llama_sine() -> None:
    turned_by_sine()
