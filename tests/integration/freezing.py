"""What tests of the option `freeze` share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support import assert_matches, widened


def frozen(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", options={"freeze": True, "verify": True, **options})


def agrees(compiled: Callable[..., Any], model: nn.Module, *args: Any) -> None:
    """The compiled model does what the model does now."""
    with torch.no_grad():
        assert_matches(compiled(*args), model(*args), copy.deepcopy(model).double()(*widened(args)))
