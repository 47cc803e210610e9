"""Kernels run at those points alone that somebody reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Kernel, Program
from pellucid.ir.parser import parse_program
from pellucid.ir.verify import verify_program
from pellucid.schedule.unread import cut_unread

SUMS = """\
program {{
  buffer x: f32[480] input
  buffer y: f32[60] temp
  buffer z: f32[60] output
  inputs x

  kernel sums(x: f32[480], y: f32[60]) {{
    axes i: 12, j: 5, k: 8
    a: f32 = load x[40*i + 8*j + k]
    b: f32 = sum a over k
    st: f32 = store y[5*i + j], b
  }}

{readers}
  output view z (60) strides (1) offset 0
}}
"""
POINTS = (
    SUMS.replace(", k: 8", "").replace("8*j + k", "8*j").replace("    b: f32 = sum a over k\n", "    b: f32 = exp a\n")
)


def reader(name: str, axes: str, index: str, to: str, mask: str = "") -> str:
    return f"""\
  kernel {name}(y: f32[60], z: f32[60]) {{
    axes {axes}
{mask}    a: f32 = load y[{index}]{" if m else 0.0" if mask else ""}
    st: f32 = store z[{to}], a
  }}
"""


def axes(program: Program) -> dict[str, int | None]:
    kernel = next(node for node in program.nodes if isinstance(node, Kernel) and node.name == "sums")
    return {"i": 1, "j": 1} | {axis.name: axis.extent.value for axis in kernel.space}


FIRST = reader("first", "i: 10, j: 5", "5*i + j", "5*i + j")
LAST = reader("last", "j: 5", "j + 55", "j + 55")
EVERY = reader("every", "i: 4, j: 5", "15*i + j + 5", "5*i + j")
MASKED = reader(
    "masked",
    "i: 12, j: 5",
    "5*i + j - 5",
    "5*i + j",
    "    n: i64 = index i\n    o: i64 = const 1\n    m: bool = ge n, o\n",
)
WINDOWS = reader("windows", "i: 4, j: 5", "5*i + j + 15*[o]", "5*i + j").replace(
    "    a:", "    n: i64 = index -i + 3\n    o: i64 = check n, 4\n    a:"
)


@pytest.mark.parametrize(
    ("readers", "i", "j"),
    [
        (FIRST, 10, 5),
        (WINDOWS, 12, 5),  # how far a value leads is not known
        (LAST, 1, 5),
        (EVERY, 4, 5),
        (MASKED, 12, 5),  # masked positions may be anywhere
        (reader("corner", "i: 3, j: 2", "5*i + j + 11", "5*i + j"), 3, 2),
        (reader("flat", "n: 50", "n", "n"), 10, 5),
        (FIRST + LAST, 12, 5),
        (EVERY + LAST, 11, 5),
        (LAST + reader("again", "j: 3", "j + 56", "j + 10"), 1, 5),
        (reader("values", "i: 12, j: 5", "5*i + j", "5*i + j"), 12, 5),
    ],
)
def test_reductions_run_where_they_are_read(readers: str, i: int, j: int) -> None:
    before = parse_program(SUMS.format(readers=readers))
    after, decisions = cut_unread(before)
    verify_program(after)
    assert axes(after) == {"i": i, "j": j, "k": 8}
    assert len(decisions) == (i != 12) + (j != 5)
    x = torch.randn(480)
    one, other = (run_program(program, [x.clone()])[0] for program in (before, after))
    places = sorted(set(stored(before)))
    assert torch.equal(one[places], other[places])


def stored(program: Program) -> Iterator[int]:
    """The elements of the result that readers store."""
    for kernel in program.nodes[1:]:
        assert isinstance(kernel, Kernel)
        for _, store in kernel.stores():
            for point in product(*(range(axis.extent.value or 0) for axis in kernel.space)):
                at = {axis.name: number for axis, number in zip(kernel.space, point, strict=True)}
                yield store.index.evaluate(lambda atom, at=at: at[atom.name])


@pytest.mark.parametrize(("readers", "i"), [(FIRST, 12), (LAST, 1), (EVERY, 4)])
def test_other_kernels_are_cut_to_half_or_less(readers: str, i: int) -> None:
    after, _ = cut_unread(parse_program(POINTS.format(readers=readers)))
    assert axes(after) == {"i": i, "j": 5}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "output view z (60) strides (1) offset 0",
            "output view z (60) strides (1) offset 0\n  output view y (60) strides (1) offset 0",
        ),
        ("store y[5*i + j], b", "store add y[5*i + j], b"),
        ("    st: f32 = store y[5*i + j], b", "    st: f32 = store y[5*i + j], b\n    more: f32 = store z[5*i + j], b"),
    ],
)
def test_what_others_may_see_is_whole(old: str, new: str) -> None:
    text = SUMS.format(readers=LAST)
    assert old in text
    text = text.replace(old, new)
    if "more" in text:
        text = text.replace("kernel sums(x: f32[480], y: f32[60])", "kernel sums(x: f32[480], y: f32[60], z: f32[60])")
    after, decisions = cut_unread(parse_program(text))
    assert axes(after) == {"i": 12, "j": 5, "k": 8} and not decisions
