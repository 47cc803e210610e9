"""Loop nests as values: what is no nest is refused with the place, and a broken one does not pass."""

from __future__ import annotations

import re

import pytest
import torch

from pellucid.codegen import generate
from pellucid.codegen.nest_text import parse_nest, print_nest
from pellucid.codegen.run_nest import run_nest
from pellucid.codegen.verify_nest import verify_nest
from pellucid.errors import InternalError
from pellucid.ir.parser import IRSyntaxError, parse_kernel
from pellucid.machine import AVX2, AVX512
from pellucid.options import Options
from tests.golden import codegen_cases as cases

SOFTMAX = """\
nest softmax(x: f32[80], y: f32[80]) {
  axes i: 4, j: 20
  lanes 8 of j
  parallel i {
    scratch e
    start m
    vector j {
      a: f32 = load x[20*i + j]
      m: f32 = max a over j
    }
    finish m
    start z
    start z in blocks
    blocks j by 16 {
      vector j in from..to {
        a: f32 = load x[20*i + j]
        b: f32 = sub a, m
        e: f32 = exp b
        keep e
        z: f32 = sum e over j
      }
      close z
    }
    finish z
    vector j {
      recall e
      q: f32 = div e, z
      st: f32 = store y[20*i + j], q
    }
  }
}
"""

TRANSPOSED = """\
nest transposed(x: f32[200], y: f32[200], n: f32[10]) {
  axes i: 10, j: 20
  lanes 8 of j
  parallel i from..to by 8 {
    vector j {
      read square a along i
      open square st along i
      for i in from..to {
        a: f32 = load x[i + 10*j]
        b: f32 = neg a
        st: f32 = store y[i + 10*j], b
        c: f32 = const 1.0
        once: f32 = store n[i], c once j
      }
      write square st along i
    }
  }
}
"""

PRODUCT = """\
nest product(x: f32[60], y: f32[60], z: f32[100]) {
  axes i: 10, j: 10, k: 6
  lanes 8 of j
  parallel i lo..hi by 4, j from..to by 8 {
    call contract t into block[32] {
      a: f32 = load x[6*i + k]
      b: f32 = load y[6*j + k]
      p: f32 = mul a, b
      t: f32 = sum p over k
      sums: f32 = store block[8*i + j - 8*lo - from], t
    }
    for i in lo..hi {
      vector j in from..to {
        t: f32 = load block[8*i + j - 8*lo - from]
        st: f32 = store z[10*i + j], t
      }
    }
  }
}
"""


def run(text: str, *inputs: torch.Tensor, **how: bool) -> dict[str, torch.Tensor]:
    nest = parse_nest(text)
    memory = {param.name: torch.full([param.numel.value or 0], torch.nan) for param in nest.params}
    memory |= dict(zip(memory, inputs, strict=False))
    run_nest(nest, memory, {}, **how)
    return memory


@pytest.mark.parametrize("backwards", [False, True])
def test_nests_run(backwards: bool) -> None:
    x = torch.randn(4, 20)
    torch.testing.assert_close(run(SOFTMAX, x.flatten(), backwards=backwards)["y"].view(4, 20), x.softmax(1))
    x = torch.randn(200)
    memory = run(TRANSPOSED, x, backwards=backwards)
    assert torch.equal(memory["y"], -x) and torch.equal(memory["n"], torch.ones(10))
    x, y = torch.randn(10, 6), torch.randn(10, 6)
    product = run(PRODUCT, x.flatten(), y.flatten(), backwards=backwards)["z"].view(10, 10)
    torch.testing.assert_close(product, x @ y.T)


@pytest.mark.parametrize("text", [SOFTMAX, TRANSPOSED, PRODUCT])
def test_nests_print_as_they_were_read(text: str) -> None:
    nest = parse_nest(text)
    verify_nest(nest)
    assert parse_nest(print_nest(nest)) == nest
    assert print_nest(nest).replace("- from", "").replace("-from + ", "").split() == (
        text.replace("- from", "").replace("8*i + j - 8*lo ", "8*i + j - 8*lo").split()
    )


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("machine", [AVX2, AVX512])
def test_what_is_generated_is_sound(name: str, machine: object) -> None:
    for vectorize in (False, True):
        kernel = generate(parse_kernel(cases.CASES[name]), Options(vectorize=vectorize), machine)  # type: ignore[arg-type]
        verify_nest(kernel.nest)
        assert parse_nest(print_nest(kernel.nest)) == kernel.nest


BROKEN = [
    (SOFTMAX, "  parallel i {", "  for i {", "has not one parallel loop"),
    (SOFTMAX, "    vector j {\n      recall", "    parallel j {\n      recall", "parallel loop inside another"),
    (SOFTMAX, "    vector j {\n      recall", "    vector i {\n      recall", "walks over i inside a loop over it"),
    (SOFTMAX, "    vector j {\n      recall", "    for j {\n      recall", "its vectors are along j"),
    (SOFTMAX, "vector j in from..to", "vector j in lo..hi", "of which no loop chose a piece"),
    (SOFTMAX, "vector j in from..to", "vector j", "all of j inside a loop over its pieces"),
    (SOFTMAX, "    finish m\n", "", "reads m"),
    (SOFTMAX, "    start m\n", "", "adds to an accumulator that was not started"),
    (SOFTMAX, "      close z\n", "", "adds to a block that is not closed"),
    (SOFTMAX, "      close z\n    }\n", "    }\n    close z\n", "adds to a block that is not closed"),
    (
        SOFTMAX,
        "  parallel i {\n    scratch e\n    start m\n",
        "  start m\n  parallel i {\n    scratch e\n",
        "loops over i, j",
    ),
    (SOFTMAX, "        b: f32 = sub a, m\n        e: f32 = exp b\n", "        e: f32 = exp b\n", "reads b"),
    (SOFTMAX, "    finish z\n", "    finish z\n    finish z\n", "not finished once"),
    (SOFTMAX, "    scratch e\n", "", "has no scratch row"),
    (SOFTMAX, "        keep e\n", "", "recalls what was not kept"),
    (SOFTMAX, "y[20*i + j]", "y[j]", "stores what varies along i"),
    (
        SOFTMAX,
        "      st: f32 = store y[20*i + j], q\n    }",
        "    }\n    st: f32 = store y[20*i + j], q",
        "j is not known",
    ),
    (TRANSPOSED, " once j", "", "does not depend on j"),
    (TRANSPOSED, "      write square st along i\n", "", "opens a square that is not written"),
    (TRANSPOSED, "read square a along i", "read square a along j", "is not in a loop over blocks of j"),
    (TRANSPOSED, "      open square st along i\n", "", "was not opened"),
    (
        TRANSPOSED,
        "      read square a along i\n",
        "      for i in from..to {\n        read square a along i\n      }\n",
        "blocks of i",
    ),
    (
        TRANSPOSED,
        "        b: f32 = neg a\n",
        "        b: f32 = neg a\n        st: f32 = store y[i + 10*j], b\n",
        "a store twice",
    ),
    (PRODUCT, "    for i in lo..hi {", "    for i {", "all of i inside a loop over its pieces"),
    (PRODUCT, "vector j in from..to", "vector j in lo..hi", "of which no loop chose a piece"),
    (TRANSPOSED, "store n[i]", "store n[i + lo]", "lo is not known"),
]


@pytest.mark.parametrize(("text", "old", "new", "problem"), BROKEN)
def test_broken_nests_are_refused(text: str, old: str, new: str, problem: str) -> None:
    assert text.count(old) == 1
    with pytest.raises(InternalError, match=re.escape(problem)):
        verify_nest(parse_nest(text.replace(old, new)))


@pytest.mark.parametrize(
    ("text", "old", "new", "problem"),
    [
        (
            SOFTMAX,
            "  parallel i {\n    scratch e\n    start m\n",
            "  start m\n  parallel i {\n    scratch e\n",
            "reduces 40",
        ),
        (SOFTMAX, "      close z\n", "", "its last block was not closed"),
        (SOFTMAX, "        keep e\n", "", "recalls what was not kept"),
        (TRANSPOSED, "st: f32 = store y[i + 10*j], b", "st: f32 = store y[i + 10*j], b once i", "rows"),
        (TRANSPOSED, "x: f32[200]", "x: f32[199]", "a square reaches outside"),
        (PRODUCT, "for i in lo..hi", "for i in from..to", "from..to is a piece of j, not of i"),
    ],
)
def test_a_run_says_what_a_broken_nest_does(text: str, old: str, new: str, problem: str) -> None:
    assert text.count(old) == 1
    with pytest.raises(InternalError, match=re.escape(problem)):
        run(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scratch e", "scratch f", "unknown line 'f'"),
        ("parallel i", "parallel h", "unknown axis 'h'"),
        ("finish m", "finnish m", "did you mean finish?"),
        ("blocks j by 16", "blocks j", "expected 'by'"),
        ("from..to", "from..hi", "expected 'to'"),
        ("lanes 8 of j", "lanes 8.5 of j", "expected a whole number"),
        ("start z in blocks", "start z in rows", "expected 'blocks'"),
    ],
)
def test_text_that_is_no_nest_is_refused_with_its_place(old: str, new: str, message: str) -> None:
    with pytest.raises(IRSyntaxError, match=re.escape(message)):
        parse_nest(SOFTMAX.replace(old, new))


def test_a_call_without_its_line_is_refused() -> None:
    with pytest.raises(IRSyntaxError, match="the call has no line u"):
        parse_nest(PRODUCT.replace("call contract t", "call contract u"))
