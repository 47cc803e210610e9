"""The product of codegen: names, canonical sources, line map."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pellucid.codegen import annotate, generate
from pellucid.codegen.text import scalar_text
from pellucid.ir.nodes import Kernel
from pellucid.ir.origin import Origin, UserLine
from pellucid.ir.parser import parse_kernel
from pellucid.ir.types import DType
from pellucid.machine import AVX512
from pellucid.options import Options
from tests.golden.codegen_cases import CASES, SOFTMAX


def with_origins(kernel: Kernel) -> Kernel:
    def of(name: str) -> Origin:
        return Origin((f"node_{name}",), (UserLine("model.py", 7),), ("lower",))

    return replace(kernel, body=tuple(replace(line, origin=of(line.out)) for line in kernel.body))


def test_equal_kernels_have_one_source() -> None:
    kernel = parse_kernel(SOFTMAX)
    text = re.sub(r"\bi\b", "row", re.sub(r"\bj\b", "column", re.sub(r"\bx\b", "weights", SOFTMAX)))
    other = parse_kernel(text.replace("kernel softmax", "kernel other"))
    first, second = generate(kernel, Options(), AVX512), generate(with_origins(other), Options(), AVX512)
    assert first.source == second.source and first.name == second.name
    assert first.params == ("x", "o") and second.params == ("weights", "o")


@pytest.mark.parametrize("name", CASES)
def test_names_are_identifiers_that_tell(name: str) -> None:
    kernel = generate(parse_kernel(CASES[name]), Options(), AVX512)
    assert re.fullmatch(r"k_[a-z0-9_]+_[0-9a-f]{12}", kernel.name) and len(kernel.name) <= 60
    assert f"int64_t {kernel.name}(" in kernel.source


@pytest.mark.parametrize("name", CASES)
def test_every_line_has_an_origin_or_is_glue(name: str) -> None:
    kernel = generate(with_origins(parse_kernel(CASES[name])), Options(), AVX512)
    lines = kernel.source.splitlines()
    assert len(lines) == len(kernel.line_map)
    glue = re.compile(
        r'extern "C"|\}\)?;?$|return |const int64_t (t\d*|i\d+|lo|hi|from|to|s\d+) =|int64_t status|pv::stream_end'
    )
    for line, origin in zip(lines, kernel.line_map, strict=True):
        assert origin.users or glue.match(line.strip()), line


def test_annotated_source_names_nodes_and_user_lines() -> None:
    text = annotate(generate(with_origins(parse_kernel(SOFTMAX)), Options(), AVX512))
    line = next(line for line in text.splitlines() if "pv::exp" in line)
    assert line.endswith("// node_e  model.py:7")


def test_checks_keep_their_order() -> None:
    kernel = parse_kernel(
        """\
kernel k(x: i64[8], y: i64[8], w: f32[50], o: f32[8]) {
  axes i: 8
  k: i64 = load x[i]
  c: i64 = check k, 5
  l: i64 = load y[i]
  d: i64 = check l, 10 nowrap dim 1
  a: f32 = load w[10*[c] + [d]]
  st: f32 = store o[i], a
}
"""
    )
    checks = generate(with_origins(kernel), Options(), AVX512).checks
    assert [(dim, origin.nodes) for dim, origin in checks] == [(0, ("node_c",)), (1, ("node_d",))]


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, DType.F32, "float(0.1)"),
        (float("inf"), DType.F64, "pv::inf<double>"),
        (-float("inf"), DType.F32, "-pv::inf<float>"),
        (float("nan"), DType.F32, "pv::nan<float>"),
        (-0.0, DType.F32, "float(-0.0)"),
        (-(1 << 63), DType.I64, "INT64_MIN"),
        (300, DType.U8, "uint8_t(44)"),
        (200, DType.I8, "int8_t(-56)"),
        (1, DType.BOOL, "true"),
    ],
)
def test_constants(value: float, dtype: DType, text: str) -> None:
    assert scalar_text(value, dtype) == text
