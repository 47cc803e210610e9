"""FX graphs as Python programs that run in a fresh process."""

from __future__ import annotations

import re
from typing import cast

import torch
from jinja2 import Template

from pellucid.capture.torch_compat import size_hint

# Larger constants of a graph are written as random tensors of the same layout.
_INLINE_ELEMENTS = 64

_RUNNABLE = Template('''\
"""{{ title }}

Runs the graph eagerly and compiled by Pellucid, on random inputs of the recorded layout, and compares. Edit at will.
"""

import torch
from torch import device, inf, nan  # noqa: F401  (names that the graph's text uses)

from pellucid.trace.replay import compare, make_input


{{ code }}

def make_graph():
    graph = CapturedGraph()
{%- for name, text in constants %}
    graph.{{ name }} = {{ text }}
{%- endfor %}
    return graph


def make_inputs():
    torch.manual_seed(0)
    return [
{%- for text in inputs %}
        {{ text }},
{%- endfor %}
    ]


if __name__ == "__main__":
    with torch.no_grad():
        compare(make_graph(), make_inputs())
''', keep_trailing_newline=True)  # fmt: skip


def readable(graph: torch.fx.GraphModule) -> str:
    """The graph's Python text with shapes, strides and user lines in comments."""
    return graph.print_readable(print_output=False, include_stride=True, include_device=False)


def runnable(graph: torch.fx.GraphModule, title: str) -> str:
    """A program that runs the graph, see `FILES`."""
    code = graph.print_readable(print_output=False)
    code = re.sub(r"^class \S+\(torch\.nn\.Module\):", "class CapturedGraph(torch.nn.Module):", code, count=1)
    nodes = list(graph.graph.nodes)
    constants = {str(n.target): getattr(graph, str(n.target)) for n in nodes if n.op == "get_attr"}
    return _RUNNABLE.render(
        title=title,
        code=code,
        constants=[(name, _constant(t)) for name, t in constants.items() if isinstance(t, torch.Tensor)],
        inputs=[input_text(node.meta.get("val")) for node in nodes if node.op == "placeholder"],
    )


def _constant(tensor: torch.Tensor) -> str:
    if tensor.numel() <= _INLINE_ELEMENTS and tensor.is_contiguous():
        numbers = cast(object, tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
        return f"torch.tensor({numbers!r}, dtype={tensor.dtype})"
    return input_text(tensor)


def input_text(value: object) -> str:
    """An expression that makes an input like the (fake) value; symbolic sizes take their hints."""
    if isinstance(value, torch.Tensor):
        shape = tuple(size_hint(size) for size in value.shape)
        strides = tuple(size_hint(stride) for stride in value.stride())
        return f"make_input({shape}, {strides}, {value.dtype})"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    return repr(value)
