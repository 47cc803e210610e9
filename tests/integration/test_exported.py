"""Programs of `torch.export`, compiled without Dynamo: the values, changes and errors of the exported module."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.testing._internal.two_tensor import TwoTensor

import pellucid
from pellucid.backend import last_starts
from pellucid.errors import UserError
from pellucid.exported import CompiledProgram
from tests.small_models import SMALL, build_small
from tests.support import assert_matches, tensors

BATCH = Dim("batch")


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(image)).relu().mean((2, 3)))


class Counting(nn.Module):
    """Changes a buffer, one that is not saved, and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.total += x.sum(0)
        self.calls += 1
        x[0] = self.calls.float()
        return self.total * 2, x + self.calls


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).relu())


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = self.linear(x)
        with torch.no_grad():
            return narrow, self.linear(x), torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        return (x * 2).reshape(x.shape[0] // 2, 2, -1).sum(1), x.t() @ y, x.shape[0] * 3


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q @ k.t(), F.scaled_dot_product_attention(q[None, None], k[None, None], k[None, None])


class Steps(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x[:n] * n


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape)


# A module, its arguments, the sizes that may change, and arguments of later calls.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Any, list[tuple[Any, ...]]]] = {
    "pointwise": (lambda: Function(torch.sin), (floats(3, 4),), None, []),
    "aliases": (lambda: Function(lambda x: (x, x.view(-1), x.t(), x)), (floats(3, 4),), None, []),
    "constants": (lambda: Function(lambda x, n, y=None: x * n), (floats(3), 3, None), None, []),
    "tree": (lambda: Function(lambda d: {"a": [d["u"][0] + 1, None], "b": (d["v"], 3.0)}), (
        {"u": [floats(3)], "v": floats(2)},), None, []),
    "integer": (Steps, (floats(9, 4), 3), (None, Dim.DYNAMIC), [(floats(9, 4), 5), (floats(9, 4), 8)]),
    "changes": (Counting, (floats(3, 4),), None, [(floats(4, 3).t(),), (floats(3, 8)[:, ::2],)]),
    "tied": (Tied, (tokens(3, 4),), ({0: BATCH},), [(tokens(7, 4),), (tokens(1, 4),), (tokens(0, 4),)]),
    "regions": (Regions, (floats(4, 8),), None, [(-floats(4, 8).abs(),), (floats(4, 8).abs(),)]),
    "sizes from data": (lambda: Function(lambda x: (x.nonzero(), x[x > 0].sum())), (floats(4, 8),), None, [
        (torch.zeros(4, 8),)]),
    "multiples": (Halves, (floats(8, 4), floats(8, 5)), ({0: 2 * BATCH}, {0: 2 * BATCH}), [
        (floats(n, 4), floats(n, 5)) for n in (4, 6, 100, 64)]),
    "two sizes": (Attention, (floats(8, 16), floats(8, 16)), ({0: Dim("q")}, {0: Dim("k")}), [
        (floats(n, 16), floats(m, 16)) for n, m in ((1, 1), (1, 9), (7, 1), (30, 2), (5, 5), (0, 3))]),
    "images": (lambda: Network().eval(), (floats(2, 3, 16, 16),), ({0: BATCH, 2: Dim("h"), 3: Dim("w")},), [
        (floats(1, 3, 9, 20),), (floats(3, 3, 21, 7).to(memory_format=torch.channels_last),)]),
    "training mode": (lambda: Network().train(), (floats(2, 3, 16, 16),), None, []),
    "overlapping": (lambda: Function(lambda x: x * 2), (floats(3, 1).expand(3, 4),), None, [
        (floats(3, 4),), (floats(8)[:6].as_strided((3, 4), (1, 1)),)]),
    "with gaps": (lambda: Function(lambda x: x * 2), (floats(3, 8)[:, ::2],), (({0: BATCH},),), [
        (floats(5, 4),), (floats(4, 5).t(),), (floats(2, 8)[:, 1::2],)]),
    "channels last": (lambda: Network().eval(), (floats(2, 3, 9, 9).to(memory_format=torch.channels_last),), (
        {0: BATCH},), [(floats(4, 3, 9, 9),), (floats(1, 3, 9, 9),)]),
    "negated": (lambda: Function(lambda x, y: (x * 2, y.sum(), y.resolve_conj())), (
        floats(4), torch.randn(3, dtype=torch.complex64)), None, [
        (torch._neg_view(floats(4)), torch.randn(3, dtype=torch.complex64).conj())]),
    "empty": (lambda: Function(lambda x: x.sum(0)), (floats(0, 3),), None, []),
    "complex": (lambda: Function(lambda x: torch.fft.fft(x).abs()), (floats(8),), None, []),
}  # fmt: skip


WITH_PARAMETERS = ("changes", "tied", "regions", "images", "channels last", "training mode")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "freeze"), [*((name, False) for name in CASES), *((name, True) for name in WITH_PARAMETERS)]
)
def test_values_and_changes_are_those_of_the_module(name: str, freeze: bool) -> None:
    make, args, sizes, more = CASES[name]
    torch.manual_seed(0)
    program = export(make(), args, dynamic_shapes=sizes)
    eager = copy.deepcopy(program).module()
    run = pellucid.compile_exported(program, options={"freeze": freeze})
    for given in (args, *more, *more, args):
        ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
        with torch.no_grad():
            expected = eager(*theirs)
        result = run(*ours)
        torch.testing.assert_close((result, ours), (expected, theirs), atol=2e-5, rtol=2e-5)
        assert torch.utils._pytree.tree_structure(result) == torch.utils._pytree.tree_structure(expected)
    state = dict(eager.named_buffers())
    for buffer, value in program.named_buffers():
        torch.testing.assert_close(value, state[buffer])


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_models(name: str) -> None:
    """Frozen, with outputs and arguments by name as `transformers` has them."""
    (model, given), (exact, wide) = build_small(name), build_small(name, torch.float64)
    program = export(model, (), given, strict=False)
    run = pellucid.compile_exported(program, options={"freeze": True})
    with torch.no_grad():
        assert_matches(tensors(run(**given)), tensors(model(**given)), tensors(exact(**wide)))


@pytest.mark.parametrize("table", [{}, None])
def test_functional_programs_write_what_they_return(table: dict[Any, Any] | None) -> None:
    program = export(Counting(), (floats(3, 4),))
    eager = copy.deepcopy(program).module()
    run = pellucid.compile_exported(program.run_decompositions(table))
    for _ in range(3):
        ours = floats(3, 4)
        theirs = ours.clone()
        torch.testing.assert_close((run(ours), ours), (eager(theirs), theirs))


def test_a_program_from_a_file() -> None:
    program, file = export(Halves(), CASES["multiples"][1], dynamic_shapes=CASES["multiples"][2]), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = pellucid.compile_exported(torch.export.load(file))
    for args in CASES["multiples"][3]:
        torch.testing.assert_close(run(*args), program.module()(*args), atol=2e-5, rtol=2e-5)


def frozen_linear() -> tuple[ExportedProgram, CompiledProgram]:
    program = export(nn.Linear(32, 32), (floats(8, 32),))
    return program, pellucid.compile_exported(program, options={"freeze": True})


def test_parameters_that_change_are_noticed() -> None:
    program, run = frozen_linear()
    x, weight = floats(8, 32), program.state_dict["weight"]
    for change in (
        lambda: weight.mul_(2),
        lambda: weight.data.add_(1),
        lambda: setattr(weight, "data", floats(32, 32)),
    ):
        with torch.no_grad():
            change()
        torch.testing.assert_close(run(x), F.linear(x, weight, program.state_dict["bias"]).detach())


def test_later_processes_find_it() -> None:
    outcomes = []
    for _ in range(2):
        torch.manual_seed(0)
        program = export(Network().eval(), (floats(2, 3, 19, 23),), dynamic_shapes=({0: BATCH},))
        run = pellucid.compile_exported(program, options={"freeze": True, "reuse": True})
        outcomes.append(last_starts()[-1].outcome)
        for batch in (2, 5):
            x = floats(batch, 3, 19, 23)
            torch.testing.assert_close(run(x), program.module()(x).detach(), atol=1e-5, rtol=1e-5)
    assert outcomes[-1] == "found"


def test_threads_share_it() -> None:
    program = export(Halves(), CASES["multiples"][1], dynamic_shapes=CASES["multiples"][2])
    run, eager = pellucid.compile_exported(program), program.module()
    given = [(floats(n, 4), floats(n, 5)) for n in (4, 6, 8, 10, 12, 64) * 5]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda args: run(*args), given))
    for result, args in zip(results, given, strict=True):
        torch.testing.assert_close(result, eager(*args), atol=2e-5, rtol=2e-5)


def test_gradients_are_refused() -> None:
    _, run = frozen_linear()
    x = floats(8, 32).requires_grad_()
    with pytest.raises(UserError, match="requires a gradient"):
        run(x)
    with torch.no_grad():
        assert not run(x).requires_grad


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "number": (lambda: (floats(8, 4),), r"exported for \(\*, \*\), and is called with \(\*\)"),
    "tree": (lambda: (floats(8, 4), {"y": [floats(8, 5)]}), r"called with \(\*, {'y': \[\*\]}\)"),
    "array": (lambda: (floats(8, 4).numpy(), floats(8, 5)), "x is a ndarray, and the program takes a tensor"),
    "dtype": (lambda: (floats(8, 4).double(), floats(8, 5)), "x is torch.float64"),
    "layout": (lambda: (floats(8, 4).to_sparse(), floats(8, 5)), "torch.sparse_coo"),
    "no tensor": (lambda: (3, floats(8, 5)), "x is a int, and the program takes a tensor"),
    "subclass": (lambda: (TwoTensor(floats(8, 4), floats(8, 4)), floats(8, 5)), "a TwoTensor, which wraps other"),
    "dimensions": (lambda: (floats(8), floats(8, 5)), r"x has size \(8,\)"),
    "width": (lambda: (floats(8, 3), floats(8, 5)), r"x has size \(8, 3\)"),
    "together": (lambda: (floats(8, 4), floats(10, 5)), r"y has size \(10, 5\)"),
    "multiple": (lambda: (floats(9, 4), floats(9, 5)), r"x has size \(9, 4\)"),
    "range": (lambda: (floats(400, 4), floats(400, 5)), "is 200, and the program was exported for 3 to 100"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arguments_are_refused(name: str) -> None:
    size = Dim("half", min=3, max=100)
    program = export(Halves(), (floats(8, 4), floats(8, 5)), dynamic_shapes=({0: 2 * size}, {0: 2 * size}))
    run = pellucid.compile_exported(program)
    make, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        run(*make())
    torch.testing.assert_close(run(floats(8, 4), floats(8, 5))[2], 24)


def test_other_constants_are_refused() -> None:
    run = pellucid.compile_exported(export(Function(lambda x, n: x * n), (floats(3), 3)))
    for wrong in (4, 3.0, True, "3", None):
        with pytest.raises(UserError, match=r"was exported for 3 alone|is called with"):
            run(floats(3), wrong)


def test_keywords_come_in_any_order() -> None:
    run = pellucid.compile_exported(export(Function(lambda x, *, a, b: x + a * 2 + b), (floats(3),), {
        "a": floats(3), "b": floats(3)}))  # fmt: skip
    x, a, b = floats(3), floats(3), floats(3)
    assert torch.equal(run(x, b=b, a=a), run(x, a=a, b=b))
    with pytest.raises(UserError, match=r"exported for \(\*, a=\*, b=\*\), and is called with \(\*, a=\*\)"):
        run(x, a=a)


def test_changed_arguments_may_not_share_memory() -> None:
    program = export(Function(lambda x, y: x.add_(y)), (floats(4), floats(4)))
    run, memory = pellucid.compile_exported(program), floats(8)
    run(memory[:4], memory[4:])
    for shared in (memory[2:6], memory[:4], memory[3:4].expand(4)):
        with pytest.raises(UserError, match="shares memory with"):
            run(memory[:4], shared)


def test_what_a_buffer_of_the_program_shares() -> None:
    program = export(Counting(), (floats(3, 4),))
    run = pellucid.compile_exported(program)
    with pytest.raises(UserError, match="shares memory with"):
        run(program.state_dict["total"].expand(3, 4))


def test_arguments_that_share_memory_and_stay_as_they_are() -> None:
    norm = nn.BatchNorm1d(4).train()  # changes its statistics
    run = pellucid.compile_exported(
        export(Function(lambda x, y: norm(x) + y), (floats(3, 4), floats(3, 4)), strict=False)
    )
    x = floats(3, 4)
    expected = copy.deepcopy(norm)(x) + x
    torch.testing.assert_close(run(x, x), expected.detach())


def test_autocast_was_decided_when_it_was_exported() -> None:
    program, run = frozen_linear()
    x = floats(8, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, compiled = run(x), pellucid.compile_exported(program)(x)
    assert torch.equal(inside, run(x)) and compiled.dtype is torch.float32


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Callable[[object], object]) -> None:
    with pytest.raises(UserError, match="neither copied nor pickled"):
        copied(frozen_linear()[1])


def test_in_inference_mode() -> None:
    program, run = frozen_linear()
    with torch.inference_mode():
        x = floats(8, 32)
        torch.testing.assert_close(run(x), program.module()(x))


class Relations(nn.Module):
    """Branches on sizes, as exporting finds out."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] % 2 or x.shape[0] == y.shape[0]:
            return x.sum(0) * 15
        torch._check(x.shape[0] < y.shape[0])
        return x.view(x.shape[0] // 2, 2, -1).sum((0, 1)) + y.sum(0)


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_found_out_of_sizes_is_asked(saved: bool) -> None:
    program = export(Relations(), (floats(6, 4), floats(8, 4)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    if saved:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    run, eager = pellucid.compile_exported(program), program.module()
    for n, m in ((6, 8), (4, 5), (10, 30)):
        x, y = floats(n, 4), floats(m, 4)
        torch.testing.assert_close(run(x, y), eager(x, y), atol=1e-5, rtol=1e-5)
    for n, m in ((5, 8), (6, 6), (8, 6)):
        with pytest.raises(UserError, match="not exported for such arguments: Guard failed"):
            run(floats(n, 4), floats(m, 4))


CHANGED: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "dtype": lambda weight: weight.data.bfloat16(),
    "shape": lambda _: torch.zeros(1),
    "strides": lambda weight: weight.data.t(),
    "copy of other strides": lambda weight: weight.data.t().contiguous().t(),
}


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("change", CHANGED)
def test_parameters_of_another_kind_are_refused(change: str, freeze: bool) -> None:
    program = export(nn.Linear(32, 32), (floats(8, 32),))
    run, weight = pellucid.compile_exported(program, options={"freeze": freeze}), program.state_dict["weight"]
    assert isinstance(weight, nn.Parameter)
    before, x = weight.data, floats(8, 32)
    result = run(x)
    weight.data = CHANGED[change](weight)
    with pytest.raises(UserError, match="a parameter is"):
        run(x)
    weight.data = before
    assert torch.equal(run(x), result)


def test_what_operators_do_not_say_they_return() -> None:
    """`type_as` and others return their argument itself: a change of it is one of the argument."""
    program = export(Function(lambda x, y: (x.type_as(y).add_(1), y * 10)), (floats(4, 3), floats(4, 3)))
    run, eager = pellucid.compile_exported(program), program.module()
    ours, y = floats(3, 4).t(), floats(4, 3)
    theirs = ours.clone()
    torch.testing.assert_close((run(ours, y), ours), (eager(theirs, y), theirs))
    with pytest.raises(UserError, match="shares memory with another argument"):
        run(y, y)


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(3, 4))
        self.register_buffer("row", self.whole[0])
        self.register_buffer("read", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.row.add_(x)
        self.whole.mul_(2)
        x.add_(1)
        return x * 10 + self.read + self.row


def test_buffers_that_share_memory() -> None:
    program = export(Sharing(), (floats(4),))
    run, eager = pellucid.compile_exported(program), copy.deepcopy(program).module()
    for _ in range(2):
        ours = floats(4)
        theirs = ours.clone()
        torch.testing.assert_close((run(ours), ours), (eager(theirs), theirs))
    for name in ("read", "row"):
        with pytest.raises(UserError, match="shares memory with a parameter or buffer"):
            run(program.state_dict[name])


def test_examples_that_are_slices() -> None:
    """A part of a cache, whose strides have sizes of their own: PyTorch asks for those, too."""
    module, query, sizes = Function(lambda x: x.softmax(-1)), floats(2, 5, 24).chunk(3, -1)[0], (({1: Dim.DYNAMIC},),)
    run = pellucid.compile_exported(export(module, (query,), dynamic_shapes=sizes))
    torch.testing.assert_close(run(query), query.softmax(-1))
    with pytest.raises(UserError, match="cannot be evaluated for these arguments"):
        run(floats(2, 5, 8))
    run = pellucid.compile_exported(export(module, (query.clone(),), dynamic_shapes=sizes))
    for x in (query, floats(2, 9, 8), floats(2, 8, 7).transpose(1, 2), floats(2, 4, 24)[:, ::2, ::3]):
        torch.testing.assert_close(run(x), x.softmax(-1))


def test_a_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        run = pellucid.compile_exported(export(Function(lambda x: x * 2), (torch.ones(3, 4, device="cpu"),)))
        x = torch.arange(12.0, device="cpu").view(4, 3).t()
        assert torch.equal(run(x), torch.arange(12.0, device="cpu").view(4, 3).t() * 2)


def test_parameters_have_to_be_there() -> None:
    with torch.device("meta"):
        program = export(nn.Linear(3, 3), (torch.ones(2, 3),))
    with pytest.raises(UserError, match="weight of the exported program is a Parameter on meta"):
        pellucid.compile_exported(program)


def test_what_is_no_exported_program() -> None:
    with pytest.raises(UserError, match=r"takes what torch\.export\.export returns, not a Linear"):
        pellucid.compile_exported(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown option"):
        pellucid.compile_exported(export(nn.Linear(2, 2), (floats(1, 2),)), options={"frieze": True})
    with pytest.raises(UserError, match="options are 'freeze'"):
        pellucid.compile_exported(export(nn.Linear(2, 2), (floats(1, 2),)), options="freeze")  # type: ignore[arg-type]
