from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import InternalError
from pellucid.ir.index import ONE, ZERO, as_expr
from pellucid.ir.nodes import Buffer, Extern, Program, View
from pellucid.ir.types import ALIGNMENT, DType
from pellucid.schedule.memory import MemoryPlan, check_memory_plan, plan_memory
from tests.unit.schedule.build import lives


def program_of(nodes: list[tuple[list[str], list[str]]], numels: dict[str, int]) -> Program:
    """Calls that read and write whole buffers."""
    buffers = tuple(Buffer(name, DType.F32, as_expr(numel), "temp") for name, numel in numels.items())

    def view(name: str) -> View:
        return View(name, (as_expr(numels[name]),), (ONE,), ZERO)

    calls = tuple(
        Extern(f"f_{k}", "test::f", tuple(map(view, ins)), (), tuple(map(view, outs)), True, "")
        for k, (ins, outs) in enumerate(nodes)
    )
    return Program((), buffers, (), calls, ())


def test_chain_alternates_between_two_places() -> None:
    names = [f"t{k}" for k in range(6)]
    nodes = [([], ["t0"]), *(([a], [b]) for a, b in pairwise(names))]
    program = program_of(nodes, dict.fromkeys(names, 16))
    plan = plan_memory(lives(program))
    check_memory_plan(lives(program), plan)
    assert plan.arena_bytes == plan.lower_bound == 2 * ALIGNMENT


def test_large_hole_is_filled() -> None:
    """Buffers of another size share the place of one that died."""
    nodes = [([], ["big"]), (["big"], ["x"]), (["x"], ["y", "z"]), (["x", "y", "z"], [])]
    program = program_of(nodes, {"big": 64, "x": 16, "y": 32, "z": 32})
    plan = plan_memory(lives(program))
    check_memory_plan(lives(program), plan)
    assert plan.arena_bytes == plan.lower_bound


def test_overlap_is_found() -> None:
    program = program_of([([], ["a"]), (["a"], ["b"]), (["b"], [])], {"a": 16, "b": 16})
    with pytest.raises(InternalError, match="overlap"):
        check_memory_plan(lives(program), MemoryPlan({"a": 0, "b": 0}, ALIGNMENT, 0))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(1, 12))
    numels = {f"t{k}": draw(st.integers(0, 200)) for k in range(count)}
    nodes: list[tuple[list[str], list[str]]] = []
    for k in range(count):
        earlier = [f"t{j}" for j in range(k)]
        ins = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True)) if earlier else []
        nodes.append((ins, [f"t{k}"]))
    return program_of(nodes, numels)


@settings(max_examples=100, deadline=None)
@given(programs())
def test_plans_never_overlap(program: Program) -> None:
    plan = plan_memory(lives(program))
    check_memory_plan(lives(program), plan)
    assert plan.lower_bound <= plan.arena_bytes <= sum(life.size for life in lives(program))
