"""A share of PyTorch's operator and module databases, chosen by hash; `make test-ops` runs all of both."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.operators.cases import Task, cases, tasks
from tests.operators.exceptions import reason
from tests.operators.large import PLAN, choose
from tests.operators.sweep import sweep
from tests.operators.workers import run_all

# One in so many tasks is run: by engine, database, direction and dtypes.
SHARES = (
    ("native", "ops", "forward", "f32,f64,bf16,f16,i64,u8,bool", 100),
    ("native", "ops", "training", "f64", 100),
    ("convolved", "ops", "training", "f64", 100),
    ("dynamic", "ops", "forward", "f32,i64,bool", 100),
    ("dynamic", "ops", "training", "f64", 100),
    ("native", "ops", "forward", "c64", 100),
    ("native", "ops", "training", "c128", 100),
    ("dynamic", "ops", "forward", "c64", 100),
    ("native", "ops", "forward", "u16,u32,u64", 200),
    ("native", "large", "forward", "f32,bf16,i64,u16,u32,u64", 200),
    ("native", "large", "training", "f32", 200),
    ("native", "modules", "training", "f32", 40),
    ("dynamic", "modules", "forward", "f32", 40),
)


def test_samples_match_eager() -> None:
    """All shares in one test: one set of worker processes serves them."""
    todo = [
        (engine, task)
        for engine, database, direction, dtypes, parts in SHARES
        for task in tasks(database, dtypes.split(","), [direction])
        if task.hash % parts == 0
    ]
    rows = sweep(todo, jobs=os.cpu_count() or 1, seconds=300.0)
    wrong = [row for row in rows if row.failed and reason(row.task, row.engine) is None]
    assert not wrong, "\n".join(f"{row.engine} {row.task} #{row.number}: {row.result}" for row in wrong)
    for column in {share[:3] for share in SHARES}:
        own = [row for row in rows if (row.engine, row.task.database, row.task.direction) == column]
        assert sum(not row.skipped for row in own) > len(own) // 2 > 0, column


def test_samples_are_the_same_in_every_process() -> None:
    """The list of exceptions can only be true if they are."""
    task = Task("ops", "add", "f32", "forward")
    first, second = (list(cases(task)) for _ in range(2))
    assert [case.sample for case in first] == [case.sample for case in second]
    for a, b in zip(first, second, strict=True):
        assert all(bool((x == y).all()) for x, y in zip(a.state, b.state, strict=True))


def test_large_samples_have_the_sizes_and_layouts_of_the_plan() -> None:
    found = list(cases(Task("large", "add", "f32", "forward")))
    assert [case.sample for case in found] == list(range(len(PLAN)))
    for case, (elements, layout) in zip(found, PLAN, strict=True):
        first = case.state[0]
        assert elements <= first.numel() < 2 * elements
        assert first.is_contiguous() == (layout == "contiguous")
        assert (0 in first.stride()) == (layout == "expanded")
        assert first.is_contiguous(memory_format=torch.channels_last) == (layout == "channels-last")


def test_a_sample_that_would_cost_too_much_is_grown_in_another_way() -> None:
    """Every pair of a million elements is more than memory holds; all pairs of two long columns and a few are not."""
    cost = []
    for elements, layout in PLAN[:3]:
        vector = torch.arange(5.0)
        assert choose(torch.combinations, [((vector,), {})], elements, layout) is None or elements == 257
        grown = choose(torch.cdist, [((torch.rand(5, 3), torch.rand(4, 3)), {})], elements, layout)
        assert grown is not None
        (one, other), _ = grown
        cost.append(one.shape[0] * other.shape[0])
    assert cost[0] < max(cost) < 1e8


def _misbehave(unit: str) -> str:
    if unit == "crash":
        os.abort()
    if unit == "hang":
        time.sleep(60)
    return unit.upper()


@pytest.mark.sampled
def test_a_worker_that_dies_is_a_result() -> None:
    units = ["a", "crash", "hang", "b"]
    found = {unit: (result, problem) for unit, result, problem in run_all(_misbehave, units, jobs=2, seconds=3.0)}
    assert found["a"] == ("A", "") and found["b"] == ("B", "")
    assert "exit code" in found["crash"][1] and "no answer" in found["hang"][1]


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep fails where the compiled program does: here every result is a little off."""
    from tests.operators import engines

    native = engines.ENGINES["native"]

    def wrong(program: engines.Program) -> engines.Program:
        return native(lambda states: [result * 1.001 for result in program(states)])

    monkeypatch.setitem(engines.ENGINES, "wrong", wrong)
    [case, *_] = cases(Task("ops", "exp", "f32", "forward"))
    assert engines.check([case], "wrong")[case].startswith("mismatch")
    assert engines.check([case], "native")[case] == "ok"


def test_a_wrong_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that puts convolutions before an operator fails where results keep the layout of those."""
    from pellucid.capture.relayout import Relayout
    from tests.operators.engines import check

    samples = list(cases(Task("ops", "sort", "f32", "forward")))
    assert {*check(samples, "convolved").values()} == {"ok"}
    monkeypatch.setattr(Relayout, "_as_captured", lambda self, node: self.new[node])
    assert any("strides" in why for why in check(samples, "convolved").values())
