"""The models that the benchmarks run, each built from its configuration with random weights.

Nothing is downloaded. Weights and inputs come from one fixed seed, so every process and machine runs the same values.

>>> [tuple(x.shape) for x in build("pointwise_small").kwargs.values()]
[(8,), (8,)]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.errors import near
from pellucid.kit.programs.case import Case

SEED = 20
DTYPES: Mapping[str, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16}


class UnknownName(ValueError):
    """An unknown model, backend or dtype; `known` lists the valid names."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}: {near(name, known) or 'choose from ' + ', '.join(known)}")
        self.kind, self.name, self.known = kind, name, known


class DoesNotFit(ValueError):
    """A size that a model does not support."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a model is built for: `batch` sequences of `seq` tokens. Plain functions have fixed shapes.

    `train` builds a model in training mode, with labels among its inputs. Its dropout is off, so that the gradients of
    two runs, and those of a float64 run, can be compared.
    """

    batch: int = 1
    seq: int = 128
    dtype: torch.dtype = torch.float32
    train: bool = False


Built = tuple[Callable[..., object], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Model:
    """An entry of the registry. `sized`: whether it depends on batch size and sequence length."""

    summary: str
    make: Callable[[Size], Built]
    sized: bool = True


def build(name: str, size: Size | None = None) -> Case:
    """Build the model `name`, called with keywords, without changing the global random state.

    Raises `UnknownName`, `DoesNotFit`; `ImportError` if a model needs transformers, which is not installed;
    `ValueError` for a plain function with `train`.
    """
    if name not in MODELS:
        raise UnknownName("model", name, sorted(MODELS))
    size = size or Size()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        fn, inputs = MODELS[name].make(size)
        if isinstance(fn, nn.Module):
            _check_positions(name, fn, size)
            fn = fn.to(size.dtype).train(size.train)
        elif size.train:
            raise ValueError(f"{name} is a plain function: it has no parameters to train")
        if isinstance(fn, nn.Module) and size.train:
            disable_dropout(fn)
            inputs |= _labels(fn, inputs)
    return Case(name, fn, (), inputs)


def _check_positions(name: str, model: nn.Module, size: Size) -> None:
    """Reject sequences longer than the model's table of position embeddings."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    if positions in tables and size.seq > positions:
        raise DoesNotFit(f"{name} takes sequences of at most {positions} tokens, not {size.seq}")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: of dropout modules, and attributes that models pass to functions."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _labels(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The labels from which `model` computes its loss; empty if it has no loss of its own."""
    accepted = inspect.signature(model.forward).parameters
    if "start_positions" in accepted:
        batch, seq = inputs["input_ids"].shape
        return {name: torch.randint(seq, (batch,)) for name in ("start_positions", "end_positions")}
    if "labels" not in accepted:
        return {}
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if tokens is not None:
        return {"labels": tokens.clone()}
    return {"labels": torch.randint(model.config.num_labels, (len(inputs["pixel_values"]),))}  # type: ignore[union-attr]


# ------------------------------------------------------------------------------- Hugging Face transformers


def _tokens(size: Size, vocabulary: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(vocabulary, (size.batch, size.seq))}


def _mobilebert(size: Size) -> Built:
    from transformers import MobileBertConfig, MobileBertForQuestionAnswering

    config = MobileBertConfig()
    return MobileBertForQuestionAnswering(config), _tokens(size, config.vocab_size)


def _bert(size: Size) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig()
    return BertModel(config), _tokens(size, config.vocab_size)


def _gpt2(size: Size) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)  # one forward pass over a prompt; the cache would only be an output
    return GPT2LMHeadModel(config), _tokens(size, config.vocab_size)


def _t5(size: Size) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=6, use_cache=False)
    config.decoder_start_token_id = 0
    tokens = _tokens(size, config.vocab_size)
    return T5ForConditionalGeneration(config), {**tokens, "decoder_input_ids": tokens["input_ids"].clone()}


def _llama(size: Size) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(size, config.vocab_size)


def _images(size: Size, side: int = 224) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size.batch, 3, side, side).to(size.dtype)}


def _resnet50(size: Size) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()), _images(size)


def _vit(size: Size) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig()), _images(size)


def _convnext(size: Size) -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig()), _images(size)


def _mobilenet(size: Size) -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config()), _images(size)


def _whisper(size: Size) -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        use_cache=False,
    )
    features = torch.randn(size.batch, config.num_mel_bins, 3000).to(size.dtype)
    tokens = torch.randint(config.vocab_size, (size.batch, min(size.seq, config.max_target_positions)))
    return WhisperForConditionalGeneration(config), {"input_features": features, "decoder_input_ids": tokens}


# ------------------------------------------------------------------------------------------ plain functions


def _neg_maximum_cat(x1: Tensor, x2: Tensor) -> Tensor:
    a = torch.neg(x1)
    b = torch.maximum(x2, a)
    return torch.cat([b], dim=0)


def _foo1(size: Size) -> Built:
    x1 = torch.randint(256, (1, 8), dtype=torch.uint8)
    x2 = torch.randint(256, (8390, 8), dtype=torch.uint8)
    return _neg_maximum_cat, {"x1": x1, "x2": x2}


def _foo2(size: Size) -> Built:
    x1, x2 = torch.randn(1, 8), torch.randn(8390, 8)
    return _neg_maximum_cat, {"x1": x1.to(size.dtype), "x2": x2.to(size.dtype)}


def _add_add_mul_add(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    return ((a + b) + c) * d + e


def _addaddmuladd(size: Size) -> Built:
    shapes = {"a": (16384, 512), "b": (1, 512), "c": (16384, 512), "d": (1, 512), "e": (1, 512)}
    return _add_add_mul_add, {k: torch.rand(s).to(size.dtype) for k, s in shapes.items()}


def _softmax(size: Size) -> Built:
    x = torch.randn(8, 12, 512, 512).to(size.dtype)
    return lambda x: torch.softmax(x, dim=-1), {"x": x}


def _pointwise_small(size: Size) -> Built:
    x, y = torch.randn(2, 8).to(size.dtype)
    return lambda x, y: x + y, {"x": x, "y": y}


MODELS: Mapping[str, Model] = {
    "mobilebert": Model("MobileBERT, question answering (24 layers)", _mobilebert),
    "bert": Model("BERT base (12 layers of 768)", _bert),
    "gpt2": Model("GPT-2, language-model head (12 layers of 768)", _gpt2),
    "t5": Model("T5 small, encoder and decoder (6 layers each of 512)", _t5),
    "llama": Model("a small Llama (8 layers of 512)", _llama),
    "resnet50": Model("ResNet-50 on 224x224 images", _resnet50),
    "vit": Model("ViT base on 224x224 images", _vit),
    "convnext": Model("ConvNeXt tiny on 224x224 images", _convnext),
    "mobilenet": Model("MobileNetV2 on 224x224 images", _mobilenet),
    "whisper": Model("Whisper tiny on 30 seconds of audio", _whisper),
    "foo1": Model("neg, maximum, cat on 8390x8 uint8", _foo1, sized=False),
    "foo2": Model("neg, maximum, cat on 8390x8", _foo2, sized=False),
    "addaddmuladd": Model("add, add, mul, add on 16384x512: memory-bound", _addaddmuladd, sized=False),
    "softmax": Model("softmax over the last axis of 8x12x512x512", _softmax, sized=False),
    "pointwise_small": Model("one add of 8 numbers: the cost of a call", _pointwise_small, sized=False),
}
