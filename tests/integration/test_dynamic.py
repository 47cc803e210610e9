"""Models with `dynamic=True`: right at every size, and compiled at most twice."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from pellucid.backend import last_compilations
from pellucid.ir.nodes import Kernel, Program
from tests.small_models import VOCABULARY, build_small
from tests.support import assert_matches, interpreted, tensors

# (batch, length) or (batch, side): 1 first and later, sizes much larger than the first, and the first one again.
TOKENS = ((1, 16), (2, 21), (5, 64), (1, 7), (3, 200), (8, 33), (1, 130), (16, 5), (4, 2), (1, 16))
# PyTorch itself tells apart up to 15 images and more, and single images whose convolutions read up to 20480 elements
# and more: it chooses the convolution's implementation by them.
IMAGES = ((2, 64), (1, 64), (3, 96), (1, 33), (5, 48), (2, 224), (7, 40), (1, 100), (4, 65), (2, 64))
FIRST_LARGE = ((8, 100), *TOKENS[:9])


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (batch, length))}


def images(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side + side % 3)}


@pytest.mark.parametrize(
    ("name", "make", "sizes"),
    [
        ("bert", text, TOKENS),
        ("bert", text, FIRST_LARGE),
        ("llama", text, TOKENS),
        ("llama", text, FIRST_LARGE),
        ("resnet", images, IMAGES),
        ("resnet", images, IMAGES[1:]),
    ],
    ids=["bert", "bert-large-first", "llama", "llama-large-first", "resnet", "resnet-one-first"],
)
def test_ten_sizes_take_two_compilations(name: str, make: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    torch._dynamo.reset()
    model, _ = build_small(name)
    wide = copy.deepcopy(model).double()
    run = torch.compile(model, backend="pellucid", dynamic=True, options={"verify": True})
    before = len(last_compilations())
    for size in sizes:
        inputs = make(*size)
        exact = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        with torch.no_grad():
            assert_matches(*(tensors(call(**given)) for call, given in ((run, inputs), (model, inputs), (wide, exact))))
    assert len(last_compilations()) - before <= 2


def test_lines_are_not_named_as_sizes_are() -> None:
    """PyTorch's sizes are s and a number, ours s, u or n and a number."""
    programs: list[Program] = []
    interpreted(lambda x: x.sin().sum(0) + 1, programs, dynamic=True)(torch.randn(3, 4))
    kernels = [node for node in programs[0].nodes if isinstance(node, Kernel)]
    assert kernels and not any(re.fullmatch(r"[sun]\d+", line.out) for kernel in kernels for line in kernel.body)


def test_training_with_sizes_that_change() -> None:
    """Forward and backward are compiled at most twice each."""
    torch._dynamo.reset()
    model, _ = build_small("gpt2")
    model.loss_type = "ForCausalLM"  # without it transformers warns, and Dynamo breaks the graph there
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    run = torch.compile(model, backend="pellucid", dynamic=True, options={"verify": True})
    before = len(last_compilations())
    for size in ((2, 16), (1, 40), (5, 7), (3, 100), (1, 5)):
        inputs = text(*size)
        grads = []
        for module, call in ((model, run), (eager, eager), (wide, wide)):
            module.zero_grad()
            call(**inputs, labels=inputs["input_ids"]).loss.backward()
            grads.append([parameter.grad for parameter in module.parameters()])
        assert_matches(*grads)
    assert len(last_compilations()) - before <= 4
