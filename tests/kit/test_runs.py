"""Runs: captured programs are data that replay without the program, and nothing in them executes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pellucid.debug import Program
from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.bisect import NOTHING, bisect
from pellucid.kit.debug.capture import capture, replay, step_times
from pellucid.kit.debug.check import check_isolated
from pellucid.kit.debug.cosim import Other, cosim_isolated
from pellucid.kit.debug.diff import diff
from pellucid.kit.debug.match import match
from pellucid.kit.debug.reasons import reasons
from pellucid.kit.debug.script import capture_script
from pellucid.kit.debug.simulation import LIVE
from pellucid.kit.judge.judge import near
from pellucid.kit.judge.reference import Reference
from pellucid.kit.programs.case import Case
from pellucid.kit.programs.graphs import calls_of, interpret
from pellucid.kit.runs.run import open_run
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.subjects.registry import subject_of
from pellucid.trace.folder import write_json
from pellucid.trace.schema import FILES, GRAPH_FILES
from pellucid.trace.tensors import TensorStore
from tests.kit.planted import mixed

HERE = Path(__file__).parent
MIXED = f"{HERE}/planted.py:mixed"

SCRIPT = """
import sys
import torch

@torch.compile(backend="inductor", mode="max-autotune")
def f(x, y):
    return torch.softmax(x @ y, -1) + x.sum()

def broken(x):
    y = x.sin()
    print("a graph break", sys.argv[1:])
    return y.cos()

model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)))
if __name__ == "__main__":
    for n in (4, 5, 6):
        f(torch.randn(n, 8), torch.randn(8, 8))
    model(torch.randn(3, 8)).square().sum().backward()
    torch.compile(broken)(torch.randn(5))
"""


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "mixed"
    found = capture(Request(MIXED), folder, intermediates=True)
    assert found.good and found.kernels == 2 and found.megabytes < 1
    return folder


PROGRAMS = """
import runpy, sys
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        print("exit", end.code)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_programs_of_a_run_give_the_models_result(backend, mixed_run, tmp_path):
    """In a fresh process, with the inputs and constants that were captured."""
    run = mixed_run
    if backend != "pellucid":
        run = tmp_path / "run"
        assert capture(Request(MIXED, backend), run).graphs[0].seconds, "the time of each stage"
    (graph,) = (run / "graphs").iterdir()
    assert GRAPH_FILES.keys() - {each.name for each in graph.iterdir()} <= {
        "segments.txt",
        "ir_frozen.txt",
        "execution_plan.txt",
        "provenance.json",
    }
    assert (graph / "ir_pre_fusion.txt").read_text() != (graph / "ir_post_fusion.txt").read_text()
    loops = (graph / "ir_post_fusion.txt").read_text()
    kernels = [row["kernel"] for row in open_run(run).table("kernels.csv") if row["symbol"]]
    assert kernels and all(f"\n  kernel {name}" in loops for name in kernels)
    # named after operators of before decompositions, as in the program itself
    assert backend == "pellucid" or any("softmax" in name for name in kernels)
    names = ("fx_graph_runnable.py", "fx_graph_transformed.py", "output_code.py")
    called = [sys.executable, "-c", PROGRAMS, *(str(graph / name) for name in names)]
    said = subprocess.run(called, capture_output=True, text=True).stdout
    assert said.count("verdict: ") == said.count("exit 0") == 3, said
    assert "rms " in said if backend == "pellucid" else said.count("verdict: rounding") == 3


@pytest.mark.sampled
def test_what_the_compiler_traces_is_a_target(tmp_path):
    torch._dynamo.reset()
    fn, args = mixed()
    with torch.no_grad():
        torch.compile(fn, backend="pellucid", options={"trace": str(tmp_path), "fusion": False})(*args)
    (folder,) = tmp_path.iterdir()
    run = open_run(folder)
    (graph,) = run.graphs()
    assert run.options_but(("reuse",)) == {"fusion": False} and run.calls(graph.name)
    assert check_isolated(Request(str(folder), run.backend, run.options_but(()))).good


@pytest.fixture(scope="module")
def script_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    capture_script([sys.executable, str(folder / "script.py"), "word"], folder / "run", "pellucid", {}, 300)
    return folder / "run"


@pytest.mark.sampled
def test_a_run_replays_as_it_was(mixed_run):
    found = replay(Request(str(mixed_run)))
    (graph,) = found.graphs
    assert found.good and graph.before == graph.checked.verdict.value and not graph.moved
    assert {path.name for path in mixed_run.iterdir()} <= FILES.keys()


def test_a_run_without_numbers_is_not_said_to_agree(mixed_run, tmp_path):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(mixed_run), str(copy)], check=True)
    next(copy.rglob("numbers.json")).unlink()
    (graph,) = replay(Request(str(copy))).graphs
    assert not graph.recorded and not graph.moved


def test_a_run_has_the_graphs_of_the_program(mixed_run):
    (ours,), _ = captured(Request(str(mixed_run)))
    (theirs,), _ = captured(Request(MIXED))
    assert ours.module.code == theirs.module.code and ours.kind == theirs.kind
    for a, b in zip(interpret(ours.module, ours.inputs), interpret(theirs.module, theirs.inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_commands_take_a_run(mixed_run):
    request = Request(str(mixed_run))
    assert check_isolated(request).good
    assert bisect(request).component == NOTHING
    assert reasons(request).good
    assert all("planted.py:" in line for kernel in match(request).kernels for line in kernel.user_lines)
    assert cosim_isolated(request, LIVE, other=Other(str(mixed_run))).good
    assert not check_isolated(Request(str(mixed_run), "relu_accuracy_error_TESTING_ONLY")).failure


def test_what_changed_between_two_runs(mixed_run, tmp_path):
    capture(Request(MIXED, options={"fusion": False}), tmp_path / "run")
    same, other = diff(open_run(mixed_run), open_run(mixed_run)), diff(open_run(mixed_run), open_run(tmp_path / "run"))
    assert same.good and not same.changed
    kinds = {change.kind for change in other.changed}
    assert {"environment", "kernel", "decision", "plan"} <= kinds and not {"graph", "result", "number"} & kinds
    decisions = {change.what: change for change in other.changed if change.kind == "decision"}
    assert all(" fusion of " in what or " vectorisation of " in what for what in decisions), (
        "others are of the new kernels"
    )
    reasons_of_flip = next(change.before for what, change in decisions.items() if what.endswith("fusion of div flip"))
    assert "do not line up" in reasons_of_flip and "depends on a reduction" in reasons_of_flip


@pytest.mark.slow
def test_another_backend_is_compared_with():
    found = cosim_isolated(Request(MIXED), other=Other("inductor"))
    assert found.good and found.differences and found.against == "inductor"


@pytest.mark.sampled
def test_other_options_show_which_of_two_is_wrong():
    found = cosim_isolated(
        Request(f"{HERE}/planted.py:pellucid_vector_exp"), other=Other("pellucid", {"vectorize": False})
    )
    first = found.first_divergence
    assert first is not None and "clamp" in first.fx_node and "vectorize=False" in found.against


def test_steps_of_a_module_with_parameters_are_timed_under_inductor():
    subject = subject_of("inductor")
    with torch.no_grad():
        (graph,) = subject.graphs(Case.of(nn.Linear(4, 4), (torch.ones(2, 4),)))
    found = step_times(subject, graph)
    assert found and all(seconds > 0 for seconds in found.values())


@pytest.mark.slow
def test_a_script_is_captured_as_it_is(script_run):
    run = open_run(script_run)
    kinds = [run.graph(name).kind for name in run.names]
    assert kinds.count("forward") == kinds.count("backward") == 1 and kinds.count("inference") == 4
    found = reasons(Request(str(script_run)))
    told = {(each.kind, each.cause.split(":")[0]) for each in found.refusals if "script.py:" in each.user_line}
    assert any(kind == "recompilation" for kind, _ in told) and any(kind == "graph break" for kind, _ in told)
    assert check_isolated(Request(f"{script_run}:{run.names[0]}")).good


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "true"], "is not Python"),
        ([sys.executable], "names no script"),
        ([sys.executable, "nothing.py"], "there is no file nothing.py"),
        ([sys.executable, "-m", "nothing_there"], "the script ended with"),
        ([sys.executable, "-m", "json.tool", "--help"], "compiled nothing"),
        (["/nowhere/python3", "script.py"], "there is no program"),
    ],
)
def test_a_command_that_cannot_be_looked_into(command, message, tmp_path):
    with pytest.raises(UserError, match=message):
        capture_script(command, tmp_path / "run", "pellucid", {}, 60)


@pytest.mark.sampled
def test_an_exception_in_a_script_shows_its_own_lines(tmp_path, capfd):
    """Not those of Dynamo, which met it while it traced; and of what the script raised from it, both."""
    script = tmp_path / "script.py"
    script.write_text("""\
import torch

@torch.compile
def folded(x):
    return (x * 2).reshape(3, 5)

try:
    folded(torch.ones(7))
except Exception as error:
    raise ValueError("no batch") from error
""")
    with pytest.raises(NotJudged, match="the script ended with 1"):
        capture_script([sys.executable, str(script)], tmp_path / "run", "pellucid", {}, 100)
    said = capfd.readouterr().err
    assert 'script.py", line 8' in said and 'script.py", line 10' in said and "ValueError: no batch" in said
    assert "reshape(3, 5)" in said and 'script.py", line 5, in folded' in said
    assert "site-packages" not in said and "runpy" not in said and len(said.splitlines()) < 30


@pytest.mark.sampled
@pytest.mark.parametrize("status", [0, 3])
def test_a_script_may_end_itself(status, tmp_path):
    """With 0 as if it ended by itself; otherwise that is told."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n\n@torch.compile\ndef f(x):\n    print()\n    return x + 1\n\n"
        f"f(torch.ones(3))\nsys.exit({status})\n"
    )
    command = [sys.executable, str(script)]
    if status:
        with pytest.raises(NotJudged, match=r"the script called sys\.exit with status 3"):
            capture_script(command, tmp_path / "run", "pellucid", {}, 100)
    else:
        capture_script(command, tmp_path / "run", "pellucid", {}, 100)
        assert [each["kind"] for each in open_run(tmp_path / "run").about["refusals"]] == ["graph break"]


@pytest.mark.sampled
def test_the_failing_graph_replays_without_the_program(tmp_path):
    """The folder alone, in a fresh process elsewhere: the fault is there, the program's module is not."""
    file = tmp_path / "gone" / "program.py"
    file.parent.mkdir()
    file.write_text((HERE / "planted.py").read_text())
    found = capture(Request(f"{file}:pellucid_lowering_sigmoid"), tmp_path / "run")
    assert found.verdict.value == "wrong"
    file.unlink()
    code = """
import sys
from tests.kit.planted import FAULTS
from pellucid.kit.runs.target import Request, captured
from pellucid.kit.subjects.registry import subject_of
from pellucid.kit.judge.graph import judge_graph
FAULTS["pellucid_lowering_sigmoid"].plant()
(graph,), subject = captured(Request(sys.argv[1]))
print([output.verdict.value for output in judge_graph(graph, subject)])
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert "wrong" in ended.stdout, ended.stderr
    healthy = replay(Request(str(tmp_path / "run")))
    assert healthy.good and healthy.graphs[0].before == "wrong"
    assert any(output.name.startswith("compiled") for output in healthy.graphs[0].moved)


@pytest.mark.slow
def test_a_program_in_python(tmp_path):
    program = Program(*mixed())
    assert program.check().good and program.cosim().good and program.match().good
    assert program.capture(tmp_path / "run").good and program.explain().good
    assert program.bisect(tell=lambda line: None).component == NOTHING
    assert len(program.testgen(tmp_path / "tests").files) == 2
    assert program.minify(tmp_path / "smallest").good


# ------------------------------------------------------------------------------------------------ strangers


def edited(folder, tmp_path, change):
    """A copy of a run whose graph was changed."""
    run = open_run(folder)
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    (name,) = run.names
    files = [f"graphs/{name}/{file}.json" for file in ("graph", "values")]
    graph, values = map(run.read, files)
    change({**graph, **values})
    for file, saved in zip(files, (graph, values), strict=True):
        write_json(copy / file, saved)
    return open_run(copy), name


def call(saved):
    return next(node for node in saved["nodes"] if node["op"] == "call_function")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: call(s).update(target="os.system"), "an operator that may do more than compute"),
        (lambda s: call(s).update(target="aten.from_file.default"), "an operator that may do more than compute"),
        (lambda s: call(s).update(target="debugprims.load_tensor.default"), "may do more than compute"),
        (lambda s: call(s).update(target="aten.no_such_operator.default"), "this PyTorch does not have"),
        (lambda s: call(s).update(target="higher_order.__class__"), "may do more than compute"),
        (lambda s: call(s).update(target="inductor._reinterpret_tensor.default"), "may do more than compute"),
        (lambda s: call(s).update(target="higher_order.print"), "may do more than compute"),
        (lambda s: call(s).update(original="os.system"), "may do more than compute"),
        (lambda s: call(s).update(kwargs={"dict": [["a=print(1), b", 1]]}), "impossible name"),
        (lambda s: call(s).update(op="call_method"), "unknown kind"),
        (lambda s: call(s).update(name="x):\n    import os\n    def g("), "impossible name"),
        (lambda s: call(s).update(args={"object": "os"}), "a value of unknown kind"),
        (lambda s: call(s).update(args={"dtype": "nn"}), "a value of unknown kind"),
        (lambda s: s["inputs"]["value"][0]["tensor"].update(shape=[1 << 40, 1]), "outside of its memory"),
        (lambda s: s["inputs"]["value"][0]["tensor"].update(offset=-4), "impossible tensor"),
        (lambda s: s["inputs"]["value"][0]["tensor"].update(stride=[1]), "impossible tensor"),
        (lambda s: s["inputs"]["memory"].__setitem__(0, "0" * 64), "lacks the tensor"),
    ],
)
def test_a_run_that_was_made_to_do_harm_is_refused(mixed_run, tmp_path, change, message):
    run, name = edited(mixed_run, tmp_path, change)
    with pytest.raises(UserError, match=message):
        run.graph(name)


@pytest.mark.sampled
def test_a_users_line_stays_a_comment(mixed_run, tmp_path):
    """It ends in comments of C++ and Python."""
    harm = 'x.py", line 1\n#error harm\\'
    run, name = edited(mixed_run, tmp_path, lambda s: [n.update(users=[[harm, 1, harm]]) for n in s["nodes"]])
    (graph,) = run.graphs(name)
    assert all("\n#error" not in node.meta["stack_trace"] for node in graph.module.graph.nodes)
    assert check_isolated(Request(str(run.folder))).good


def test_damaged_runs(mixed_run, tmp_path):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(mixed_run), str(copy)], check=True)
    path = next((copy / "tensors").glob("*inputs*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        open_run(copy).graphs()
    with pytest.raises(UserError, match="has no graph other"):
        open_run(mixed_run).graph("other")
    path.write_bytes(bytes(data[:200]))
    with pytest.raises(UserError, match="is damaged"):
        open_run(copy).graphs()
    (copy / "run.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        open_run(copy)
    with pytest.raises(UserError, match=r"has no run\.json"):
        open_run(tmp_path)
    with pytest.raises(UserError, match="has a run already"):
        capture(Request(MIXED), mixed_run)


@pytest.mark.slow
def test_the_commands(mixed_run, tmp_path):
    def pellucid(*arguments):
        code = "from pellucid.cli import main; main()"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    assert pellucid("diff", str(mixed_run), str(mixed_run)).stdout == "nothing changed\n"
    made = pellucid("cosim", str(mixed_run), "-o", str(tmp_path / "out"), "--json")
    assert made.returncode == 0 and json.loads(made.stdout)["verdict"] in ("ok", "rounding"), made.stderr
    with (tmp_path / "out" / "cosim.csv").open() as file:
        assert {row["verdict"] for row in csv.DictReader(file)} <= {"ok", "rounding"}
    assert json.loads((tmp_path / "out" / "cosim.json").read_text()) == json.loads(made.stdout)
    wrong = pellucid("check", MIXED, "again")
    assert wrong.returncode == 255 and "unexpected arguments after TARGET" in wrong.stderr


# ------------------------------------------------------------------------------------------------ tensors


def test_tensors_keep_layout_and_shared_memory(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    tree = {
        "view": base[4:].view(4, 5).t(),
        "other": base.view(torch.uint8)[7:9],
        "expanded": torch.ones(1).expand(3, 2),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float("nan"), dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "list": [None, 3, -0.0, float("inf"), (True, "text"), torch.float16, 2j, slice(1, None), torch.strided],
    }
    store = TensorStore(tmp_path)
    saved = json.loads(json.dumps(store.save("a", tree)))
    size = (tmp_path / "tensors" / "a.safetensors").stat().st_size
    assert store.save("b", tree) == saved and not (tmp_path / "tensors" / "b.safetensors").exists() and size < 2000
    again = TensorStore(tmp_path).load(saved)
    assert repr(again["list"]) == repr(tree["list"])
    for name, tensor in tree.items():
        if isinstance(tensor, torch.Tensor):
            other = again[name]
            assert other.dtype == tensor.dtype and other.stride() == tensor.stride() and other.shape == tensor.shape
            assert torch.equal(other.nan_to_num(7), tensor.nan_to_num(7)) and other.is_conj() == tensor.is_conj()
    again["view"][0, 0] = torch.pi
    assert again["other"].untyped_storage().data_ptr() == again["view"].untyped_storage().data_ptr()
    with pytest.raises(UserError, match="cannot be saved"):
        store.save("c", [torch.eye(2).to_sparse()])
    with pytest.raises(UserError, match="a value of type object"):
        store.save("c", [object()])


DYNAMIC = """
import torch
def make():
    def f(x, y, n):
        z = torch.cat([x, x * n], 0).relu().sum(1)
        w = torch.nn.functional.pad(y[1:] + 1, (1, x.shape[0] % 4))
        return z.exp(), w.softmax(-1), x.t().contiguous() * 2
    return f, (torch.randn(5, 70), torch.randn(29, 33)[20:, 2:], 3)
"""


@pytest.fixture(scope="module")
def dynamic_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic")
    (folder / "model.py").write_text(DYNAMIC)
    assert capture(Request(f"{folder}/model.py:make", dynamic=True), folder / "run").good
    return folder / "run"


@pytest.mark.sampled
def test_sizes_that_are_symbols_stay_so_in_a_run(dynamic_run):
    (graph,) = open_run(dynamic_run).graphs()
    sizes = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
    assert [torch.SymInt if isinstance(each, torch.SymInt) else each.shape for each in sizes][:2] == [torch.SymInt] * 2
    first, strided = (each for each in sizes if isinstance(each, torch.Tensor))
    assert all(isinstance(n, torch.SymInt) for n in (*first.shape, *strided.shape, strided.stride(0)))
    kernels = list((dynamic_run / "kernels").iterdir())
    (again,), subject = captured(Request(str(dynamic_run)))
    here = {step.symbol for step in subject.compile(again).steps}
    assert here == {path.stem for path in kernels}, "the same kernels, which take sizes"
    assert replay(Request(str(dynamic_run))).good


@pytest.mark.parametrize("size", ["s0 +", "__import__('os')", "s0", "999", None, 7])
def test_a_size_in_a_run_is_a_formula_that_fits(dynamic_run, tmp_path, size):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(dynamic_run), str(copy)], check=True)
    (file,) = (copy / "graphs").glob("*/graph.json")
    saved = json.loads(file.read_text())
    tensor = next(each for each in saved["sizes"]["inputs"] if isinstance(each, dict))
    tensor["size"][0] = size
    write_json(file, saved)
    with pytest.raises(UserError):
        open_run(copy).graphs()


@pytest.mark.parametrize(
    ("backend", "options"),
    [("inductor", {"cpp.cxx": [None, "./compiler"]}), ("pellucid", {"trace": "anywhere"}), ("tvm", {})],
)
def test_a_run_chooses_no_compiler_and_no_file(mixed_run, tmp_path, backend, options):
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(mixed_run), str(copy)], check=True)
    about = json.loads((copy / "run.json").read_text())
    write_json(copy / "run.json", {**about, "backend": backend, "options": options})
    run = open_run(copy)
    with pytest.raises(UserError, match="captured with"):
        run.options_but(()), run.backend
    assert run.options_but(options) == {}, "what the user gives is the user's"


def trained() -> Any:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            h = F.silu(F.gelu(self.norm(self.first(x.flip(0)))))
            return F.cross_entropy(self.last(h).softmax(-1), label)

    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16), torch.randint(0, 10, (8,)))


BROKEN_UP = {f"aten.{name}.default" for name in ("flip", "native_layer_norm", "gelu", "silu", "_softmax")}


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert capture(Request(f"{__file__}:trained", backward=True), folder, intermediates=True).good
    return folder


@pytest.mark.sampled
def test_a_run_is_decomposed_for_another_backend_and_its_results_keep_their_names(trained_run):
    saved = open_run(trained_run).graphs()
    graphs, _ = captured(Request(str(trained_run), "inductor"))
    assert {str(node.target) for graph in saved for node in calls_of(graph.module)} >= BROKEN_UP
    for before, after in zip(saved, graphs, strict=True):
        assert not {str(node.target) for node in calls_of(after.module)} & BROKEN_UP
        ours, theirs = (Reference(g.module, g.inputs, {n.name for n in calls_of(g.module)}) for g in (before, after))
        assert set(ours.result_nodes) == set(theirs.result_nodes)
        kept = ours.values.keys() & theirs.values.keys()
        assert len(kept) > 10 and all(near(ours.values[name], theirs.values[name]) for name in kept)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_another_backend_takes_a_run(dynamic, trained_run, tmp_path):
    if dynamic:
        trained_run = tmp_path / "run"
        capture(Request(f"{__file__}:trained", backward=True, dynamic=True), trained_run, intermediates=True)
    request = Request(str(trained_run), "inductor")
    assert check_isolated(request).good
    found = replay(request)
    assert found.good and not any(graph.moved for graph in found.graphs)
    assert cosim_isolated(replace(request, backend="pellucid"), other=Other("inductor")).good
    against = cosim_isolated(request, LIVE, other=Other(str(trained_run)))
    assert against.good and any(each.kernel != "result" for each in against.differences)
