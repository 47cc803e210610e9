"""The score: a third of the quick faults, another one for each commit; and what it counts as right."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.commit import third_of_commit
from tests.kit.faults import FAULTS, QUICK
from tests.kit.score import Answer, Named, read, third, totals, wrong

ROOT = Path(__file__).parents[2]


def test_a_third_of_the_quick_faults_is_found():
    command = ("-m", "tests.kit.score", "--quick", str(third_of_commit()))
    found = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, f"python {' '.join(command)}\n{found.stdout}\n{found.stderr[-2000:]}"


def test_thirds_make_a_whole():
    thirds = [third(QUICK, at) for at in range(3)]
    assert (
        sorted(name for some in thirds for name in some) == sorted(QUICK)
        and max(map(len, thirds)) - min(map(len, thirds)) <= 1
    )
    assert all({FAULTS[name].subject for name in some} == {"pellucid", "inductor"} for some in thirds)


SUB = Named(("sub",), (f"{Path(__file__).parent}/planted.py:232",))
RIGHT = Answer("pellucid_wrong_index", "wrong", "codegen", (), SUB, {"complete": SUB})


@pytest.mark.parametrize(
    ("answer", "mistakes"),
    [
        (RIGHT, []),
        (replace(RIGHT, verdict="ok", component="nothing"), ["verdict", "component"]),
        (replace(RIGHT, bisect=replace(SUB, nodes=("sub", "abs_1"))), ["bisect operator"]),
        (replace(RIGHT, bisect=replace(SUB, nodes=("subtract",))), ["bisect operator"]),
        (replace(RIGHT, cosim={"complete": Named()}), ["complete operator", "complete line"]),
        (replace(RIGHT, bisect=replace(SUB, lines=(f"{__file__}:1",))), ["bisect line"]),
        (replace(RIGHT, bisect=replace(SUB, lines=(*SUB.lines, f"{__file__}:1"))), ["bisect line"]),
    ],
)
def test_one_operator_and_its_line_are_right(answer, mistakes):
    """All operators of a kernel hold the right one, and say nothing."""
    assert [*wrong(FAULTS[answer.name], answer)] == mistakes


def test_answers_are_kept(tmp_path):
    file = tmp_path / "score.jsonl"
    assert read(file) == {}
    file.write_text(json.dumps(asdict(RIGHT)) + "\n")
    known = read(file)[RIGHT.name]
    assert [*wrong(FAULTS[RIGHT.name], known)] == []
    assert [*totals([known])][-1].startswith(
        "both: 1 faults, verdict 1, component 1, bisect operator 1 and line 1 of 1"
    )
