"""Large samples: PyTorch's own samples of an operator with longer dimensions, in layouts that users' tensors have.

What a sample may become depends on its operator, which nobody has written down. So a sample is grown in every way that
we know of, and eager mode decides: the first way that it accepts, and that does not cost too much, is the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

# How many elements the largest tensor gets (about so many if it has two dimensions or more), and its layout.
PLAN = (
    (257, "contiguous"),
    (65_537, "transposed"),
    (1_000_003, "contiguous"),
    (65_537, "sliced"),
    (65_537, "expanded"),
    (1_000_003, "channels-last"),
)

LAYOUTS = [layout for _, layout in PLAN]

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

# ATen computes these, in much more time than their elements take to move, and refuses most of what we would make.
LEFT_OUT = (
    *("linalg.", "fft.", "sparse.", "signal.", "svd", "lu", "cholesky", "geqrf", "ormqr", "pca_lowrank", "pinverse"),
    # Its time grows with the square of the classes, and no tensor shows it.
    "nn.functional.multilabel_margin_loss",
    # Of a few samples the result has billions of elements.
    "diag_embed",
    # Its number is one of dimensions.
    "combinations",
    # These check no sizes: where statistics or lengths stay as they were, eager goes beyond them, and may die of it.
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_segment_reduce"),
)

# How many samples of an operator are tried for one line of the plan.
_TRIED = 12

# Elements that operators make on the way, floating-point operations, and what else costs as much. The two small sizes
# tell how it grows.
_MOST_WORK = 2.5e8
_PROBES = (257, 4_112)
_WORK_OF_RESULT = 1e5  # hundreds of results are as much as Dynamo can take

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """One way to make a sample larger: what becomes of each tensor's shape, and of each integer."""

    shape: Callable[[Shape], Shape]
    number: Callable[[int], int] = lambda number: number


def choose(op: Callable[..., Any], samples: Sequence[Arguments], elements: int, layout: str) -> Arguments | None:
    """The first of the samples that can be grown to about so many elements, grown; None if none of them can.

    The ways to grow are tried from another one on for each layout, but for contiguous tensors of one dimension.
    """
    first = LAYOUTS.index(layout)
    for sample in samples[:_TRIED]:
        ways = len(_ways(sample, elements))
        for way in ((first + step) % ways for step in range(ways)):
            try:
                small, larger = (_grown(sample, way, probe, layout) for probe in _PROBES)
                expected = _expected_work(op, small, larger, elements)
            except Exception:
                continue  # eager refuses it, or it cannot have this layout
            if expected <= _MOST_WORK:
                return _grown(sample, way, elements, layout)
    return None


def _ways(sample: Arguments, elements: int) -> list[Growth]:
    leaves = tree_leaves(sample)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided or not tensor.numel() for tensor in tensors):
        return []
    largest = max(tensors, key=torch.Tensor.numel, default=None)
    if largest is not None and largest.numel() > 1:
        return list(_growths(tuple(largest.shape), elements))
    return list(_longer_numbers([leaf for leaf in leaves if type(leaf) is int], elements))


def _grown(sample: Arguments, way: int, elements: int, layout: str) -> Arguments:
    """A sample grown in the way of that number, equal at each call. ValueError if none of its tensors gets the layout.

    Every other tensor stays contiguous, so that layouts meet.
    """
    torch.manual_seed(way)
    growth = _ways(sample, elements)[way]
    position = count()
    strided = 0

    def change(leaf: Any) -> Any:
        nonlocal strided
        if type(leaf) is int:
            return growth.number(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = growth.shape(tuple(leaf.shape))
        made = _filled(leaf, shape) if shape != leaf.shape else leaf.detach().clone()
        if next(position) % 2 == 0:
            made = _laid_out(made, layout)
        strided += not made.is_contiguous()
        return made.requires_grad_(leaf.requires_grad)

    changed = tree_map(change, sample)
    if not strided and layout != "contiguous":
        raise ValueError(f"no tensor can be {layout}")
    return changed


def _growths(largest: Shape, elements: int) -> Iterator[Growth]:
    """Ways to grow a sample whose largest tensor has this shape; other tensors follow where their sizes are equal."""
    yield Growth(lambda shape: (elements,) if shape == largest else shape)
    if len(largest) != 4:
        side = math.ceil(math.sqrt(elements / 16))
        yield Growth(lambda shape: (2, 8, side, side) if shape == largest else shape)
    for size in sorted({*largest} - {1}, reverse=True):
        times = largest.count(size)
        rest = math.prod(largest) // size**times
        longer = math.ceil((elements / rest) ** (1 / times))

        def swap(number: int, size: int = size, longer: int = longer) -> int:
            return longer if number == size else number

        yield Growth(lambda shape, swap=swap: tuple(map(swap, shape)), swap)
        yield Growth(lambda shape, swap=swap: tuple(map(swap, shape)))
    for position, size in enumerate(largest):
        longer = math.ceil(elements * size / math.prod(largest))
        last = position - len(largest)
        yield Growth(lambda shape, size=size, longer=longer, last=last: _lengthened(shape, size, longer, last))


def _lengthened(shape: Shape, size: int, longer: int, position: int) -> Shape:
    """`shape` with the dimension at this position, counted from the last, made longer if it is of this size."""
    if len(shape) < -position or shape[position] != size:
        return shape
    return (*shape[:position], longer, *shape[len(shape) + position + 1 :])


def _longer_numbers(numbers: Sequence[int], elements: int) -> Iterator[Growth]:
    """Ways to grow a sample without a tensor that could grow: `eye(5)`."""
    large = [number for number in numbers if number > 1]
    if large:
        side = math.ceil(elements ** (1 / len(large)))
        yield Growth(lambda shape: shape, lambda number: elements if number == max(large) else number)
        yield Growth(lambda shape: shape, lambda number: side if number > 1 else number)


def _filled(like: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A tensor of numbers between those of `like`, so that indices stay in range; unsigned types get all their bits."""
    if like.dtype in UNSIGNED:
        return torch.randint(-(2**63), 2**63 - 1, shape).to(like.dtype)
    known = like.detach().reshape(-1)
    one, other = (known[torch.randint(known.numel(), shape)] for _ in range(2))
    if like.is_floating_point():
        return torch.lerp(one.double(), other.double(), torch.rand(shape, dtype=torch.float64)).to(like.dtype)
    if like.dtype is torch.bool or like.is_complex():
        return one
    return torch.randint(int(known.min()), int(known.max()) + 1, shape, dtype=like.dtype)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements in this layout (all equal along one dimension where it is `expanded`).

    A tensor with too few dimensions, or one of a single element, stays as it is.
    """
    if tensor.numel() < 2:
        return tensor
    if layout == "sliced":
        twice = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        twice[..., 1::2] = tensor
        return twice[..., 1::2]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        along = next(dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1)
        return tensor.narrow(along, 0, 1).expand(tensor.shape)
    if layout == "channels-last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


class _Work(TorchDispatchMode):
    """Counts what operators make and compute."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.done += _elements(made)
        if flops := flop_registry.get(func.overloadpacket):
            self.done += flops(*args, **(kwargs or {}), out_val=made)
        return made


def _expected_work(op: Callable[..., Any], small: Arguments, larger: Arguments, elements: int) -> float:
    """The work of an operator on so many elements. Raises what eager raises on the samples."""
    return sum(_continued(low, high, elements) for low, high in zip(_work(op, small), _work(op, larger), strict=True))


def _continued(low: float, high: float, elements: int) -> float:
    """What grows from `low` to `high` between the two small sizes, at this one."""
    power = math.log(high / low, _PROBES[1] / _PROBES[0])
    return low * (elements / _PROBES[0]) ** max(power, 0.0)


def _work(op: Callable[..., Any], sample: Arguments) -> tuple[float, float]:
    """What an operator makes and computes; and what its results cost."""
    args, kwargs = sample
    with torch.no_grad(), _Work() as work:
        made = op(*args, **kwargs)
    results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    return work.done + _elements(made) + 1, _WORK_OF_RESULT * max(len(results), 1)


def _elements(tree: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
