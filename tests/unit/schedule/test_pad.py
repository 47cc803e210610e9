"""Padded rows: the same results, only where kernels alone look, and only where the machine model says that it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.ir.decision import Decision
from pellucid.ir.index import const, sym, var
from pellucid.ir.nodes import Program, View
from pellucid.ir.verify import verify_program
from pellucid.machine import AVX2, Machine
from pellucid.machine.model import Level
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.pad import Padding, pad, sweeps
from tests.unit.schedule.build import ProgramBuilder, Tensor, check_same, kernels

ROWS, COLUMNS = 512, 1024


def balanced(b: ProgramBuilder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that sum up to one, then columns: the rows lie in a temporary between two kernels."""
    y = b.op("div", x, b.reduce("sum", b.op("abs", x), 1))
    return y, b.op("div", y, b.reduce("sum", b.op("abs", y), 0))


def made(rows: int | str = ROWS, columns: int = COLUMNS, *, kept: bool = False) -> Program:
    """kept: the temporary is a result as well."""
    b = ProgramBuilder([rows] if isinstance(rows, str) else [])
    y, z = balanced(b, b.input(sym(rows) if isinstance(rows, str) else rows, columns))
    return b.finish(*((y, z) if kept else (z,)))


def padded(
    program: Program, machine: Machine = AVX2, sizes: dict[str, int] | None = None
) -> tuple[Program, Program, list[Decision]]:
    """The program after scheduling, the same with padded rows, and why: well-formed, with the same results."""
    before, _ = schedule(program, Options(), machine)
    after, _, decisions = pad(before, {}, machine)
    verify_program(after)
    check_same(program, after, sizes)
    return before, after, decisions


def sizes_of(program: Program) -> dict[str, int | None]:
    return {buffer.name: buffer.numel.value for buffer in program.buffers}


def test_rows_that_meet_in_few_sets_get_an_odd_number_of_lines() -> None:
    before, after, decisions = padded(made())
    (decision,) = decisions
    assert decision.ok and "512 rows of 1024 elements" in decision.why
    changed = {name for name, numel in sizes_of(before).items() if sizes_of(after)[name] != numel}
    assert changed == {decision.subject[0]}
    assert sizes_of(after)[decision.subject[0]] == ROWS * (COLUMNS + 16)
    indices = {load.index for kernel in kernels(after) for _, load in kernel.loads() if load.buffer in changed}
    assert indices and all(
        index.coefficient(name) == const(1040)
        for index in indices
        for name in index.vars()
        if index.coefficient(name) != const(1)
    )


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(128, 1024), (512, 1000), (512, 1040), (255, 1024), (511, 256)],
    ids=["few rows", "odd rows", "padded rows", "one row less", "short rows"],
)
def test_rows_that_a_cache_holds_stay(rows: int, columns: int) -> None:
    before, after, decisions = padded(made(rows, columns))
    assert after == before and not decisions


def test_the_first_number_of_rows_that_fills_the_sets_is_padded() -> None:
    assert [decision.ok for decision in padded(made(256))[2]] == [True]


def test_results_lie_as_eager_lays_them() -> None:
    before, after, decisions = padded(made(kept=True))
    assert after == before and not decisions


@pytest.mark.parametrize("rows", [300, 1])
def test_any_number_of_rows_is_padded_where_their_length_is_known(rows: int) -> None:
    _, after, decisions = padded(made("n", 4096), sizes={"n": rows})
    assert [decision.ok for decision in decisions] == [True]
    assert after.buffer(decisions[0].subject[0]).numel == sym("n") * 4112


def test_rows_of_unknown_length_stay() -> None:
    b = ProgramBuilder(["n"])
    before, after, decisions = padded(b.finish(balanced(b, b.input(ROWS, sym("n")))[1]), sizes={"n": 8})
    assert after == before and not decisions


def test_what_a_library_call_reads_stays() -> None:
    b = ProgramBuilder()
    y, z = balanced(b, b.input(ROWS, COLUMNS))
    program = b.finish(z, b.mm(y, b.input(COLUMNS, 4)))
    before, after, decisions = padded(program)
    assert after == before
    assert [(decision.ok, "requires its layout" in decision.why) for decision in decisions] == [(False, True)]


def test_an_access_that_crosses_rows_stays() -> None:
    b = ProgramBuilder()
    y, z = balanced(b, b.input(ROWS, COLUMNS))
    flat = y.merge(0)
    assert flat is not None
    shifted = b.copy(flat.slice(0, 1, 100_000))
    before, after, decisions = padded(b.finish(z, b.reduce("sum", shifted, 0)))
    assert after == before
    assert [decision.ok for decision in decisions] == [False]


def test_a_cache_of_one_set_gains_nothing() -> None:
    """What holds any lines of its size is not helped by rows that lie apart."""
    whole = tuple(replace(level, ways=level.size // 64) if level.size else level for level in AVX2.levels)
    before, after, decisions = padded(made(), replace(AVX2, levels=whole))
    assert after == before and not decisions


def test_values_are_told_where_they_lie() -> None:
    before, _ = schedule(made(), Options(), AVX2)
    name = pad(before, {}, AVX2)[2][0].subject[0]
    whole = View(name, (const(ROWS), const(COLUMNS)), (const(COLUMNS), const(1)), const(0))
    turned = View(name, (const(COLUMNS), const(2)), (const(1), const(COLUMNS)), const(5 * COLUMNS))
    _, values, decisions = pad(before, {"y": whole, "t": turned}, AVX2)
    assert decisions[0].ok
    assert values["y"] == replace(whole, strides=(const(1040), const(1)))
    assert values["t"] == replace(turned, strides=(const(1), const(1040)), offset=const(5 * 1040))


def test_a_value_that_crosses_rows_keeps_them() -> None:
    before, _ = schedule(made(), Options(), AVX2)
    name = pad(before, {}, AVX2)[2][0].subject[0]
    flat = View(name, (const(ROWS * COLUMNS // 3),), (const(3),), const(0))
    after, values, decisions = pad(before, {"flat": flat}, AVX2)
    assert after == before and values == {"flat": flat}
    assert [decision.ok for decision in decisions] == [False]


@pytest.mark.parametrize(
    ("row", "itemsize", "expected"), [(1024, 4, 1040), (1024, 2, 1056), (1000, 4, 1008), (512, 8, 520)]
)
def test_rows_grow_to_an_odd_number_of_lines(row: int, itemsize: int, expected: int) -> None:
    padding = Padding.of("x", row, itemsize)
    assert padding.padded == expected and padding.padded * itemsize // 64 % 2 == 1


def test_memory_grows_by_an_eighth_at_most() -> None:
    assert Padding.of("x", 64, 4).refusal(const(64 * 8)) and not Padding.of("x", 128, 4).refusal(const(128 * 8))


def test_an_index_keeps_its_place_in_the_row() -> None:
    padding = Padding("x", 1024, 1040)
    index = padding.index(var("i") * 1024 + var("j") + 3, {"i": const(4), "j": const(1021)})
    assert index == var("i") * 1040 + var("j") + 3


def test_sweeps_are_counted() -> None:
    b = ProgramBuilder()
    x = b.input(8, 16)
    mean = b.op("div", b.reduce("sum", x, 0), 8.0)
    centred = b.op("sub", x, mean)
    program, _ = schedule(b.finish(b.op("div", centred, b.reduce("sum", b.op("mul", centred, centred), 0))), Options())
    (kernel,) = kernels(program)
    assert sweeps(kernel, "in0") == 3


def test_sets_hold_ways_lines_each() -> None:
    level: Level = replace(AVX2.levels[1], size=1 << 20, ways=8)
    assert [level.holds(stride) for stride in (64, 4096, 4096 + 64, 1 << 17)] == [1 << 14, 256, 1 << 14, 8]
