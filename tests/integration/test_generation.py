"""Token by token: the same tokens and the same cache as eager, and no compilation once the loop runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import Cache

from pellucid.backend import last_compilations
from tests.small_models import VOCABULARY, build_small
from tests.support import assert_matches

NAMES = ("llama", "gpt2")
BATCH, PROMPT, NEW, LONGEST = 2, 9, 16, 40


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def language_model(name: str) -> nn.Module:
    """Weights large enough that the best token leads by more than rounding, and changes from place to place."""
    model, _ = build_small(name)
    model.config.use_cache = model.generation_config.use_cache = True
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def prompt(length: int = PROMPT) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(length))


def static_cache(model: nn.Module) -> StaticCache:
    """Its tensors are made at once: made in the compiled prefill, they would be outputs of that graph first."""
    cache, config = StaticCache(config=model.config, max_cache_len=LONGEST), model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    dtype = next(model.parameters()).dtype
    cache.early_initialization(
        BATCH, heads, config.hidden_size // config.num_attention_heads, dtype, torch.device("cpu")
    )
    return cache


def decode(call: Callable[..., Any], cache: Cache, start: Tensor, new: int = NEW) -> tuple[Tensor, list[int]]:
    """Greedy tokens after `start`, and the number of graphs compiled until after each forward pass."""
    tokens, compilations, given = [start], [], start
    for _ in range(new):
        with torch.no_grad():
            logits = call(input_ids=given, past_key_values=cache, use_cache=True).logits
        given = logits[:, -1:].argmax(-1)
        tokens.append(given)
        compilations.append(len(last_compilations()))
    return torch.cat(tokens, 1), compilations


def contents(cache: Cache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def compiled(model: nn.Module, **settings: Any) -> Any:
    return torch.compile(model, backend="pellucid", options={"verify": True}, **settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_static_cache(name: str) -> None:
    """Two graphs, one for the prompt and one for a token; other sequences of the same length need no more."""
    model = language_model(name)
    run, wide, before = compiled(model), copy.deepcopy(model).double(), len(last_compilations())
    for start in (prompt(), prompt().flip(1)):
        caches = [static_cache(model), static_cache(model), static_cache(wide)]
        expected, _ = decode(model, caches[1], start)
        exact, _ = decode(wide, caches[2], start)
        assert torch.equal(expected, exact), "rounding decides between tokens: the comparison would say nothing"
        actual, compilations = decode(run, caches[0], start)
        assert torch.equal(actual, expected)
        assert len(actual[:, PROMPT:].unique()) > 4, "a model that repeats itself shows nothing"
        assert_matches(*(contents(cache) for cache in caches))
        assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length()) == PROMPT + NEW - 1
        assert compilations == [min(compilations[0], before + 2), *[before + 2] * (NEW - 1)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_generate_with_a_static_cache(name: str) -> None:
    """`generate` runs the prompt in eager mode and compiles the step for one token, once for all calls."""
    model = language_model(name)
    settings = CompileConfig(backend="pellucid", mode="default", fullgraph=True)
    settings._compile_all_devices = True  # transformers compiles for GPUs only, unless it is told
    arguments: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": "static"}
    before = len(last_compilations())
    for length in (PROMPT, 5):
        start = prompt(length)
        mask = torch.ones_like(start)
        expected = model.generate(start, attention_mask=mask, disable_compile=True, **arguments)
        actual = model.generate(start, attention_mask=mask, compile_config=settings, **arguments)
        assert torch.equal(actual, expected)
        assert len(actual[:, length:].unique()) > 4
        if length == PROMPT:
            assert len(last_compilations()) == before + 1


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_growing_cache(name: str) -> None:
    """The cache is an input and an output of every step, and one longer each time."""
    model = language_model(name)
    run, before = compiled(model, dynamic=True), len(last_compilations())
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    actual, compilations = decode(run, caches[0], prompt())
    expected, _ = decode(model, caches[1], prompt())
    assert torch.equal(actual, expected)
    for ours, theirs in zip(*map(contents, caches), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert compilations[-1] <= before + 3 and compilations[2:] == [compilations[-1]] * (NEW - 2)
