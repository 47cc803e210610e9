"""Small functions, one or more for every lowering rule, with the inputs on which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _ints(*shape: int, low: int = -5, high: int = 6, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape).to(dtype)


def soft_margin_gradient(x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    weight = x.cos() if reduction == "none" else x[0, 0].cos()
    return torch.ops.aten.soft_margin_loss_backward(weight, x, target, number)


def special(dtype: torch.dtype) -> torch.Tensor:
    """NaN, infinities, signed zeros and ordinary numbers."""
    inf, nan = float("inf"), float("nan")
    return torch.tensor(
        [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, 3.5, -2.5, 100.0, 1e-3, -7.0, 0.99, 3.0],
        dtype=dtype,
    )


UNARY = """
    neg ceil floor trunc sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh sigmoid erf erfc reciprocal abs sign round relu isnan isinf isfinite square frac
    logit sgn logical_not lgamma
""".split()
BINARY = """
    add sub mul div maximum minimum atan2 hypot remainder fmod pow eq ne lt le gt ge logical_and logical_or
    logical_xor
""".split()


def pointwise_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        short = str(dtype).removeprefix("torch.")
        for name in UNARY:
            yield f"{name}-{short}", getattr(torch, name), (special(dtype),)
        x = special(dtype)
        for name in BINARY:
            yield f"{name}-{short}", getattr(torch, name), (x[:, None], x[None, :].contiguous())
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        short = str(dtype).removeprefix("torch.")
        x, y = _ints(7, 5, low=0, high=120, dtype=dtype), _ints(5, low=1, high=9, dtype=dtype)
        for name in ("add", "sub", "mul", "div", "maximum", "minimum", "remainder", "fmod", "eq", "lt", "ge",
                     "bitwise_and", "bitwise_or", "bitwise_xor"):  # fmt: skip
            yield f"{name}-{short}", getattr(torch, name), (x, y)
        for name in ("neg", "abs", "sign", "bitwise_not", "logical_not", "exp", "sigmoid", "isnan", "square"):
            yield f"{name}-{short}", getattr(torch, name), (x,)
        yield f"rounding-{short}", lambda a: (a.ceil(), a.floor(), a.trunc(), a.round(), a.abs()), (x,)
        yield f"floor_divide-{short}", torch.floor_divide, (x, y)
        yield f"shift-{short}", lambda a: (a << 2) + (a >> 1), (x,)
    flags = torch.tensor([True, False, True])
    for name in ("logical_and", "logical_or", "logical_xor", "maximum", "eq", "bitwise_and", "add", "mul"):
        yield f"{name}-bool", getattr(torch, name), (flags, torch.tensor([False, False, True]))


def mixed_cases() -> Iterator[Case]:
    x, i = _floats(4, 6), _ints(4, 6)
    yield "promote-int-float", lambda a, b: a + b, (x, i)
    yield "promote-half-float", lambda a, b: a * b, (x.half(), x)
    yield "promote-bf16-half", lambda a, b: a * b, (x.half(), x.bfloat16())
    yield "promote-scalar", lambda a: a * 2.5 + 1, (i,)
    yield "promote-zero-dim", lambda a, b: a + b, (x.bfloat16(), torch.tensor(3.0))
    yield "bool-plus-int", lambda a: a.gt(0) + 1, (x,)
    yield "compare-int-float", lambda a: a < 2.5, (i,)
    yield "uint8-wrap", lambda a: a + 200, (torch.tensor([100, 3], dtype=torch.uint8),)
    yield "alpha", lambda a, b: torch.add(a, b, alpha=3) - torch.sub(a, b, alpha=2), (x, x)
    yield "alpha-int", lambda a: torch.add(a, a, alpha=3), (i,)
    yield (
        "rounding-modes",
        lambda a, b: (torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc")),
        (x, _floats(4, 6)),
    )
    yield (
        "rounding-modes-int",
        lambda a: (torch.div(a, 3, rounding_mode="floor"), torch.div(a, 3, rounding_mode="trunc")),
        (i,),
    )
    yield (
        "floor-divide-number",
        lambda a, b: (a // 3, a // -2, b // 0.7, torch.floor_divide(b, b + 1), special(torch.float32) // 2),
        (i, x),
    )
    for exponent in (0.5, 1, 2, 3, -0.5, -1, -2, 2.7, 0):
        yield f"pow-{exponent}", lambda a, e=exponent: a**e, (x,)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            yield f"pow-{exponent}-special-{dtype}", lambda a, e=exponent: a**e, (special(dtype),)
    yield "pow-int", lambda a: a**3, (i,)
    yield "pow-scalar-base", lambda a: 2.0**a, (x,)
    yield "gelu", F.gelu, (x,)
    yield "gelu-tanh", lambda a: F.gelu(a, approximate="tanh"), (x,)
    for function in (
        F.silu,
        F.elu,
        F.leaky_relu,
        F.hardtanh,
        F.hardswish,
        F.hardsigmoid,
        F.softplus,
        F.mish,
        F.selu,
        F.relu6,
        F.logsigmoid,
    ):
        yield function.__name__, function, (x,)
    yield "clamp", lambda a: torch.clamp(a, -0.5, 0.5), (x,)
    yield "clamp-one-side", lambda a: torch.clamp(a, min=0.1), (x,)
    yield "clamp-tensor", lambda a, b: torch.clamp(a, min=b), (x, _floats(6))
    yield "clamp-nan", lambda a: torch.clamp(a, -0.5, 0.5), (special(torch.float32),)
    yield "where", torch.where, (x > 0, x, i)
    yield "where-scalar", lambda c, a: torch.where(c, a, 0.0), (x > 0, x)
    yield "masked-fill", lambda a, m: a.masked_fill(m, float("-inf")), (x, x > 0)
    for target in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool):
        yield f"cast-{target}", lambda a, t=target: a.to(t), (_floats(3, 5).abs() * 10,)
    yield "split-bf16", lambda a: a - a.bfloat16().float(), (x,)
    yield "addcmul", lambda a: torch.addcmul(a, a, a, value=0.5) + torch.addcdiv(a, a, a + 10), (x,)
    huge = torch.tensor([3e38, -3e38, 1.0, 1e-40, float("inf")])
    yield (
        "fmod-huge",
        lambda a: (torch.fmod(a[:, None], a[None] + 1e-9), torch.remainder(a[:, None], a[None] + 1e-9)),
        (huge,),
    )
    yield "addcmul-huge", lambda a: torch.addcmul(a, a, a, value=1e-3), (huge,)
    yield "lerp", lambda a, b: torch.lerp(a, b, 0.3), (x, _floats(4, 6))
    for reduction in ("none", "mean", "sum"):
        yield (
            f"soft-margin-loss-backward-{reduction}",
            lambda x, y, r=reduction: soft_margin_gradient(x, y, r),
            (_floats(4, 6, dtype=torch.float64) * 30, _floats(4, 6, dtype=torch.float64).sign()),
        )
    yield "nan-to-num", torch.nan_to_num, (special(torch.float32),)


def reduction_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = _floats(3, 5, 7, dtype=dtype)
        short = str(dtype).removeprefix("torch.")
        for name in ("sum", "mean", "prod", "amax", "amin", "var", "std", "argmax", "argmin", "logsumexp"):
            for dim in (0, 1, -1):
                for keepdim in (False, True):
                    function = lambda a, n=name, d=dim, k=keepdim: getattr(torch, n)(a, dim=d, keepdim=k)  # noqa: E731
                    yield f"{name}-{dim}-{keepdim}-{short}", function, (x,)
        yield f"sum-all-{short}", torch.sum, (x,)
        yield f"mean-dims-{short}", lambda a: a.mean((0, 2)), (x,)
        yield f"var-mean-{short}", lambda a: torch.var_mean(a, dim=1, correction=0), (x,)
        yield f"max-dim-{short}", lambda a: torch.max(a, dim=1), (x,)
        yield f"softmax-{short}", lambda a: torch.softmax(a, 1), (x,)
        yield f"log-softmax-{short}", lambda a: torch.log_softmax(a, -1), (x,)
        yield f"layer-norm-{short}", lambda a: F.layer_norm(a, (5, 7)), (x,)
        weight, bias = _floats(7, dtype=dtype), _floats(7, dtype=dtype)
        yield f"layer-norm-affine-{short}", lambda a, w, b: F.layer_norm(a, (7,), w, b), (x, weight, bias)
        yield f"norm-{short}", lambda a: torch.linalg.vector_norm(a, dim=-1), (x,)
    i = _ints(4, 5)
    yield "arg-bool", lambda a: (a.max(1), a.min(1), a.sign(), a.prod(0, dtype=torch.bool)), (_ints(4, 5) > 0,)
    yield "sum-int", lambda a: a.sum(0), (i,)
    yield "sum-bool", lambda a: (a > 0).sum(), (i,)
    yield "sum-int32", lambda a: a.to(torch.int32).sum(1), (i,)
    yield "any-all", lambda a: (a.gt(0).any(0), a.gt(-9).all(), a.any(1)), (i,)
    yield "amax-int", lambda a: (a.amax(0), a.amin(1)), (i,)
    yield "amax-nan", lambda a: (a.amax(), a.amin(), a.argmax(), a.argmin()), (special(torch.float32),)
    yield "sum-empty", lambda a: (a.sum(0), a.prod(0), a.any(0), a.all(0), a.mean(0)), (torch.zeros(0, 3),)
    masked = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), 1.0], [float("nan"), 0.0, 1.0]])
    yield "safe-softmax", lambda a: torch.ops.aten._safe_softmax(a, -1), (masked,)
    yield "sum-to-empty", lambda a: a.sum(1), (torch.zeros(0, 3),)
    yield "sum-zero-dim", lambda a: (a.sum(), a.amax(), torch.softmax(a, 0)), (torch.tensor(2.5),)
    yield (
        "softmax-infinite",
        lambda a: torch.softmax(a, -1),
        (torch.tensor([[float("-inf"), 0.0], [float("-inf")] * 2]),),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        yield f"cumsum-{dtype}", lambda a: (a.cumsum(0), a.cumsum(-1)), ((_floats(3, 40) * 3).to(dtype),)
    yield "cumsum-special", lambda a: a.cumsum(0), (special(torch.float32),)
    yield "cumsum-one", lambda a: a.cumsum(1), (_floats(3, 1),)
    yield "strided-sum", lambda a: a.t().sum(0), (_floats(6, 9),)


def shape_cases() -> Iterator[Case]:
    x = _floats(4, 6, 5)
    yield "views", lambda a: a.permute(2, 0, 1).unsqueeze(1)[:, :, 1:3, ::2] + 1, (x,)
    yield "view-flatten", lambda a: (a + 1).view(24, 5).t(), (x,)
    yield "reshape-copy", lambda a: a.permute(1, 0, 2).reshape(6, 20) * 2, (x,)
    yield "expand", lambda a: a[:, :1].expand(4, 3, 5) + 1, (x,)
    yield "select-diagonal", lambda a: a[0] + a.diagonal(0, 0, 1)[0, 0], (x,)
    yield "split-chunk", lambda a: [p * i for i, p in enumerate(a.split([1, 3, 2], 1))], (x,)
    yield "unfold", lambda a: a.unfold(1, 3, 2) * 2, (x,)
    yield "return-views", lambda a: (a[1:], a.t() if a.dim() == 2 else a.transpose(0, 1), a), (x,)
    yield "return-intermediate-views", lambda a: ((a + 1)[1:], (a + 1).transpose(0, 1)), (x,)
    yield "cat", lambda a, b: torch.cat([a, b * 2, a], 1), (x, _floats(4, 2, 5))
    yield "cat-promote", lambda a, b: torch.cat([a, b], 0), (x, _ints(2, 6, 5))
    yield "cat-empty", lambda a: torch.cat([torch.zeros(0), a, a]), (_floats(3),)
    yield "cat-last", lambda a: torch.cat([-a[..., 2:], a[..., :2]], -1), (x,)
    yield "stack", lambda a: torch.stack([a, a + 1], 1), (x,)
    yield "pad", lambda a: F.pad(a, (1, 2, 0, 3), value=7.0), (x,)
    yield "pad-negative", lambda a: F.pad(a, (-1, 2)), (x,)
    yield "slice-scatter", lambda a, b: torch.slice_scatter(a, b, 1, 2, 4), (x, _floats(4, 2, 5))
    yield "select-scatter", lambda a, b: torch.select_scatter(a, b, 1, 2), (x, _floats(4, 5))
    yield "flip-roll", lambda a: (a.flip(0, 2), a.roll(2, 1), a.roll((1, 2), (0, 2))), (x,)
    yield "repeat", lambda a: a.repeat(2, 1, 3), (x,)
    yield "tril-triu", lambda a: (torch.tril(a), torch.triu(a, 1)), (_floats(5, 7),)
    yield (
        "full",
        lambda a: torch.full_like(a, 3) + torch.zeros(5) + torch.ones(6, 1) + a.new_full((5,), 2.0),
        (x,),
    )
    yield (
        "arange",
        lambda a: (
            torch.arange(5) + a,
            torch.arange(2, 12, 3),
            torch.arange(0, 1, 0.25),
            torch.arange(5, 0, -1),
        ),
        (x,),
    )
    yield "linspace", lambda a: torch.linspace(0, 1, 5) + a, (x,)
    yield "one-hot", lambda i: F.one_hot(i, 5), (_ints(3, low=0, high=5),)
    yield "eye", lambda a: a + torch.eye(5), (_floats(5, 5),)
    yield "copy-strided", lambda a: a.t().contiguous() + a.t().clone(), (_floats(4, 3),)
    yield (
        "channels-last",
        lambda a: (a * 2).contiguous(memory_format=torch.channels_last),
        (_floats(2, 3, 4, 5),),
    )
    yield "zero-dim", lambda a, b: a * b + 1, (torch.tensor(2.0), torch.tensor(3.0))
    yield "empty", lambda a: (a + 1, a.exp(), torch.cat([a, a])), (torch.zeros(0, 4),)
    yield "size-one", lambda a: a.sum(1, keepdim=True) + a.expand(3, 1, 4), (_floats(1, 1, 4),)


def unsigned_cases() -> Iterator[Case]:
    """u16, u32 and u64, beyond the range of the signed type, in what eager computes for them."""
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        last = torch.iinfo(dtype).max
        edges = torch.tensor([0, 1, 2, last // 2, last // 2 + 1, last - 1, last, 3, 1000, 40000], dtype=dtype)
        yield f"aminmax-{str(dtype).removeprefix('torch.')}", lambda a: tuple(torch.aminmax(a, dim=0)), (edges[5],)
        for n in (10, 257, 1000):
            x = edges[torch.arange(n) % 10]
            y = x.view(torch.int8).roll(5 * x.itemsize).view(dtype)
            m = torch.arange(n) % 3 == 0
            short = f"{str(dtype).removeprefix('torch.')}-{n}"
            yield f"arithmetic-{short}", lambda a, b: (a * b, a * 3, a & b, a | 5, a ^ b, a == b, a != 7, a / b), (x, y)
            yield (
                f"floats-{short}",
                lambda a: (a + 1.5, a < 2.5, a.float(), a.double(), a.bfloat16(), a.half(), a.sqrt(), a.sigmoid()),
                (x,),
            )
            yield f"casts-{short}", lambda a: [a.to(d) for d in (*INTEGERS, torch.bool)], (x,)
            for other in (*INTEGERS, torch.bool):
                given = torch.arange(-n // 2, n // 2 + n % 2).to(other)
                yield f"from-{other}-{short}", lambda a, d=dtype: a.to(d), (given,)
            yield f"from-float-{short}", lambda a, d=dtype: (a.to(d), a.double().to(d)), (torch.rand(n) * last * 0.99,)
            yield f"where-{short}", lambda m, a, b: (torch.where(m, a, b), torch.where(m, a, 7)), (m, x, y)
            yield (
                f"moves-{short}",
                lambda a, b: (
                    torch.cat([a, b]),
                    torch.stack([a, b], 1),
                    a.roll(3),
                    F.pad(a, (2, 3), value=5),
                    a.repeat(2),
                    a[torch.arange(3)],
                    a[::2].clone(),
                    a.slice_scatter(b[:2], 0, 1, 3),
                    a.view(-1, 1).expand(-1, 3).contiguous(),
                ),
                (x, y),
            )
            yield (
                f"reductions-{short}",
                lambda a: (
                    a.sum(),
                    a.sum(0, dtype=torch.int64),
                    a.any(),
                    a.all(0),
                    a.cumsum(0),
                    a.mean(dtype=torch.float64),
                ),
                ((x.to(torch.int64) % 1000).to(dtype),),
            )

            def in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                a[1:4] = 9
                a.mul_(b)
                a[5:].copy_(torch.arange(a.shape[0] - 5))
                return a

            yield f"in-place-{short}", in_place, (x.clone(), y)
        yield (
            f"made-{dtype}",
            lambda d=dtype: (torch.full((300,), torch.iinfo(d).max, dtype=d), torch.ones(9, dtype=d)),
            (),
        )
    yield "eye-of-many-rows", lambda: (torch.eye(300), torch.eye(257, 300, dtype=torch.int64)), ()


def index_cases() -> Iterator[Case]:
    table, x = _floats(10, 4), _floats(4, 6, 5)
    i = _ints(3, 2, low=0, high=4)
    yield "embedding", F.embedding, (_ints(2, 3, low=0, high=10), table)
    yield "index-one", lambda a, k: a[k], (x, i)
    yield "index-nothing", lambda a: a[torch.zeros(0, dtype=torch.int64)], (torch.zeros(0, 3),)
    yield "index-negative", lambda a, k: a[k], (x, torch.tensor([-1, 0, -4]))
    yield "index-two", lambda a, k, m: a[k, m], (x, i, _ints(2, low=0, high=6))
    yield "index-apart", lambda a, k, m: a[k, :, m], (x, i, _ints(2, low=0, high=5))
    yield "index-middle", lambda a, k: a[:, k], (x, i)
    yield "index-int32", lambda a, k: a[k.to(torch.int32)], (x, i)
    yield "index-select", lambda a, k: torch.index_select(a, 1, k), (x, torch.tensor([5, 0, 2]))
    yield "gather", lambda a, k: torch.gather(a, 1, k), (x, _ints(4, 3, 5, low=0, high=6))
    yield "gather-smaller", lambda a, k: torch.gather(a, 0, k), (x, _ints(2, 3, 4, low=0, high=4))
    one, at = torch.tensor(2.5), torch.tensor(0)
    yield (
        "gather-zero-dim",
        lambda a, b, k: (a.gather(0, k), a.gather(-1, k.view(1)), b.gather(0, k), b.gather(0, k.expand(0))),
        (one, one.view(1), at),
    )
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    yield (
        "gather-nothing",
        lambda a, k: (a.gather(0, k), a.scatter(0, k, 1), a.scatter_add(0, k, a)),
        (x[0, 0], nothing),
    )
    yield (
        "scatter-zero-dim",
        lambda a, k, b: (a.scatter(0, k, b), a.scatter_add(0, k, b), b.scatter(0, k, b), a.index_copy(0, k, b)),
        (x[0, 0], at.view(1), one),
    )
    yield "take-along", lambda a, k: torch.take_along_dim(a, k, 2), (x, _ints(4, 6, 2, low=0, high=5))


def mutation_cases() -> Iterator[Case]:
    def add_in_place(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * 2

    def write_slice(a: torch.Tensor) -> torch.Tensor:
        a[:, 1:3] = 7.0
        return a.sum(1)

    def shift(a: torch.Tensor) -> torch.Tensor:
        b = a.flip(0)
        a.copy_(b)
        return a + b

    def two(a: torch.Tensor, b: torch.Tensor) -> None:
        a.mul_(b)
        b.sub_(a)

    yield "in-place", add_in_place, (_floats(4, 6),)
    yield "in-place-slice", write_slice, (_floats(4, 6),)
    yield "in-place-flip", shift, (_floats(4, 6),)
    yield "in-place-two", two, (_floats(4, 6), _floats(4, 6))
    yield "in-place-strided", add_in_place, (_floats(6, 4).t(),)


def extern_cases() -> Iterator[Case]:
    a, b = _floats(6, 8), _floats(8, 5)
    yield "mm", lambda a, b: (a @ b).relu(), (a, b)
    yield "linear", F.linear, (a, b.t().contiguous(), _floats(5))
    yield "bmm", lambda a, b: torch.bmm(a, b) + 1, (_floats(3, 4, 5), _floats(3, 5, 2))
    yield "conv", lambda x, w: F.conv2d(x, w, padding=1).relu(), (_floats(2, 3, 8, 8), _floats(4, 3, 3, 3))
    yield "sort", lambda x: torch.sort(x, dim=1), (a,)
    yield "cumsum", lambda x: torch.cumsum(x, 1) * 2, (_floats(2, 600),)
    yield "cumsum-many-rows", lambda x: torch.cumsum(x, 1), (_floats(64, 128),)
    yield "topk", lambda x: torch.topk(x, 3, dim=1), (a,)
    yield "wide-unsigned", lambda x: x.to(torch.uint32).to(torch.int64) + 1, (a.abs(),)
    yield "complex-half", lambda x: torch.view_as_real(torch.complex(x, x).to(torch.complex32)), (a,)
    yield "complex", lambda x: torch.view_as_real(torch.complex(x, x) * 2), (a,)
    yield (
        "attention",
        F.scaled_dot_product_attention,
        (_floats(2, 2, 5, 8), _floats(2, 2, 5, 8), _floats(2, 2, 5, 8)),
    )


def all_cases() -> list[Case]:
    from tests.loop_cases import pool_cases, scatter_cases  # which use what stands above

    torch.manual_seed(0)
    groups = (
        pointwise_cases,
        mixed_cases,
        reduction_cases,
        shape_cases,
        unsigned_cases,
        index_cases,
        mutation_cases,
        scatter_cases,
        pool_cases,
        extern_cases,
    )
    return [case for group in groups for case in group()]
