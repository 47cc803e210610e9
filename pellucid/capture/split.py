"""Splits a captured graph where a program cannot hold a node: segments for the compiler, single calls for Python."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import torch

from pellucid.capture.fx import DTYPES, attribute_of, derived_sizes, origin_of, shape_of, strides_of
from pellucid.capture.outline import Bind, EagerCall, Fit, Layout, Number, Outline, Ref, Segment, Step, function_name
from pellucid.capture.torch_compat import (
    depends_on_floats,
    fake_result,
    graph_module_of,
    is_symbolic,
    needed_by,
    plain_name,
    symbol_paths,
    term_of,
    tree_leaves,
    unbacked_bindings,
)
from pellucid.capture.transform import aliases, is_pure
from pellucid.ir.decision import Decision

Node = torch.fx.Node


def split(graph_module: torch.fx.GraphModule, refused: Mapping[str, str] | None = None) -> Outline | None:
    """How to run the graph in steps, or None when one program can hold all of it.

    refused: nodes that lowering has rejected, by name, with the reason.

    Before: `a = x + 1; n = nonzero(a); b = n * 2`. After: a segment that adds, a call of `nonzero`, and a segment that
    multiplies, which is passed the size of `n` as an argument.
    """
    lazy = _duplicate_lazy_results(graph_module.graph)
    nodes = _live(graph_module.graph)
    _complete(nodes)
    _name_sizes(nodes)
    eager = _eager(graph_module, nodes, lazy, refused or {})
    if not eager and _is_whole(nodes):
        return None
    return _Splitter(graph_module, nodes, eager).outline()


# ------------------------------------------------------------------------------------------- what runs in Python


def _duplicate_lazy_results(graph: torch.fx.Graph) -> set[Node]:
    """Duplicate the calls that compute lazy results, so that other readers of them stay in a segment; the duplicates.

    Before: `c = _conj(e); v = view(c); m = mul(c, 2); return v, m`. After: `v` is computed from a `_conj` of its own.
    """
    (output,) = graph.find_nodes(op="output")
    made: dict[Node, Node] = {}

    def own(node: Node) -> Node:
        if node.op != "call_function" or not _is_lazy(node.meta.get("val")):
            return node
        if node not in made:
            made[node] = graph.node_copy(node, own)
        return made[node]

    with graph.inserting_before(output):
        output.args = torch.fx.map_arg(output.args, own)
    return set(made.values())


def _live(graph: torch.fx.Graph) -> list[Node]:
    """The nodes that the result or an effect depends on, in order, and all arguments."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in live or node.op in ("placeholder", "output") or (node.op == "call_function" and not is_pure(node)):
            live.add(node)
            live.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in live]


def _complete(nodes: list[Node]) -> None:
    """Add the fake results that AOTAutograd omits where backward draws the random numbers of forward again."""
    for node in nodes:
        if "val" not in node.meta and isinstance(node.target, torch._ops.HigherOrderOperator):
            node.meta["val"] = fake_result(node)


def _name_sizes(nodes: list[Node]) -> None:
    """Recompute the sizes of results that contain unknown symbols from those of their arguments.

    Where the graph was captured with two equal calls, such as `x[mask]` twice, one of them is left, but values computed
    from the other still have the symbol of the other's size.
    """
    known = {name for node in nodes if node.op == "placeholder" for name in symbol_paths(node.meta.get("val"))}
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.meta.get("unbacked_bindings") or not _is_operator(node):
            known |= symbol_paths(node.meta.get("val")).keys() | unbacked_bindings(node).keys()
        elif _needed(node).keys() - known:
            node.meta["val"] = fake_result(node)


def _is_operator(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)


def _eager(
    graph_module: torch.fx.GraphModule, nodes: list[Node], lazy: set[Node], refused: Mapping[str, str]
) -> dict[Node, str]:
    """The calls that no program can contain, with the reason. lazy: those that compute lazy results of the graph."""
    reasons: dict[Node, str] = {}
    foreign: set[Node] = set()  # values that cannot be arguments of a program
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            value = attribute_of(graph_module, node) if node.op == "get_attr" else node.meta.get("val")
            if not _is_argument(value):
                foreign.add(node)
        elif node.op == "call_function" and not is_number(node):
            reason = refused.get(node.name) or _reason(node, foreign, reasons)
            if reason is None and node in lazy:
                reason = "the caller gets a lazy conjugate or negative"
            if reason is not None:
                reasons[node] = reason
                foreign.update([] if _is_argument(node.meta.get("val")) else [node])
    if any(_is_view(node) for node in reasons):
        for node in nodes:
            if node.op == "call_function" and node not in reasons and _mutates(node):
                reasons[node] = "it writes to a tensor that a view made by Python may share"
    return reasons


def _reason(node: Node, foreign: set[Node], reasons: Mapping[Node, str]) -> str | None:
    """Why no program can contain `node`, None if one can."""
    target = node.target
    if _is_getitem(node):
        # Results of an operator that are no tensors were never in the program.
        return "" if node.args[0] in reasons else None
    if target is torch.ops.higher_order.with_effects:
        target = node.args[1]
    if not isinstance(target, torch._ops.OpOverload):
        return f"{function_name(target)} is not an operator of the dispatcher"
    if node.meta.get("unbacked_bindings"):
        return "the size or value of its result depends on data"
    if any(arg in foreign for arg in node.all_input_nodes):
        return "an argument is of a type or layout that programs do not have"
    if any(isinstance(arg.meta.get("val"), torch.SymBool) for arg in node.all_input_nodes):
        return "an argument is a condition on sizes"
    if target._schema.returns and not _is_result(node.meta.get("val")):
        return "its result is of a type or layout that programs do not have"
    if _is_check(node):
        return "it checks sizes"
    return None


def is_number(node: Node) -> bool:
    """True for arithmetic on sizes: its value follows from the symbols."""
    value, target = node.meta.get("val"), node.target
    if node.op != "call_function" or not (is_symbolic(value) or isinstance(value, bool | int | float)):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and target._opname.startswith("sym_")
    return not isinstance(target, torch._ops.HigherOrderOperator) and is_symbolic(value)


def _is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: Node) -> bool:
    """True if the result may share memory with an argument of the call."""
    if _is_getitem(node):
        return isinstance(node.args[0], Node) and _is_view(node.args[0])
    return node.op == "call_function" and aliases(node)


def _is_check(node: Node) -> bool:
    """A call that takes numbers only and returns nothing: an assertion about sizes."""
    inputs = node.all_input_nodes
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.returns
        and bool(inputs)
        and all(is_symbolic(arg.meta.get("val")) for arg in inputs)
    )


def _mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_held(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.dtype in DTYPES
    )


def _is_argument(value: Any) -> bool:
    """Whether a program may be passed a value: its buffers have no flags for lazy conjugates and negatives."""
    if isinstance(value, torch.Tensor):
        return _is_held(value) and not _is_lazy(value)
    return not isinstance(value, torch.ScriptObject)


def _is_lazy(value: Any) -> bool:
    """Whether a tensor represents the conjugates or negatives of the elements in its memory."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _is_result(value: Any) -> bool:
    items = value if isinstance(value, list | tuple) else (value,)
    return all(item is None or _is_held(item) for item in items)


def _is_whole(nodes: list[Node]) -> bool:
    """Whether a program can be passed all arguments, they determine all symbols, and it can return the results."""
    known = {plain_name(term_of(node.meta["val"])) for node in nodes if _is_integer_argument(node)}
    for node in nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and (not _is_argument(value) or isinstance(value, torch.SymFloat)):
            return False
        if _needed(node).keys() - known:
            return False
    returned = tree_leaves(nodes[-1].args[0])
    return all(_is_returnable(leaf) for leaf in returned)


def _is_integer_argument(node: Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)


def _is_returnable(leaf: Any) -> bool:
    value = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
    return value is None or isinstance(value, torch.Tensor | torch.SymInt) or type(value) is int


def _needed(node: Node) -> dict[str, torch.SymInt]:
    """The integers that a program with `node` in it needs as arguments."""
    needed: dict[str, torch.SymInt] = {}
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            for size in (*value.shape, value.storage_offset()):
                needed |= needed_by(size)
            for stride in value.stride():
                needed |= needed_by(stride, stride=True)
        elif isinstance(value, torch.SymInt) or (isinstance(value, torch.SymFloat) and not depends_on_floats(value)):
            needed |= needed_by(value)
    return needed


# ------------------------------------------------------------------------------------------------- the splitting


@dataclass(slots=True)
class _Part:
    """A segment under construction."""

    name: str
    nodes: list[Node] = field(default_factory=list)


class _Splitter:
    def __init__(self, graph_module: torch.fx.GraphModule, nodes: list[Node], eager: Mapping[Node, str]) -> None:
        self.graph_module = graph_module
        self.nodes = nodes
        self.eager = eager
        self.home: dict[Node, _Part] = {}
        self.order: list[_Part | Node] = []
        self._assign()

    def outline(self) -> Outline:
        """Build segments first, because a value that no other step reads is no output of its segment."""
        graphs = {part.name: _segment_graph(self, part) for part in self._parts()}
        wanted: set[Any] = {source for _, sources, _ in graphs.values() for source in sources}
        wanted.update(arg for node in self.nodes if node in self.eager for arg in node.all_input_nodes)
        wanted.update(self.nodes[-1].all_input_nodes)
        bound: set[str] = set()
        steps: list[Step] = []
        for node in self.nodes:
            if node.op == "placeholder":
                steps += _binds(node, bound)
        for each in self.order:
            if isinstance(each, _Part):
                steps.append(self._segment(each, graphs[each.name], wanted))
            else:
                steps.append(self._call(each))
                steps += _binds(each, bound)
                steps += _fit(each)
        inputs = tuple(node.name for node in self.nodes if node.op == "placeholder")
        outputs = self.argument(self.nodes[-1].args[0])
        outputs = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        derived = derived_sizes(self.graph_module)
        return Outline(inputs, tuple(steps), outputs, derived, tuple(self._decisions()))

    def argument(self, value: Any) -> Any:
        """An argument of an FX node in the form that steps use."""
        match value:
            case Node() if is_symbolic(value.meta.get("val")) and value not in self.eager:
                return Number(term_of(value.meta["val"]))
            case Node() if value.op == "get_attr":
                return attribute_of(self.graph_module, value)
            case Node():
                return Ref(value.name)
            case tuple():
                return tuple(self.argument(item) for item in value)
            case list():
                return [self.argument(item) for item in value]
            case dict():
                return {key: self.argument(item) for key, item in value.items()}
            case slice():
                return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
            case _ if is_symbolic(value):
                return Number(term_of(value))
            case _:
                return value

    def _parts(self) -> Iterator[_Part]:
        return (each for each in self.order if isinstance(each, _Part))

    def _assign(self) -> None:
        """Assign every node to a step, in graph order; a check of sizes does not end a segment, but moves before it."""
        current: _Part | None = None
        for node in self.nodes:
            if node.op != "call_function" or (is_number(node) and node not in self.eager):
                continue
            if node in self.eager:
                if _is_check(node) and current is not None:
                    self.order.insert(len(self.order) - 1, node)
                elif _is_getitem(node):
                    self.order.insert(self.order.index(node.args[0]) + 1, node)  # type: ignore[arg-type]
                else:
                    self.order.append(node)
                    current = None
            elif _is_getitem(node) and node.args[0] in self.home:
                self.home[node] = self.home[node.args[0]]  # type: ignore[index]
                self.home[node].nodes.append(node)
            else:
                if current is None:
                    current = _Part(f"segment_{sum(1 for _ in self._parts())}")
                    self.order.append(current)
                current.nodes.append(node)
                self.home[node] = current

    def _segment(self, part: _Part, made: _SegmentGraph, wanted: set[Any]) -> Segment:
        graph, inputs, copies = made
        outputs = [node for node in part.nodes if node in wanted]
        graph.output(tuple(copies[node] for node in outputs))
        module = graph_module_of(self.graph_module, graph)
        return Segment(part.name, module, tuple(inputs.values()), tuple(node.name for node in outputs))

    def _call(self, node: Node) -> EagerCall:
        return EagerCall(
            node.name,
            node.target,
            tuple(self.argument(arg) for arg in node.args),
            {key: self.argument(value) for key, value in node.kwargs.items()},
            self.eager[node],
            origin_of(node).step("split"),
        )

    def _decisions(self) -> Iterator[Decision]:
        for node, reason in self.eager.items():
            if reason:
                yield Decision("split.eager", (node.name,), False, reason, (("op", function_name(node.target)),))


def _fit(node: Node) -> Iterator[Fit]:
    layouts = tuple(map(_layout, tree_leaves(node.meta.get("val"))))
    if any(layouts) and not _is_getitem(node):
        yield Fit(node.name, layouts)


def _layout(value: Any) -> Layout | None:
    return Layout(value.dtype, shape_of(value), strides_of(value)) if _is_held(value) else None


def _binds(node: Node, bound: set[str]) -> Iterator[Bind]:
    """The symbols whose values the result of `node` determines, except those in `bound`, which is updated."""
    for name, path in {**unbacked_bindings(node), **symbol_paths(node.meta.get("val"))}.items():
        if name not in bound:
            bound.add(name)
            yield Bind(name, node.name, path)


_SegmentGraph: TypeAlias = "tuple[torch.fx.Graph, dict[Node | str, Ref | Number], dict[Node, Node]]"


def _segment_graph(splitter: _Splitter, part: _Part) -> _SegmentGraph:
    """The graph of a segment, without its output; its inputs, numbers first; and its nodes by the nodes they copy.

    A view of a value from another step is recomputed, so that the compiler knows that both share memory.
    """
    body = list(_with_views(splitter, part))
    graph = torch.fx.Graph(splitter.graph_module)
    mapping: dict[Node, Node] = {}
    inputs: dict[Node | str, Ref | Number] = {}

    def placeholder(key: Node | str, name: str, value: Any, source: Ref | Number) -> Node:
        made = graph.placeholder(name)
        made.meta["val"] = value
        inputs[key] = source
        return made

    outside = [arg for node in body for arg in node.all_input_nodes if arg not in set(body)]
    tensors = [arg for arg in dict.fromkeys(outside) if arg.op != "get_attr" and not is_symbolic(arg.meta.get("val"))]
    needed: dict[str, torch.SymInt] = {}
    for node in (*body, *dict.fromkeys(outside)):
        needed |= _needed(node)
    for name, value in needed.items():
        placeholder(name, name, value, Number(term_of(value)))
    for arg in dict.fromkeys(outside):
        value = arg.meta.get("val")
        if isinstance(value, torch.SymFloat) and not depends_on_floats(value):
            continue  # the program computes it
        if is_symbolic(value):
            number = Number(term_of(value), in_tensor=isinstance(value, torch.SymFloat))
            mapping[arg] = placeholder(arg, arg.name, value, number)
    for arg in tensors:
        mapping[arg] = placeholder(arg, arg.name, arg.meta.get("val"), Ref(arg.name))

    def copy(node: Node) -> Any:
        if node not in mapping:
            if is_symbolic(node.meta.get("val")):
                return node.meta["val"]
            mapping[node] = graph.node_copy(node, copy)
        return mapping[node]

    for node in body:
        copy(node)
    return graph, inputs, mapping


def _with_views(splitter: _Splitter, part: _Part) -> Iterator[Node]:
    """The nodes of a segment, each after the views of other steps' values that it reads."""
    own, made = set(part.nodes), set[Node]()

    def visit(node: Node) -> Iterator[Node]:
        if node in made:
            return
        made.add(node)
        for arg in node.all_input_nodes:
            if arg not in own and arg in splitter.home and _is_view(arg):
                yield from visit(arg)
        yield node

    for node in part.nodes:
        yield from visit(node)
