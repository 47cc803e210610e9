"""Passes on the captured FX graph, before lowering."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pellucid.capture.fx import merge_origin, strides_of
from pellucid.capture.operators import may_draw
from pellucid.capture.torch_compat import decomposed_call, expr_of, graph_module_of
from pellucid.ir.decision import Decision


def transform(graph_module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """A copy of the graph with common subexpressions, dead calls and redundant copies eliminated.

    Before: `%a = exp(%x); %b = exp(%x); %c = clone(%b)`. After: `%a = exp(%x)`, used for all, with their origins.
    """
    graph = torch.fx.Graph()
    mapping: dict[torch.fx.Node, torch.fx.Node] = {}
    seen: dict[Any, torch.fx.Node] = {}
    decisions: list[Decision] = []
    results = returned(graph_module.graph)
    changes = any(may_write(node) for node in graph_module.graph.nodes)
    for node in graph_module.graph.nodes:
        if may_write(node):
            seen.clear()  # later reads of what it writes return other values
        key = _key(node, mapping) if is_pure(node) else None
        same, rule, why = seen.get(key), "transform.common-subexpression", "the calls are equal"
        if not changes and _is_exact_copy(node, mapping):
            same, rule = mapping[node.args[0]], "transform.copy"
            why = "nothing changes the original or the copy, and the caller gets neither through it"
        if same is not None and node not in results:
            mapping[node] = same
            merge_origin(same, node)
            decisions.append(Decision(rule, (node.name, same.name), True, why))
            continue
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        if key is not None:
            seen.setdefault(key, mapping[node])
    graph.eliminate_dead_code(is_impure_node=lambda node: not is_pure(node) and node.op != "get_attr")
    return graph_module_of(graph_module, graph), tuple(decisions)


def decompose(
    graph: torch.fx.Graph, node: torch.fx.Node, table: Mapping[Any, Callable[..., Any]]
) -> list[torch.fx.Node]:
    """Replace a call with one result by its decomposition in `table`; return the new calls."""
    parts = decomposed_call(node, table)
    made = dict(zip(parts.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        calls = insert_calls(graph, node, parts, made)
    (result,) = parts.graph.output_node().all_input_nodes
    node.replace_all_uses_with(made[result])
    graph.erase_node(node)
    return calls


def insert_calls(
    graph: torch.fx.Graph, node: torch.fx.Node, parts: torch.fx.GraphModule, made: dict[torch.fx.Node, torch.fx.Node]
) -> list[torch.fx.Node]:
    """Insert the calls of a traced graph into another one in place of `node`, whose origin they get.

    made: the nodes that replace the arguments and constants of the traced graph; those of its calls are added.
    """
    calls = [part for part in parts.graph.nodes if part.op == "call_function"]
    for part in calls:
        made[part] = graph.node_copy(part, made.__getitem__)
        made[part].meta = {**node.meta, "val": part.meta["val"]}
    return [made[part] for part in calls]


def _is_exact_copy(node: torch.fx.Node, mapping: Mapping[torch.fx.Node, torch.fx.Node]) -> bool:
    """True if the call copies its argument into a tensor with the same strides.

    If the copy has views, its storage offset must be the argument's too: captured views count from the copy's offset.
    """
    if node.target is not torch.ops.aten.clone.default or not isinstance(node.args[0], torch.fx.Node):
        return False
    copy, original = node.meta.get("val"), mapping[node.args[0]].meta.get("val")
    if not isinstance(copy, torch.Tensor) or not isinstance(original, torch.Tensor):
        return False
    if strides_of(copy) != strides_of(original) or node.args[0].op != "call_function":
        return False
    copy_offset, offset = (expr_of(each.storage_offset()) for each in (copy, original))
    return copy_offset == offset or not any(map(aliases, node.users))


def returned(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes whose memory may be returned to the caller: two results must not become one tensor."""
    found: set[torch.fx.Node] = set()
    pending = list(graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if aliases(node) and isinstance(node.args[0], torch.fx.Node):
                pending.append(node.args[0])
    return found


def aliases(node: torch.fx.Node) -> bool:
    """True if the result may share memory with an argument."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (
        any(result.alias_info is not None for result in schema.returns) or schema.name == "aten::_unsafe_view"
    )


def is_pure(node: torch.fx.Node) -> bool:
    """True if the call has no side effect and draws no random numbers. A call without results has a side effect."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")  # arithmetic on sizes
    if target is torch.ops.aten._assert_tensor_metadata.default:
        return True  # it checks what was recorded at capture
    if not target._schema.returns:
        return False
    return not target._schema.is_mutable and not may_draw(target)


def may_write(node: torch.fx.Node) -> bool:
    """True if the call may change an existing tensor. A call that only draws random numbers does not."""
    if node.op != "call_function" or is_pure(node):
        return False
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    return schema is None or schema.is_mutable or not schema.returns


def _key(node: torch.fx.Node, mapping: dict[torch.fx.Node, torch.fx.Node]) -> Any:
    """A key that is equal for calls with equal results; None if an argument cannot be compared."""

    def freeze(value: Any) -> Any:
        match value:
            case torch.fx.Node():
                return mapping[value]
            case list() | tuple():
                return tuple(freeze(item) for item in value)
            case dict():
                return tuple((key, freeze(item)) for key, item in value.items())
            case _:
                # 1, 1.0 and True are equal and hash alike, yet give different results; so do 0.0 and -0.0.
                return (type(value), repr(value))

    return (node.target, freeze(node.args), freeze(node.kwargs))
