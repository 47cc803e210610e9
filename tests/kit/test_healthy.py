"""Healthy programs that a careless judge would blame, and backends that really are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pellucid.debug import Verdict, check
from pellucid.errors import UserError
from pellucid.kit.debug.check import check_isolated
from pellucid.kit.debug.cosim import cosim_case
from pellucid.kit.debug.reasons import find_reasons
from pellucid.kit.debug.simulation import COMPLETE, LIVE
from pellucid.kit.programs.case import Case
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.registry import subject_of
from tests.kit import real_models
from tests.kit.healthy import PROGRAMS

QUICK = {
    *("cancelling_sum", "chain_in_bf16", "changed_in_place", "integer_overflow", "masked_softmax", "no_elements"),
    *("not_a_number", "random_numbers", "thresholds"),
}
TRIED = [
    pytest.param(name, backend, marks=() if name in QUICK and backend == "pellucid" else pytest.mark.slow)
    for backend in ("pellucid", "inductor")
    for name in PROGRAMS
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "backend"), TRIED)
def test_a_healthy_program_is_not_blamed(name, backend):
    assert check(*PROGRAMS[name](), backend=backend).good
    for mode in (COMPLETE, LIVE):
        assert cosim_case(Case(name, *PROGRAMS[name]()), subject_of(backend), mode).verdict.good


MODELS = ("bert", "llama", "resnet", "unet", "experts", "convnext", "mobilenet", "vit", "whisper", "t5")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pellucid", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_is_not_blamed(name, backend):
    model, args, kwargs = getattr(real_models, name)()
    assert check(model, args, kwargs, backend=backend).good
    for mode in (COMPLETE, LIVE):
        assert cosim_case(Case(name, model, args, kwargs), subject_of(backend), mode).verdict.good


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, index: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.table(index)
        h = self.norm(h + self.drop(F.gelu(self.linear(h))))
        self.seen.add_(h.detach().sum((0, 1)))
        return {"h": h.masked_fill(mask[..., None], float("-inf")).softmax(1), "sum": h.sum()}


def model() -> Any:
    torch.manual_seed(0)
    mask = torch.tensor([[False, False, True], [True, False, False]])
    return Model(), (torch.randint(0, 10, (2, 3)),), {"mask": mask}


def assigned() -> Any:
    def f(y: torch.Tensor) -> torch.Tensor:
        y[0] = 7
        return y + 1

    return f, (torch.randn(4),)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [model, assigned])
def test_nothing_is_blamed(make, backend):
    fn, args, *kwargs = make()
    case = Case(make.__name__, fn, args, *kwargs)
    assert check(*make(), backend=backend, backward=isinstance(fn, nn.Module)).good
    assert cosim_case(case, subject_of(backend)).verdict.good
    assert cosim_case(case, subject_of(backend), LIVE).verdict.good
    assert find_reasons(Request(f"{__file__}:{make.__name__}", backend)).good


def relu() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.sin() * 2) + 1

    torch.manual_seed(0)
    return f, (torch.randn(4, 5),)


@pytest.mark.sampled
def test_a_backend_of_which_nothing_is_known():
    wrong, broken = "relu_accuracy_error_TESTING_ONLY", "relu_compile_error_TESTING_ONLY"
    assert check_isolated(Request(f"{__file__}:relu", wrong)).verdict is Verdict.WRONG
    assert check_isolated(Request(f"{__file__}:relu", broken)).verdict is Verdict.ERROR
    assert not find_reasons(Request(f"{__file__}:relu", broken)).good
    assert not cosim_case(Case("relu", *relu()), subject_of(wrong)).verdict.good


class Empty(nn.Module):
    def __len__(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def test_a_module_without_parts_is_compiled_like_any_other():
    assert not check(Empty(), (torch.randn(9),), backend="relu_accuracy_error_TESTING_ONLY").good


def test_a_program_that_does_not_repeat_itself_is_not_judged():
    calls = [0]

    def f(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x * calls[0]

    with pytest.raises(UserError, match="not deterministic: output 0 differs between two calls in eager mode"):
        check(f, (torch.ones(3),))


def leaves() -> Any:
    raise SystemExit(0)


@pytest.mark.sampled
def test_a_target_that_ends_the_process_is_not_the_backends_fault():
    with pytest.raises(UserError, match=r"which creates the program, fails: .* ended with sys.exit\(0\)"):
        check_isolated(Request(f"{__file__}:leaves"))


@dataclass
class Held:
    x: torch.Tensor


def test_tensors_that_cannot_be_seen_are_not_said_to_be_right():
    with pytest.raises(UserError, match="output 0 is a Held: the tensors in it cannot be found"):
        check(lambda x: Held(x + 1), (torch.ones(3),))
    with pytest.raises(UserError, match="has no results to compare"):
        check(lambda x: None, (torch.ones(3),))
    assert check(lambda x: (x.sum().item(), x.dim() > 1), (torch.ones(3),)).outputs[1].dtype == "bool"


@pytest.mark.sampled
def test_a_backend_that_the_file_registers(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_BACKEND)
    assert check_isolated(Request(f"{file}:make", "own_wrong_backend")).verdict is Verdict.WRONG


OWN_BACKEND = """
import torch
from torch._dynamo import register_backend

@register_backend
def own_wrong_backend(module, inputs):
    return lambda *args: [each + 1 for each in module(*args)]

def make():
    return torch.sin, (torch.ones(3),)
"""


@pytest.mark.slow
def test_a_backward_graph_is_compiled_for_the_strides_that_it_will_meet():
    """Inductor lays convolutions channels-last in the forward graph, and so what that saves."""
    target = f"{Path(__file__).parent / 'planted_models.py'}:unet"
    assert check_isolated(Request(target, "inductor", backward=True)).good
