"""Complex numbers are computed by kernels, as pairs of real ones, with eager's results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import compiled, meaningful_strides, recorded_fallbacks, tensors

pytestmark = pytest.mark.usefixtures("quick_compiler")

VIEWS = {"aten::view_as_real.default", "aten::view_as_complex.default", "aten::resolve_conj.default"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def check(function: Callable[..., Any], *args: Any, left: Collection[str] | None = (), **how: Any) -> None:
    """Results, strides and changed arguments are eager's; no more is left to ATen than views of memory and `left`.

    left: None if that does not matter.
    """
    with recorded_fallbacks() as called:
        ours, own = (lambda given: (compiled(function, **how)(*given), given))(copy.deepcopy(args))
    assert left is None or set(called) <= {*VIEWS, *left}, called
    theirs, given = (lambda given: (function(*given), given))(copy.deepcopy(args))
    for a, b in zip(tensors((ours, own)), tensors((theirs, given)), strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape and meaningful_strides(a) == meaningful_strides(b)
        torch.testing.assert_close(a, b, equal_nan=True)


def numbers(*shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(math.prod(shape)))


def rotary(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)

    return turn(q), turn(k)


def filled(x: Tensor) -> Tensor:
    z = torch.zeros(x.shape, dtype=x.dtype)
    z[..., 1:3] = x[..., 1:3] * 2
    return z


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda x, y: (x + y, x - 2 * y, x * y, -x, x * (0.5 - 2j) + 1),
    "quotients": lambda x, y: (x / y, x / 3, 1 / y, y.reciprocal(), x / y.abs()),
    "real-and-complex": lambda x, y: (x * y.real, x.real - y, x + y.imag, x**2),
    "functions": lambda x, y: (x.exp(), (x + 3).abs(), (y + 3).angle(), x.conj(), torch.polar(x.abs(), y.real)),
    "parts": lambda x, y: (x.real * y.imag, torch.view_as_real(x * y), torch.complex(x.imag, y.real)),
    "parts-that-are-returned": lambda x, y: ((x * y).real, (x + y).imag),
    "sums": lambda x, y: (x.sum(), (x * y).sum(1), y.mean(0), x.cumsum(0)),
    "products": lambda x, y: (x @ y.mT, (x.conj()[None] @ y.mT[None])),
    "moved": lambda x, y: (torch.cat([x, y * 2]), torch.stack([x, y], 1), x.flip(0) + y.roll(1, 1), x.T * 2),
    "picked": lambda x, y: (x[:, 1:4] * 2, x[torch.tensor([2, 0])] + 1, torch.where(x.real > 0, x, y), filled(x)),
    "split": lambda x, y: [part * 2 for part in (x + y).split(2, 1)],
    "converted": lambda x, y: (x.to(torch.complex128) * y, x.real.to(torch.complex64) + y),
    "compared": lambda x, y: (torch.where(x == y, x, y * 2), x.real == y, x != y),
}

LEFT = {
    "functions": {"aten::conj_physical.default"},  # what is returned is a whole tensor
    "sums": {"aten::cumsum.default"},
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "conjugated"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, layout: str) -> None:
    x = {
        "contiguous": numbers(4, 6),
        "transposed": numbers(6, 4).T,
        "sliced": numbers(5, 9)[1:, 3:],
        "conjugated": numbers(4, 6).conj(),
    }[layout]
    program = PROGRAMS[name]
    check(lambda x, y: program(x + 1, -y), x, numbers(4, 6).flip(0), left=LEFT.get(name, ()))
    check(program, x, numbers(4, 6).flip(0), left=None)  # calls that have no other beside them are ATen's


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    ends = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan]
    all_of_them = torch.tensor([complex(a, b) for a in ends for b in ends], dtype=dtype)
    one, other = all_of_them.repeat(len(all_of_them)), all_of_them.repeat_interleave(len(all_of_them))

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, y = -x, -y
        return x * y, x / y, x.abs(), x.exp(), x * 2.0, y.conj() * x.real

    check(function, one, other)


def test_rotary_embeddings_are_one_kernel() -> None:
    angles = torch.polar(torch.ones(8, 16), torch.randn(8, 16))
    check(rotary, torch.randn(2, 8, 3, 32), torch.randn(2, 8, 3, 32), angles)
    check(rotary, torch.randn(2, 8, 3, 32).bfloat16(), torch.randn(2, 8, 3, 32).bfloat16(), angles)


def test_sizes_that_are_not_known() -> None:
    run = compiled(lambda x, y: ((x * y).abs(), (x @ y.mT).real, x.exp() / 2), dynamic=True)
    for rows, columns in ((3, 5), (7, 4), (9, 11)):
        x, y = numbers(rows, columns), numbers(rows, columns).flip(1)
        for a, b in zip(run(x, y), ((x * y).abs(), (x @ y.mT).real, x.exp() / 2), strict=True):
            torch.testing.assert_close(a, b)


def by_sizes(x: Tensor) -> tuple[Tensor, ...]:
    rows, columns = x.shape
    y = x + 1
    filled = torch.full((rows,), columns, dtype=x.dtype) + y[:, 0]
    return y * rows, rows - y, y / columns, columns / y, torch.add(y, x, alpha=rows), y == rows, x.mean(), filled


@pytest.mark.parametrize("trained", [False, True])
def test_numbers_that_only_a_call_tells(trained: bool) -> None:
    run = compiled(by_sizes, dynamic=True)
    for shape in ((3, 5), (7, 4)):
        x = numbers(*shape).requires_grad_(trained)
        ours, theirs = run(x), by_sizes(x)
        if trained:
            ours, theirs = (torch.autograd.grad(sum((y * 1).abs().sum() for y in each), x) for each in (ours, theirs))
        torch.testing.assert_close(ours, theirs)


def test_arguments_that_are_changed() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.view_as_real(x).sum(0)
        x.mul_(y).add_(1)
        return before, x.abs()

    check(function, numbers(4, 6), numbers(4, 6).flip(0), left={"aten::copy_.default", "aten::clone.default"})


def changed(x: Tensor) -> Tensor:
    """Of few elements: kernels that read the argument would be put behind its change."""
    before = (x * 2)[torch.tensor([0, 0])].to(torch.complex128)
    x.fill_(1)
    return before


def overwritten(x: Tensor) -> Tensor:
    before, z = (x * 2)[:2].sum(0), x.real + 1j
    z.imag[0] = 3
    x.copy_(z)
    return before


@pytest.mark.parametrize("function", [changed, overwritten])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_read_before_an_argument_changes(function: Callable[[Tensor], Tensor], lazy: bool) -> None:
    ours, theirs = (numbers(4, 6).conj() if lazy else numbers(4, 6) for _ in range(2))
    torch.testing.assert_close(compiled(function)(ours), function(theirs))
    torch.testing.assert_close(ours, theirs)


MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, y: (torch.cat([x, y]) * 2, torch.cat([y, x]) + 1, torch.cat([x, y.int()]) - 1),
    "copy": lambda x, y: (x * 2).copy_(y) + 1,
    "slice": lambda x, y: torch.slice_scatter(x * 2, y[:, :3], 1, 0, 6, 2) + 1,
    "select": lambda x, y: torch.select_scatter(x * 2, y[0], 0, 1) + 1,
    "equal": lambda x, y: (x * 1 == y, y == x * 1, x * 1 != torch.tensor(1.0), x * 1 == 1j),
    "lazy": lambda x, _: x.conj().as_strided((2, 3), (1, 2)) * 2,
    "several": lambda x, _: (torch.std_mean(x * 2), torch.linalg.qr(x * 1)[0] * 2),
}


@pytest.mark.parametrize("name", MIXED)
def test_real_operands_and_several_results(name: str) -> None:
    check(MIXED[name], numbers(4, 6), torch.randn(4, 6), left=None)


LAZY: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[::2].conj(),
    "slice of a result": lambda x: (x * 2)[:, ::2].conj(),
    "negative": lambda x: (x.conj().imag, (x * 2).conj().imag, x.imag * 2),
    "views of a result": lambda x: ((e := x * 2), e.conj()[1:], e.mH[0], e.conj().reshape(-1), e.conj() * 2),
    "expanded argument": lambda x: x.expand(4, *x.shape).conj(),
    "expanded result": lambda x: (x * 2).expand(4, *x.shape).conj(),
    "inside": lambda x: x[:, None].expand(-1, 3, -1).transpose(0, 1).conj(),
    "imaginary": lambda x: x.expand(4, *x.shape).conj().imag,
    "with another": lambda x: (x.expand(4, *x.shape).conj(), x.expand(4, *x.shape).conj() * 2),
    "left to ATen": lambda x: torch.fft.fft(x.expand(4, *x.shape).conj()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LAZY)
def test_lazy_conjugates_are_handed_out_as_such(name: str, dynamic: bool) -> None:
    check(LAZY[name], numbers(5, 6), left=None, dynamic=dynamic)
    ours, theirs = compiled(LAZY[name], dynamic=dynamic)(numbers(5, 6)), LAZY[name](numbers(5, 6))
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        assert a.is_conj() == b.is_conj()


def test_angles_are_contiguous() -> None:
    check(lambda x: (x.mT.angle(), (x * 2).mT[:, ::2].angle()), numbers(2, 4, 6))


def test_parts_that_are_not_numbers_are_replaced_apart() -> None:
    x = torch.tensor([complex(math.nan, math.inf), complex(1, -math.inf), complex(math.nan, 2)])
    check(lambda x: ((x * 1).nan_to_num(), (x + 0).nan_to_num(1.0, 2.0, 3.0)), x)


def test_what_no_rule_knows_takes_whole_tensors() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * (1 + 2j) * spectrum.abs()), (spectrum * 2).sqrt()

    left = {"aten::_fft_r2c.default", "aten::_fft_c2r.default", "aten::sqrt.default"}
    check(function, torch.randn(5, 32), left=left)


class Neural(nn.Module):
    """The middle of a Fourier neural operator, with a phase."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 4, 5))
        self.phase = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[:, :, :5]
        mixed = torch.einsum("bix,iox->box", low, self.weight) * torch.polar(torch.ones(5), self.phase)
        return torch.fft.irfft(mixed, n=x.shape[-1]) + mixed.abs().mean()


def test_gradients() -> None:
    torch.manual_seed(0)
    module, x = Neural(), torch.randn(2, 3, 16)
    ours = copy.deepcopy(module)
    with recorded_fallbacks() as called:
        compiled(ours)(x).square().sum().backward()
    assert not any(op.startswith(("aten::bmm", "aten::mul", "aten::abs")) for op in called), called
    module(x).square().sum().backward()
    for a, b in zip(ours.parameters(), module.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5 * b.grad.abs().max().item())


def test_gradients_that_views_are_made_of_have_memory_of_their_own() -> None:
    """Backward may overwrite what forward kept, but not twice, if what lies there is a gradient that is handed out."""
    xs = [numbers(16, 96, 96).roll(shift, -1).requires_grad_() for shift in range(3)]

    def function(xs: list[Tensor]) -> list[Tensor]:
        return [xs[0].expm1(), xs[1].reciprocal(), xs[2].sqrt()]

    ours, theirs = (sum(y.abs().sum() for y in run(xs)) for run in (compiled(function), function))
    for a, b in zip(torch.autograd.grad(ours, xs), torch.autograd.grad(theirs, xs), strict=True):
        torch.testing.assert_close(a, b)
