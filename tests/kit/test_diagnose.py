"""One page for each of the stories that a program may tell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pellucid.errors import NotJudged, UserError
from pellucid.kit.diagnose import MIN_SECONDS, _Work, diagnose
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.runs.target import Request

STORIES = Path(__file__).parents[2] / "examples" / "broken_neg.py"


def line_of(text: str) -> str:
    """`file:line` of the first line of the stories that holds `text`."""
    lines = STORIES.read_text().splitlines()
    return f"{STORIES}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.sampled
def test_a_wrong_result_ends_in_the_component_the_kernel_and_a_program_that_shows_it(tmp_path: Path) -> None:
    said: list[str] = []
    found = diagnose(Request(f"{STORIES}:pellucid_wrong_result"), tmp_path, 300, tell=said.append)
    assert found.verdict is Verdict.WRONG and not found.good
    assert found.bisected is not None and found.bisected.component == "codegen"
    assert "neg" in found.kernel
    assert found.fx_nodes == ("neg",) and found.user_lines == (line_of("torch.neg"),)
    assert found.minified is not None and Path(found.minified.repro).is_file()
    assert [stage.tool for stage in found.stages] == ["check and bisect", "cosim", "minify"]
    text = str(found)
    assert "codegen" in text and f"python {found.minified.repro}" in text.replace("\n", "")
    assert {"cosim", "minify"} <= set(said)


@pytest.mark.sampled
def test_a_compile_error_ends_in_its_explanation(tmp_path: Path) -> None:
    found = diagnose(Request(f"{STORIES}:pellucid_compile_error"), tmp_path, 300, tell=lambda _: None)
    assert found.verdict is Verdict.ERROR
    assert found.fx_nodes == ("neg",) and found.user_lines == (line_of("torch.neg"),)
    assert found.reasons is not None and found.reasons.cause in str(found).replace("\n", " ")


@pytest.mark.sampled
def test_a_good_program_is_told_what_to_look_at_next(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.sin, (torch.rand(9),)\n")
    found = diagnose(Request(f"{tmp_path}/model.py:make"), tmp_path, tell=lambda _: None)
    assert found.good and not found.user_lines and found.minified is None
    lines = str(found).splitlines()
    assert lines[-2:] == [
        "  # what was not fused, vectorised or compiled, and why",
        f"  pellucid explain {tmp_path}/model.py:make",
    ]


@pytest.mark.sampled
def test_what_there_is_no_time_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.kit.diagnose.MIN_SECONDS", 1e9)
    found = diagnose(Request(f"{STORIES}:pellucid_wrong_result"), tmp_path, 300, tell=lambda _: None)
    assert found.verdict is Verdict.WRONG and found.bisected is not None and found.minified is None
    assert "no time left" in str(found)


def test_a_tool_that_ran_out_of_time_is_not_the_programs_fault(tmp_path: Path) -> None:
    work = _Work(Request("model.py:make"), tmp_path, time.monotonic() + MIN_SECONDS + 0.05, 300, 0, lambda _: None)

    def slow() -> None:
        time.sleep(0.1)
        raise UserError("no end after 5 s")

    assert work.run("cosim", slow, str) is None
    assert work.stages[-1].found == "stopped: no time left"


@pytest.mark.sampled
def test_a_program_that_fails_in_eager_mode_is_not_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.mm, (torch.rand(2),)\n")
    with pytest.raises(NotJudged):
        diagnose(Request(f"{tmp_path}/model.py:make"), tmp_path, tell=lambda _: None)
