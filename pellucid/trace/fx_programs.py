"""FX graphs as Python programs that run in a new process."""

from __future__ import annotations

import pprint
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jinja2 import Template

from pellucid.capture.sizes import sizes_to_json
from pellucid.capture.torch_compat import is_symbolic, size_hint

# Constants of at most this many elements are written out.
_INLINE_ELEMENTS = 64

# Names that the text of every graph may use.
_PREDEFINED = ("torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree")

INPUTS = Template('''\
def make_inputs():
    """The arguments of the graph's first call; drawn if there was none."""
    if VALUES["inputs"] is not None:
        return VALUES["inputs"]
    torch.manual_seed(0)
    return [
{%- for text in inputs %}
        {{ text }},
{%- endfor %}
    ]
''')
"""Uses `torch`, `VALUES` and `drawn` of the program."""

_RUNNABLE = Template('''\
"""{{ title }}

Runs the graph eagerly and compiled by {{ backend }}, judges the results (float64 decides) and measures both. Exits with
1 if compiled code is wrong. Edit at will.
"""

import sys

import torch
from torch import device, inf, nan  # noqa: F401  (names that the graph's text uses)

from pellucid.runnable import compare_compiled, drawn, saved  # noqa: F401
{%- for line in imports %}
{{ line }}
{%- endfor %}

VALUES = saved(__file__)

# Which sizes of the inputs are symbols, and what they are in the first call; None: all sizes are fixed.
SIZES = {{ sizes }}


{{ code }}

def make_graph():
    graph = CapturedGraph()
{%- for line in attributes %}
    {{ line }}
{%- endfor %}
    return graph


{{ make_inputs }}


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(compare_compiled(make_graph(), make_inputs(), {{ kind }}, SIZES{{ how }}))
''', keep_trailing_newline=True)  # fmt: skip


@dataclass(slots=True)
class Constants:
    """The constants that the programs of a run folder share, in order of first use."""

    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _known: dict[int, int] = field(default_factory=dict[int, int])

    def text(self, tensor: torch.Tensor) -> str:
        """An expression for a constant, bit for bit."""
        if tensor.numel() <= _INLINE_ELEMENTS and tensor.is_contiguous() and not tensor.is_complex():
            numbers = cast(object, tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
            return f"torch.tensor({numbers!r}, dtype={tensor.dtype})"
        if id(tensor) not in self._known:
            self._known[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return f'VALUES["constants"][{self._known[id(tensor)]}]'


def readable(graph: torch.fx.GraphModule) -> str:
    """The graph's Python text with shapes, strides and user lines in comments."""
    return graph.print_readable(print_output=False, include_stride=True, include_device=False)


def runnable(
    graph: torch.fx.GraphModule,
    title: str,
    kind: str,
    constants: Constants,
    backend: str = "pellucid",
    options: Mapping[str, Any] | None = None,
) -> str:
    """A program that runs the graph, see `schema`. backend, options: for compiling it."""
    how = "" if backend == "pellucid" and not options else f", {backend!r}, {dict(options or {})!r}"
    code = graph.print_readable(print_output=False)
    code = re.sub(r"^class \S+\(torch\.nn\.Module\):", "class CapturedGraph(torch.nn.Module):", code, count=1)
    placeholders = graph.graph.find_nodes(op="placeholder")
    return _RUNNABLE.render(
        title=title,
        backend=backend.capitalize(),
        how=how,
        code=code,
        kind=repr(kind),
        imports=sorted(set(_imports(graph))),
        sizes=pprint.pformat(sizes_to_json(graph), width=110, compact=True),
        attributes=list(_attributes(graph, "graph", "CapturedGraph", constants)),
        make_inputs=INPUTS.render(inputs=[input_text(node.meta.get("val")) for node in placeholders]),
    )


def _attributes(graph: torch.fx.GraphModule, owner: str, kind: str, constants: Constants) -> Iterator[str]:
    """Statements that assign to a graph, and to nested graphs, the constants that they read."""
    seen: set[str] = set()
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in seen:
            continue
        seen.add(name)
        value: Any = getattr(graph, name)
        if isinstance(value, torch.Tensor):
            yield f"{owner}.{name} = {constants.text(value)}"
        elif isinstance(value, torch.fx.GraphModule):
            yield f'vars({owner})["{name}"] = {kind}.{name}()  # the class has the name too'
            yield from _attributes(value, f"{owner}.{name}", f"{kind}.{name}", constants)


def _imports(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Imports of the functions that the text of the graph calls by other names."""
    for name, value in graph.graph.python_code("self").globals.items():
        if name not in _PREDEFINED and callable(value):
            yield f"from {value.__module__} import {value.__qualname__} as {name}"
    for child in graph.children():
        if isinstance(child, torch.fx.GraphModule):
            yield from _imports(child)


def input_text(value: object) -> str:
    """An expression for an input like the (fake) value, with hints for symbolic sizes."""
    if isinstance(value, torch.Tensor):
        shape = tuple(size_hint(size) for size in value.shape)
        strides = tuple(size_hint(stride) for stride in value.stride())
        return f"drawn({shape}, {strides}, {value.dtype})"
    if isinstance(value, torch.SymInt):
        return str(size_hint(value)) if is_symbolic(value) else "0"  # size of a jagged tensor: unused
    return repr(value)
