"""A test for each kernel: a file that pytest runs, with the small FX graph that the kernel implements and its inputs.

The inputs are those that eager gives the kernel's operators in the program. How far compiled code may be from eager is
measured when the test is written, as `judge` does: from eager's own distance to float64. Run as a program, a file
measures its kernel against eager instead.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from pellucid.errors import UserError
from pellucid.kit.debug.check import Request, captured
from pellucid.kit.judge.graph import expected_of
from pellucid.kit.process.child import SECONDS, Worker
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import Graph, cut, rebound, values_of
from pellucid.kit.runs.literal import NotWritable, write_values
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Compiled, Step


@dataclass(frozen=True, slots=True)
class Generated:
    """A test of a kernel. kernels: all of the program that share its C++, as `graph:kernel`. file: empty where there is
    none; why: then, why not.
    """

    symbol: str
    kernels: tuple[str, ...]
    fx_nodes: tuple[str, ...]
    file: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tests(Shown):
    """The tests of a program's kernels: one for each different kernel."""

    backend: str
    tests: tuple[Generated, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(test.file for test in self.tests if test.file)

    @property
    def good(self) -> bool:
        """Whether every kernel has one."""
        return all(test.file for test in self.tests)


def testgen(
    request: Request, folder: Path, kernels: Sequence[str] = (), seconds: float = SECONDS, memory: int = 0
) -> Tests:
    """Write a test for each different kernel of a program, or for those named (by kernel or symbol), into a folder.

    Raises UserError for a program that does not compile, and for a kernel that it does not have.
    """
    what = (request, str(folder), tuple(kernels))
    refused, hint = f"{request.target} does not compile", "see `pellucid explain`"
    with Worker(memory) as worker:
        return worker.ask(generate, *what, seconds=seconds, refused=refused, hint=hint)


# ------------------------------------------------------------------------------------------------ in the worker


def generate(request: Request, folder: str, kernels: Sequence[str]) -> Tests:
    """The same in this process."""
    graphs, subject = captured(request)
    Path(folder).mkdir(parents=True, exist_ok=True)
    made: dict[str, Generated] = {}
    for graph in graphs:
        compiled = subject.compile(graph)
        steps = [step for step in compiled.steps if step.generated and _is_named(step, kernels)]
        fresh = [step for step in {step.symbol: step for step in reversed(steps)}.values() if step.symbol not in made]
        for test in _tests(graph, compiled, fresh, Path(folder), request):
            made[test.symbol] = test
        for step in steps:
            known = made[step.symbol]
            made[step.symbol] = Generated(
                known.symbol, (*known.kernels, f"{graph.name}:{step.name}"), known.fx_nodes, known.file, known.why
            )
    missing = set(kernels) - {name for test in made.values() for name in _names(test)}
    if missing:
        raise UserError(f"there is no kernel {', '.join(sorted(missing))}", hint="`pellucid match` lists them")
    return Tests(subject.name, tuple(made.values()))


def _is_named(step: Step, kernels: Collection[str]) -> bool:
    return not kernels or step.name in kernels or step.symbol in kernels


def _names(test: Generated) -> Iterator[str]:
    yield test.symbol
    yield from (kernel.partition(":")[2] for kernel in test.kernels)


def _tests(
    graph: Graph, compiled: Compiled, steps: Sequence[Step], folder: Path, request: Request
) -> Iterator[Generated]:
    members = {step.symbol: {node for node in step.origin.nodes} for step in steps}
    values = _values(graph, compiled, {name for nodes in members.values() for name in nodes})
    for step in steps:
        file = folder / f"test_{step.symbol}.py"
        try:
            _write(_part(graph, compiled, members[step.symbol], values), step, file, request)
        except (NotWritable, KeyError) as error:
            yield Generated(step.symbol, (), step.origin.nodes, "", f"{type(error).__name__}: {error}")
        else:
            yield Generated(step.symbol, (), step.origin.nodes, str(file))


def _values(graph: Graph, compiled: Compiled, calls: Collection[str]) -> dict[str, Any]:
    """Eager's results of these calls and of what they need, as they were when they came to be."""
    module = compiled.graph
    needed = {other.name for node in module.graph.nodes if node.name in calls for other in node.all_input_nodes}
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, graph.inputs, strict=True))
    return given | values_of(module, copied(graph.inputs), lambda node: node.name in needed or node.name in calls)


def _part(graph: Graph, compiled: Compiled, names: Collection[str], values: dict[str, Any]) -> Graph:
    module, inputs = cut(compiled.graph, names, values)
    inputs = [copied(each) for each in inputs]
    return Graph(graph.name, graph.kind, rebound(module, inputs), tuple(inputs))


def _write(part: Graph, step: Step, file: Path, request: Request) -> None:
    inputs = write_values(part.inputs, file.parent, file.stem)
    file.write_text(
        _TEXT.render(
            graph=part.name,
            step=step,
            users=[str(user) for user in step.origin.users],
            code=textwrap.indent(part.module.code.strip(), "    ") + "\n",
            inputs=inputs.function(),
            stored=inputs.file is not None,
            tolerances=list(_tolerances(part)),
            arguments=f"backend={request.backend!r}"
            + (f", options={dict(request.options)!r}" if request.options else ""),
        ),
        encoding="utf-8",
    )


def _tolerances(part: Graph) -> Iterator[float]:
    """By result, how far compiled code may be from eager."""
    expected = expected_of(part)
    return (float(f"{expected.tolerance(name):.2e}") for name in expected.eager if name.startswith("output"))


_TEXT = Template('''\
"""Kernel {{ step.symbol }} ({{ step.name }} of graph {{ graph }}).

FX nodes: {{ step.origin.nodes | join(", ") | wordwrap(100) }}
{%- for line in users %}
at {{ line }}
{%- endfor %}

`pytest` compares it with eager; run as a program, this file measures both.
"""

import statistics
import time
{%- if stored %}
from pathlib import Path
{%- endif %}

import torch
from torch import device, inf, nan  # noqa: F401

# By result: how far it may be from eager's, from eager's own distance to float64.
TOLERANCES = {{ tolerances }}


class Graph(torch.nn.Module):
{{ code }}

{{ inputs }}

def compiled():
    torch._dynamo.reset()
    return torch.compile(Graph(), {{ arguments }}, dynamic=False)


def run(function):
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*make_inputs())


def test_compiled_as_eager():
    expected, actual = run(Graph()), run(compiled())
    assert len(actual) == len(expected) == len(TOLERANCES)
    for a, e, tolerance in zip(actual, expected, TOLERANCES):
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance, equal_nan=True)


def benchmark(rounds=50):
    """Seconds per call of eager and compiled, taken in turns."""
    calls, inputs = {"eager": Graph(), "compiled": compiled()}, make_inputs()
    seconds = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call(*inputs)
                seconds[name].append(time.perf_counter() - start)
    for name, each in seconds.items():
        q1, q2, q3 = statistics.quantiles(each, n=4)
        print(f"{name:>8}: median {q2 * 1e6:.1f} us, quartiles {q1 * 1e6:.1f} to {q3 * 1e6:.1f}")


if __name__ == "__main__":
    benchmark()
''', keep_trailing_newline=True)  # fmt: skip
