"""`cosim`: the planted kernel is the first divergence; healthy programs have none."""

from __future__ import annotations

import pytest
import torch

from pellucid import pipeline
from pellucid.kit.debug.cosim import COMPLETE, LIVE, cosim_case, cosim_isolated
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.registry import subject_of
from tests.kit.planted import FAULTS, drop_relu
from tests.kit.score import MEMORY, request_of, seconds_of, shows_in_kernels
from tests.small_models import build_small

QUICK = {"pellucid_lowering_flip"}
WRONG = [name for name, fault in FAULTS.items() if shows_in_kernels(fault)]
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRONG]


@pytest.mark.parametrize("mode", [COMPLETE, LIVE])
@pytest.mark.parametrize("name", FAULTY)
def test_the_first_divergence_is_the_planted_one(name, mode):
    fault = FAULTS[name]
    found = cosim_isolated(request_of(fault), mode, seconds_of(fault), MEMORY)
    first = found.first_divergence
    assert first is not None and "planted.py:" in first.user_line
    wrong = [each for each in found.differences if not each.verdict.good]
    if mode == COMPLETE:  # each fault for itself: nothing but the kernels that hold it
        assert len({each.kernel for each in wrong} - {"result"}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pellucid_stale_weight", "inductor_stale_weight"])
def test_what_was_kept_from_the_first_call_is_a_divergence(name):
    first = cosim_isolated(request_of(FAULTS[name]), COMPLETE).first_divergence
    assert first is not None and FAULTS[name].culprit in first.fx_node


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
