"""How to run a graph that no single program can contain: segments, which become programs, and calls made from Python.

An outline prints as

    inputs x
    n0 = x.size(0)
    segment_0(x) -> add
    nonzero = aten.nonzero.default(add)    # the sizes of its result depend on data  [model.py:12]
    u0 = nonzero.size()[0]
    segment_1(u0, nonzero) -> mul
    output mul, u0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from pellucid.capture.torch_compat import KeyPath, keystr
from pellucid.ir.decision import Decision
from pellucid.ir.derived import Derived, Term, term_text
from pellucid.ir.index import Expr, text
from pellucid.ir.origin import Origin


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an FX node, by the node's name."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number computed from the sizes known so far; `in_tensor`: it is passed as a tensor of one f64."""

    term: Term
    in_tensor: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """Binds the symbol `name` to the number at `path` in the value `source`."""

    name: str
    source: str
    path: KeyPath


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and strides, in elements."""

    dtype: torch.dtype
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """Gives the tensors in the value `name` the layouts that the rest of the graph was captured with.

    layouts: one per leaf of the value; None for leaves that are no tensors.
    """

    name: str
    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the graph that is compiled. outputs: names of its results, by which later steps refer to them.

    graph: None where it was compiled by an earlier process.
    """

    name: str
    graph: torch.fx.GraphModule | None
    inputs: tuple[Ref | Number, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A call made from Python: of an operator, a higher-order operator or a function.

    args, kwargs: as in the FX graph, with `Ref` and `Number` in place of nodes.
    reason: why no program can contain it; empty for selecting one of several results.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reason: str
    origin: Origin


Step: TypeAlias = Segment | EagerCall | Bind | Fit


@dataclass(frozen=True, slots=True)
class Outline:
    """A graph in steps, in the graph's order.

    inputs: names of the graph's arguments. outputs: `Ref`s, `Number`s, and values that are returned unchanged.
    derived: integers that follow from the symbols.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    derived: dict[str, Derived]
    decisions: tuple[Decision, ...]

    @property
    def calls(self) -> tuple[EagerCall, ...]:
        """The calls made from Python because no program can contain them."""
        return tuple(step for step in self.steps if isinstance(step, EagerCall) and step.reason)


# Higher-order operators whose eager implementation just calls their graphs. Others inspect them.
_CALLERS = frozenset(("cond", "while_loop", "map_impl", "scan", "invoke_subgraph"))


def with_compiled_graphs(step: Step, compiled: Callable[[torch.fx.GraphModule], Any]) -> Step:
    """`step` with compiled functions in place of the graphs that a higher-order operator calls.

    compiled: compiles a graph into a function of the list of its arguments.
    """
    if not isinstance(step, EagerCall) or not isinstance(step.function, torch._ops.HigherOrderOperator):
        return step
    if step.function.name() not in _CALLERS:
        return step
    return replace(step, args=tuple(_compiled(arg, compiled) for arg in step.args))


def _compiled(arg: Any, compiled: Callable[[torch.fx.GraphModule], Any]) -> Any:
    if not isinstance(arg, torch.fx.GraphModule):
        return arg
    if any("val" not in node.meta for node in arg.graph.nodes if node.op == "placeholder"):
        return arg
    return Subgraph(compiled(arg), type(arg.graph.output_node().args[0]))


class Subgraph:
    """A compiled graph with the signature that a higher-order operator expects.

    returned: the type of the graph's result: a tuple, a list, or a node for a result that is not in a sequence.
    """

    def __init__(self, function: Callable[[list[Any]], list[Any]], returned: type) -> None:
        self._function = function
        self._returned = returned

    def __call__(self, *args: Any) -> Any:
        results = self._function(list(args))
        if issubclass(self._returned, torch.fx.Node):
            return results[0]
        return tuple(results) if issubclass(self._returned, tuple) else results


def outline_text(outline: Outline) -> str:
    """The outline as text; see the top of this file."""
    return "\n".join(_lines(outline))


def _lines(outline: Outline) -> Iterator[str]:
    yield f"inputs {', '.join(outline.inputs)}"
    for each in outline.derived.values():
        yield f"{each.name} = {term_text(each.term)}"
    for step in outline.steps:
        match step:
            case Bind(name, source, path):
                yield f"{name} = {source}{keystr(path)}"
            case Fit(name, layouts):
                yield f"fit {name} to {', '.join(map(_layout_text, layouts))}"
            case Segment(name, _, inputs, outputs):
                yield f"{name}({', '.join(map(_text, inputs))}) -> {', '.join(outputs) or 'nothing'}"
            case EagerCall():
                yield _call_line(step)
    yield f"output {', '.join(map(_text, outline.outputs))}"


def _call_line(call: EagerCall) -> str:
    args = [_text(arg) for arg in call.args] + [f"{name}={_text(value)}" for name, value in call.kwargs.items()]
    user = f"  [{call.origin.users[-1]}]" if call.origin.users else ""
    comment = f"    # {call.reason}{user}" if call.reason else ""
    return f"{call.name} = {function_name(call.function)}({', '.join(args)}){comment}"


def _layout_text(layout: Layout | None) -> str:
    if layout is None:
        return "-"
    shape, strides = (", ".join(map(text, sizes)) for sizes in (layout.shape, layout.strides))
    return f"({shape}) strides ({strides})"


def function_name(function: Any) -> str:
    """`aten.nonzero.default`, `cond`, `getitem`"""
    return (
        str(function) if isinstance(function, torch._ops.OperatorBase) else getattr(function, "__name__", str(function))
    )


def _text(value: Any) -> str:
    match value:
        case Ref(name):
            return name
        case Number(term):
            return term_text(term)
        case list() | tuple():
            return f"[{', '.join(map(_text, value))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
        case torch.nn.Module() | Subgraph():
            return "<graph>"
        case torch.Tensor():
            return f"<{value.dtype} tensor>"
        case _:
            return repr(value)
