from __future__ import annotations

from pellucid.ir.origin import Origin
from pellucid.ir.parser import parse_kernel
from pellucid.ir.printer import print_kernel
from pellucid.schedule.cleanup import clean_kernel


def cleaned(source: str) -> str:
    return print_kernel(clean_kernel(parse_kernel(source)), origins=False)


def test_repeated_lines_become_one():
    before = """kernel k(A: f32[8], B: f32[8]) {
      axes i: 8
      a: f32 = load A[i]
      b: f32 = load A[i]
      c: f32 = cast b
      d: f32 = add a, c
      e: f32 = exp b
      st: f32 = store B[i], d
    }"""
    after = """kernel k(A: f32[8], B: f32[8]) {
  axes i0: 8
  v0: f32 = load A[i0]
  v1: f32 = add v0, v0
  st0: f32 = store B[i0], v1
}"""
    assert cleaned(before) == after


def test_zeros_of_both_signs_stay_apart():
    source = """kernel k(A: f32[8], B: f32[8], C: f32[8]) {
      axes i: 8
      a: f32 = load A[i]
      p: f32 = const 0.0
      n: f32 = const -0.0
      one: f32 = const 1.0
      b: f32 = add a, p
      c: f32 = add a, n
      d: f32 = mul c, one
      s: f32 = store B[i], b
      t: f32 = store C[i], d
    }"""
    text = cleaned(source)
    assert "const 0.0" in text and "const -0.0" in text
    assert "const 1.0" not in text


def test_axes_that_step_as_one_become_one():
    source = """kernel k(A: f32[60], B: f32[60], W: f32[5]) {
      axes c: 5, a: 3, b: 4
      x: f32 = load A[20*a + 5*b + c]
      w: f32 = load W[c]
      y: f32 = mul x, w
      st: f32 = store B[20*a + 5*b + c], y
    }"""
    assert "axes i0: 12, i1: 5" in cleaned(source)
    assert "load A[5*i0 + i1]" in cleaned(source)


def test_argmax_keeps_the_order_of_its_axes():
    source = """kernel k(A: f32[24], B: i64[1]) {
      axes h: 4, r: 6
      v: f32 = load A[h + 4*r]
      m: i64 = argmax v over h, r
      st: i64 = store B[0], m
    }"""
    assert "axes i0: 4, i1: 6" in cleaned(source)
    assert "load A[i0 + 4*i1]" in cleaned(source)


def test_unused_axes_vanish():
    source = """kernel k(A: f32[8], B: f32[8]) {
      axes i: 8, j: 3
      a: f32 = load A[i]
      p: i64 = index j
      st: f32 = store B[i], a
    }"""
    assert "axes i0: 8\n" in cleaned(source)


def test_origins_of_equal_lines_merge():
    kernel = parse_kernel(
        """kernel k(A: f32[8], B: f32[8]) {
          axes i: 8
          a: f32 = load A[i]
          b: f32 = load A[i]
          c: f32 = mul a, b
          st: f32 = store B[i], c
        }"""
    )
    from dataclasses import replace

    body = tuple(replace(line, origin=Origin((line.out,))) for line in kernel.body)
    assert clean_kernel(replace(kernel, body=body)).body[0].origin.nodes == ("a", "b")


def rounded(lines: str, params: str = "C: bf16[8]") -> str:
    return cleaned(f"kernel k(A: f32[8], B: f32[8], {params}) {{\n axes i: 8\n a: f32 = load A[i]\n{lines}}}")


def test_a_value_that_is_stored_narrow_is_rounded_once():
    text = rounded("""
      r: f32 = round_bf16 a
      zero: f32 = const 0.0
      six: f32 = const 6.0
      m: f32 = maximum r, zero
      n: f32 = minimum six, m
      st: f32 = store C[i], n
    """)
    assert "round_bf16" not in text and "maximum v0" in text
    assert "round_bf16" not in rounded("r: f32 = round_bf16 a\n s: f32 = round_bf16 r\n st: f32 = store C[i], s\n")


def test_roundings_that_others_see_remain():
    zero = "r: f32 = round_bf16 a\n z: f32 = const 0.0\n"
    for lines, params in (
        ("m: f32 = maximum r, z\n st: f32 = store C[i], m\n", "C: f32[8]"),
        ("m: f32 = maximum r, z\n st: f32 = store C[i], m\n", "C: f16[8]"),
        ("m: f32 = add r, z\n st: f32 = store C[i], m\n", "C: bf16[8]"),
        ("m: f32 = maximum r, z\n st: f32 = store C[i], m\n t: f32 = store B[i], r\n", "C: bf16[8]"),
        ("b: f32 = load B[i]\n m: f32 = maximum r, b\n st: f32 = store C[i], m\n", "C: bf16[8]"),
        ("c: f32 = const 0.1\n m: f32 = maximum r, c\n st: f32 = store C[i], m\n", "C: bf16[8]"),
    ):
        assert "round_bf16" in rounded(zero + lines, params), lines
