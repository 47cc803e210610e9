"""Whole models: as accurate as eager, few fallbacks, equal layers compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pellucid.backend import last_compilations
from pellucid.bench.models import Size, build
from pellucid.ir.nodes import Extern
from pellucid.pipeline import compile_graph
from tests.support import error, tensors

MODELS = ("mobilebert", "bert", "gpt2")

# The only operators that may call ATen: matrix multiplication and attention.
ALLOWED = {"aten::addmm.out", "aten::mm.out", "aten::bmm.out", "aten::baddbmm.out",
           "aten::_scaled_dot_product_flash_attention_for_cpu.default"}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_as_accurate_as_eager(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks: set[str] = set()

    def recording(*args: Any) -> Any:
        executable, record = compile_graph(*args)
        fallbacks.update(node.op for node in record.scheduled.nodes if isinstance(node, Extern))
        return executable, record

    monkeypatch.setattr("pellucid.backend.compile_graph", recording)
    torch._dynamo.reset()
    workload = build(name, Size(dtype=dtype))
    wide = workload.as_float64()
    model = torch.compile(workload.fn, backend="pellucid", options={"verify": True})
    with torch.no_grad():
        eager = tensors(workload.fn(**workload.inputs).to_tuple())
        exact = tensors(wide.fn(**wide.inputs).to_tuple())
        compiled = tensors(model(**workload.inputs).to_tuple())
    assert len(eager) == len(exact) == len(compiled) > 0
    for ours, theirs, reference in zip(compiled, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        floor = 1e-6 if dtype is torch.float32 else 1e-3
        assert error(ours, reference) <= 2 * error(theirs, reference) + floor
    assert fallbacks <= ALLOWED
    compilation = last_compilations()[-1]
    assert compilation.distinct < compilation.kernels / 2, "equal layers are to be compiled once"
