"""Loop nests of what models are made of: calls that compute products, convolutions and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pellucid import pipeline
from pellucid.codegen.nest import Call, Part, steps_of
from pellucid.codegen.nest_text import parse_nest, print_nest
from pellucid.ir.interp import run_kernel, size_of
from pellucid.ir.nodes import Kernel
from pellucid.ir.types import TORCH_DTYPES
from pellucid.trace.record import GraphRecord
from tests.support import compiled, error, images, randn, run_loops

MOST_POINTS = 20_000
"""Of what Python runs over; calls are evaluated as a whole."""


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads(*shape: int) -> torch.Tensor:
    return randn(*shape).requires_grad_()


# By name: a function, its arguments, and how many of its kernels at least call what computes blocks or rows.
CASES: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, ...], int]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)), (randn(40, 64),), 5),
    "bf16": (lambda: nn.Linear(64, 48).bfloat16(), (randn(40, 64, dtype=torch.bfloat16),), 2),
    "few rows": (lambda: nn.Linear(300, 200), (randn(2, 300),), 2),
    "first layer": (lambda: nn.Conv2d(3, 32, 7, 2, 3), (images(1, 3, 16, 16),), 1),
    "tiles": (lambda: nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()), (images(1, 32, 12, 12),), 2),
    "groups": (lambda: nn.Conv2d(32, 64, 3, 2, 1, groups=4), (images(1, 32, 12, 12),), 1),
    "narrow groups": (lambda: nn.Conv2d(64, 64, 3, 1, 1, groups=32), (images(1, 64, 8, 8),), 1),
    "depthwise": (
        lambda: nn.Sequential(nn.Hardswish(), nn.Conv2d(64, 64, 3, 1, 1, groups=64)),
        (images(1, 64, 8, 8),),
        2,
    ),
    "causal": (lambda: causal, (heads(2, 4, 70, 32), heads(2, 4, 70, 32), heads(2, 4, 70, 32)), 2),
    "masked": (
        lambda: attention,
        (heads(2, 4, 70, 32), heads(2, 2, 90, 32), heads(2, 2, 90, 32), randn(1, 1, 70, 90)),
        2,
    ),
}


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[GraphRecord]:
    """What was compiled since, one for each program."""
    found: list[GraphRecord] = []

    def recording(*args: Any) -> Any:
        executable, record = pipeline.compile_graph(*args)
        found.extend(record.programs)
        return executable, record

    monkeypatch.setattr("pellucid.backend.compile_graph", recording)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_nests_of_models_run_as_the_interpreter_says(name: str, records: list[GraphRecord]) -> None:
    make, args, calls = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    result = compiled(make(), dynamic=False)(*args)
    result.sum().backward()
    called = 0
    for record in records:
        for kernel in (node for node in record.scheduled.nodes if isinstance(node, Kernel)):
            native = record.kernels[kernel.name]
            nest = native.nest_of(kernel.name)
            assert parse_nest(print_nest(nest)) == nest
            ours = [step for step in steps_of(nest.body) if isinstance(step, Call)]
            called += len(ours)
            if not ours and math.prod(axis.extent.value or 1 for axis in kernel.space) > MOST_POINTS:
                continue
            check_nest(kernel, native)
    assert called >= calls


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["first layer", "tiles", "groups", "depthwise"])
def test_nests_of_images_of_any_size_run_as_the_interpreter_says(name: str, records: list[GraphRecord]) -> None:
    make, (image,), _ = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.cat([image, image])
    for dim in (0, 2, 3):
        torch._dynamo.mark_dynamic(x, dim)
    with torch.no_grad():
        compiled(make())(x)
    program = records[-1].scheduled
    kernels = [node for node in program.nodes if isinstance(node, Kernel)]
    assert any(Part.PIECE in native.plan.pieces for native in records[-1].kernels.values())
    for sizes in ((2, 5, 7), (2, 2, 246), (2, 9, 3)):
        symbols = dict(zip(program.symbols, sizes, strict=True))
        for kernel in kernels:
            nest = records[-1].kernels[kernel.name].nest_of(kernel.name)
            assert parse_nest(print_nest(nest)) == nest
            check_nest(kernel, records[-1].kernels[kernel.name], symbols)


def check_nest(kernel: Kernel, native: Any, symbols: Mapping[str, int] | None = None) -> None:
    """The nest of a kernel computes what the kernel says, whichever iteration runs first."""
    symbols = symbols or {}
    buffers = {
        param.name: randn(size_of(param.numel, symbols)).to(TORCH_DTYPES[param.dtype]).clone()
        for param in kernel.params
    }
    expected = {name: tensor.clone() for name, tensor in buffers.items()}
    run_kernel(kernel, expected, symbols)
    for backwards in (False, True):
        actual = run_loops(native, buffers, symbols, backwards=backwards)
        for name, tensor in expected.items():
            assert error(actual[name], tensor) <= 1e-4, name
