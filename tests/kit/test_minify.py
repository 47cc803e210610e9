"""`minify`: planted faults end in the operator that holds them, and the program written shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.errors import UserError
from pellucid.kit.minify.minify import Kind, minify
from pellucid.kit.minify.subgraph import CapturedGraphs, NotAGraph, Subgraph, merged_inputs, side_by_side
from pellucid.kit.programs.graphs import interpret
from pellucid.kit.runs.target import Request
from tests.kit.planted import FAULTS, mixed, negated
from tests.kit.score import request_of

HERE = Path(__file__).parent
PLANTED = f"{HERE}/planted.py"
QUICK = {"pellucid_neg_crashes"}
SMALL = ("codegen", "vectorisation", "lowering")
FAULTY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, fault in FAULTS.items()
    if fault.component in SMALL and fault.program in (negated, mixed)  # the others have little to cut away
]


@pytest.fixture(scope="module")
def mixed():
    return CapturedGraphs(Request(f"{PLANTED}:mixed"))


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTY)
def test_one_node_is_left(name, tmp_path):
    fault = FAULTS[name]
    seconds = 60.0 if fault.verdict == "hang" else 300.0
    found = minify(Request(f"{PLANTED}:{name}", fault.subject), tmp_path, seconds=seconds, memory=4 << 30)
    assert found.kind.verdict == fault.verdict and not found.others
    assert found.nodes_after == 1 < found.nodes_before
    assert f"aten.{fault.culprit}" in found.graph
    assert found.shown and found.finished


@pytest.mark.sampled
def test_a_wrong_pass_on_the_graph(tmp_path):
    """No kernel is to blame; what is left are the two calls that are taken for one, and what shows it."""
    found = minify(Request(f"{PLANTED}:pellucid_equal_calls"), tmp_path)
    assert (found.kind.verdict, found.nodes_before, found.nodes_after) == ("wrong", 5, 3) and found.shown


@pytest.mark.slow
def test_the_program_that_is_written_runs_by_itself(tmp_path):
    told = []
    found = minify(Request(f"{PLANTED}:pellucid_vector_exp"), tmp_path, tell=told.append)
    healthy = subprocess.run([sys.executable, found.repro], capture_output=True, text=True)
    assert healthy.returncode == 0 and "the same" in healthy.stdout, healthy.stderr
    planted = "from tests.kit.planted import FAULTS; FAULTS['pellucid_vector_exp'].plant(); import runpy, sys; "
    code = f"{planted}runpy.run_path({found.repro!r}, run_name='__main__')"
    faulty = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert faulty.returncode == 1 and "different" in faulty.stdout, faulty.stderr
    assert "pellucid." not in Path(found.repro).read_text() and "torch.load" not in Path(found.repro).read_text()
    assert told[0].nodes == told[0].nodes_before == 18 and told[-1].nodes == 1
    assert "18 -> 1 nodes" in str(told[-1])


@pytest.mark.sampled
def test_nothing_fails(tmp_path):
    found = minify(Request(f"{PLANTED}:negated"), tmp_path)
    assert found.good and not list(tmp_path.iterdir())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pellucid_partitioner", "size 21 to 1"),
        pytest.param("unet_lost_call", "first of up", marks=pytest.mark.slow),
        pytest.param("inductor_unet_partition", "size 16 to 1", marks=pytest.mark.slow),
    ],
)
def test_where_the_graphs_are_right_the_program_is_shrunk(name, change, tmp_path):
    fault = FAULTS[name]
    found = minify(request_of(fault), tmp_path)
    assert not found.good and found.before is not None and found.before.stage == fault.component
    assert fault.culprit in found.before.op and found.before.user_line
    assert change in found.changes and found.shown and found.nodes_after <= found.nodes_before


def test_a_target_that_is_none(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        minify(Request("nothing.py:make"), tmp_path)


@pytest.mark.slow
def test_a_target_that_ends_the_process(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import os\ndef make():\n    os.abort()\n")
    with pytest.raises(UserError, match="its process ended by SIGABRT"):
        minify(Request(f"{file}:make"), tmp_path)


@pytest.mark.sampled
def test_a_failure_of_another_kind_is_reported_and_not_followed(tmp_path):
    """A wrong flip: alone it does not compile at all, so the smallest graph that is wrong has two calls."""
    file = tmp_path / "flips.py"
    file.write_text(
        "import torch\n"
        "from pellucid.lower.registry import RULES\n"
        "def lower(graph, node):\n"
        "    if sum(each.op == 'call_function' for each in node.graph.nodes) == 1:\n"
        "        raise ZeroDivisionError('alone')\n"
        "    return RULES['clone.default'](graph, node)\n"
        "def flips(x):\n"
        "    return torch.flip(x.sin(), [0]).cos() + 1\n"
        "def make():\n"
        "    RULES['flip.default'] = lower\n"
        "    return flips, (torch.randn(9),)\n"
    )
    found = minify(Request(f"{file}:make"), tmp_path / "out")
    assert found.kind.verdict == "wrong" and found.nodes_after == 2 and "flip" in found.graph
    assert any("ZeroDivisionError" in other for other in found.others)
    assert found.shown


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_command_judges(jobs, tmp_path):
    found = minify(Request(f"{PLANTED}:mixed"), tmp_path, command="grep -q aten.exp", jobs=jobs)
    assert found.kind.verdict == "accepted" and found.nodes_after == 1 and "aten.exp" in found.graph
    assert found.shown and "torch.ones" not in found.graph


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="the command cannot be run"):
        minify(Request(f"{PLANTED}:mixed"), tmp_path, command="no-such-command-anywhere")


@pytest.mark.slow
def test_a_command_that_accepts_nothing(tmp_path):
    assert minify(Request(f"{PLANTED}:negated"), tmp_path, command="false").good


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["pellucid_lowering_flip", pytest.param("inductor_vector_exp", marks=pytest.mark.slow)]
)
def test_dynamic_shapes_stay(name, tmp_path):
    found = minify(Request(f"{PLANTED}:{name}", FAULTS[name].subject, dynamic=True), tmp_path)
    assert found.nodes_after == 1 and f"aten.{FAULTS[name].culprit}" in found.graph
    assert "dynamic=True" in Path(found.repro).read_text() and found.shown
    assert found.graph.splitlines()[0].count(",") == 1  # sizes that the graph does not name are no inputs of it


@pytest.mark.slow
def test_several_at_once(tmp_path):
    found = minify(Request(f"{PLANTED}:inductor_neg_crashes", "inductor"), tmp_path, jobs=2)
    assert found.nodes_after == 1 and found.kind.what == "SIGSEGV" and found.shown


# ------------------------------------------------------------------------------------------------ parts of graphs


def test_parts_of_a_graph_run_on_eagers_values(mixed):
    (name,) = mixed.graphs
    part = mixed.cut(Subgraph(name, ("exp", "clamp")))
    assert part.calls == 2 and [tuple(each.shape) for each in part.inputs] == [(37, 83)]
    small = mixed.cut(Subgraph(name, ("exp",), ("size 83 to 2", "ones in 0")))
    assert torch.equal(small.inputs[0], torch.ones(37, 2))


def test_parts_side_by_side_do_what_they_do_alone(mixed):
    (name,) = mixed.graphs
    parts = mixed.units(name, mixed.names(name))
    alone = [result for part in parts for result in run(mixed.cut(part))]
    together = run(side_by_side([mixed.bare(part) for part in parts], symbolic=False))
    assert len(alone) == len(together) == len(parts)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def run(graph):
    return interpret(graph.module, graph.inputs)


def test_calls_that_are_alike_are_named_once(mixed):
    (name,) = mixed.graphs
    every, unlike = (mixed.units(name, mixed.names(name), duplicates=each) for each in (True, False))
    assert len(unlike) < len(every)
    assert {mixed.operators(name, part.names) for part in every} == {mixed.operators(name, p.names) for p in unlike}


def test_inputs_become_fewer_shorter_and_of_plainer_types(tmp_path):
    file = tmp_path / "sums.py"
    file.write_text(
        "import torch\n"
        "def sums(x, y):\n"
        "    return (x * y).view(4, 2, 6).sum(1, dtype=torch.float64)\n"
        "def make():\n"
        "    return sums, (torch.randn(8, 6).half(), torch.randn(8, 6).half())\n"
    )
    captured = CapturedGraphs(Request(f"{file}:make"))
    (name,) = captured.graphs
    whole = Subgraph(name, captured.names(name))
    assert merged_inputs(captured.inputs(whole)) == ["input 1 as 0"]
    part = captured.cut(whole.changed("input 1 as 0", "size 6 to 3", "dtype float16 to float32", "integers in 0"))
    assert [(tuple(each.shape), each.dtype) for each in part.inputs] == [((8, 3), torch.float32)]
    (result,) = run(part)
    x = part.inputs[0]
    assert torch.equal(x, x.round()) and torch.equal(result, (x * x).view(4, 2, 3).sum(1, dtype=torch.float64))


def test_what_takes_no_tensors_is_no_graph(tmp_path):
    file = tmp_path / "pair.py"
    file.write_text(
        "import torch\n"
        "def pair(x):\n"
        "    return torch.topk(x, 2)[0] + 1\n"
        "def make():\n"
        "    return pair, (torch.randn(8),)\n"
    )
    captured = CapturedGraphs(Request(f"{file}:make"))
    (name,) = captured.graphs
    with pytest.raises(NotAGraph, match="topk is not a tensor or number"):
        captured.cut(Subgraph(name, ("getitem",)))
    assert [part.names for part in captured.units(name, ("topk", "getitem", "add"))] == [("topk", "getitem"), ("add",)]


def test_kinds_of_failure_are_told_apart():
    assert not Kind("error", "TypeError", "compile").same(Kind("error", "ValueError", "compile"))
    assert not Kind("error", "TypeError", "compile").same(Kind("error", "TypeError", "run"))
    wrong = Kind("wrong", operators=("aten.exp.default", "aten.add.Tensor"))
    assert wrong.same(Kind("wrong", operators=("aten.exp.default",))) and wrong.same(Kind("wrong"))
    assert not wrong.same(Kind("wrong", operators=("aten.neg.default",)))
    assert (
        str(Kind("wrong")) == "wrong" and str(Kind("error", "TypeError", "compile")) == "error (TypeError in compile)"
    )
