"""Matrix products as kernels of our own: what eager means by them, and what is fused with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from pellucid import pipeline
from pellucid.ir.nodes import Extern, Kernel, Node
from pellucid.machine.reference import AVX2, with_tiles
from pellucid.native.machine import machine_for
from tests.support import assert_matches, widened

pytestmark = pytest.mark.usefixtures("quick_compiler")

F = torch.nn.functional
NARROW = [torch.bfloat16, torch.float16]


@contextmanager
def recorded() -> Iterator[list[tuple[Node, Any]]]:
    """The nodes of all programs that are compiled meanwhile; kernels with the blocks of their plans."""
    found: list[tuple[Node, Any]] = []

    def recording(*args: Any) -> Any:
        executable, record = pipeline.compile_graph(*args)
        for program in record.programs:
            for node in program.scheduled.nodes:
                found.append((node, record.kernels[node.name].plan.blocks if isinstance(node, Kernel) else None))
        return executable, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.backend.compile_graph", recording)
        yield found


def compiled(function: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> list[tuple[Node, Any]]:
    """Compile `function`, compare its result with eager's and float64's, and return what `recorded` gives."""
    torch._dynamo.reset()
    with recorded() as nodes, torch.no_grad():
        made = torch.compile(function, backend="pellucid", dynamic=dynamic, options={"verify": True, **options})
        assert_matches(made(*args), function(*args), function(*widened(args)))
    return nodes


def product_alone(nodes: list[tuple[Node, Any]]) -> bool:
    """True if everything is one kernel, a contraction."""
    return len(nodes) == 1 and nodes[0][1] is not None


def test_what_runs_over_the_product_is_fused_with_it() -> None:
    x, w, b, r, s = (
        torch.randn(2, 40, 70),
        torch.randn(90, 70),
        torch.randn(90),
        torch.randn(2, 40, 90),
        torch.randn(90),
    )
    assert product_alone(compiled(lambda x, w, b, r, s: F.gelu(F.linear(x, w, b)) * s + r, x, w, b, r, s))
    x, w = torch.randn(2, 40, 70), torch.randn(96, 70)
    assert product_alone(compiled(lambda x, w: (x @ w.t()).view(2, 40, 3, 32).transpose(1, 2).contiguous(), x, w))


def test_what_makes_an_operand_is_not() -> None:
    """Each element of an operand is read for many points of the product: it is computed once, before."""
    nodes = compiled(lambda x, w: x.exp() @ w, torch.randn(40, 70), torch.randn(70, 90))
    assert [blocks is not None for _, blocks in nodes] == [False, True]
    nodes = compiled(lambda x, w: x.new_ones(40, 70) @ w + x, torch.randn(40, 90), torch.randn(70, 90))
    assert [blocks is not None for _, blocks in nodes] == [False, True]


def test_a_reduction_of_the_product_runs_after_it() -> None:
    nodes = compiled(lambda x, w: (x @ w + 1).softmax(-1), torch.randn(40, 70), torch.randn(70, 90))
    assert [blocks is not None for _, blocks in nodes] == [True, False]


def test_a_product_is_computed_once_for_several_readers() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return y.relu(), y[:7] * 2, y.sum(0)

    nodes = compiled(function, torch.randn(40, 70), torch.randn(70, 90))
    assert sum(blocks is not None for _, blocks in nodes) == 1


def test_products_share_no_loops() -> None:
    x, w, u = torch.randn(40, 70), torch.randn(70, 90), torch.randn(70, 90)
    assert all(blocks is not None for _, blocks in compiled(lambda x, w, u: (x @ w, x @ u), x, w, u))
    nodes = compiled(lambda x, w, u: (x @ w) * (x @ u).sigmoid(), x, w, u)
    assert len(nodes) == 2 and all(blocks is not None for _, blocks in nodes)


@pytest.mark.parametrize(
    ("shape", "beta", "alpha"),
    [
        ((90,), 0.5, -2),
        ((40, 90), 1, 1),
        ((1, 90), 0, 3),
        ((40, 1), 0.5, -2),
        ((), 1, 1),
        ((40, 90), 0, 3),
        ((90,), 1, 1),
    ],
)
def test_addmm_scales_and_broadcasts(shape: tuple[int, ...], beta: float, alpha: float) -> None:
    x, w, b = torch.randn(40, 70), torch.randn(70, 90), torch.randn(shape)
    compiled(lambda b, x, w: torch.addmm(b, x, w, beta=beta, alpha=alpha), b, x, w)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("m", "k", "n", "transposed"),
    [
        (1, 64, 90, True),
        (5, 77, 64, False),
        (5, 77, 64, True),
        (40, 70, 90, False),
        (64, 401, 33, True),
        (250, 96, 2, True),
    ],
)
def test_narrow_operands(dtype: torch.dtype, m: int, k: int, n: int, transposed: bool) -> None:
    """Few rows and many, odd numbers of terms, either layout of the right operand; the sum is in f32."""
    torch.manual_seed(0)
    x, b, r = (torch.randn(shape).to(dtype) for shape in ((2, m, k), (n,), (2, m, n)))
    w = torch.randn((n, k) if transposed else (k, n)).to(dtype)
    w = w.t() if transposed else w
    assert product_alone(compiled(lambda x, w, b, r: F.gelu(x @ w + b) + r, x, w, b, r))
    alone = compiled(lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), b, x[0], w)
    batch = compiled(torch.bmm, x, torch.stack([w, 2 * w]))
    assert m == 1 or (product_alone(alone) and product_alone(batch)), "one row is a reduction like others"


@pytest.mark.parametrize("n", [5, 8, 9, 16, 17, 40, 48, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_register_may_hold_the_columns_of_the_last_panel(dtype: torch.dtype, n: int) -> None:
    x, w, r = (torch.randn(shape).to(dtype) for shape in ((2, 50, 70), (70, n), (2, 50, n)))
    assert product_alone(compiled(lambda x, w, r: (x @ w) * 2 + r, x, w, r))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_operands_of_any_strides_and_sizes(dtype: torch.dtype) -> None:
    x, w = torch.randn(80, 140).to(dtype), torch.randn(90, 70).to(dtype)
    compiled(lambda x, w: x[::2, 1::2] @ w.t(), x, w)
    compiled(lambda x, w: x[:6, ::2] @ w.t(), x, w)
    x, w = torch.randn(2, 21, 120).to(dtype), torch.randn(64, 120).to(dtype)
    compiled(lambda x, w: (x @ w.t()).view(2, 21, 2, 32).transpose(1, 2).contiguous(), x, w)
    compiled(lambda x, w: F.linear(x, w).transpose(1, 2).contiguous() + 1, x, w)
    torch._dynamo.reset()
    with recorded() as nodes, torch.no_grad():
        function = torch.compile(lambda x, w: (x @ w.t()).relu(), backend="pellucid", dynamic=True)
        for m, k, n in ((40, 70, 90), (3, 701, 9), (300, 2, 250), (7, 33, 1000)):
            x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            assert_matches(function(x, w), (x @ w.t()).relu(), (x.double() @ w.double().t()).relu())
    assert product_alone(nodes)


def test_beta_of_zero_ignores_what_is_added() -> None:
    x, w = torch.randn(3, 40, 70), torch.randn(3, 70, 90)
    compiled(lambda b, x, w: torch.baddbmm(b, x, w, beta=0), torch.full((90,), torch.nan), x, w)


@pytest.mark.parametrize("sizes", [(0, 5, 6), (5, 0, 6), (5, 6, 0), (5, 1, 6), (1, 5, 6), (5, 6, 1), (1, 1, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_nothing_and_of_one(sizes: tuple[int, int, int], dynamic: bool) -> None:
    m, k, n = sizes
    compiled(
        lambda b, x, w: torch.addmm(b, x, w).relu(),
        torch.randn(n),
        torch.randn(m, k),
        torch.randn(k, n),
        dynamic=dynamic,
    )


def test_one_kernel_serves_all_sizes() -> None:
    torch._dynamo.reset()
    with recorded() as nodes, torch.no_grad():
        function = torch.compile(lambda x, w: (x @ w.t()).relu(), backend="pellucid", dynamic=True)
        for m, k, n in ((40, 70, 90), (3, 700, 9), (300, 2, 250), (7, 33, 1000)):
            x, w = torch.randn(m, k), torch.randn(n, k)
            assert_matches(function(x, w), (x @ w.t()).relu(), (x.double() @ w.double().t()).relu())
    assert product_alone(nodes)


def test_what_is_not_finite_stays_where_eager_has_it() -> None:
    """Columns and terms that a register has beyond the matrix are zero, and must not meet an infinity.

    Eager's are not where it multiplies whole tiles: some of its rows are NaN for the infinity in another.
    """
    for m, dtype in itertools.product((3, 40), (torch.float32, *NARROW)):
        x, w = torch.randn(m, 37).to(dtype), torch.randn(37, 21).to(dtype)
        x[1, 3], x[2, 5], w[36, 20] = torch.inf, torch.nan, -torch.inf
        torch._dynamo.reset()
        for given in (w, w.t().contiguous().t()):
            made = torch.compile(torch.mm, backend="pellucid")(x, given)
            exact = (x.double() @ given.double()).to(dtype)
            torch.testing.assert_close(made, exact, equal_nan=True)


@pytest.mark.parametrize("m", [4, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_long_sums_are_as_exact_as_eagers(m: int, transposed: bool) -> None:
    """Mean square of the errors; sums of one sign, where rounding adds up. MKL's order depends on the machine."""
    torch.manual_seed(0)
    x, w = torch.rand(m, 10_000), torch.rand(64, 10_000).t() if transposed else torch.rand(10_000, 64)
    exact = x.double() @ w.double()
    torch._dynamo.reset()
    made = torch.compile(torch.mm, backend="pellucid")(x, w)
    assert (made - exact).square().mean() <= 2.5 * (x @ w - exact).square().mean()


def test_in_place_products_read_before_they_write() -> None:
    def function(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        b.addmm_(x, w)
        x.copy_(x @ w)
        return b + x

    b, x, w = torch.randn(50, 50), torch.randn(50, 50), torch.randn(50, 50)
    mine, theirs = (b.clone(), x.clone()), (b.clone(), x.clone())
    torch._dynamo.reset()
    made = torch.compile(function, backend="pellucid", options={"verify": True})(*mine, w)
    torch.testing.assert_close(made, function(*theirs, w))
    torch.testing.assert_close(mine, theirs)


def test_gradients_are_products_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.GELU(), torch.nn.Linear(90, 50))
    x = torch.randn(40, 70, requires_grad=True)

    def gradients(function: Callable[..., Any], module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(function(x).square().sum(), [x, *module.parameters()]))

    torch._dynamo.reset()
    with recorded() as nodes:
        made = gradients(torch.compile(model, backend="pellucid"), model, x)
    eager = gradients(model, model, x)
    exact = gradients(model.double(), model, x.detach().double().requires_grad_())
    assert_matches(made, eager, exact)
    kinds = [
        "aten" if isinstance(node, Extern) else "ours" for node, blocks in nodes if blocks or isinstance(node, Extern)
    ]
    weights = 2 if machine_for().isa.name == AVX2.isa.name else 0
    assert (kinds.count("ours"), kinds.count("aten")) == (6 - weights, weights), (
        "with AVX2, ATen has the gradients of weights, see machine/library.py"
    )


@pytest.mark.sampled
@pytest.mark.parametrize("m", [7, 65, 700])
@pytest.mark.parametrize("k", [1, 2, 49, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_are_only_stored_go_to_their_place_at_once(m: int, k: int, dtype: torch.dtype) -> None:
    """Past the caches if they are large: 700 x 512 of them are. Products of one term are no sums."""
    x, w = torch.randn(m, k).to(dtype), torch.randn(k, 512).to(dtype)
    ((_, blocks),) = compiled(lambda x, w: (x @ w).float(), x, w)
    assert blocks is None if k == 1 else blocks.stored is not None
    x, w = torch.randn(k, m), torch.randn(k, 512)
    ((node, blocks),) = compiled(lambda x, w: x.t() @ w, x, w)
    if isinstance(node, Kernel):  # with AVX2 it is ATen's
        assert blocks is None if k == 1 else blocks.stored is not None


def test_sums_are_stored_at_once_in_a_part_of_a_tensor_without_touching_the_rest() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        into = into.clone()
        into[:, 32:96] = x @ w
        return into

    compiled(function, torch.randn(70, 40), torch.randn(40, 64), torch.randn(70, 200))


def test_sums_that_something_else_is_done_with_go_through_a_block() -> None:
    x, w = torch.randn(70, 40), torch.randn(40, 96)
    for function, args in (
        (lambda x, w: (x @ w).relu(), (x, w)),
        (lambda x, w: x @ w, (x, torch.randn(40, 90))),  # columns that fill no panel
        (lambda x, w: x @ w, (torch.randn(70, 400), torch.randn(400, 96))),  # terms in several goes
        (lambda x, w: (x @ w).t().contiguous(), (x, w)),
        (lambda x, w: (x @ w).half(), (x, w)),
    ):
        blocks = [blocks for _, blocks in compiled(function, *args) if blocks]
        assert len(blocks) == 1
        assert blocks[0].stored is None


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [
        (torch.randn(40, 70), torch.randn(70, 180)[:, ::2], "neither rows nor columns"),
        (torch.randn(10, 20_000), torch.randn(20_000, 10), "few rows and columns"),
    ],
)
def test_aten_keeps_what_it_computes_faster(left: torch.Tensor, right: torch.Tensor, why: str) -> None:
    ((node, _),) = compiled(torch.mm, left, right)
    assert isinstance(node, Extern) and why in node.reason


def test_aten_keeps_transposed_operands_with_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "machine_for", lambda _: AVX2)
    ((node, _),) = compiled(torch.mm, torch.randn(70, 40).t(), torch.randn(70, 90))
    assert isinstance(node, Extern) and "columns of the left operand" in node.reason


@pytest.mark.parametrize("along", [True, False], ids=["terms", "columns"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (9, 70, 384),
        (49, 200, 500),  # columns that fill no panel
        (33, 386, 1000),  # units that fill no tile
        (126, 3002, 1030),
        (126, 770, 4096),  # fewer terms at last than a block has panels
        (300, 3000, 768),  # more rows than a block has
        (40, 71, 384),  # the last unit has one term
        (40, 2048, 384),  # lines of the weight are in one set of the cache
        (8, 70, 384),
        (256, 64, 128),
    ],
)
def test_weights_of_bf16_are_packed_from_either_layout(m: int, k: int, n: int, along: bool) -> None:
    """along: whether terms are neighbours in the weight, or columns."""
    x, w, b = (torch.randn(shape).bfloat16() for shape in ((m, k), (n, k) if along else (k, n), (n,)))
    x[m // 2, 3], w[-1, -1] = math.inf, math.nan
    compiled(lambda x, w, b: (x @ (w.t() if along else w) + b).relu(), x, w, b)


def test_aten_keeps_bf16_where_it_reaches_what_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that multiplies whole tiles, for a compiler that has no words for it."""
    machine = machine_for()
    rate = replace(machine.product, bf16=with_tiles(machine).product.bf16)
    slow = replace(machine.flops, bf16=machine.flops.f32)
    monkeypatch.setattr(pipeline, "machine_for", lambda _: replace(machine, product=rate, flops=slow))
    x, w = torch.randn(40, 70), torch.randn(70, 90)
    ((node, _),) = compiled(torch.mm, x.bfloat16(), w.bfloat16())
    assert isinstance(node, Extern) and "operations per nanosecond in bf16" in node.reason
    assert product_alone(compiled(torch.mm, x, w)) and product_alone(compiled(torch.mm, x.half(), w.half()))


def test_other_types_and_the_option_leave_products_to_aten() -> None:
    x, w = torch.randn(40, 70), torch.randn(70, 90)
    for args, options in (((x.double(), w.double()), {}), ((x, w), {"contract": False})):
        torch._dynamo.reset()
        with recorded() as nodes:
            made = torch.compile(torch.mm, backend="pellucid", options=options)(*args)
        assert torch.equal(made, torch.mm(*args))
        (node, _), *others = nodes
        assert not others and isinstance(node, Extern) and "matrix multiplication" in node.reason


@pytest.mark.parametrize(
    ("m", "k", "n", "rows"),
    [
        (196, 96, 576, 98),  # two cores, each with half of the rows
        (470, 96, 64, 236),
        (1000, 24, 144, 250),  # four pieces
        (196, 1024, 1024, 196),  # the right operand is too large for each core to keep
        (128, 96, 576, 64),
        (120, 96, 576, 120),  # to pack it twice would cost more than it gains
    ],
)
def test_cores_share_out_rows_where_each_keeps_the_right_operand(m: int, k: int, n: int, rows: int) -> None:
    ((_, blocks),) = compiled(lambda x, w: (x @ w).relu(), torch.randn(m, k), torch.randn(k, n))
    assert blocks.rows == rows


@pytest.mark.parametrize(
    ("rows", "columns", "ours"),
    [(64, 2, True), (2, 64, True), (1, 256, True), (256, 1, True), (64, 16, False), (32, 32, False), (5, 3, False)],
)
def test_few_rows_or_columns_of_many_terms(rows: int, columns: int, ours: bool) -> None:
    """Threads share out 64 columns, or rows of few; of fewer they could share only the terms, as ATen's do."""
    found = compiled(lambda x, y: x @ y, torch.randn(rows, 5000), torch.randn(5000, columns))
    assert any(isinstance(node, Extern) for node, _ in found) != ours
    compiled(lambda x, y: x.t() @ y, torch.randn(5000, rows), torch.randn(5000, columns))


@pytest.mark.parametrize(
    ("m", "k", "n"), [(16, 768, 256), (32, 200, 320), (300, 128, 10), (500, 96, 3), (150, 96, 17), (40, 80, 300)]
)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_the_columns_of_the_result_may_be_rows_of_blocks(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, w, b, r = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (n,), (m, n)))
    compiled(lambda x, w: x @ w.t(), x, w)
    compiled(lambda x, w: (w @ x.t()).t().contiguous(), x, w)
    compiled(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, x, w, b, r)
    compiled(lambda x, w, b, r: F.linear(x, w, b).tanh() + r, x, w, b, r, dynamic=True)
    compiled(lambda x, w: x.t().contiguous().t() @ w.t().contiguous(), x, w)


@pytest.mark.parametrize(("m", "n"), [(16, 300), (32, 300), (300, 16)])
def test_then_what_is_not_finite_stays_and_nothing_is_read_after_it_was_written(m: int, n: int) -> None:
    x, w, r = torch.randn(m, 80), torch.randn(n, 80), torch.randn(m, n)
    x[3, 5], w[7, 2] = torch.inf, torch.nan

    def function(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = r.clone().addmm_(x, w.t())
        return y, y.view(-1)[1:].relu()

    compiled(function, x, w, r)
    compiled(lambda x, w, r: (x @ w.t()).t().contiguous() * r.t(), x, w, r)
    compiled(lambda x, w: torch.stack((x @ w.t(), x @ w.t() + 1), -1), x, w)


BETWEEN_OTHERS = [
    ("tsd,bsd->btd", (24, 40, 64), (2, 40, 64), True),
    ("tsd,bsd->btd", (24, 40, 50), (3, 40, 50), True),
    ("bixy,ioxy->boxy", (3, 16, 5, 7), (16, 24, 5, 7), True),
    ("tsd,bsd->btd", (48, 40, 32), (48, 40, 32), False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("equation", "left", "right", "looped"), BETWEEN_OTHERS)
def test_matrices_that_lie_between_one_another(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], looped: bool, dtype: torch.dtype
) -> None:
    """Small ones are loops by vectors along the batch; of large ones blocks are fetched, in narrow types by ATen."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, a, b)

    made = compiled(function, torch.randn(left).to(dtype), torch.randn(right).to(dtype))
    products = [(node, blocks) for node, blocks in made if "bmm" in node.name]
    if looped or dtype is torch.float32:
        ((node, blocks),) = products
        assert isinstance(node, Kernel) and (blocks is None) == looped
    elif len(products) == 1:  # else the machine has no instructions for the type, and converts the operands
        assert isinstance(products[0][0], Extern) and "neither rows nor columns" in products[0][0].reason


def test_taps_of_depthwise_convolutions_are_not_taken_for_a_batch() -> None:
    """Their channels lie side by side too, and have blocks of their own."""
    x = torch.randn(2, 64, 14, 14).to(memory_format=torch.channels_last)
    w = torch.randn(64, 1, 3, 3, requires_grad=True)
    torch._dynamo.reset()
    with recorded() as nodes:
        run = torch.compile(torch.nn.functional.conv2d, backend="pellucid", options={"verify": True})
        run(x, w, None, 1, 1, 1, 64).sin().sum().backward()
    gradients = [blocks for node, blocks in nodes if "convolution_backward" in node.name]
    assert gradients and all(blocks is not None and blocks.by_channel for blocks in gradients)
