"""Contractions as native code against float64: random sizes, strides, batches and epilogues.

Operands end where a page without access begins, so that a read beyond them is noticed.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from random import Random

import pytest
import torch

from pellucid.codegen import CppKernel, generate
from pellucid.codegen.contraction import MAX_LOOPED
from pellucid.ir.interp import run_kernel
from pellucid.ir.parser import parse_kernel
from pellucid.native.build import build
from pellucid.native.machine import machine_for
from pellucid.options import Options
from tests.support import native_function, pointers_of

BATCHES, BATCH = 4, 12

# What follows the sum, and how float64 says it. `r` lies like the result, `q` is a second result.
EPILOGUES = {
    "plain": ("  st: f32 = store c[{c}], t\n", lambda t, bias, r: (t, None)),
    "relu": (
        "  e: f32 = load bias[n]\n  f: f32 = add t, e\n  z: f32 = const 0.0\n  g: f32 = maximum f, z\n"
        "  st: f32 = store c[{c}], g\n",
        lambda t, bias, r: ((t + bias).relu(), None),
    ),
    "residual": (
        "  e: f32 = load r[{c}]\n  f: f32 = add t, e\n  st: f32 = store c[{c}], f\n  st2: f32 = store q[{c}], t\n",
        lambda t, bias, r: (t + r, t),
    ),
}


@dataclass(frozen=True)
class Case:
    text: str
    native: CppKernel
    sizes: tuple[int, int, int, int]
    strides: tuple[tuple[int, int, int], ...]  # of a, b and c
    dtype: torch.dtype  # of a and b
    epilogue: str


def draw(random: Random, number: int) -> Case:
    """A product of at most 200 x 200 x 200; extents are symbols in every third batch."""
    z, m, n, k = (
        random.choice((1, 1, 2, 3)),
        *(random.choice((random.randint(2, 20), random.randint(2, 200))) for _ in "mnk"),
    )
    k = random.choice((k, k, 1000))

    def strides(rows: int, columns: int, kinds: tuple[str, ...]) -> tuple[int, int, int]:
        kind = random.choice(kinds)
        row, column = {
            "rows": (columns, 1),
            "columns": (1, rows),
            "gaps": (columns + 3, 1),
            "both": (2 * columns, 2),
            "same row": (0, 1),
            "overlapping": (1, 1),
        }[kind]
        return (row * (rows - 1) + column * (columns - 1) + 1, row, column)

    laid_out = (
        strides(m, k, ("rows", "rows", "columns", "gaps", "both", "same row", "overlapping")),
        strides(k, n, ("rows", "columns", "columns", "gaps", "both", "same row", "overlapping")),
        strides(m, n, ("rows", "rows", "columns", "gaps")),
    )
    (ab, am, ak), (bb, bk, bn), (cb, cm, cn) = laid_out
    epilogue = random.choice(list(EPILOGUES))
    dtype = random.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    kind = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    names = ["s0", "s1", "s2", "s3"] if number % 3 == 2 else [str(size) for size in (z, m, n, k)]
    symbols = "<s0, s1, s2, s3>" if names[0] == "s0" else ""
    place = f"{cb}*z + {cm}*m + {cn}*n"
    text = (
        f"kernel product{symbols}(a: {kind}[{z * ab}], b: {kind}[{z * bb}], bias: f32[{n}], r: f32[{z * cb}], "
        f"c: f32[{z * cb}], q: f32[{z * cb}]) {{\n"
        f"  axes z: {names[0]}, m: {names[1]}, n: {names[2]}, k: {names[3]}\n"
        f"  x: f32 = load a[{ab}*z + {am}*m + {ak}*k]\n  y: f32 = load b[{bb}*z + {bk}*k + {bn}*n]\n"
        f"  p: f32 = mul x, y\n  t: f32 = sum p over k\n" + EPILOGUES[epilogue][0].format(c=place) + "}"
    )
    native = generate(parse_kernel(text), Options(), machine_for())
    return Case(text, native, (z, m, n, k), laid_out, dtype, epilogue)


def guarded(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that end where the next page must not be touched."""
    page, nbytes = mmap.PAGESIZE, numel * dtype.itemsize
    whole = -(-max(1, nbytes) // page) * page
    memory = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + whole), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=whole - nbytes).normal_()


def run(case: Case, address: int) -> None:
    z, m, n, k = case.sizes
    (ab, am, ak), (bb, bk, bn), (cb, cm, cn) = case.strides
    a, b = guarded(z * ab, case.dtype), guarded(z * bb, case.dtype)
    bias, r = guarded(n), guarded(z * cb)
    c, q = torch.full((z * cb,), -7.0), torch.full((z * cb,), -7.0)
    buffers = {"a": a, "b": b, "bias": bias, "r": r, "c": c, "q": q}
    native = case.native
    function = native_function(address)
    pointers = pointers_of(native, buffers)
    known = dict(zip(("s0", "s1", "s2", "s3"), case.sizes, strict=True))
    sizes = (ctypes.c_int64 * max(1, len(native.symbols)))(*(known[name] for name in native.symbols))
    extent = native.extent.evaluate(lambda atom: known[atom.name])
    assert function(pointers, sizes, 0, extent // 2) == 0 == function(pointers, sizes, extent // 2, extent)

    left = a.as_strided((z, m, k), (ab, am, ak)).double()
    right = b.as_strided((z, k, n), (bb, bk, bn)).double()
    place = ((z, m, n), (cb, cm, cn))
    wanted, also = EPILOGUES[case.epilogue][1](left @ right, bias.double(), r.as_strided(*place).double())
    bound = (k + 10) * 2**-24 * (left.abs() @ right.abs() + 10)
    for made, exact in ((c, wanted), (q, also)):
        touched = torch.zeros_like(made, dtype=torch.bool)
        if exact is not None:
            touched.as_strided(*place).fill_(True)
            assert ((made.as_strided(*place).double() - exact).abs() <= bound).all(), case.text
        assert (made[~touched] == -7.0).all(), case.text


@pytest.mark.parametrize("number", range(BATCHES))
def test_contractions_match_float64(number: int) -> None:
    random = Random(number)
    torch.manual_seed(number)
    cases = [draw(random, number) for _ in range(BATCH)]
    assert sum(case.native.plan.blocks is not None for case in cases) >= BATCH / 2
    addresses, _ = build({case.native.name: case.native.source for case in cases})
    for case in cases:
        run(case, addresses[case.native.name])


@dataclass(frozen=True)
class Windows:
    """A convolution of random images: sizes, steps of the two dimensions, and how the weight lies."""

    images: int
    channels: int
    outputs: int
    size: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    last: bool
    depthwise: bool

    @staticmethod
    def draw(random: Random) -> Windows:
        def pair(*choices: int) -> tuple[int, int]:
            return random.choice(choices), random.choice(choices)

        taps, dilation, padding = pair(1, 2, 3, 5), pair(1, 1, 2), pair(0, 1, 2, 4)
        size = tuple(random.randint(t * d + 2, t * d + 19) for t, d in zip(taps, dilation, strict=True))
        channels = random.choice((1, 3, 16, 21, 70)) if taps != (1, 1) else 24
        depthwise = channels > 1 and taps != (1, 1) and random.random() < 0.4
        outputs = channels if depthwise else random.choice((2, 5, 32, 75))
        assert len(size) == 2
        return Windows(
            random.randint(1, 3), channels, outputs, size, taps, pair(1, 1, 2, 3), dilation, padding,
            random.random() < 0.5, depthwise,
        )  # fmt: skip

    @property
    def pixels(self) -> tuple[int, int]:
        height, width = (
            (n + 2 * p - d * (t - 1) - 1) // s + 1
            for n, p, d, t, s in zip(self.size, self.padding, self.dilation, self.taps, self.stride, strict=True)
        )
        return height, width

    def text(self) -> str:
        (h, w), (kh, kw), (oh, ow) = self.size, self.taps, self.pixels
        inner = 1 if self.depthwise else self.channels
        y, x = (
            f"{s}*{i} + {d}*{j} - {p}"
            for s, i, d, j, p in zip(self.stride, "yx", self.dilation, "uv", self.padding, strict=True)
        )
        weight = f"{inner}*u*{kw} + {inner}*v + k" if self.last else f"{kw}*u + v + {kh * kw}*k"
        place = f"{oh * ow * self.outputs}*z + {ow * self.outputs}*y + {self.outputs}*x + n"
        (sy, sx), (dy, dx), (py, px) = self.stride, self.dilation, self.padding
        row = w * self.channels
        start = py * row + px * self.channels
        image = f"{h * row}*z + {sy * row}*y + {dy * row}*u + {sx * self.channels}*x + {dx * self.channels}*v"
        image += f" + {'n' if self.depthwise else 'k'} - {start}"
        return (
            f"kernel convolution(a: f32[{self.images * h * row}], b: f32[{self.outputs * inner * kh * kw}], "
            f"c: f32[{self.images * oh * ow * self.outputs}]) {{\n"
            f"  axes z: {self.images}, y: {oh}, x: {ow}, n: {self.outputs}, u: {kh}, v: {kw}, k: {inner}\n"
            f"  py: i64 = index {y}\n  px: i64 = index {x}\n  zero: i64 = const 0\n"
            f"  h: i64 = const {h}\n  w: i64 = const {w}\n"
            "  m0: bool = ge py, zero\n  m1: bool = lt py, h\n  m2: bool = ge px, zero\n  m3: bool = lt px, w\n"
            "  m4: bool = bitwise_and m0, m1\n  m5: bool = bitwise_and m2, m3\n  m: bool = bitwise_and m4, m5\n"
            f"  l: f32 = load a[{image}] if m else 0.0\n"
            f"  r: f32 = load b[{inner * kh * kw}*n + {weight}] if m else 0.0\n"
            f"  p: f32 = mul l, r\n  t: f32 = sum p over u, v, k\n  st: f32 = store c[{place}], t\n}}"
        )

    def exact(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the sums of absolute values."""
        inner = 1 if self.depthwise else self.channels
        image = a.view(self.images, *self.size, self.channels).permute(0, 3, 1, 2).double()
        shape = (self.outputs, *self.taps, inner) if self.last else (self.outputs, inner, *self.taps)
        weight = (b.view(shape).permute(0, 3, 1, 2) if self.last else b.view(shape)).double().flatten(1)
        columns = torch.nn.functional.unfold(image, self.taps, self.dilation, self.padding, self.stride)
        if self.depthwise:
            columns = columns.unflatten(1, (self.channels, -1))
            weight = weight[None, :, :, None]
            return ((weight * columns).sum(2).mT, (weight * columns).abs().sum(2).mT)
        return (weight @ columns).mT, (weight.abs() @ columns.abs()).mT


def test_windows_match_float64_and_the_interpreter() -> None:
    random = Random(7)
    torch.manual_seed(7)
    drawn = [Windows.draw(random) for _ in range(14)]
    kernels = [parse_kernel(case.text()) for case in drawn]
    natives = [generate(kernel, Options(), machine_for()) for kernel in kernels]
    loops = [case for case, native in zip(drawn, natives, strict=True) if native.plan.blocks is None]
    assert [case for case in loops if case.outputs > MAX_LOOPED] == []
    addresses, _ = build({native.name: native.source for native in natives})
    for case, kernel, native in zip(drawn, kernels, natives, strict=True):
        sizes = {param.name: param.numel.value or 0 for param in kernel.params}
        buffers = {name: guarded(numel) for name, numel in sizes.items()}
        function = native_function(addresses[native.name])
        pointers = pointers_of(native, buffers)
        extent = native.extent.value
        assert extent is not None and function(pointers, (ctypes.c_int64 * 1)(), 0, extent) == 0
        wanted, size = case.exact(buffers["a"], buffers["b"])
        terms = case.taps[0] * case.taps[1] * case.channels
        made = buffers["c"].view(wanted.shape).double()
        assert ((made - wanted).abs() <= (terms + 2) * 2**-24 * size + 1e-30).all(), case
        if sum(sizes.values()) < 5000:
            oracle = buffers | {"c": torch.zeros(sizes["c"])}
            run_kernel(kernel, oracle, {})
            assert ((made - oracle["c"].view(wanted.shape)).abs() <= 2 * (terms + 2) * 2**-24 * size + 1e-30).all(), (
                case
            )
