"""The part of a graph that one kernel implements as a separate graph, with its inputs in the whole graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pellucid.capture.sizes import sizes_to_json
from pellucid.kit.process.child import raise_if_nothing_compiles
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, calls_of, cut, graph_of, size_inputs, values_of
from pellucid.kit.subjects.base import Compiled, Step, Subject

OTHER_KERNELS = "its operators compile to other kernels, both alone and with their neighbours"


def parts_with(step: Step, graph: Graph, compiled: Compiled, subject: Subject) -> Iterator[Graph]:
    """The parts of a graph that a subject compiles to this kernel when they are compiled alone, the smallest first."""
    for names, results in _parts(compiled, step):
        try:
            part = _part(graph, compiled, names, results)
        except KeyError:  # it needs a value that eager mode does not compute
            continue
        if _has(part, step, subject):
            yield part


def _parts(compiled: Compiled, step: Step) -> Iterator[tuple[Collection[str], Collection[str]]]:
    """Calls that may compile to the kernel, and the results to return (none: all that other calls need): first those
    that it implements, then also those of the steps that it shares buffers with, then (no calls) the captured graph.
    """
    own = set(step.origin.nodes)
    if step.values:
        yield own, step.values
    yield own, ()
    buffers = {*step.reads, *step.writes}
    neighbours = [each for each in compiled.steps if buffers & {*each.reads, *each.writes}]
    yield own.union(*(each.origin.nodes for each in neighbours)), ()
    yield (), ()


def _part(graph: Graph, compiled: Compiled, names: Collection[str], results: Collection[str]) -> Graph:
    if not names:
        return graph
    values = _values(graph, compiled, names)
    calls = [node for node in calls_of(compiled.graph) if node.name in names]
    module, inputs = cut(compiled.graph, names, values, size_inputs(compiled.graph, calls), results)
    return Graph(graph.name, graph.kind, module, tuple(copied(each) for each in inputs))


def _values(graph: Graph, compiled: Compiled, calls: Collection[str]) -> dict[str, Any]:
    """Eager's results of these calls and of their operands, as they were when they were computed."""
    module = compiled.graph
    needed = {other.name for node in module.graph.nodes if node.name in calls for other in node.all_input_nodes}
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, graph.inputs, strict=True))
    return given | values_of(module, copied(graph.inputs), lambda node: node.name in needed or node.name in calls)


def _has(part: Graph, step: Step, subject: Subject) -> bool:
    """Whether a part, compiled as the test compiles it, has the kernel; False if it cannot be compiled."""
    try:
        graph = graph_of(part.module, list(part.inputs), part.kind, sizes_to_json(part.module))
        made = subject.compile(graph)
    except Exception as error:
        raise_if_nothing_compiles(error)
        return False
    return any(each.fingerprint == step.fingerprint for each in made.steps if each.generated)
