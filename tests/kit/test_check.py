"""`check`: healthy programs are good, planted faults are named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo import register_backend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pellucid.debug import Verdict, check
from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.check import check_isolated
from pellucid.kit.programs.case import load_case
from pellucid.kit.programs.graphs import InFloat64, widened
from pellucid.kit.runs.target import Request
from tests.kit.planted import FAULTS
from tests.kit.score import MEMORY, request_of, seconds_of

HERE = Path(__file__).parent
SLOWER = pytest.param("inductor", marks=pytest.mark.slow)
BACKENDS = ["pellucid", SLOWER, "aot_eager"]
QUICK = {"pellucid_neg_crashes", "pellucid_stale_weight"}
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


def pellucid(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from pellucid.cli import main; main()", *arguments], capture_output=True, text=True
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTY)
def test_planted_faults_are_found(name):
    fault = FAULTS[name]
    found = check_isolated(request_of(fault), seconds_of(fault), MEMORY)
    assert found.verdict.value == fault.verdict
    if found.verdict in (Verdict.CRASH, Verdict.HANG):
        assert found.step is not None and any(fault.culprit in node for node in found.step.fx_nodes)  # the whole kernel
        assert any("planted.py:" in line for line in found.step.user_lines)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reordered_sum_in_bf16_is_rounding(backend):
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin() * x.exp(), -1).sum(0) / x.mean()

    torch.manual_seed(0)
    assert check(function, (torch.rand(33, 1000, dtype=torch.bfloat16),), backend=backend).good


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", SLOWER])
def test_gradients_and_variations_of_the_inputs(backend):
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))
    found = check(model, (torch.randn(8, 16),), backend=backend, backward=True, fuzz=3)
    assert found.good and found.tried == 4
    assert {"output 0", "gradient of 0.weight", "gradient of 2.bias"} <= {output.name for output in found.outputs}


def test_changed_inputs_shared_memory_and_random_numbers():
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x.add_(1)
        return y.T, torch.nn.functional.dropout(y, 0.5), x.view(-1)

    found = check(function, (torch.randn(3, 4), torch.randn(5, 6)))
    assert found.verdict is Verdict.OK
    assert "input 0 (changed)" in {output.name for output in found.outputs}


@register_backend
def row_by_row_TESTING_ONLY(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., list[torch.Tensor]]:
    return lambda *args: [each.contiguous() for each in module(*args)]


@register_backend
def shared_TESTING_ONLY(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., list[torch.Tensor]]:
    return lambda *args: [module(*args)[0]] * 2


@register_backend
def unrounded_TESTING_ONLY(module: torch.fx.GraphModule, _inputs: object) -> Callable[..., list[torch.Tensor]]:
    """As a compiler does that fuses all of it; all results are float32."""

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        wide = widened(args)
        with InFloat64():
            results = module(*wide)
        return [each.float() for each in results]

    return run


@pytest.mark.parametrize("backend", ["row_by_row_TESTING_ONLY", "shared_TESTING_ONLY"])
def test_a_layout_that_differs_names_the_operator_that_makes_the_result(backend):
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.t() * 2
        return h.cos(), torch.cos(h)

    found = check(function, (torch.randn(3, 4),), backend=backend)
    assert found.verdict is Verdict.WRONG and found.step is not None
    assert all(each.judgement.misplaced for each in found.outputs if not each.verdict.good)
    assert found.step.op == "aten::cos" and "test_check.py:" in found.step.user_lines[0]


def test_roundings_that_a_fusing_compiler_leaves_out_are_no_fault():
    def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.bfloat16() * 3).float().sum(), (x.half() * 3).float().sum(0)

    torch.manual_seed(0)
    x = torch.randn(1400, 100)
    found = check(sums, (x,), backend="unrounded_TESTING_ONLY")
    assert found.verdict is Verdict.ROUNDING, found


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_operators_on_graphs_which_eager_mode_compiles_by_itself():
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)) + 1

    def attention(x: torch.Tensor) -> torch.Tensor:
        return flex_attention(x, x + 1, x * 2, block_mask=blocks)

    assert check(branches, (torch.rand(64),)).good
    assert check(attention, (torch.randn(1, 2, 32, 16),)).good


def test_the_command_prints_a_verdict_and_json():
    target = f"{HERE}/planted.py:pellucid_neg_wrong"
    run = pellucid("check", target, "--json")
    assert run.returncode == 1, run.stderr
    assert json.loads(run.stdout)["verdict"] == "wrong"
    assert json.loads(run.stdout)["outputs"][0]["name"] == "output 0"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py:make", "there is no file nothing.py"),
        ("planted.py", "is not a program"),
        (f"{HERE}/planted.py", "or -- python .*planted.py"),
        (str(HERE), "is not a run"),
        (f"{HERE}/planted.py:nothing", "has no function nothing"),
        (f"{HERE}/__init__.py:__name__", "has no function __name__"),
        (f"{HERE}/planted.py:drop", "cannot be called without graph, target"),
    ],
)
def test_a_target_that_is_none(target, message):
    with pytest.raises(UserError, match=message):
        load_case(target)


def test_a_name_that_is_nearly_right_is_told_the_right_one():
    with pytest.raises(UserError) as raised:
        load_case(f"{HERE}/planted.py:mixd")
    assert raised.value.hint == "did you mean mixed?"


def test_arguments_are_a_sequence():
    with pytest.raises(UserError, match="args must be a tuple or list, not Tensor"):
        check(torch.relu, torch.randn(4))  # type: ignore[arg-type]


@pytest.mark.sampled
def test_a_target_that_is_none_is_an_error_of_the_tool():
    run = pellucid("check", "nothing.py:make")
    assert run.returncode == 255 and "there is no file" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.sampled
def test_a_program_that_fails_in_eager_mode_is_not_judged(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import torch\ndef make():\n    return torch.mm, (torch.ones(2, 3), torch.ones(2, 3))\n")
    with pytest.raises(UserError, match="fails in eager mode: RuntimeError"):
        check_isolated(Request(f"{file}:make"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make():\n    raise OSError('no data')\n", ":make, which creates the program, fails: OSError: no data"),
        ("raise OSError('no data')\n", "broken.py cannot be imported: OSError: no data"),
    ],
)
def test_a_target_that_fails_before_there_is_a_program_says_so_with_its_lines(tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(NotJudged) as refused:
        load_case(f"{tmp_path / 'broken.py'}:make")
    assert refused.value.message.endswith(message)
    assert "raise OSError('no data')" in str(refused.value.context["in your code"])


def test_a_target_that_ends_its_process_is_not_judged(tmp_path):
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(NotJudged, match=r"cannot be imported: RuntimeError: importing .* ended with sys\.exit\(3\)"):
        load_case(f"{tmp_path / 'ends.py'}:make")
    (tmp_path / "makes.py").write_text("import sys\ndef make():\n    sys.exit('no data')\n")
    with pytest.raises(NotJudged, match=r"which creates the program, fails: .* ended with sys\.exit\('no data'\)"):
        load_case(f"{tmp_path / 'makes.py'}:make")


BROKEN = """
import torch

def fails():
    return torch.mm, (torch.ones(2, 3), torch.ones(2, 3))

def forgets():
    calls = [0]
    def f(x):
        calls[0] += 1
        return x * calls[0]
    return f, (torch.ones(3),)

def imports():
    import a_module_that_is_not_there

def fine():
    return torch.cos, (torch.randn(7),)
"""
ALL = ["check", "bisect", "explain", "capture", "cosim", "match", "minify", "testgen"]
CANNOT_BE_JUDGED = [
    ("check", "fails"),
    *(pytest.param("check", name, marks=pytest.mark.slow) for name in ("forgets", "imports")),
    ("explain", "fails"),
]


@pytest.fixture
def broken(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    return file


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *CANNOT_BE_JUDGED,
        *(pytest.param(command, "fails", marks=pytest.mark.slow) for command in ALL[1:] if command != "explain"),
    ],
)
def test_what_cannot_be_judged_exits_with_125_so_that_git_skips_the_commit(command, name, broken, tmp_path):
    run = pellucid(command, f"{broken}:{name}", *(["-o", str(tmp_path / "run")] if command != "check" else []))
    assert run.returncode == 125, (run.stdout, run.stderr)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "backend"),
    [
        ("check", "pellucid"),
        *(pytest.param("check", "inductor", marks=pytest.mark.slow),),
        *(pytest.param(command, "pellucid", marks=pytest.mark.slow) for command in ALL[1:]),
    ],
)
def test_a_compiler_that_cannot_be_found_is_no_verdict_on_the_program(command, backend, broken, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PELLUCID_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    run = pellucid(command, f"{broken}:fine", "--backend", backend, "-o", str(tmp_path / "run"))
    assert run.returncode == 255 and "hint: apt-get install g++" in run.stderr, (run.stdout, run.stderr)
