"""`cosim`: the planted kernel is the first divergence; healthy programs have none."""

from __future__ import annotations

import pytest
import torch

from pellucid import pipeline
from pellucid.capture.decompositions import decompositions
from pellucid.codegen import cpp
from pellucid.codegen.linemap import Writer
from pellucid.kit.debug.cosim import Against, cosim_case, cosim_graphs, cosim_isolated
from pellucid.kit.debug.simulation import COMPLETE, LIVE
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.registry import subject_of
from tests.kit.faults import FAULTS
from tests.kit.planted import doubled, drop_clone, drop_relu, streamed
from tests.kit.planted_models import cubic
from tests.kit.score import MEMORY, names_it, reads_it, request_of, seconds_of, shows_in_kernels
from tests.small_models import build_small

GELU = torch.ops.aten.gelu_backward.default
QUICK = {"pellucid_lowering_flip"}
WRONG = [name for name, fault in FAULTS.items() if shows_in_kernels(fault)]
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRONG]


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [COMPLETE, LIVE])
@pytest.mark.parametrize("name", FAULTY)
def test_the_first_divergence_is_the_planted_one(name, mode):
    fault = FAULTS[name]
    found = cosim_isolated(request_of(fault), mode, seconds_of(fault), MEMORY)
    first = found.first_divergence
    assert first is not None and names_it(fault, (first.operator,)) and reads_it(fault, (first.operator_line,))
    wrong = [each for each in found.differences if not each.verdict.good]
    if mode == COMPLETE:  # each fault for itself: nothing but the kernels that hold it
        assert len({each.kernel for each in wrong} - {"result"}) == 1


BEFORE = ("dynamo", "joint graph", "decompositions", "layout")
QUICK_BEFORE = {"pellucid_decomposition_of_a_gradient", "pellucid_partitioner"}
EARLIER = [
    pytest.param(name, marks=() if name in QUICK_BEFORE else pytest.mark.slow)
    for name, fault in FAULTS.items()
    if fault.verdict == "wrong" and fault.component in BEFORE
]


@pytest.mark.sampled
@pytest.mark.parametrize("name", EARLIER)
def test_a_fault_before_the_graphs_is_named_with_its_operator_and_component(name):
    fault = FAULTS[name]
    first = cosim_isolated(request_of(fault), COMPLETE, seconds_of(fault), MEMORY).first_divergence
    assert first is not None and (first.graph, first.kernel) == ("", fault.component)
    assert not fault.culprit or (names_it(fault, (first.fx_node,)) and reads_it(fault, (first.user_line,)))


def test_a_gradient_is_not_taken_for_what_came_before(monkeypatch):
    """Two linear layers of one input look at it in the same way; the graph does so once, the backward pass again."""
    table, gelu = decompositions(), torch.nn.functional.gelu
    monkeypatch.setitem(table, GELU, cubic(table[GELU]))

    def function(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.linear(x, one)
        return gelu(h) + gelu(torch.nn.functional.linear(x, other))

    args = [torch.randn(shape, requires_grad=True) for shape in ((2, 5, 8), (8, 8), (8, 8))]
    first = cosim_case(Case("f", function, args), subject_of("pellucid"), backward=True).first_divergence
    assert first is not None and (first.kernel, first.fx_node) == ("decompositions", "gelu_backward")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pellucid_stale_weight", "inductor_stale_weight"])
def test_what_was_kept_from_the_first_call_is_a_divergence(name):
    first = cosim_isolated(request_of(FAULTS[name]), COMPLETE).first_divergence
    assert first is not None and FAULTS[name].culprit in first.fx_node


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_training_step_has_no_divergence(backend):
    module, inputs = build_small("gpt2")
    case = Case("gpt2", module.train(False), (), inputs)
    found = cosim_case(case, subject_of(backend), backward=True)
    assert found.verdict.good, found.first_divergence
    assert {each.graph.partition("_")[0] for each in found.differences} == {"forward", "backward"}


def test_random_numbers_and_changed_inputs_are_no_divergence():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.mul_(2)
        return torch.nn.functional.dropout(x.exp(), 0.5) + torch.rand(4) + y

    found = cosim_case(Case("f", function, (torch.randn(3, 4), torch.randn(4))), subject_of("pellucid"), LIVE)
    assert found.verdict.good, found.first_divergence


def test_dropout_is_judged_by_its_own_input():
    """In the live mode its input differs from eager's, by roundings that add up."""

    def function(x: torch.Tensor) -> torch.Tensor:
        noise = x.exp().sum(-1, keepdim=True) - x.flip(-1).exp().sum(-1, keepdim=True)
        return torch.nn.functional.dropout((x * noise * 1e6).sin(), 0.3) @ x.t()

    found = cosim_case(Case("f", function, (torch.randn(64, 257),)), subject_of("pellucid"), LIVE)
    assert found.verdict.good, found.first_divergence


def test_results_that_share_memory_are_a_divergence(monkeypatch):
    transform = pipeline.transform

    def without_clone(module):
        passed, decisions = transform(module)
        drop_clone(passed.graph)
        passed.recompile()
        return passed, decisions

    assert cosim_case(Case("f", *doubled()), subject_of("pellucid")).verdict.good
    monkeypatch.setattr(pipeline, "transform", without_clone)
    first = cosim_case(Case("f", *doubled()), subject_of("pellucid")).first_divergence
    assert first is not None and first.fx_node == "clone" and "planted.py:" in first.user_line
    assert first.judgement.why == "it shares memory with output 0, but not in eager"


@pytest.mark.sampled
def test_a_size_that_is_burned_into_a_kernel_shows_in_a_later_call(monkeypatch):
    assert cosim_case(Case("f", *streamed()), subject_of("pellucid")).verdict.good

    def burned(self, text, *more):
        line(self, text.replace("int64_t(s0)", "int64_t(9)"), *more)

    line = Writer.line
    monkeypatch.setattr(Writer, "line", burned)
    first = cosim_case(Case("f", *streamed()), subject_of("pellucid")).first_divergence
    assert first is not None and first.kernel != "result" and "planted.py:" in first.user_line


@pytest.mark.parametrize("mode", [COMPLETE, LIVE])
def test_a_wrong_pass_shows_beside_random_numbers(mode, monkeypatch):
    def without_relu(module):
        passed, decisions = transform(module)
        drop_relu(passed.graph)
        passed.recompile()
        return passed, decisions

    transform = pipeline.transform
    monkeypatch.setattr(pipeline, "transform", without_relu)
    case = Case("f", lambda x: (x.sin().relu() * 2, torch.rand(3) + 1), (torch.randn(9, 7),))
    first = cosim_case(case, subject_of("pellucid"), mode).first_divergence
    assert first is not None and first.fx_node == "relu"


def twice_for_neg(monkeypatch):
    """Pellucid's `neg` prints a sum."""
    value = cpp._Printer.value

    def wrong(self, line):
        return "pv::add(v0, v0)" if getattr(line.rhs, "op", "") == "neg" else value(self, line)

    monkeypatch.setattr(cpp._Printer, "value", wrong)


def of_neg(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp().sum(-1).sin()


@pytest.mark.parametrize("mode", [COMPLETE, LIVE])
@pytest.mark.parametrize("against", [None, "eager"])
def test_what_no_kernel_stored_may_be_what_is_wrong(mode, against, monkeypatch):
    """`neg` is wrong, and never lies in memory: the kernel's result is not the only suspect."""
    twice_for_neg(monkeypatch)
    subject, case = subject_of("pellucid"), Case("f", of_neg, (torch.randn(5, 7),))
    other = None if against is None else Against("none", lambda graph, mode: {})
    first = cosim_graphs(subject.graphs(case), subject, mode, against=other).first_divergence
    assert first is not None and [each.fx_node for each in first.unobserved] == ["neg", "exp", "sum_1"]
    assert {each.user_line.rpartition(":")[0] for each in first.unobserved} == {__file__}


def test_what_only_this_code_stored_is_judged_all_the_same(monkeypatch):
    """Each result is replaced by eager's, so a wrong one that the other code did not store would show nowhere else."""
    twice_for_neg(monkeypatch)
    subject = subject_of("pellucid", {"fusion": False})
    case = Case("f", of_neg, (torch.randn(5, 7),))
    exact = of_neg(*case.args)
    other = Against("other", lambda graph, mode: {"output 0": exact, "sin": exact})
    first = cosim_graphs(subject.graphs(case), subject, against=other).first_divergence
    assert first is not None and first.fx_node == "neg" and not first.unobserved


def test_good_results_have_no_suspects():
    case = Case("f", of_neg, (torch.randn(5, 7),))
    found = cosim_case(case, subject_of("pellucid"))
    assert found.good and not any(each.unobserved for each in found.differences)
