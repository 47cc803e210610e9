"""Which kernels are attentions, what they compute, and in what blocks they run."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pellucid.codegen import generate
from pellucid.errors import InternalError
from pellucid.ir.attention import Attention, AttentionBackward, find_attention
from pellucid.ir.interp import run_kernel
from pellucid.ir.nodes import Kernel
from pellucid.ir.parser import parse_kernel
from pellucid.ir.traffic import traffic
from pellucid.ir.verify_kernel import verify_kernel
from pellucid.machine import AVX2, AVX512, Machine
from pellucid.machine.attention import Heads
from pellucid.machine.work import estimate
from pellucid.native.build import build
from pellucid.native.machine import machine_for
from pellucid.options import Options
from tests.property.test_contractions import guarded
from tests.support import native_function, pointers_of

# Five rows and seven keys of three heads, four elements each; a mask that all heads share.
ATTENTION = """\
kernel attention(q: f32[60], k: f32[84], v: f32[84], m: f32[35], o: f32[60], l: f32[15]) {
  axes h: 3, i: 5, d: 4, t: 7, e: 4
  a: f32 = load q[20*h + 4*i + e]
  b: f32 = load k[28*h + 4*t + e]
  c: f32 = mul a, b
  s0: f32 = sum c over e
  half: f32 = const 0.5
  s1: f32 = mul s0, half
  w: f32 = load m[7*i + t]
  s2: f32 = add s1, w
  at: i64 = index t
  end: i64 = index i
  sees: bool = le at, end
  low: f32 = const -inf
  s: f32 = where sees, s2, low
  top: f32 = max s over t
  none: bool = eq top, low
  zero: f32 = const 0.0
  base: f32 = where none, zero, top
  x: f32 = sub s, base
  p: f32 = exp x
  sum: f32 = sum p over t
  y: f32 = load v[28*h + 4*t + d]
  z: f32 = mul p, y
  u: f32 = sum z over t
  empty: bool = eq sum, zero
  one: f32 = const 1.0
  all: f32 = where empty, one, sum
  r: f32 = div u, all
  st0: f32 = store o[20*h + 4*i + d], r
  log: f32 = log sum
  lse: f32 = add base, log
  ls: f32 = where empty, zero, lse
  st1: f32 = store l[5*h + i], ls
}
"""


def changed(*pairs: tuple[str, str]) -> Kernel:
    text = ATTENTION
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return parse_kernel(text)


def test_the_formula_is_recognised() -> None:
    found = find_attention(parse_kernel(ATTENTION))
    assert isinstance(found, Attention) and found.logsumexp is not None
    scores = found.scores
    assert (found.rows, scores.key, scores.term, found.column, scores.scale) == (("i",), "t", "e", "d", 0.5)
    assert scores.mask is not None and scores.limit is not None


# The same with scores that are capped at 2, and a sink of each head.
CAPPED = (
    ("v: f32[84], m", "v: f32[84], n: f32[3], m"),
    (
        "s1: f32 = mul s0, half",
        "two: f32 = const 2.0\n  s3: f32 = mul s0, half\n  s4: f32 = tanh s3\n  s1: f32 = mul s4, two",
    ),
    ("top: f32 = max s over t", "most: f32 = max s over t\n  sink: f32 = load n[h]\n  top: f32 = maximum most, sink"),
    (
        "sum: f32 = sum p over t",
        "keys: f32 = sum p over t\n  far: f32 = sub sink, base\n  own: f32 = exp far\n  sum: f32 = add keys, own",
    ),
)


def test_a_cap_and_sinks_are_recognised_and_computed() -> None:
    """By native code and the interpreter as by a softmax of scores beside sinks."""
    kernel = changed(*CAPPED)
    verify_kernel(kernel)
    found = find_attention(kernel)
    assert isinstance(found, Attention) and found.sinks is not None
    assert (found.scores.scale, found.scores.cap) == (1.0, 2.0)
    q, k, v, n, m = (guarded(param.numel.value or 0) for param in kernel.params[:5])
    n[2] = -torch.inf
    heads = [each.view(3, -1, 4).double() for each in (q, k, v)]
    scores = (heads[0] @ heads[1].mT * 0.5).tanh() * 2 + m.view(5, 7)
    scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    scores = torch.cat([scores, n.view(3, 1, 1).expand(3, 5, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ heads[2]
    for run in (run_kernel, run_native):
        memory = {"q": q, "k": k, "v": v, "n": n, "m": m} | {"o": torch.zeros(60), "l": torch.zeros(15)}
        run(kernel, memory, {})
        torch.testing.assert_close(memory["o"], out.flatten().float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(memory["l"], scores.logsumexp(-1).flatten().float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "pair",
    [
        ("sub sink, base", "sub sink, top"),
        ("maximum most, sink", "minimum most, sink"),
        ("maximum most, sink", "maximum most, half"),
        ("add keys, own", "sub keys, own"),
        ("tanh s3", "exp s3"),
        ("const 2.0", "const 1e-9"),
    ],
)
def test_other_caps_and_sinks_are_no_kernel_at_all(pair: tuple[str, str]) -> None:
    with pytest.raises(InternalError, match="no attention"):
        generate(changed(*CAPPED, pair), Options(), AVX2)


HIDING = (
    "s2: f32 = add s1, w",
    "s5: f32 = add s1, w\n  least: f32 = const -inf\n  out: bool = eq w, least\n  s2: f32 = where out, w, s5",
)


def test_a_mask_may_hide_what_scores_are() -> None:
    """Where it is -inf, a key that is NaN does not count; it is added elsewhere."""
    kernel = changed(HIDING)
    verify_kernel(kernel)
    found = find_attention(kernel)
    assert isinstance(found, Attention) and found.scores.masking == "hides"
    q, k, v, m = (guarded(param.numel.value or 0) for param in kernel.params[:4])
    k.view(3, 7, 4)[:, 1], m.view(5, 7)[:, 1] = torch.nan, -torch.inf
    scores = q.view(3, 5, 4).double() @ k.view(3, 7, 4).double().mT * 0.5 + m.view(5, 7)
    scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    scores[..., 1] = -torch.inf
    out = scores.softmax(-1) @ v.view(3, 7, 4).double()
    for run in (run_kernel, run_native):
        memory = {"q": q, "k": k, "v": v, "m": m, "o": torch.zeros(60), "l": torch.zeros(15)}
        run(kernel, memory, {})
        torch.testing.assert_close(memory["o"], out.flatten().float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pair", [("where out, w, s5", "where out, s5, w"), ("eq w, least", "eq w, half")])
def test_masks_that_hide_otherwise_are_no_kernel_at_all(pair: tuple[str, str]) -> None:
    with pytest.raises(InternalError, match="no attention"):
        generate(changed(HIDING, pair), Options(), AVX2)


# The gradients of the same, for three heads of queries that share one head of keys.
BACKWARD = """\
kernel gradients(
    q: f32[60], k: f32[28], v: f32[28], o: f32[60], g: f32[60], l: f32[15], gq: f32[60], gk: f32[28], gv: f32[28]) {
  axes h: 3, i: 5, d: 4, t: 7, e: 4
  a: f32 = load q[20*h + 4*i + e]
  b: f32 = load k[4*t + e]
  c: f32 = mul a, b
  s0: f32 = sum c over e
  half: f32 = const 0.5
  s1: f32 = mul s0, half
  at: i64 = index t
  end: i64 = index i
  sees: bool = le at, end
  low: f32 = const -inf
  s: f32 = where sees, s1, low
  base: f32 = load l[5*h + i]
  x: f32 = sub s, base
  p: f32 = exp x
  go: f32 = load g[20*h + 4*i + d]
  y: f32 = load v[4*t + d]
  gy: f32 = mul go, y
  through: f32 = sum gy over d
  out: f32 = load o[20*h + 4*i + d]
  oo: f32 = mul go, out
  delta: f32 = sum oo over d
  less: f32 = sub through, delta
  weighed: f32 = mul p, less
  change: f32 = mul weighed, half
  ck: f32 = mul change, b
  u: f32 = sum ck over t
  st0: f32 = store gq[20*h + 4*i + e], u
  cq: f32 = mul change, a
  w: f32 = sum cq over h, i
  st1: f32 = store gk[4*t + e], w
  pg: f32 = mul p, go
  z: f32 = sum pg over h, i
  st2: f32 = store gv[4*t + d], z
}
"""


def test_gradients_are_recognised_and_computed() -> None:
    """By native code and the interpreter as by autograd, in memory that ends where a page without access begins."""
    kernel = parse_kernel(BACKWARD)
    verify_kernel(kernel)
    found = find_attention(kernel)
    assert isinstance(found, AttentionBackward) and found.rows == ("h", "i")
    q, k, v, o, g, logarithms = (guarded(param.numel.value or 0) for param in kernel.params[:6])
    operands = [each.view(-1, size, 4).double().requires_grad_() for each, size in ((q, 5), (k, 7), (v, 7))]
    scores = operands[0] @ operands[1].mT * 0.5
    scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    out = scores.softmax(-1) @ operands[2]
    o.copy_(out.flatten())
    logarithms.copy_(scores.logsumexp(-1).flatten())
    expected = torch.autograd.grad(out, operands, g.view_as(out).double())
    for run in (run_kernel, run_native):
        results = {name: torch.full((size,), torch.nan) for name, size in (("gq", 60), ("gk", 28), ("gv", 28))}
        run(kernel, {"q": q, "k": k, "v": v, "o": o, "g": g, "l": logarithms, **results}, {})
        for ours, theirs in zip(results.values(), expected, strict=True):
            torch.testing.assert_close(ours, theirs.flatten().float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "pair",
    [
        ("sub through, delta", "add through, delta"),
        ("mul weighed, half", "mul weighed, weighed"),
        ("mul p, go", "mul x, go"),
        ("sum cq over h, i", "sum cq over i, h"),
        ("exp x", "neg x"),
    ],
)
def test_other_gradients_are_no_kernel_at_all(pair: tuple[str, str]) -> None:
    old, new = pair
    assert old in BACKWARD
    with pytest.raises(InternalError, match="no attention"):
        generate(parse_kernel(BACKWARD.replace(old, new)), Options(), AVX2)


@pytest.mark.parametrize(
    "pair",
    [
        ("exp x", "neg x"),
        ("le at, end", "lt at, end"),
        ("max s over t", "min s over t"),
        ("z: f32 = mul p, y", "z: f32 = mul x, y"),
        ("div u, all", "div u, sum"),
        ("log sum", "log all"),
        ("where empty, zero, lse", "where empty, one, lse"),
        ("where none, zero, top", "where none, half, top"),
    ],
)
def test_another_formula_is_no_kernel_at_all(pair: tuple[str, str]) -> None:
    kernel = changed(pair)
    with pytest.raises(InternalError, match="reduces over other axes"):
        verify_kernel(kernel)
    with pytest.raises(InternalError, match="no attention"):
        generate(kernel, Options(), AVX2)


def test_native_code_and_the_interpreter_compute_softmax_times_values() -> None:
    """With a row that sees nothing, in memory that ends where a page without access begins."""
    kernel = parse_kernel(ATTENTION)
    verify_kernel(kernel)
    q, k, v, m = (guarded(param.numel.value or 0) for param in kernel.params[:4])
    m[14:21] = -torch.inf
    heads = [each.view(3, -1, 4).double() for each in (q, k, v)]
    scores = heads[0] @ heads[1].mT * 0.5 + m.view(5, 7)
    scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ heads[2]
    logarithms = scores.logsumexp(-1).nan_to_num(neginf=0.0)
    for run in (run_kernel, run_native):
        memory = {"q": q, "k": k, "v": v, "m": m, "o": torch.full((60,), torch.nan), "l": torch.full((15,), torch.nan)}
        run(kernel, memory, {})
        torch.testing.assert_close(memory["o"], out.flatten().float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(memory["l"], logarithms.flatten().float(), rtol=1e-5, atol=1e-6)


def run_native(kernel: Kernel, memory: dict[str, torch.Tensor], symbols: dict[str, int]) -> None:
    assert not symbols
    native = generate(kernel, Options(), machine_for(""))
    addresses, _ = build({native.name: native.source})
    function = native_function(addresses[native.name])
    pointers = pointers_of(native, memory)
    assert function(pointers, (ctypes.c_int64 * 1)(), 0, native.extent.value) == 0


def test_scores_beyond_the_last_key_that_counts_are_no_work() -> None:
    """Of 35 scores 15 count."""
    some, all_ = (
        traffic(kernel, estimate).flops
        for kernel in (parse_kernel(ATTENTION), changed(("where sees, s2, low", "neg s2")))
    )
    assert some == pytest.approx(all_ * 15 / 35, rel=0.1)


@pytest.mark.parametrize("machine", [AVX2, AVX512])
def test_blocks_follow_from_sizes(machine: Machine) -> None:
    """Whole panels of keys, equal blocks of rows, and about as many of them as threads want."""
    for size in (2, 20, 64, 80, 128, 256):
        assert Heads(8, 512, 512, size).key_block % (2 * machine.lanes) == 0
        assert 1 <= Heads(1, 4096, 512, size).row_block * size <= 70_000
    assert [Heads(12, rows, 128, 64).row_block for rows in (1, 128, 512)] == [1, 128, 512]
    assert Heads(1, 512, 512, 64).row_block < 100
    found = generate(parse_kernel(ATTENTION), Options(), machine).plan
    assert found.rows is not None and found.rows.triangular and found.extent.value == 3


def test_prices_grow_with_scores_and_shrink_with_what_is_left_out() -> None:
    full, causal, long = Heads(8, 512, 512, 64), Heads(8, 512, 512, 64, True), Heads(8, 512, 1024, 64)
    assert 0.4 < causal.steps(AVX2) / full.steps(AVX2) < 0.6
    assert 1.9 < long.steps(AVX2) / full.steps(AVX2) < 2.1
    assert causal.flops * 2 == pytest.approx(full.flops, rel=0.01)
    assert full.steps(AVX512) * 1.8 < full.steps(AVX2)
    assert Heads(8, 1, 512, 64).library_flops == Heads(8, 4, 512, 64).library_flops
