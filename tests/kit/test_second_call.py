"""`check` calls a program twice: what is wrong from the second call on shows, whatever zeros it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

from pellucid.debug import check
from pellucid.kit.judge.vary import nudge_in_place

FAULTY = "ten_percent_off_from_the_second_call_on"


@register_backend(name=FAULTY)
def faulty(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    calls = [0]

    def run(*args: Any) -> list[Any]:
        calls[0] += 1
        return [each * 1.1 if calls[0] > 1 else each for each in module(*args)]

    return run


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + self.shift


def relu_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.relu_().cos()


def sparse(n: int) -> torch.Tensor:
    x = torch.randn(8, n)
    x[3, 5] = 0.0
    return x


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "layer norm": lambda: (nn.LayerNorm(16), (torch.randn(8, 16),)),
    "batch norm": lambda: (nn.BatchNorm1d(16), (torch.randn(8, 16),)),
    "batch norm in use": lambda: (nn.BatchNorm1d(16).eval(), (torch.randn(8, 16),)),
    "a buffer of zeros": lambda: (Buffered(), (torch.randn(8, 16),)),
    "an input of zeros": lambda: (torch.cos, (torch.zeros(8, 16),)),
    "one zero in an input": lambda: (torch.cos, (sparse(16),)),
    "an embedding with padding": lambda: (nn.Embedding(9, 16, padding_idx=0), (torch.arange(8),)),
    "zeros that the first call makes": lambda: (relu_in_place, (torch.randn(8, 16),)),
    "zeros in f16": lambda: (nn.LayerNorm(16, dtype=torch.float16), (torch.randn(8, 16, dtype=torch.float16),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_of_the_second_call_is_found_where_a_parameter_or_input_is_0(name):
    torch.manual_seed(0)
    found = check(*PROGRAMS[name](), backend=FAULTY)
    assert {o.name for o in found.outputs if not o.verdict.good} == {"output 0 (again)"}
    assert check(*PROGRAMS[name](), backend="aot_eager").good


def test_zeros_are_not_nudged():
    x = torch.tensor([0.0, -0.0, 1.0])
    nudge_in_place([x], torch.Generator().manual_seed(0))
    assert torch.equal(x[:2], torch.zeros(2)) and x[1].signbit() and x[2] != 1
