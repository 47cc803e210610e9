"""The functions of the Inductor CPU tutorial, and what a call costs in memory."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid.backend import last_compilations
from pellucid.kit.bench.models import build
from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import case_in
from tests.support import error


def compile_case(name: str) -> tuple[Case, Callable[..., Any]]:
    torch._dynamo.reset()
    case = build(name)
    return case, torch.compile(case.fn, backend="pellucid", options={"verify": True})


def minor_faults(call: Callable[[], object], calls: int) -> float:
    """Minor page faults per call, once everything is warm."""
    for _ in range(5):
        call()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls


@pytest.mark.parametrize("name", ["foo1", "foo2"])
def test_neg_maximum_cat_is_exact(name: str) -> None:
    case, compiled = compile_case(name)
    assert torch.equal(compiled(**case.kwargs), case())
    assert last_compilations()[-1].kernels == 1 and last_compilations()[-1].fallbacks == 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["addaddmuladd", "softmax"])
def test_one_kernel_as_accurate_as_eager(name: str) -> None:
    case, compiled = compile_case(name)
    exact = case_in(case, torch.float64)()
    assert error(compiled(**case.kwargs), exact) <= 2 * error(case(), exact) + 1e-7
    assert last_compilations()[-1].kernels == 1 and last_compilations()[-1].fallbacks == 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["addaddmuladd", "softmax", "foo2"])
def test_large_outputs_that_are_dropped_take_no_page_faults(name: str) -> None:
    case, compiled = compile_case(name)
    with torch.no_grad():
        assert minor_faults(lambda: compiled(**case.kwargs), 20) < 2


def test_temporaries_take_no_page_faults() -> None:
    """A large temporary between two matrix products lies in the arena."""
    x, w = torch.randn(2048, 512), torch.randn(512, 2048)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: torch.relu(x @ w).mm(w.t()), backend="pellucid")
    with torch.no_grad():
        assert minor_faults(lambda: compiled(x, w), 20) < 2
