"""Different elements that accesses touch, beside a list of them all."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from pellucid.ir.traffic import distinct_offsets, tensor_bytes


def listed(strides):
    sums = (sum(combination) for combination in itertools.product(*([s * i for i in range(n)] for s, n in strides)))
    return len(set(sums))


@pytest.mark.parametrize(
    "strides",
    [
        [(1, 10)],
        [(12, 3), (1, 12)],
        [(1, 10), (1, 3)],
        [(2, 10), (1, 3)],
        [(2, 10), (1, 2), (64, 4)],
        [(0, 9), (3, 4)],
        [(-1, 5), (5, 2)],
        [(1, 0), (7, 3)],
        [],
    ],
)
def test_places_are_those_of_a_list(strides):
    assert distinct_offsets(strides) == listed(strides)


def test_places_never_count_less_than_there_are():
    draw = random.Random(0)
    for _ in range(300):
        strides = [(draw.choice((0, 1, 2, 3, 4, 6, 8, 12)), draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]
        assert distinct_offsets(strides) >= listed(strides), strides


def test_an_expanded_tensor_counts_what_it_was_made_from():
    tensor = torch.ones(7, 1).expand(7, 9)
    assert tensor_bytes(tensor.shape, tensor.stride(), 4) == 28
