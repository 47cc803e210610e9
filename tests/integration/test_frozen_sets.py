"""The option `freeze` with several sets of parameters: when they are prepared, and when what was prepared goes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.frozen import Frozen
from tests.integration.freezing import agrees, frozen
from tests.support import recorded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Frozen]:
    """The program of each preparation that is made."""
    found: list[Frozen] = []
    prepare = Frozen._prepare

    def counted(self: Frozen, *args: Any) -> Any:
        found.append(self)
        return prepare(self, *args)

    monkeypatch.setattr(Frozen, "_prepare", counted)
    return found


@pytest.mark.filterwarnings("error")
def test_modules_of_the_same_code_are_compiled_once_and_prepared_each_once(prepared: list[Frozen]) -> None:
    """As where the layers of a model are compiled one by one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(12))).eval(), torch.randn(20, 64)
    plain = copy.deepcopy(model)
    with recorded() as records:
        for layer in model:
            layer.compile(backend="pellucid", options={"freeze": True, "verify": True})
        for _ in range(3):
            agrees(model, plain, x)
        assert len(records) == 1 and len(prepared) == 12 and len(set(prepared)) == 1
        with torch.no_grad():
            for each in (model, plain):
                each[4].second.weight.mul_(2)
        for _ in range(2):
            agrees(model, plain, x)
    assert len(records) == 1 and len(prepared) == 13


def test_modules_that_share_some_parameters_are_told_apart(prepared: list[Frozen]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    models, x = [Block() for _ in range(3)], torch.randn(20, 64)
    models[1].first = models[0].first
    models[2].first.bias = models[1].first.bias
    models[2].second = models[0].second
    compiled = [torch.compile(model, backend="pellucid", options={"freeze": True}) for model in models]
    for _ in range(2):
        for run, model in zip(compiled, models, strict=True):
            agrees(run, model, x)
    with torch.no_grad():
        models[0].second.weight.mul_(2)
    for run, model in zip(compiled, models, strict=True):
        agrees(run, model, x)


def test_what_was_prepared_of_a_module_goes_after_it(prepared: list[Frozen]) -> None:
    torch._dynamo.reset()
    model, x = Block(), torch.randn(20, 64)
    compiled = torch.compile(lambda module, x: module(x), backend="pellucid", options={"freeze": True})
    for number in range(4):
        module = copy.deepcopy(model)
        agrees(lambda x, module=module: compiled(module, x), module, x)
        (program,) = set(prepared)
        assert len(prepared) == number + 1 and len(program._prepared) == 1
        del module


def test_modules_that_share_what_they_begin_and_end_with_are_told_apart(prepared: list[Frozen]) -> None:
    torch._dynamo.reset()
    first, last, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(20, 64)
    models = [nn.Sequential(first, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), last).eval() for _ in range(3)]
    compiled = [torch.compile(model, backend="pellucid", options={"freeze": True}) for model in models]
    for _ in range(3):
        for run, model in zip(compiled, models, strict=True):
            agrees(run, model, x)
    assert len(prepared) == 3


def test_views_of_the_same_memory_are_prepared_once(prepared: list[Frozen]) -> None:
    """As members of an ensemble are called: with new tensor objects at each call."""
    models, x = [Block() for _ in range(3)], torch.randn(20, 64)
    stacked, _ = torch.func.stack_module_state(models)
    template = copy.deepcopy(models[0])
    compiled = frozen(template)
    for _ in range(3):
        for number, model in enumerate(models):
            with torch.no_grad():
                members = {name: value[number] for name, value in stacked.items()}
                result = torch.func.functional_call(compiled, members, (x,))
                torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    assert len(prepared) == 3


def test_weights_that_are_swapped_are_prepared_once(prepared: list[Frozen]) -> None:
    model, other, x = Block(), Block(), torch.randn(20, 64)
    compiled, plain = frozen(model), copy.deepcopy(model)
    states = [{name: value.clone() for name, value in each.state_dict().items()} for each in (model, other)]
    for _ in range(3):
        for state in states:
            for each in (model, plain):
                for name, parameter in each.named_parameters():
                    parameter.data = state[name]
            agrees(compiled, plain, x)
    assert len(prepared) == 2


@pytest.mark.parametrize("how", ["functional", "reloaded"])
def test_other_tensors_where_old_ones_lay_are_noticed(how: str) -> None:
    """They may have the same address and the same count of changes, and differ in one element only."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    base, x = Block().eval(), torch.randn(20, 64)
    compiled = frozen(copy.deepcopy(base))
    for number in range(20):
        state = {name: value.clone() for name, value in base.state_dict().items()}
        state["first.weight"][number, number + 7] = 50.0
        with torch.no_grad():
            if how == "functional":
                result = torch.func.functional_call(compiled, state, (x,))
                expected = torch.func.functional_call(base, state, (x,))
            else:
                model = Block().eval()
                model.load_state_dict(state)
                expected = model(x)
                model.compile(backend="pellucid", options={"freeze": True, "verify": True})
                result = model(x)
                del model
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        del state


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_a_part_that_is_changed_unseen_is_noticed_within_eight_calls(how: str) -> None:
    model, x = nn.Linear(1024, 1024).eval(), torch.randn(4, 1024)
    compiled = frozen(model)
    agrees(compiled, model, x)
    for row in (5, 6, 300):
        if how == "data":
            model.weight.data[row] = 3.0
        else:
            model.weight.detach().numpy()[row] = 4.0
        with torch.no_grad():
            for _ in range(8):
                compiled(x)
        agrees(compiled, model, x)


def kept_bytes(programs: Iterable[Frozen]) -> int:
    """Of all that is prepared, each memory once."""
    kept = [tensor for program in programs for each in program._prepared.values() for tensor in each.tensors]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def test_graphs_of_the_same_weights_share_their_panels(prepared: list[Frozen]) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval()
    compiled = frozen(model)
    for rows in (32, 48, 64):
        agrees(compiled, model, torch.randn(rows, 256))
    with torch.inference_mode():
        compiled(torch.randn(32, 256))
    weights = sum(layer.weight.nbytes for layer in model)
    assert len(set(prepared)) > 1
    assert all(kept_bytes([program]) >= weights for program in set(prepared))
    assert kept_bytes(set(prepared)) < 1.1 * weights


def test_what_is_kept_for_sets_of_parameters_is_bounded(prepared: list[Frozen]) -> None:
    class Conditioned(nn.Module):
        condition: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)
            self.register_buffer("condition", torch.zeros(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.condition) @ (self.layer.weight * self.condition)

    model, x = Conditioned().eval(), torch.randn(20, 256)
    compiled = frozen(model)
    conditions = [torch.rand(256) for _ in range(24)]
    with pytest.warns(UserWarning, match="`freeze` is for models whose parameters stay as they are"):
        for condition in conditions:
            model.condition = condition
            agrees(compiled, model, x)
    (program,) = set(prepared)
    assert 1 < len(program._prepared) < 10
    assert kept_bytes([program]) <= 4.5 * model.layer.weight.nbytes
    for condition in conditions[-2:]:
        model.condition = condition
        agrees(compiled, model, x)
    assert len(prepared) == len(conditions)


def test_what_was_prepared_goes_with_the_parameters(prepared: list[Frozen]) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(*(Block() for _ in range(3))).eval(), torch.randn(20, 64)
    for layer in model:
        layer.compile(backend="pellucid", options={"freeze": True})
    with torch.no_grad():
        model(x)
    (program,) = set(prepared)
    assert len(program._prepared) == 3
    del model[1], layer
    gc.collect()
    assert len(program._prepared) == 2
    del model
    gc.collect()
    assert len(program._prepared) == 0


def test_weights_that_change_at_each_call_are_told() -> None:
    model, x = nn.Linear(64, 64), torch.randn(20, 64)
    compiled = frozen(model)
    with pytest.warns(UserWarning, match="`freeze` is for models whose parameters stay as they are") as warned:
        for _ in range(12):
            with torch.no_grad():
                model.weight.mul_(0.9)
            agrees(compiled, model, x)
    assert len(warned) == 1


def test_a_few_elements_that_are_changed_unseen_are_noticed_in_the_end() -> None:
    model, x = nn.Linear(64, 256).eval(), torch.randn(4, 64)
    compiled = frozen(model)
    agrees(compiled, model, x)
    model.weight.data[37, 21:23] = 3.0
    with torch.no_grad():
        for _ in range(8 * 64):
            compiled(x)
    agrees(compiled, model, x)


def test_parameters_may_be_swapped() -> None:
    """PyTorch refuses that for a tensor of which there are weak references."""
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval(), torch.randn(20, 64)
    compiled = frozen(model)
    agrees(compiled, model, x)
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn(96, 64)))
    agrees(compiled, model, x)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
        agrees(compiled, model, x)
        model.bfloat16().float()
        agrees(compiled, model, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
