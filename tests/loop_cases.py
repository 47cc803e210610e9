"""More cases for the lowering rules: scatters and pooling. See `operator_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.operator_cases import Case, _floats, _ints

aten = torch.ops.aten


def scatter_cases() -> Iterator[Case]:
    x, rows = _floats(7, 6), torch.tensor([2, 0, 5, 2])
    several = _floats(4, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        short = str(dtype).removeprefix("torch.")
        a, b = (x * 9).to(dtype), (several * 9).to(dtype)
        at = _ints(4, 6, low=0, high=7)
        yield f"index_add-{short}", lambda a, i, b: torch.index_add(a, 0, i, b), (a, rows, b)
        yield f"scatter_add-{short}", lambda a, i, b: torch.scatter_add(a, 0, i, b), (a, at, b)
        yield f"index_put-add-{short}", lambda a, i, b: a.index_put((i,), b, accumulate=True), (a, rows, b)
        for how in ("sum", "prod", "amax", "amin"):
            for include in (True, False):
                yield (
                    f"scatter_reduce-{how}-{include}-{short}",
                    lambda a, i, b, h=how, s=include: torch.scatter_reduce(a, 0, i, b, h, include_self=s),
                    (a, at, b),
                )
    unlike = torch.tensor([6, 0, 3, 2])
    yield (
        "index_add-dim",
        lambda a, i, b: torch.index_add(a, 1, i, b, alpha=2.5),
        (x, torch.tensor([3, 3, 0]), _floats(7, 3)),
    )
    yield "index_add-empty", lambda a, i, b: torch.index_add(a, 0, i, b), (x, rows[:0], several[:0])
    yield "index_add-int32", lambda a, i, b: torch.index_add(a, 0, i, b), (x, rows.int(), several)
    yield "index_copy", lambda a, i, b: torch.index_copy(a, 0, i, b), (x, unlike, several)
    yield (
        "index_copy-cache",
        lambda a, i, b: a.index_copy_(2, i, b),
        (_floats(1, 2, 9, 4), torch.tensor([4, 5]), _floats(1, 2, 2, 4)),
    )
    yield "index_fill", lambda a, i: torch.index_fill(a, 1, i, 3.5), (x, torch.tensor([-1, 0]))
    yield "scatter-rows", lambda a, i, b: torch.scatter(a, 0, i, b), (x, unlike[:, None].expand(4, 6), several)
    yield "scatter-one", lambda a, i, b: torch.scatter(a, 1, i, b), (x, _ints(7, 1, low=0, high=6), _floats(7, 3))
    yield "scatter-value", lambda a, i: torch.scatter(a, 1, i, -1.0), (x, _ints(7, 1, low=0, high=6))
    yield "scatter-values", lambda a, i: torch.scatter(a, 1, i, 2), (x, _ints(5, 3, low=0, high=6))
    yield "scatter-add-value", lambda a, i: torch.scatter(a, 1, i, 2.5, reduce="add"), (x, _ints(7, 2, low=0, high=6))
    yield (
        "scatter-expanded",
        lambda a, i, b: torch.scatter_add(a, 0, i[:, None].expand(-1, 40), b),
        (_floats(7, 40), rows, _floats(4, 40)),
    )
    yield (
        "scatter-strided",
        lambda a, i, b: torch.scatter_add(a.t(), 1, i, b),
        (x, _ints(6, 5, low=0, high=7), _floats(6, 5)),
    )
    yield "index_put", lambda a, i, j, b: a.index_put((i, j), b), (x, unlike, torch.tensor([0, -1, 2, -6]), _floats(4))
    yield (
        "index_put-broadcast",
        lambda a, i, j, b: a.index_put((i[:, None], j), b),
        (x, unlike, torch.tensor([1, 4]), torch.tensor(7.0)),
    )
    yield (
        "index_put-apart",
        lambda a, i, j, b: torch.ops.aten.index_put(a, [i, None, j], b),
        (_floats(4, 3, 5), torch.tensor([0, 2]), torch.tensor([1, 4]), _floats(2, 3)),
    )
    yield (
        "index_put-inner",
        lambda a, i, b: torch.ops.aten.index_put(a, [None, i], b, True),
        (_floats(4, 3, 5), torch.tensor([0, 2, 0]), _floats(4, 3, 5)),
    )
    yield "index_put-mask", lambda a, b: a.index_put((a > 0,), b), (x, torch.tensor(7.0))
    yield (
        "index_put-mask-rows",
        lambda a, m, b: a.index_put((m,), b, accumulate=True),
        (x, torch.arange(7) % 2 == 0, torch.tensor([7.0])),
    )
    yield "setitem", _set_items, (_floats(6, 8), rows)
    yield "slice_scatter-step", lambda a, b: torch.slice_scatter(a, b, 1, 1, 6, 2), (x, _floats(7, 3))
    yield "slice_scatter-all-steps", lambda a, b: torch.slice_scatter(a, b, 0, None, None, 3), (x, _floats(3, 6))
    yield "slices-without-elements", _add_to_nothing, (x,)
    yield "select_scatter", lambda a, b: torch.select_scatter(a, b, 0, -2), (x, _floats(6))
    for offset in (0, 2, -3):
        yield (
            f"diagonal_scatter-{offset}",
            lambda a, b, o=offset: torch.diagonal_scatter(a, b, o),
            (x, torch.diagonal(x * 2, offset).clone()),
        )
    grad, ids = _floats(3, 4, 48), torch.tensor([[1, 4, 4, 0], [9, 1, 2, 1], [4, 4, 4, 4]])
    for padding in (-1, 4):
        yield (
            f"embedding-backward-{padding}",
            lambda g, i, p=padding: torch.ops.aten.embedding_dense_backward(g, i, 10, p, False),
            (grad, ids),
        )
    yield (
        "embedding-backward-bf16",
        lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 10, -1, False),
        (grad.bfloat16(), ids),
    )
    yield (
        "embedding-backward-frequency",
        lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 10, -1, True),
        (grad, ids),
    )
    yield "zero-dim-index", lambda a, i, b: torch.index_add(a, 0, i, b), (x, torch.tensor(2), _floats(1, 6))


def _add_to_nothing(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(x)
    mask[0:0, 1:3] += 1
    mask[0:2, 2:2] = 7
    return x + mask


def _set_items(a: Tensor, rows: Tensor) -> Tensor:
    a = a.clone()
    a[rows, 3] = 1.0
    a[2, ::3] = 2.0
    a[:, -1] += 3
    a[a > 1.5] = 0
    return a


def pool_cases() -> Iterator[Case]:
    x = _floats(2, 3, 11, 9)
    special_x = x.clone()
    special_x[0, 0, :4, :4] = float("-inf")
    special_x[1, 1, 5, 5] = float("nan")
    wide = x.to(memory_format=torch.channels_last)
    for name, kw in {
        "plain": dict(kernel_size=2),
        "resnet": dict(kernel_size=3, stride=2, padding=1),
        "ceil": dict(kernel_size=3, stride=2, padding=1, ceil_mode=True),
        "dilated": dict(kernel_size=2, stride=3, dilation=2),
        "sparse": dict(kernel_size=(1, 2), stride=(3, 4)),
    }.items():
        for what, a in {"contiguous": x, "special": special_x, "channels-last": wide}.items():
            yield f"max_pool-{name}-{what}", lambda a, kw=kw: F.max_pool2d(a, **kw), (a,)
            yield f"max_pool-indices-{name}-{what}", lambda a, kw=kw: F.max_pool2d(a, return_indices=True, **kw), (a,)
        yield f"max_pool-backward-{name}", _max_pool_gradient(**kw), (x,)
        yield f"max_pool-backward-{name}-channels-last", _max_pool_gradient(**kw), (wide,)
    yield "max_pool-ints", lambda a: F.max_pool2d(a, 3, 1, 1), (_ints(1, 6, 7),)
    yield "max_pool-bf16", lambda a: F.max_pool2d(a, 3, 2, 1, return_indices=True), (x.bfloat16(),)
    yield "max_pool-1d", lambda a: F.max_pool1d(a, 3, 2, 1), (_floats(2, 3, 20),)
    yield "max_pool-3d", _max_pool_gradient(3, 2, 1, rank=3), (_floats(2, 3, 5, 6, 7),)
    yield "max_pool-large", lambda a: F.max_pool2d(a, 7), (x,)
    for name, kw in {
        "plain": dict(kernel_size=2),
        "padded": dict(kernel_size=3, stride=2, padding=1),
        "uncounted": dict(kernel_size=3, stride=2, padding=1, count_include_pad=False),
        "ceil": dict(kernel_size=3, stride=2, padding=1, ceil_mode=True),
        "ceil-uncounted": dict(kernel_size=4, stride=3, padding=1, ceil_mode=True, count_include_pad=False),
        "override": dict(kernel_size=2, divisor_override=3),
        "sparse": dict(kernel_size=2, stride=3),
    }.items():
        yield f"avg_pool-{name}", lambda a, kw=kw: F.avg_pool2d(a, **kw), (x,)
        yield f"avg_pool-backward-{name}", _avg_pool_gradient(**kw), (wide,)
    yield "avg_pool-bf16", lambda a: F.avg_pool2d(a, 3, 1, 1), (x.bfloat16(),)
    yield "avg_pool-1d", lambda a: F.avg_pool1d(a, 3, 2, 1), (_floats(3, 20),)
    yield "avg_pool-3d", _avg_pool_gradient(2, rank=3), (_floats(2, 3, 4, 6, 4),)
    for size in (1, 2, (3, 4), 12, 5):
        yield f"adaptive_avg_pool-{size}", lambda a, s=size: F.adaptive_avg_pool2d(a, s), (_floats(2, 3, 12, 12),)
        yield f"adaptive_avg_pool-backward-{size}", _adaptive_gradient(size), (_floats(2, 3, 12, 12),)
    yield "adaptive_avg_pool-3d", lambda a: F.adaptive_avg_pool3d(a, 2), (_floats(2, 3, 4, 6, 4),)


def _slope(y: Tensor) -> Tensor:
    """A gradient that differs from element to element."""
    return torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)


def _listed(number: Any, rank: int) -> list[int]:
    return list(number) if isinstance(number, tuple) else [number] * rank


def _max_pool_gradient(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, rank: int = 2
) -> Callable[[Tensor], Tensor]:
    """The gradient of a maximum pooling, for a fixed gradient of its result."""
    lists = [_listed(n, rank) for n in (kernel_size, stride or kernel_size, padding, dilation)]
    forward, backward = (getattr(aten, f"max_pool{rank}d_with_indices{end}") for end in ("", "_backward"))

    def run(a: Tensor) -> Tensor:
        y, indices = forward(a, *lists, ceil_mode)
        return backward(_slope(y), a, *lists, ceil_mode, indices)

    return run


def _avg_pool_gradient(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    rank: int = 2,
) -> Callable[[Tensor], Tensor]:
    """The gradient of an average pooling, for a fixed gradient of its result."""
    lists = [_listed(n, rank) for n in (kernel_size, stride or kernel_size, padding)]
    forward, backward = (getattr(aten, f"avg_pool{rank}d{end}") for end in ("", "_backward"))

    def run(a: Tensor) -> Tensor:
        y = forward(a, *lists, ceil_mode, count_include_pad, divisor_override)
        return backward(_slope(y), a, *lists, ceil_mode, count_include_pad, divisor_override)

    return run


def _adaptive_gradient(size: Any) -> Callable[[Tensor], Tensor]:
    return lambda a: aten._adaptive_avg_pool2d_backward(_slope(aten._adaptive_avg_pool2d(a, _listed(size, 2))), a)
