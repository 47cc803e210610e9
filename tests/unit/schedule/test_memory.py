from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import InternalError
from pellucid.ir.analysis import reads, writes
from pellucid.ir.index import ONE, ZERO, as_expr
from pellucid.ir.nodes import Buffer, Extern, Program, View
from pellucid.ir.parser import parse_program
from pellucid.ir.types import ALIGNMENT, DType
from pellucid.schedule.memory import (
    DonatedArgument,
    MemoryPlan,
    check_memory_plan,
    donations,
    find_in_place,
    plan_memory,
    spans,
)
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


MB = 1 << 18  # elements of f32


def kernels(text: str) -> Program:
    return parse_program(text.replace("MB", str(MB)))


def placed(program: Program, *donated: str) -> MemoryPlan:
    """The plan of a program with arguments of 1 MB, of which some may be overwritten."""
    used = spans([(*reads(node), *writes(node)) for node in program.nodes], program.outputs)
    found = donations(program.nodes, used, donated)
    return plan_memory(
        lives(program), [DonatedArgument(name, used[name][1], 4 * MB, places) for name, places in found.items()]
    )


IN_PLACE = """program {
  buffer x: f32[MB] input
  buffer t: f32[MB] temp
  buffer y: f32[MB] output
  inputs x

  kernel first(x: f32[MB], t: f32[MB]) {
    axes i0: MB
    v0: f32 = load x[i0]
    v1: f32 = exp v0
    st0: f32 = store t[i0], v1
  }

  kernel second(t: f32[MB], y: f32[MB]) {
    axes i0: MB
    v0: f32 = load t[i0]
    v1: f32 = sin v0
    st0: f32 = store y[i0], v1
  }

  output view y (MB) strides (1) offset 0
}
"""


def test_a_temporary_takes_over_what_is_read_for_it_alone() -> None:
    program = kernels(IN_PLACE)
    assert not placed(program).donors, "an argument is the caller's"
    plan = placed(program, "x")
    check_memory_plan(lives(program), plan)
    assert dict(plan.donors) == {"t": "x"} and not plan.arena_bytes


def test_what_other_points_read_is_not_taken_over() -> None:
    shifted = IN_PLACE.replace("load x[i0]", f"load x[{MB - 1} - i0]", 1)
    plan = placed(kernels(shifted), "x")
    assert not plan.donors and plan.arena_bytes == 4 * MB


def test_what_is_read_later_is_not_taken_over() -> None:
    later = IN_PLACE.replace("(t: f32[MB], y", "(t: f32[MB], x: f32[MB], y").replace(
        "v1: f32 = sin v0", "v2: f32 = load x[i0]\n    v1: f32 = add v0, v2"
    )
    assert not placed(kernels(later), "x").donors


CHAIN = """program {
  buffer x: f32[4096] input
  buffer w: f32[4096] input
  buffer t: f32[4096] temp
  buffer u: f32[4096] temp
  buffer r: f32[4096] temp
  buffer y: f32[4096] output
  inputs x, w

  kernel first(x: f32[4096], t: f32[4096]) {
    axes i0: 4096
    v0: f32 = load x[i0]
    v1: f32 = exp v0
    st0: f32 = store t[i0], v1
  }

  kernel second(t: f32[4096], u: f32[4096]) {
    axes i0: 4096
    v0: f32 = load t[i0]
    v1: f32 = sin v0
    st0: f32 = store u[i0], v1
  }

  kernel product(x: f32[4096], w: f32[4096], u: f32[4096], r: f32[4096]) {
    axes i0: 64, i1: 64, i2: 64
    v0: f32 = load x[64*i0 + i2]
    v1: f32 = load w[64*i2 + i1]
    v2: f32 = mul v0, v1
    v3: f32 = sum v2 over i2
    v4: f32 = load u[64*i0 + i1]
    v5: f32 = add v3, v4
    st0: f32 = store r[64*i0 + i1], v5
  }

  kernel last(r: f32[4096], y: f32[4096]) {
    axes i0: 4096
    v0: f32 = load r[i0]
    v1: f32 = exp v0
    st0: f32 = store y[i0], v1
  }

  output view y (4096) strides (1) offset 0
}
"""


def in_place(text: str) -> dict[str, str]:
    program = parse_program(text)
    used = spans([(*reads(node), *writes(node)) for node in program.nodes], program.outputs)
    kinds = {b.name: (b.numel, b.dtype) for b in program.buffers if b.role == "temp"}
    found = find_in_place(program.nodes, used, kinds)
    plan = plan_memory(lives(program), in_place=found)
    check_memory_plan(lives(program), plan)
    assert all(plan.offsets[target] == plan.offsets[source] for target, source in found.items())
    return found


def test_temporaries_are_made_where_those_lie_that_they_are_made_of() -> None:
    assert in_place(CHAIN) == {"u": "t", "r": "u"}
    plan = plan_memory(lives(parse_program(CHAIN)), in_place=in_place(CHAIN))
    assert plan.arena_bytes == plan.lower_bound == 4 * 4096


def test_operands_of_a_product_are_not_overwritten() -> None:
    swapped = CHAIN.replace("load x[64*i0 + i2]", "load u[64*i0 + i2]").replace(
        "load u[64*i0 + i1]", "load x[64*i0 + i1]"
    )
    assert in_place(swapped) == {"u": "t"}
    both = CHAIN.replace("load x[64*i0 + i2]", "load u[64*i0 + i2]")
    assert in_place(both) == {"u": "t"}


def test_only_what_is_read_last_and_is_as_large_is_overwritten() -> None:
    later = CHAIN.replace("kernel last(r: f32[4096]", "kernel last(u: f32[4096], r: f32[4096]").replace(
        "v1: f32 = exp v0\n    st0: f32 = store y",
        "v2: f32 = load u[i0]\n    v1: f32 = add v0, v2\n    st0: f32 = store y",
    )
    assert in_place(later) == {"u": "t"}
    narrow = CHAIN.replace("u: f32[4096]", "u: bf16[4096]")
    assert in_place(narrow) == {}
