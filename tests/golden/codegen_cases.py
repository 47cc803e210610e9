"""Kernels whose C++ is kept as golden files, as IR text. Each shows one thing that codegen does."""

from __future__ import annotations

POINTWISE = """\
kernel pointwise(x: f32[8388608], b1: f32[512], y: f32[8388608], b2: f32[512], b3: f32[512], o: f32[8388608]) {
  axes i: 16384, j: 512
  a: f32 = load x[512*i + j]
  b: f32 = load b1[j]
  c: f32 = add a, b  # add  model.py:3
  d: f32 = load y[512*i + j]
  e: f32 = add c, d  # add_1  model.py:4
  f: f32 = load b2[j]
  g: f32 = mul e, f  # mul  model.py:5
  h: f32 = load b3[j]
  k: f32 = add g, h  # add_2  model.py:6
  st: f32 = store o[512*i + j], k
}
"""

CONTIGUOUS_SYMBOLIC = """\
kernel contiguous<n, m>(x: bf16[m*n], o: bf16[m*n]) {
  axes i: n, j: m
  a: f32 = load x[m*i + j]
  b: f32 = sigmoid a
  c: f32 = mul a, b
  st: f32 = store o[m*i + j], c
}
"""

SOFTMAX = """\
kernel softmax(x: f32[24576], o: f32[24576]) {
  axes i: 48, j: 512
  a: f32 = load x[512*i + j]
  m: f32 = max a over j
  b: f32 = sub a, m
  e: f32 = exp b
  z: f32 = sum e over j
  q: f32 = div e, z
  st: f32 = store o[512*i + j], q
}
"""

LAYER_NORM = """\
kernel layer_norm(x: bf16[76800], w: bf16[768], o: bf16[76800]) {
  axes i: 100, j: 768
  a: f32 = load x[768*i + j]
  s: f32 = sum a over j
  n: f32 = const 768.0
  mean: f32 = div s, n
  c: f32 = sub a, mean
  c2: f32 = mul c, c
  v: f32 = sum c2 over j
  var: f32 = div v, n
  eps: f32 = const 1e-05
  ve: f32 = add var, eps
  r: f32 = rsqrt ve
  t: f32 = mul c, r
  g: f32 = load w[j]
  u: f32 = mul t, g
  st: f32 = store o[768*i + j], u
}
"""

COLUMN_SUM = """\
kernel column_sum(x: f32[4194304], o: f32[1024]) {
  axes i: 4096, j: 1024
  a: f32 = load x[1024*i + j]
  s: f32 = sum a over i
  st: f32 = store o[j], s
}
"""

BYTES = """\
kernel bytes(x: u8[1000], y: u8[1000], o: u8[1000]) {
  axes i: 1000
  a: u8 = load x[i]
  b: u8 = load y[i]
  c: u8 = add a, b
  d: u8 = maximum c, a
  st: u8 = store o[i], d
}
"""

EMBEDDING = """\
kernel embedding(index: i64[100], w: f32[23040], o: f32[76800]) {
  axes i: 100, j: 768
  k: i64 = load index[i]
  c: i64 = check k, 30
  a: f32 = load w[768*[c] + j]
  st: f32 = store o[768*i + j], a
}
"""

TRANSPOSED_PAD = """\
kernel transposed_pad(x: f32[8000], o: f32[8320]) {
  axes i: 80, j: 104
  p: i64 = index j
  n: i64 = const 100
  inside: bool = lt p, n
  a: f32 = load x[i + 80*j] if inside else 0.0
  st: f32 = store o[104*i + j], a
}
"""

TRANSPOSED = """\
kernel transposed(x: bf16[60000], y: f32[60000], o: f32[60000]) {
  axes i: 200, j: 300
  a: f32 = load x[i + 200*j]
  b: f32 = load y[300*i + j]
  c: f32 = mul a, b
  st: f32 = store o[300*i + j], c
}
"""

TRANSPOSED_STORE = """\
kernel transposed_store(x: f32[60000], o: f32[60000], q: f32[60000]) {
  axes i: 200, j: 300
  a: f32 = load x[300*i + j]
  b: f32 = neg a
  st: f32 = store o[i + 200*j], b
  st2: f32 = store q[300*i + j], a
}
"""

SOFTMAX_TRANSPOSED = """\
kernel softmax_transposed(x: f32[24576], o: f32[24576]) {
  axes i: 48, j: 512
  a: f32 = load x[512*i + j]
  m: f32 = max a over j
  b: f32 = sub a, m
  e: f32 = exp b
  z: f32 = sum e over j
  q: f32 = div e, z
  st: f32 = store o[i + 48*j], q
}
"""

CENTRED = """\
kernel centred(x: f32[184320], o: f32[23040]) {
  axes i: 160, j: 144
  a: f32 = load x[1280*j + 8*i]
  s: f32 = sum a over j
  n: f32 = const 144.0
  m: f32 = div s, n
  d: f32 = sub a, m
  st: f32 = store o[144*i + j], d
}
"""

STRIDED = """\
kernel strided(x: f32[40000], o: f32[200]) {
  axes i: 200
  a: f32 = load x[80*i]
  st: f32 = store o[90*i], a
}
"""

ARGMAX = """\
kernel argmax(x: f32[5000], o: i64[50]) {
  axes i: 50, j: 100
  a: f32 = load x[100*i + j]
  m: i64 = argmax a over j
  st: i64 = store o[i], m
}
"""

CASES = {
    "pointwise": POINTWISE,
    "contiguous_symbolic": CONTIGUOUS_SYMBOLIC,
    "softmax": SOFTMAX,
    "layer_norm": LAYER_NORM,
    "column_sum": COLUMN_SUM,
    "bytes": BYTES,
    "embedding": EMBEDDING,
    "transposed_pad": TRANSPOSED_PAD,
    "transposed": TRANSPOSED,
    "transposed_store": TRANSPOSED_STORE,
    "softmax_transposed": SOFTMAX_TRANSPOSED,
    "centred": CENTRED,
    "argmax": ARGMAX,
}
