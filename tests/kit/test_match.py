"""`match`: each kernel with what it implements."""

from __future__ import annotations

import pytest

from pellucid.debug.case import Case
from pellucid.debug.match import Matches, match_graphs
from pellucid.debug.subjects import subject_of
from tests.kit.planted import negated
from tests.small_models import build_small


def matched(backend: str, case: Case, backward: bool = False) -> Matches:
    subject = subject_of(backend)
    return match_graphs(subject.graphs(case, backward=backward), subject)


@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_the_tutorials_kernel(backend):
    (kernel,) = matched(backend, Case("foo", *negated())).kernels
    assert [op for op in kernel.ir_ops if op != "load"] == ["neg", "maximum"]
    assert kernel.fx_nodes[:2] == ("neg = aten.neg.default", "maximum = aten.maximum.default")
    assert all("planted.py:" in line for line in kernel.user_lines)
    (line,) = [line for line in kernel.annotated.splitlines() if "neg(" in line.partition("//")[0]]
    assert "// neg" in line and 0 < kernel.glue < kernel.lines


@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_kernel_of_a_training_step(backend):
    module, inputs = build_small("bert")
    found = matched(backend, Case("bert", module, (), inputs), backward=True)
    assert found.good and len(found.kernels) > 10
    assert {kernel.graph.partition("_")[0] for kernel in found.kernels} == {"forward", "backward"}
