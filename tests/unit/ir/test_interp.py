"""The interpreter against eager PyTorch, and the comparison rule against honest and dishonest implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import InternalError
from pellucid.ir.interp import TORCH_DTYPES, line_values, run_kernel, run_program
from pellucid.ir.nodes import Reduce
from pellucid.ir.ops import EXPENSIVE, OPS, REDUCTIONS
from pellucid.ir.parser import parse_kernel, parse_program
from pellucid.ir.types import DType
from tests.strategies import FLOATS, INTS, assert_close, expect, inputs_for, kernels, symbols_for

Tensor = torch.Tensor


def run(text: str, symbols: dict[str, int] | None = None, **buffers: Tensor) -> dict[str, Tensor]:
    """Run the kernel on copies of these tensors, flattened; give back all of them."""
    flat = {name: tensor.clone().flatten() for name, tensor in buffers.items()}
    run_kernel(parse_kernel(text), flat, symbols or {})
    return flat


def evaluate(line: str, dtype: DType, *args: Any, types: tuple[DType, ...] = ()) -> list[Any]:
    """The value of one line over arguments a, b, c (sequences of equal length)."""
    size = len(args[0])
    types = types or (dtype,) * len(args)
    loads = [f"{name}: {t.value} = load in_{name}[i]" for name, t in zip("abc", types, strict=False)]
    params = ", ".join(f"in_{name}: {t.value}[{size}]" for name, t in zip("abc", types, strict=False))
    text = f"kernel k({params}) {{\naxes i: {size}\n" + "\n".join(loads) + f"\nr: {dtype.value} = {line}\n}}"
    given = {f"in_{n}": torch.tensor(a, dtype=TORCH_DTYPES[t]) for n, a, t in zip("abc", args, types, strict=False)}
    return line_values(parse_kernel(text), given, {})["r"].tolist()


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


# ------------------------------------------------------------------------------------------------ kernels


def test_softmax():
    x = torch.randn(4, 16)
    out = run(
        """
        kernel softmax(x: f32[64], y: f32[64]) {
          axes i: 4, j: 16
          a: f32 = load x[16*i + j]
          b: f32 = max a over j
          c: f32 = sub a, b
          d: f32 = exp c
          e: f32 = sum d over j
          f: f32 = div d, e
          st: f32 = store y[16*i + j], f
        }""",
        x=x,
        y=torch.empty(64),
    )
    torch.testing.assert_close(out["y"].reshape(4, 16), x.softmax(1))


@pytest.mark.parametrize(("rows", "columns"), [(3, 7), (1, 1), (5, 33)])
def test_layer_norm_with_symbolic_sizes(rows: int, columns: int):
    x, weight, bias = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    out = run(
        """
        kernel layer_norm<n, m>(x: bf16[m*n], w: f32[m], b: f32[m], y: bf16[m*n]) {
          axes i: n, j: m
          a: f32 = load x[m*i + j]
          total: f32 = sum a over j
          size: i64 = index m
          count: f32 = cast size
          mean: f32 = div total, count
          centered: f32 = sub a, mean
          square: f32 = mul centered, centered
          squares: f32 = sum square over j
          variance: f32 = div squares, count
          eps: f32 = const 1e-05
          padded: f32 = add variance, eps
          scale: f32 = rsqrt padded
          c: f32 = load w[j]
          d: f32 = load b[j]
          e: f32 = mul centered, scale
          f: f32 = fma e, c, d
          st: f32 = store y[m*i + j], f
        }""",
        {"n": rows, "m": columns},
        x=x.bfloat16(),
        w=weight,
        b=bias,
        y=torch.empty(rows * columns, dtype=torch.bfloat16),
    )
    wanted = torch.nn.functional.layer_norm(x.bfloat16().float(), (columns,), weight, bias).bfloat16()
    torch.testing.assert_close(out["y"].reshape(rows, columns), wanted)


def test_cat_with_masks():
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    out = run(
        """
        kernel cat(x: f32[12], y: f32[15], z: f32[27]) {
          axes i: 3, j: 9
          at: i64 = index j
          border: i64 = const 4
          left: bool = lt at, border
          right: bool = bitwise_not left
          a: f32 = load x[4*i + j] if left else nan
          b: f32 = load y[5*i + j - 4] if right else nan
          c: f32 = where left, a, b
          st: f32 = store z[9*i + j], c
        }""",
        x=x,
        y=y,
        z=torch.empty(27),
    )
    assert torch.equal(out["z"].reshape(3, 9), torch.cat([x, y], 1))


EMBEDDING = """
kernel embedding(table: f16[20], ids: i64[3], out: f16[12]) {
  axes i: 3, j: 4
  a: i64 = load ids[i]
  b: i64 = check a, 5
  c: f32 = load table[4*[b] + j]
  st: f32 = store out[4*i + j], c
}"""


def test_embedding():
    table, ids = torch.randn(5, 4).half(), torch.tensor([4, -5, 0])
    out = run(EMBEDDING, table=table, ids=ids, out=torch.empty(12).half())
    assert torch.equal(out["out"].reshape(3, 4), table[ids])


@pytest.mark.parametrize("bad", [5, -6, 2**40])
def test_an_index_out_of_range_raises_before_anything_is_stored(bad: int):
    table, out = torch.randn(20).half(), torch.zeros(12).half()
    with pytest.raises(IndexError, match=f"index {bad} is out of bounds for dimension 0 with size 5"):
        run_kernel(parse_kernel(EMBEDDING), {"table": table, "ids": torch.tensor([0, bad, 1]), "out": out}, {})
    assert not out.any()


def test_a_check_that_does_not_wrap():
    text = EMBEDDING.replace("check a, 5", "check a, 5 nowrap")
    with pytest.raises(IndexError, match="index -1"):
        run(text, table=torch.ones(20).half(), ids=torch.tensor([0, -1, 1]), out=torch.ones(12).half())


def test_stores_happen_after_all_loads():
    text = """
    kernel k(x: f32[4], y: f32[4]) {
      axes i: 4
      a: f32 = load x[i]
      one: f32 = const 1
      b: f32 = add a, one
      st0: f32 = store x[i], b
      again: f32 = load x[i]
      st1: f32 = store y[i], again
    }"""
    out = run(text, x=torch.arange(4.0), y=torch.empty(4))
    assert out["x"].tolist() == [1, 2, 3, 4] and out["y"].tolist() == [0, 1, 2, 3]


def test_a_kernel_without_axes_in_place():
    text = "kernel k(x: f64[1]) {\na: f64 = load x[0]\nb: f64 = neg a\nst: f64 = store x[0], b\nc: f64 = add a, b\n}"
    assert run(text, x=torch.tensor([3.0]).double())["x"].tolist() == [-3]


@pytest.mark.parametrize(("op", "wanted"), [("sum", 0), ("prod", 1), ("any", False), ("all", True)])
def test_reductions_over_an_empty_axis(op: str, wanted: float):
    dtype = "bool" if op in ("any", "all") else "i32"
    text = f"""
    kernel k(x: {dtype}[0], y: {dtype}[3]) {{
      axes i: 3, j: 0
      a: {dtype} = load x[j]
      b: {dtype} = {op} a over j
      st: {dtype} = store y[i], b
    }}"""
    torch_dtype = TORCH_DTYPES[DType(dtype)]
    out = run(text, x=torch.empty(0, dtype=torch_dtype), y=torch.ones(3, dtype=torch_dtype))
    assert out["y"].tolist() == [wanted] * 3


@pytest.mark.parametrize("op", ["max", "argmax", "sum"])
def test_nothing_is_stored_along_an_empty_axis(op: str):
    result = "i64" if op == "argmax" else "f32"
    text = f"""
    kernel k(x: f32[0], y: {result}[0]) {{
      axes i: 0, j: 4
      a: f32 = load x[4*i + j]
      b: {result} = {op} a over j
      st: {result} = store y[i], b
    }}"""
    run(text, x=torch.empty(0), y=torch.empty(0, dtype=TORCH_DTYPES[DType(result)]))


def test_a_value_that_ignores_the_reduced_axis_counts_once_per_point():
    text = """
    kernel k(y: f32[2]) {
      axes i: 2, j: 5
      a: f32 = const 2
      b: f32 = sum a over j
      st: f32 = store y[i], b
    }"""
    assert run(text, y=torch.empty(2))["y"].tolist() == [10, 10]


def test_index_reductions_see_several_axes_as_one():
    x = torch.tensor([[[1.0, 5], [5, 2]], [[math.nan, 0], [math.nan, 7]]])
    text = """
    kernel k(x: f32[8], y: i64[2], z: i64[2]) {
      axes i: 2, j: 2, k: 2
      a: f32 = load x[4*i + 2*j + k]
      b: i64 = argmax a over j, k
      c: i64 = argmin a over j, k
      st0: i64 = store y[i], b
      st1: i64 = store z[i], c
    }"""
    out = run(text, x=x, y=torch.empty(2).long(), z=torch.empty(2).long())
    assert out["y"].tolist() == [1, 0] and out["z"].tolist() == [0, 0]


def test_narrow_floats_widen_and_narrow():
    x = torch.tensor([1.0, 1 / 3, 65504, math.nan]).half()
    text = """
    kernel k(x: f16[4], y: bf16[4]) {
      axes i: 4
      a: f32 = load x[i]
      b: f32 = add a, a
      st: f32 = store y[i], b
    }"""
    out = run(text, x=x, y=torch.empty(4).bfloat16())
    torch.testing.assert_close(out["y"], (x.float() * 2).bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert line_values(parse_kernel(text), out, {})["b"].dtype == torch.float32


# ------------------------------------------------------------------------------------------------ operators


def test_unsigned_integers_wrap_around():
    assert evaluate("neg a", DType.U8, [0, 1, 128, 255]) == [0, 255, 128, 1]
    assert evaluate("add a, b", DType.U8, [250, 255], [10, 255]) == [4, 254]
    assert evaluate("sub a, b", DType.U8, [3, 0], [5, 1]) == [254, 255]
    assert evaluate("mul a, b", DType.I8, [100, -128], [2, -1]) == [-56, -128]


@pytest.mark.parametrize("dtype", [DType.U16, DType.U32, DType.U64])
def test_wide_unsigned_integers_wrap_and_keep_their_order(dtype: DType):
    last = dtype.limits[1]
    middle = last // 2 + 1
    assert evaluate("add a, b", dtype, [last, middle], [1, middle]) == [0, 0]
    assert evaluate("mul a, b", dtype, [last, middle + 1], [last, 2]) == [1, 2]
    assert evaluate("neg a", dtype, [1, 0]) == [last, 0]
    assert evaluate("lt a, b", dtype, [middle, 1], [1, middle]) == [False, True]
    assert evaluate("maximum a, b", dtype, [middle, 1], [1, last]) == [middle, last]
    assert evaluate("floordiv a, b", dtype, [last, last], [2, middle]) == [middle - 1, 1]
    assert evaluate("shr a, b", dtype, [last, last], [1, 64]) == [middle - 1, 0]
    assert evaluate("cast a", dtype, [-1, -2], types=(DType.I64,)) == [last, last - 1]
    assert evaluate("cast a", DType.F64, [last], types=(dtype,)) == [float(last)]
    for op, wanted in (("max", last), ("min", 1), ("sum", middle), ("prod", dtype.wrap(-middle))):
        assert evaluate(f"{op} a over i", dtype, [1, last, middle]) == [wanted]
    assert evaluate("argmax a over i", dtype, [1, last, middle]) == [1]


def test_logic_on_bool():
    bits = [False, False, True, True], [False, True, False, True]
    assert evaluate("maximum a, b", DType.BOOL, *bits) == [False, True, True, True]
    assert evaluate("minimum a, b", DType.BOOL, *bits) == [False, False, False, True]
    assert evaluate("bitwise_xor a, b", DType.BOOL, *bits) == [False, True, True, False]
    assert evaluate("lt a, b", DType.BOOL, *bits) == [False, True, False, False]
    assert evaluate("bitwise_not a", DType.BOOL, bits[0]) == [True, True, False, False]


@pytest.mark.parametrize("dtype", INTS)
def test_integer_division_by_zero_is_division_by_one(dtype: DType):
    for op in ("floordiv", "truncdiv"):
        assert evaluate(f"{op} a, b", dtype, [7, 0], [0, 0]) == [7, 0]
    for op in ("remainder", "fmod"):
        assert evaluate(f"{op} a, b", dtype, [7, 0], [0, 0]) == [0, 0]


@pytest.mark.parametrize("dtype", [dtype for dtype in INTS if dtype.limits[0] < 0])
def test_integer_division_of_signed_numbers(dtype: DType):
    a, b = [7, -7, 7, -7], [2, 2, -2, -2]
    assert evaluate("floordiv a, b", dtype, a, b) == [3, -4, -4, 3]
    assert evaluate("truncdiv a, b", dtype, a, b) == [3, -3, -3, 3]
    assert evaluate("remainder a, b", dtype, a, b) == [1, 1, -1, -1]
    assert evaluate("fmod a, b", dtype, a, b) == [1, -1, 1, -1]
    least = torch.iinfo(TORCH_DTYPES[dtype]).min
    for op, wanted in (("floordiv", least), ("truncdiv", least), ("remainder", 0), ("fmod", 0)):
        assert evaluate(f"{op} a, b", dtype, [least], [-1]) == [wanted]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_wins(dtype: DType):
    nan = math.nan
    for line in ("maximum a, b", "minimum a, b", "add a, b"):
        assert all(map(math.isnan, evaluate(line, dtype, [nan, 1.0, nan], [1.0, nan, nan])))
    for op in ("max", "min", "sum", "prod"):
        assert math.isnan(evaluate(f"{op} a over i", dtype, [1.0, nan, 2.0])[0])


def test_casts_are_those_of_eager():
    values = [-1.9, 1.9, 0.0, -0.0, 100.5, math.nan]
    assert evaluate("cast a", DType.I32, values[:5], types=(DType.F32,)) == [-1, 1, 0, 0, 100]
    assert evaluate("cast a", DType.BOOL, values, types=(DType.F64,)) == [True, True, False, False, True, True]
    assert evaluate("cast a", DType.U8, [-1, 256, 255], types=(DType.I64,)) == [255, 0, 255]
    assert evaluate("cast a", DType.F32, [True, False], types=(DType.BOOL,)) == [1.0, 0.0]


def test_shifts_beyond_the_width():
    assert evaluate("shl a, b", DType.I32, [1, 1, 1, 3], [31, 32, -1, 1]) == [-(2**31), 0, 0, 6]
    assert evaluate("shr a, b", DType.I32, [-8, -8, 8, -8], [1, 40, 40, -1]) == [-4, -1, 0, -1]


@pytest.mark.parametrize("name", [name for name in OPS if name != "cast"])
def test_every_operator_keeps_its_type(name: str):
    row = OPS[name]
    dtype = DType.I32 if "integers" in row.domain.value and "float" not in row.domain.value else DType.F32
    args = [[1] * 3 for _ in range(row.arity)]
    if name == "where":
        assert evaluate("where a, b, c", DType.F32, *args, types=(DType.BOOL, DType.F32, DType.F32)) == [1.0] * 3
        return
    result = DType.BOOL if row.result.name == "BOOL" else dtype
    assert len(evaluate(f"{name} {', '.join('abc'[: row.arity])}", result, *args, types=(dtype,) * row.arity)) == 3


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b: f32 = load x[i + 1]", "index 4 is outside of 4 elements"),
        ("b: f32 = load x[i - 1]", "index -1 is outside of 4 elements"),
        ("st: f32 = store x[2*i], a", "index 4 is outside"),
        ("st: f32 = store x[(i // 2)], a", "two points store the same element"),
    ],
)
def test_a_kernel_that_leaves_its_buffer(line: str, message: str):
    text = f"kernel k(x: f32[4]) {{\naxes i: 4\na: f32 = load x[i]\n{line}\n}}"
    with pytest.raises(InternalError, match=f"kernel k, line .*: {message}"):
        run(text, x=torch.zeros(9))


@pytest.mark.parametrize("buffer", [torch.zeros(4).double(), torch.zeros(3), torch.zeros(2, 2)])
def test_a_buffer_that_does_not_fit(buffer: Tensor):
    with pytest.raises(InternalError, match=r"x is .* not 4 x torch\.float32"):
        run_kernel(parse_kernel("kernel k(x: f32[4]) {\na: f32 = load x[0]\n}"), {"x": buffer}, {})


# ------------------------------------------------------------------------------------------------ programs

PROGRAM = parse_program("""
program {
  symbols n
  buffer x: f32[3*n] input
  buffer w: f32[12] input
  buffer count: i64[1] input
  buffer t: f32[4*n] temp
  buffer y: f32[4*n] output
  buffer at: i64[4*n] output
  inputs n, x, -, w, count
  extern product = aten::mm.out {
    arg view x (n, 3) strides (1, n) offset 0
    arg view w (3, 4) strides (4, 1) offset 0
    output view t (n, 4) strides (4, 1) offset 0
    out
  }
  kernel bump(count: i64[1]) {
    a: i64 = load count[0]
    one: i64 = const 1
    b: i64 = add a, one
    st: i64 = store count[0], b
  }
  extern order = aten::sort.stable {
    arg view t (n, 4) strides (4, 1) offset 0
    kwarg stable = true
    kwarg dim = size 1
    kwarg descending = false
    output view y (n, 4) strides (4, 1) offset 0
    output view at (n, 4) strides (4, 1) offset 0
  }
  output view y (4, n) strides (1, 4) offset 0
  output view at (n, 4) strides (4, 1) offset 0
  output size 2*n
  output none
}""")


@pytest.mark.parametrize("n", [1, 5])
def test_a_program(n: int):
    x, w, count = torch.randn(3, n).t(), torch.randn(3, 4, requires_grad=True), torch.tensor(41)
    y, at, size, nothing = run_program(PROGRAM, [n, x, None, w, count])
    wanted = (x @ w).sort(1)
    torch.testing.assert_close(y, wanted.values.detach().t())
    assert isinstance(at, Tensor) and torch.equal(at, wanted.indices)
    assert size == 2 * n and nothing is None
    assert count.item() == 42, "the program writes into the tensor that it mutates"


def test_arguments_of_calls():
    program = parse_program(
        """
    program {
      buffer x: f32[4] input
      buffer i: i64[2] input
      buffer a: f64[4] output
      buffer b: f32[6] output
      inputs x, i
      extern c1 = aten::_to_copy.default {
        arg view x (4,) strides (1,) offset 0
        kwarg dtype = dtype.float64
        kwarg layout = layout.strided
        kwarg device = device.cpu
        kwarg memory_format = memory_format.contiguous_format
        output view a (4,) strides (1,) offset 0
      }
      extern c2 = aten::cat.default {
        arg (view x (2,) strides (1,) offset 2, view x (4,) strides (1,) offset 0)
        output view b (6,) strides (1,) offset 0
      }
      extern c3 = aten::index_put_.default {
        arg view x (4,) strides (1,) offset 0
        arg (view i (2,) strides (1,) offset 0,)
        arg view b (2,) strides (1,) offset 0
        output none
        mutates x
      }
      output view a (4,) strides (1,) offset 0
      output view b (6,) strides (1,) offset 0
    }"""
    )
    x = torch.tensor([1.0, 2, 3, 4])
    a, b = run_program(program, [x, torch.tensor([0, 1])])
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    assert a.dtype == torch.float64 and b.tolist() == [3, 4, 1, 2, 3, 4] and x.tolist() == [3, 4, 3, 4]


def test_a_call_with_a_result_of_another_shape():
    text = """
    program {
      buffer x: f32[4] input
      buffer a: f32[4] output
      inputs x
      extern c = aten::neg.default {
        arg view x (4,) strides (1,) offset 0
        output view a (2, 2) strides (2, 1) offset 0
      }
      output view a (4,) strides (1,) offset 0
    }"""
    with pytest.raises(InternalError, match=r"call c: aten::neg.default returns \(4,\) instead of \(2, 2\)"):
        run_program(parse_program(text), [torch.ones(4)])


# ------------------------------------------------------------------------------------------------ comparison

EXACT = {"round_bf16", "round_f16", "maximum", "minimum", "remainder", "fmod", "floordiv", "truncdiv", "where", "cast"}


def shaken(name: str, seed: int) -> Any:
    """The operator as another implementation might have it: computed in float64, and off by an ulp either way."""
    row = OPS[name]

    def evaluate(*args: Tensor) -> Tensor:
        right = row.evaluate(*args)
        if not right.is_floating_point():
            return right
        wide = row.evaluate(*(arg.double() for arg in args)).to(right.dtype)
        ordinary = wide.isfinite() & (wide != 0)
        if row.cost < EXPENSIVE:
            return torch.where(ordinary, wide, right)
        generator = torch.Generator().manual_seed(seed)
        step = torch.randint(-1, 2, right.shape, generator=generator).to(right.dtype)
        near = torch.where(step == 0, wide, torch.nextafter(wide, step * math.inf))
        return torch.where(ordinary, near, right)

    return replace(row, evaluate=evaluate)


def reordered(name: str) -> Any:
    """A sum or product in another order, one element after the other."""
    row, combine = REDUCTIONS[name], OPS[REDUCTIONS[name].combine].evaluate

    def evaluate(a: Tensor, dims: tuple[int, ...]) -> Tensor:
        if not a.is_floating_point() or not all(a.shape[dim] for dim in dims):
            return row.evaluate(a, dims)
        for dim in reversed(dims):
            a = reduce(combine, reversed(a.unbind(dim)))
        return a

    return replace(row, evaluate=evaluate)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_another_faithful_implementation_is_accepted(data: st.DataObject):
    kernel = data.draw(kernels(symbolic=data.draw(st.booleans())))
    symbols = data.draw(symbols_for(kernel))
    inputs = data.draw(inputs_for(kernel, symbols))
    expected = expect(kernel, inputs, symbols)
    seed = data.draw(st.integers(0, 1000))
    actual = {name: tensor.clone() for name, tensor in inputs.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name in set(OPS) - EXACT:
            patch.setitem(OPS, name, shaken(name, seed))
        for name in ("sum", "prod"):
            patch.setitem(REDUCTIONS, name, reordered(name))
        run_kernel(kernel, actual, symbols)
    assert_close(kernel, expected, actual)


WRONG = """
kernel k(x: f32[{n}], y: f32[{m}], z: i64[{m}]) {{
  axes i: {m}, j: 50
  a: f32 = load x[50*i + j]
  b: f32 = sum a over j
  c: f32 = {line}
  d: f32 = add b, c
  e: i64 = argmax a over j
  st0: f32 = store y[i], d
  st1: i64 = store z[i], e
}}"""


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("exp b", "exp2 b"),
        ("sub b, b", "add b, b"),
        ("max a over j", "min a over j"),
        ("sum a over j", "prod a over j"),
        ("neg b", "abs b"),
        ("const 1.0", "const 1.001"),
    ],
)
def test_a_wrong_operator_is_found(line: str, wrong: str):
    right_kernel, wrong_kernel = (parse_kernel(WRONG.format(n=500, m=10, line=text)) for text in (line, wrong))
    inputs = {"x": torch.randn(500), "y": torch.zeros(10), "z": torch.zeros(10).long()}
    expected = expect(right_kernel, inputs)
    assert expected.known == 1
    run_kernel(wrong_kernel, inputs, {})
    with pytest.raises(AssertionError, match=r"(?s)y\[\d+\] is .*expected.*kernel k\("):
        assert_close(right_kernel, expected, inputs)


def test_a_store_beside_its_place_is_found():
    kernel = parse_kernel("kernel k(x: f32[4]) {\na: f32 = const 1.0\nst: f32 = store x[2], a\n}")
    inputs = {"x": torch.zeros(4)}
    expected = expect(kernel, inputs)
    assert_close(kernel, expected, {"x": torch.tensor([0.0, -0.0, 1, 0])})
    for wrong in ([0, 0, 1, 1e-30], [0, 1, 0, 0], [0, 0, math.nan, 0], [0, 0, math.inf, 0]):
        with pytest.raises(AssertionError):
            assert_close(kernel, expected, {"x": torch.tensor(wrong)})


@pytest.mark.parametrize(
    ("line", "x", "known"),
    [
        ("sin v", 1e30, False),  # no two implementations agree
        ("sin v", 1.0, True),
        ("reciprocal v", 2.0, True),
        ("reciprocal noise", 1.0, False),  # the error is as large as the value
        ("floor noise", 1.0, True),
        ("exp v", 88.7228, False),  # overflows, or not
        ("exp v", 80.0, True),
        ("exp v", 100.0, True),  # infinite in any case
        ("sqrt v", -1.0, True),  # NaN in any case
        ("log v", 0.0, True),
    ],
)
def test_what_is_known(line: str, x: float, known: bool):
    text = f"""
    kernel k(x: f32[1], y: f32[1]) {{
      v: f32 = load x[0]
      up: f32 = exp v
      log: f32 = log up
      noise: f32 = sub log, v
      r: f32 = {line}
      st: f32 = store y[0], r
    }}"""
    expected = expect(parse_kernel(text), {"x": torch.tensor([x]), "y": torch.zeros(1)})
    assert bool(expected.errors["y"].isfinite().all()) is known


@pytest.mark.parametrize(
    ("lines", "value", "known"),
    [
        ("r: bool = gt e, v", 0.0, True),
        ("r: bool = gt s, v", 1e-9, False),  # sin x is x here, but for rounding
        ("r: bool = gt s, v", 1.0, True),
        ("r: i32 = cast e", 1.5, True),
        ("w: f32 = neg e\n r: u8 = cast w", 1.5, False),  # does not fit
        ("r: i32 = cast l", 4.0, False),  # 3.9999998 or 4.0
        ("r: i64 = cast v", math.nan, False),
        ("r: bool = isnan e", 1.0, True),
    ],
)
def test_choices_within_the_error_are_not_compared(lines: str, value: float, known: bool):
    dtype = lines.split("r: ")[1].split()[0]
    text = f"""
    kernel k(x: f32[1], y: {dtype}[1]) {{
      v: f32 = load x[0]
      e: f32 = exp v
      l: f32 = log e
      s: f32 = sin v
      {lines}
      st: {dtype} = store y[0], r
    }}"""
    out = torch.zeros(1, dtype=TORCH_DTYPES[DType(dtype)])
    expected = expect(parse_kernel(text), {"x": torch.tensor([value]), "y": out})
    assert bool(expected.errors["y"].isfinite().all()) is known


def test_generated_kernels_are_worth_running():
    """Most of what they store is compared, and many reduce and go on with the result along the reduced axes."""
    known: list[float] = []
    reduced: list[bool] = []

    @given(st.data())
    @settings(max_examples=200, database=None, deadline=None, derandomize=True)
    def collect(data: st.DataObject) -> None:
        kernel = data.draw(kernels())
        known.append(expect(kernel, data.draw(inputs_for(kernel))).known)
        reduced.append(any(isinstance(line.rhs, Reduce) for line in kernel.body))

    collect()
    assert sum(known) >= 0.85 * len(known)
    assert sum(reduced) >= len(reduced) / 6
