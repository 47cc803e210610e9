"""Training: gradients, running statistics and loss curves as good as eager's.

A gradient is judged by float64. So that a step's rounding is not amplified by the steps after it, eager, compiled and
float64 models start each step from the same numbers: those of the float64 model after the previous step, rounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pellucid.backend import last_compilations
from pellucid.kit.bench.models import Size, build
from pellucid.kit.judge.accuracy import gradient_error, is_accurate
from tests.small_models import build_small
from tests.support import FLOORS, recorded_fallbacks, tensors

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
STEPS = 5

# The only operators that may call ATen: matrix multiplication, convolution and attention.
ALLOWED = {"aten::addmm.out", "aten::mm.out", "aten::bmm.out", "aten::baddbmm.out", "aten::convolution.default",
           "aten::convolution_backward.default", "aten::_scaled_dot_product_flash_attention_for_cpu.default",
           "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default"}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="pellucid", options={"verify": True})


def without_dropout(model: nn.Module) -> nn.Module:
    """Models hold their dropout as modules, as attributes and in their configuration."""
    for holder in (*model.modules(), getattr(model, "config", None)):
        for name, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, float) and ("drop" in name or (isinstance(holder, nn.Dropout) and name == "p")):
                setattr(holder, name, 0.0)
    return model


def loss_of(output: Any) -> Tensor:
    """A loss that every float output has a part in, and no output twice the weight of another."""
    parts = [part.square().mean() for part in tensors(output.to_tuple()) if part.is_floating_point()]
    return sum(parts[1:], start=parts[0])


def widened(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def step(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]) -> float:
    """Forward, loss, backward; the gradients are left in the parameters."""
    model.zero_grad()
    loss = loss_of(call(**inputs))
    loss.backward()
    return loss.item()


def adopt(models: list[nn.Module], exact: nn.Module) -> None:
    """Give all models the numbers of `exact`, rounded to their dtype; `exact` too takes the rounded ones."""
    with torch.no_grad():
        for module in (*models, exact):
            sources = (*exact.parameters(), *exact.buffers())
            for target, source in zip((*module.parameters(), *module.buffers()), sources, strict=True):
                target.copy_(source.to(torch.float32) if source.is_floating_point() else source)


def gradient_scale(model: nn.Module) -> dict[str, float]:
    """By parameter, the largest gradient in its module.

    What a bias adds to the keys of attention cancels in softmax: its gradient is 0 but for rounding, and is judged on
    the scale of the gradients beside it.
    """
    largest: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), parameter.grad.abs().max().item())
    return {name: largest[name.rpartition(".")[0]] for name, _ in model.named_parameters()}


def assert_gradients(ours: nn.Module, eager: nn.Module, exact: nn.Module) -> None:
    """At most twice as far from float64 as the worst of eager's, plus a floor: which gradient that is, is chance."""
    scales = gradient_scale(exact)

    def errors(model: nn.Module) -> dict[str, float]:
        pairs = zip(model.named_parameters(), exact.parameters(), strict=True)
        return {name: (p.grad.double() - x.grad).abs().max().item() / scales[name] for (name, p), x in pairs}

    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype and a.grad.shape == b.grad.shape
    allowed = max(errors(eager).values())
    assert allowed < 1e-3, "eager itself is far from float64, the comparison says nothing"
    for name, error in errors(ours).items():
        assert error <= 2 * allowed + FLOORS[torch.float32], f"{name}: error {error:.3g}, eager has {allowed:.3g}"


def assert_buffers(ours: nn.Module, eager: nn.Module, exact: nn.Module) -> None:
    """Running means and variances; counters exactly."""
    for (name, a), b, reference in zip(ours.named_buffers(), eager.buffers(), exact.buffers(), strict=True):
        if not a.is_floating_point():
            assert torch.equal(a, b), name
            continue
        scale = reference.abs().max().item()
        error, allowed = ((x.double() - reference).abs().max().item() / scale for x in (a, b))
        assert error <= 2 * allowed + FLOORS[torch.float32], f"{name}: error {error:.3g}, eager has {allowed:.3g}"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["gpt2", "resnet", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilebert", "t5"))]
)
def test_gradients_over_five_steps(name: str) -> None:
    module, inputs = build_small(name)
    start = without_dropout(module.train())
    ours, eager, exact = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start).double()
    run, before = compiled(ours), len(last_compilations())
    with recorded_fallbacks() as fallbacks:
        step(ours, run, inputs)
    assert fallbacks.keys() <= ALLOWED
    for make in OPTIMISERS.values():
        exact.load_state_dict(start.state_dict())
        adopt([ours, eager], exact)
        optimiser = make(exact.parameters())
        for _ in range(STEPS):
            losses = [step(ours, run, inputs), step(eager, eager, inputs), step(exact, exact, widened(inputs))]
            assert losses[0] == pytest.approx(losses[2], rel=2 * abs(losses[1] / losses[2] - 1) + 1e-5)
            assert_gradients(ours, eager, exact)
            assert_buffers(ours, eager, exact)
            optimiser.step()
            adopt([ours, eager], exact)
    assert len(last_compilations()) == before + 2, "one forward and one backward graph"


def error_of(model: nn.Module, exact: nn.Module) -> float:
    """The largest error over all gradients, as the benchmarks have it."""
    found = ({name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (model, exact))
    return gradient_error(*found)


def length_of_error(model: nn.Module, exact: nn.Module) -> float:
    """The length of the whole gradient's error, in units of that of the gradient: a few odd elements count little."""
    pairs = [
        (p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True) if q.grad is not None
    ]
    errors, lengths = zip(*(((ours - given).norm(), given.norm()) for ours, given in pairs), strict=True)
    return (torch.stack(errors).norm() / torch.stack(lengths).norm()).item()


def nudged(model: nn.Module, draw: int) -> nn.Module:
    """A copy whose parameters are moved to a neighbour, or left, at random; draw 0: as they are."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for p in moved.parameters() if draw else ():
            towards = torch.where(torch.rand(p.shape, generator=generator) < 0.5, -math.inf, math.inf)
            p.copy_(torch.nextafter(p, towards))
    return moved


MEASURES = (error_of, length_of_error)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "draws"), [
    ("mobilebert", Size(), 1),
    ("gpt2", Size(), 1),
    ("t5", Size(), 1),
    ("vit", Size(batch=2), 1),
    # A rounding that flips one of its 40 million rectified values moves some gradients a hundred times as far as
    # roundings move others. Which flip is chance, so eager's error is the largest of models that differ in last places;
    # that of the whole gradient stays small, and is what a wrong gradient would exceed.
    ("resnet50", Size(batch=16), 4),
])  # fmt: skip
def test_gradients_over_five_steps_at_full_size(name: str, size: Size, draws: int) -> None:
    case = build(name, replace(size, train=True))
    start, inputs = without_dropout(case.fn), dict(case.kwargs)
    for path, module in start.named_modules():
        if path.endswith(".layer.2.normalization"):  # of a residual block: starts at zero, as ResNets are trained
            nn.init.zeros_(module.weight)
    ours, eager, exact = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start).double()
    run = compiled(ours)
    adopt([ours, eager], exact)
    optimiser = torch.optim.AdamW(exact.parameters(), lr=1e-4)
    for number in range(STEPS):
        step(ours, run, inputs)
        step(exact, exact, widened(inputs))
        eagers: list[tuple[float, ...]] = []
        for draw in range(draws):
            other = nudged(eager, draw)
            step(other, other, inputs)
            eagers.append(tuple(measure(other, exact) for measure in MEASURES))
        for measure, errors in zip(MEASURES, zip(*eagers, strict=True), strict=True):
            error, theirs = measure(ours, exact), " ".join(f"{each:.3g}" for each in errors)
            print(f"{name}, step {number}, {measure.__name__}: {error:.3g}, eager {theirs}")
            assert is_accurate(error, max(errors), torch.float32)
        assert length_of_error(ours, exact) < 0.05, f"{name}: eager itself is far from float64"
        optimiser.step()
        adopt([ours, eager], exact)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "bert"))])
def test_dropout_draws_eagers_random_numbers(name: str) -> None:
    """Gradients as close to eager's as two orders of summation are: another mask would change them entirely."""
    module, inputs = build_small(name)
    start = module.train()
    assert any(isinstance(part, nn.Dropout) and part.p > 0 for part in start.modules())
    ours, eager, exact = copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start).double()
    run = compiled(ours)
    for seed in range(3):
        states = []
        for model, call, given in ((ours, run, inputs), (eager, eager, inputs), (exact, exact, widened(inputs))):
            torch.manual_seed(seed)
            step(model, call, given)
            states.append(torch.get_rng_state())
        assert torch.equal(states[0], states[1]), "the generator is left where eager leaves it"
        assert_gradients(ours, eager, exact)


def synthetic_text(tokens: int, vocabulary: int) -> Tensor:
    """A made-up language: after the token a comes 3a + 1 (mod the vocabulary), or one of the two numbers after that.

    Each follows with probability 0.8, 0.1 and 0.1, so that the entropy of a token is 0.64 nats.
    """
    generator = torch.Generator().manual_seed(7)
    choices = torch.tensor([0.8, 0.1, 0.1]).multinomial(tokens, replacement=True, generator=generator).tolist()
    text = [1]
    for choice in choices:
        text.append((3 * text[-1] + 1 + choice) % vocabulary)
    return torch.tensor(text[1:])


ENTROPY = -(0.8 * math.log(0.8) + 0.2 * math.log(0.1))


def train(model: nn.Module, call: Callable[..., Any], text: Tensor, steps: int) -> list[float]:
    """The loss of each step with AdamW on batches of 4 x 64 tokens."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (4,), generator=generator).tolist()
        batch = torch.stack([text[start : start + 64] for start in starts])
        optimiser.zero_grad()
        loss = call(input_ids=batch, labels=batch).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def smoothed(losses: list[float], window: int = 10) -> Iterator[float]:
    return (sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1))


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_llama_learns_as_in_eager(steps: int) -> None:
    """Mean losses of ten neighbouring steps differ from eager's by less than 1%, and the model learns."""
    model, _ = build_small("llama")
    eager, vocabulary = copy.deepcopy(model.train()), model.config.vocab_size
    text = synthetic_text(20_000, vocabulary=19)
    ours, theirs = train(model, compiled(model), text, steps), train(eager, eager, text, steps)
    for a, b in zip(smoothed(ours), smoothed(theirs), strict=True):
        assert a == pytest.approx(b, rel=0.01)
    assert ours[0] == pytest.approx(math.log(vocabulary), rel=0.1)
    assert sum(ours[-10:]) / 10 < (2.0 if steps == 30 else ENTROPY + 0.15), ours[-10:]


def looked_up_alike(table: Tensor) -> Tensor:
    return F.embedding(torch.tensor([1, 2, 2, 0]).expand(3, 4), table) * 2


def added_alike(table: Tensor) -> Tensor:
    return torch.zeros(5, 7).index_put((torch.zeros(3, dtype=torch.long),), torch.ones(7), accumulate=True) + table


def multiplied_alike(table: Tensor) -> Tensor:
    rows = torch.zeros(3, 7, dtype=torch.long)
    return torch.ones(5, 7).scatter_reduce(0, rows, torch.full((3, 7), 3.0), "prod") * table


@pytest.mark.parametrize("function", [looked_up_alike, added_alike, multiplied_alike])
def test_points_of_a_scatter_that_are_alike_all_count(function: Callable[[Tensor], Tensor]) -> None:
    """Neither the place nor the value tells them apart: both come from an expanded tensor or a constant."""
    results = []
    for call in (function, torch.compile(function, backend="pellucid", options={"verify": True})):
        table = torch.ones(5, 7, requires_grad=True)
        result = call(table)
        result.sum().backward()
        results.append((result.detach(), table.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_what_aten_computes_is_not_computed_again_for_backward() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.special.i0e(x.exp()).tanh() * torch.special.ndtri(x.sigmoid())

    x = torch.randn(20, 30, requires_grad=True)
    with recorded_fallbacks() as found:
        (ours,) = torch.autograd.grad(compiled(function)(x).sum(), x)
    assert found == {"aten::special_i0e.default": 1, "aten::special_i1e.default": 1, "aten::special_ndtri.default": 1}
    assert torch.allclose(ours, torch.autograd.grad(function(x).sum(), x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "greatest",
    [lambda x: x.abs().amax(-1), lambda x: x.neg().amin(0), lambda x: x.norm(math.inf, 1)],
    ids=["amax", "amin", "norm"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_greatest_of_rounded_numbers_is_found_again(
    greatest: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Backward compares each number with the greatest, which is rounded: none would be equal if they were not.

    Numbers that are equal once they are rounded may share a gradient in another way.
    """

    def function(x: Tensor, y: Tensor) -> Tensor:
        return greatest(x[:, None] * y[None])

    torch._dynamo.reset()
    args = [torch.randn(rows, 3).to(dtype).requires_grad_() for rows in (17, 31)]
    ours = torch.autograd.grad(compiled(function)(*args).sum(), args)
    for got, eager in zip(ours, torch.autograd.grad(function(*args).sum(), args), strict=True):
        assert (got - eager).abs().max() <= 0.25 * eager.abs().max()


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Made by tensor operators, so that worker processes use PyTorch's threads."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(24, generator=torch.Generator().manual_seed(index))
        return x, torch.outer(x, x).softmax(-1).sum(0)[:8]


def test_worker_processes_forked_after_compilation() -> None:
    """Each epoch forks workers from a process that has compiled and run; its own threads must go on working."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8))
    results = []
    for wrap in (lambda module: module, compiled):
        module = copy.deepcopy(model)
        call, optimiser = wrap(module), torch.optim.SGD(module.parameters(), lr=0.05)
        for _ in range(3):
            for x, y in DataLoader(Pairs(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
                optimiser.zero_grad()
                F.mse_loss(call(x), y).backward()
                optimiser.step()
        results.append([parameter.detach() for parameter in module.parameters()])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled
def test_the_number_of_threads_may_change_after_compilation() -> None:
    module, inputs = build_small("bert")
    run, threads = compiled(module.train()), torch.get_num_threads()
    without_dropout(module)
    gradients = []
    try:
        for number in (threads, 1, 2 * threads, threads):
            torch.set_num_threads(number)
            step(module, run, inputs)
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    finally:
        torch.set_num_threads(threads)
    for later in gradients[1:]:
        for a, b in zip(gradients[0], later, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def over_a_vocabulary(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """A loss whose logits, 4 MB of them, forward keeps: backward overwrites them with their gradient."""
    return F.cross_entropy(hidden @ weight.t(), target)


def test_what_forward_kept_is_overwritten_only_where_nobody_else_holds_it() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (1024, 1000))
    target = torch.randint(0, 1000, (1024,))
    wanted = torch.autograd.grad(over_a_vocabulary(hidden, weight, target), (hidden, weight))

    def check(loss: Tensor, *, retain: bool = False) -> None:
        for ours, eager in zip(torch.autograd.grad(loss, (hidden, weight), retain_graph=retain), wanted, strict=True):
            torch.testing.assert_close(ours, eager)

    run = compiled(over_a_vocabulary)
    check(run(hidden, weight, target))
    loss = run(hidden, weight, target)
    check(loss, retain=True)
    check(loss, retain=True)
    check(loss)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (held.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = run(hidden, weight, target)
    before = [tensor.clone() for tensor in held]
    check(loss)
    assert len(held) > 2 and all(map(torch.equal, held, before))
