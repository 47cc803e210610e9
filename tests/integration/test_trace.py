"""Run folders: complete, runnable, and every line of C++ accounted for."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pellucid.codegen.nest_text import parse_nest, print_nest
from pellucid.errors import UserError
from pellucid.ir.nodes import Kernel
from pellucid.ir.parser import parse_program
from pellucid.ir.printer import print_program
from pellucid.trace import schema


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(x @ w + b)
    hidden = F.layer_norm(hidden + w[ids], (w.shape[1],))
    return torch.softmax(torch.cat([hidden, x @ w], 1), -1)


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(6, 40), torch.randn(40, 24), torch.randn(24), torch.randint(0, 40, (6,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one small graph with a bit of everything."""
    folder = tmp_path_factory.mktemp("trace")
    torch._dynamo.reset()
    compiled = torch.compile(
        block, backend="pellucid", options={"trace": str(folder), "verify": True, "contract": False}
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs()), block(*inputs()))
    (run,) = folder.iterdir()
    return run


def graph_of(run: Path) -> Path:
    """The folder of its only graph."""
    (graph,) = (run / schema.GRAPHS).iterdir()
    return graph


def test_every_file_of_the_schema_is_there(run: Path) -> None:
    graph = graph_of(run)
    commands = {"check.json", "cosim.csv", "repro.py", "report.html", schema.USER_SOURCE}
    assert {entry.name for entry in run.iterdir()} == schema.FILES.keys() - commands
    assert {entry.name for entry in graph.iterdir()} == schema.GRAPH_FILES.keys() - {
        schema.NUMBERS,
        "segments.txt",
        "ir_frozen.txt",
    }


def test_run_json_tells_stages_counts_and_fallbacks(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    (data,) = about["compiled"].values()
    assert about["schema_version"] == schema.VERSION and data["error"] is None
    assert [stage["name"] for stage in data["stages"]] == [
        "dynamo", "aotautograd", "transform", "lower", "freeze", "schedule", "codegen", "strips", "plan", "build",
        "load",
    ]  # fmt: skip
    assert data["counts"]["kernels"] < data["counts"]["kernels_before_fusion"]
    assert data["fallbacks"] and all(item["reason"] for item in data["fallbacks"])
    assert sum(item["calls"] for item in data["fallbacks"]) == data["counts"]["fallbacks"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["fx_graph_runnable.py", "fx_graph_transformed.py", "output_code.py"])
def test_programs_run_in_a_fresh_process(run: Path, name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(graph_of(run) / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "verdict: " in done.stdout and " per call" in done.stdout and "nan" not in done.stdout


@pytest.mark.parametrize("name", ["ir_pre_fusion.txt", "ir_post_fusion.txt"])
def test_ir_parses_back(run: Path, name: str) -> None:
    text = (graph_of(run) / name).read_text()
    assert parse_program(text).nodes
    assert parse_program(print_program(parse_program(text))) == parse_program(text)


def test_loops_parse_back(run: Path) -> None:
    blocks = (graph_of(run) / "loops.txt").read_text().split("\n\n")
    nests = [parse_nest(block) for block in blocks]
    assert [nest.name for nest in nests] == [
        node.name
        for node in parse_program((graph_of(run) / "ir_post_fusion.txt").read_text()).nodes
        if isinstance(node, Kernel)
    ]
    assert [print_nest(nest, origins=False) for nest in nests] == [
        "\n".join(line.partition("  # ")[0].rstrip() for line in block.strip().splitlines()) for block in blocks
    ]


def test_every_line_of_cpp_reaches_a_user_line_or_is_glue(run: Path) -> None:
    data = json.loads((graph_of(run) / "provenance.json").read_text())
    assert data["kernels"]
    for kernel in data["kernels"].values():
        told = [line for line in kernel["lines"] if not line.get("glue")]
        assert told, "a kernel implements something"
        for line in told:
            assert line["fx_nodes"] and line["user_lines"], line
            assert any(Path(user["file"]).name == "test_trace.py" for user in line["user_lines"]), line
        for line in kernel["lines"]:
            if line.get("glue"):
                assert "pv::" not in line["code"] or not any(
                    op in line["code"] for op in ("pv::add(", "pv::mul(", "pv::exp(", "pv::div(")
                ), f"a computation marked as glue: {line}"


def test_every_fx_call_ends_up_somewhere(run: Path) -> None:
    data = json.loads((graph_of(run) / "provenance.json").read_text())
    text = (graph_of(run) / "fx_graph_readable.py").read_text()
    for name in ("addmm", "gelu", "native_layer_norm", "_softmax", "cat", "embedding", "index"):
        if f" {name}:" in text:
            assert data["fx_nodes"].get(name), f"{name} is implemented by no kernel"


def test_every_refusal_has_a_reason(run: Path) -> None:
    with (run / "decisions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == schema.TABLES["decisions.csv"]
    refusals = [row for row in rows if row["ok"] == "0"]
    assert refusals and all(row["why"].strip() for row in rows)
    assert not any("unknown" in row["facts"] for row in rows)


def test_kernels_csv_has_a_row_per_kernel(run: Path) -> None:
    with (run / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (about,) = json.loads((run / "run.json").read_text())["compiled"].values()
    rows = [row for row in rows if row["symbol"]]
    assert len(rows) == about["counts"]["kernels"]
    assert all((run / "kernels" / f"{row['symbol']}.cpp").exists() for row in rows)
    assert all(row["fx_nodes"] and row["user_lines"] for row in rows)


def test_the_environment_variable_traces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_TRACE", str(tmp_path / "runs"))
    torch._dynamo.reset()
    torch.compile(lambda x: x.exp() + 1, backend="pellucid")(torch.ones(3))
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend="pellucid", options={"trace": str(blocked)})(torch.ones(3))
    assert isinstance(caught.value.inner_exception, UserError) and "writable" in str(caught.value)


def test_a_failed_stage_still_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("pellucid.pipeline.generate", broken)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="planted"):
        torch.compile(lambda x: x + 1, backend="pellucid", options={"trace": str(tmp_path)})(torch.ones(3))
    (run,) = tmp_path.iterdir()
    (data,) = json.loads((run / "run.json").read_text())["compiled"].values()
    assert data["error"] == {"type": "RuntimeError", "text": "planted"}
    assert [stage["name"] for stage in data["stages"]][-4:] == ["transform", "lower", "freeze", "schedule"]
    assert (graph_of(run) / "ir_post_fusion.txt").exists() and (graph_of(run) / "fx_graph_runnable.py").exists()


LOGGED = "import torch; torch.compile(lambda x: x.exp().sum(), backend='pellucid')(torch.ones(9))"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("artifact", "expected"),
    [
        ("output_code", "SOURCES ="),
        ("ir_post_fusion", "= exp"),
        ("ir_pre_fusion", "kernel exp"),
        ("fusion", "fuse."),
        ("perf_hints", "codegen.vectorize"),
        ("schedule", "aotautograd: "),
    ],
)
def test_artifacts_through_torch_logs(artifact: str, expected: str) -> None:
    environment = {**os.environ, "TORCH_LOGS": artifact}
    done = subprocess.run([sys.executable, "-c", LOGGED], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert expected in done.stderr


def test_the_time_of_a_backward_graph_is_that_since_its_forward_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.exp().sum(), backend="pellucid", options={"trace": str(tmp_path)})
    compiled(torch.ones(3, requires_grad=True)).backward()
    stages = {
        data["kind"]: [stage["name"] for stage in data["stages"]]
        for path in tmp_path.glob("*/run.json")
        for data in json.loads(path.read_text())["compiled"].values()
    }
    assert stages["forward"][:3] == ["dynamo", "aotautograd", "transform"]
    assert "dynamo" not in stages["backward"] and "transform" in stages["backward"]


TRACED = (
    "import torch; torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "
    "backend='pellucid')(torch.ones(9))"
)


def of_child(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.sampled
def test_torch_trace_gets_the_texts_of_each_run(tmp_path: Path) -> None:
    of_child(TRACED, tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").iterdir()
    entries = [json.loads(line[line.index("{") :]) for line in log.read_text().splitlines() if "artifact" in line]
    artifacts = [entry["artifact"] for entry in entries if "artifact" in entry]
    ours = {each["name"]: each["encoding"] for each in artifacts if each["name"].startswith("pellucid_")}
    kinds = {name.split("_", 3)[3]: encoding for name, encoding in ours.items()}
    assert (
        kinds["reuse"] == "json"
        and kinds["run"] == "json"
        and kinds["output_code"] == "string"
        and kinds["segments"] == "string"
    )
    told = {"run.json", *schema.TABLES, *schema.GRAPH_FILES}
    told -= {schema.GRAPH, schema.VALUES, schema.NUMBERS, "ir_frozen.txt"}
    assert {Path(name).stem for name in told} <= set(kinds)


@pytest.mark.sampled
def test_torch_compile_debug_writes_runs_beside_those_of_dynamo(tmp_path: Path) -> None:
    of_child(LOGGED, tmp_path, TORCH_COMPILE_DEBUG="1", TORCH_COMPILE_DEBUG_DIR=str(tmp_path))
    (run,) = tmp_path.glob("torch_compile_debug/run_*/pellucid/*")
    assert (run / "run.json").is_file() and (graph_of(run) / "output_code.py").is_file()


@pytest.mark.sampled
def test_a_folder_of_the_users_choice_wins_over_torch_compile_debug(tmp_path: Path) -> None:
    of_child(LOGGED, tmp_path, TORCH_COMPILE_DEBUG="1", PELLUCID_TRACE=str(tmp_path / "mine"))
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert not list(tmp_path.glob("torch_compile_debug/run_*/pellucid"))


@pytest.mark.sampled
def test_the_minifier_of_aotautograd_says_that_it_is_not_ours(tmp_path: Path) -> None:
    assert "pellucid minify" in of_child(LOGGED, tmp_path, TORCHDYNAMO_REPRO_AFTER="aot").stderr


FAILING = """
import torch, pellucid.pipeline
def broken(*_): raise RuntimeError("planted")
pellucid.pipeline.generate = broken
try:
    torch.compile(lambda x: x.exp() + 1, backend="pellucid")(torch.ones(9))
except torch._dynamo.exc.BackendCompilerFailed:
    pass
"""


def test_the_minifier_of_dynamo_writes_its_launcher_for_this_backend(tmp_path: Path) -> None:
    of_child(FAILING, tmp_path, TORCHDYNAMO_REPRO_AFTER="dynamo")
    (launcher,) = tmp_path.glob("torch_compile_debug/run_*/minifier/minifier_launcher.py")
    assert "backend='pellucid'" in launcher.read_text()
