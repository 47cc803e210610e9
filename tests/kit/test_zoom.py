"""What is wrong inside a kernel is named: the operator, its line, the fusion that makes the fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pellucid.kit.debug.bisect import same_failure
from pellucid.kit.debug.check import Checked, Culprit
from pellucid.kit.debug.cosim import cosim_case, cosim_isolated
from pellucid.kit.debug.fusion import wrong_fusion
from pellucid.kit.debug.simulation import COMPLETE, LIVE
from pellucid.kit.debug.zoom import ALONE, SHORTEST
from pellucid.kit.judge.judge import Judgement, Output, Verdict, near
from pellucid.kit.process.child import Failure
from pellucid.kit.programs.case import Case
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.registry import subject_of
from pellucid.schedule import merge
from tests.kit.inside import FAULTS
from tests.kit.planted import centred

QUICK = {"pellucid_bert_erf"}
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


def chain(x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    h = torch.erf(h)
    return (h * 0.5).exp()


def case() -> Case:
    torch.manual_seed(0)
    return Case("chain", chain, (torch.randn(33, 40),))


def wrong_erf(monkeypatch, backend: str, when=lambda printer: True) -> None:
    """Vector erf is 3% off, in kernels of which `when` is true."""
    if backend == "inductor":
        from torch._inductor.codegen.cpp import CppVecOverrides

        monkeypatch.setattr(CppVecOverrides, "erf", staticmethod(lambda x: f"({x}.erf() * decltype({x})(1.03f))"))
        return
    from pellucid.codegen.cpp import _Printer

    original = _Printer.value

    def value(self, line):
        text = original(self, line)
        wide = getattr(line.rhs, "op", "") == "erf" and self.is_wide(line.out)
        return f"pv::mul({text}, pv::splat<{self.plan.width}>(1.03f))" if wide and when(self) else text

    monkeypatch.setattr(_Printer, "value", value)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [COMPLETE, LIVE])
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
def test_an_operator_inside_a_kernel_is_named(backend, mode, monkeypatch):
    wrong_erf(monkeypatch, backend)
    first = cosim_case(case(), subject_of(backend), mode).first_divergence
    assert first is not None and first.fx_node == "exp"  # what the kernel stores
    assert first.operator == "erf" and first.inner.values == 4 and first.inner.seen_in == ALONE
    line, _, code = first.operator_line.rpartition(":")
    assert line == __file__ and "erf" in Path(__file__).read_text().splitlines()[int(code) - 1]
    assert first.inner.scalar == ("erf" if backend == "pellucid" else "")


def test_what_shares_a_loop_with_a_wrong_value_is_looked_at(monkeypatch):
    """A sum whose part lies in memory before it, but is computed in the same loop."""

    def shared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.erf(x.sin().view(-1, 4)) * 2
        return h, h.exp().sum()

    wrong_erf(monkeypatch, "pellucid")
    first = cosim_case(Case("shared", shared, case().args), subject_of("pellucid"), dynamic=True).first_divergence
    assert first is not None and first.operator == "erf"


def test_a_fault_that_goes_when_more_is_stored_is_named(monkeypatch):
    def stores_once(printer) -> bool:
        return len([*printer.plan.kernel.stores()]) == 1

    wrong_erf(monkeypatch, "pellucid", stores_once)
    first = cosim_case(case(), subject_of("pellucid")).first_divergence
    assert first is not None and (first.operator, first.inner.seen_in) == ("erf", SHORTEST)


def test_values_that_cancel_are_no_wrong_scalar():
    def normed(x):
        return torch.nn.functional.layer_norm(x, (40,))

    subject = subject_of("pellucid")
    (graph,) = subject.graphs(Case("normed", normed, case().args))
    assert subject.compile(graph).wrong_scalar("native_layer_norm", graph.inputs, near) == ""


def test_the_fusion_that_makes_a_fault(monkeypatch):
    subject = subject_of("pellucid")
    (graph,) = subject.graphs(Case("centred", *centred()))
    assert wrong_fusion(graph, subject) is None
    monkeypatch.setattr(merge, "_check_forwarding", lambda stored, tail, apart: None)
    found = wrong_fusion(graph, subject)
    assert found is not None and (found.first, found.second) == (("exp",), ("sub",))


def test_fusions_are_made_up_to_a_limit():
    def normed(x):
        h = x - x.mean(-1, keepdim=True)
        return h / h.square().sum(-1, keepdim=True).sqrt()

    subject = subject_of("pellucid")
    (graph,) = subject.graphs(Case("normed", normed, case().args))
    every = subject.compile(graph).fusions()
    assert len(every) > 2
    assert [subject.fusing(most).compile(graph).fusions() for most in (0, 2)] == [(), every[:2]]


def test_lines_of_one_kernel_are_not_taken_for_those_of_another():
    """Inductor counts its variables from 0 in each kernel, so different kernels have the same text."""

    def twice(x, w):
        return ((x.sin() + 1) @ w).cos() + 1

    subject = subject_of("inductor")
    (graph,) = subject.graphs(Case("twice", twice, (torch.randn(24, 24), torch.randn(24, 24))))
    kernels = [step for step in subject.compile(graph).steps if step.generated]
    assert len(kernels) == 2
    for step in kernels:
        told = {node for origin in step.lines for node in origin.nodes}
        assert told and told <= set(step.origin.nodes)


def checked(verdict: Verdict, outputs: str = "", what: str = "", nodes: tuple[str, ...] = ()) -> Checked:
    made = tuple(Output(name, (), "float32", Judgement(verdict)) for name in outputs)
    failure = Failure(verdict.value, what) if what else None
    return Checked("pellucid", verdict, made, failure, step=Culprit("g", "k", "", nodes, ()) if nodes else None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (checked(Verdict.WRONG, "ab"), checked(Verdict.WRONG, "bc"), True),
        (checked(Verdict.WRONG, "a"), checked(Verdict.WRONG, "b"), False),
        (checked(Verdict.WRONG, "a"), checked(Verdict.ERROR, what="ValueError"), False),
        (checked(Verdict.ERROR, what="KeyError"), checked(Verdict.ERROR, what="ValueError"), False),
        (checked(Verdict.CRASH, "", "SIGSEGV", ("neg", "add")), checked(Verdict.CRASH, "", "SIGABRT", ("add",)), True),
        (checked(Verdict.CRASH, "", "SIGSEGV", ("neg",)), checked(Verdict.CRASH, "", "SIGSEGV", ("add",)), False),
    ],
)
def test_a_failure_on_a_rung_is_the_same_or_another(one, other, same):
    assert same_failure(one, other) is same


def request(name: str) -> Request:
    fault = FAULTS[name]
    return Request(f"{Path(__file__).parent}/inside.py:{name}", fault.subject, backward=fault.backward)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTY)
def test_cosim_names_the_operator_inside_a_kernel_of_a_model(name):
    first = cosim_isolated(request(name), COMPLETE).first_divergence
    assert first is not None and FAULTS[name].culprit in first.operator and first.operator_line
    if FAULTS[name].scalar:
        assert first.inner is not None and first.inner.scalar == FAULTS[name].scalar
