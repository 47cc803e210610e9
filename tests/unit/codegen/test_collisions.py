"""Which axes of a scatter threads may share."""

from __future__ import annotations

import pytest

from pellucid.codegen import generate
from pellucid.codegen.collisions import colliding
from pellucid.ir.parser import parse_kernel
from pellucid.native.machine import machine_for
from pellucid.options import Options

ROWS = """
kernel rows(at: i64[100], x: f32[4096], y: f32[40960]) {{
  axes i0: 100, i1: 40
  v0: i64 = load at[i0]
  v1: i64 = check v0, 1000
  v2: f32 = load x[40*i0 + i1]
  s0: f32 = store {join}y[{index}], v2
}}
"""


@pytest.mark.parametrize(
    ("index", "axes"),
    [
        ("40*[v1] + i1", ("i0",)),  # columns are apart
        ("1000*i1 + [v1]", ("i0",)),
        ("39*[v1] + i1", ("i0", "i1")),  # the last column of a row is the first of the next
        ("40*i0 + i1", ()),
    ],
)
def test_axes_collide_unless_they_are_digits_of_the_index(index: str, axes: tuple[str, ...]) -> None:
    kernel = parse_kernel(ROWS.format(join="add ", index=index))
    assert colliding(kernel) == axes


def test_values_that_are_not_checked_may_be_anything() -> None:
    text = ROWS.format(join="add ", index="40*[v0] + i1").replace("  v1: i64 = check v0, 1000\n", "")
    assert colliding(parse_kernel(text)) == ("i0", "i1")


def test_threads_share_the_columns() -> None:
    plan = generate(parse_kernel(ROWS.format(join="add ", index="40*[v1] + i1")), Options(), machine_for()).plan
    assert plan.colliding == ("i0",)
    assert plan.vector == plan.inner == "i1"


def test_points_that_meet_run_one_after_the_other() -> None:
    native = generate(parse_kernel(ROWS.format(join="", index="39*[v1] + i1")), Options(), machine_for())
    assert native.plan.vector is None
    assert native.extent.value == 1
    (reason,) = [decision.why for decision in native.decisions if decision.rule == "codegen.vectorize"]
    assert "one after the other" in reason


PLANAR = """
kernel planar(at: i64[100], x: f32[{columns}00], y: f32[{numel}]) {{
  axes i0: {columns}, i1: 100
  v0: i64 = load at[i1]
  v1: i64 = check v0, {rows}
  v2: f32 = load x[100*i0 + i1]
  s0: f32 = store add y[{columns}*[v1] + i0], v2
}}
"""


@pytest.mark.parametrize(
    ("columns", "rows", "cut"), [(24, 169, False), (256, 20, False), (512, 20, True), (256, 200_000, True)]
)
def test_threads_do_not_write_to_lines_of_one_another(columns: int, rows: int, cut: bool) -> None:
    """Columns of a place share lines of the cache: a thread has whole ones, or all where rows are few and narrow."""
    text = PLANAR.format(columns=columns, rows=rows, numel=columns * rows)
    plan = generate(parse_kernel(text), Options(), machine_for()).plan
    assert (plan.vector, plan.colliding, plan.inner) == (None, ("i1",), "i0")
    assert bool(plan.chunk) == cut and plan.chunk % 16 == 0
    assert plan.extent.value == (columns // plan.chunk if cut else 1)
