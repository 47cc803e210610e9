"""Kernels and views for the tests of the native stage."""

from __future__ import annotations

import torch

from pellucid.native.instance import TensorView

SIGNATURE = "(void* const* p, const int64_t* s, int64_t begin, int64_t end)"


def kernel_text(name: str, body: str) -> str:
    return f'extern "C" int64_t {name}{SIGNATURE} {{\n{body}\n}}\n'


ADD = """
  const float* x = (const float*)p[0]; const float* y = (const float*)p[1]; float* z = (float*)p[2];
  for (int64_t i = begin; i < end; i++) z[i] = x[i] + y[i];
  return 0;
"""
DOUBLE = """
  const float* x = (const float*)p[0]; float* y = (float*)p[1];
  for (int64_t i = begin; i < end; i++) y[i] = 2 * x[i];
  return 0;
"""
CHECK = """
  const int64_t* x = (const int64_t*)p[0];
  int64_t status = 0;
  for (int64_t i = begin; i < end; i++) pv::check_index(x[i], s[0], false, status, 1);
  return status;
"""
WHO = """
  // Which share does each iteration belong to, and how many iterations has the share?
  int64_t* out = (int64_t*)p[0];
  for (int64_t i = begin; i < end; i++) { out[2 * i] = begin; out[2 * i + 1] = end; }
  return 0;
"""


def view(slot: int, *shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> TensorView:
    """A contiguous view."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(1, extent)
    return TensorView(slot, shape, tuple(reversed(strides)), offset, dtype)


def product(name: str, element: str, columns: int) -> str:
    """A product of 2 x 3 ones and 3 x `columns` ones (at most 32), in panels; it returns the last sum."""
    one = {"float": "1.0f", "bf16": "{0x3f80}", "f16": "{0x3c00}"}[element]
    kind = element if element == "float" else f"pv::{element}"
    return kernel_text(
        name,
        f"""
  {kind} a[6], b[{3 * columns}];
  for ({kind}& x : a) x = {one};
  for ({kind}& x : b) x = {one};
  alignas(64) float sums[2 * 32];
  pv::contract<2, 32, {columns}>(2, {columns}, 3, pv::Matrix<{kind}>{{a, 3, 1}},
                                 pv::Matrix<{kind}>{{b, {columns}, 1}}, pv::Sums{{sums, 32, false}});
  return sums[{columns - 1}];""",
    )
