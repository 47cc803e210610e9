"""The programs of a run folder: each runs in a fresh process and says what is true of it."""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from pellucid.capture.torch_compat import fake_graph
from pellucid.options import make_options
from pellucid.pipeline import compile_graph
from pellucid.runnable import load_kernels, saved
from pellucid.trace.output_code import HELPERS

PROGRAMS = ("fx_graph_runnable.py", "fx_graph_transformed.py", "output_code.py")

# Runs the programs named, one after the other, in a process that has compiled nothing before.
RUNNER = """
import runpy, sys
for path in sys.argv[1:]:
    print("==", path, flush=True)
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    print("exit", code, flush=True)
"""


class Net(nn.Module):
    """Convolution, batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Words(nn.Module):
    """An embedding, read with integers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.last(self.table(ids).view(-1, 16)), 0.25).softmax(-1).log()


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2).add_(1)
    return x.log().sqrt()


TABLE = torch.linspace(-1, 1, 30 * 30).view(30, 30).clone()
FEW = torch.tensor([1.0, float("inf")])


def constants(x: torch.Tensor) -> torch.Tensor:
    return x @ TABLE + FEW[0] + torch.where(FEW > 2, 1.0, 3.0).sum()


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,))


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).nonzero().float().exp() * 2


def reads_nan(x: torch.Tensor) -> torch.Tensor:
    return x.log() + 1


def jagged(values: torch.Tensor) -> torch.Tensor:
    return (torch.nested.nested_tensor([values[:3], values[3:]], layout=torch.jagged) * 2).sin().values()


# By name: the program, its arguments, whether gradients are wanted, and `dynamic=`.
MODELS: dict[str, tuple[Callable[[], Any], tuple[torch.Tensor, ...], bool, bool | None]] = {
    "trained": (Net, (torch.randn(4, 3, 9, 9),), True, None),
    "trained_dynamic": (Net, (torch.randn(4, 3, 9, 9),), True, True),
    "eval_dynamic": (lambda: Net().eval(), (torch.randn(4, 3, 9, 9),), False, True),
    "words": (Words, (torch.randint(0, 50, (3, 7)),), True, None),
    "in_place": (lambda: in_place, (torch.rand(5, 6),), False, None),
    "constants": (lambda: constants, (torch.rand(5, 30),), False, None),
    "branches": (lambda: branches, (torch.rand(5, 6),), False, None),
    "data_dependent": (lambda: data_dependent, (torch.rand(4, 3),), False, None),
    "jagged": (lambda: jagged, (torch.rand(8, 4),), False, None),
    "reads_nan": (lambda: reads_nan, (torch.tensor([-1.0, 1.0, 0.0]),), False, None),
}


def trace(name: str, folder: Path) -> None:
    make, args, backward, dynamic = MODELS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled: Any = torch.compile(make(), backend="pellucid", dynamic=dynamic, options={"trace": str(folder)})
    with torch.set_grad_enabled(backward):
        result = compiled(*[arg.clone() for arg in args])
    if backward:
        result.sum().backward()


def run_all(*programs: Path) -> dict[Path, tuple[str, int]]:
    """What each program prints, and its exit code."""
    command = [sys.executable, "-c", RUNNER, *map(str, programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^== (.+)\n((?:(?!exit ).*\n)*)exit (\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == len(programs), done.stdout + done.stderr
    return {Path(path): (text, int(code)) for path, text, code in found}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in MODELS:
        trace(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def told(runs: Path) -> dict[Path, tuple[str, int]]:
    return run_all(*sorted(path for path in runs.rglob("*.py") if path.name in PROGRAMS))


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_every_program_says_something_true_and_finite(runs: Path, told: dict[Path, tuple[str, int]], name: str) -> None:
    mine = {path: said for path, said in told.items() if path.is_relative_to(runs / name)}
    assert {path.name for path in mine} == set(PROGRAMS)
    for path, (text, code) in mine.items():
        assert code == 0, f"{path}: {text}"
        assert re.search(r"^\d+\.\d+ [um]s per call", text, re.MULTILINE), text
        expected = "no kernel is edited" if path.name == "output_code.py" else "(ok|rounding): .*"
        assert re.search(f"^verdict: {expected}$", text, re.MULTILINE), text
        assert name == "reads_nan" or ("nan" not in text and "not finite" not in text), text


def test_output_code_computes_what_the_compiled_program_does(runs: Path) -> None:
    (path,) = (runs / "constants").rglob("output_code.py")
    scope: dict[str, Any] = {"__name__": "output_code", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    (result,) = scope["call"]([*scope["make_inputs"](), *scope["make_constants"]()], load_kernels(scope["SOURCES"]))
    torch.testing.assert_close(result, constants(*MODELS["constants"][1]))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "before", "after"), [("trained", "pv::mul(", "pv::add("), ("in_place", "pv::sqrt(", "pv::neg(")]
)
def test_an_edited_kernel_is_told_by_name_with_what_it_changes(
    runs: Path, tmp_path: Path, name: str, before: str, after: str
) -> None:
    original = next(path for path in sorted((runs / name).rglob("output_code.py")) if before in path.read_text())
    shutil.copytree(original.parents[2], tmp_path / "run")
    folder = tmp_path / "run" / "graphs" / original.parent.name
    text = original.read_text()
    (folder / "output_code.py").write_text(text.replace(before, after, 1))
    (folder / "commented.py").write_text(text.replace("return 0;", "return 0;  // as before"))
    said = run_all(folder / "output_code.py", folder / "commented.py")
    edited, code = said[folder / "output_code.py"]
    assert code == 1 and re.search(r"^verdict: edited k_\w+: differs in (out|in)put", edited, re.MULTILINE), edited
    assert "elements differ, by at most " in edited and "unedited rms " in edited
    unedited, code = said[folder / "commented.py"]
    assert code == 0 and "verdict: no kernel is edited" in unedited


@pytest.mark.sampled
def test_an_edit_that_does_not_compile_is_told_at_its_line(runs: Path, tmp_path: Path) -> None:
    original = next(
        path for path in sorted((runs / "in_place").rglob("output_code.py")) if "pv::sqrt(" in path.read_text()
    )
    shutil.copytree(original.parents[2], tmp_path / "run")
    program = tmp_path / "run" / "graphs" / original.parent.name / "output_code.py"
    program.write_text(original.read_text().replace("pv::sqrt(", "pv::sqroot(", 1))
    said, code = run_all(program)[program]
    (number,) = (n for n, line in enumerate(program.read_text().splitlines(), 1) if "pv::sqroot(" in line)
    error, line, verdict = said.splitlines()
    assert code == 1 and error.startswith(f"{program}:{number}: error: ") and "sqroot" in error
    assert "pv::sqroot(" in line and re.fullmatch(r"verdict: edited k_\w+: does not compile", verdict)


@pytest.mark.sampled
def test_an_edited_graph_is_compiled_as_edited(runs: Path, tmp_path: Path) -> None:
    (original,) = (runs / "constants").rglob("fx_graph_runnable.py")
    shutil.copytree(original.parents[2], tmp_path / "run")
    folder = tmp_path / "run" / "graphs" / original.parent.name
    text = original.read_text()
    (folder / "edited.py").write_text(re.sub(r"return \((\w+),\)", r"return (\1 if \1.dim() > 3 else \1.exp(),)", text))
    said, code = run_all(folder / "edited.py")[folder / "edited.py"]
    assert code == 0 and "verdict: " in said
    assert (folder / "edited.py").read_text() != text


@pytest.mark.sampled
def test_a_graph_that_was_never_called_runs_with_drawn_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("pellucid.pipeline.generate", broken)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="planted"):
            trace("eval_dynamic", tmp_path)
    (program,) = tmp_path.rglob("fx_graph_runnable.py")
    assert saved(str(program))["inputs"] is None
    text, code = run_all(program)[program]
    assert code == 0 and re.search("^verdict: (ok|rounding)", text, re.MULTILINE), text


@pytest.mark.sampled
def test_a_program_that_left_its_folder_says_so(runs: Path, tmp_path: Path) -> None:
    program = next(runs.rglob("output_code.py"))
    alone = tmp_path / "alone.py"
    alone.write_text(program.read_text())
    done = subprocess.run([sys.executable, str(alone)], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "runs in its own run folder" in done.stderr


def free_names(program: Path) -> set[str]:
    """What the function `call` of a program names without having given it a value, its parameters included."""
    (call,) = (n for n in ast.parse(program.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "call")
    names = [node for node in ast.walk(call) if isinstance(node, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Load)} - {n.id for n in names if isinstance(n.ctx, ast.Store)}


def test_no_program_names_a_helper_that_tensors_may_take(runs: Path) -> None:
    used = {name for program in runs.rglob("output_code.py") for name in free_names(program)}
    assert {"view", "torch", "kernels", "args"} <= used
    assert used <= HELPERS | set(dir(builtins))


@pytest.mark.parametrize("name", sorted({*HELPERS, "view_", "view__", "inf", "call", "saved"}))
def test_a_tensor_may_have_any_name(name: str, tmp_path: Path) -> None:
    graph = torch.fx.Graph()
    x, other = graph.placeholder(name), graph.placeholder(f"{name}_")
    product = graph.call_function(torch.ops.aten.mm.default, (x, other))
    graph.output((graph.call_function(torch.ops.aten.exp.default, (product,)),))
    args = [torch.rand(3, 4), torch.rand(4, 5)]
    module = fake_graph(torch.fx.GraphModule({}, graph), args)
    run, _ = compile_graph(module, "inference", make_options({"trace": str(tmp_path)}))
    expected = run(list(args))
    (path,) = tmp_path.rglob("output_code.py")
    scope: dict[str, Any] = {"__name__": "output_code", "__file__": str(path)}
    exec(path.read_text(), scope)
    assert torch.equal(scope["call"](scope["make_inputs"](), load_kernels(scope["SOURCES"]))[0], expected[0])


def test_changing_what_is_shared_is_recorded_before_the_call(tmp_path: Path) -> None:
    x = torch.arange(6.0)
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda a, b: a.add_(1) * b, backend="pellucid", options={"trace": str(tmp_path)})
    compiled(x[:4], torch.ones(4))
    compiled(x[:4], torch.full((4,), 9.0))
    (path,) = tmp_path.rglob("values.json")
    first, second = saved(str(path))["inputs"]
    assert torch.equal(first, torch.arange(4.0)) and torch.equal(second, torch.ones(4))
