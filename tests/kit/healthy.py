"""Healthy programs that a careless judge would blame, each a target for the commands of the kit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Program = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    """Enter a program under its own name; its numbers are the same on every run."""

    def seeded() -> Program:
        torch.manual_seed(0)
        return make()

    PROGRAMS[make.__name__] = seeded
    return seeded


@program
def reordered_sums() -> Program:
    return lambda x: (x.sum(0), x.sum(1), x.sum(), x.mean((0, 1))), (torch.randn(257, 1031),)


@program
def cancelling_sum() -> Program:
    """The sum is a millionth of its terms."""
    x = torch.randn(100_000) * 1e4
    return lambda x: (x.sum() / 3, (x - x.mean()).sum()), (torch.cat([x, -x + 1e-3])[torch.randperm(200_000)],)


@program
def chain_in_bf16() -> Program:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x.exp() + y).tanh() * y - x).sum(-1) / y.abs().mean()

    return chain, (torch.randn(31, 100, dtype=torch.bfloat16), torch.randn(31, 100, dtype=torch.bfloat16))


@program
def roundings_left_out() -> Program:
    """A compiler that fuses these does not round the products to bfloat16."""
    return lambda x: ((x.bfloat16() * 3).float().sum(), (x.bfloat16() * 3).float().sum(0)), (torch.randn(1400, 1000),)


@program
def shared_roundings() -> Program:
    """Many elements share the rounding of a mean or a scale, by which they all lean to one side."""

    def share(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = (x - x.mean()) / y.abs().mean()
        rows = (y - y.mean(-1, keepdim=True)) * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return h, rows, (h * 1.1 * 1.3) @ rows.T, F.layer_norm(x, (96,)) * rows.sum(0), torch.full_like(x, 1.1) * 1.3

    return share, (torch.randn(70, 96, dtype=torch.bfloat16), torch.randn(70, 96, dtype=torch.bfloat16))


@program
def steps_in_f16() -> Program:
    """Values that lie alike between those that the type holds, so that their roundings do not cancel."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 1.001 * 1.002 * 1.003, (x + 0.003 + 0.003) / 3, (x + y) / 2 * 1.5, (x.softmax(-1) * 7).cumsum(-1)

    return step, (torch.randint(1, 300, (70, 96)).half(), torch.rand(70, 96).half())


@program
def overflow_in_f16() -> Program:
    """A sum of squares that no f16 holds, and one that does."""

    def norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * x).sum(-1), x / (x.float().square().sum(-1, keepdim=True).sqrt()).half()

    return norm, (torch.randn(8, 500, dtype=torch.float16) * 20,)


@program
def transcendental() -> Program:
    def functions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.abs() + 1e-3
        return x.exp(), y.log(), x.sin(), x.tan(), x.tanh(), x.erf(), y.log1p(), x.expm1(), y.rsqrt(), y.lgamma()

    return functions, (torch.randn(1000) * 5,)


@program
def large_angles() -> Program:
    return lambda x: (x.sin(), x.cos()), (torch.randn(1000) * 1e5,)


@program
def activations() -> Program:
    def activate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.softplus(x), F.mish(x), F.elu(x), F.hardswish(x)

    return activate, (torch.randn(999) * 8,)


@program
def masked_softmax() -> Program:
    """One row is masked throughout: its softmax is NaN in eager too."""

    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(mask, -math.inf).softmax(-1)

    mask = torch.rand(20, 33) < 0.5
    mask[3] = True
    return masked, (torch.randn(20, 33) * 30, mask)


@program
def not_a_number() -> Program:
    def mix(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.relu(), x.amax(-1), x.clamp(-1, 1), torch.maximum(x, -x), x.sum(-1), x.nan_to_num(), x.argmax(-1)

    x = torch.randn(12, 40)
    x[2, 5], x[3, 7], x[4, 1], x[4, 2] = math.nan, math.inf, -math.inf, math.inf
    return mix, (x,)


@program
def random_numbers() -> Program:
    def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.dropout(x, 0.3), torch.rand_like(x), x + torch.randn(50), torch.randint(0, 9, (5,)), x.bernoulli()

    return draw, (torch.rand(20, 50),)


@program
def integer_overflow() -> Program:
    def wrap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * x, x + 2**31 - 1, y * y, y + 100, x.sum(), (x * 7).to(torch.int8)

    return wrap, (torch.randint(-(2**31), 2**31 - 1, (77,), dtype=torch.int32), torch.arange(-128, 128).to(torch.int8))


@program
def ties() -> Program:
    def first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(-1), x.argmin(0), *x.max(-1), *x.sort(dim=-1, stable=True)

    return first, (torch.randint(0, 4, (15, 60)).float(),)


@program
def prefix_sums() -> Program:
    return lambda x: (x.cumsum(0), x.cumsum(1), x.cumprod(1), x.logcumsumexp(0)), (torch.randn(40, 300),)


@program
def strided() -> Program:
    """Inputs that are expanded, transposed, and share memory."""

    def add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (a * b + c).softmax(-1) @ d.T

    base = torch.randn(30, 40)
    return add, (base, torch.randn(40).expand(30, 40), base.view(40, 30).T, base[:, ::2].repeat(1, 2))


@program
def no_elements() -> Program:
    def empty(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(0), x.exp(), torch.cat([x, y]), x @ y.T, x.mean()

    return empty, (torch.randn(0, 7), torch.randn(4, 7))


@program
def no_dimensions() -> Program:
    return lambda x, y: (x * y, (x + 1).sum(), torch.where(x > y, x, y), x.softmax(0)), (
        torch.tensor(2.5),
        torch.tensor(-1.5),
    )


@program
def complex_numbers() -> Program:
    def turn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.view_as_complex(x) * torch.polar(x[..., 0].abs(), x[..., 1])
        return torch.view_as_real(z.conj().resolve_conj()), z.abs(), torch.fft.fft(z).real

    return turn, (torch.randn(9, 32, 2),)


@program
def changed_in_place() -> Program:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 1:3].mul_(2)
        y += x.sum(1)
        x.t()[0].copy_(y)
        return x.relu_().sum(0)

    return change, (torch.randn(6, 8), torch.randn(6))


@program
def attention_in_bf16() -> Program:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) + (q @ k.mT / 8).softmax(-1) @ v

    return attend, tuple(torch.randn(2, 4, 65, 64, dtype=torch.bfloat16) for _ in range(3))


@program
def nearly_equal_numbers() -> Program:
    """A variance of which single precision holds few digits."""
    return lambda x: (x.var(-1), x.std(0), *torch.var_mean(x), F.layer_norm(x, (500,))), (1e4 + torch.randn(20, 500),)


@program
def powers() -> Program:
    def power(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.abs() ** y, x**3, x**-2, 2.0**y, torch.atan2(x, y), torch.hypot(x, y), x.abs().pow(0.3)

    return power, (torch.randn(500) * 3, torch.randn(500) * 3)


@program
def remainders() -> Program:
    def divide(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        floor, trunc = torch.floor_divide(x, 0.7), torch.div(x, -1.3, rounding_mode="trunc")
        return x % 0.7, torch.fmod(x, -1.3), n % 7, n // -3, torch.fmod(n, 5), floor, trunc, n >> 1

    return divide, (torch.randn(600) * 10, torch.arange(-300, 300))


@program
def batch_norm_in_training() -> Program:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(self.norm(self.conv(x)).relu(), 2)

    return Net(), (torch.randn(4, 3, 14, 14),)


@program
def thresholds() -> Program:
    """Signs and comparisons of what is nearly zero: a rounding may turn them round."""

    def compare(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small = x.sum(-1) - x.double().sum(-1).float()
        return small.sign(), small > 0, (x / 3 * 3 == x), x.mean(-1).round()

    return compare, (torch.randn(50, 200),)


@program
def long_products() -> Program:
    """Sums of thousands of products, some of them nearly nothing."""

    def product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ y, torch.addmm(x[:, :9], x, y, beta=-2, alpha=1e-3), F.cosine_similarity(x[:9], y.T, dim=-1)

    return product, (torch.randn(16, 8192), torch.randn(8192, 9))


@program
def interpolated() -> Program:
    """Weights that are computed from positions."""

    def grow(x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bilinear = F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True)
        return bilinear, F.interpolate(x, (9, 31), mode="bicubic"), F.grid_sample(x, grid, align_corners=False)

    return grow, (torch.randn(2, 3, 11, 13), torch.rand(2, 8, 8, 2) * 2.2 - 1.1)


@program
def quantised() -> Program:
    """Rounding to few steps, where a half is near."""

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        steps = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return steps.float() * scale, (x * 64).round() / 64

    return quantise, (torch.randn(33, 129),)


@program
def optimiser_step() -> Program:
    """Adam, by which parameter, mean and variance change in place."""

    def step(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> None:
        mean.lerp_(grad, 0.1)
        var.mul_(0.999).addcmul_(grad, grad, value=0.001)
        p.addcdiv_(mean, var.sqrt() / 0.0316 + 1e-8, value=-0.01)

    return step, (torch.randn(50, 40), torch.randn(50, 40) * 1e-4, torch.zeros(50, 40), torch.zeros(50, 40))


@program
def nearly_nothing() -> Program:
    """Numbers below the least normal one, and products that come to them."""

    def shrink(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y, x + x, (x * y) / y, (y * 40).exp(), x.abs().sum()

    return shrink, (torch.randn(400) * 1e-38, torch.rand(400) * 1e-3 - 2.3)


@program
def checks_inside_kernels() -> Program:
    """`one_hot` looks whether its indices are in range; what it finds need not leave the kernel that computes them."""
    return lambda x: F.one_hot(x.softmax(-1).argmax(-1), 7) * x, (torch.randn(19, 7),)
