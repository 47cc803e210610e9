"""Fixtures for the tests of the native stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pellucid.native.build import build
from pellucid.native.instance import InputSlot, KernelCall, OutputSlot
from pellucid.native.runtime import Instance
from tests.unit.native.support import ADD, CHECK, DOUBLE, WHO, kernel_text, view


@pytest.fixture(scope="session")
def kernels() -> dict[str, int]:
    """Addresses of a few kernels."""
    bodies = {"test_add": ADD, "test_double": DOUBLE, "test_check": CHECK, "test_who": WHO}
    return build({name: kernel_text(name, body) for name, body in bodies.items()})[0]


@pytest.fixture
def add(kernels: dict[str, int]) -> Callable[[int], Instance]:
    """An instance that adds two vectors of n floats."""

    def make(n: int, grain: int = 1 << 40) -> Instance:
        return Instance(
            [InputSlot(0), InputSlot(1), OutputSlot(4 * n)],
            [KernelCall(kernels["test_add"], (0, 1, 2), (), n, grain, "add")],
            [view(2, n)],
            inputs=2,
            arena=0,
        )

    return make
