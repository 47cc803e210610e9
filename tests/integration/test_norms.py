"""Variances, norms and products next to eager's, with float64 as the judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.support import assert_matches

pytestmark = pytest.mark.usefixtures("quick_compiler")

Function = Callable[[torch.Tensor], torch.Tensor]

OFFSETS = (0.0, 1e3, 1e6)
# Rows of few elements, rows that one vector holds, and rows that are cut into chunks.
SHAPES = ((64, 2), (64, 3), (33, 768), (2, 100003))
EQUAL = (1.1, 3.3e-3, 1234.567, 1e6 + 0.3)


def variance(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.var(-1), x.std(-1)])


def variance_of_columns(x: torch.Tensor) -> torch.Tensor:
    return x.var(0)


def mean(x: torch.Tensor) -> torch.Tensor:
    return torch.var_mean(x, -1)[1]


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def group_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.group_norm(x.unsqueeze(0), 1)


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, training=True)


def gradient(function: Function) -> Function:
    def backward(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        y = function(x)
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y).cos()
        return torch.autograd.grad((y * weights).sum(), x)[0]

    return backward


def distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The mean error, in units of the mean magnitude of what is right."""
    return float((result.double() - exact).abs().mean() / exact.abs().mean())


def check_accuracy(function: Function, shape: tuple[int, int], offset: float, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="pellucid", dynamic=False)
    generator = torch.Generator().manual_seed(0)
    ours = eagers = 0.0
    for _ in range(4):
        x = (torch.randn(shape, generator=generator) + offset).to(dtype)
        exact = function(x.double())
        ours += distance(compiled(x), exact) / 4
        eagers += distance(function(x), exact) / 4
    # Eager adds squares up in f64, so that its variances are off by the last rounding only.
    assert ours <= max(2 * eagers, torch.finfo(dtype).eps), (ours, eagers)


@pytest.mark.sampled
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [variance, layer_norm, rms_norm, group_norm])
def test_norms_of_rows_far_from_zero_are_as_accurate_as_eagers(
    function: Function, shape: tuple[int, int], offset: float
) -> None:
    check_accuracy(function, shape, offset, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_means_of_rows_far_from_zero_are_as_accurate_as_eagers(shape: tuple[int, int]) -> None:
    for offset in OFFSETS[1:]:
        check_accuracy(mean, shape, offset, torch.float32)


def test_the_mean_of_rows_around_zero_is_not_corrected_by_less_than_the_distances_are_rounded() -> None:
    """Distances from one mean are all rounded to the same side: their own mean is no correction, but an error."""
    torch._dynamo.reset()
    x = torch.randn(33, 768, generator=torch.Generator().manual_seed(0))
    exact = mean(x.double())
    ours = torch.compile(mean, backend="pellucid")(x)
    assert distance(ours, exact) <= 2 * distance(x.mean(-1), exact)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("function", [variance_of_columns, batch_norm])
def test_norms_of_columns_far_from_zero_are_as_accurate_as_eagers(function: Function, offset: float) -> None:
    for shape in ((3, 64), (33, 768), (20011, 8)):
        check_accuracy(function, shape, offset, torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("function", [variance, layer_norm, batch_norm], ids=lambda each: each.__name__)
def test_gradients_of_norms_are_as_accurate_as_eagers(function: Function) -> None:
    for shape in ((64, 2), (64, 3), (33, 768)):
        for offset in OFFSETS[:2]:
            check_accuracy(gradient(function), shape, offset, torch.float32)


@pytest.mark.parametrize("function", [variance, layer_norm])
def test_norms_of_bf16_are_as_accurate_as_eagers(function: Function) -> None:
    check_accuracy(function, (33, 768), 10.0, torch.bfloat16)


@pytest.mark.sampled
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("shape", [(5, 1), (5, 2), (5, 3), (7, 100), (2, 100003), (300, 64)])
def test_equal_elements_have_no_variance_and_are_their_own_mean(shape: tuple[int, int], expanded: bool) -> None:
    def moments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = torch.var_mean(x, -1, correction=0), torch.var_mean(x, 0, correction=0)
        return *rows, *columns, functional.layer_norm(x, x.shape[-1:], eps=1e-12), x.std(-1, correction=0)

    torch._dynamo.reset()
    compiled = torch.compile(moments, backend="pellucid", dynamic=False)
    for dtype in (torch.float32, torch.float64):
        for number in EQUAL:
            value = torch.tensor(number, dtype=dtype)
            variance, mean, variance_0, mean_0, normal, deviation = compiled(
                value.expand(shape) if expanded else value.repeat(shape)
            )
            assert not any(bool(each.any()) for each in (variance, variance_0, normal, deviation))
            assert bool((mean == value).all()) and bool((mean_0 == value).all())


def test_means_next_to_infinities_stay_infinite() -> None:
    x = torch.ones(8, 3)
    x[2, 1] = torch.inf
    running = [torch.zeros(3), torch.ones(3)]
    eagers = [each.clone() for each in running]

    def update(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, mean, variance, training=True)

    torch.compile(update, backend="pellucid")(x, *running)
    update(x, *eagers)
    torch.testing.assert_close(running, eagers, equal_nan=True)


def test_sums_of_a_few_dozen_rows_are_as_accurate_as_eagers() -> None:
    """Over all sizes together: single sums are off by chance."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    for dynamic, rows in ((False, (24, 33, 40, 48)), (True, range(20, 60, 3))):
        compiled = torch.compile(lambda x: x.sum(0), backend="pellucid", dynamic=dynamic)
        for count in rows:
            ours = eagers = 0.0
            for columns in (256, 257) if dynamic else (256,):
                x = torch.rand(count, columns, generator=generator)
                exact = x.double().sum(0)
                ours += distance(compiled(x), exact)
                eagers += distance(x.sum(0), exact)
            assert ours <= 1.6 * eagers, (dynamic, count, ours, eagers)


def test_products_of_thousands_are_as_accurate_as_eagers() -> None:
    """In any order a product of n numbers is rounded n - 1 times, so only the mean over many tells something."""
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(0.05 * torch.randn(256, 5000, generator=generator))
    exact = x.double().prod(1)
    ours = torch.compile(lambda x: x.prod(1), backend="pellucid")(x)
    one = torch.ones_like(exact)
    assert distance(ours / exact, one) <= 1.5 * distance(x.prod(1) / exact, one)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_means_of_large_integers_are_as_accurate_as_eagers(dtype: torch.dtype) -> None:
    x = torch.randint(1 << 29, 1 << 30, (64, 5000), generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double().mean(1)
    ours = torch.compile(lambda x: x.mean(1, dtype=torch.float32), backend="pellucid")(x)
    assert distance(ours, exact) <= 2 * distance(x.mean(1, dtype=torch.float32), exact)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 6), 3), ((2, 6, 5), 6), ((3, 8, 4, 5), 1), ((0, 4, 3), 2), ((2, 8, 3, 4, 5), 4), ((1, 6, 1), 3)],
)
@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight and bias"])
def test_group_norm_and_its_statistics(shape: tuple[int, ...], groups: int, affine: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    channels, pixels = shape[1], torch.Size(shape[2:]).numel()
    x = torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(channels).to(dtype) if name in affine else None for name in ("weight", "bias"))

    def function(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return torch.native_group_norm(x, weight, bias, shape[0], channels, pixels, groups, 1e-5)

    args = [x, weight, bias]
    exact = function(*(None if arg is None else arg.double() for arg in args))
    assert_matches(torch.compile(function, backend="pellucid")(*args), function(*args), exact)


def test_statistics_of_a_group_norm_have_the_type_of_its_parameters() -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(2, 6, 5).bfloat16(), torch.randn(6)

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_group_norm(x, weight, None, 2, 6, 5, 3, 1e-5)

    exact = function(x.double(), weight.double())
    assert_matches(torch.compile(function, backend="pellucid")(x, weight), function(x, weight), exact)


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_of_no_elements_is_empty(dim: int) -> None:
    def rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.softmax(dim), x.log_softmax(dim) + 1, x.softmax(dim).sum(dim)

    torch._dynamo.reset()
    x = torch.randn(4, 0)
    results = torch.compile(rows, backend="pellucid", options={"verify": True})(x)
    for result, expected in zip(results, rows(x), strict=True):
        assert result.shape == expected.shape
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((24, 8, 5), 0), ((24, 8, 5), 2), ((7, 30), 0), ((1, 3, 4, 5), 3)])
def test_gradients_of_normed_weights_are_as_accurate_as_eagers(
    shape: tuple[int, ...], dim: int, transposed: bool, dtype: torch.dtype
) -> None:
    sizes = [size if each == dim else 1 for each, size in enumerate(shape)]
    tensors = [torch.randn(each).to(dtype) for each in (shape, sizes, shape)]
    if transposed:
        tensors[2] = tensors[2].mT.contiguous().mT

    def gradients(norm: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
        v, g, seed = tensors
        v, g = (each.clone().requires_grad_() for each in (v, g))
        return list(torch.autograd.grad(norm(v, g, dim), (v, g), seed))

    torch._dynamo.reset()
    made = gradients(torch.compile(torch._weight_norm, backend="pellucid"), *tensors)
    wide = gradients(torch._weight_norm, *(each.double() for each in tensors))
    assert_matches(made, gradients(torch._weight_norm, *tensors), wide)
