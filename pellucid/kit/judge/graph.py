"""Does one compiled graph do what eager does? What it returns, and the inputs that it changes, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import Output, kind_of
from pellucid.kit.judge.vary import nudged
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, in_float64, interpret, is_random, widened, writes
from pellucid.kit.subjects.base import Probe, Subject


def judge_graph(graph: Graph, subject: Subject, probe: Probe | None = None) -> tuple[Output, ...]:
    """Compile a graph and judge its outcome. Raises what eager or compiled code raises."""
    expected = expected_of(graph).compute()
    compiled = subject.compile(graph)
    inputs = list(copied(graph.inputs))
    torch.manual_seed(0)
    actual = _named(graph, compiled.run(inputs, probe), inputs)
    return tuple(
        Output(f"{graph.name}: {name}", *kind_of(eager), expected.judge(name, actual[name]))
        for name, eager in expected.eager.items()
    )


def expected_of(graph: Graph) -> Expected:
    """What a graph should return, and leave in the inputs that it changes. Raises what eager raises."""

    def outcome(inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return _named(graph, interpret(graph.module, inputs), inputs)

    def exactly() -> dict[str, torch.Tensor] | None:
        """None where an operator has no float64, or where it would draw other random numbers."""
        if any(is_random(node) for node in calls_of(graph.module)):
            return None
        inputs = widened(list(graph.inputs))
        try:
            return _named(graph, interpret(in_float64(graph.module), inputs), inputs)
        except Exception:
            return None

    return Expected(outcome(copied(graph.inputs)), exactly, lambda seed: outcome(nudged(graph.inputs, seed)))


def _named(graph: Graph, results: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What a run of the graph left: its results, and the inputs that it was to change."""
    found = outputs(results)
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, torch.Tensor) and any(writes(user, node) for user in node.users):
            found[f"input {node.name} (changed)"] = value
    return found


def outputs(results: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors of what a graph returned."""
    return {f"output {n}": value for n, value in enumerate(results) if isinstance(value, torch.Tensor)}
