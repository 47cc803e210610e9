"""`flex_attention`, whose masks and changes of scores are functions of positions, becomes calls that kernels compute.

    before: `flex_attention(%q, %k, %v, score_mod, (..., mask_mod), scale, ...)`
    after:  `%mask = where(ge(%rows, %keys), 0, -inf)`, `%a = pellucid.attention(%q, %k, %v, %mask, replaces, scale)`

A mask, and what is added to scores, is a tensor of the positions that it depends on; a causal mask is none. Scores that
are changed otherwise than by a scale and a cap (`tanh`) are computed as the operator defines them, in memory. PyTorch
has the operator on CPUs for inference alone. The lists of blocks that come with a mask are not read: they follow from
it.
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
from pellucid.capture.torch_compat import graph_module_of, traced_anew
from pellucid.capture.transform import put_calls
from pellucid.capture.written_attention import Added, Climb, Replaced, Scores
from pellucid.ir.attention import may_cap
from pellucid.ir.contraction import DTYPES
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, exact_div
from pellucid.machine.attention import MAX_HEAD_SIZE

aten = torch.ops.aten

_RULE = "transform.flex_attention"
_INF = math.inf
_LN2 = math.log(2)  # the operator's logarithms are those of 2
_ONES = (aten.new_ones.default, aten.ones.default)
_BOTH = (aten.bitwise_and.Tensor, aten.logical_and.default)


def without_flex_attention(module: GraphModule, *, contract: bool) -> tuple[GraphModule, tuple[Decision, ...]]:
    """The graph with other calls in the place of each `flex_attention`, itself if it has none; what was decided.

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
    """The results in `graph` of what stands for a call, or the call itself; and why.

    made: what stands for the nodes before.
    """
    call = _Call.of(module, node)
    if call is None:
        why = "PyTorch's definition is called: its functions read what is neither a tensor nor a size"
        return graph.node_copy(node, made.__getitem__), Decision(_RULE, (node.name,), False, why)
    why = call.why_in_memory() if contract else "the option `contract` asks for it"
    try:
        traced = call.meaning(kernel=why is None)
    except Exception as error:
        what, *_ = str(error).splitlines() or [type(error).__name__]
        why = f"PyTorch's definition is called: its functions cannot be mapped over positions: {what}"
        return graph.node_copy(node, made.__getitem__), Decision(_RULE, (node.name,), False, why)
    results = _inlined(module, graph, node, [made[each] for each in call.arguments], traced)
    return results, Decision(_RULE, (node.name,), why is None, why or "the attention kernel computes it")


def _inlined(
    module: GraphModule, graph: torch.fx.Graph, node: Node, arguments: Sequence[Node], traced: GraphModule
) -> tuple[Node, ...]:
    """The results of a traced function of `arguments`, whose calls come into `graph` in the place of `node`."""
    inlined = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for constant in traced.graph.find_nodes(op="get_attr"):
        inlined[constant] = copy = graph.node_copy(constant)
        copy.target = f"_{node.name}_{constant.target}"
        setattr(module, copy.target, attribute_of(traced, constant))
    put_calls(graph, node, traced, inlined)
    return tuple(inlined[result] for result in traced.graph.output_node().args[0])  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `flex_attention`.

    arguments: queries, keys, values, then what `change` reads beside a score and its position, then what `mask` does,
    then the scale if only the call tells it. change: of a score, by itself, batch, head, row and key. mask: whether a
    key counts, by the last four of these. like: the result.
    """

    arguments: tuple[Node, ...]
    change: GraphModule
    mask: GraphModule
    read_by_change: int
    read_by_mask: int
    scale: float | None
    like: Tensor

    @classmethod
    def of(cls, module: GraphModule, node: Node) -> _Call | None:
        """None if one of its functions reads what is neither a tensor nor a number that the call tells."""
        query, key, value, change, blocks, scale, _, read_by_change, read_by_mask = node.args
        told = [scale] if isinstance(scale, Node) else []
        arguments: Any = (query, key, value, *read_by_change, *read_by_mask, *told)  # type: ignore[misc]
        values = [each.meta.get("val") if isinstance(each, Node) else None for each in arguments]
        if not all(isinstance(value, Tensor | torch.SymInt | torch.SymFloat) for value in values):
            return None
        change, mask = (attribute_of(module, each) for each in (change, blocks[-1]))  # type: ignore[arg-type, index]
        known = None if told else float(scale)  # type: ignore[arg-type]
        counts = len(read_by_change), len(read_by_mask)  # type: ignore[arg-type]
        return cls(arguments, change, mask, *counts, known, node.meta["val"][0])  # type: ignore[arg-type]

    def meaning(self, *, kernel: bool) -> GraphModule:
        """The graph of what the call means, of its arguments."""
        values = [each.meta["val"] for each in self.arguments]
        return traced_anew(self.by_kernel if kernel else self.in_memory, values, table=decompositions())

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
            return "it has a single key, or heads of queries that are no multiple of those of keys"
        if self.scale is None:
            return "its scale is not known before the call"
        if _scores(self.change) is None:
            return "`score_mod` does something else to scores than to scale them, to cap them, and to add to them"
        return None

    def changed(self, sizes: Sequence[Any], read: Sequence[Any], score: Tensor) -> Tensor:
        """What `score_mod` makes of scores, one for each position or one for all."""
        return _everywhere(self.change, sizes, read[: self.read_by_change], score)

    def counts(self, sizes: Sequence[Any], read: Sequence[Any]) -> Tensor:
        """Whether keys count."""
        return _everywhere(self.mask, sizes, read[self.read_by_change :][: self.read_by_mask])

    def by_kernel(self, query: Tensor, key: Tensor, value: Tensor, *read: Any) -> tuple[Tensor, ...]:
        """The result, and of each row the logarithm of the sum of exponentials and the greatest score.

        A row of which no key counts is zero.
        """
        sizes = (*query.shape[:3], key.shape[2])
        nothing = query.new_zeros((), dtype=torch.float32)
        added: Tensor | None = None
        scores = _scores(self.change)
        assert scores is not None and self.scale is not None
        if scores.masks:
            added = self.changed(sizes, read, nothing).float()
        conditions = [] if _hides_nothing(self.mask) else list(_conjuncts(_result(self.mask)))
        causal = [_is_causal(condition, self.mask) for condition in conditions]
        mask = added
        if not all(causal):
            mask = torch.where(self.counts(sizes, read), nothing if added is None else added, -_INF)
        key, value = (each.expand(query.shape[0], -1, -1, -1) for each in (key, value))
        masking = "hides" if any(isinstance(each, Added) for each in scores.masks) else "replaces"
        scale = self.scale * scores.scale
        out, greatest, logarithm = ATTENTION(query, key, value, mask, masking, scale, any(causal), scores.cap)
        total = greatest + logarithm
        if mask is not None:
            hidden = total == -_INF
            out, greatest = torch.where(hidden[..., None], 0, out), torch.where(hidden, -_INF, greatest)
        return _lying_like(out, self.like), total / _LN2, greatest / _LN2

    def in_memory(self, query: Tensor, key: Tensor, value: Tensor, *read: Any) -> tuple[Tensor, ...]:
        """The same by scores in memory, of f32 or of f64."""
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        group = query.shape[1] // key.shape[1]
        key, value = (
            each.unsqueeze(2).expand(query.shape[0], -1, group, -1, -1).flatten(1, 2) for each in (key, value)
        )
        scores = query.to(wide) @ key.to(wide).mT * (read[-1] if self.scale is None else self.scale)
        sizes = tuple(scores.shape)
        if _result(self.change) is not _arguments(self.change)[0]:
            scores = self.changed(sizes, read, scores).to(wide)
        if not _hides_nothing(self.mask):
            scores = torch.where(self.counts(sizes, read), scores, -_INF)
        greatest = scores.amax(-1)
        base = torch.where(greatest == -_INF, 0.0, greatest)
        weights = (scores - base[..., None]).exp()
        sums = weights.sum(-1)
        weights = weights / torch.where(sums == 0, 1.0, sums)[..., None]
        out = weights.to(query.dtype) @ value
        return _lying_like(out, self.like), (base + sums.log()) / _LN2, greatest / _LN2


def _everywhere(
    function: GraphModule, sizes: Sequence[Any], read: Sequence[Any], score: Tensor | None = None
) -> Tensor:
    """What a function gives at all positions, (batch, heads, rows, keys).

    score: its first argument if it has one, for each position or one for all. A dimension of which neither that nor the
    function's result depends has a single element.
    """
    given = () if score is None else (score,)
    each = score is not None and score.dim() > 0
    places = _arguments(function)[len(given) :][:4]
    counts = [size if each or place.users else 1 for place, size in zip(places, sizes, strict=True)]
    positions = [torch.arange(count, device="cpu") for count in counts]
    over: Callable[..., Tensor] = _Function(function).run
    for dim in reversed(range(4)):
        along = tuple(0 if other == dim else None for other in range(4))
        over = torch.vmap(over, in_dims=((0 if each else None,) * len(given) + along + (None,) * len(read)))
    return over(*given, *positions, *read)


class _Function(torch.fx.Interpreter):
    """Calls the operators of a function, with tensors for numbers that only a call tells: `vmap` maps no others."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._local_scalar_dense.default:
            return args[0]
        if isinstance(target, torch._ops.OpOverload):
            takes_tensor = (isinstance(each.type, torch.TensorType) for each in target._schema.arguments)
            args = tuple(_tensor_of(arg) if takes else arg for arg, takes in zip(args, takes_tensor, strict=False))
        return super().call_function(target, args, kwargs)


def _tensor_of(value: Any) -> Any:
    """Of a number that only a call tells a tensor without dimensions, which counts as it; other values as they are."""
    match value:
        case torch.SymInt():
            return aten.scalar_tensor(value, dtype=torch.int64)
        case torch.SymFloat():
            return aten.scalar_tensor(value, dtype=torch.float64)
        case _:
            return value


def _lying_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor with the strides of another one."""
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
    """What a function does to scores, where a kernel does so too: what becomes of zero is then added to them.

    None if anything else happens to them.
    """
    score, *_ = _arguments(function)
    found = Climb(function, score).scores(_result(function))
    if found is None or not math.isfinite(found.scale) or not may_cap(found.cap):
        return None
    changed = {score}
    for node in function.graph.nodes:
        if not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
    for mask in found.masks:
        if isinstance(mask, Replaced) and mask.number != -_INF:
            return None
        if (mask.mask if isinstance(mask, Added) else mask.condition) in changed:
            return None
    return found


def _hides_nothing(mask: GraphModule) -> bool:
    """Whether all keys count."""
    result = _result(mask)
    match result:
        case Node(target=aten.full.default, args=(_, value)):
            return bool(value)
        case Node():
            return result.target in _ONES
        case _:
            return False


def _conjuncts(node: Node) -> Iterator[Node]:
    """What all must be true for a condition to be."""
    conditions = [each for each in node.args if isinstance(each, Node)]
    if node.target in _BOTH and len(conditions) == 2:
        for each in conditions:
            yield from _conjuncts(each)
    else:
        yield node


def _is_causal(condition: Node, mask: GraphModule) -> bool:
    """Whether the condition is that a key does not stand behind the row."""
    _, _, row, key, *_ = _arguments(mask)
    return (condition.target, condition.args) in ((aten.ge.Tensor, (row, key)), (aten.le.Tensor, (key, row)))
