"""The benchmark's ten models with two layers each and narrow widths: every kind of layer, a few seconds to compile.

`pellucid.kit.bench.models` builds them at full size. Widths are no multiples of the vector width where a model
allows it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

SEED = 11
VOCABULARY = 199

Made = tuple[nn.Module, dict[str, Tensor]]


def build_small(name: str, dtype: torch.dtype = torch.float32) -> Made:
    """The model `name` in evaluation mode, with its inputs; the same numbers each time, whatever the dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module, inputs = SMALL[name]()
        for _, buffer in module.named_buffers():
            if buffer.is_floating_point() and buffer.ndim == 1:  # running statistics as training leaves them
                buffer.add_(torch.rand_like(buffer) * 0.1)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    return module.to(dtype).eval(), inputs


def tokens(batch: int = 2, length: int = 21) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def images(batch: int = 2, side: int = 64) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def mobilebert() -> Made:
    config = hf.MobileBertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=120, embedding_size=40,
                                 intermediate_size=72, intra_bottleneck_size=72)  # fmt: skip
    return hf.MobileBertForQuestionAnswering(config), {"input_ids": tokens()}


def bert() -> Made:
    config = hf.BertConfig(vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=72, intermediate_size=144)
    return hf.BertModel(config), {"input_ids": tokens()}


def gpt2() -> Made:
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_layer=2, n_embd=72, n_head=4, n_positions=256, use_cache=False,
                           bos_token_id=0, eos_token_id=None)  # fmt: skip
    return hf.GPT2LMHeadModel(config), {"input_ids": tokens()}


def t5() -> Made:
    config = hf.T5Config(vocab_size=VOCABULARY, num_layers=2, d_model=72, d_ff=144, d_kv=18, num_heads=4,
                         use_cache=False, decoder_start_token_id=0)  # fmt: skip
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens(), "decoder_input_ids": tokens(length=13)}


def llama() -> Made:
    config = hf.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=72, intermediate_size=136,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                            use_cache=False, bos_token_id=0, eos_token_id=None)  # fmt: skip
    return hf.LlamaForCausalLM(config), {"input_ids": tokens()}


def resnet() -> Made:
    config = hf.ResNetConfig(embedding_size=20, hidden_sizes=[24, 40], depths=[2, 1])
    return hf.ResNetForImageClassification(config), images(batch=8)  # with fewer, batch norm amplifies rounding


def vit() -> Made:
    config = hf.ViTConfig(num_hidden_layers=2, hidden_size=72, num_attention_heads=4, intermediate_size=144,
                          image_size=64, patch_size=16)  # fmt: skip
    return hf.ViTForImageClassification(config), images()


def convnext() -> Made:
    config = hf.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[20, 24, 40, 56])
    return hf.ConvNextForImageClassification(config), images()


def mobilenet() -> Made:
    return hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(depth_multiplier=0.35, image_size=64)), images()


def whisper() -> Made:
    config = hf.WhisperConfig(vocab_size=VOCABULARY, d_model=72, encoder_layers=2, decoder_layers=2,
                              encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=144,
                              decoder_ffn_dim=144, max_source_positions=50, max_target_positions=64, use_cache=False,
                              pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                              suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    features = torch.randn(2, config.num_mel_bins, 100)
    return hf.WhisperForConditionalGeneration(config), {"input_features": features, "decoder_input_ids": tokens()}


SMALL: dict[str, Callable[[], Made]] = {
    make.__name__: make for make in (mobilebert, bert, gpt2, t5, llama, resnet, vit, convnext, mobilenet, whisper)
}
