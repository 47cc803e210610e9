"""Replaces complex tensors by pairs of real ones, their parts, which kernels can compute.

    before: `%c = mul(%a, %b)`
    after:  `%real = sub(mul(%a0, %b0), mul(%a1, %b1))`, `%imag = add(mul(%a0, %b1), mul(%a1, %b0))`

A complex tensor is assembled from its parts where it is returned or read by an operator without a rule (a Fourier
transform), and split into parts where it comes from such an operator or the caller. The formulas are eager's, so that
NaN and infinities appear where they do in eager mode.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pellucid.capture.complex_rules import REAL, Call, Parts, from_pairs, laid_out, paired, rule_of
from pellucid.capture.fx import strides_of
from pellucid.capture.torch_compat import call_in, fake_result, graph_module_of
from pellucid.capture.transform import aliases, may_write, returned
from pellucid.ir.decision import Decision
from pellucid.ir.index import ZERO

aten = torch.ops.aten


def in_parts(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[tuple[Node, Decision], ...]]:
    """The graph with real parts instead of complex tensors, unchanged if it has none; and the decisions.

    Each decision comes with a call of the new graph.
    """
    if not any(map(_is_complex, graph_module.graph.nodes)):
        return graph_module, ()
    made = _Parted(graph_module.graph)
    for node in graph_module.graph.nodes:
        made.add(node)
    made.graph.eliminate_dead_code(lambda node: node.op != "call_function" or may_write(node))
    return graph_module_of(graph_module, made.graph), tuple(made.decisions)


@dataclass(slots=True)
class _Parted:
    """The new graph. whole, parts, pairs: the replacements of nodes of the old one, created on first use.

    changed: arguments that the graph writes to. returned_nodes: nodes whose memory may be returned to the caller.
    """

    old: torch.fx.Graph
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    whole: dict[Node, Node] = field(default_factory=dict)
    parts: dict[Node, Any] = field(default_factory=dict)
    pairs: dict[Node, Node] = field(default_factory=dict)
    decisions: list[tuple[Node, Decision]] = field(default_factory=list)
    changed: set[Any] = field(default_factory=set)
    returned_nodes: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.changed = {arg for node in self.old.nodes if may_write(node) for arg in node.all_input_nodes}
        self.returned_nodes = returned(self.old)

    def add(self, node: Node) -> None:
        made = self.made(node) if node.op == "call_function" else None
        if made is None:
            self.whole[node] = self.copied(node)
            return
        (self.parts if _is_complex(node) else self.whole)[node] = made
        if not aliases(node):
            why = "the real and the imaginary parts of complex numbers are computed separately"
            first = made.real if isinstance(made, Parts) else made
            self.decisions.append((first, Decision("transform.complex", (node.name,), True, why)))

    def made(self, node: Node) -> Any:
        """The replacement of a call, in parts if it is complex; None if the call is copied unchanged."""
        if node.target is aten.view_as_real.default:
            return self.as_pairs(node.all_input_nodes[0])
        if node in self.returned_nodes and aliases(node) and not _is_complex(node):
            return None  # the caller gets a view of memory that holds pairs
        if node.target is operator.getitem:
            source, index = node.args
            return self.parts[source][index] if source in self.parts else None
        return self.selected(node) or (None if self.alone(node) else self.computed(node))

    def alone(self, node: Node) -> bool:
        """Whether a call reads and returns only whole tensors: then there is nothing to fuse it with."""
        given = [arg for arg in node.all_input_nodes if _is_complex(arg)]
        whole = given and all(arg in self.whole and arg not in self.parts for arg in given)
        return bool(whole) and _is_complex(node) and not aliases(node) and not any(map(rule_of, node.users))

    def copied(self, node: Node) -> Node:
        """The call unchanged; the fake result of a view follows from its new argument."""
        if node.target is aten._conj.default and node.all_input_nodes:
            return self.conjugated(node)
        made = self.graph.node_copy(node, self.as_whole)
        if aliases(node) and isinstance(node.meta.get("val"), Tensor):
            made.meta["val"] = fake_result(made)
        return made

    def conjugated(self, node: Node) -> Node:
        """The conjugate of a whole tensor; elements expanded along a dimension are computed once and expanded again."""
        call: Call = partial(call_in, self.graph, node)
        whole = self.as_whole(node.all_input_nodes[0])
        sizes: list[Any] = [-1] * whole.meta["val"].dim()
        once = whole
        for dim, stride in enumerate(strides_of(whole.meta["val"])):
            if stride == ZERO:
                sizes[dim] = call(aten.sym_size.int, whole, dim)
                once = call(aten.slice.Tensor, once, dim, 0, 1)
        made = call(aten._conj.default, once)
        return made if once is whole else call(aten.expand.default, made, sizes)

    def selected(self, node: Node) -> Node | None:
        """A part that is selected from a `view_as_real`; None for any other call."""
        match node:
            case Node(target=aten.select.int, args=(Node(target=aten.view_as_real.default) as seen, dim, index)):
                (source,) = seen.all_input_nodes
                last = dim in (-1, seen.meta["val"].dim() - 1) and source in self.parts
                return self.parts[source][index] if last else None
            case _:
                return None

    def computed(self, node: Node) -> Any:
        """The result of a rule on the parts of the operands, as nodes of the new graph; None if no rule applies."""
        rule = rule_of(node) if _is_complex(node) or any(map(_is_complex, node.all_input_nodes)) else None
        if rule is None:
            return None
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self.as_operand)
        call: Call = partial(call_in, self.graph, node)
        made = rule(call, *args, **kwargs)
        if not _like(made, node):
            return None
        if aliases(node):
            return made
        if isinstance(made, Parts):
            return Parts(*(laid_out(call, part, node.meta["val"]) for part in made))
        return laid_out(call, made, node.meta["val"])

    def as_operand(self, node: Node) -> Any:
        return self.as_parts(node) if _is_complex(node) else self.as_whole(node)

    def as_parts(self, node: Node) -> Parts:
        """The parts of a tensor, read from its memory if it is a whole tensor."""
        if node not in self.parts:
            self.parts[node] = from_pairs(partial(call_in, self.graph, node), self.as_pairs(node))
        return self.parts[node]

    def as_pairs(self, node: Node) -> Node:
        """A tensor as stored in memory, in pairs. A whole tensor may have a lazy conjugate to resolve."""
        if node not in self.pairs:
            call: Call = partial(call_in, self.graph, node)
            if node.target is aten.view_as_complex.default:
                self.pairs[node] = self.as_whole(node.all_input_nodes[0])
            elif node in self.parts and not aliases(node):
                self.pairs[node] = paired(call, self.parts[node], node.meta["val"])
            else:
                whole = self.as_whole(node)
                # Without a copy, nothing orders reads of views of an argument before it is changed.
                whole = call(aten.clone.default, whole) if node in self.changed else whole
                self.pairs[node] = call(aten.view_as_real.default, call(aten.resolve_conj.default, whole))
        return self.pairs[node]

    def as_whole(self, node: Node) -> Node:
        """A tensor as a whole; views are views of a whole tensor, as in eager mode."""
        if node not in self.whole:
            if aliases(node):
                self.whole[node] = self.copied(node)
            else:
                call: Call = partial(call_in, self.graph, node)
                self.whole[node] = call(aten.view_as_complex.default, self.as_pairs(node))
        return self.whole[node]


def _is_complex(node: Node) -> bool:
    """Whether a node returns complex tensors of a type that can be split into parts."""
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, Tensor) and each.dtype in REAL for each in results)


def _like(made: Any, node: Node) -> bool:
    """Whether the results of a rule have the shapes and types of a node's, in parts."""
    results, wanted = ([*each] if type(each) in (list, tuple) else [each] for each in (made, node.meta["val"]))
    return made is not None and all(
        isinstance(result, Parts) == (value.dtype in REAL)
        and leaf.meta["val"].shape == value.shape
        and leaf.meta["val"].dtype is REAL.get(value.dtype, value.dtype)
        for result, value in zip(results, wanted, strict=True)
        for leaf in (result if isinstance(result, Parts) else (result,))
    )
