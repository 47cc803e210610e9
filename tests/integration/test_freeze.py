"""The option `freeze`: the same results, and every change of a parameter is noticed."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.frozen import Frozen
from pellucid.trace.record import GraphRecord
from tests.integration.freezing import agrees, frozen
from tests.support import assert_matches, recorded


class Model(nn.Module):
    """Products and convolutions of each kind: linear, padded, depthwise, pointwise; a norm, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(50, 200)
        self.first, self.second = nn.Linear(200, 300), nn.Linear(300, 70)
        self.stem = nn.Conv2d(24, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32, padding=1)
        self.pointwise = nn.Conv2d(32, 48, 1)
        for each in (self.norm.running_mean, self.norm.running_var):
            assert each is not None
            each.uniform_(0.5, 1.5)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.positions(torch.arange(40))
        image = self.depthwise(torch.relu(self.norm(self.stem(image))))
        return self.second(torch.relu(self.first(x))), self.pointwise(image)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(40, 200), torch.randn(2, 24, 10, 11).contiguous(memory_format=torch.channels_last)


def decided(record: GraphRecord, rule: str) -> set[str]:
    """What `rule` said yes to."""
    return {decision.subject[-1] for decision in record.decisions if decision.rule == rule and decision.ok}


def test_weights_are_packed_before_the_first_call(model: Model, inputs: tuple[Any, ...]) -> None:
    with recorded() as records:
        agrees(frozen(model), model, *inputs)
    (record,) = records
    assert len(decided(record, "codegen.freeze")) == 5
    assert record.before is not None and len(record.before.scheduled.nodes) > 0
    assert not any("sqrt" in node.name for node in record.scheduled.nodes)  # of the running variance


class Scaled(nn.Module):
    """Convolutions with what scales and shifts their channels, as networks write it."""

    def __init__(self, dims: int = 2, bias: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first, self.second = convolution(20, 36, 3, padding=1, bias=bias), convolution(36, 36, 3, groups=36)
        self.norm, self.plain = norm(36), norm(36, affine=False)
        self.scale = nn.Parameter(torch.rand(36, *[1] * dims) + 0.5)
        for each in (*self.norm.buffers(), *self.plain.buffers()):
            if each.is_floating_point():
                each.uniform_(0.5, 1.5)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(self.second(torch.relu(self.norm(self.first(x))))) / self.scale


@pytest.mark.sampled
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_scales_and_shifts_a_convolution_goes_into_its_weight(dims: int, bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Scaled(dims, bias).eval(), torch.randn(2, 20, *[7] * dims)
    compiled = frozen(model)
    with recorded() as records:
        agrees(compiled, model, x)
    (record,) = records
    folds = [decision for decision in record.decisions if decision.rule == "freeze.fold"]
    assert len(folds) == 2 and "div" in folds[1].why
    names = " ".join(node.name for node in record.scheduled.nodes)
    assert not any(name in names for name in ("sub", "mul", "div")), names
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    agrees(compiled, model, x)
    model.norm.running_mean.data.add_(1)  # type: ignore[union-attr]
    agrees(compiled, model, x)


def test_what_scales_the_lines_of_a_single_channel_does_not() -> None:
    """Without its channel, an image has its lines where others have channels."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(20, 1, 3, padding=1)
            self.scale = nn.Parameter(torch.rand(1, 7, 1) + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).squeeze(1) * self.scale

    torch.manual_seed(0)
    model = Single().eval()
    agrees(frozen(model), model, torch.randn(2, 20, 7, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_scales_and_shifts_a_narrow_convolution_is_one_scale_and_one_shift(dtype: torch.dtype) -> None:
    """Weights keep all their digits."""
    torch.manual_seed(0)
    model, x = Scaled(dtype=dtype).eval(), torch.randn(2, 20, 7, 7).to(dtype)
    with recorded() as records, torch.no_grad():
        assert_matches(frozen(model)(x), model(x), copy.deepcopy(model).double()(x.double()))
    (record,) = records
    folds = [decision.why for decision in record.decisions if decision.rule == "freeze.fold"]
    assert len(folds) == 2 and all("go into one scale and one shift" in why for why in folds)
    assert not any("sub" in node.name for node in record.scheduled.nodes)


def test_what_is_no_scale_of_a_frozen_convolution_stays() -> None:
    """Read twice, of a weight that is an argument, not one element for each channel."""
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(1, 20, 9, 9)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = model.first(x)
        return model.norm(y) + y

    def of_an_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return model.norm(torch.conv2d(x, w))

    def by_pixel(x: torch.Tensor) -> torch.Tensor:
        return model.first(x) * model.scale[0, 0].expand(9) * x[:, :1]

    weight = torch.randn(36, 20, 3, 3)
    for function, args in ((twice, (x,)), (of_an_argument, (x, weight)), (by_pixel, (x,))):
        with recorded() as records, torch.no_grad():
            assert_matches(frozen(function)(*args), function(*args), function(*args))
        assert not [each for record in records for each in record.decisions if each.rule == "freeze.fold"]


def _in_place(model: Model) -> None:
    with torch.no_grad():
        model.first.weight.mul_(2)


def _by_data(model: Model) -> None:
    model.second.weight.data.mul_(3)


def _other_data(model: Model) -> None:
    model.stem.weight.data = torch.randn_like(model.stem.weight)


def _loaded(model: Model) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _another(model: Model) -> None:
    model.pointwise.weight = nn.Parameter(torch.randn_like(model.pointwise.weight))


def _stepped(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        model.first(torch.ones(1, 200)).square().mean().backward()
    optimizer.step()


def _buffer(model: Model) -> None:
    assert model.norm.running_mean is not None
    model.norm.running_mean.add_(1)


@pytest.mark.parametrize("change", [_in_place, _by_data, _other_data, _loaded, _another, _stepped, _buffer])
def test_a_change_is_noticed(model: Model, inputs: tuple[Any, ...], change: Callable[[Model], None]) -> None:
    compiled = frozen(model)
    agrees(compiled, model, *inputs)
    with torch.no_grad():
        before = compiled(*inputs)
    change(model)
    agrees(compiled, model, *inputs)
    with torch.no_grad():
        assert any(not torch.equal(old, new) for old, new in zip(before, compiled(*inputs), strict=True))


def _other_module(model: Model) -> None:
    model.first = nn.Linear(200, 300)


def _other_number(model: Model) -> None:
    model.norm.eps = 2.0


def _other_mode(model: Model) -> None:
    model.norm.train()


def _other_inside(model: Model) -> None:
    model.pair[1] = nn.Tanh()


def _other_method(model: Model) -> None:
    model.first.forward = lambda x: x[:, :100].repeat(1, 3)  # type: ignore[method-assign]


def _other_global(model: Model) -> None:
    model.scale = {"by": 3.0}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "change", [_other_module, _other_number, _other_mode, _other_inside, _other_method, _other_global, _another]
)
def test_another_module_is_noticed(model: Model, inputs: tuple[Any, ...], change: Callable[[Model], None]) -> None:
    model.pair = nn.Sequential(nn.Identity(), nn.ReLU())
    model.scale = {"by": 2.0}

    def whole(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = model(x, image)
        return model.pair(first), second * model.scale["by"]

    compiled = frozen(whole)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(*inputs), whole(*inputs), rtol=1e-4, atol=1e-4)
        before = compiled(*inputs)
        change(model)
        for _ in range(2):
            torch.testing.assert_close(compiled(*inputs), whole(*inputs), rtol=1e-4, atol=1e-4)
        assert any(not torch.equal(old, new) for old, new in zip(before, compiled(*inputs), strict=True))


def test_inference_tensors_are_watched_by_their_bytes(inputs: tuple[Any, ...]) -> None:
    with torch.inference_mode():
        model = Model().eval()
        compiled = frozen(model)
        for _ in range(2):
            result, expected = compiled(*inputs), model(*inputs)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            model.first.weight.mul_(2)


def test_tied_weights_are_prepared_for_each_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 160)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            return (x @ self.table.weight.t()) @ self.table.weight

    model, tokens = Tied(), torch.randint(300, (20,))
    compiled = frozen(model)
    agrees(compiled, model, tokens)
    with torch.no_grad():
        model.table.weight.mul_(0.5)
    agrees(compiled, model, tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_meet_no_padding(inputs: tuple[Any, ...], value: float) -> None:
    model = nn.Conv2d(24, 32, 3, padding=1).eval()
    with torch.no_grad():
        model.weight[3, 2, 0, 0] = value  # it meets the padding of the first line and column alone
        result, expected = frozen(model)(inputs[1]), model(inputs[1])
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 33), (7, 4), (7, 5), (9, 33)])
def test_odd_sizes(rows: int, columns: int) -> None:
    model, x = nn.Linear(193, columns), torch.randn(rows, 193)
    agrees(frozen(model), model, x)


def test_sizes_of_activations_may_change() -> None:
    model = nn.Sequential(nn.Linear(130, 64), nn.ReLU(), nn.Linear(64, 20)).eval()
    with recorded() as records:
        compiled = frozen(model)
        for rows in (3, 50, 7, 200):
            agrees(compiled, model, torch.randn(rows, 130))
    assert len(records) == 2
    assert all(decided(record, "codegen.freeze") for record in records)


def test_what_the_graph_changes_is_not_frozen() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.count, torch.Tensor)
            self.count += 1
            return x * self.count.exp() * self.scale.exp()

    one, other = Counting(), Counting()
    compiled = frozen(one)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(3)), other(torch.ones(3)))


def test_results_are_the_callers_own() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            twice = self.weight * 2
            return x + twice, twice

    model, x = Doubled(), torch.randn(40)
    compiled = frozen(model)
    with torch.no_grad():
        compiled(x)[1].zero_()
    agrees(compiled, model, x)


def test_nothing_is_kept_that_is_much_larger_than_its_parameters() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(200))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight[:, None] * self.weight

    model, x = Outer(), torch.randn(200, 200)
    with recorded() as records:
        agrees(frozen(model), model, x)
    assert records[0].before is not None and not records[0].before.scheduled.nodes


def test_training_says_that_nothing_is_frozen(model: Model, inputs: tuple[Any, ...]) -> None:
    with recorded() as records:
        sum(each.sum() for each in frozen(model)(*inputs)).backward()
    (reason, *_) = [each for record in records for each in record.decisions if each.rule == "freeze.before"]
    assert not reason.ok and "trained" in reason.why


def test_threads_share_what_is_prepared(model: Model, inputs: tuple[Any, ...]) -> None:
    compiled = frozen(model)
    with torch.no_grad():
        compiled(*inputs)
        _in_place(model)
        expected = model(*inputs)
    results: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            results.append(compiled(*inputs))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_packed(dtype: torch.dtype) -> None:
    """Two terms may share a unit, of which the last one of an odd number is half empty; infinities stay in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(201, 300), nn.GELU(), nn.Linear(300, 70)).to(dtype).eval()
    x = torch.randn(40, 201).to(dtype)
    with recorded() as records, torch.no_grad():
        compiled = frozen(model)
        agrees(compiled, model, x)
        kernels = [kernel for record in records for kernel in record.kernels.values() if kernel.packing]
        assert len(kernels) == 2 and all(kernel.plan.blocks for kernel in kernels)
        model[0].weight[5] = torch.inf
        torch.testing.assert_close(compiled(x), model(x), equal_nan=True, atol=0.05, rtol=0.05)


def test_what_is_needed_packed_alone_is_not_kept() -> None:
    """A convolution's weight is laid out and packed; what lies between is given back."""
    kept: list[int] = []

    def main(args: list[Any]) -> list[Any]:
        kept.extend(each.numel() for each in args)
        return []

    run = Frozen(main, lambda args: [torch.ones(1000), torch.ones(10)], [0], [], {}, [0])
    run([torch.ones(3)])
    assert kept == [3, 0, 10]


@pytest.mark.sampled
def test_output_code_prepares_and_runs(model: Model, inputs: tuple[Any, ...], tmp_path: Any) -> None:
    with torch.no_grad():
        frozen(model, trace=str(tmp_path))(*inputs)
    (program,) = tmp_path.glob("*/graphs/*/output_code.py")
    assert "sqrt" in (program.parent / "ir_frozen.txt").read_text()
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(*inputs)[0].square().mean().sqrt()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("output 0")]
    assert float(line.rpartition("rms ")[2]) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 32), lambda: nn.LayerNorm(64)])
def test_parameters_without_memory_are_an_error(make: Callable[[], nn.Module], freeze: bool) -> None:
    """As they are while somebody keeps them elsewhere."""
    model, x = make().eval(), torch.randn(8, 64)
    compiled = frozen(model, freeze=freeze)
    with torch.no_grad():
        for _ in range(2):
            agrees(compiled, model, x)
            held, storage = model.weight.clone(), model.weight.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            with pytest.raises(RuntimeError, match="elements whose storage has 0 bytes"):
                compiled(x)
            storage.resize_(size)
            model.weight.copy_(held * 2)
        agrees(compiled, model, x)


class Batched(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / shape[-2] ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight)


STACKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "batch": (lambda: Batched(3, 64, 80), (3, 50, 64), 3),
    "two dimensions": (lambda: Batched(2, 3, 64, 33), (2, 3, 70, 64), 6),
    "pixels of a stride": (lambda: nn.ConvTranspose2d(64, 48, 4, 2, 1), (2, 64, 9, 9), 4),
    "windows of nine taps": (lambda: nn.ConvTranspose2d(64, 48, 6, 2, 2), (1, 64, 12, 12), 4),
    "strides that differ": (lambda: nn.ConvTranspose2d(96, 64, (3, 6), (3, 2)), (1, 96, 9, 9), 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_several_matrices_are_packed_one_by_one(name: str, dtype: torch.dtype) -> None:
    make, shape, count = STACKS[name]
    torch.manual_seed(0)
    model, x = make().to(dtype).eval(), torch.randn(shape).to(dtype)
    with recorded() as records:
        compiled = frozen(model)
        agrees(compiled, model, x)
        with torch.no_grad():
            model.weight[-1:] *= -3
        agrees(compiled, model, x)
    kernels = [kernel for record in records for program in record.programs for kernel in program.kernels.values()]
    stacks = [kernel.plan.blocks.stack() for kernel in kernels if kernel.packing and kernel.plan.blocks]
    assert [stack.count for stack in stacks if stack is not None] == [count]
