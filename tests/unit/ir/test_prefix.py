"""Prefix sums are recognised as such, and nothing else is; their nests are checked."""

from __future__ import annotations

import pytest

from pellucid.codegen import generate
from pellucid.codegen.nest_text import parse_nest, print_nest
from pellucid.codegen.verify_nest import verify_nest
from pellucid.errors import InternalError
from pellucid.ir.parser import parse_kernel
from pellucid.ir.prefix import as_run, find_prefix
from pellucid.machine import AVX2
from pellucid.options import Options

SUM = """\
kernel sums(x: f32[60], y: f32[60]) {
  axes i: 12, c: 5, k: 12
  a: f32 = load x[5*k + c]
  b: f32 = exp a
  p: i64 = index k
  q: i64 = index i
  m: bool = le p, q
  z: f32 = const 0.0
  w: f32 = where m, b, z
  s: f32 = sum w over k
  st: f32 = store y[5*i + c], s
}"""
LOOP = """\
kernel sums(x: f32[60], y: f32[60]) {
  axes i: 12, c: 5
  a: f32 = load x[5*i + c]
  b: f32 = exp a
  s: f32 = cast b
  st: f32 = store y[5*i + c], s
}"""


def test_the_loop_has_the_term_of_each_point() -> None:
    kernel = parse_kernel(SUM)
    prefix = find_prefix(kernel)
    assert prefix is not None and prefix.axis == "i"
    assert prefix.kernel == parse_kernel(LOOP) == as_run(kernel) == as_run(prefix.kernel)


@pytest.mark.parametrize(("old", "new"), [("le p, q", "ge q, p"), ("5*k + c]", "-5*k - c + 59]")])
def test_other_ways_to_write_it(old: str, new: str) -> None:
    assert find_prefix(parse_kernel(SUM.replace(old, new))) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("le p, q", "lt p, q"),
        ("le p, q", "le q, p"),
        ("index i", "index i + 1"),
        ("index i", "index c"),
        ("const 0.0", "const 1.0"),
        ("sum w over k", "max w over k"),
        ("sum w over k", "sum b over k"),
        ("b: f32 = exp a", "d: f32 = load x[5*i + c]\n  b: f32 = add a, d"),
        ("k: 12", "k: 11"),
        ("  p: i64", "  st2: f32 = store y[5*k + c], b\n  p: i64"),
        ("store y[5*i + c], s", "store y[5*i + c], s\n  st2: f32 = store x[5*i + c], s"),
        ("store y[5*i + c], s", "store y[5*i + c], s\n  u: f32 = max b over k\n  st2: f32 = store y[5*i + c], u"),
    ],
)
def test_what_is_none(old: str, new: str) -> None:
    assert old in SUM
    kernel = parse_kernel(SUM.replace(old, new))
    assert find_prefix(kernel) is None and as_run(kernel) is kernel


def test_nests_print_and_are_checked() -> None:
    text = print_nest(generate(parse_kernel(SUM), Options(), AVX2).nest)
    assert "so far" in text and print_nest(parse_nest(text)) == text
    verify_nest(parse_nest(text))
    (start,) = (line for line in text.splitlines() if "start" in line)
    inside = text.replace(f"{start}\n", "").replace("so far", "so far\n    " + start.strip())
    with pytest.raises(InternalError, match="not started before the loop over its axis"):
        verify_nest(parse_nest(inside))
