"""The work grows in proportion to the program. Calls are counted, not seconds, so the answer is always the same."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from pellucid.ir.nodes import Program
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.memory import plan_memory
from tests.unit.schedule.build import ProgramBuilder, lives


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


def cheap_and_shared(length: int) -> Program:
    """A chain of cheap values, each of which a library call wants in memory as well."""
    b = ProgramBuilder()
    x, w = b.input(16, 16), b.input(16, 16)
    y = x
    for _ in range(length // 3):
        x = b.op("add", x, 1.0)
        y = b.op("add", b.mm(y, w), x)
    return b.finish(x, y)


def joined(width: int) -> Program:
    """Library calls whose results all wait until the end."""
    b = ProgramBuilder()
    x, w = b.input(16, 16), b.input(16, 16)
    branches = [b.mm(x, w) for _ in range(width // 2)]
    total = branches[0]
    for branch in reversed(branches):
        total = b.op("add", total, branch)
    return b.finish(total)


def layers(length: int) -> Program:
    """Layers with weights of their own: as many inputs as library calls."""
    b = ProgramBuilder()
    x = b.input(16, 16)
    for _ in range(length // 4):
        y = b.op("tanh", b.mm(x, b.input(16, 16)))
        x = b.op("div", y, b.reduce("max", y, 1))
    return b.finish(x)


def calls(work: Callable[[], object]) -> int:
    """Python functions entered during `work`."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    collecting = gc.isenabled()
    gc.disable()  # finalizers of others would be counted
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return count


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [chain, wide, shared_by_all, residual, cheap_and_shared, joined, layers])
def test_twice_the_program_is_twice_the_work(shape: Callable[[int], Program]) -> None:
    small, large = shape(200), shape(400)
    options = Options(max_fused_lines=64)
    schedule(small, options)  # fill the caches of the index algebra
    assert calls(lambda: schedule(large, options)) <= 2.2 * calls(lambda: schedule(small, options))


@pytest.mark.parametrize("shape", [shared_by_all, cheap_and_shared, joined, layers])
def test_twice_the_buffers_are_twice_the_work_of_laying_out(shape: Callable[[int], Program]) -> None:
    """Also where all of them are alive at once: no plan is better than one without gaps, so none is looked for."""
    small, large = shape(400), shape(800)
    assert calls(lambda: plan_memory(lives(large))) <= 2.2 * calls(lambda: plan_memory(lives(small)))


@pytest.mark.parametrize("length", [400, 800])
def test_a_kernel_does_not_outgrow_the_limit(length: int) -> None:
    """So the C++ compiler's time is linear too; each refusal says why."""
    after, decisions = schedule(chain(length), Options(max_fused_lines=64))
    assert len(after.nodes) == -(-length // 62)  # beside the operators a load and a store
    refused = [decision for decision in decisions if decision.rule == "fuse.size"]
    assert len(refused) == len(after.nodes) - 1
    assert all("more than 64" in decision.why for decision in refused)
