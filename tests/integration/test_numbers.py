"""Generated code against eager and float64, where a property test cannot look closely: accuracy, failures, AVX2."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace

import pytest
import torch

from pellucid.codegen import CppKernel, generate
from pellucid.ir.interp import run_kernel
from pellucid.ir.ops import OPS, Domain, Result
from pellucid.ir.parser import parse_kernel
from pellucid.ir.printer import print_kernel, print_line
from pellucid.ir.types import TORCH_DTYPES, DType
from pellucid.ir.verify_kernel import verify_kernel
from pellucid.machine import AVX2, Machine
from pellucid.native.build import build
from pellucid.native.machine import machine_for
from pellucid.native.toolchain import Toolchain, detect
from pellucid.options import Options
from tests.golden.codegen_cases import CASES
from tests.support import native_function, pointers_of

Tensors = dict[str, torch.Tensor]


def native(
    texts: list[str], target: Machine | None = None, toolchain: Toolchain | None = None
) -> list[tuple[CppKernel, int]]:
    kernels = [generate(parse_kernel(text), Options(), target or machine_for()) for text in texts]
    addresses, _ = build({kernel.name: kernel.source for kernel in kernels}, toolchain)
    return [(kernel, addresses[kernel.name]) for kernel in kernels]


def call(kernel: CppKernel, address: int, buffers: Tensors, symbols: dict[str, int] | None = None) -> int:
    function = native_function(address)
    pointers = pointers_of(kernel, buffers)
    values = [(symbols or {})[name] for name in kernel.symbols]
    extent = kernel.extent.evaluate(lambda atom: (symbols or {})[atom.name])
    return function(pointers, (ctypes.c_int64 * max(1, len(values)))(*values), 0, extent)


def unary(op: str, n: int) -> str:
    return f"""\
kernel k(x: f32[{n}], o: f32[{n}]) {{
  axes i: {n}
  a: f32 = load x[i]
  b: f32 = {op} a
  st: f32 = store o[i], b
}}
"""


def column_sum(rows: int, columns: int) -> str:
    return f"""\
kernel k(x: f32[{rows * columns}], o: f32[{columns}]) {{
  axes i: {rows}, j: {columns}
  a: f32 = load x[{columns}*i + j]
  s: f32 = sum a over i
  st: f32 = store o[j], s
}}
"""


def integer_division(op: str) -> str:
    return f"""\
kernel k(x: i32[64], y: i32[64], o: i32[64]) {{
  axes i: 64
  a: i32 = load x[i]
  b: i32 = load y[i]
  c: i32 = {op} a, b
  st: i32 = store o[i], c
}}
"""


def ulps(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    rounded = exact.float().abs()
    step = torch.nextafter(rounded, torch.full_like(rounded, torch.inf)) - rounded
    return (values.double() - exact).abs() / step.double()


def test_written_out_functions_are_accurate() -> None:
    """exp, tanh and erf: at most twice eager's largest error, and never more than 1.35 ulp."""
    n = 1 << 18
    wide = torch.linspace(-100, 88, n // 4)
    torch.manual_seed(0)
    small = (torch.rand(n // 4) - 0.5) * torch.exp(torch.rand(n // 4) * -60)
    x = torch.cat([wide, torch.linspace(-12, 12, n // 4), torch.randn(n // 4), small])
    ops = ["exp", "tanh", "erf"]
    for op, (kernel, address) in zip(ops, native([unary(op, n) for op in ops]), strict=True):
        out = torch.empty(n)
        call(kernel, address, {"x": x, "o": out})
        exact, eager = getattr(torch, op)(x.double()), getattr(torch, op)(x)
        normal = exact.abs() > 1e-37
        worst, eagers = (float(ulps(each, exact)[normal].max()) for each in (out, eager))
        assert worst < 1.35 and worst <= max(2 * eagers, 1.1), (op, worst, eagers)


@pytest.mark.parametrize("op", ["exp", "tanh", "erf", "sigmoid", "asinh", "acosh", "sinh", "cosh"])
def test_special_values(op: str) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor(
        [
            nan,
            inf,
            -inf,
            0.0,
            -0.0,
            89.5,
            89.2,
            -89.2,
            -110.0,
            3e38,
            -3e38,
            1e20,
            1e-40,
            1.0,
            -1.0,
            0.5,
            -0.5,
            20.0,
            1e-3,
        ]
    )
    out = torch.empty_like(x)
    ((kernel, address),) = native([unary(op, len(x))])
    call(kernel, address, {"x": x, "o": out})
    # Eager's own sinh and cosh overflow early on processors without AVX-512.
    expected = getattr(torch, op)(x.double()).float() if op in ("sinh", "cosh") else getattr(torch, op)(x)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=5e-7, atol=0)


def test_long_sums_are_as_accurate_as_eager() -> None:
    n = 1 << 20
    texts = [column_sum(n, 1), column_sum(n // 16, 16)]
    x = torch.rand(n, generator=torch.Generator().manual_seed(0))
    for (kernel, address), shape in zip(native(texts), [(-1, 1), (-1, 16)], strict=True):
        out = torch.empty(shape[1])
        call(kernel, address, {"x": x, "o": out})
        exact, eager = x.view(shape).double().sum(0), x.view(shape).sum(0)
        ours, eagers = (float((each.double() - exact).abs().max()) for each in (out, eager))
        assert ours <= max(2 * eagers, float(exact.max()) * 1.2e-7)


def test_sums_are_as_accurate_as_eagers_at_every_length() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(30, 96), (120, 96), (1000, 96), (20000, 96), (1 << 20, 1), (1 << 14, 1)]
    for (kernel, address), shape in zip(native([column_sum(*shape) for shape in shapes]), shapes, strict=True):
        x = torch.rand(shape, generator=generator)
        out = torch.empty(shape[1])
        call(kernel, address, {"x": x, "o": out})
        exact, eager = x.double().sum(0), x.sum(0)
        ours, eagers = float(ulps(out, exact).max()), float(ulps(eager, exact).max())
        assert ours <= 2 * eagers + 1, (shape, ours, eagers)


@pytest.mark.parametrize(("rows", "columns"), [(9001, 1000), (4096, 2048), (20_000, 129)])
def test_sums_abreast_are_those_of_their_columns(rows: int, columns: int) -> None:
    text = f"""\
kernel k(x: f32[{rows * columns}], w: f32[{columns}], m: f32[{rows}], o: f32[{columns}], q: f32[{columns}]) {{
  axes i: {rows}, j: {columns}
  a: f32 = load x[{columns}*i + j]
  b: f32 = load w[j]
  c: f32 = load m[i]
  d: f32 = mul a, b
  s: f32 = sum d over i
  e: f32 = mul a, c
  t: f32 = sum e over i
  u: f32 = add s, b
  st: f32 = store o[j], u
  su: f32 = store q[j], t
}}
"""
    ((kernel, address),) = native([text])
    assert kernel.plan.abreast > 1
    x, w, m = torch.randn(rows, columns), torch.randn(columns), torch.randn(rows)
    o, q = torch.full((2, columns + 64), 7.0)  # what lies behind stays as it is
    call(kernel, address, {"x": x, "w": w, "m": m, "o": o, "q": q})
    exact = x.double() * w + w / rows, x.double() * m[:, None]
    for got, terms, eager in zip((o, q), exact, ((x * w).sum(0) + w, (x * m[:, None]).sum(0)), strict=True):
        error, theirs = ((each - terms.sum(0)).abs().max() for each in (got[:columns], eager))
        assert error <= 2 * theirs + 1e-4 and (got[columns:] == 7).all()


def test_sums_abreast_whose_results_lie_side_by_side() -> None:
    """Three sums for each column, which lie between the elements of a vector of them."""
    rows, columns = 3000, 1500
    text = f"""\
kernel k(w: f32[{rows * columns}], x: f32[{3 * rows}], o: f32[{3 * columns}]) {{
  axes i: {columns}, j: 3, k: {rows}
  a: f32 = load w[i + {columns}*k]
  b: f32 = load x[j + 3*k]
  c: f32 = maximum a, b
  d: f32 = sum c over k
  st: f32 = store o[3*i + j], d
}}
"""
    ((kernel, address),) = native([text])
    assert kernel.plan.abreast > 1
    w, x = torch.randn(rows, columns), torch.randn(rows, 3)
    out = torch.full((3 * columns + 64,), 7.0)
    call(kernel, address, {"w": w, "x": x, "o": out})
    terms = torch.maximum(w[:, :, None], x[:, None]).double()
    error = (out[: 3 * columns].view(columns, 3) - terms.sum(0)).abs().max()
    assert error <= 2 * (terms.float().sum(0) - terms.sum(0)).abs().max() + 1e-4 and (out[3 * columns :] == 7).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_abreast_need_little_of_a_threads_stack(dynamic: bool) -> None:
    x = torch.randn(4096, 2048, dtype=torch.float64)
    compiled = torch.compile(lambda x: (x.sum(0), (x * x).sum(0)), backend="pellucid", dynamic=dynamic)
    compiled(x)
    found: list[torch.Tensor] = []
    try:
        threading.stack_size(192 << 10)
        thread = threading.Thread(target=lambda: found.extend(compiled(x)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(0)
    torch.testing.assert_close(found, [x.sum(0), (x * x).sum(0)])


def test_sums_of_products_of_long_batches_are_as_accurate_as_eagers() -> None:
    a, b = torch.randn(5, 20_000, 99), torch.randn(20_000, 99)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(1)

    exact = fn(a.double(), b.double())
    ours, eagers = ((each - exact).abs().max() for each in (torch.compile(fn, backend="pellucid")(a, b), fn(a, b)))
    assert ours <= 2 * eagers


def test_a_long_reduction_has_the_same_bits_on_any_number_of_threads() -> None:
    x = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.argmax(), torch.var_mean(x)[0], x.softmax(0)

    compiled, threads = torch.compile(fn, backend="pellucid"), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(compiled(x))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))
    exact = x.double()
    assert float(ulps(results[0][0], exact.sum())) <= 2 and results[0][1] == x.argmax()
    torch.testing.assert_close(results[0][3], exact.softmax(0).float(), rtol=1e-6, atol=0)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_positions_follow_eager(dtype: torch.dtype) -> None:
    """Ties, rows shorter than a vector, and for floats NaN and rows of nothing but -inf."""
    x = torch.randint(0, 9, (33, 70), generator=torch.Generator().manual_seed(0)).to(dtype)
    given = [x, x[:5, :3].clone(), x.t().contiguous()]
    if dtype.is_floating_point:
        with_nan, low = x.clone(), torch.full((33, 70), -torch.inf, dtype=dtype)
        with_nan.view(-1)[::41] = torch.nan
        low[3, 69] = 0
        given += [with_nan, low]

    def fn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        ops = (torch.argmax, torch.argmin)
        return [op(each, dim) for each in tensors for op in ops for dim in (0, 1, None)]

    for ours, eagers in zip(torch.compile(fn, backend="pellucid")(*given), fn(*given), strict=True):
        assert torch.equal(ours, eagers)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_transposed_accesses_follow_eager(dtype: torch.dtype) -> None:
    """Squares at the edges, masked ones, and rows that a mask moves out of the buffer."""
    pad = torch.nn.functional.pad

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        padded = [pad(x.t(), (1, 2)), pad(x, (3, 0, 2, 1)).t().contiguous(), torch.cat([x.t(), y], 1)]
        return [x.t().contiguous(), x.t() == y, x.flip(0).t().contiguous(), x.t()[1:, 2:].contiguous(), x + x, *padded]

    compiled = torch.compile(fn, backend="pellucid", dynamic=False)
    for n, m in ((100, 130), (33, 17), (64, 64)):
        x = torch.randint(0, 99, (n, m), generator=torch.Generator().manual_seed(0)).to(dtype)
        y = torch.randint(0, 3, (m, n), generator=torch.Generator().manual_seed(1)).to(dtype)
        for ours, eagers in zip(compiled(x, y), fn(x, y), strict=True):
            assert torch.equal(ours, eagers)


def failure(status: int) -> tuple[int, ...]:
    """Which check failed, for which index, in a dimension of which size."""
    return tuple((ctypes.c_int64 * 3).from_address(status))


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_failed_check_is_reported_and_touches_nothing_else(vectorize: bool) -> None:
    text = """\
kernel k(x: i64[100], y: i64[100], w: f32[50], o: f32[100]) {
  axes i: 100
  k: i64 = load x[i]
  c: i64 = check k, 5
  l: i64 = load y[i]
  d: i64 = check l, 10
  a: f32 = load w[10*[c] + [d]]
  st: f32 = store o[i], a
}
"""
    kernel = generate(parse_kernel(text), Options(vectorize=vectorize), machine_for())
    addresses, _ = build({kernel.name: kernel.source})
    buffers = {"x": torch.zeros(100).long(), "y": torch.zeros(100).long(), "w": torch.rand(50), "o": torch.empty(100)}
    assert call(kernel, addresses[kernel.name], buffers) == 0
    buffers["y"][97], buffers["x"][3] = 1 << 40, -5
    assert failure(call(kernel, addresses[kernel.name], buffers)) == (1, 1 << 40, 10)
    buffers["x"][3] = -6
    assert failure(call(kernel, addresses[kernel.name], buffers)) == (0, -6, 5)
    assert buffers["o"][97] == buffers["w"][0]


def test_masks_that_are_spilled_stay_as_they_are() -> None:
    """GCC 12 read a spilled mask of 8 lanes back as one of 16, with whatever lay on the stack beside it."""
    kernel = generate(
        parse_kernel("""\
kernel k<s>(y: i64[s], x: f32[4*s], n: i64[((s + 32767) // 32768)], t: f32[((s + 32767) // 32768)]) {
  axes i0: ((s + 32767) // 32768), i1: 32768
  v0: i64 = index 32768*i0 + i1
  v1: i64 = index s
  v2: bool = lt v0, v1
  v3: i64 = load y[32768*i0 + i1] if v2 else 0
  v4: i64 = const -100
  v5: bool = ne v3, v4
  v6: i64 = const 0
  v7: i64 = where v5, v3, v6
  v8: i64 = where v2, v7, v6
  v9: i64 = check v8, 4 nowrap
  v10: f32 = load x[131072*i0 + 4*i1 + [v9]] if v2 else 0
  v11: f32 = neg v10
  v12: f32 = const 0.0
  v13: f32 = where v5, v11, v12
  v14: i64 = cast v5
  v15: i64 = where v2, v14, v6
  v17: f32 = where v2, v13, v12
  v18: i64 = sum v15 over i1
  st0: i64 = store n[i0], v18
  v19: f32 = sum v17 over i1
  st1: f32 = store t[i0], v19
}
"""),
        Options(),
        machine_for(),
    )
    dirty = """\
extern "C" int64_t k_dirty(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  volatile unsigned char junk[1 << 18];
  for (auto& each : junk) each = 255;
  return 0;
}
"""
    addresses, _ = build({kernel.name: kernel.source, "k_dirty": dirty})
    y, x = torch.arange(15) % 4, torch.arange(60.0)
    buffers = {"y": y, "x": x, "n": torch.zeros(1).long(), "t": torch.zeros(1)}
    soil = native_function(addresses["k_dirty"])
    soil(None, None, 0, 0)
    assert call(kernel, addresses[kernel.name], buffers, {"s": 15}) == 0
    assert buffers["n"].item() == 15 and buffers["t"].item() == -x.view(15, 4).gather(1, y[:, None]).sum().item()


def test_integer_division_never_traps() -> None:
    ops = ["floordiv", "truncdiv", "remainder", "fmod"]
    x = torch.full((64,), -(1 << 31), dtype=torch.int32)
    y = torch.tensor([0, -1] * 32, dtype=torch.int32)
    for op, (kernel, address) in zip(ops, native([integer_division(op) for op in ops]), strict=True):
        out = torch.empty(64, dtype=torch.int32)
        call(kernel, address, {"x": x, "y": y, "o": out})
        assert out[:2].tolist() == ([0, -(1 << 31)] if op.endswith("div") else [0, 0])


def avx2_toolchain() -> Toolchain:
    known = detect()
    flags = (*known.flags, "-mno-avx512f")
    return (
        replace(known, flags=flags, isa="AVX2", key=f"{known.key[:-4]}avx2")
        if "-mno-avx512f" not in known.flags
        else known
    )


def every_operator(dtype: DType, n: int) -> str:
    """A kernel with every operator that `dtype` has, casts from and to every other type, and every reduction."""
    kind, params, lines = dtype.value, [f"x: {dtype.value}[{n}]", f"y: {dtype.value}[{n}]"], list[str]()

    def store(result: DType, rhs: str, index: str, numel: int) -> None:
        name, value = f"o{len(params)}", result.compute.value
        params.append(f"{name}: {result.value}[{numel}]")
        lines.append(f"r{name}: {value} = {rhs}")
        lines.append(f"s{name}: {value} = store {name}[{index}], r{name}")

    for op in OPS.values():
        if op.domain is Domain.FLOAT or op.name == "cast":
            continue
        second = "d" if op.name in ("floordiv", "truncdiv", "remainder", "fmod") else "b"
        args = ["m", "a", "b"] if op.result is Result.SELECT else ["a", second][: op.arity]
        store(DType.BOOL if op.result is Result.BOOL else dtype, f"{op.name} {', '.join(args)}", "i", n)
    for number, other in enumerate(each for each in DType if not each.is_opaque and each is not dtype):
        store(other, "cast a", "i", n)
        params.append(f"z{number}: {other.value}[{n}]")
        lines.append(f"w{number}: {other.compute.value} = load z{number}[i]")
        store(dtype, f"cast w{number}", "i", n)
    for name in ("sum", "prod", "max", "min", "argmax", "argmin"):
        store(DType.I64 if "arg" in name else dtype, f"{name} a over i", "0", 1)
    store(dtype, "where m, c, a", "i", n)
    body = "\n  ".join(lines)
    return f"""\
kernel k({", ".join(params)}) {{
  axes i: {n}
  a: {kind} = load x[i]
  b: {kind} = load y[i]
  c: {kind} = const {dtype.limits[1]}
  one: {kind} = const 1
  d: {kind} = maximum b, one
  m: bool = lt a, b
  {body}
}}
"""


@pytest.mark.parametrize(
    ("target", "vectorize"),
    [(machine_for(), True), (AVX2, True), (machine_for(), False)],
    ids=["host", "avx2", "scalar"],
)
def test_wide_unsigned_integers_compute_what_the_interpreter_says(target: Machine, vectorize: bool) -> None:
    n = 257
    toolchain = avx2_toolchain() if target is AVX2 else None
    types = (DType.U16, DType.U32, DType.U64)
    trees = [parse_kernel(every_operator(dtype, n)) for dtype in types]
    kernels = [generate(tree, Options(vectorize=vectorize), target) for tree in trees]
    addresses, _ = build({kernel.name: kernel.source for kernel in kernels}, toolchain)
    generator = torch.Generator().manual_seed(0)
    for dtype, tree, kernel in zip(types, trees, kernels, strict=True):
        verify_kernel(tree)
        assert print_kernel(parse_kernel(print_kernel(tree))) == print_kernel(tree)
        middle, last = (dtype.limits[1] + 1) // 2, dtype.limits[1]
        edges = [0, 1, 2, 3, 7, 31, 63, 64, 1000, middle - 1, middle, middle + 1, last - 1000, last - 2, last - 1, last]
        x = torch.tensor([a for a in edges for _ in edges] + [5], dtype=TORCH_DTYPES[dtype])
        y = torch.tensor([b for _ in edges for b in edges] + [5], dtype=TORCH_DTYPES[dtype])
        assert (kernel.plan.width > 1) is vectorize
        buffers: Tensors = {}
        for param in tree.params:
            kind, numel = TORCH_DTYPES[param.dtype], param.numel.evaluate(lambda _: 0)
            if param.dtype.is_float:  # of the values that the type can hold
                share = torch.rand(numel, generator=generator, dtype=torch.float64)
                largest = min(float(last) * 0.999, torch.finfo(kind).max)
                buffers[param.name] = (share**4 * largest).to(kind)
            elif param.dtype is DType.BOOL:
                buffers[param.name] = torch.rand(numel, generator=generator) < 0.5
            else:
                low, high = param.dtype.limits
                some = [low, high, high // 2, high // 2 + 1, low // 2, 0, 1] * numel
                buffers[param.name] = torch.tensor(some[:numel], dtype=kind)
        buffers |= {"x": x, "y": y}
        expected = {name: tensor.clone() for name, tensor in buffers.items()}
        run_kernel(tree, expected, {})
        assert call(kernel, addresses[kernel.name], buffers) == 0
        for name, wanted in expected.items():
            made_by = [print_line(line) for line in tree.body if f"r{name}" == line.out]
            assert torch.equal(buffers[name], wanted), (made_by, buffers[name], wanted)


@pytest.mark.sampled
@pytest.mark.parametrize("target", [machine_for(), AVX2], ids=["host", "avx2"])
def test_golden_kernels_compute_what_the_interpreter_says(target: Machine) -> None:
    toolchain = avx2_toolchain() if target is AVX2 else None
    symbols = {"n": 37, "m": 53}
    generator = torch.Generator().manual_seed(0)
    for text, (kernel, address) in zip(CASES.values(), native(list(CASES.values()), target, toolchain), strict=True):
        tree = parse_kernel(text)
        buffers: Tensors = {}
        for param in tree.params:
            numel = param.numel.evaluate(lambda atom: symbols[atom.name])
            data = torch.randint(0, 20, (numel,), generator=generator)
            kind = {"f32": torch.float32, "bf16": torch.bfloat16, "u8": torch.uint8, "i64": torch.int64}[
                param.dtype.value
            ]
            buffers[param.name] = (torch.randn(numel, generator=generator) if kind.is_floating_point else data).to(kind)
        expected = {name: tensor.clone() for name, tensor in buffers.items()}
        run_kernel(tree, expected, symbols)
        assert call(kernel, address, buffers, symbols) == 0
        for name in buffers:
            torch.testing.assert_close(buffers[name], expected[name], rtol=2e-2 if "bf16" in text else 1e-4, atol=1e-4)
