"""`explain`: from the C++ compiler's message to the user's line; what was not done, and why."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.ir.origin import Origin, UserLine
from pellucid.kit.debug.explain import explain
from pellucid.kit.debug.frontend import listening
from pellucid.kit.debug.reasons import find_reasons, reasons
from pellucid.kit.runs.target import Request, subject_for
from pellucid.kit.subjects.refusals import Refusal, Refused, Value

HERE = Path(__file__).parent


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_planted_compile_error_is_led_back_to_the_operator(backend):
    found = reasons(Request(f"{HERE}/planted.py:{backend}_neg_does_not_compile", backend))
    assert found is not None
    assert found.ir_op == "ops.neg" and found.fx_node == "neg" and "neg" in found.kernel
    assert "planted.py:" in found.user_line and found.cause.startswith("type mismatch")


@pytest.mark.sampled
def test_the_tutorials_compile_error(tmp_path):
    file = tmp_path / "tutorial.py"
    file.write_text(
        "import torch\n"
        "from torch._inductor.codegen.cpp import CppOverrides\n"
        "def foo1(x1, x2):\n"
        "    a = torch.neg(x1)\n"
        "    b = torch.maximum(x2, a)\n"
        "    return torch.cat([b], dim=0)\n"
        "def make():\n"
        "    CppOverrides.neg = staticmethod(lambda x: f'-{x}')\n"
        "    return foo1, (torch.ones(1, 8, dtype=torch.uint8), torch.ones(8390, 8, dtype=torch.uint8))\n"
    )
    found = reasons(Request(f"{file}:make", "inductor", {"cpp.simdlen": 1}))
    assert found is not None
    assert "max_propagate_nan" in found.error_line  # where the compiler stops is not what is to blame
    assert found.cpp_line.endswith("auto tmp2 = -tmp1;")
    assert (found.ir_op, found.fx_node, found.user_line) == ("ops.neg", "neg", f"{file}:4")
    assert "unsigned char and int" in found.cause


WITHOUT_VECTORS = """
import torch
def make():
    def several(x, shorts, columns):
        element_by_element = torch.special.zeta(x.abs() + 2, 2.0)
        not_in_vectors = shorts.sum()
        too_short = x[:, :2].sin()
        strided = columns.exp()
        return element_by_element, not_in_vectors, too_short, strided
    columns = torch.randn(64, 300)[:, ::3]
    return several, (torch.randn(100, 300), torch.ones(70_000, dtype=torch.int16), columns)
"""


@pytest.mark.slow
def test_what_inductor_does_not_vectorise_has_a_cause(tmp_path):
    file = tmp_path / "several.py"
    file.write_text(WITHOUT_VECTORS.strip())
    found = vectorisation_refusals(Request(f"{file}:make", "inductor"))
    parts = {4: "ops.zeta has no vector form", 5: "no vectors of int16", 7: "1 of 3 operations"}
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # with AVX2, two floats are a quarter of a vector
        parts[6] = "shorter than a quarter"
    for (line, part), refusal in zip(sorted(parts.items()), found, strict=True):
        assert part in refusal.cause and refusal.user_line == f"{file}:{line}"


@pytest.mark.slow
def test_vectors_that_are_forbidden_are_the_cause(tmp_path):
    file = tmp_path / "several.py"
    file.write_text(WITHOUT_VECTORS.strip())
    found = vectorisation_refusals(Request(f"{file}:make", "inductor", {"cpp.simdlen": 1}))
    assert len(found) == 4 and all("cpp.simdlen" in each.cause for each in found)


def vectorisation_refusals(request: Request) -> list[Refusal]:
    return [each for each in reasons(request).refusals if each.kind == "vectorisation"]


def test_the_operand_with_the_wrong_type_is_to_blame():
    source = "auto tmp0 = p[0];\nauto tmp1 = -tmp0;\nauto tmp2 = f(tmp0, tmp1);\n"
    origin = Origin(("neg",), (UserLine("model.py", 3),))
    values = {
        "tmp0 = p[0]": Value("load", "unsigned char"),
        "tmp1 = -tmp0": Value("neg", "unsigned char", origin),
        "tmp2 = f(tmp0, tmp1)": Value("maximum", "unsigned char"),
    }
    message = "no matching function for call to ‘f(unsigned char&, int&)’"
    found = explain(Refused("k", source, 3, message, f"k.cpp:3:1: error: {message}", values))
    assert (found.cpp_line, found.ir_op, found.user_line) == ("2: auto tmp1 = -tmp0;", "ops.neg", "model.py:3")


def test_without_operands_to_tell_apart_the_line_of_the_error_is_to_blame():
    found = explain(Refused("k", "auto tmp0 = p[0]\n", 1, "expected ‘;’", "k.cpp:1:1: error: expected ‘;’", {}))
    assert found.cpp_line == "1: auto tmp0 = p[0]" and found.cause == "the kernel is not valid C++"


@pytest.mark.sampled
def test_what_was_not_done_is_told():
    found = reasons(Request(f"{HERE}/planted.py:mixed"))
    assert found.good
    kinds = {refusal.kind for refusal in found.refusals}
    assert {"fusion", "fallback"} <= kinds and all(refusal.cause for refusal in found.refusals)


@pytest.mark.sampled
def test_the_command_says_what_is_to_blame():
    target = f"{HERE}/planted.py:pellucid_neg_does_not_compile"
    command = [sys.executable, "-c", "from pellucid.cli import main; main()", "explain", target]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and "ops.neg" in run.stdout and "planted.py" in run.stdout, run.stderr


BROKEN = """
import torch

def make():
    def shown(x):
        y = x.sin()
        print("shown")
        return y.cos()
    return shown, (torch.randn(5),)

def chosen():
    def choose(x):
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return y + 1
    return choose, (torch.randn(5),)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_graph_breaks_of_a_program_are_told(backend, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.strip())
    found = [each for each in reasons(Request(f"{file}:make", backend)).refusals if each.kind == "graph break"]
    assert [each.user_line for each in found] == [f"{file}:6"] and "print" in found[0].cause


def test_a_recompilation_of_pytorchs_own_code_is_told_where_the_user_called(tmp_path):
    torch._dynamo.reset()
    file = tmp_path / "again.py"
    file.write_text(
        "import torch\n"
        "layers = torch.compile(torch.nn.Sequential(torch.nn.Softmax(-1)), backend='eager')\n"
        "def again(x):\n"
        "    return layers(x)\n"
    )
    with listening() as found:
        again = runpy.run_path(str(file))["again"]
        again(torch.ones(3, 4)), again(torch.ones(5, 4))
    (told,) = found
    assert told.subject == ("called by again",) and told.user_line == f"{file}:4" and "size mismatch" in told.cause


@pytest.mark.slow
def test_what_python_calls_between_programs_is_told(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.strip())
    (called,) = [each for each in reasons(Request(f"{file}:chosen")).refusals if each.kind == "call by Python"]
    assert called.subject == ("cond",) and "not an operator of the dispatcher" in called.cause
    assert called.user_line == f"{file}:12"
    command = [sys.executable, "-c", "from pellucid.cli import main; main()", "explain", f"{file}:chosen"]
    assert "called by Python between programs" in subprocess.run(command, capture_output=True, text=True).stdout


def test_how_graphs_start(tmp_path):
    """Like the program itself, which an earlier process may have compiled."""
    file = tmp_path / "program.py"
    file.write_text(f"import torch\ndef make():\n    return lambda x: x * {random.random()}, (torch.ones(3),)\n")
    request = Request(f"{file}:make", "pellucid", {"reuse": True})
    (first,) = find_reasons(request).starts
    assert first.outcome == "missed" and first.reason == "nothing like it was compiled before"
    function, args = runpy.run_path(str(file))["make"]()
    subject_for(request).wrap(function)(*args)
    (second,) = find_reasons(request).starts
    assert str(second) == "missed: what was compiled before differs in gradients"
    torch._dynamo.reset()
    with torch.no_grad():
        subject_for(request).wrap(function)(*args)
    told = find_reasons(request)
    assert [str(each) for each in told.starts] == ["found: an earlier process compiled it"]
    assert told.starts[0].reason in str(told)
    (last,) = find_reasons(Request(f"{file}:make", "pellucid", {"reuse": False})).starts
    assert str(last) == "bypassed: the option `reuse` is off"


def test_kernels_in_several_ways_are_told(tmp_path):
    file = tmp_path / "program.py"
    function = f"lambda x: x.permute(1, 0, 2).contiguous().exp() * {random.random()}"
    file.write_text(f"import torch\ndef make():\n    return {function}, (torch.ones(24, 40, 64),)\n")
    told = find_reasons(Request(f"{file}:make", "pellucid", {"variants": "on"}))
    assert told.good and len(told.variants) == 1 and "4 kernels are being tried" in told.variants[0]
    assert "kernels with several variants" in str(told)
    assert find_reasons(Request(f"{file}:make", "pellucid")).variants == ()
