"""`torch.compile(..., backend="pellucid")` as its users meet it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pellucid import pipeline
from pellucid.backend import last_compilations
from pellucid.errors import InternalError, UserError
from pellucid.lower.registry import RULES
from tests.support import assert_matches


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any, **options: object) -> Any:
    return torch.compile(function, backend="pellucid", options={"verify": True, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vectorise": True}, "did you mean vectorize"),
        ({"fusion": "perhaps"}, "true or false"),
        ({"max_fused_lines": -1}, "positive integer"),
        ({"variants": "yes"}, "on, off, a number, or names of kernels"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        torch.compile(lambda x: x + 1, backend="pellucid", options=options)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, UserError)


@pytest.mark.parametrize("options", [{"fusion": False}, {"vectorize": False}, {"max_fused_lines": 4}])
def test_options_do_not_change_results(options: dict[str, object]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.gelu(x) * 2 + x.sum(0), -1)

    x = torch.randn(5, 37)
    assert_matches(compiled(function, **options)(x), function(x), function(x.double()))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x % 0,
        lambda x: torch.fmod(x, 0),
        lambda x: x**-1,
        lambda x: torch.full_like(x, 1000),
        lambda x: x.clamp(min=1000),
    ],
)
def test_errors_that_eager_raises_for_numbers_are_raised(function: Any) -> None:
    x = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        function(x)
    with pytest.raises(RuntimeError):
        compiled(function)(x)


def test_fusion_off_means_a_kernel_per_operator() -> None:
    compiled(lambda x: (x + 1).exp().neg(), fusion=False)(torch.randn(4))
    assert last_compilations()[-1].kernels == 3


def test_graph_breaks_make_several_graphs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    before = len(last_compilations())
    x = torch.randn(4)
    assert torch.equal(compiled(function)(x), function(x))
    assert len(last_compilations()) == before + 2


def test_outputs_that_are_inputs_and_views_keep_their_identity() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return x, x[1:], y, y.t(), y.view(-1)[3:]

    x = torch.randn(3, 4)
    same, tail, y, transposed, flat = compiled(function)(x)
    assert same is x
    assert tail.data_ptr() == x[1:].data_ptr()
    assert y.data_ptr() == transposed.data_ptr() and flat.data_ptr() == y.data_ptr() + 3 * y.itemsize
    for ours, theirs in zip((same, tail, y, transposed, flat), function(x), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_equal_results_do_not_share_memory() -> None:
    a, b = compiled(lambda x: (x + 1, x + 1))(torch.zeros(3))
    a.zero_()
    assert torch.equal(b, torch.ones(3))


def test_mutated_aliased_and_overlapping_inputs() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    base, other = torch.arange(12.0), torch.arange(12.0)
    actual, expected = compiled(function)(base[:8], base[4:]), function(other[:8], other[4:])
    assert torch.equal(actual, expected) and torch.equal(base, other)
    overlapping = torch.arange(5.0).as_strided((3, 3), (1, 1))
    assert torch.equal(compiled(lambda x: x * 2)(overlapping), overlapping * 2)


def test_weights_are_never_stale() -> None:
    model = torch.nn.Linear(8, 8)
    run, x = compiled(model), torch.randn(2, 8)

    def assert_fresh() -> None:
        assert_matches(run(x), model(x), copy.deepcopy(model).double()(x.double()))

    with torch.no_grad():
        run(x)
        model.weight.copy_(torch.randn(8, 8))
        assert_fresh()
        model.weight.data = torch.randn(8, 8)
        assert_fresh()
        model.load_state_dict({"weight": torch.randn(8, 8), "bias": torch.randn(8)})
        assert_fresh()


def test_training_matches_eager() -> None:
    torch.manual_seed(0)
    eager = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )
    ours, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    x, target = torch.randn(4, 16), torch.tensor([1, 2, 3, 4])
    run = compiled(ours)
    for model, call, data in ((ours, run, x), (eager, eager, x), (wide, wide, x.double())):
        F.cross_entropy(call(data), target).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    grads = [[p.grad for p in model.parameters()] for model in (ours, eager, wide)]
    assert_matches(*grads)


def test_random_operators_keep_eagers_stream() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand(4) + torch.randn(4)

    x = torch.ones(4)
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(function)(x), expected)


def test_dynamic_shapes_take_one_compilation() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
        return torch.softmax(a * 2 + b, -1), a.sum(0), torch.cat([a, b], 1), a @ b.t(), a.shape[0]

    run = torch.compile(function, backend="pellucid", dynamic=True, options={"verify": True})
    before = len(last_compilations())
    for shape in ((3, 5), (7, 16), (33, 70), (2, 3)):
        a, b = torch.randn(shape), torch.randn(shape)
        assert_matches(run(a, b)[:-1], function(a, b)[:-1], function(a.double(), b.double())[:-1])
        assert run(a, b)[-1] == shape[0]
    assert len(last_compilations()) == before + 1


def test_dynamic_sizes_that_may_become_empty() -> None:
    """The strides of `x[1:]` hold a maximum of 1 and its size."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[1:], (0, 0, 0, 1)) + F.pad(x[:, 1:], (0, 1)).t().contiguous().t()

    run = torch.compile(function, backend="pellucid", dynamic=True, options={"verify": True})
    for shape in ((3, 5), (7, 4), (2, 2)):
        x = torch.randn(shape)
        assert torch.equal(run(x), function(x))


def test_temporaries_of_no_element_are_not_below_zero_bytes() -> None:
    """A slice of no row keeps its tensor's strides: its last element would be some rows before the first."""
    rows = (slice(0, 0, 2), slice(None), slice(0, None, 2), slice(0, None, 4))

    def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        near = torch.gather(torch.cat([x.relu(), x.sin()], 2), 3, index)
        y = x.clone()
        some = y[rows]
        y[rows] = torch.where(some > 0, some, some * 0.1)
        return x, y, x.roll(6, 0), near

    x, index = torch.randn(1, 1, 33, 40), torch.randint(0, 40, (1, 1, 4, 5))
    run = torch.compile(function, backend="pellucid", dynamic=True)
    assert all(map(torch.equal, run(x, index), function(x, index)))


@pytest.mark.parametrize("index", [10, -1])
def test_an_index_out_of_range_raises_with_the_users_line(index: int) -> None:
    run = compiled(lambda i, w: F.embedding(i, w) + 1)
    table = torch.randn(10, 4)
    run(torch.tensor([0, 9]), table)
    with pytest.raises(IndexError, match=r"embedding.*test_backend\.py:\d+"):
        run(torch.tensor([0, index]), table)


def test_threads_share_one_compiled_function() -> None:
    run = compiled(lambda x: torch.relu(x @ x) + x.sum())
    inputs = [torch.randn(64, 64) for _ in range(8)]
    with torch.no_grad():
        expected = [run(x) for x in inputs]
    failures: list[int] = []

    def work(position: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(run(inputs[position]), expected[position]):
                    failures.append(position)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_outputs_outlive_their_program() -> None:
    result = compiled(lambda x: x * 2)(torch.ones(1000))
    torch._dynamo.reset()
    assert torch.equal(result, torch.full((1000,), 2.0))


def test_operators_without_a_lowering_run_and_are_told(tmp_path: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        values, indices = torch.sort(x + 1, dim=1)
        return values * 2, indices, torch.linalg.inv(x[:, :3])

    x = torch.randn(3, 5)
    assert_matches(compiled(function)(x), function(x), function(x.double()))
    assert last_compilations()[-1].fallbacks >= 2


def test_profilers_tell_programs_apart_and_show_the_shapes_of_what_each_call_reads() -> None:
    def one(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w + x)

    def split(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))

    torch._dynamo.reset()
    before = len(last_compilations())
    x, w = torch.rand(8, 24), torch.rand(24, 24)
    calls = [(torch.compile(one, backend="pellucid"), (x, w)), (torch.compile(split, backend="pellucid"), (x,))]
    with torch.no_grad():
        for call, args in calls:
            call(*args)
        with torch.profiler.profile(record_shapes=True) as profile:
            for call, args in calls:
                call(*args)
    shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("pellucid::")}
    first, second = (each for each in last_compilations()[before:])
    assert shapes[f"pellucid::{first.name}"] == [[8, 24], [24, 24]]
    (call,) = (name for name in shapes if name.startswith(f"pellucid::{first.name}/"))
    assert call.endswith("add_relu_0") and shapes[call] == [[8, 24], [24, 24]]
    assert {call.name for call in (*first.calls, *second.calls)} <= set(shapes)
    assert f"pellucid::{second.name}/cond" in shapes and f"pellucid::{second.name}" in shapes
    assert len(shapes) == len({name for name in shapes})


def test_as_strided_may_reach_beyond_its_argument_in_the_same_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.as_strided((2, 3), (3, 1), 4), x.as_strided((50,), (1,)) * 2

    for x in (torch.randn(64)[:1].expand(9), torch.randn(64)[::2]):
        for dynamic in (False, True):
            torch._dynamo.reset()
            actual = torch.compile(function, backend="pellucid", dynamic=dynamic, options={"verify": True})(x)
            assert all(map(torch.equal, actual, function(x)))


def test_views_that_reach_further_may_follow_kernels_that_read_less() -> None:
    def beyond(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x.as_strided((2,), (1,), 8).exp()

    def shifted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x[..., 1:]

    for function, x in ((beyond, torch.randn(20)[:4]), (shifted, torch.zeros(0, 5))):
        torch.testing.assert_close(compiled(function)(x), function(x))


def test_the_gradient_of_dropout_has_the_layout_of_what_arrives() -> None:
    def function(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout_backward(grad, mask, 2.0)

    grad, mask = torch.randn(3, 4, 5).permute(2, 0, 1), torch.rand(5, 3, 4) > 0.5
    actual = compiled(function)(grad, mask)
    assert torch.equal(actual, function(grad, mask)) and actual.stride() == grad.stride()


def test_a_bug_in_a_rule_names_the_operator_and_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, node: object) -> object:
        return next(iter(()))

    monkeypatch.setitem(RULES, "erf.default", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(torch.erf, backend="pellucid", options={"reuse": False})(torch.rand(7))
    error = caught.value.inner_exception
    assert isinstance(error, InternalError) and error.message == "lowering erf: StopIteration"
    assert isinstance(error.__cause__, StopIteration) and "fx node" in error.context and error.hint


def test_a_bug_in_a_stage_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(unit: object, options: object) -> object:
        return {}["extent"]

    stages = tuple((name, broken if name == "schedule" else stage) for name, stage in pipeline.PLANNING)
    monkeypatch.setattr(pipeline, "PLANNING", stages)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(torch.erf, backend="pellucid", options={"reuse": False})(torch.rand(7))
    error = caught.value.inner_exception
    assert isinstance(error, InternalError) and error.message == "stage schedule: KeyError: 'extent'"
    assert error.record is not None
