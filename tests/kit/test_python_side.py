"""Where in Python the time goes: whose a function's time is, and the call graph as files."""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pellucid.errors import UserError
from pellucid.kit.profile import python
from pellucid.kit.profile.measure import program_of, take
from pellucid.kit.profile.python import (
    GRAPHS,
    OPERATORS,
    YOURS,
    Seen,
    check_callgraph,
    look_at_python,
    python_side,
    write_callgraph,
)
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.registry import subject_of

TORCH = str(Path(torch.__file__).parent)
STEP = ("/home/me/model.py", 3, "step")
WRAPPER = (f"{TORCH}/_dynamo/eval_frame.py", 9, "wrapper")
RUN, SUM, LEN = (("~", 0, f"<built-in method {name}>") for name in ("run", "torch.sum", "builtins.len"))


def seen_of(functions: dict[Any, Any]) -> Seen:
    """functions: own and total seconds, and the total of the calls by each caller; one call of each."""
    stats = {
        key: (1, 1, own, total, {caller: (1, 1, min(own, by), by) for caller, by in callers.items()})
        for key, (own, total, callers) in functions.items()
    }
    return Seen(SimpleNamespace(stats=stats), 1, 10.0, 0.25)  # type: ignore[arg-type]


def test_the_time_outside_graphs_is_divided_by_whose_it_is():
    seen = seen_of({
        WRAPPER: (2.0, 10.0, {}),
        STEP: (1.0, 8.0, {WRAPPER: 8.0}),
        SUM: (3.0, 3.0, {STEP: 3.0}),
        RUN: (4.0, 4.0, {STEP: 4.0}),
        LEN: (0.0, 0.0, {STEP: 0.0}),
    })  # fmt: skip
    found = python_side(seen, python=60.0, plain=100.0, compiled=True)
    assert {part.name: part.microseconds for part in found.parts} == {OPERATORS: 30.0, "Dynamo": 20.0, YOURS: 10.0}
    assert found.guards_microseconds == 25.0 and found.slower == 1e5
    assert [each.name for each in found.functions] == [
        "wrapper",
        "step",
        "built-in method run",
        "built-in method torch.sum",
    ]
    assert found.functions[0].where == "torch/_dynamo/eval_frame.py:9" and found.functions[2].part == GRAPHS
    assert [(each.caller, each.callee) for each in found.calls] == [(0, 1), (1, 2), (1, 3)]
    eager = python_side(seen, python=60.0, plain=100.0, compiled=False)
    assert {part.name for part in eager.parts} == {"Dynamo", YOURS}


@torch.compiler.disable
def slow(values: list[int]) -> int:
    total = 0
    for value in values:
        total += value * value
    return total


def step(x: torch.Tensor) -> torch.Tensor:
    slow(list(range(5000)))  # pyright: ignore[reportArgumentType]
    return x * 2


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["pellucid", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_slow_function_of_the_user_is_found(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(python, "_SECONDS", 0.05)
    torch._dynamo.reset()
    program = program_of(Case("step", step, (torch.ones(8),)), subject_of(backend))
    (found,) = take([program], "step", 0.05)
    seen = found.python
    assert seen is not None and not seen.why_not and seen.guards_microseconds > 0
    assert sum(part.microseconds for part in seen.parts) == pytest.approx(found.overhead.python_microseconds)
    assert seen.parts[0].name == YOURS and seen.parts[0].microseconds > 0.5 * found.microseconds
    names = [each.name for each in seen.functions]
    assert {"slow", "step"} <= set(names)
    assert any(names[each.callee] == "slow" for each in seen.calls)  # by what keeps Dynamo out of it
    text = str(found)
    assert "slow" in text and "test_python_side.py" in text


def test_a_call_graph_as_files(tmp_path):
    seen = look_at_python(lambda: slow([1, 2]))  # pyright: ignore[reportArgumentType]
    write_callgraph(seen, tmp_path / "python.pstats")
    assert any(name == "slow" for _, _, name in pstats.Stats(str(tmp_path / "python.pstats")).stats)  # type: ignore[attr-defined]
    check_callgraph(tmp_path / "python.dot")
    write_callgraph(seen, tmp_path / "python.dot")
    assert "slow" in (tmp_path / "python.dot").read_text()
    with pytest.raises(UserError, match=r"cannot write .*/none/python.pstats"):
        write_callgraph(seen, tmp_path / "none" / "python.pstats")


def test_what_cannot_draw_a_call_graph_says_so_before_anything_is_measured(monkeypatch):
    with pytest.raises(UserError, match="unknown call graph format"):
        check_callgraph(Path("python.txt"))
    monkeypatch.setattr(python.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="Graphviz"):
        check_callgraph(Path("python.svg"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gprof2dot"):
        check_callgraph(Path("python.dot"))
    check_callgraph(Path("python.pstats"))


def test_another_tool_that_watches_is_told():
    other = cProfile.Profile()
    other.enable()
    try:
        seen = look_at_python(lambda: None)
    finally:
        other.disable()
    found = python_side(seen, 10.0, 20.0, True)
    if seen.stats is None:  # from Python 3.12 on; before, the other tool goes on afterwards
        assert found.why_not and not found.functions
        with pytest.raises(UserError, match="no call graph"):
            write_callgraph(seen, Path("python.dot"))
    else:
        assert not found.why_not
