"""Each invariant has an IR that breaks it, and a check that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from pellucid.errors import InternalError
from pellucid.ir import verify, verify_kernel
from pellucid.ir.derived import Apply, Derived
from pellucid.ir.index import Expr, const, sym, val, var
from pellucid.ir.nodes import Compute, IndexValue, Kernel, Line, Load, Param, Program, Reduce
from pellucid.ir.parser import parse_kernel, parse_program
from pellucid.ir.printer import print_program
from pellucid.ir.types import DType
from pellucid.ir.verify import verify_program
from tests.strategies import kernels

SOFTMAX = parse_kernel("""
kernel softmax(x: f32[64], y: bf16[64]) {
  axes i: 4, j: 16
  a: f32 = load x[16*i + j]
  b: f32 = max a over j
  c: f32 = sub a, b
  d: f32 = exp c
  e: f32 = sum d over j
  f: f32 = div d, e
  st: f32 = store y[16*i + j], f
}""")

PROGRAM = parse_program("""
program {
  symbols s0
  buffer x: f32[8*s0] input
  buffer t: f32[8*s0] temp
  buffer y: f32[8*s0] output
  inputs x, s0
  kernel relu<s0>(x: f32[8*s0], t: f32[8*s0]) {
    axes i: 8*s0
    a: f32 = load x[i]
    b: f32 = const 0.0
    c: f32 = maximum a, b
    st: f32 = store t[i], c
  }
  extern sorted = aten::sort.default {
    arg view t (s0, 8) strides (8, 1) offset 0
    output view y (s0, 8) strides (8, 1) offset 0
    output none
    reason "no lowering"
  }
  output view y (8, s0) strides (1, 8) offset 0
  output size s0
}""")


def body(*lines: str, params: str | None = None, axes: str = "i: 4, j: 16") -> Kernel:
    """A kernel of these lines over two axes; if not told otherwise it takes x and y as far as it uses them."""
    if params is None:
        params = ", ".join(f"{name}: f32[64]" for name in "xy" if f" {name}[" in " ".join(lines))
    head = f"kernel k({params}) {{\n" + (f"axes {axes}\n" if axes else "")
    return parse_kernel(head + "\n".join(lines) + "\n}")


LOAD, STORE = "a: f32 = load x[16*i + j]", "st: f32 = store y[16*i + j], a"


def with_line(rhs: object, dtype: DType) -> Kernel:
    """A good kernel and one more line, which may be anything."""
    kernel = body(LOAD, STORE)
    return replace(kernel, body=(*kernel.body, Line("z", rhs, dtype)))  # type: ignore[arg-type]


BROKEN_KERNELS: list[tuple[str, str, Kernel]] = [
    ("check_names", "a is defined twice", body(LOAD, "a: f32 = neg a", STORE)),
    ("check_names", "i is defined twice", body(LOAD, "i: f32 = neg a", STORE)),
    ("check_names", "x is defined twice", body(LOAD, "x: f32 = neg a", STORE)),
    ("check_names", "'a b' is not a name", replace(SOFTMAX, name="a b")),
    ("check_definitions", "reads b, which no earlier line defines", body(LOAD, "c: f32 = neg b", STORE)),
    ("check_definitions", "reads a, which no earlier", body("c: f32 = neg a", LOAD, STORE)),
    ("check_definitions", "reads st, which no earlier", body(LOAD, STORE, "c: f32 = neg st")),
    ("check_definitions", "reads v, which no earlier", body(LOAD, STORE, "c: i64 = index [v]")),
    ("check_definitions", "reads m, which no earlier", body("a: f32 = load x[i] if m else 0.0", STORE)),
    ("check_indices", "k is not an axis", with_line(IndexValue(var("k")), DType.I64)),
    ("check_indices", "the index value a is not i64", with_line(IndexValue(val("a")), DType.I64)),
    (
        "check_indices",
        "the symbol j is also an axis",
        replace(parse_kernel("kernel k<j>() {\nv: i64 = index j\n}"), space=SOFTMAX.space),
    ),
    (
        "check_indices",
        "the size depends on more than size symbols",
        body("v: i64 = index i", "w: i64 = check v, i", axes="i: 4"),
    ),
    (
        "check_indices",
        "the size of x, i depends on more",
        replace(SOFTMAX, params=(Param("x", DType.F32, var("i")), SOFTMAX.params[1])),
    ),
    ("check_params", "x is not a parameter", body(LOAD, STORE, params="y: f32[64]")),
    ("check_params", "parameter z is never used", body(LOAD, STORE, params="x: f32[64], y: f32[64], z: f32[1]")),
    (
        "check_params",
        "parameter y is complex",
        replace(body(LOAD, STORE), params=(Param("x", DType.F32, const(64)), Param("y", DType.COMPLEX64, const(64)))),
    ),
    ("check_types", "no value has the type bf16", with_line(Load("x", const(0)), DType.BF16)),
    ("check_types", "a load of f32 gives f32", body(LOAD, STORE, "z: f64 = load x[i]")),
    ("check_types", "a load of bf16 gives f32", body("z: f64 = load x[i]", params="x: bf16[64]")),
    ("check_types", "a is f32", body(LOAD, "st: f64 = store y[16*i + j], a")),
    (
        "check_types",
        "a store to f16 takes f32",
        body("z: f64 = const 1.0", "s: f64 = store x[i], z", params="x: f16[4]"),
    ),
    ("check_types", "a store to f64 takes f64", body(LOAD, STORE, params="x: f32[64], y: f64[64]")),
    ("check_types", "the mask a is not bool", body(LOAD, "b: f32 = load x[i] if a else 0.0", STORE)),
    ("check_types", "the arguments have several types", body(LOAD, "b: f64 = cast a", "c: f64 = add a, b")),
    ("check_types", "add of f32 gives f32", body(LOAD, "b: f64 = add a, a")),
    ("check_types", "lt of f32 gives bool", body(LOAD, "b: f32 = lt a, a")),
    ("check_types", "add takes 2 arguments", body(LOAD, "b: f32 = add a")),
    ("check_types", "there is no operator frobnicate", with_line(Compute("frobnicate", ("a",)), DType.F32)),
    ("check_types", "exp is not defined on i64", body("a: i64 = index i", "b: i64 = exp a")),
    ("check_types", "neg is not defined on bool", body("a: bool = const true", "b: bool = neg a")),
    ("check_types", "shl is not defined on bool", body("a: bool = const true", "b: bool = shl a, a")),
    ("check_types", "bitwise_and is not defined on f32", body(LOAD, "b: f32 = bitwise_and a, a")),
    ("check_types", "the condition is not bool", body(LOAD, "b: f32 = where a, a, a")),
    ("check_types", "where of f32 gives f32", body(LOAD, "m: bool = isnan a", "b: f64 = where m, a, a")),
    ("check_types", "an index value is i64", body("a: i32 = index i")),
    ("check_types", "an index value is i64", body("a: i32 = const 1", "b: i64 = check a, 4")),
    ("check_types", "300 is not a number of type u8", body("a: u8 = const 300")),
    ("check_types", "-1 is not a number of type u8", body("a: u8 = const -1")),
    ("check_types", "1.0 is not a number of type i64", body("a: i64 = const 1.0")),
    ("check_types", "2 is not a number of type bool", body("a: bool = const 2")),
    (
        "check_types",
        "nan is not a number",
        body("m: bool = const true", "a: i8 = load x[i] if m else nan", params="x: i8[4]"),
    ),
    ("check_types", "there is no reduction any of f32", body(LOAD, "b: bool = any a over j")),
    (
        "check_types",
        "there is no reduction sum of bool",
        body("a: bool = const true", "b: bool = sum a over j"),
    ),
    ("check_types", "there is no reduction argmax of bool", body("a: bool = const true", "b: i64 = argmax a over j")),
    ("check_types", "argmax of f32 gives i64", body(LOAD, "b: f32 = argmax a over j")),
    ("check_types", "sum of f32 gives f32", body(LOAD, "b: f64 = sum a over j")),
    ("check_types", "there is no reduction mean", with_line(Reduce("mean", "a", ("j",)), DType.F32)),
    (
        "check_reductions",
        "reduces over other axes than b",
        body(LOAD, "b: f32 = sum a over j", "c: f32 = sum a over i"),
    ),
    ("check_reductions", "does not reduce over distinct axes", body(LOAD, "b: f32 = sum a over k")),
    ("check_reductions", "does not reduce over distinct axes", body(LOAD, "b: f32 = sum a over j, j")),
    ("check_reductions", "does not reduce over distinct axes", with_line(Reduce("sum", "a", ()), DType.F32)),
    (
        "check_reductions",
        "max over no elements has no value",
        body("a: f32 = load x[j]", "b: f32 = max a over j", params="x: f32[1]", axes="j: 0"),
    ),
    ("check_store_axes", "a varies along j, the index does not", body(LOAD, "st: f32 = store y[i], a")),
    ("check_store_collisions", "two points along i, j store the same", body(LOAD, "st: f32 = store y[15*i + j], a")),
    ("check_store_collisions", "two points along i, j store", body(LOAD, "st: f32 = store y[2*i + 3*j], a")),
    ("check_store_collisions", "an earlier line stores the same", body(LOAD, STORE, f"another_{STORE}")),
    ("check_bounds", "the index goes up to 64, the buffer has 64", body(LOAD.replace("j]", "j + 1]"), STORE)),
    ("check_bounds", "the index goes down to -1", body(LOAD.replace("j]", "j - 1]"), STORE)),
    ("check_bounds", "the index goes up to 64, the buffer has 64", body(LOAD, "st: f32 = store y[16*i + j + 1], a")),
    ("check_bounds", "the index goes down to -3", body("a: f32 = load x[-i]")),
    ("check_bounds", "the index goes up to 64, the buffer", body("a: f32 = load x[64 + (j // 4)]")),
    (
        "check_bounds",
        r"the index goes up to s0, the buffer has s0 elements",
        parse_kernel("kernel k<s0>(x: f32[s0]) {\naxes i: s0\na: f32 = load x[i + 1]\n}"),
    ),
    (
        "check_in_place",
        "loads x at an index at which no line stores it",
        body("a: f32 = load x[63 - 16*i - j]", "st: f32 = store x[16*i + j], a", params="x: f32[64]"),
    ),
]


@pytest.mark.parametrize(("check", "message", "kernel"), BROKEN_KERNELS, ids=[f"{c}-{m}" for c, m, _ in BROKEN_KERNELS])
def test_a_broken_kernel(check: str, message: str, kernel: Kernel):
    for invoke in (getattr(verify_kernel, check), verify_kernel.verify_kernel):
        with pytest.raises(InternalError) as caught:
            invoke(kernel)
        assert message in str(caught.value)
        assert f"kernel {kernel.name}" in caught.value.message


def edited(old: str, new: str) -> Program:
    """PROGRAM with a piece of its text replaced."""
    text = print_program(PROGRAM)
    assert old in text
    return parse_program(text.replace(old, new))


def derived(function: str, *args: Expr) -> Derived:
    return Derived("d", False, Apply(function, args))


BROKEN_PROGRAMS: list[tuple[str, str, Program]] = [
    ("check_program_names", "sorted is defined twice", edited("kernel relu<", "kernel sorted<")),
    ("check_program_names", "t is defined twice", edited("inputs x", "buffer t: i8[1] temp\n inputs x")),
    ("check_program_names", "x is defined twice", replace(PROGRAM, symbols=("s0", "x"))),
    ("check_derived", "uses u0 before it is known", replace(PROGRAM, derived=(derived("min", sym("u0"), const(2)),))),
    ("check_derived", "lt takes 2 arguments", replace(PROGRAM, derived=(derived("lt", sym("s0")),))),
    ("check_symbols", "s0 in 8*s0 is not a symbol", replace(PROGRAM, symbols=())),
    ("check_inputs", "s0 is not among the inputs", edited("inputs x, s0", "inputs x, -")),
    ("check_inputs", "x is not among the inputs", edited("inputs x, s0", "inputs s0")),
    ("check_inputs", "x is defined twice", edited("inputs x, s0", "inputs x, x, s0")),
    ("check_inputs", "the input t is neither", edited("inputs x, s0", "inputs x, s0, t")),
    ("check_buffers", "there is no buffer t", edited("buffer t: f32[8*s0] temp", "")),
    ("check_buffers", "there is no buffer z", edited("output view y (8, s0)", "output view z (8, s0)")),
    ("check_buffers", "there is no buffer z", edited("output none\n", "output none\n mutates z\n")),
    ("check_buffers", "t is f32[8*s0], but the buffer is f64", edited("t: f32[8*s0] temp", "t: f64[8*s0] temp")),
    ("check_buffers", "t is f32[8*s0], but the buffer is f32[s0]", edited("t: f32[8*s0] temp", "t: f32[s0] temp")),
    (
        "check_buffers",
        "unknown role 'scratch'",
        replace(PROGRAM, buffers=(*PROGRAM.buffers, replace(PROGRAM.buffers[1], name="u", role="scratch"))),
    ),
    ("check_calls", "'sort' does not name an operator", edited("aten::sort.default", "sort")),
    (
        "check_calls",
        "the output x is an input of the program",
        edited("output view y (s0, 8)", "output view x (s0, 8)"),
    ),
    ("check_views", "one stride per dimension", edited("output view y (8, s0)", "output view y (8, s0, 1)")),
    (
        "check_views",
        "the index goes up to 8*s0, the buffer",
        edited("strides (1, 8) offset 0", "strides (1, 8) offset 1"),
    ),
    ("check_views", "the index goes down to -1", edited("strides (1, 8) offset 0", "strides (1, 8) offset -1")),
    (
        "check_written",
        "call sorted: reads t before anything is written to it",
        replace(PROGRAM, nodes=PROGRAM.nodes[::-1]),
    ),
    ("check_written", "the output y is never written", replace(PROGRAM, nodes=PROGRAM.nodes[:1])),
    ("check_written", "buffer u is never written", edited("inputs x", "buffer u: i8[1] temp\n inputs x")),
]


@pytest.mark.parametrize(
    ("check", "message", "program"), BROKEN_PROGRAMS, ids=[f"{c}-{m}" for c, m, _ in BROKEN_PROGRAMS]
)
def test_a_broken_program(check: str, message: str, program: Program):
    for invoke in (getattr(verify, check), verify_program):
        with pytest.raises(InternalError) as caught:
            invoke(program)
        assert message in str(caught.value)


def test_every_check_has_an_ir_that_breaks_it():
    broken = {check for check, *_ in [*BROKEN_KERNELS, *BROKEN_PROGRAMS]}
    assert broken == {check.__name__ for check in (*verify_kernel.KERNEL_CHECKS, *verify.PROGRAM_CHECKS)}
    assert broken == {name for name in {**vars(verify), **vars(verify_kernel)} if name.startswith("check_")}


def test_the_error_shows_the_line():
    with pytest.raises(InternalError) as caught:
        verify_kernel.verify_kernel(body(LOAD, "b: f64 = add a, a", STORE))
    assert "kernel k, line b: add of f32 gives f32" in str(caught.value)
    assert "line: b: f64 = add a, a" in str(caught.value)


def test_a_broken_kernel_in_a_program():
    with pytest.raises(InternalError, match="kernel relu, line c: maximum of f32 gives f32"):
        verify_program(edited("c: f32 = maximum", "c: f64 = maximum"))


# ------------------------------------------------------------------------------------------------ good IR


@pytest.mark.parametrize(
    "kernel",
    [
        SOFTMAX,
        body(LOAD, STORE.replace("y[", "x["), params="x: f32[64]"),
        body("a: f32 = load x[i]", "b: f32 = const 1", "st: f32 = store y[16*i + j], b"),
        body("m: bool = const 1", "a: f32 = load x[16*i + j - 9] if m else 0", STORE),  # masked: may be anywhere
        body("a: f32 = load x[99]", "st: f32 = store y[16*i + j], a", axes="i: 0, j: 16"),  # no point at all
        body(LOAD, "st: f32 = store y[j], a", axes="i: 1, j: 16"),
        body(LOAD, "st: f32 = store y[j], a", axes="i: 4, j: 0"),
        body("a: f32 = load x[i + j + k]", "st: f32 = store y[i + j + k], a", axes="i: 4, j: 4, k: 0"),
        body(LOAD, "b: f32 = sum a over j", "st: f32 = store y[i], b", axes="i: 4, j: 0"),
        body(LOAD, "st: f32 = store y[3*j + i], a", axes="i: 3, j: 16"),
        body(LOAD, "st: f32 = store y[i + 4*(j // 4) + 16*(j % 4)], a"),
        parse_kernel("kernel k<s0>(x: f32[s0]) {\naxes i: s0\na: f32 = load x[i + 3 - s0]\n}"),  # cannot tell
        Kernel("nothing", (), (), ()),
    ],
)
def test_a_good_kernel(kernel: Kernel):
    verify_kernel.verify_kernel(kernel)


def test_a_good_program():
    verify_program(PROGRAM)


def test_a_call_may_be_the_first_to_write_what_it_mutates():
    program = edited("output none\n", "output none\n mutates t\n")
    verify_program(replace(program, nodes=program.nodes[1:]))


@given(kernels())
@settings(max_examples=60, deadline=None)
def test_generated_kernels_are_good(kernel: Kernel):
    verify_kernel.verify_kernel(kernel)


@given(kernels(symbolic=True))
@settings(max_examples=60, deadline=None)
def test_generated_symbolic_kernels_are_good(kernel: Kernel):
    verify_kernel.verify_kernel(kernel)
