"""Whatever Dynamo and AOTAutograd capture runs, and runs right: each against eager mode, float64 as the judge."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from pellucid.backend import last_compilations
from pellucid.errors import UserError
from pellucid.runnable import load_kernels
from tests.support import assert_matches, check, compiled, widened

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def check_gradients(function: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Results and gradients of all float arguments."""

    def run(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]
        results = torch.utils._pytree.tree_leaves(call(*leaves))
        sum(result.sum() for result in results if result.requires_grad).backward()
        return [result.detach() for result in results], [leaf.grad for leaf in leaves]

    assert_matches(run(compiled(function, **how), args), run(function, args), run(function, widened(args)))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------- sizes that depend on data


DATA_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: ((x + 1).nonzero() * 2, x.nonzero().shape[0]),
    "mask": lambda x: ((x[x > 0] * 2).sum(), x[x > 0].exp()),
    "masked_select": lambda x: x.masked_select(x > 0) + 1,
    "unique": lambda x: torch.unique((x * 2).long()) + 1,
    "rows by position": lambda x: x[x.nonzero()[:, 0]] * 2,
    "float item": lambda x: (x * x.sum().item(), torch.full((3,), x.max().item() / 2)),
    "int item": lambda x: (x + x.long().sum().item(), x * (x.long().sum().item() * 2 + 1)),
    "between random numbers": lambda x: (x[F.dropout(x) > 0] + 1).sum() + torch.rand(3),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_sizes_and_numbers_from_data(name: str) -> None:
    function = DATA_DEPENDENT[name]

    def seeded(x: Tensor) -> Any:
        return function(x)

    run = compiled(seeded)
    for x in (randn(4, 5), randn(4, 5, seed=1), -torch.ones(4, 5), torch.zeros(4, 5)):
        torch.manual_seed(0)
        actual = run(x)
        torch.manual_seed(0)
        expected = function(x)
        torch.manual_seed(0)
        assert_matches(actual, expected, expected if "random" in name else function(x.double()))
    assert last_compilations()[-1].fallbacks >= 1


def test_a_size_from_data_is_checked_and_used() -> None:
    def function(x: Tensor) -> Tensor:
        size = x.sum().item()
        torch._check(size >= 0)
        torch._check(size < 100)
        return x.new_zeros(size) + 1

    run = check(function, (torch.tensor([3, 4]),), (torch.tensor([0, 0]),), (torch.tensor([50, 1]),))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        run(torch.tensor([50, 70]))


@pytest.mark.sampled
def test_gradients_through_sizes_from_data() -> None:
    check_gradients(lambda x: ((x[x > 0] * 2).sum(), x[x > 0].exp()), randn(4, 5))
    check_gradients(lambda x: x * x.sum().item() + x[x > 0].sin().sum(), randn(4, 5))


def test_graphs_without_such_nodes_are_one_program() -> None:
    run = compiled(lambda x: torch.softmax(x[: min(x.shape[0], 3)], 0), dynamic=True)
    run(randn(4, 5))
    assert last_compilations()[-1].fallbacks == 0


def test_arguments_are_let_go_between_segments() -> None:
    """What a call by Python returns is freed after its last use, while the rest of the graph still runs."""
    import weakref

    from pellucid.options import make_options
    from pellucid.pipeline import compile_graph

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    freed: list[bool] = []
    dead: list[Any] = []

    def watch(tensor: Tensor) -> Tensor:
        freed.append(dead[0]() is None)
        return tensor + 1

    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    first = graph.call_function(double, (x,))
    first.meta["val"] = torch.empty(4)
    second = graph.call_function(torch.ops.aten.sin.default, (first,))
    second.meta["val"] = torch.empty(4)
    last = graph.call_function(watch, (second,))
    last.meta["val"] = torch.empty(4)
    graph.output((last,))
    run, record = compile_graph(torch.fx.GraphModule({}, graph), "inference", make_options({"verify": True}))
    value = torch.ones(4)
    dead.append(weakref.ref(value))
    args = [value]
    del value
    (result,) = run(args)
    assert args == [] and freed == [True] and len(record.eager) == 2
    assert torch.allclose(result, torch.full((4,), math.sin(2.0) + 1))


# ------------------------------------------------------------------------------------------ higher-order operators


@pytest.mark.sampled
def test_cond_takes_either_branch() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2 + 1, lambda x: (x * 3).cos(), (x * 2,))

    check(function, (randn(4, 5).abs(),), (-randn(4, 5).abs(),))
    check_gradients(function, randn(4, 5).abs())
    check_gradients(function, -randn(4, 5).abs())
    torch._dynamo.reset()
    check(function, (randn(4, 5).abs(),), (-randn(7, 3).abs(),), dynamic=True)


def test_the_branches_of_cond_are_compiled() -> None:
    compiled(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(randn(4))
    compilation = last_compilations()[-1]
    assert compilation.kernels >= 3 and compilation.fallbacks == 1


def test_while_loop() -> None:
    def function(x: Tensor) -> Any:
        return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (torch.tensor(0), x))

    check(function, (randn(4),))


def test_flex_attention() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * 2, k, v, score_mod=lambda score, b, h, i, j: score + (i - j)) + 1

    check(function, tuple(randn(1, 2, 8, 4, seed=seed) for seed in range(3)))


@pytest.mark.sampled
def test_scan_and_its_gradient() -> None:
    def function(x: Tensor) -> Any:
        return scan(lambda carry, row: (carry + row * 2, (carry * row).sin()), x[0].clone(), x, dim=0)

    check(function, (randn(4, 5),))
    check_gradients(function, randn(4, 5))


def test_nested_compile_regions() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin() + 1

    def function(x: Tensor) -> Tensor:
        return region(x, x + 1) + region(x * 2, x)

    check(function, (randn(4, 5),))
    check_gradients(function, randn(4, 5))


# ----------------------------------------------------------------------- sizes that the index algebra has no form for


DERIVED: dict[str, Callable[[Tensor], Any]] = {
    "minimum": lambda x: x[: min(x.shape[0], 10)] * 2,
    "maximum": lambda x: x.new_full((max(x.shape[0], x.shape[1]),), 1.0),
    "truncated quotient": lambda x: x.new_zeros(int(x.shape[0] / 3)) + 1,
    "ceiling and rounding": lambda x: (x[: math.ceil(x.shape[0] * 0.3)] + 1, x[: round(x.shape[0] * 0.7)] * 2),
    "shift and power": lambda x: (x[: x.shape[0] >> 1] + 1, x.new_ones(2 ** (x.shape[0] // 8))),
    "factor": lambda x: x * (x.shape[0] / 3) + x.clamp(-x.shape[0] / 20, x.shape[0] / 20),
    "exponent": lambda x: x.abs() ** (x.shape[1] / 2),
    "fill": lambda x: torch.full((3,), math.sqrt(x.shape[0])),
    "alpha": lambda x: torch.add(x, x, alpha=x.shape[0] / 7),
    "negative": lambda x: torch.roll(x, x.shape[0] - 20, 0) + (x.shape[0] - 20),
    "argument of ATen": lambda x: torch.arange(0, x.shape[0] / 2, 0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", DERIVED)
def test_sizes_beyond_the_index_algebra(name: str) -> None:
    check(DERIVED[name], (randn(14, 3),), (randn(17, 5),), (randn(33, 40),), dynamic=True)


def test_interpolation_by_a_factor() -> None:
    for mode in ("nearest", "bilinear"):
        torch._dynamo.reset()
        check(
            lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode),
            (randn(2, 3, 14, 8),),
            (randn(2, 3, 7, 9),),
            dynamic=True,
        )


def test_numbers_as_arguments() -> None:
    def function(x: Tensor, n: int, r: float) -> Any:
        return x * n + n, torch.full_like(x, r) * r + r

    check(function, (randn(14, 3), -3, 0.5), (randn(7, 4), 5, -2.25), (randn(7, 4), 7, 3.0), dynamic=True)


# ----------------------------------------------------------------------------------------------------- export


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return F.gelu(self.linear(x)) * (x.shape[0] / 3) + self.calls


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_programs(decomposed: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    program = torch.export.export(model, (randn(4, 5),), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
    program = program.run_decompositions() if decomposed else program
    ours, theirs = program.module(), copy.deepcopy(model)
    run = compiled(ours, dynamic=True)
    for rows in (4, 9, 31):
        x = randn(rows, 5)
        assert_matches(run(x), theirs(x), copy.deepcopy(theirs).double()(x.double()) - 1)


# --------------------------------------------------------------------------------------- programs in an outline's trace


def test_the_trace_tells_how_a_graph_was_split(tmp_path: Any) -> None:
    compiled(lambda x: (x + 1).nonzero() * 2, options={"trace": str(tmp_path)})(randn(4, 5))
    (outline,) = (path.read_text() for path in tmp_path.rglob("segments.txt"))
    assert "nonzero = aten.nonzero.default(add)    # the size or value of its result depends on data" in outline
    assert "segment_0(arg0_1) -> add" in outline and "u0 = nonzero.size()[0]" in outline
    runs = [path for path in tmp_path.glob("*/graphs/*") if not (path / "segments.txt").exists()]
    assert len(runs) == 2 and all((run / "output_code.py").exists() for run in runs)


def test_derived_numbers_are_in_the_output_code(tmp_path: Any) -> None:
    x = randn(14, 3)
    run = compiled(
        lambda x: x[: min(x.shape[0], 10)] * (x.shape[0] / 3), dynamic=True, options={"trace": str(tmp_path)}
    )
    expected = run(x)
    (path,) = tmp_path.rglob("output_code.py")
    scope: dict[str, Any] = {"__name__": "output_code", "__file__": str(path)}
    exec(path.read_text(), scope)
    given = [14, 3, x]
    assert torch.equal(scope["call"](given, load_kernels(scope["SOURCES"]))[0], expected)


# ----------------------------------------------------------------------------------------------- operators of users


@torch.library.custom_op("pellucid_test::twice", mutates_args=())
def twice(x: Tensor, times: int) -> tuple[Tensor, list[Tensor]]:
    return x * 2, [x + k for k in range(times)]


@twice.register_fake
def _(x: Tensor, times: int) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x) for _ in range(times)]


@torch.library.custom_op("pellucid_test::count", mutates_args=())
def count(x: Tensor) -> int:
    return int((x > 0).sum())


@count.register_fake
def _(x: Tensor) -> int:
    return torch.library.get_ctx().new_dynamic_size()


@torch.library.custom_op("pellucid_test::bump", mutates_args=("x",))
def bump(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("pellucid_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("pellucid_test::unfaked", mutates_args=())
def unfaked(x: Tensor) -> Tensor:
    return x + 3


def test_custom_operators() -> None:
    def several(x: Tensor) -> Any:
        first, rest = twice(x + 1, 2)
        return first * 2 + rest[1], rest[0]

    def mutating(x: Tensor) -> Any:
        y = x * 2
        bump(y, x)
        bump(x, y)
        return y + 1

    check(several, (randn(4, 5),))
    torch._dynamo.reset()
    check(lambda x: x.new_ones(count(x * 2)) + count(x), (randn(4, 5),), (-torch.ones(4, 5),))
    torch._dynamo.reset()
    check(mutating, (randn(4, 5),))
    check_gradients(lambda x: cube(x * 2) + 1, randn(4, 5))


def test_a_custom_operator_without_fake_is_refused_by_name() -> None:
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"no fake impl registered for .*unfaked"):
        compiled(lambda x: unfaked(x * 2) * 3)(randn(4, 5))


# ------------------------------------------------------------------------------------------------- tensor subclasses


class Scaled(torch.Tensor):
    """A wrapper: `inner * scale`, computed on the inner tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor, scale: float) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)  # type: ignore[return-value]

    def __init__(self, inner: Tensor, scale: float) -> None:
        self.inner, self.scale = inner, scale

    def __repr__(self) -> str:
        return f"Scaled({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: float, *_: Any) -> Scaled:
        return Scaled(inner["inner"], scale)

    @staticmethod
    def _plain(leaf: Any) -> Any:
        return leaf.inner * leaf.scale if isinstance(leaf, Scaled) else leaf

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scales = [leaf.scale for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Scaled)]
        plain = torch.utils._pytree.tree_map(
            lambda leaf: leaf.inner * leaf.scale if isinstance(leaf, Scaled) else leaf, args
        )
        result = function(*plain, **(kwargs or {}))
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].inner.detach(), args[0].scale)
        return Scaled(result / scales[0], scales[0]) if isinstance(result, Tensor) else result


def test_tensor_subclasses() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2 + 1).sin()

    x = randn(4, 5)
    result, expected = compiled(function)(Scaled(x, 2.0)), function(Scaled(x, 2.0))
    assert type(result) is Scaled and result.scale == expected.scale
    assert_matches(result.inner, expected.inner, function(Scaled(x.double(), 2.0)).inner)


# -------------------------------------------------------------------------------------------- modes and transforms


def test_autocast_inside_and_outside() -> None:
    linear = torch.nn.Linear(16, 16)

    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.gelu(linear(x)) * 2

    run, plain = compiled(inside), compiled(lambda x: F.gelu(linear(x)) * 2)
    x = randn(4, 16)
    wide = F.gelu(copy.deepcopy(linear).double()(x.double())) * 2
    assert_matches(run(x), inside(x), wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_matches(plain(x), inside(x), wide)
    assert plain(x).dtype is torch.float32


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: torch.func.vmap(lambda row: (row * row.sum()).sin())(x),
    "grad": lambda x: torch.func.grad(lambda y: (y.sin() * y).sum())(x),
    "jvp": lambda x: torch.func.jvp(lambda y: y.exp() * y, (x,), (x + 1,)),
    "per-sample": lambda x: torch.func.vmap(torch.func.grad(lambda row: (row**3).sum()))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name: str) -> None:
    check(TRANSFORMS[name], (randn(4, 5),))


def test_gradient_modes_mix() -> None:
    def function(x: Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        return y + x, y

    check_gradients(function, randn(4, 5))
    run = compiled(lambda x: x.sin() * 2)
    with torch.inference_mode():
        x = randn(4, 5)
        assert_matches(run(x), x.sin() * 2, x.double().sin() * 2)
    assert_matches(run(x.clone()), x.sin() * 2, x.double().sin() * 2)


# ---------------------------------------------------------------------------- mutation, aliases, odd inputs and outputs


@dataclass
class Pair:
    first: Tensor
    second: Any


torch.utils._pytree.register_dataclass(Pair)


def _into_views(x: Tensor) -> Tensor:
    x[1:].mul_(2)
    x.t()[0].add_(1)
    return x * 2


def _into_a_mask(x: Tensor) -> Tensor:
    x[x > 0] = 0.5
    return x + x.nonzero().shape[0]


ODD: dict[str, Callable[[Tensor], Any]] = {
    "views written to": _into_views,
    "a mask written to": _into_a_mask,
    "inputs and duplicates returned": lambda x: (x, x, x[1:], (y := x + 1), y, y.view(-1)),
    "nothing and numbers": lambda x: (None, x + 1, 3, x.shape[0], "text", {"a": x * 2, "b": [None]}),
    "no tensors": lambda x: (x.shape[0] * 2, torch.ones(2)),
    "containers": lambda x: Pair(x + 1, {"rest": (x * 2, Pair(x, None))}),
    "before the memory of the input": lambda x: x[2:].as_strided((3,), (1,), 0) * 2,
    "complex numbers": lambda x: (x * 1j + x, (x * 1j).abs(), torch.view_as_real((x * 1j).conj().resolve_conj())),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_inputs_and_outputs(name: str) -> None:
    check(ODD[name], (randn(4, 5),))


def test_conjugate_and_sliced_inputs() -> None:
    z = torch.complex(randn(4, 5), randn(4, 5, seed=1))
    run = compiled(lambda z: (z.real * 2, z.imag + 1, z * 2))
    for given in (z, z.conj(), z.t().conj()):
        theirs = (given.real * 2, given.imag + 1, given * 2)
        assert all(torch.allclose(a, b) for a, b in zip(run(given), theirs, strict=True))
    x = randn(12)
    sliced = compiled(lambda x: x.as_strided((3,), (1,), 0) * 2)
    assert torch.equal(sliced(x[4:]), x[:3] * 2)


def test_sparse_inputs() -> None:
    x = randn(4, 5).relu()
    run = compiled(lambda s, y: torch.sparse.mm(s, y) * 2, fullgraph=False)
    y = randn(5, 3, seed=1)
    assert torch.allclose(run(x.to_sparse(), y), x @ y * 2)


# ------------------------------------------------------------------------------------------------------ training


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_with_the_optimizer_compiled(name: str) -> None:
    """Against Dynamo without a compiler: it traces the optimizers' formulas for compilation, which round otherwise."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    models = [copy.deepcopy(eager), eager, copy.deepcopy(eager).double()]
    x = randn(4, 8)
    for position, model in enumerate(models):
        optimizer = OPTIMIZERS[name](model.parameters())
        step = (
            compiled(optimizer.step, fullgraph=False)
            if position == 0
            else torch.compile(optimizer.step, backend="aot_eager")
        )
        data = x.double() if position == 2 else x
        for _ in range(5):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            step()
    assert_matches(*([p.detach() for p in model.parameters()] for model in models))


def test_a_backward_call_inside_a_compiled_function_leaves_the_compiler_uncaptured() -> None:
    """Dynamo compiles what comes after such a call, and would compile Pellucid too, which runs in it."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
    wide = copy.deepcopy(model).double()

    def step(model: torch.nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach() * 2

    call, x = compiled(step, fullgraph=False), randn(2, 3, 16, 16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = [call(model, x) for _ in range(3)]
    eager, exact = copy.deepcopy(model), [step(wide, x.double()) for _ in range(3)]
    eager.zero_grad()
    assert_matches(results, [step(eager, x) for _ in range(3)], exact)
    ours, theirs, judge = ([p.grad for p in each.parameters()] for each in (model, eager, wide))
    assert_matches(ours, theirs, judge)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x.t().exp() * w.t()).sin(),
        lambda x, w: (x * w[:1].expand(6, 5).exp()).sin() * x[:1].expand(6, 5).cos(),
        lambda x, w: (x.t().exp() * w.t()).round(),  # the gradient does not need what backward gets
    ],
)
def test_saved_tensors_that_hooks_lay_out_otherwise(function: Callable[..., Tensor], dynamic: bool) -> None:
    def gradients(call: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
        args = tuple(arg.clone().requires_grad_() for arg in args)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().contiguous().clone(), lambda t: t):
            result = call(*args)
        (result * torch.arange(result.numel()).view(result.shape)).sum().backward()
        return [arg.grad for arg in args if arg.grad is not None]

    x, w = randn(6, 5), randn(6, 5)
    ours = gradients(compiled(function, dynamic=dynamic), x, w)
    assert_matches(ours, gradients(function, x, w), gradients(function, x.double(), w.double()))


def test_saved_tensors_that_hooks_change() -> None:
    x = randn(6, 5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().bfloat16(), lambda t: t):
        result = compiled(lambda x: x.exp().sin())(x)
    with pytest.raises(UserError, match=r"is torch.bfloat16 .* was torch.float32 (?s:.*) a hook on"):
        result.sum().backward()


def test_compiled_autograd() -> None:
    """Its graphs take a list among their arguments."""
    model = torch.nn.Linear(3, 3)
    wide, x = copy.deepcopy(model).double(), randn(2, 3)

    def step(model: torch.nn.Module, x: Tensor) -> None:
        model(x).sin().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(step, fullgraph=False)(model, x)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    step(model, x)
    step(wide, x.double())
    assert_matches(ours, [p.grad for p in model.parameters()], [p.grad for p in wide.parameters()])


def test_hooks_and_checkpoints() -> None:
    def checkpointed(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout((x @ w).sin(), 0.0) * 2, x, use_reentrant=False) + 1

    check_gradients(checkpointed, randn(4, 5), randn(5, 3, seed=1))

    def hooked(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    check_gradients(hooked, randn(4, 5), fullgraph=False)


def test_dropout_is_recomputed_alike_in_a_checkpoint() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)

    x = torch.ones(64, requires_grad=True)
    y = compiled(function)(x)
    y.sum().backward()
    kept = y.detach() != 0
    assert x.grad is not None and torch.equal(x.grad != 0, kept) and kept.any() and not kept.all()


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_jagged_tensors(dynamic) -> None:
    """A jagged dimension is a symbol without a number: it names the offsets."""

    def jagged(*sizes: int) -> torch.Tensor:
        torch.manual_seed(0)
        parts = [torch.randn(size, 8) for size in sizes]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sin(), torch.nn.functional.layer_norm(x, (8,)).to_padded_tensor(0.0).sum(1)

    run = torch.compile(function, backend="pellucid", dynamic=dynamic)
    for sizes in ((2, 4), (3, 1, 5), (2, 4)):
        ours, eager = jagged(*sizes), jagged(*sizes)
        results, expected = run(ours), function(eager)
        torch.testing.assert_close(results[0].values(), expected[0].values())
        torch.testing.assert_close(results[1], expected[1])
        (results[0].values().sum() + results[1].square().sum()).backward()
        (expected[0].values().sum() + expected[1].square().sum()).backward()
        torch.testing.assert_close(ours.grad.values(), eager.grad.values())


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(5, 7), (33, 65), (3, 16), (1, 1), (4, 129)])
def test_rolled_and_padded_neighbours(shape: tuple[int, int]) -> None:
    """Masks of neighbouring positions: with no lane, with all of them, and across both ends of a register."""

    def function(u: Tensor) -> tuple[Tensor, ...]:
        near = u + 0.1 * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-2, 1) - 4 * u)
        padded = F.pad(u, (3, 2, 1, 20), value=2.0)
        at = torch.arange(u.shape[1])
        return near, padded, torch.where(at < 3, u, -u), torch.where(at >= u.shape[1] - 1, u, u * u)

    check(function, (torch.randn(shape),))
    check(function, (torch.randn(shape, dtype=torch.float64),))
    check(function, (torch.randn(shape).to(torch.bfloat16),))
