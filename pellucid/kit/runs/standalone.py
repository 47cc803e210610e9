"""A graph and its inputs as a standalone program: the first part of a repro, or of the test of a kernel."""

from __future__ import annotations

import textwrap
from pathlib import Path

from jinja2 import Template

from pellucid.kit.programs.graphs import Graph
from pellucid.kit.runs.literal import write_values

_TEXT = Template('''\
{{ imports | join("\n") }}
{%- if stored %}
from pathlib import Path
{%- endif %}

import torch
from torch import device, inf, nan  # noqa: F401
{{ more }}

class Graph(torch.nn.Module):
{{ code }}

{{ inputs }}

def run(function):
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*make_inputs())


''', keep_trailing_newline=True)  # fmt: skip


def standalone(graph: Graph, folder: Path, stem: str, imports: tuple[str, ...], more: str = "") -> str:
    """Program text: `Graph`, the graph as a module; `make_inputs()`; `run(function)`, a call with a fixed seed.

    stem: the name of the file next to the program (`STEM.bin`) that stores large tensors. imports: lines that import
    standard modules; more: text below them. Raises NotWritable for inputs that cannot be written as program text.
    """
    inputs = write_values(graph.inputs, folder, stem)
    code = textwrap.indent(graph.module.code.strip(), "    ") + "\n"
    stored = inputs.file is not None
    return _TEXT.render(imports=imports, stored=stored, more=more, code=code, inputs=inputs.function())
