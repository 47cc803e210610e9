"""Metric tables: rows beside hand counts, refused fusions in categories, and sums over models."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from rich.console import Console

import pellucid.schedule
from pellucid.cli import main
from pellucid.errors import UserError
from pellucid.kit.metrics import request
from pellucid.kit.metrics.collect import UNKNOWN, rows_of
from pellucid.kit.metrics.summary import summary_of
from pellucid.kit.metrics.tables import TABLES, chosen, read_tables, write_tables
from pellucid.kit.process.child import failure_of
from pellucid.kit.programs.case import Case
from pellucid.kit.runs.target import Request
from pellucid.kit.show import shown
from pellucid.kit.subjects.registry import subject_of
from pellucid.printing import plain, show

BACKENDS = ("pellucid", pytest.param("inductor", marks=pytest.mark.slow))

MODEL = """
import torch

def make():
    return (lambda x, w: ((x * 2).relu() @ w).sum(1)), (torch.ones(8, 16), torch.ones(16, 4))

def scatter():
    return (lambda x, i: torch.zeros(8).index_add(0, i, x) * 2), (torch.ones(3), torch.tensor([1, 1, 2]))
"""


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_beside_a_hand_count(model, backend):
    torch._dynamo.reset()
    rows = rows_of(Request(f"{model}:make", backend), tuple(TABLES), 0.05)
    (graph,) = rows["graphs"]
    assert (graph["model"], graph["backend"], graph["graph"]) == ("model:make", backend, "inference_0")
    assert graph["fx_calls"] == 4 and graph["operators"] == 4  # mul, relu, mm, sum
    kernel = rows["kernels"][0]
    assert (kernel["loads"], kernel["stores"], kernel["atomic_adds"]) == (1, 1, 0) and kernel["fx_nodes"] == 2
    assert kernel["argument_bytes"] == str(4 * 8 * 16 * 2) and int(kernel["flops"]) >= 8 * 16
    assert all(set(row) == {"model", "backend", "graph", *TABLES[name]} for name, each in rows.items() for row in each)
    estimated = {row["kernel"] for row in rows["estimates"]}
    assert estimated and all(float(row["factor"]) >= 1 for row in rows["estimates"])
    for row in rows["slow_fusions"]:
        ratio = float(row["fused_microseconds"]) / float(row["parts_microseconds"])
        assert float(row["ratio"]) == pytest.approx(ratio, rel=0.2, abs=0.02) and row["parts"] >= 2
    if backend == "pellucid":  # Inductor has made one loop of the two before it fuses
        assert rows["slow_fusions"][0]["parts"] == 2


def test_a_kernel_that_adds_to_memory(model):
    torch._dynamo.reset()
    rows = rows_of(Request(f"{model}:scatter"), ("kernels", "fusion_failures"), 0.05)
    assert "scatter" in {row["category"] for row in rows["fusion_failures"]} and len(rows) == 2
    assert "".join(row["why"] for row in rows["fusion_failures"])


# ------------------------------------------------------------------------------------------------ categories


def refused(backend, fn, *args) -> set[str]:
    """The categories of the fusions that a backend refuses in a program."""
    torch._dynamo.reset()
    subject = subject_of(backend)
    found: set[str] = set()
    for graph in subject.graphs(Case.of(fn, args)):
        with torch.no_grad():
            found |= {each.category or UNKNOWN for each in subject.compile(graph).refusals() if each.kind == "fusion"}
    return found


def many_ways(x, y, w, i):
    q, k, v = (x @ w).split(16, 1)  # offsets in one buffer
    normed = F.layer_norm(x.exp(), (16,)).softmax(0)  # other loop orders
    joined = torch.cat([q.exp(), k.sin()])  # other sizes
    drawn = torch.rand_like(x) + x.exp()  # random numbers
    picked = v.cos()[i].sin() + y  # through an index, and broadcast
    return normed, joined, drawn, picked, x.exp().sum(0), x.exp().sum(1), (x.exp() @ y[:, None]) + x.exp()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_refusal_is_of_an_unknown_category(backend):
    found = refused(backend, many_ways, torch.ones(32, 16), torch.ones(16), torch.ones(16, 48), torch.tensor([3, 1, 2]))
    assert UNKNOWN not in found and "cycle" in found
    if backend == "pellucid":
        assert found >= {"random-seed", "reduction-axes", "different-numel", "different-offset", "indirect"}


def test_every_refusal_of_the_scheduler_has_a_category():
    """A category is the first argument of every `Mismatch`; none is empty."""
    folder = Path(pellucid.schedule.__file__).parent
    texts = [text for path in folder.glob("*.py") for text in re.findall(r"Mismatch\(\s*(\S)", path.read_text())]
    assert len(texts) > 30 and all(first in '"mc' for first in texts)  # a text, or a category that is passed on


# ------------------------------------------------------------------------------------------------ files and sums


def test_tables_are_summed_up_over_models(tmp_path):
    row = {"model": "a", "backend": "pellucid", "graph": "g"}
    failures = [{**row, "category": each} for each in ("broadcast", "cycle", "broadcast")] + [
        {**row, "model": "b", "category": "cycle"}
    ]
    estimates = [{**row, "factor": "2.0", "percent_of_limit": "120"}, {**row, "factor": "8.0", "percent_of_limit": ""}]
    slow = [{**row, "kernel": "k", "ratio": "0.5", "slow": 0}, {**row, "kernel": "worse", "ratio": "2.0", "slow": 1}]
    write_tables(tmp_path, {"fusion_failures": failures, "estimates": estimates, "slow_fusions": slow})
    found = {each.name: each for each in summary_of(tmp_path).sums}
    assert found["fusion_failures"].columns == ("model", "failures", "broadcast", "cycle")
    assert found["fusion_failures"].rows == (
        ("a (pellucid)", "3", "2", "1"),
        ("b (pellucid)", "1", "0", "1"),
        ("all", "4", "2", "2"),
    )
    assert found["estimates"].rows[-1] == ("all", "2", "4.00", "8.0", "1")
    assert found["slow_fusions"].rows[-1] == ("all", "2", "1", "1.00", "worse 2.0")
    assert "broadcast" in plain(shown(summary_of(tmp_path)))


def test_sums_fit_a_terminal(tmp_path):
    row = {"model": "models.py:one_with_a_name_of_some_length", "backend": "inductor", "graph": "g"}
    categories = [f"category-{number}" for number in range(12) for _ in range(number + 1)]
    write_tables(tmp_path, {"fusion_failures": [{**row, "category": each} for each in categories]})
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show(terminal, shown(summary_of(tmp_path)))
    table = [line for line in terminal.file.getvalue().splitlines() if str(tmp_path) not in line]  # paths stay whole
    assert all(len(line) <= 80 for line in table)
    assert "category-0 1" in " ".join(" ".join(table).split()) and "category-11" not in "".join(table)


def test_names_of_tables():
    assert chosen((), ("estimates",)) == ("graphs", "kernels", "fusion_failures", "slow_fusions")
    with pytest.raises(UserError, match="unknown table 'graph'"):
        chosen(("graph",), ())
    with pytest.raises(UserError, match="no tables left"):
        chosen(("graphs",), ("graphs",))


def test_foreign_tables_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no tables"):
        read_tables(tmp_path)
    (tmp_path / "graphs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="other columns"):
        read_tables(tmp_path)


class Here:
    """A worker that is this process."""

    def __init__(self, memory: int) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *ended: object) -> None: ...

    def call(self, function, *args, seconds):
        try:
            return function(*args)
        except Exception as error:
            return failure_of(error)


def test_the_command_writes_what_it_can_and_tells_the_rest(model, tmp_path, monkeypatch):
    monkeypatch.setattr(request, "Worker", Here)
    torch._dynamo.reset()
    model.write_text(MODEL + "\ndef broken():\n    raise ValueError('no model')\n")
    words = [f"{model}:make", f"{model}:broken", "--table", "graphs", "-o", str(tmp_path / "tables"), "--json"]
    result = CliRunner().invoke(main, ["metrics", *words])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and list(found["tables"]) == ["graphs"]
    assert "no model" in found["failures"]["model:broken"]
    with open(found["tables"]["graphs"], newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["model:make"]
    result = CliRunner().invoke(main, ["metrics", "--sum", str(tmp_path / "tables")])
    assert result.exit_code == 0 and "model:make (pellucid)" in result.stdout
