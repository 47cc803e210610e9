"""Derived numbers: printed, parsed, checked and evaluated; and what the name of a size symbol says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pellucid.errors import InternalError
from pellucid.ir.derived import FUNCTIONS, Apply, Derived, Float, Formulas, Numbers, by_name
from pellucid.ir.index import const, floordiv, min_value, mod, nonnegative, sym
from pellucid.ir.interp import run_program
from pellucid.ir.parser import parse_program
from pellucid.ir.printer import print_program
from pellucid.ir.verify import verify_program

PROGRAM = """\
program {
  symbols s0
  derived u_min_1: int = min(2*s0 - 4, 10)
  derived f_1: float = where(lt(s0, 4), truediv(s0, -2.0), inf)
  buffer x: f32[s0] input
  buffer f_1: f64[1] input
  buffer y: f32[u_min_1] output
  inputs s0, x

  kernel scale<s0, u_min_1>(x: f32[s0], f_1: f64[1], y: f32[u_min_1]) {
    axes i0: u_min_1
    v0: f32 = load x[0]
    v1: f64 = load f_1[0]
    v2: f32 = cast v1
    v3: f32 = mul v0, v2
    st0: f32 = store y[i0], v3
  }

  extern fill = aten::full.default {
    arg (size u_min_1,)
    arg number f_1
    output none
    ordered
  }

  output view y (u_min_1,) strides (1,) offset 0
  output size u_min_1 + 1
}"""


def test_a_program_with_derived_numbers_prints_parses_and_runs() -> None:
    program = parse_program(PROGRAM)
    verify_program(program)
    assert parse_program(print_program(program)) == program
    assert program.supplied == ("f_1",)
    y, size = run_program(program, [3, torch.tensor([2.0, 0.0, 0.0])])
    assert isinstance(y, torch.Tensor) and y.tolist() == [-3.0, -3.0] and size == 3


def test_a_derived_number_names_what_is_known() -> None:
    early = Derived("u_min_1", False, Apply("min", (sym("s1"), const(3))))
    with pytest.raises(InternalError, match="u_min_1 uses s1 before it is known"):
        verify_program(replace(parse_program(PROGRAM), derived=(early,)))
    with pytest.raises(InternalError, match="takes 2 arguments"):
        verify_program(parse_program(PROGRAM.replace("lt(s0, 4)", "lt(s0)")))


def test_numbers_have_pythons_meaning() -> None:
    derived = (
        Derived("n_a", False, Apply("trunc", (Apply("truediv", (sym("s0"), const(-3))),))),
        Derived("n_b", False, Apply("round", (Apply("mul", (sym("n_a"), 0.5)),))),
        Derived("f", True, Apply("add", (Float("z"), 0.25))),
    )
    numbers = Numbers({"s0": 10, "z": 1.5}, by_name(derived))
    assert numbers(sym("n_a") * 2 + 1) == -5 and numbers.of("n_b") == -2 and numbers.of("f") == 1.75
    with pytest.raises(InternalError, match="s9 is not known"):
        numbers(sym("s9"))
    assert FUNCTIONS["floordiv"].evaluate(-7, 2) == -4 and math.isnan(FUNCTIONS["add"].evaluate(math.nan, 1))


def test_formulas_are_computed_together() -> None:
    derived = by_name(
        (
            Derived("n_b", False, Apply("round", (Apply("mul", (sym("n_a"), 0.5)),))),
            Derived("n_a", False, Apply("trunc", (Apply("truediv", (sym("s0"), const(-3))),))),
            Derived("f", True, Apply("add", (Apply("float", (sym("s1"),)), math.inf))),
            Derived("unused", False, Apply("truediv", (sym("s0"), const(0)))),
        )
    )
    terms = [sym("n_b") * sym("s1"), Float("f"), floordiv(sym("s0") - 3, 4) + mod(sym("s0"), sym("s1")), sym("s0")]
    formulas = Formulas(("s0", "s1"), derived, terms)
    for sizes in ((10, 3), (7, 8)):
        values = formulas.values(*sizes)
        alone = Numbers(dict(zip(("s0", "s1"), sizes, strict=True)), derived)
        assert values == (*(alone(term) for term in terms[:1]), math.inf, *(alone(term) for term in terms[2:]))
        numbers = formulas.numbers(sizes, values)
        assert [numbers(term) for term in terms] == list(values) and numbers(sym("n_a") - 1) == alone(sym("n_a")) - 1
    assert Formulas((), {}, []).values() == ()
    with pytest.raises(InternalError, match="s9 is not known"):
        Formulas(("s0",), derived, [sym("s9")])
    with pytest.raises(ZeroDivisionError):
        Formulas(("s0",), derived, [sym("unused")]).values(1)


def test_names_of_symbols_tell_their_least_value() -> None:
    assert [min_value(name) for name in ("s0", "n", "u", "rows", "u0", "u_rows", "n0", "n_shift")] == [
        1, 1, 1, 1, 0, 0, None, None,
    ]  # fmt: skip
    assert nonnegative(sym("s0") - 1) and not nonnegative(sym("u0") - 1)
    assert nonnegative(sym("u0")) and not nonnegative(sym("n0"))
    assert mod(const(5), sym("s0") + 5) == const(5) and mod(const(5), sym("u0") + 5) != const(5)
    assert floordiv(sym("n0"), 4) != floordiv(sym("u0"), 4)
