"""Models with `dynamic=True`: right at every size, and compiled at most twice."""

from __future__ import annotations

import copy
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from pellucid import compile_exported
from pellucid.backend import last_compilations
from pellucid.description import Describer
from pellucid.ir.nodes import Kernel, Program
from tests.small_models import VOCABULARY, build_small
from tests.support import assert_matches, check, interpreted, tensors

# (batch, length) or (batch, side): 1 first and later, sizes much larger than the first, and the first one again.
TOKENS = ((1, 16), (2, 21), (5, 64), (1, 7), (3, 200), (8, 33), (1, 130), (16, 5), (4, 2), (1, 16))
# PyTorch itself tells apart up to 15 images and more, and single images whose convolutions read up to 20480 elements
# and more: it chooses the convolution's implementation by them.
IMAGES = ((2, 64), (1, 64), (3, 96), (1, 33), (5, 48), (2, 224), (7, 40), (1, 100), (4, 65), (2, 64))
FIRST_LARGE = ((8, 100), *TOKENS[:9])


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (batch, length))}


def images(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side + side % 3)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "make", "sizes"),
    [
        ("bert", text, TOKENS),
        pytest.param("bert", text, FIRST_LARGE, marks=pytest.mark.slow),
        pytest.param("llama", text, TOKENS, marks=pytest.mark.slow),
        pytest.param("llama", text, FIRST_LARGE, marks=pytest.mark.slow),
        pytest.param("resnet", images, IMAGES, marks=pytest.mark.slow),
        pytest.param("resnet", images, IMAGES[1:], marks=pytest.mark.slow),
    ],
    ids=["bert", "bert-large-first", "llama", "llama-large-first", "resnet", "resnet-one-first"],
)
def test_ten_sizes_take_two_compilations(name: str, make: Any, sizes: tuple[tuple[int, int], ...]) -> None:
    torch._dynamo.reset()
    model, _ = build_small(name)
    wide = copy.deepcopy(model).double()
    run = torch.compile(model, backend="pellucid", dynamic=True, options={"verify": True})
    before = len(last_compilations())
    for size in sizes:
        inputs = make(*size)
        exact = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        with torch.no_grad():
            assert_matches(*(tensors(call(**given)) for call, given in ((run, inputs), (model, inputs), (wide, exact))))
    assert len(last_compilations()) - before <= 2


def test_lines_are_not_named_as_sizes_are() -> None:
    """PyTorch's sizes are s and a number, ours s, u or n and a number."""
    programs: list[Program] = []
    interpreted(lambda x: x.sin().sum(0) + 1, programs, dynamic=True)(torch.randn(3, 4))
    kernels = [node for node in programs[0].nodes if isinstance(node, Kernel)]
    assert kernels and not any(re.fullmatch(r"[sun]\d+", line.out) for kernel in kernels for line in kernel.body)


@pytest.mark.slow
def test_training_with_sizes_that_change() -> None:
    """Forward and backward are compiled at most twice each."""
    torch._dynamo.reset()
    model, _ = build_small("gpt2")
    model.loss_type = "ForCausalLM"  # without it transformers warns, and Dynamo breaks the graph there
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    run = torch.compile(model, backend="pellucid", dynamic=True, options={"verify": True})
    before = len(last_compilations())
    for size in ((2, 16), (1, 40), (5, 7), (3, 100), (1, 5)):
        inputs = text(*size)
        grads = []
        for module, call in ((model, run), (eager, eager), (wide, wide)):
            module.zero_grad()
            call(**inputs, labels=inputs["input_ids"]).loss.backward()
            grads.append([parameter.grad for parameter in module.parameters()])
        assert_matches(*grads)
    assert len(last_compilations()) - before <= 4


@pytest.mark.parametrize("backend", ["aot_eager", "pellucid"])
def test_what_aotautograd_refuses_of_changed_inputs_is_refused_as_in_aot_eager(backend: str) -> None:
    """With symbolic sizes: a view of a changed input, returned while another argument shares its memory."""

    def changed(x: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.add_(1)[1:], view * 2

    torch._dynamo.reset()
    base = torch.arange(24.0).view(6, 4)
    with pytest.raises(AssertionError, match="ViewMeta"):
        torch.compile(changed, backend=backend, dynamic=True)(base, base[1:])


@pytest.mark.parametrize("n", [6, 9])
def test_an_input_of_which_another_is_a_view_is_changed_in_place(n: int) -> None:
    def changed(x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return view * 2

    ours, eagers = (torch.arange(4.0 * n).view(n, 4) for _ in range(2))
    result = torch.compile(changed, backend="pellucid", dynamic=True)(ours, ours[1:])
    assert torch.equal(result, changed(eagers, eagers[1:])) and torch.equal(ours, eagers)


@pytest.mark.parametrize("backend", ["eager", "pellucid"])
def test_bounds_that_dynamo_refuses_are_refused_before_any_backend(backend: str) -> None:
    """A slice to half of a bounded size: Dynamo makes guards that it cannot prove for the bounds."""
    torch._dynamo.reset()
    x = torch.randn(2, 10)
    torch._dynamo.mark_dynamic(x, 1, min=4, max=64)  # type: ignore[attr-defined]
    with pytest.raises(ConstraintViolationError, match="satisfy the generated guard"):
        torch.compile(lambda x: x[:, : x.shape[1] // 2] * 2, backend=backend)(x)


@pytest.mark.parametrize(
    "rows",
    [
        lambda n: slice(-1, n),
        lambda n: slice(2 * n - 7, None, 2),
        lambda n: slice(n + 3, 1, 3),
        lambda n: slice(-n, n - 2),
        lambda n: slice(n // 2, -1),
        lambda n: slice(-2, n // 2),
        lambda n: slice(n - 9, n + 9, 3),
    ],
    ids=["from the end", "of either sign", "empty", "all but two", "to the end", "mixed", "beyond"],
)
def test_slices_of_dynamic_bounds_are_assigned(rows: Callable[[int], slice]) -> None:
    """What a bound counts from, and where it is cut off, follows from its sign and from the size."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = rows(x.shape[0])
        z = x * 2
        z[some] = y[some] + 1
        y[some] += 7.0
        return z, torch.slice_scatter(x, y[some], 0, some.start, some.stop, some.step or 1)

    run = torch.compile(function, backend="pellucid", dynamic=True, options={"verify": True})
    for shape in ((6, 5), (17, 3), (3, 4), (2, 16), (9, 2)):
        x, y = torch.randn(shape), torch.randn(shape)
        changed, expected = y.clone(), function(x, other := y.clone())
        assert all(map(torch.equal, run(x, changed), expected)) and torch.equal(changed, other)


def test_half_of_a_dynamic_size_is_compiled_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("pellucid")
    half = torch.compile(lambda x: x[:, : x.shape[1] // 2] * 2, backend=counter, dynamic=True)
    for n in (10, 11, 64, 5):
        x = torch.randn(2, n)
        assert torch.equal(half(x), x[:, : n // 2] * 2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("operator", [torch.addmm, torch.baddbmm])
def test_factors_of_a_product_that_are_not_known_before_the_call(operator):
    def scaled(start, left, right, alpha, beta):
        return operator(start, left, right, alpha=alpha, beta=beta)

    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="pellucid", dynamic=True)
    batch = (2,) if operator is torch.baddbmm else ()
    for rows, alpha, beta in ((3, 2, 0.5), (5, 3, 0.25), (4, -1, 0.0)):
        args = (torch.randn(*batch, rows, 6), torch.randn(*batch, rows, 7), torch.randn(*batch, 7, 6), alpha, beta)
        torch.testing.assert_close(compiled(*args), scaled(*args))


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [True, None])
def test_training_on_a_batch_of_one_that_is_cut_off_a_longer_tensor(dynamic: bool | None) -> None:
    """The step along its first axis is a size that the backward graph is not given."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(6, 6)

    def loss(h: torch.Tensor) -> torch.Tensor:
        return (layer(h) * h.sin()).sum()

    call = torch.compile(loss, backend="pellucid", dynamic=dynamic)
    for batch, whole, length in ((1, 64, 5), (1, 50, 9), (1, 70, 7), (2, 64, 5), (2, 33, 8)):
        h = torch.randn(batch, whole, 6, requires_grad=True)
        parameters = [h, *layer.parameters()]
        found, expected = (torch.autograd.grad(each(h[:, :length]), parameters) for each in (call, loss))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


SIZES_AS_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_add": lambda x: x.index_add(0, torch.arange(x.shape[0]), x, alpha=x.shape[0]),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), x.shape[0]),
    "scatter": lambda x: x.scatter(1, torch.zeros(x.shape[0], 1, dtype=torch.long), x.shape[0]),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=x.shape[0]),
    "var": lambda x: x.var(0, correction=x.shape[0] - 2),
    "full of bool": lambda x: torch.full((3, x.shape[0]), x.shape[0] - x.shape[0] // 1, dtype=torch.bool),
    "arange": lambda x: torch.arange(0, x.shape[0] * 2, x.shape[0], dtype=x.dtype),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=x.shape[0]),
    "elu": lambda x: torch.nn.functional.elu(x, alpha=x.shape[0]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SIZES_AS_NUMBERS)
def test_sizes_are_numbers_that_operators_are_given(name: str) -> None:
    check(SIZES_AS_NUMBERS[name], *((torch.randn(n, 6),) for n in (5, 2, 7, 31)), dynamic=True)


class Decoder(torch.nn.Module):
    """A token, to which everything before it is attended: a cache that grows by a row at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.hidden = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = self.project(x).chunk(3, -1)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        attended = (query @ keys.transpose(1, 2) / 6).softmax(-1) @ values
        return self.hidden(self.hidden(x + attended).relu()).tanh(), keys, values


def test_new_sizes_are_filled_into_what_was_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are described once for all sizes, and right for each, also for those that come back."""
    described: Counter[str] = Counter()
    describe = Describer.describe

    def counted(describer: Describer, *args: Any) -> Any:
        described[describer.plan.name] += 1
        return describe(describer, *args)

    monkeypatch.setattr(Describer, "describe", counted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder().eval()
    exact = copy.deepcopy(model).double()
    call = torch.compile(model, backend="pellucid", dynamic=True)
    with torch.no_grad():
        for length in (*range(5, 45), 300, 7, 41, 2000, 6):
            args = torch.randn(2, 1, 32), torch.randn(2, length, 32), torch.randn(2, length, 32)
            assert_matches(call(*args), model(*args), exact(*(each.double() for each in args)))
    assert set(described.values()) == {1}


def test_threads_meet_more_sizes_than_are_kept() -> None:
    """Exported, since Dynamo's guards are not for several threads at once."""
    model = Decoder().eval()
    length = torch.export.Dim("length", min=2, max=500)
    args = torch.randn(2, 1, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    exported = torch.export.export(model, args, dynamic_shapes=({}, {1: length}, {1: length}))
    call = compile_exported(exported)
    failures: list[str] = []

    def steps(seed: int) -> None:
        lengths = random.Random(seed).choices(range(2, 120), k=150)
        for length in lengths:
            given = torch.ones(2, 1, 32), torch.full((2, length, 32), 0.1), torch.full((2, length, 32), 0.2)
            with torch.no_grad():
                got, expected = call(*given), model(*given)
            if any(
                g.shape != e.shape or not torch.allclose(g, e, atol=1e-5) for g, e in zip(got, expected, strict=True)
            ):
                failures.append(f"{seed}: {length}")

    threads = [threading.Thread(target=steps, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
