"""Loop nests of random kernels: they print, parse, are sound, and run as the interpreter says, in any order."""

from __future__ import annotations

import math
from itertools import islice
from random import Random

import pytest
import torch

from pellucid.codegen import CppKernel, generate
from pellucid.codegen.nest_text import parse_nest, print_nest
from pellucid.codegen.verify_nest import verify_nest
from pellucid.ir.interp import run_kernel, size_of
from pellucid.ir.parser import parse_kernel
from pellucid.machine import AVX2, AVX512
from pellucid.options import Options
from tests.property.test_contractions import draw
from tests.property.test_native_matches_interp import draw_cases
from tests.strategies import assert_close
from tests.support import run_loops

BATCHES = 8
CONTRACTIONS = 10
"""In each of six batches."""
MOST_SUMS = 2000
"""Python runs over each of them."""


def assert_sound(kernel: CppKernel) -> None:
    nest = kernel.nest
    verify_nest(nest)
    assert parse_nest(print_nest(nest)) == nest
    assert parse_nest(print_nest(kernel.nest_of("k"))) == kernel.nest_of("k")


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(BATCHES))
def test_nests_run_as_the_interpreter_says(number: int) -> None:
    for case in draw_cases(number):
        kernel = generate(case.kernel, Options(vectorize=number % 4 != 3), AVX512 if number % 2 else AVX2)
        assert_sound(kernel)
        for backwards in (False, True):
            actual = run_loops(kernel, case.inputs, case.symbols, backwards=backwards)
            assert_close(case.kernel, case.expected, actual)


@pytest.mark.sampled
@pytest.mark.parametrize("batch", range(6))
def test_nests_of_contractions_run_as_the_interpreter_says(batch: int) -> None:
    random = Random(0)
    drawn = (draw(random, number) for number in range(1000))
    small = (case for case in drawn if math.prod(case.sizes[:3]) <= MOST_SUMS)
    for number, case in islice(enumerate(small), CONTRACTIONS * batch, CONTRACTIONS * (batch + 1)):
        kernel, symbols = parse_kernel(case.text), {f"s{k}": size for k, size in enumerate(case.sizes)}
        native = generate(kernel, Options(), AVX512 if number % 2 else AVX2)
        assert_sound(native)
        buffers = {
            param.name: torch.randn(size).to(case.dtype if param.name in "ab" else torch.float32)
            for param in kernel.params
            for size in [size_of(param.numel, symbols)]
        }
        expected = {name: tensor.clone() for name, tensor in buffers.items()}
        run_kernel(kernel, expected, symbols)
        for backwards in (False, True):
            actual = run_loops(native, buffers, symbols, backwards=backwards)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
