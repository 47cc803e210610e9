"""Does one compiled graph do what eager does? What it returns, and the inputs that it changes, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pellucid.kit.judge.judge import DRAWS, Output, judge, kind_of
from pellucid.kit.judge.vary import nudged
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, in_float64, interpret, is_random, widened, writes
from pellucid.kit.subjects.base import Probe, Subject


def judge_graph(graph: Graph, subject: Subject, probe: Probe | None = None) -> tuple[Output, ...]:
    """Compile a graph and judge its outcome. Raises what eager or compiled code raises."""
    eager = _outcome(graph, graph.module, copied(graph.inputs))
    exact = outcome_in_float64(graph) or eager
    draws = [_outcome(graph, graph.module, nudged(graph.inputs, seed)) for seed in range(DRAWS)]
    compiled = subject.compile(graph)
    inputs = list(copied(graph.inputs))
    torch.manual_seed(0)
    actual = _named(graph, compiled.run(inputs, probe), inputs)
    return tuple(_judged(graph.name, actual, eager, exact, draws))


def _judged(
    graph: str,
    actual: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    draws: Sequence[Mapping[str, torch.Tensor]],
) -> Iterator[Output]:
    for name, expected in eager.items():
        found = judge(actual[name], expected, exact[name], [draw[name] for draw in draws])
        yield Output(f"{graph}: {name}", *kind_of(expected), found)


def _outcome(graph: Graph, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return _named(graph, interpret(module, inputs), inputs)


def _named(graph: Graph, results: Sequence[Any], inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What a run of the graph left: its results, and the inputs that it was to change."""
    found = {f"output {n}": value for n, value in enumerate(results) if isinstance(value, torch.Tensor)}
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, torch.Tensor) and any(writes(user, node) for user in node.users):
            found[f"input {node.name} (changed)"] = value
    return found


def outcome_in_float64(graph: Graph) -> dict[str, torch.Tensor] | None:
    """The outcome in float64; None as for `run_in_float64`."""
    wide = run_in_float64(graph)
    return None if wide is None else _named(graph, *wide)


def run_in_float64(graph: Graph) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """What a graph returns in float64, and its inputs after that.

    None where an operator has no float64, or where it would draw other random numbers.
    """
    if any(is_random(node) for node in calls_of(graph.module)):
        return None
    inputs = widened(list(graph.inputs))
    try:
        return interpret(in_float64(graph.module), inputs), inputs
    except Exception:
        return None
