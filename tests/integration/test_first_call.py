"""The C++ compiler works while Dynamo goes on: the first call of a program waits for it, and raises its errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, randn

from pellucid import pipeline
from pellucid.backend import compile_fx
from pellucid.errors import ToolchainError
from pellucid.native.build import Building


@dataclass
class Gate:
    """Holds back the compiler. error: what it raises instead. asked: how often it was wanted."""

    opened: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    asked: int = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, build = Gate(), pipeline.build

    def behind(*args: Any, **kwargs: Any) -> Any:
        gate.asked += 1
        assert gate.opened.wait(120)
        if gate.error:
            raise gate.error
        return build(*args, **kwargs)

    monkeypatch.setattr(pipeline, "build", behind)
    monkeypatch.setattr(pipeline, "is_built", lambda _: False)
    torch._dynamo.reset()
    yield gate
    gate.opened.set()


def function(x: Tensor) -> Tensor:
    return torch.softmax(x.sin() * 3 + 1, -1)


def test_compiling_does_not_wait_and_the_first_call_does(gate: Gate) -> None:
    x, made = randn(9, 37), list[Callable[..., Any]]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        made.append(compile_fx(graph, inputs))
        assert not gate.opened.is_set()  # Dynamo goes on to write its guards
        threading.Timer(0.2, gate.opened.set).start()
        return made[-1]

    run = torch.compile(function, backend=backend)
    torch.testing.assert_close(run(x), function(x))
    assert gate.opened.is_set() and gate.asked == 1 and len(made) == 1
    torch.testing.assert_close(run(-x), function(-x))
    assert gate.asked == 1


def test_training_and_sizes_that_change(gate: Gate) -> None:
    threading.Timer(0.5, gate.opened.set).start()
    run = torch.compile(function, backend="pellucid", dynamic=True)
    for rows in (4, 9):
        x = randn(rows, 31)
        ours, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        run(ours).square().sum().backward()
        function(expected).square().sum().backward()
        torch.testing.assert_close(ours.grad, expected.grad)


def test_threads_may_make_the_first_call_at_once(gate: Gate) -> None:
    x = randn(5, 37)
    graphs: list[tuple[torch.fx.GraphModule, Any]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    torch.compile(function, backend=keep)(x)
    run = compile_fx(*graphs[0])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(run(x)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.opened.set()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4 and gate.asked == 1
    for each in found:
        torch.testing.assert_close(each, function(x))


def test_each_call_raises_what_the_compiler_did(gate: Gate) -> None:
    gate.error = ToolchainError("planted: no compiler today")
    gate.opened.set()
    run, x = torch.compile(function, backend="pellucid"), randn(3, 5)
    for _ in range(2):
        with pytest.raises(ToolchainError, match="planted") as caught:
            run(x)
        assert caught.value.record.kind == "inference" and caught.value.record.kernels


def test_nothing_of_a_compilation_is_kept_for_errors_that_did_not_come(gate: Gate) -> None:
    records: list[weakref.ref[Any]] = []
    whole = pipeline.compile_graph

    def compile_graph(*args: Any) -> Any:
        run, record = whole(*args)
        records.append(weakref.ref(record.captured))
        return run, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.backend.compile_graph", compile_graph)
        gate.opened.set()
        run = torch.compile(function, backend="pellucid", options={"reuse": False})
        run(randn(4, 6))
    gc.collect()
    assert len(records) == 1 and records[0]() is None
    run(randn(4, 6))


def test_where_dynamo_suppresses_errors_compiling_waits(gate: Gate) -> None:
    gate.error = ToolchainError("planted: no compiler today")
    gate.opened.set()
    x = randn(3, 5)
    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch.equal(torch.compile(function, backend="pellucid")(x), function(x))


def test_a_run_folder_has_what_was_built(gate: Gate, tmp_path: Any) -> None:
    gate.error = ToolchainError("planted: no compiler today")
    gate.opened.set()
    run = torch.compile(function, backend="pellucid", options={"trace": str(tmp_path)})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="planted"):
        run(randn(3, 5))


def test_a_forked_child_builds_for_itself() -> None:
    held, made = threading.Event(), list[int]()

    def make() -> dict[str, int]:
        made.append(len(made))
        if len(made) == 1:
            assert held.wait(120)
        return {"kernel": 7 + len(made)}

    addresses = Building(make)
    addresses._owner = -1  # as the child sees it: the thread is in another process
    assert addresses["kernel"] == 9 and made == [0, 1] and list(addresses) == ["kernel"] and len(addresses) == 1
    held.set()
