"""Write a standalone program that reproduces a failure. That of a graph needs only torch and the backend; that of a
program whose graphs are right also needs the user's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template

from pellucid.kit.programs.graphs import Graph, twin
from pellucid.kit.runs.literal import write_values
from pellucid.kit.runs.standalone import standalone
from pellucid.kit.runs.target import Request

PROGRAM = "repro.py"

_TEXT = Template('''\
"""{{ title }}

Runs the graph eagerly and compiled, and compares; exits with 1 when they differ. Needs torch and the backend.
"""

{{ program }}def make():
    return Graph(), tuple(make_inputs())


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


_PROGRAM = Template('''\
"""{{ title }}

Runs {{ name }} of {{ file }} eagerly and compiled, and compares what it returns{{ and_gradients }}; exits with 1
when they differ. Needs that file, torch and the backend.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from torch import device, inf, nan  # noqa: F401
from torch.utils._pytree import tree_leaves

FILE = {{ file }}


def load():
    """The file as a module, imported unless it is already."""
    known = (each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == FILE)
    module = next(known, None)
    if module is None:
        sys.path.insert(0, str(Path(FILE).parent))
        spec = importlib.util.spec_from_file_location("program", FILE)
        module = sys.modules["program"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class First(torch.nn.Module):
    """Replaces a module, and returns its first argument."""

    def forward(self, first, *_, **__):
        return first


{{ inputs }}

def make():
    torch.manual_seed(0)
    function = load().{{ name }}()[0]
    for path in {{ modules }}:
        owner, _, name = path.rpartition(".")
        setattr(function.get_submodule(owner), name, First())
    args, kwargs = make_inputs()
    return function, args, kwargs


def run(backend):
    function, args, kwargs = make()
    called = torch.compile(function{{ arguments }}, backend=backend) if backend else function
    torch.manual_seed(0)
    with torch.set_grad_enabled({{ backward }}):
        result = called(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        state = list(function.parameters()) + list(function.buffers()) if isinstance(function, torch.nn.Module) else []
{%- if backward %}
        loss = getattr(result, "loss", None)
        if loss is None:
            torch.manual_seed(1)
            loss = sum((leaf.double() * torch.randn(leaf.shape)).sum() for leaf in found if leaf.requires_grad)
        loss.backward()
{%- endif %}
    gradients = [each.grad for each in (*taken, *state) if each.is_leaf and each.grad is not None]
    return [each.detach() for each in (*found, *taken, *state, *gradients)]


if __name__ == "__main__":
    expected, actual = run(None), run({{ backend }})
    bad = abs(len(expected) - len(actual))
    for position, (a, e) in enumerate(zip(actual, expected)):
        same = a.shape == e.shape and a.dtype == e.dtype
        same = same and torch.allclose(a, e, rtol=1e-3, atol=1e-4, equal_nan=True)
        print(f"tensor {position}: {'the same' if same else 'different'}, {tuple(e.shape)} {e.dtype}")
        bad += not same
    sys.exit(bad > 0)
''', keep_trailing_newline=True)  # fmt: skip


@dataclass(frozen=True, slots=True)
class How:
    """How a graph is compiled and compared. tolerance: for a wrong result, between the allowed and the actual error; 0
    for other failures."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    tolerance: float = 0.0


def write_repro(graph: Graph, how: How, folder: Path, title: str) -> tuple[Path, str]:
    """Write `repro.py`, and `inputs.bin` for large inputs, into a folder; returns the program's path and graph text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inputs.bin").unlink(missing_ok=True)
    graph = _without_unused_inputs(graph)
    arguments = f", options={dict(how.options)!r}" if how.options else ""
    arguments += f", dynamic={how.dynamic}" if how.dynamic is not None else ""
    text = _TEXT.render(
        title=title,
        program=standalone(graph, folder, "inputs", ("import sys",)),
        backend=repr(how.backend),
        arguments=_arguments(how.options, how.dynamic),
        rtol=0.0 if how.tolerance else 1e-3,
        atol=f"{how.tolerance:.2g}" if how.tolerance else 1e-4,
    )
    program = folder / PROGRAM
    program.write_text(text)
    return program, graph.module.code.strip()


def write_program_repro(
    request: Request,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[str],
    folder: Path,
    title: str,
) -> Path:
    """Write `repro.py` for a user's program with these arguments and without some of its modules."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inputs.bin").unlink(missing_ok=True)
    file, _, name = request.target.rpartition(":")
    text = _PROGRAM.render(
        title=title,
        file=repr(str(Path(file).resolve())),
        name=name,
        inputs=write_values([tuple(args), dict(kwargs)], folder).function(),
        modules=repr(tuple(modules)),
        backend=repr(request.backend),
        arguments=_arguments(request.options, request.dynamic),
        backward=request.backward,
        and_gradients=" and its gradients" if request.backward else "",
    )
    program = folder / PROGRAM
    program.write_text(text)
    return program


def _arguments(options: Mapping[str, Any], dynamic: bool | None) -> str:
    """The arguments of `torch.compile` after the backend, as text."""
    text = f", options={dict(options)!r}" if options else ""
    return text + (f", dynamic={dynamic}" if dynamic is not None else "")


def _without_unused_inputs(graph: Graph) -> Graph:
    """The graph without unused inputs: sizes that were needed only to compile it."""
    module = twin(graph.module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [each for node, each in zip(placeholders, graph.inputs, strict=True) if node.users]
    for node in placeholders:
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return Graph(graph.name, graph.kind, module, tuple(inputs))
