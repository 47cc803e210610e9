"""What a call does, as the run folder tells it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from pellucid.codegen import generate
from pellucid.execution_plan import ExecutionPlan, plan_execution
from pellucid.ir.derived import Apply, Derived
from pellucid.ir.index import ONE, const, product, sym
from pellucid.ir.nodes import Buffer, Extern, Kernel, Program, View
from pellucid.ir.origin import Origin
from pellucid.ir.types import DType
from pellucid.machine import AVX2
from pellucid.options import Options
from pellucid.schedule import schedule
from tests.unit.schedule.build import ProgramBuilder
from tests.unit.schedule.test_fuse import layer_norm, softmax


def product_and_norm() -> Program:
    """A library call into the arena, between kernels."""
    b = ProgramBuilder()
    x, weight, scale, bias = b.input(32, 64), b.input(64, 64), b.input(64), b.input(64)
    h = b.mm(b.op("exp", x), weight)
    return b.finish(layer_norm(b, b.op("add", h, x), scale, bias))


def sorted_rows() -> Program:
    """An operator that allocates its results, sizes that change, and a number that follows from them."""
    b = ProgramBuilder(["n"])
    probabilities = softmax(b, b.input(sym("n"), 64))
    rows = replace(probabilities.view, buffer="sorted")
    b.buffers["sorted"] = Buffer("sorted", DType.F32, product(rows.shape), "temp")
    origin = Origin(("sort",), (), ("lower",))
    arguments = (probabilities.view, const(1), False)
    b.nodes.append(Extern("sort", "aten::sort.default", arguments, (), (rows, None), False, "a sort", origin=origin))
    program = b.finish(b.op("mul", replace(probabilities, view=rows), 2.0))
    few = Derived("few", False, Apply("min", (const(10), sym("n"))))
    (result,) = program.outputs
    assert isinstance(result, View)
    first = View(result.buffer, (sym("few"), const(64)), (const(64), ONE), result.offset)
    return replace(program, derived=(few,), outputs=(first, sym("n"), None))


def planned(program: Program, reuse: bool = True) -> ExecutionPlan:
    after, _ = schedule(program, Options())
    kernels = {node.name: generate(node, Options(), AVX2) for node in after.nodes if isinstance(node, Kernel)}
    return plan_execution(after, kernels, name="example", reuse=reuse)


@pytest.mark.parametrize("make", [product_and_norm, sorted_rows])
def test_execution_plan(make: Callable[[], Program], golden: Callable[[str, str], None]) -> None:
    text = re.sub(r"_[0-9a-f]{12}\b", "_CONTENT", str(planned(make())))  # the hash of a kernel's text
    golden(f"execution_plan/{make.__name__}.txt", text + "\n")


def test_without_reuse_each_temporary_has_a_block_of_its_own() -> None:
    plan = planned(product_and_norm(), reuse=False)
    assert plan.memory is not None and plan.memory.arena_bytes == 0
    assert " arena at" not in str(plan) and str(plan).count(" pool, ") == 3
