"""Infinities, NaN, signed zeros, denormals, the largest numbers: pointwise operators next to eager, in every float."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.operators.exceptions import SPECIAL, Special

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# The largest relative error that rounding may cause, of several operators of the type in one result.
ROUNDING = {torch.float32: 3e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 3e-3}

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in "neg sqrt rsqrt exp expm1 log log1p sin tanh sigmoid erf lgamma".split()},
    **{name: getattr(torch, name) for name in "abs sign round floor isfinite logit frac nan_to_num sinc".split()},
    **{name: getattr(F, name) for name in "gelu silu elu hardswish softplus mish logsigmoid softshrink relu".split()},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0),
    "remainder_number": lambda x: x % -3.0,
    "remainder_infinity": lambda x: torch.remainder(x, math.inf),
    "floor_divide_number": lambda x: x // 0.1,
    "power_of_number": lambda x: 0**x,
    "equal_number": lambda x: x == 0.1,
    "less_number": lambda x: x < 0.1,
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in "add sub mul div maximum minimum fmax atan2 hypot pow lt ge eq".split()},
    **{name: getattr(torch, name) for name in "remainder fmod floor_divide copysign nextafter xlogy logaddexp".split()},
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "isclose": lambda a, b: torch.isclose(a, b, 1e-2, 1e-1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=2),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b, value=0.5),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    sizes = [0.0, info.tiny / 4, info.tiny, info.eps, 1e-3, 0.1, 0.5, 1.0, 1 + info.eps, 1.5, 2.0, 3.0, math.pi, 5.0]
    sizes += [7.0, 12.0, 20.0, 88.5, 104.0, 1000.0, info.max / 2, info.max * 0.99, info.max, math.inf]
    both = torch.tensor([math.nan, *sizes, *(-size for size in sizes)], dtype=torch.float64)
    return both.to(dtype)


def differs(ours: torch.Tensor, eager: torch.Tensor, rounding: float) -> torch.Tensor:
    """Where the results differ by more than rounding; infinities, NaN and the signs of zeros must be the same."""
    if not eager.is_floating_point():
        return ours != eager
    same = torch.where(eager == 0, ours.signbit() == eager.signbit(), True) & (ours == eager)
    same |= ours.isnan() & eager.isnan()
    a, b = ours.double(), eager.double()
    near = (a - b).abs() <= rounding * b.abs() + 8 * torch.finfo(eager.dtype).tiny
    return ~same & ~(near & a.isfinite() & b.isfinite() & ((eager != 0) | (ours != 0)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_follow_eager(dtype: torch.dtype) -> None:
    x = values(dtype)
    a, b = x.repeat_interleave(len(x)), x.repeat(len(x))
    torch._dynamo.reset()

    def every(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: op(x) for name, op in UNARY.items()} | {name: op(a, b) for name, op in BINARY.items()}

    compiled = torch.compile(every, backend="pellucid", options={"verify": True})(x, a, b)
    eager = every(x, a, b)
    needed: set[Special] = set()
    for name, result in compiled.items():
        args = [x] if name in UNARY else [a, b]
        wrong = differs(result, eager[name], ROUNDING[dtype])
        for special in SPECIAL:
            if name in special.names.split(",") and dtype in special.dtypes:
                covered = wrong & special.where(args, eager[name])
                needed |= {special} if covered.any() else set()
                wrong = wrong & ~covered
        rows = [*args, eager[name], result]
        assert not wrong.any(), (name, [tuple(row[at].item() for row in rows) for at in wrong.nonzero()[:5, 0]])
    idle = {special for special in SPECIAL if dtype in special.dtypes and not special.somewhere} - needed
    assert not idle, [special.names for special in idle]


@pytest.mark.sampled
@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.int16, torch.float64, torch.float32])
def test_what_becomes_narrow_in_a_kernel_is_rounded_at_once(source: torch.dtype) -> None:
    """In casts, copies, concatenations and promotions; a scalar that is multiplied with or divided by is not."""
    numbers = torch.tensor([1000000000, 998244353, 2**24 + 3, 65519, 257, 511, 1025, 2049, -4097, 3] * 30)
    x = (numbers.clamp(-32768, 32767) if source is torch.int16 else numbers).to(source)

    def narrow(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        one, ones = torch.ones(1, dtype=dtype), torch.ones(300, dtype=dtype)
        made = [x.to(dtype), x * one, x + one, torch.cat([x, ones]), torch.where(x > 5, x, ones), ones.clone().copy_(x)]
        made += [ones * x[4], ones + x[4], ones / x[4], ones + 257, ones * 257, torch.add(ones, ones, alpha=257)]
        return [y for each in made for y in (each, each.double())] + [
            x == x.to(dtype),
            x < one * 256,
            x.to(dtype) == 257,
        ]

    for dtype in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        compiled = torch.compile(narrow, backend="pellucid", options={"verify": True})(x, dtype)
        for position, (ours, eager) in enumerate(zip(compiled, narrow(x, dtype), strict=True)):
            # Results of arithmetic are not rounded before they are read in the same kernel.
            arithmetic = position in (3, 5, 13, 15, 17, 19, 21, 23)
            assert torch.equal(ours.to(dtype) if arithmetic else ours, eager.to(dtype) if arithmetic else eager), (
                position
            )
