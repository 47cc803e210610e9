"""Printing and parsing are inverse; errors point at the place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import UserError
from pellucid.ir.index import Expr, FloorDiv, Mod, const, floordiv, of_atom, sym, text, val, var
from pellucid.ir.nodes import Buffer, Const, Enum, Extern, Kernel, Line, Load, Program, Store, View
from pellucid.ir.origin import Origin, UserLine
from pellucid.ir.parser import IRSyntaxError, parse_expr, parse_kernel, parse_program
from pellucid.ir.printer import print_kernel, print_line, print_program, print_scalar
from pellucid.ir.types import DType
from tests.strategies import exprs, kernels

SCALE = """\
kernel scale<s0>(in0: f32[s0*s1], mask0: bool[s0], out0: bf16[s0*s1]) {
  axes i0: s0, i1: s1
  v0: bool = load mask0[i0]
  v1: f32 = load in0[s1*i0 + i1] if v0 else -inf
  v2: f32 = max v1 over i1
  v3: f32 = const 0.5
  v4: f32 = mul v2, v3
  v5: f32 = sub v1, v4
  st0: f32 = store out0[s1*i0 + i1], v5
}""".replace("<s0>", "<s0, s1>")

PROGRAM = """\
program {
  symbols s0
  buffer in0: f32[8*s0] input
  buffer in1: f32[64] input
  buffer buf0: f32[8*s0] temp
  buffer buf1: f32[8*s0] output
  inputs in0, -, s0, in1

  extern mm = aten::mm.out {
    arg view in0 (s0, 8) strides (8, 1) offset 0
    arg view in1 (8, 8) strides (1, 8) offset 0
    output view buf0 (s0, 8) strides (8, 1) offset 0
    out
    reason "a matrix product is left to ATen"
  }

  kernel relu<s0>(buf0: f32[8*s0], buf1: f32[8*s0]) {
    axes i0: 8*s0
    v0: f32 = load buf0[i0]
    v1: f32 = const 0.0
    v2: f32 = maximum v0, v1
    st0: f32 = store buf1[i0], v2
  }

  output view buf1 (s0, 8) strides (8, 1) offset 0
  output size s0
  output none
}"""


# ------------------------------------------------------------------------------------------------ round trips


@given(kernels())
@settings(max_examples=60, deadline=None)
def test_kernels_come_back(kernel: Kernel):
    assert parse_kernel(print_kernel(kernel)) == kernel


@given(kernels(symbolic=True))
@settings(max_examples=60, deadline=None)
def test_symbolic_kernels_come_back(kernel: Kernel):
    assert parse_kernel(print_kernel(kernel, origins=False)) == kernel


@given(exprs(axes=("i", "j"), symbols=("n", "m"), values=("v1", "v2")))
@settings(deadline=None)
def test_expressions_come_back(expr: Expr):
    assert parse_expr(text(expr), axes=("i", "j"), symbols=("n", "m")) == expr


@pytest.mark.parametrize("source", [SCALE, PROGRAM])
def test_text_that_is_parsed_prints_as_it_was(source: str):
    if source.startswith("kernel"):
        assert print_kernel(parse_kernel(source)) == source
    else:
        assert print_program(parse_program(source)) == source


names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
sizes = exprs(axes=("n",), symbols=("n", "m")).map(lambda e: e.substitute({var("n").terms[0][0][0]: sym("n")}))
views = st.builds(View, names, st.lists(sizes, max_size=3).map(tuple), st.lists(sizes, max_size=3).map(tuple), sizes)
constants = st.sampled_from(
    [Enum("dtype", "float32"), Enum("device", "cpu"), Enum("device", "cpu:0"), Enum("memory_format", "channels_last")]
)
floats = st.one_of(st.floats(allow_nan=False), st.just(math.nan))
args: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, st.text(), constants, sizes, views),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
externs = st.builds(
    Extern,
    name=names,
    op=st.sampled_from(["aten::addmm.default", "aten::sort", "mylib::inner.Tensor_out"]),
    args=st.lists(args, max_size=3).map(tuple),
    kwargs=st.lists(st.tuples(names, args), max_size=2).map(tuple),
    outputs=st.lists(st.one_of(st.none(), views), max_size=2).map(tuple),
    out=st.booleans(),
    reason=st.text(),
    mutates=st.lists(names, max_size=2).map(tuple),
    ordered=st.booleans(),
)
buffers = st.builds(Buffer, names, st.sampled_from(DType), sizes, st.sampled_from(["input", "temp", "output"]))
programs = st.builds(
    Program,
    symbols=st.just(("n", "m")),
    buffers=st.lists(buffers, max_size=3).map(tuple),
    inputs=st.lists(st.one_of(st.none(), names), max_size=3).map(tuple),
    nodes=st.lists(st.one_of(externs, kernels(max_ops=2)), max_size=2).map(tuple),
    outputs=st.lists(st.one_of(st.none(), views, sizes), max_size=3).map(tuple),
)


@given(programs)
@settings(max_examples=60, deadline=None)
def test_programs_come_back(program: Program):
    assert print_program(parse_program(print_program(program))) == print_program(program)
    if "nan" not in print_program(program):  # NaN is equal to itself only where a node says so
        assert parse_program(print_program(program)) == program


@pytest.mark.parametrize(
    "value", [0, 1, -1, True, False, 0.0, -0.0, 1.0, 1e16, 1e-5, 0.1, math.pi, math.inf, -math.inf, math.nan, 2**63 - 1]
)
def test_scalars_keep_value_and_type(value: bool | int | float):
    line = Line("v0", Const(value), DType.F32)
    kernel = Kernel("k", (), (), (line,))
    (read,) = parse_kernel(print_kernel(kernel)).body
    assert read == line
    assert isinstance(read.rhs, Const) and type(read.rhs.value) is type(value)


@pytest.mark.parametrize(
    ("value", "shown"), [(True, "true"), (1, "1"), (1.0, "1.0"), (-0.0, "-0.0"), (math.nan, "nan"), (-math.inf, "-inf")]
)
def test_print_scalar(value: bool | int | float, shown: str):
    assert print_scalar(value) == shown


@pytest.mark.parametrize(
    "atom",
    [
        FloorDiv(var("i") * -1, const(4)),
        FloorDiv(-sym("n") + 3, sym("n") * sym("m")),
        FloorDiv(floordiv(var("i") - sym("n") - 7, 3) * -2 - var("i"), sym("n") + 1),
        Mod(var("i") * -3 - 1 + 4, const(4)),
        Mod(of_atom(Mod(val("v1"), const(5))) * val("v1"), sym("m")),
        FloorDiv(const(0) - val("v1"), const(2)),
    ],
)
def test_odd_but_canonical_atoms_come_back(atom: FloorDiv | Mod):
    for expr in (of_atom(atom), of_atom(atom) * -2 + 1, of_atom(atom) * of_atom(atom) * var("i")):
        assert parse_expr(text(expr), axes=("i",), symbols=("n", "m")) == expr


# ------------------------------------------------------------------------------------------------ layout


def test_origins_stand_in_aligned_comments():
    kernel = parse_kernel("kernel k(a: f32[4]) {\n axes i: 4\n v0: f32 = load a[i]\n st: f32 = store a[i], v0\n}")
    origin = Origin(("add", "mul"), (UserLine("model.py", 12),))
    body = (replace(kernel.body[0], origin=origin), replace(kernel.body[1], origin=Origin(steps=("lower",))))
    kernel = replace(kernel, body=body)
    assert print_kernel(kernel) == (
        "kernel k(a: f32[4]) {\n"
        "  axes i: 4\n"
        "  v0: f32 = load a[i]       # add, mul  model.py:12\n"
        "  st: f32 = store a[i], v0  # (lower)\n"
        "}"
    )
    assert "#" not in print_kernel(kernel, origins=False)
    assert parse_kernel(print_kernel(kernel)) == kernel


def test_an_origin_cannot_end_its_comment():
    line = Line("v0", Const(1), DType.I64, Origin(("a\n}",), (UserLine("odd\nname.py", 1),)))
    kernel = Kernel("k", (), (), (line,))
    assert parse_kernel(print_kernel(kernel)) == kernel


def test_an_extern_shows_its_origin():
    origin = Origin(("mm",), (UserLine("model.py", 3),))
    extern = Extern("mm", "aten::mm.default", (), (), (), False, "", origin=origin)
    assert "extern mm = aten::mm.default {  # mm  model.py:3" in print_program(Program((), (), (), (extern,), ()))


def test_many_parameters_stand_one_to_a_line():
    lines = [f"v{k}: f32 = load buffer_number_{k}[0]" for k in range(9)]
    params = ", ".join(f"buffer_number_{k}: f32[1]" for k in range(9))
    kernel = parse_kernel(f"kernel k({params}) {{\n" + "\n".join(lines) + "\n}")
    printed = print_kernel(kernel)
    assert "kernel k(\n    buffer_number_0: f32[1],\n" in printed
    assert max(map(len, printed.splitlines())) < 100
    assert parse_kernel(printed) == kernel


def test_white_space_and_comments_are_free():
    source = "\n# a comment\nkernel  k ( a:f32[ 4 ] )  { # here\n\n axes i :4\n\n  v0:f32=load a[ i\n + 0 ]\n\n}\n\n"
    kernel = parse_kernel(source)
    assert print_kernel(kernel) == "kernel k(a: f32[4]) {\n  axes i: 4\n  v0: f32 = load a[i]\n}"


def test_words_of_the_grammar_may_be_names():
    source = "kernel load(store: f32[4]) {\n  axes over: 4\n  axes: f32 = load store[over]\n  if_: f32 = neg axes\n}"
    assert print_kernel(parse_kernel(source)) == source


def test_print_line():
    index = floordiv(var("i"), 4) + val("v1") * 8
    assert print_line(Line("v2", Load("a", index), DType.F32)) == "v2: f32 = load a[8*[v1] + (i // 4)]"
    assert print_line(Line("st", Store("a", var("i"), "v2"), DType.F32)) == "st: f32 = store a[i], v2"
    assert print_line(Line("v3", Load("a", index, "m", True), DType.BOOL)).endswith("if m else true")


# ------------------------------------------------------------------------------------------------ errors


def kernel_with(line: str) -> str:
    return "kernel k(a: f32[4]) {\n  axes i: 4\n  v0: f32 = load a[i]\n  " + line + "\n}"


@pytest.mark.parametrize(
    ("source", "line", "column", "message"),
    [
        (kernel_with("v1: f32 = ad v0, v0"), 4, 13, "unknown operator 'ad'"),
        (kernel_with("v1: float = neg v0"), 4, 7, "unknown element type 'float'"),
        (kernel_with("v1: f32 = load a[k]"), 4, 20, "'k' is neither an axis nor a size symbol"),
        (kernel_with("v1: f32 = load a[i"), 5, 1, "expected ']', found '}'"),
        (kernel_with("v1: f32 = max v0"), 4, 19, "expected 'over', found the end of the line"),
        (kernel_with("v1: f32 = neg v0 v0"), 4, 20, "expected the end of the line, found 'v0'"),
        (kernel_with("v1: f32 = const"), 4, 18, "expected a number"),
        (kernel_with("v1: f32 = const $"), 4, 19, "unexpected character '$'"),
        (kernel_with("v1: i64 = index (i // 0)"), 4, 22, "division by zero"),
        (kernel_with("v1: i64 = index 1.5"), 4, 19, "expected an index expression, found '1.5'"),
        (kernel_with("v1: i64 = index i +"), 4, 22, "expected an index expression, found the end of the line"),
        ("kernel k(a: f32[4]) {", 1, 22, "expected the end of the line, found the end of the text"),
        ("kernel 5() {\n}", 1, 8, "expected a kernel name, found '5'"),
        ("kernel k() {\n}\nkernel l() {\n}", 3, 1, "expected the end of the text, found 'kernel'"),
    ],
)
def test_errors_show_the_place(source: str, line: int, column: int, message: str):
    with pytest.raises(IRSyntaxError) as caught:
        parse_kernel(source)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert isinstance(caught.value, UserError)
    assert message in str(caught.value)
    shown, caret = caught.value.message.splitlines()[1:3]
    assert shown == "  " + source.split("\n")[line - 1]
    assert caret.index("^") == column + 1


def test_an_unknown_operator_gets_a_hint():
    with pytest.raises(IRSyntaxError, match="did you mean maximum"):
        parse_kernel(kernel_with("v1: f32 = maximun v0, v0"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("buffer a: f32[4] scratch", "unknown role 'scratch'"),
        ("buffer a: f32[n] temp", "'n' is neither an axis nor a size symbol"),
        ("output 4", "a program returns a view, a size or none"),
        ('extern a = aten::mm {\n output "x"\n}', "an operator's output is a view or none"),
        ('extern a = aten::mm {\n arg "\\x"\n}', "not a string"),
        ("surprise", "expected 'output', found 'surprise'"),
    ],
)
def test_errors_in_programs(line: str, message: str):
    with pytest.raises(IRSyntaxError, match=message.replace("(", r"\(")):
        parse_program("program {\n" + line + "\n}")


def test_what_is_written_out_of_order_is_put_in_order():
    assert parse_expr("(8*i + 4*i + 9) // 4", axes=["i"]) == parse_expr("2 + i*3", axes=["i"])
    assert parse_expr("i % 1", axes=["i"]) == const(0)


def test_deep_nesting_is_an_error_of_the_text():
    with pytest.raises(IRSyntaxError, match="nested too deeply"):
        parse_expr("(" * 100_000 + "1" + ")" * 100_000)
