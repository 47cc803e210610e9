"""The option `background`: calls are right before, while and after their kernels are built."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pellucid
from pellucid import pipeline
from pellucid.backend import last_compilations, last_starts, wait_for_builds
from pellucid.bench import Case, Settings, compare
from pellucid.debug import check
from pellucid.errors import ToolchainError
from pellucid.native.children import Children
from pellucid.native.store import KernelStore
from tests.support import randn


@dataclass
class Gate:
    """Holds back the compiler. waited: builds that came to it. error: what a build raises instead."""

    opened: threading.Event = field(default_factory=threading.Event)
    waited: int = 0
    error: Exception | None = None

    def open(self) -> None:
        self.opened.set()
        assert wait_for_builds(120)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Programs count as not built, and building them waits until the gate is open."""
    gate, build = Gate(), pipeline.build

    def build_behind(*args: Any, **kwargs: Any) -> Any:
        gate.waited += 1
        assert gate.opened.wait(120)
        if gate.error:
            raise gate.error
        return build(*args, **kwargs)

    monkeypatch.setattr(pipeline, "build", build_behind)
    monkeypatch.setattr(pipeline, "is_built", lambda _: False)
    torch._dynamo.reset()
    yield gate
    gate.opened.set()
    wait_for_builds(120)


def compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(function, backend="pellucid", dynamic=dynamic, options={"background": True, **options})


def function(x: Tensor) -> Tensor:
    return torch.softmax(x.sin() * 2 + 1, -1)


def test_operators_compute_until_kernels_are_built(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = compiled(function), randn(9, 33)
    before = [run(x), run(x)]
    with torch.profiler.profile() as profiler:
        run(x)
    assert "aten::sin" in {event.key for event in profiler.key_averages()}
    gate.open()
    with torch.profiler.profile() as profiler:
        after = run(x)
    assert "aten::sin" not in {event.key for event in profiler.key_averages()}
    for each in (*before, after):
        torch.testing.assert_close(each, function(x))
    assert gate.waited == 1 and not wait_for_builds()
    (made,) = last_compilations()
    assert made.kernels == 1 and "build" not in made.seconds


def masked(x: Tensor) -> Tensor:
    return F.dropout(x.exp(), 0.3, training=True)


@pytest.mark.parametrize("opened", ["never", "between", "before"])
def test_training_may_meet_the_end_of_a_build_anywhere(gate: Gate, opened: str) -> None:
    """The random numbers are the same ones, and what forward kept serves either backward."""
    x = randn(16, 40)
    expected = x.clone().requires_grad_()
    torch.manual_seed(3)
    masked(expected).square().sum().backward()
    ours = x.clone().requires_grad_()
    run = compiled(masked)
    for _ in range(3):
        ours.grad = None
        torch.manual_seed(3)
        if opened == "before" and gate.waited and not gate.opened.is_set():
            gate.open()
        loss = run(ours).square().sum()
        if opened == "between" and not gate.opened.is_set():
            gate.open()
        loss.backward()
        torch.testing.assert_close(ours.grad, expected.grad)


def test_autocast_is_applied_once(gate: Gate) -> None:
    """The graph has its casts; a region without autocast stays in float32."""

    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            wide = x @ y
        return wide, x @ y

    run, x, y = compiled(mixed), randn(8, 8), randn(8, 8)
    for opened in (False, True):
        if opened:
            gate.open()
        with torch.autocast("cpu", torch.bfloat16):
            for ours, theirs in zip(run(x, y), mixed(x, y), strict=True):
                torch.testing.assert_close(ours, theirs)


def changed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2).add_(y)
    return x[1:], x.t().contiguous()


def test_arguments_that_are_changed_and_returned(gate: Gate) -> None:
    run, y = compiled(changed), randn(4, 4)
    for opened in (False, True):
        if opened:
            gate.open()
        x = torch.ones(4, 4)
        part, turned = run(x, y)
        assert torch.equal(x, 2 + y) and torch.equal(turned, x.t()) and part.data_ptr() == x[1:].data_ptr()


def test_sizes_may_change_meanwhile(gate: Gate) -> None:
    run = compiled(function, dynamic=True)
    for rows in (3, 5, 4):
        torch.testing.assert_close(run(randn(rows, 33)), function(randn(rows, 33)))
    gate.open()
    for rows in (3, 5, 7):
        torch.testing.assert_close(run(randn(rows, 33)), function(randn(rows, 33)))
    assert len(last_compilations()) == 1


def test_freezing_prepares_parameters_when_it_is_built(gate: Gate) -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), randn(5, 16)
    run = compiled(model, freeze=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        model[0].weight.mul_(3)
        torch.testing.assert_close(run(x), model(x))
        gate.open()
        torch.testing.assert_close(run(x), model(x))
        model[2].bias.add_(1)
        torch.testing.assert_close(run(x), model(x))


def test_a_graph_of_several_programs_waits(gate: Gate) -> None:
    gate.opened.set()
    run = compiled(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() * 2, (x,)).exp())
    x = randn(8)
    with torch.no_grad():
        torch.testing.assert_close(run(x), torch.where(x.sum() > 0, x.sin() + 1, x.cos() * 2).exp())
    assert gate.waited and not wait_for_builds()


@pytest.mark.parametrize("why", ["trace", "deterministic", "built"])
def test_what_need_not_or_must_not_run_otherwise_waits(
    gate: Gate, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    torch.use_deterministic_algorithms(why == "deterministic")
    if why == "built":
        monkeypatch.setattr(pipeline, "is_built", lambda _: True)
    try:
        run = compiled(function, trace=str(tmp_path) if why == "trace" else "")
        assert torch.equal(run(randn(9, 33)), run(randn(9, 33)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert gate.waited == 1 and not wait_for_builds()
    assert "build" in last_compilations()[0].seconds


def test_what_a_build_raises_each_later_call_raises(gate: Gate) -> None:
    run, x = compiled(function), randn(9, 33)
    torch.testing.assert_close(run(x), function(x))
    gate.error = ToolchainError("no compiler left")
    gate.open()
    for _ in range(2):
        with pytest.raises(ToolchainError, match="no compiler left"):
            run(x)


def test_waiting_for_builds_has_a_limit(gate: Gate) -> None:
    run = compiled(function)
    run(randn(9, 33))
    with pytest.raises(TimeoutError, match=r"inference_\d+ are still being built"):
        wait_for_builds(0.01)
    gate.open()


def test_threads_that_call_while_it_is_built(gate: Gate) -> None:
    run, x, failed = compiled(function), randn(9, 33), list[BaseException]()
    expected, stop = function(x), threading.Event()
    run(x)

    def call() -> None:
        try:
            while not stop.is_set():
                torch.testing.assert_close(run(x), expected)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.open()
    stop.wait(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_forked_child_builds_for_itself(gate: Gate) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run, x = compiled(function), randn(9, 33)
        expected = function(x)
        run(x)
        child = os.fork()
        if not child:
            status = 1
            try:
                torch.testing.assert_close(run(x), expected)
                gate.opened.set()
                assert wait_for_builds(120)
                torch.testing.assert_close(run(x), expected)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        torch.testing.assert_close(run(x), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("trains", [False, True])
def test_the_next_process_finds_what_was_built(gate: Gate, trains: bool, tmp_path: Path) -> None:
    """With the option or without it."""
    x = randn(6, 30).requires_grad_(trains)
    store = KernelStore("background", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.reuse.default_store", lambda: store)
        for count, background in enumerate((True, False, True)):
            torch._dynamo.reset()
            run = compiled(function, background=background, reuse=True)
            outcome = run(x)
            if trains:
                outcome.sum().backward()
            if not count:
                gate.open()
                for thread in threading.enumerate():
                    if thread.name == "pellucid-build":
                        thread.join()
            torch.testing.assert_close(run(x), function(x))
            assert last_starts()[-1].outcome == ("found" if count else "missed")


def test_the_kit_looks_at_the_compiled_program(gate: Gate) -> None:
    gate.opened.set()
    found = check(function, (randn(9, 33),), options={"background": True})
    assert gate.waited and not wait_for_builds() and found.verdict.value == "rounding"  # operators: equal


def test_profiles_and_benchmarks_wait(gate: Gate) -> None:
    run, x = compiled(function), randn(9, 33)
    run(x)
    opener = threading.Timer(0.1, gate.opened.set)
    opener.start()
    with pellucid.profile() as profile:
        run(x)
    opener.join()
    assert profile.result.graph_runs == 1
    result = compare(Case("own", function, (x,)), Settings(subjects=("pellucid:background=True",), budget=0.05))
    assert result.subjects[1].kernels == 1 and not wait_for_builds()


def test_compilers_leave_cores_to_calls() -> None:
    store = KernelStore("background")
    for yielding in (False, True):
        status, said = Children(yielding).run(["sh", "-c", "sleep 0.2; nice"], store, 60)
        assert status == 0 and (int(said) > os.nice(0)) == yielding
