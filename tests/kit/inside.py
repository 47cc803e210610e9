"""Faults planted deep inside fused kernels of real models, as targets of the kit: `tests/kit/inside.py:NAME`.

Each names the operator that must be found, by its FX node and, on Pellucid, the scalar operator in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from tests.kit import real_models
from tests.kit.planted import Fault, during, make_of, patch


@dataclass(frozen=True, slots=True)
class Inside(Fault):
    """A fault. scalar: the operator of the loop language that is to blame, where it is known."""

    scalar: str = ""


def inside(
    name: str,
    component: str,
    node: str,
    program: Callable[[], real_models.Program],
    plant: Callable[[], None],
    scalar: str = "",
    backward: bool = False,
) -> Inside:
    """A fault that a subject, the first word of its name, has in a component, with the operator's FX node."""
    return Inside(name, name.partition("_")[0], "wrong", component, node, plant, program, backward, __file__, scalar)


def scaled(op: str, factor: str = "1.03f") -> Callable[[], None]:
    """Pellucid's vector code of an operator is off by a factor."""

    def plant() -> None:
        from pellucid.codegen.cpp import _Printer
        from pellucid.ir.nodes import Compute

        def make(original: Callable[..., str]) -> Callable[..., str]:
            def value(self: Any, line: Any) -> str:
                text = original(self, line)
                hit = isinstance(line.rhs, Compute) and line.rhs.op == op and self.is_wide(line.out)
                return f"pv::mul({text}, pv::splat<{self.plan.width}>({factor}))" if hit else text

            return value

        patch(_Printer, "value", make)

    return plant


def lowered(rule: str, op: str, factor: float = 1.03) -> Callable[[], None]:
    """Pellucid's rule for an ATen operator makes a scalar operator off by a factor."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, name: str, *args: Any) -> Any:
            value = original(self, name, *args)
            return original(self, "mul", value, factor) if name == op else value

        return wrong

    return lambda: during(rule, "op", make)


def unmasked(rule: str) -> Callable[[], None]:
    """Pellucid's rule for an ATen operator takes every element, chosen or not."""
    return lambda: during(rule, "where", lambda original: lambda self, condition, value, other: value)


def kept(rule: str) -> Callable[[], None]:
    """Pellucid's rule for an ATen operator that adds up keeps one value instead."""
    return lambda: during(rule, "store", lambda original: lambda *args, join="": original(*args))


def vector(op: str, factor: str = "1.03f") -> Callable[[], None]:
    """Inductor's vector code of an operator is off by a factor."""

    def plant() -> None:
        from torch._inductor.codegen.cpp import CppVecOverrides

        def make(original: Callable[..., str]) -> Any:
            @wraps(original)
            def text(*args: Any) -> str:
                it = original(*args)
                return f"({it} * std::decay_t<decltype({it})>({factor}))"

            return staticmethod(text)

        patch(CppVecOverrides, op, make)

    return plant


def rule(target: str, factor: float = 1.03) -> Callable[[], None]:
    """Inductor's lowering of an ATen operator is off by a factor."""

    def plant() -> None:
        import torch
        from torch._inductor.lowering import lowerings

        name, _, overload = target.partition(".")
        call = getattr(getattr(torch.ops.aten, name), overload)
        right, times = lowerings[call], lowerings[torch.ops.aten.mul.Tensor]
        lowerings[call] = lambda *args, **kwargs: times(right(*args, **kwargs), factor)

    return plant


FAULTS = {
    fault.name: fault
    for fault in (
        inside("pellucid_bert_erf", "vectorisation", "gelu", real_models.bert, scaled("erf"), "erf"),
        inside("pellucid_llama_cos", "vectorisation", "cos", real_models.llama, scaled("cos"), "cos"),
        inside("pellucid_llama_silu", "lowering", "silu", real_models.llama, lowered("silu.default", "exp")),
        inside("pellucid_resnet_sqrt", "lowering", "sqrt", real_models.resnet, lowered("sqrt.default", "sqrt")),
        inside("pellucid_unet_var", "lowering", "var_mean", real_models.unet, lowered("var_mean.correction", "div")),
        inside("pellucid_gpt2_norm", "lowering", "layer_norm", real_models.gpt2_training,
               lowered("native_layer_norm.default", "rsqrt"), backward=True),
        inside("inductor_bert_erf", "vectorisation", "erf", real_models.bert, vector("erf")),
        inside("inductor_bert_rsqrt", "lowering", "rsqrt", real_models.bert, rule("rsqrt.default")),
        inside("inductor_llama_cos", "lowering", "cos", real_models.llama, rule("cos.default")),
        inside("inductor_resnet_sqrt", "lowering", "sqrt", real_models.resnet, rule("sqrt.default")),
        inside("inductor_unet_exp", "vectorisation", "exp", real_models.unet, vector("exp")),
        inside("inductor_gpt2_tanh", "vectorisation", "tanh", real_models.gpt2_training, vector("tanh"),
               backward=True),
        inside("pellucid_experts_scan", "lowering", "cumsum", real_models.experts, unmasked("cumsum.default")),
        inside("pellucid_experts_scatter", "lowering", "index_add", real_models.experts, kept("index_add.default")),
        inside("pellucid_experts_softmax", "lowering", "softmax", real_models.experts,
               lowered("_softmax.default", "div")),
        inside("pellucid_gpt2_loss", "lowering", "log_softmax", real_models.gpt2_training,
               lowered("_log_softmax.default", "log"), backward=True),
        inside("pellucid_gpt2_tanh", "vectorisation", "tanh", real_models.gpt2_training, scaled("tanh"), "tanh",
               backward=True),
        inside("pellucid_whisper_erf", "lowering", "gelu", real_models.whisper, lowered("gelu.default", "erf")),
        inside("pellucid_vit_norm", "lowering", "layer_norm", real_models.vit,
               lowered("native_layer_norm.default", "rsqrt")),
        inside("pellucid_t5_rsqrt", "lowering", "rsqrt", real_models.t5, lowered("rsqrt.default", "rsqrt")),
        inside("pellucid_mobilenet_relu6", "lowering", "hardtanh", real_models.mobilenet,
               lowered("hardtanh.default", "minimum")),
        inside("inductor_experts_scatter", "lowering", "index_add", real_models.experts, rule("index_put_.default")),
        inside("inductor_experts_exp", "vectorisation", "exp", real_models.experts, vector("exp")),
        inside("inductor_gpt2_loss", "lowering", "log", real_models.gpt2_training, rule("log.default"),
               backward=True),
        inside("inductor_vit_erf", "lowering", "erf", real_models.vit, rule("erf.default")),
        inside("inductor_convnext_rsqrt", "lowering", "rsqrt", real_models.convnext, rule("rsqrt.default")),
        inside("inductor_t5_rsqrt", "lowering", "rsqrt", real_models.t5, rule("rsqrt.default")),
        inside("inductor_streaming_glu", "lowering", "glu", real_models.streaming, rule("glu.default")),
        inside("inductor_whisper_erf", "vectorisation", "erf", real_models.whisper, vector("erf")),
    )
}  # fmt: skip


def __getattr__(name: str) -> Callable[[], real_models.Program]:
    return make_of(FAULTS, name)
