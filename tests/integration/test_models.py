"""Whole models: as accurate as eager, few fallbacks, equal layers compiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pellucid.backend import last_compilations
from pellucid.kit.bench.models import Size, build
from pellucid.kit.programs.graphs import case_in
from tests.small_models import SMALL, build_small
from tests.support import error, recorded_fallbacks, tensors

FULL_SIZE = ("mobilebert", "bert", "gpt2", "t5", "llama", "resnet50", "vit", "convnext", "mobilenet", "whisper")
DTYPES = [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16")]

# The only operators that may call ATen: matrix multiplication, convolution and attention.
ALLOWED = {"aten::addmm.out", "aten::mm.out", "aten::bmm.out", "aten::baddbmm.out", "aten::convolution.default",
           "aten::_scaled_dot_product_flash_attention_for_cpu.default"}  # fmt: skip


def widened(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def check(model: Callable[..., Any], wide: Callable[..., Any], inputs: dict[str, torch.Tensor], floor: float) -> None:
    """Results at most twice as far from float64 as eager's, nothing left to ATen but what is allowed."""
    torch._dynamo.reset()
    with torch.no_grad(), recorded_fallbacks() as fallbacks:
        run = torch.compile(model, backend="pellucid", options={"verify": True})
        compiled = tensors(run(**inputs).to_tuple())
        again = tensors(run(**inputs).to_tuple())
        eager, exact = tensors(model(**inputs).to_tuple()), tensors(wide(**widened(inputs)).to_tuple())
    assert len(eager) == len(exact) == len(compiled) == len(again) > 0
    for ours, repeated, theirs, reference in zip(compiled, again, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours, repeated)
        assert error(ours, reference) <= 2 * error(theirs, reference) + floor
    assert fallbacks.keys() <= ALLOWED


def floor_of(dtype: torch.dtype) -> float:
    return 1e-6 if dtype is torch.float32 else 1e-3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # What is particular to bf16 is the same in all models of convolutions.
        pytest.param(name, dtype.values[0], id=f"{name}-{dtype.id}", marks=pytest.mark.slow if slow else ())
        for name in SMALL
        for dtype in DTYPES
        for slow in [name in ("mobilenet", "convnext", "whisper") and dtype.id == "bf16"]
    ],
)
def test_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    model, inputs = build_small(name, dtype)
    check(model, copy.deepcopy(model).double(), inputs, floor_of(dtype))
    if name == "mobilebert":
        compilation = last_compilations()[-1]
        assert compilation.distinct < compilation.kernels / 2, "equal layers are to be compiled once"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FULL_SIZE)
def test_as_accurate_as_eager_at_full_size(name: str, dtype: torch.dtype) -> None:
    case = build(name, Size(dtype=dtype))
    check(case.fn, case_in(case, torch.float64).fn, dict(case.kwargs), floor_of(dtype))
    compilation = last_compilations()[-1]
    assert compilation.distinct < compilation.kernels


def test_several_models_one_after_the_other() -> None:
    """What one model leaves behind (arenas, pool blocks, kernels) serves the next; the first still runs."""
    torch._dynamo.reset()
    made = {name: build_small(name) for name in ("bert", "gpt2", "vit")}
    runs = {name: torch.compile(model, backend="pellucid") for name, (model, _) in made.items()}
    with torch.no_grad():
        first = {name: tensors(run(**made[name][1]).to_tuple()) for name, run in runs.items()}
        expected = {name: [tensor.clone() for tensor in result] for name, result in first.items()}
        for _ in range(3):
            for name, run in runs.items():
                again = tensors(run(**made[name][1]).to_tuple())
                assert all(torch.equal(a, b) for a, b in zip(again, expected[name], strict=True))
    for name, (model, inputs) in made.items():
        with torch.no_grad():
            eager = tensors(model(**inputs).to_tuple())
        for ours, kept, theirs in zip(first[name], expected[name], eager, strict=True):
            assert torch.equal(ours, kept), "later calls left earlier results alone"
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_threads_share_one_compiled_model() -> None:
    """Each thread has its own inputs, sizes among them, and gets its own results."""
    torch._dynamo.reset()
    model, _ = build_small("llama")
    run = torch.compile(model, backend="pellucid", dynamic=True)
    batches = [torch.randint(199, (2 + i % 3, 5 + 7 * i)) for i in range(6)]
    with torch.no_grad():
        expected = [run(input_ids=batch).logits for batch in batches]

    def work(position: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(run(input_ids=batches[position]).logits, expected[position]) for _ in range(10))

    with ThreadPoolExecutor(len(batches)) as pool:
        assert all(pool.map(work, range(len(batches))))
