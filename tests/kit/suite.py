"""The models of the suite as targets of the kit: `tests/kit/suite.py:gpt2`, `tests/kit/suite.py:gpt2_training`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pellucid.kit.bench.models import Size, build

MODELS = ("mobilebert", "bert", "gpt2", "t5", "llama", "resnet50", "vit", "convnext", "mobilenet", "whisper")


def __getattr__(name: str) -> Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    model = name.removesuffix("_training")
    if model not in MODELS:
        raise AttributeError(name)

    def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        case = build(model, Size(train=name != model))
        return case.fn, (), case.kwargs

    return make
