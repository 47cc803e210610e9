"""Variations of a program's inputs: other values, other layouts, other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pellucid.kit.programs.case import Case, copied
from pellucid.kit.programs.graphs import LOW

_PLACES = 8

Change = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
# Changes tensors in place. It may draw random numbers, so that each call makes a different change.
InPlace: TypeAlias = Callable[[Iterable[Any]], None]


def variations(case: Case, count: int) -> Iterator[tuple[str, Case]]:
    """Yield `count` variations with their description; the kinds take turns, each time with other random numbers.

    Integers stay between the minimum and maximum of the given ones, because they may be indices.
    """
    kinds = list(_KINDS.items())
    for number in range(count):
        name, change = kinds[number % len(kinds)]
        generator = torch.Generator().manual_seed(number)
        fresh = case.fresh()

        def changed(leaf: Any, change: Change = change, generator: torch.Generator = generator) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                return leaf
            with torch.no_grad():
                return change(leaf.detach(), generator).requires_grad_(leaf.requires_grad)

        args, kwargs = pytree.tree_map(changed, (fresh.args, dict(fresh.kwargs)))
        yield f"{name} (seed {number})", Case(case.name, fresh.fn, args, kwargs)


def change_in_place(tensors: Sequence[Any], zeros: Sequence[torch.Tensor | None] | None = None) -> bool:
    """Change every float without rounding: halve it, or replace 0 by 0.25. False if there is none.

    Positive values stay positive, and magnitudes do not grow, except that of 0. zeros: from `zeros_of` in another run
    of the same program: a number that rounding turned into 0 in only one of them is changed in the same way in both.
    """
    changed = False
    with torch.no_grad():
        for tensor, known in zip_longest(tensors, zeros or ()):
            if _is_changeable(tensor):
                zero = known if known is not None and known.shape == tensor.shape else tensor == 0
                tensor.mul_(0.5).masked_fill_(zero, 0.25)
                changed = True
    return changed


def zeros_of(tensors: Sequence[Any]) -> list[torch.Tensor | None]:
    """For each tensor, where it is 0; None for one that `change_in_place` does not change."""
    return [tensor == 0 if _is_changeable(tensor) else None for tensor in tensors]


def _is_changeable(tensor: Any) -> bool:
    """Whether it is a nonempty floating-point tensor without overlapping elements."""
    floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.layout is torch.strided
    return floats and tensor.numel() > 0 and not overlapping(tensor)


def nudge_in_place(tensors: Iterable[Any], generator: torch.Generator) -> None:
    """Move every float up or down at random, by about the effect of rounding in a sum.

    Sums in another order differ by more than a rounding of each term: partial sums are rounded too. So float32 moves by
    `_PLACES` units in the last place; narrower types, which are summed in float32, by one. A 0 stays 0.
    """
    with torch.no_grad():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in LOW and tensor.numel() and not overlapping(tensor):
                towards = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, -math.inf, math.inf)
                towards = torch.where(tensor == 0, tensor, towards)
                for _ in range(_PLACES if tensor.dtype is torch.float32 else 1):
                    tensor.copy_(torch.nextafter(tensor, towards.to(tensor.dtype)))


def nudging(seed: int) -> InPlace:
    """`nudge_in_place` with a generator of this seed."""
    return partial(nudge_in_place, generator=torch.Generator().manual_seed(seed))


def scaling(seed: int) -> InPlace:
    """A change that scales each tensor of floats by a random factor between 1/2 and 1: signs and zeros stay."""
    generator = torch.Generator().manual_seed(seed)

    def scale(tensors: Iterable[Any]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                if _is_changeable(tensor):
                    tensor.mul_(1 - torch.rand((), generator=generator).item() / 2)

    return scale


def unchanged(tensors: Iterable[Any]) -> None:
    """No change."""


def changed(tree: Any, change: InPlace) -> Any:
    """A copy of a tree with its tensors changed."""
    fresh = copied(tree)
    change(pytree.tree_leaves(fresh))
    return fresh


def overlapping(tensor: torch.Tensor) -> bool:
    """Whether two elements may share an address."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > reach + 1


def _values(scale: float) -> Change:
    def change(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, _dense_strides(tensor), dtype=tensor.dtype)
        if tensor.dtype.is_floating_point:
            return made.copy_(torch.randn(tensor.shape, generator=generator) * scale)
        if tensor.dtype is torch.bool:
            return made.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
        if tensor.is_complex() or not tensor.numel():
            return tensor
        low, high = int(tensor.min()), int(tensor.max())
        return made.copy_(torch.randint(low, min(high, 2**62) + 1, tensor.shape, generator=generator))

    return change


def _special(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Ordinary numbers mixed with NaN, infinities and zeros of both signs."""
    made = _values(1.0)(tensor, generator)
    if tensor.dtype.is_floating_point and tensor.numel():
        kinds = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=tensor.dtype)
        drawn = kinds[torch.randint(5, tensor.shape, generator=generator)]
        made = torch.where(torch.rand(tensor.shape, generator=generator) < 0.2, drawn, made)
    return made


def _transposed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values, with the dimensions in reverse order in memory."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def _spread(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values with a gap of one element before each."""
    memory = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    memory[..., 1] = tensor
    return memory[..., 1]


def _longer(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One more element along the first dimension."""
    return torch.cat([tensor, tensor[:1]]) if tensor.dim() and tensor.shape[0] else tensor


def _shorter(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return tensor[:-1].clone() if tensor.dim() and tensor.shape[0] > 1 else tensor


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor).stride()


_KINDS: dict[str, Change] = {
    "other values": _values(1.0),
    "NaN, infinities and zeros": _special,
    "large values": _values(1e4),
    "transposed in memory": _transposed,
    "tiny values": _values(1e-30),
    "one longer in the first dimension": _longer,
    "spread in memory": _spread,
    "one shorter in the first dimension": _shorter,
}
