"""Sums of many narrow floats at few places: as exact as eager's, which adds them in f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import assert_matches, recorded_fallbacks, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

SCATTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, at, source: x.index_add(0, at, source),
    "index_add_along_rows": lambda x, at, source: x.T.contiguous().index_add(1, at, source.T),
    "scatter_add": lambda x, at, source: x.scatter_add(0, at[:, None].expand_as(source), source),
    "scatter_reduce": lambda x, at, source: x.scatter_reduce(0, at[:, None].expand_as(source), source, "sum"),
    "afresh": lambda x, at, source: x.scatter_reduce(
        0, at[:, None].expand_as(source), source, "sum", include_self=False
    ),
    "in_place": lambda x, at, source: x.clone().index_add_(0, at, source, alpha=2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCATTERS)
def test_many_numbers_at_few_places(name: str, dtype: torch.dtype) -> None:
    function: Any = SCATTERS[name]
    x, at, source = torch.randn(7, 24).to(dtype), torch.randint(0, 7, (3000,)), (torch.randn(3000, 24) * 10).to(dtype)
    torch._dynamo.reset()
    with recorded_fallbacks() as found:
        made = torch.compile(function, backend="pellucid", options={"verify": True})(x, at, source)
    assert not found
    assert_matches([made], [function(x, at, source)], [function(*widened([x, at, source]))])
    assert made.dtype is dtype
