"""Compare one compiled graph with eager: each result, and each input that it changes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.judge import Output, kind_of
from pellucid.kit.judge.vary import InPlace, changed, unchanged
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, in_float64, interpret, is_random, widened, writers_of
from pellucid.kit.subjects.base import Probe, Subject


def judge_graph(graph: Graph, subject: Subject, probe: Probe | None = None) -> tuple[Output, ...]:
    """Compile a graph, run it and judge its results. Raises what eager or compiled code raises."""
    expected = expected_of(graph).compute()
    compiled = subject.compile(graph)
    return judge_run(graph, lambda inputs: compiled.run(inputs, probe), expected)


def judge_run(graph: Graph, run: Callable[[list[Any]], Sequence[Any]], expected: Expected) -> tuple[Output, ...]:
    """Run a compiled graph and judge its results."""
    inputs = list(copied(graph.inputs))
    torch.manual_seed(0)
    actual = _named(graph, run(inputs), inputs)
    return tuple(
        Output(f"{graph.name}: {name}", *kind_of(eager), expected.judge(name, actual[name]))
        for name, eager in expected.eager.items()
    )


def expected_of(graph: Graph) -> Expected:
    """The expected results of a graph, and final values of the inputs that it changes. Raises what eager raises."""

    def outcome(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return _named(graph, interpret(module, inputs), inputs)

    def eagerly(change: InPlace) -> dict[str, torch.Tensor]:
        return outcome(graph.module, changed(list(graph.inputs), change))

    def exactly(change: InPlace) -> dict[str, torch.Tensor] | None:
        """None where an operator does not support float64, or where it would draw other random numbers."""
        if any(is_random(node) for node in calls_of(graph.module)):
            return None
        try:
            return outcome(in_float64(graph.module), widened(changed(list(graph.inputs), change)))
        except Exception:
            return None

    return Expected(eagerly(unchanged), exactly, eagerly)


def _named(graph: Graph, results: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The results of a run of the graph, and the inputs that it changes, by name."""
    names = [node.name for node in graph.module.graph.find_nodes(op="placeholder")]
    written = {f"input {names[each]} (changed)": inputs[each] for each in writers_of(graph.module)}
    return outputs(results) | {name: value for name, value in written.items() if isinstance(value, torch.Tensor)}


def outputs(results: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among a graph's results, by name."""
    return {f"output {n}": value for n, value in enumerate(results) if isinstance(value, torch.Tensor)}
