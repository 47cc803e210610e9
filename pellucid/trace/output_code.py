"""The execution plan of a compiled graph as a Python program with its C++ kernels."""

from __future__ import annotations

import builtins
import keyword
import sys
import textwrap
from collections.abc import Iterator

from jinja2 import Template

from pellucid.codegen import CppKernel, CppPacking, functions_of, packings_of
from pellucid.execution_plan import Call, ExecutionPlan, Launch, Place, PlannedBuffer, where
from pellucid.ir.analysis import operator_of
from pellucid.ir.derived import Float, python_text
from pellucid.ir.index import Expr, text
from pellucid.ir.nodes import Arg, Enum, Extern, View
from pellucid.ir.types import TORCH_DTYPES
from pellucid.trace.fx_programs import INPUTS, Constants, input_text
from pellucid.trace.record import GraphRecord

_PROGRAM = Template('''\
"""Output code of {{ name }}: the calls that the native runtime makes, in order, and the C++ of its kernels.

`call` takes the list of the graph's arguments and returns the list of its results. Edit at will: an edited kernel is
compiled anew, and compared with the one in the folder `kernels`. Exits with 1 if results differ, or if it does not
compile.
"""

import sys

import torch
from torch import inf, nan  # noqa: F401

from pellucid.runnable import buffer, compare_edited, drawn, fit, load_kernels, saved, view  # noqa: F401
from pellucid.ir.derived import FUNCTIONS as F  # noqa: F401

VALUES = saved(__file__)
SOURCES = {}
{% for kernel in kernels %}
SOURCES["{{ kernel.name }}"] = r"""
{{ kernel.source }}
"""
{% endfor %}

def call(args, kernels):
{%- for line in body %}
    {{ line }}
{%- endfor %}


{{ make_inputs }}


def make_constants():
    return [
{%- for text in constants %}
        {{ text }},
{%- endfor %}
    ]


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(compare_edited(call, SOURCES, [*make_inputs(), *make_constants()], __file__))
''', keep_trailing_newline=True)  # fmt: skip

# Names that the text of `call` uses in addition to tensors and sizes.
HELPERS = frozenset("F args arena buffer fit kernels results torch view".split())
_TAKEN = HELPERS | frozenset(keyword.kwlist) | frozenset(dir(builtins))


def output_code(record: GraphRecord, constants: Constants | None = None) -> str:
    """The program's text. If all sizes are static, temporaries are in one arena, as in the native plan.

    constants: of the run folder that will contain the program.
    """
    distinct: dict[str, CppKernel | CppPacking] = {}
    for each in (record.before, record) if record.before else (record,):
        distinct |= {function.name: function for function in functions_of(each.kernels)}
    placeholders = record.graph.graph.find_nodes(op="placeholder")
    known = constants or Constants()
    return _PROGRAM.render(
        name=record.name,
        kernels=list(distinct.values()),
        body=list(_body(record)),
        make_inputs=INPUTS.render(inputs=[input_text(node.meta.get("val")) for node in placeholders]),
        constants=[known.text(tensor) for tensor in record.constants],
    )


def _name(name: str) -> str:
    """The Python name of a buffer or a size: unique, and none that the program uses otherwise."""
    name = name.replace(".", "_")  # of panels
    return f"{name}_" if name.rstrip("_") in _TAKEN else name


def _body(record: GraphRecord) -> Iterator[str]:
    plan = _plan_of(record)
    arguments = len(record.graph.graph.find_nodes(op="placeholder"))
    given = plan.inputs[:arguments] + plan.inputs[len(plan.inputs) - len(record.constants) :]
    names = [_name(name) if name is not None else "_" for name in given]
    if names:
        yield "("
        yield from textwrap.wrap(", ".join(names) + ",", width=108, initial_indent="    ", subsequent_indent="    ")
        yield ") = args"
    yield from _prepared(record)
    yield from _derived(plan)
    yield from _allocations(plan)
    for call in plan.calls:
        yield from _call(call, plan.supplied)
    yield f"return [{', '.join(map(_result, plan.results))}]"


def _plan_of(record: GraphRecord) -> ExecutionPlan:
    """The execution plan of a graph that has one."""
    assert record.plan is not None
    return record.plan


def _prepared(record: GraphRecord) -> Iterator[str]:
    """The code that the compiled graph runs before its first call; this program runs it in each call."""
    if record.before is not None:
        plan = _plan_of(record.before)
        yield "# With the option `freeze`, the code up to the panels runs only before the first call."
        yield from (_fresh(buffer) for buffer in plan.buffers if buffer.place in (Place.ARENA, Place.POOL))
        for call in plan.calls:
            yield from _call(call, plan.supplied)
    for packing in packings_of(record.kernels):
        panels = _name(packing.panels)
        yield f"{panels} = torch.empty({packing.numel})"
        yield f'kernels["{packing.name}"]([{_name(packing.buffer)}, {panels}], [], 1)'


def _derived(plan: ExecutionPlan) -> Iterator[str]:
    """Numbers derived from sizes; a float that kernels read is a tensor."""
    for each in plan.derived:
        formula = python_text(each.term)
        if each.name in plan.supplied:
            yield f"{each.name} = torch.tensor([{formula}], dtype=torch.float64)"
        else:
            yield f"{each.name} = {formula}"


def _allocations(plan: ExecutionPlan) -> Iterator[str]:
    memory = plan.memory_one_by_one
    if memory is not None and memory.offsets:
        yield f"arena = torch.empty({memory.arena_bytes}, dtype=torch.uint8)"
    for buffer in plan.buffers:
        if memory is not None and buffer.name in memory.offsets:
            numel, dtype = text(buffer.numel), TORCH_DTYPES[buffer.dtype]
            yield f"{_name(buffer.name)} = buffer(arena, {memory.offsets[buffer.name]}, {numel}, {dtype})"
        elif buffer.place in (Place.ARENA, Place.POOL):
            yield _fresh(buffer)


def _fresh(buffer: PlannedBuffer) -> str:
    return f"{_name(buffer.name)} = torch.empty({text(buffer.numel)}, dtype={TORCH_DTYPES[buffer.dtype]})"


def _call(call: Call, supplied: tuple[str, ...]) -> Iterator[str]:
    match call:
        case Launch():
            yield f"# {call.name}: {call.where}"
            first = call.variants[0]
            parameters, symbols = ", ".join(map(_parameter, call.params, call.offsets)), ", ".join(call.symbols)
            yield f'kernels["{first.symbol}"]([{parameters}], [{symbols}], {text(first.extent)})'
        case Extern():
            yield f"# {call.reason}: {where(call.origin)}"
            yield from _extern(call, supplied)


def _parameter(buffer: str, first: int) -> str:
    return f"view({_name(buffer)}, (1,), (1,), {first})" if first else _name(buffer)


def _extern(node: Extern, supplied: tuple[str, ...]) -> Iterator[str]:
    arguments = [_arg(arg, supplied) for arg in node.args]
    arguments += [f"{key}={_arg(value, supplied)}" for key, value in node.kwargs]
    if node.out:
        arguments.append(f"out={_arg(node.outputs[0], supplied)}")
    call = f"torch.ops.{operator_of(node.op)!s}({', '.join(arguments)})"
    if node.out or not node.outputs:
        yield call
        return
    several = len(node.outputs) > 1
    yield f"results = {call}" if several else f"results = [{call}]"
    for position, view in enumerate(node.outputs):
        if view is not None:
            yield f"{_name(view.buffer)} = fit(results[{position}], {_tuple(view.shape)}, {_tuple(view.strides)})"


def _arg(arg: Arg, supplied: tuple[str, ...]) -> str:
    match arg:
        case View():
            return _view(arg)
        case Expr():
            return text(arg)
        case Float(name) if name in supplied:
            return f"{name}.item()"
        case Float(name):
            return name
        case Enum("device", name):
            return f"torch.device({name!r})"
        case Enum(_, name):
            return f"torch.{name}"
        case tuple():
            return f"[{', '.join(_arg(item, supplied) for item in arg)}]"
        case float() if arg != arg or abs(arg) > sys.float_info.max:
            return f'float("{arg}")'
        case _:
            return repr(arg)


def _view(view: View) -> str:
    offset = f", {text(view.offset)}" if view.offset.value != 0 else ""
    return f"view({_name(view.buffer)}, {_tuple(view.shape)}, {_tuple(view.strides)}{offset})"


def _tuple(sizes: tuple[Expr, ...]) -> str:
    return f"({', '.join(text(size) for size in sizes)}{',' if len(sizes) == 1 else ''})"


def _result(output: View | Expr | None) -> str:
    match output:
        case View():
            return _view(output)
        case Expr():
            return text(output)
        case None:
            return "None"
