"""`flex_attention`, whose masks and score modifications are functions of positions, becomes calls that kernels compute.

    before: `flex_attention(%q, %k, %v, score_mod, (..., mask_mod), scale, ...)`
    after:  `%mask = where(ge(%rows, %keys), 0, -inf)`, `%a = pellucid.attention(%q, %k, %v, %mask, replaces, scale)`

A mask, and what is added to scores, is a tensor over the positions that it depends on; a causal mask is none. If
`score_mod` does more than scale, cap (`tanh`) and add, scores are computed in memory as the operator defines them. On
CPUs PyTorch has the operator for inference alone. The lists of blocks that come with a mask are not read: they follow
from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pellucid.capture.decompositions import decompositions
from pellucid.capture.fx import attribute_of, dtype_of, order_in_memory, shape_of, strides_of
from pellucid.capture.operators import ATTENTION
from pellucid.capture.torch_compat import graph_module_of, trace_function
from pellucid.capture.transform import insert_calls
from pellucid.capture.written_attention import AdditiveMask, MaskedFill, ScoreMatcher, Scores
from pellucid.ir.attention import may_cap
from pellucid.ir.contraction import DTYPES
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, exact_div
from pellucid.machine.attention import MAX_HEAD_SIZE

aten = torch.ops.aten

_RULE = "transform.flex_attention"
_INF = math.inf
_LN2 = math.log(2)  # the operator's logarithms are to base 2
_ONES = (aten.new_ones.default, aten.ones.default)
_BOTH = (aten.bitwise_and.Tensor, aten.logical_and.default)


def without_flex_attention(module: GraphModule, *, contract: bool) -> tuple[GraphModule, tuple[Decision, ...]]:
    """Replace each `flex_attention`; return the graph, unchanged if there is none, and the decisions.

    contract: whether kernels may compute attention.
    """
    if not any(map(_is_flex, module.graph.nodes)):
        return module, ()
    graph, made, decisions = torch.fx.Graph(), dict[Node, Any](), list[Decision]()
    for node in module.graph.nodes:
        if _is_flex(node):
            made[node], decision = _replaced(module, graph, node, made, contract)
            decisions.append(decision)
        elif node.target is operator.getitem and isinstance(made[node.args[0]], tuple):
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    return graph_module_of(module, graph), tuple(decisions)


def _is_flex(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "flex_attention"


def _replaced(
    module: GraphModule, graph: torch.fx.Graph, node: Node, made: Mapping[Node, Any], contract: bool
) -> tuple[Any, Decision]:
    """The results in `graph` of the calls that replace `node`, or a copy of it; and the decision.

    made: the copies or replacements of the nodes before.
    """
    call = _Call.of(module, node)
    if call is None:
        why = "PyTorch's definition is called: its functions read a value that is neither a tensor nor a size"
        return graph.node_copy(node, made.__getitem__), Decision(_RULE, (node.name,), False, why)
    why = call.why_in_memory() if contract else "the option `contract` is off"
    try:
        traced = call.traced(kernel=why is None)
    except Exception as error:
        what, *_ = str(error).splitlines() or [type(error).__name__]
        why = f"PyTorch's definition is called: its functions cannot be mapped over positions: {what}"
        return graph.node_copy(node, made.__getitem__), Decision(_RULE, (node.name,), False, why)
    results = _inlined(module, graph, node, [made[each] for each in call.arguments], traced)
    return results, Decision(_RULE, (node.name,), why is None, why or "the attention kernel computes it")


def _inlined(
    module: GraphModule, graph: torch.fx.Graph, node: Node, arguments: Sequence[Node], traced: GraphModule
) -> tuple[Node, ...]:
    """Insert the calls of a traced function into `graph` in place of `node`; its results for `arguments`."""
    inlined = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for constant in traced.graph.find_nodes(op="get_attr"):
        inlined[constant] = copy = graph.node_copy(constant)
        copy.target = f"_{node.name}_{constant.target}"
        setattr(module, copy.target, attribute_of(traced, constant))
    insert_calls(graph, node, traced, inlined)
    return tuple(inlined[result] for result in traced.graph.output_node().args[0])  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `flex_attention`.

    arguments: queries, keys, values, then the other tensors that `score_mod` reads, then those that `mask_mod` reads,
    then the scale if it is known only at run time. score_mod: a function of a score, batch, head, row and key.
    mask_mod: of batch, head, row and key; whether a key is visible. like: the result.
    """

    arguments: tuple[Node, ...]
    score_mod: GraphModule
    mask_mod: GraphModule
    score_mod_inputs: int
    mask_mod_inputs: int
    scale: float | None
    like: Tensor

    @classmethod
    def of(cls, module: GraphModule, node: Node) -> _Call | None:
        """None if one of its functions reads a value that is neither a tensor nor a symbolic number."""
        query, key, value, score_mod, blocks, scale, _, score_mod_reads, mask_mod_reads = node.args
        scale_node = [scale] if isinstance(scale, Node) else []
        arguments: Any = (query, key, value, *score_mod_reads, *mask_mod_reads, *scale_node)  # type: ignore[misc]
        values = [each.meta.get("val") if isinstance(each, Node) else None for each in arguments]
        if not all(isinstance(value, Tensor | torch.SymInt | torch.SymFloat) for value in values):
            return None
        score_mod, mask_mod = (attribute_of(module, each) for each in (score_mod, blocks[-1]))  # type: ignore[arg-type, index]
        known = None if scale_node else float(scale)  # type: ignore[arg-type]
        counts = len(score_mod_reads), len(mask_mod_reads)  # type: ignore[arg-type]
        return cls(arguments, score_mod, mask_mod, *counts, known, node.meta["val"][0])  # type: ignore[arg-type]

    def traced(self, *, kernel: bool) -> GraphModule:
        """The call as a graph of its arguments."""
        values = [each.meta["val"] for each in self.arguments]
        return trace_function(self.by_kernel if kernel else self.in_memory, values, table=decompositions())

    def why_in_memory(self) -> str | None:
        """Why no kernel computes it; None if one does."""
        query, key, value = (each.meta["val"] for each in self.arguments[:3])
        size, keys = shape_of(query)[3], shape_of(key)[2]
        group = exact_div(shape_of(query)[1], shape_of(key)[1])
        if dtype_of(query) not in DTYPES or not query.dtype is key.dtype is value.dtype:
            return "kernels compute attention in f32, bf16 and f16"
        if size.value is None or not 2 <= size.value <= MAX_HEAD_SIZE or shape_of(value)[3] != size:
            return f"kernels have head sizes from 2 to {MAX_HEAD_SIZE}, known when compiled, values as long as keys"
        if keys in (ZERO, ONE) or group is None or group.value is None:
            return "it has a single key, or its query heads are no multiple of its key heads"
        if self.scale is None:
            return "its scale is known only at run time"
        if _scores(self.score_mod) is None:
            return "`score_mod` does more than scale scores, cap them, and add to them"
        return None

    def modified_scores(self, sizes: Sequence[Any], read: Sequence[Any], score: Tensor) -> Tensor:
        """`score_mod` of scores: of one for each position, or of a single one."""
        return _over_positions(self.score_mod, sizes, read[: self.score_mod_inputs], score)

    def visible(self, sizes: Sequence[Any], read: Sequence[Any]) -> Tensor:
        """Whether keys are visible, by `mask_mod`."""
        return _over_positions(self.mask_mod, sizes, read[self.score_mod_inputs :][: self.mask_mod_inputs])

    def by_kernel(self, query: Tensor, key: Tensor, value: Tensor, *read: Any) -> tuple[Tensor, ...]:
        """The result, and for each row the logarithm of the sum of exponentials and the maximum score.

        A row whose keys are all masked out is zero.
        """
        sizes = (*query.shape[:3], key.shape[2])
        zero = query.new_zeros((), dtype=torch.float32)
        added: Tensor | None = None
        scores = _scores(self.score_mod)
        assert scores is not None and self.scale is not None
        if scores.masks:
            added = self.modified_scores(sizes, read, zero).float()
        conditions = [] if _masks_nothing(self.mask_mod) else list(_conjuncts(_result(self.mask_mod)))
        causal = [_is_causal(condition, self.mask_mod) for condition in conditions]
        mask = added
        if not all(causal):
            mask = torch.where(self.visible(sizes, read), zero if added is None else added, -_INF)
        key, value = (each.expand(query.shape[0], -1, -1, -1) for each in (key, value))
        masking = "hides" if any(isinstance(each, AdditiveMask) for each in scores.masks) else "replaces"
        scale = self.scale * scores.scale
        out, maximum, logarithm = ATTENTION(query, key, value, mask, masking, scale, any(causal), scores.cap)
        total = maximum + logarithm
        if mask is not None:
            masked_out = total == -_INF
            out, maximum = torch.where(masked_out[..., None], 0, out), torch.where(masked_out, -_INF, maximum)
        return _with_strides_of(self.like, out), total / _LN2, maximum / _LN2

    def in_memory(self, query: Tensor, key: Tensor, value: Tensor, *read: Any) -> tuple[Tensor, ...]:
        """Like `by_kernel`, with all scores in memory, in f32 or f64."""
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        group = query.shape[1] // key.shape[1]
        key, value = (
            each.unsqueeze(2).expand(query.shape[0], -1, group, -1, -1).flatten(1, 2) for each in (key, value)
        )
        scores = query.to(wide) @ key.to(wide).mT * (read[-1] if self.scale is None else self.scale)
        sizes = tuple(scores.shape)
        if _result(self.score_mod) is not _arguments(self.score_mod)[0]:
            scores = self.modified_scores(sizes, read, scores).to(wide)
        if not _masks_nothing(self.mask_mod):
            scores = torch.where(self.visible(sizes, read), scores, -_INF)
        maximum = scores.amax(-1)
        base = torch.where(maximum == -_INF, 0.0, maximum)
        weights = (scores - base[..., None]).exp()
        sums = weights.sum(-1)
        weights = weights / torch.where(sums == 0, 1.0, sums)[..., None]
        out = weights.to(query.dtype) @ value
        return _with_strides_of(self.like, out), (base + sums.log()) / _LN2, maximum / _LN2


def _over_positions(
    function: GraphModule, sizes: Sequence[Any], read: Sequence[Any], score: Tensor | None = None
) -> Tensor:
    """The values of a function at all positions, (batch, heads, rows, keys).

    score: its first argument if it has one, for each position or a single one. A dimension has one element if neither
    the score nor the function depends on it.
    """
    leading = () if score is None else (score,)
    per_position = score is not None and score.dim() > 0
    indices = _arguments(function)[len(leading) :][:4]
    counts = [size if per_position or index.users else 1 for index, size in zip(indices, sizes, strict=True)]
    positions = [torch.arange(count, device="cpu") for count in counts]
    mapped: Callable[..., Tensor] = _Function(function).run
    for dim in reversed(range(4)):
        along = tuple(0 if other == dim else None for other in range(4))
        in_dims = (0 if per_position else None,) * len(leading) + along + (None,) * len(read)
        mapped = torch.vmap(mapped, in_dims=in_dims)
    return mapped(*leading, *positions, *read)


class _Function(torch.fx.Interpreter):
    """Runs a function's operators, with tensors in place of symbolic numbers, which `vmap` does not map."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._local_scalar_dense.default:
            return args[0]
        if isinstance(target, torch._ops.OpOverload):
            takes_tensor = (isinstance(each.type, torch.TensorType) for each in target._schema.arguments)
            args = tuple(_tensor_of(arg) if takes else arg for arg, takes in zip(args, takes_tensor, strict=False))
        return super().call_function(target, args, kwargs)


def _tensor_of(value: Any) -> Any:
    """A symbolic number as a tensor without dimensions; other values unchanged."""
    match value:
        case torch.SymInt():
            return aten.scalar_tensor(value, dtype=torch.int64)
        case torch.SymFloat():
            return aten.scalar_tensor(value, dtype=torch.float64)
        case _:
            return value


def _with_strides_of(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, copied if its strides are not those of `like`."""
    if strides_of(tensor) == strides_of(like):
        return tensor
    order, back = order_in_memory(like)
    return tensor.permute(order).contiguous().permute(back)


# --------------------------------------------------------------------------------------- what a function does


def _arguments(function: GraphModule) -> list[Node]:
    return list(function.graph.find_nodes(op="placeholder"))


def _result(function: GraphModule) -> Any:
    (output,) = function.graph.find_nodes(op="output")
    result = output.args[0]
    return result[0] if isinstance(result, list | tuple) else result


def _scores(function: GraphModule) -> Scores | None:
    """What `score_mod` does to scores, None if the kernel cannot do the same.

    The masks that it adds are then its result for a score of zero.
    """
    score, *_ = _arguments(function)
    found = ScoreMatcher(function, score).scores(_result(function))
    if found is None or not math.isfinite(found.scale) or not may_cap(found.cap):
        return None
    dependent = {score}
    for node in function.graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    for mask in found.masks:
        if isinstance(mask, MaskedFill) and mask.number != -_INF:
            return None
        if (mask.mask if isinstance(mask, AdditiveMask) else mask.condition) in dependent:
            return None
    return found


def _masks_nothing(mask: GraphModule) -> bool:
    """Whether all keys are visible."""
    result = _result(mask)
    match result:
        case Node(target=aten.full.default, args=(_, value)):
            return bool(value)
        case Node():
            return result.target in _ONES
        case _:
            return False


def _conjuncts(node: Node) -> Iterator[Node]:
    """The conditions whose conjunction `node` is."""
    conditions = [each for each in node.args if isinstance(each, Node)]
    if node.target in _BOTH and len(conditions) == 2:
        for each in conditions:
            yield from _conjuncts(each)
    else:
        yield node


def _is_causal(condition: Node, mask: GraphModule) -> bool:
    """Whether the condition is that a key does not come after the row."""
    _, _, row, key, *_ = _arguments(mask)
    return (condition.target, condition.args) in ((aten.ge.Tensor, (row, key)), (aten.le.Tensor, (key, row)))
