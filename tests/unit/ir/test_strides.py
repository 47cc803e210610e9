"""How tensors lie: views of another shape, and orders of dimensions, next to what PyTorch says of numbers."""

from __future__ import annotations

import math
from itertools import permutations
from random import Random

import pytest
import torch

from pellucid.ir.index import ONE, ZERO, Expr, const, sym
from pellucid.ir.nodes import View
from pellucid.ir.strides import is_dense, reshaped


def view(shape: tuple[Expr | int, ...], strides: tuple[Expr | int, ...]) -> View:
    return View("b", tuple(ONE * size for size in shape), tuple(ONE * step for step in strides), ZERO)


def shapes_of(numel: int, random: Random) -> tuple[int, ...]:
    """Sizes whose product is `numel`."""
    sizes: list[int] = []
    while numel > 1 and random.random() < 0.8:
        factor = random.choice([each for each in range(1, numel + 1) if numel % each == 0])
        sizes.append(factor)
        numel //= factor
    return (*sizes, numel)


@pytest.mark.parametrize("seed", range(20))
def test_a_view_is_what_pytorch_says(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        shape = tuple(random.choice([1, 2, 3, 4, 6]) for _ in range(random.randint(1, 4)))
        tensor = torch.empty(shape).permute(*random.sample(range(len(shape)), len(shape)))
        if random.random() < 0.4:
            tensor = tensor[..., : max(1, tensor.shape[-1] - 1)]
        if random.random() < 0.2:
            tensor = tensor.expand(2, *tensor.shape)
        wanted = shapes_of(math.prod(tensor.shape), random)
        found = reshaped(view(tuple(tensor.shape), tensor.stride()), tuple(map(const, wanted)))
        try:
            expected = tensor.view(wanted)
        except RuntimeError:
            assert found is None
            continue
        assert found is not None
        strides = zip(found, expected.stride(), wanted, strict=True)
        assert all(ours.value == theirs for ours, theirs, size in strides if size > 1)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_order_is_what_pytorch_says(layout: torch.memory_format) -> None:
    order = (0, 2, 3, 1) if layout is torch.channels_last else (0, 1, 2, 3)
    for shape in ((2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1)):
        for dims in permutations(range(4)):
            tensor = torch.empty([shape[dim] for dim in dims]).permute(*(dims.index(dim) for dim in range(4)))
            expected = tensor.is_contiguous(memory_format=layout)
            assert is_dense(view(tuple(tensor.shape), tensor.stride()), order) == expected


def test_pixels_of_any_size_are_one_dimension() -> None:
    height, width = sym("s0"), sym("s1")
    image = view((2, 8, height, width), (height * width * 8, 1, width * 8, 8))
    assert is_dense(image, (0, 2, 3, 1)) and not is_dense(image, (0, 1, 2, 3))
    assert reshaped(image, (const(2), const(8), height * width)) == (height * width * 8, ONE, const(8))
    assert reshaped(image, (const(2), 8 * height * width)) is None
    planar = view((2, 8, height, width), (height * width * 8, height * width, width, 1))
    assert reshaped(planar, (16 * height, width)) == (width, ONE)


def test_what_is_equal_in_one_call_alone_is_not_equal() -> None:
    """A line of `s1` pixels is a whole line of `s0` only where both are as long."""
    rows, line = sym("s0"), sym("s1")
    assert reshaped(view((4, line), (rows, 1)), (4 * line,)) is None
    assert reshaped(view((4, line), (line, 1)), (4 * line,)) == (ONE,)
