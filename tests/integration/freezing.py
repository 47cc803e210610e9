"""What tests of the option `freeze` share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from pellucid import pipeline
from pellucid.trace.record import GraphRecord
from tests.support import assert_matches, widened


@contextmanager
def recorded() -> Iterator[list[GraphRecord]]:
    """The records of all graphs that are compiled meanwhile."""
    found: list[GraphRecord] = []

    def recording(*args: Any) -> Any:
        executable, record = pipeline.compile_graph(*args)
        found.append(record)
        return executable, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.backend.compile_graph", recording)
        yield found


def frozen(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="pellucid", options={"freeze": True, "verify": True, **options})


def agrees(compiled: Callable[..., Any], model: nn.Module, *args: Any) -> None:
    """The compiled model does what the model does now."""
    with torch.no_grad():
        assert_matches(compiled(*args), model(*args), copy.deepcopy(model).double()(*widened(args)))
