"""Inputs are changed where they lie, and the copies around a change are gone."""

from __future__ import annotations

import pytest
import torch

from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Program, View
from pellucid.ir.parser import parse_program
from pellucid.ir.verify import verify_program
from pellucid.schedule.in_place import change_in_place

SIZES = {"x": 24, "new": 4, "y": 24, "w": 24, "p": 8, "z": 24}
ROLES = {"x": "input", "new": "input", "z": "output"}


def parsed(nodes: str) -> Program:
    """A program of two inputs, `x` and `new`, that returns `z`."""
    made = [name for name in SIZES if name in ("x", "new", "z") or f" {name}[" in nodes]
    buffers = "".join(f"  buffer {name}: f32[{SIZES[name]}] {ROLES.get(name, 'temp')}\n" for name in made)
    return parse_program(
        f"program {{\n{buffers}  inputs x, new\n\n{nodes}  output view z (24) strides (1) offset 0\n}}\n"
    )


def copy(name: str, source: str, target: str, size: int = 24, first: str = "", second: str = "") -> str:
    return f"""\
  kernel {name}({source}: f32[{SIZES[source]}], {target}: f32[{SIZES[target]}]) {{
    axes i: {size}
    a: f32 = load {source}[i{first}]
    st: f32 = store {target}[i{second}], a
  }}

"""


def change(name: str, target: str, at: str = "i + 8") -> str:
    return f"""\
  kernel {name}(new: f32[4], {target}: f32[{SIZES[target]}]) {{
    axes i: 4
    a: f32 = load new[i]
    st: f32 = store {target}[{at}], a
  }}

"""


def read(name: str, source: str, target: str = "z") -> str:
    return f"""\
  kernel {name}({source}: f32[24], {target}: f32[24]) {{
    axes i: 24
    a: f32 = load {source}[-1*i + 23]
    b: f32 = exp a
    st: f32 = store {target}[i], b
  }}

"""


AROUND = copy("there", "x", "y") + change("change", "y") + copy("back", "y", "x")
CHAIN = (
    copy("there", "x", "y")
    + change("one", "y")
    + copy("on", "y", "w")
    + change("two", "w", "5*i")
    + copy("back", "w", "x")
)
PART = (
    copy("there", "x", "p", 8, " + 8") + change("change", "p", "2*i") + copy("whole", "x", "y")
    + copy("put", "p", "y", 8, "", " + 8") + copy("back", "y", "x")
)  # fmt: skip


def changed(nodes: str) -> tuple[Program, list[str]]:
    """The program without copies, which does what it did before, and why those were refused that are left."""
    before = parsed(nodes)
    verify_program(before)
    after, _, decisions = change_in_place(before, {})
    verify_program(after)
    x, new = torch.arange(24.0) / 24, -torch.arange(4.0)
    seen: list[torch.Tensor] = []
    for program in (before, after):
        given = x.clone()
        (result,) = run_program(program, [given, new])
        seen += [given, result]
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    return after, [decision.why for decision in decisions if not decision.ok]


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        (AROUND + read("reader", "x"), ["change", "reader"]),
        (AROUND + read("reader", "y"), ["change", "reader"]),
        (read("reader", "x") + AROUND, ["reader", "change"]),
        (CHAIN + read("reader", "w"), ["one", "two", "reader"]),
        (PART + read("reader", "x"), ["change", "reader"]),
        (read("before", "x", "y") + copy("on", "y", "w") + change("change", "w") + read("reader", "w"),
         ["before", "change", "reader"]),
    ],
)  # fmt: skip
def test_copies_around_a_change_are_gone(nodes: str, left: list[str]) -> None:
    after, refused = changed(nodes)
    assert [node.name for node in after.nodes] == left
    assert refused == []


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (copy("there", "x", "y") + change("change", "y") + read("reader", "y"),
         "x belongs to the caller and must not change"),
        (copy("there", "x", "y") + change("change", "y") + read("reader", "x") + copy("back", "y", "x"),
         "reader needs the old contents of x"),
        (AROUND + change("again", "x", "i") + read("reader", "y"), "reader reads y after x is changed"),
        (AROUND + change("again", "y", "i") + read("reader", "y"), "again also writes y"),
        (change("before", "w", "i") + copy("there", "x", "w") + change("change", "w") + copy("back", "w", "x")
         + read("reader", "x"), "before also writes w"),
        (copy("there", "x", "y") + change("change", "y") + copy("out", "y", "z"),
         "x belongs to the caller and must not change"),
        (read("before", "x", "y") + copy("on", "y", "w") + change("change", "w") + read("reader", "y"),
         "reader needs the old contents of y"),
    ],
)  # fmt: skip
def test_what_is_read_later_is_kept(nodes: str, why: str) -> None:
    before = [node.name for node in parsed(nodes).nodes]
    after, refused = changed(nodes)
    assert [node.name for node in after.nodes] == before
    assert refused == [why]


def test_values_are_told_where_they_lie() -> None:
    program = parsed(CHAIN + read("reader", "w"))
    (whole,) = program.outputs
    assert isinstance(whole, View)
    values = {name: View(name, whole.shape, whole.strides, whole.offset) for name in ("y", "w", "z")}
    _, after, _ = change_in_place(program, values)
    assert {name: view.buffer for name, view in after.items()} == {"w": "x", "z": "z"}
