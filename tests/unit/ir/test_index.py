"""The index algebra: every rewriting keeps the value of the expression."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.ir.index import (
    ONE,
    ZERO,
    Expr,
    FloorDiv,
    Mod,
    Sym,
    Val,
    Var,
    bounds,
    const,
    exact_div,
    floordiv,
    in_range,
    mod,
    nonnegative,
    of_atom,
    product,
    sym,
    text,
    total,
    val,
    var,
)
from tests.strategies import exprs

EXTENTS = {"i": 7, "j": 5}
RANGES = {name: const(extent) for name, extent in EXTENTS.items()}

i, j, n, m = var("i"), var("j"), sym("n"), sym("m")

axis_values = st.fixed_dictionaries({name: st.integers(0, extent - 1) for name, extent in EXTENTS.items()})
environments = st.builds(
    lambda axes, n, m: {**axes, "n": n, "m": m}, axis_values, st.integers(1, 40), st.integers(1, 40)
)
divisors = st.one_of(st.integers(1, 12).map(const), st.sampled_from([n, m, n * 3, n + 1, n * m]))


def value(expr: Expr, env: dict[str, int]) -> int:
    return expr.evaluate(lambda atom: env[atom.name])


@given(exprs(), exprs(), environments)
@settings(deadline=None)
def test_arithmetic_agrees_with_integers(a: Expr, b: Expr, env: dict[str, int]):
    assert value(a + b, env) == value(a, env) + value(b, env)
    assert value(a - b, env) == value(a, env) - value(b, env)
    assert value(a * b, env) == value(a, env) * value(b, env)
    assert value(-a, env) == -value(a, env)


@given(exprs(), exprs(), exprs())
@settings(deadline=None)
def test_equal_polynomials_are_equal_objects(a: Expr, b: Expr, c: Expr):
    assert a + b == b + a and hash(a + b) == hash(b + a)
    assert (a + b) * c == a * c + b * c
    assert a - a == ZERO and a * ONE == a


@given(exprs(), divisors, environments)
@settings(deadline=None)
def test_floordiv_and_mod_agree_with_integers(a: Expr, d: Expr, env: dict[str, int]):
    for ranges in (None, RANGES):
        assert value(floordiv(a, d, ranges), env) == value(a, env) // value(d, env)
        assert value(mod(a, d, ranges), env) == value(a, env) % value(d, env)


@given(exprs(), exprs(), environments)
@settings(deadline=None)
def test_substitute_then_evaluate(a: Expr, replacement: Expr, env: dict[str, int]):
    inner = {**env, "i": value(replacement, env)}
    assert value(a.substitute({Var("i"): replacement}), env) == value(a, inner)


@given(exprs(), axis_values, environments)
@settings(deadline=None)
def test_substitute_with_ranges_keeps_the_value_inside_them(a: Expr, point: dict[str, int], env: dict[str, int]):
    swapped = a.substitute({Var("i"): j, Sym("n"): m * 2}, RANGES)
    assert value(swapped, env) == value(a, {**env, "i": env["j"], "n": env["m"] * 2})


@given(exprs(), environments)
@settings(deadline=None)
def test_bounds_hold_at_every_point(a: Expr, env: dict[str, int]):
    span = bounds(a, RANGES)
    if span is not None:
        assert value(span[0], env) <= value(a, env) <= value(span[1], env)


@given(exprs(), environments)
@settings(deadline=None)
def test_nonnegative_is_never_wrong(a: Expr, env: dict[str, int]):
    assert not nonnegative(a) or value(a, env) >= 0


def test_nonnegative_knows_multiples() -> None:
    maybe_none = sym("u0")
    for shown in (n * m - n, 3 * n * m * m - 2 * n * m - n, n * maybe_none - maybe_none, n * n - n):
        assert nonnegative(shown)
    for unknown in (n * m - n - m, n * m - 2 * n, n * maybe_none - n, n * m - n - 1, n - n * n):
        assert not nonnegative(unknown)


@given(exprs(), divisors, environments)
@settings(deadline=None)
def test_in_range_is_never_wrong(a: Expr, size: Expr, env: dict[str, int]):
    assert not in_range(a, size, RANGES) or 0 <= value(a, env) < value(size, env)


@given(exprs())
@settings(deadline=None)
def test_coefficient_and_the_rest_make_the_whole(a: Expr):
    c = a.coefficient("i")
    if c is not None:
        rest = a - c * i
        assert "i" not in c.vars() and "i" not in rest.vars()
        assert a.without("i") == rest


@given(exprs(), divisors)
@settings(deadline=None)
def test_exact_division_multiplies_back(a: Expr, d: Expr):
    quotient = exact_div(a, d)
    assert quotient is None or quotient * d == a
    if len(d.terms) == 1:
        assert exact_div(a * d, d) == a


@given(exprs(), environments)
@settings(deadline=None)
def test_text_means_the_same_to_python(a: Expr, env: dict[str, int]):
    assert eval(text(a), {}, env) == value(a, env)


@pytest.mark.parametrize(
    ("expr", "shown"),
    [
        (ZERO, "0"),
        (const(-3), "-3"),
        (i * 512 + j - 3, "512*i + j - 3"),
        (-i + n * i * 2, "2*n*i - i"),
        (val("v3") * 8 + i, "i + 8*[v3]"),
        (floordiv(i + 3, 4), "((i + 3) // 4)"),
        (mod(-i, 4), "(-i % 4)"),
        (floordiv(i, n * m), "(i // (m*n))"),
        (floordiv(i, n + 1) * 5, "5*(i // (n + 1))"),
        (mod(floordiv(i, 4), 3), "((i // 4) % 3)"),
    ],
)
def test_text(expr: Expr, shown: str):
    assert text(expr) == shown


def test_division_takes_out_what_is_whole():
    assert floordiv(i * 8 + j, 8, {"j": const(8)}) == i
    assert mod(i * 8 + j, 8, {"j": const(8)}) == j
    assert floordiv(i * n + j, n, {"j": n}) == i
    assert floordiv(i * n + n - 1, n) == i and mod(i * n + n - 1, n) == n - 1
    assert floordiv(i * n * 4 + 4 * n - 4 + j, 4 * n, {"j": const(4)}) == i
    assert floordiv(i * n - 1, n) == i - 1
    assert floordiv(i * 8 + 11, 8) == i + 1
    assert floordiv(i * 8 + j + 9, 8) == i + 1 + of_atom(FloorDiv(j + 1, const(8)))
    assert mod(i - 1, 4) == of_atom(Mod(i + 3, const(4)))
    assert floordiv(const(-7), 2) == const(-4) and mod(const(-7), 2) == ONE


def test_a_quotient_of_negatives_is_not_taken_for_positive():
    quotient = of_atom(FloorDiv(n - 5, const(4)))  # -1 where n is 1
    assert not nonnegative(quotient)
    assert not in_range(quotient, n)
    assert not nonnegative(val("v0"))
    assert nonnegative(of_atom(FloorDiv(n - 1, const(4))))


def test_sizes_that_are_halved_many_times_are_bounded_once():
    """As of images in networks of many stages: to look into each division anew at each level takes 2**40 steps."""
    size = sym("s0")
    for _ in range(40):
        size = floordiv(size + 1, 2)
    assert bounds(size, {}) == (size, size)
    assert floordiv(size * var("i") + var("j"), size, {"j": size}) == var("i")
    assert not in_range(size, size)


def test_windows_end_within_the_image_that_says_how_many_there_are():
    """No mask for what a convolution without padding reads: its last window ends with the image, or before."""
    height = sym("s0")
    windows = floordiv(height - 16, 10) + 1
    place = var("at") * 10 + var("tap")
    assert in_range(place, height, {"at": windows, "tap": const(16)})
    assert not in_range(place, height, {"at": windows, "tap": const(17)})
    assert not in_range(place, height, {"at": windows + 1, "tap": const(16)})
    width = sym("s1")
    assert nonnegative(height * width - floordiv(width, 8) * height * 8)
    assert not nonnegative(sym("n0") * width - floordiv(width, 8) * sym("n0") * 8), "which may be negative"


def test_bounds_are_unknown_without_ranges():
    assert bounds(i, None) is None
    assert bounds(i + val("v0"), RANGES) is None
    assert bounds(i * 2 + n, RANGES) == (n, n + 12)
    assert bounds(-i, RANGES) == (const(-6), ZERO)


def test_coefficient_of_what_is_not_affine():
    assert (i * i).coefficient("i") is None
    assert (i * floordiv(i, 3)).coefficient("i") is None
    assert floordiv(i, 3).coefficient("i") is None
    assert (i * j * 2 + j).coefficient("i") == j * 2
    assert j.coefficient("i") == ZERO


def test_what_an_expression_depends_on():
    expr = floordiv(i + val("v1"), n) + j
    assert expr.vars() == {"i", "j"} and expr.syms() == {"n"} and expr.vals() == {"v1"}
    assert {Var("i"), Val("v1"), Sym("n")} < expr.atoms()


def test_sums_and_products_of_many():
    assert total([i, 2, j]) == i + j + 2 and total([]) == ZERO
    assert product([i, 2, j]) == i * j * 2 and product([]) == ONE
