"""The work grows in proportion to the program. Calls are counted, not seconds, so the answer is always the same."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pellucid.ir.nodes import Program
from pellucid.options import Options
from pellucid.schedule import schedule
from tests.unit.schedule.build import ProgramBuilder


def chain(length: int) -> Program:
    b = ProgramBuilder()
    x = b.input(4096)
    for _ in range(length):
        x = b.op("neg", x)
    return b.finish(x)


def wide(width: int) -> Program:
    b = ProgramBuilder()
    x = b.input(4096)
    return b.finish(*(b.op("add", x, float(k)) for k in range(width)))


def shared_by_all(length: int) -> Program:
    """One early value that every later operator reads, like an attention mask."""
    b = ProgramBuilder()
    x, w = b.input(64, 64), b.input(64, 64)
    mask = b.op("exp", x)
    for _ in range(length // 2):
        x = b.op("mul", b.mm(x, w), mask)
    return b.finish(x)


def residual(length: int) -> Program:
    b = ProgramBuilder()
    values = [b.input(4096)]
    for k in range(length):
        values.append(b.op("add", values[-1], values[max(0, k - 5)]))
    return b.finish(values[-1])


def calls(program: Program) -> int:
    """Python functions entered while scheduling."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        schedule(program, Options(max_fused_lines=64))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("shape", [chain, wide, shared_by_all, residual])
def test_twice_the_program_is_twice_the_work(shape: Callable[[int], Program]) -> None:
    small, large = shape(200), shape(400)
    schedule(small, Options())  # fill the caches of the index algebra
    assert calls(large) <= 2.2 * calls(small)
