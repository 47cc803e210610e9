"""Programs before and after scheduling, with the decisions behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pellucid.ir.index import sym
from pellucid.ir.nodes import Program
from pellucid.ir.printer import print_program
from pellucid.machine import AVX2
from pellucid.options import Options
from pellucid.schedule import schedule
from pellucid.schedule.pad import pad
from tests.unit.schedule.build import ProgramBuilder
from tests.unit.schedule.test_fuse import layer_norm
from tests.unit.schedule.test_fuse import softmax as softmax_of


def softmax() -> Program:
    b = ProgramBuilder(["n"])
    x = b.input(sym("n"), 512)
    return b.finish(softmax_of(b, b.op("mul", x, 0.125)))


def layer_norm_residual() -> Program:
    b = ProgramBuilder()
    x, y, weight, bias = b.input(128, 768), b.input(128, 768), b.input(768), b.input(768)
    total = b.op("add", x, y)
    return b.finish(total, layer_norm(b, total, weight, bias))


def gelu_mlp() -> Program:
    b = ProgramBuilder()
    x, up, bias, down = b.input(64, 256), b.input(256, 1024), b.input(1024), b.input(1024, 256)
    h = b.op("add", b.mm(x, up), bias)
    bell = b.op("add", b.op("erf", b.op("mul", h, 0.7071067811865476)), 1.0)
    return b.finish(b.op("add", x, b.mm(b.op("mul", b.op("mul", h, 0.5), bell), down)))


def transposed_consumer() -> Program:
    b = ProgramBuilder()
    x, y = b.input(2, 128, 64), b.input(2, 4, 16, 128)
    heads = b.op("add", x, 1.0).split(2, 16).permute(0, 2, 3, 1)
    return b.finish(b.op("mul", heads, y))


def transposed_softmax() -> Program:
    b = ProgramBuilder()
    x = b.input(96, 160)
    return b.finish(b.copy(softmax_of(b, x).permute(1, 0)))


def two_orders() -> Program:
    b = ProgramBuilder()
    e = b.op("exp", b.input(96, 96, 96))
    return b.finish(b.copy(e.permute(2, 1, 0)), b.copy(e.permute(0, 2, 1)))


def slices_and_cat() -> Program:
    b = ProgramBuilder()
    x, cos, sin = b.input(4, 128, 64), b.input(128, 64), b.input(128, 64)
    swapped = b.cat([b.op("neg", x.slice(2, 32, 64)), x.slice(2, 0, 32)], 2)
    return b.finish(b.op("add", b.op("mul", x, cos), b.op("mul", swapped, sin)))


def padded_rows() -> Program:
    b = ProgramBuilder()
    x = b.input(512, 1024)
    rows = b.op("div", x, b.reduce("sum", b.op("abs", x), 1))
    return b.finish(b.op("div", rows, b.reduce("sum", rows, 0)))


def in_place_step() -> Program:
    b = ProgramBuilder()
    weight, gradient = b.input(256, 256), b.input(256, 256)
    b.write(weight, b.op("sub", weight, b.op("mul", gradient, 0.01)))
    return b.finish(b.op("mul", b.op("abs", weight), 2.0))


@pytest.mark.parametrize(
    "make",
    [
        softmax,
        layer_norm_residual,
        gelu_mlp,
        transposed_consumer,
        transposed_softmax,
        two_orders,
        slices_and_cat,
        in_place_step,
        padded_rows,
    ],
)
def test_schedule(make: Callable[[], Program], golden: Callable[[str, str], None]) -> None:
    program, decisions = schedule(make(), Options())
    program, _, padded = pad(program, {}, AVX2)
    decisions += padded
    told = "".join(
        f"# {decision.rule} {'yes' if decision else 'no'} {', '.join(decision.subject)}: {decision.why}\n"
        for decision in decisions
    )
    golden(f"schedule/{make.__name__}.ir", told + print_program(program) + "\n")
