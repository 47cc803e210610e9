"""The compiler's main test: a kernel run by the interpreter and as native code gives the same numbers.

Kernels are drawn in batches that are compiled together, which is what makes two thousand of them affordable. A
failure prints the kernel as text that the parser reads back.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pellucid.codegen import CppKernel, generate
from pellucid.ir.nodes import Kernel
from pellucid.ir.printer import print_kernel
from pellucid.native.build import build
from pellucid.native.machine import machine_for
from pellucid.options import Options
from tests.strategies import Expected, assert_close, expect, inputs_for, kernels, symbols_for
from tests.support import assert_touches_no_more, native_function, pointers_of

BATCH = 50
BATCHES = 30

SETTINGS = settings(
    max_examples=BATCH,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    kernel: Kernel
    native: CppKernel
    symbols: dict[str, int]
    inputs: Tensors
    expected: Expected


def draw_cases(number: int) -> list[Case]:
    """The cases of one batch; every third batch has symbolic extents, every fourth is scalar code."""
    cases: list[Case] = []
    options = Options(vectorize=number % 4 != 3)

    @seed(number)
    @settings(SETTINGS)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        kernel = data.draw(kernels(symbolic=number % 3 == 2))
        symbols = data.draw(symbols_for(kernel))
        inputs = data.draw(inputs_for(kernel, symbols))
        cases.append(
            Case(kernel, generate(kernel, options, machine_for()), symbols, inputs, expect(kernel, inputs, symbols))
        )

    collect()
    return cases


def run_native(case: Case, address: int) -> tuple[Tensors, int]:
    """The buffers after the kernel ran on them, in two halves of its parallel range, and its status."""
    buffers = {name: tensor.clone() for name, tensor in case.inputs.items()}
    native = case.native
    function = native_function(address)
    pointers = pointers_of(native, buffers)
    sizes = (ctypes.c_int64 * max(1, len(native.symbols)))(*(case.symbols[name] for name in native.symbols))
    extent = native.extent.evaluate(lambda atom: case.symbols[atom.name])
    middle = extent // 2
    status = function(pointers, sizes, 0, middle) or function(pointers, sizes, middle, extent)
    return buffers, status


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(BATCHES))
def test_native_matches_interpreter(number: int) -> None:
    cases = draw_cases(number)
    addresses, _ = build({case.native.name: case.native.source for case in cases})
    for case in cases:
        actual, status = run_native(case, addresses[case.native.name])
        try:
            assert status == 0, f"status {status}\n{print_kernel(case.kernel)}"
            assert_close(case.kernel, case.expected, actual)
            assert_touches_no_more(case.native, addresses[case.native.name], case.inputs)
        except AssertionError as error:
            raise AssertionError(f"{error}\nsymbols: {case.symbols}\n{case.native.source}") from None
