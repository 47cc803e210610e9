"""`minify`: planted faults end in the operator that holds them, and the program written shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.debug.check import Request
from pellucid.debug.minify import Kind, minify
from pellucid.debug.subgraph import NotAGraph, Subgraph, Workshop
from pellucid.errors import UserError
from tests.kit.planted import FAULTS, mixed, negated

HERE = Path(__file__).parent
QUICK = {"pellucid_neg_crashes", "inductor_lowering_sigmoid"}
SMALL = ("codegen", "vectorisation", "lowering")
FAULTY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, fault in FAULTS.items()
    if fault.component in SMALL and fault.program in (negated, mixed)  # the others have little to cut away
]


@pytest.mark.parametrize("name", FAULTY)
def test_one_node_is_left(name, tmp_path):
    fault = FAULTS[name]
    seconds = 60.0 if fault.verdict == "hang" else 300.0
    found = minify(Request(f"{HERE}/planted.py:{name}", fault.subject), tmp_path, seconds=seconds, memory=4 << 30)
    assert found.kind.verdict == fault.verdict and not found.others
    assert found.nodes_after == 1 < found.nodes_before
    assert f"aten.{fault.culprit}" in found.graph


def test_the_program_that_is_written_runs_by_itself(tmp_path):
    found = minify(Request(f"{HERE}/planted.py:pellucid_vector_exp"), tmp_path)
    healthy = subprocess.run([sys.executable, found.repro], capture_output=True, text=True)
    assert healthy.returncode == 0 and "the same" in healthy.stdout, healthy.stderr
    planted = "from tests.kit.planted import FAULTS; FAULTS['pellucid_vector_exp'].plant(); import runpy, sys; "
    code = f"{planted}runpy.run_path({found.repro!r}, run_name='__main__')"
    faulty = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert faulty.returncode == 1 and "different" in faulty.stdout, faulty.stderr


def test_nothing_fails(tmp_path):
    found = minify(Request(f"{HERE}/planted.py:negated"), tmp_path)
    assert found.good and not list(tmp_path.iterdir())


def test_a_target_that_is_none(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        minify(Request("nothing.py:make"), tmp_path)


def test_parts_of_a_graph_run_on_eagers_values():
    shop = Workshop(Request(f"{HERE}/planted.py:mixed"))
    (name,) = shop.graphs
    part = shop.cut(Subgraph(name, ("exp", "clamp")))
    assert part.calls == 2 and [tuple(each.shape) for each in part.inputs] == [(37, 83)]
    small = shop.cut(Subgraph(name, ("exp",), ("size 83 to 2", "ones in 0")))
    assert torch.equal(small.inputs[0], torch.ones(37, 2))


def test_what_takes_no_tensors_is_no_graph(tmp_path):
    file = tmp_path / "pair.py"
    file.write_text(
        "import torch\n"
        "def pair(x):\n"
        "    return torch.topk(x, 2)[0] + 1\n"
        "def make():\n"
        "    return pair, (torch.randn(8),)\n"
    )
    shop = Workshop(Request(f"{file}:make"))
    (name,) = shop.graphs
    with pytest.raises(NotAGraph, match="topk is no tensor"):
        shop.cut(Subgraph(name, ("getitem",)))


def test_kinds_of_failure_are_told_apart():
    assert Kind("error", "TypeError") != Kind("error", "ValueError") and str(Kind("wrong")) == "wrong"
