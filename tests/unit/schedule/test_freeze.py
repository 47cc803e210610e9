"""A program in two: what its frozen inputs determine, and the rest."""

from __future__ import annotations

import torch

from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Program
from pellucid.ir.parser import parse_program
from pellucid.ir.verify import verify_program
from pellucid.schedule.freeze import split_frozen

# t = 2 * w is determined by w, u = x + t is not; both are read by the last kernel, and s is what the program returns.
_PROGRAM = """
program {
  buffer x: f32[6] input
  buffer w: f32[6] input
  buffer t: f32[6] temp
  buffer u: f32[6] temp
  buffer s: f32[6] output
  inputs x, w

  kernel double(w: f32[6], t: f32[6]) {
    axes i0: 6
    v0: f32 = load w[i0]
    v1: f32 = add v0, v0
    st0: f32 = store t[i0], v1
  }

  kernel add(x: f32[6], t: f32[6], u: f32[6]) {
    axes i0: 6
    v0: f32 = load x[i0]
    v1: f32 = load t[i0]
    v2: f32 = add v0, v1
    st0: f32 = store u[i0], v2
  }

  kernel product(t: f32[6], u: f32[6], s: f32[6]) {
    axes i0: 6
    v0: f32 = load t[i0]
    v1: f32 = load u[i0]
    v2: f32 = mul v0, v1
    st0: f32 = store s[i0], v2
  }

  output view s (6,) strides (1,) offset 0
}
"""


def _program() -> Program:
    program = parse_program(_PROGRAM)
    verify_program(program)
    return program


def test_what_frozen_inputs_determine_is_taken_out() -> None:
    parted, decisions = split_frozen(_program(), ["w"], 0)
    verify_program(parted.before)
    verify_program(parted.main)
    assert [node.name for node in parted.before.nodes] == ["double"]
    assert [node.name for node in parted.main.nodes] == ["add", "product"]
    assert [(each.subject, each.ok) for each in decisions] == [(("double",), True)]
    x, w = torch.randn(6), torch.randn(6)
    made = run_program(parted.before, [x, w])
    (result,) = run_program(parted.main, [x, w, *made])
    torch.testing.assert_close(result, 2 * w * (x + 2 * w))


def test_results_of_the_program_stay_where_they_are() -> None:
    parted, _ = split_frozen(_program(), ["x", "w"], 0)
    assert [node.name for node in parted.main.nodes] == ["product"]
    assert parted.made == ("t", "u")


def test_nothing_is_frozen_of_a_program_that_changes_it() -> None:
    program = parse_program(_PROGRAM.replace("t: f32[6]) {", "w: f32[6]) {", 1).replace("store t[i0]", "store w[i0]"))
    parted, decisions = split_frozen(program, ["w"], 0)
    assert not parted.before.nodes and not decisions
