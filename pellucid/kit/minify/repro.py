"""A program of its own that shows the failure of a graph: it needs torch and the backend, nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template

from pellucid.kit.programs.graphs import Graph, twin
from pellucid.kit.runs.literal import write_values

PROGRAM = "repro.py"

_TEXT = Template('''\
"""{{ title }}

Runs the graph eagerly and compiled, and compares; exits with 1 when they differ. Needs torch and the backend.
"""

import sys
{%- if stored %}
from pathlib import Path
{%- endif %}

import torch
from torch import device, inf, nan  # noqa: F401


class Graph(torch.nn.Module):
{{ code }}

{{ inputs }}

def make():
    return Graph(), tuple(make_inputs())


def run(function):
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*make_inputs())


if __name__ == "__main__":
    expected = run(Graph())
    actual = run(torch.compile(Graph(), backend={{ backend }}{{ arguments }}))
    bad = 0
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        same = a.shape == e.shape and a.dtype == e.dtype
        same = same and torch.allclose(a, e, rtol={{ rtol }}, atol={{ atol }}, equal_nan=True)
        print(f"output {position}: {'the same' if same else 'different'}, {tuple(e.shape)} {e.dtype}")
        bad += not same
    sys.exit(bad > 0)
''', keep_trailing_newline=True)  # fmt: skip


@dataclass(frozen=True, slots=True)
class How:
    """How a graph is compiled and compared. tolerance: of a wrong result, between what it may be off and what it is;
    0 where nothing is wrong by a number."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    tolerance: float = 0.0


def write_repro(graph: Graph, how: How, folder: Path, title: str) -> tuple[Path, str]:
    """Write `repro.py` into a folder, and `inputs.bin` where the numbers are many; returns the program's path
    and the text of the graph in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inputs.bin").unlink(missing_ok=True)
    graph = _used(graph)
    inputs = write_values(graph.inputs, folder)
    code = textwrap.indent(graph.module.code.strip(), "    ") + "\n"
    arguments = f", options={dict(how.options)!r}" if how.options else ""
    arguments += f", dynamic={how.dynamic}" if how.dynamic is not None else ""
    text = _TEXT.render(
        title=title,
        code=code,
        inputs=inputs.function(),
        stored=bool(inputs.statements),
        backend=repr(how.backend),
        arguments=arguments,
        rtol=0.0 if how.tolerance else 1e-3,
        atol=f"{how.tolerance:.2g}" if how.tolerance else 1e-4,
    )
    program = folder / PROGRAM
    program.write_text(text)
    return program, graph.module.code.strip()


def _used(graph: Graph) -> Graph:
    """The graph without the inputs that it does not use: sizes that compiling it had to know."""
    module = twin(graph.module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [each for node, each in zip(placeholders, graph.inputs, strict=True) if node.users]
    for node in placeholders:
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return Graph(graph.name, graph.kind, module, tuple(inputs))
