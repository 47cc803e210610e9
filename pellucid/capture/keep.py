"""What forward saves for backward: of a softmax the statistics of its rows, where the matrix need not be in memory.

PyTorch's partitioner decides what is saved. It never recomputes a softmax as a single operator; of its decomposition it
saves the two numbers of each row, and the input, which is usually in memory anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pellucid.capture.fx import bytes_of, decide, dependent_on_tangents, reachable
from pellucid.capture.torch_compat import (
    elementwise_strides,
    must_save,
    prefer_recompute,
    saved_results,
    size_hint,
)
from pellucid.capture.transform import aliases, decompose
from pellucid.ir.decision import Decision
from pellucid.ir.ops import OPS
from pellucid.machine import Machine, issuing, moving

aten = torch.ops.aten

# Calls that read no memory, whose results scatters and lookups read as indices: the partitioner would save them.
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_RULE = "transform.keep-statistics"
_LOG_SOFTMAX, _SOFTMAX = aten._log_softmax.default, aten._softmax.default
# Calls that are fused with the producer of their argument, in addition to those that PyTorch tags.
_FUSED = frozenset("_to_copy full_like gather index index_select".split())


def keep_less(
    joint: torch.fx.GraphModule, machine: Machine, has_loops: Callable[[torch.fx.Node], bool]
) -> torch.fx.GraphModule:
    """Change a joint graph so that the partitioner saves less, without any recomputation by a call of ATen.

    has_loops: whether a call is lowered to loops.

    Before: `%y = _log_softmax(%x)`, of which backward computes `exp(detach(%y))`.
    After: `%m = amax(%x); %l = log(sum(exp(%x - %m))); %y = %x - %m - %l`, and `exp(%y)`: so `%m` and `%l` are saved.
    """
    _skip_detached(joint.graph)
    for node in joint.graph.nodes:
        if node.target in _COUNTS:
            prefer_recompute(node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) and not has_loops(node):
            must_save(node)  # the partitioner assumes that it is fused and costs nothing to recompute
    forward = _forward_of(joint.graph)
    _save_compared(joint.graph, forward)
    for node in [node for node in joint.graph.nodes if node.target in (_LOG_SOFTMAX, _SOFTMAX)]:
        if not forward.issuperset(_readers(node)):
            decision = _statistics_pay(node, forward, machine)
            if decision.ok:
                _round_inputs(joint.graph, node, set())
            decide(decompose(joint.graph, node, _PARTS)[0] if decision.ok else node, decision)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _skip_detached(graph: torch.fx.Graph) -> None:
    """Bypass `detach`: the partitioner recomputes nothing that passes through it."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")


def _save_compared(graph: torch.fx.Graph, forward: set[torch.fx.Node]) -> None:
    """Save, and so round, what backward compares with a result of forward, as in `x == amax(x)`.

    For an `x` in bf16 or f16 that backward recomputes in f32, that would be true nowhere.
    """
    in_backward = (node for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor) if node not in forward)
    for equal in in_backward:
        narrow = [node for node in equal.all_input_nodes if node.meta["val"].dtype in (torch.bfloat16, torch.float16)]
        for node in reachable(narrow, lambda each: () if each in forward else each.all_input_nodes):
            if node in forward and node.op == "call_function":
                must_save(_base(node))


def _forward_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that results of forward (not gradients) depend on, and the output."""
    backward = dependent_on_tangents(graph)
    output = graph.output_node()
    results = (node for node in output.all_input_nodes if node not in backward)
    return {output} | reachable(results, lambda node: node.all_input_nodes)


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The users of a tensor and of its views."""
    for user in node.users:
        if user.op == "call_function" and aliases(user):
            yield from _readers(user)
        else:
            yield user


def kept(forward: torch.fx.Graph) -> tuple[Decision, ...]:
    """The tensors that forward saves for backward in addition to its arguments, each with the reason."""
    found: list[Decision] = []
    for node in saved_results(forward):
        base = _base(node)
        value = base.meta.get("val")
        if base.op == "call_function" and isinstance(value, torch.Tensor):
            read = sum(bytes_of(each) for each in base.all_input_nodes)
            why = f"{_operator(base)} is not recomputed"
            if 4 * bytes_of(base) < read and _fuses(base):
                why = f"it is less than a quarter of what {_operator(base)} reads"
            elif _fuses(base):
                why = f"PyTorch's partitioner prefers it to what {_operator(base)} is computed from"
            found.append(Decision("transform.keep", (node.name,), True, why, (("bytes", bytes_of(base)),)))
    return tuple(found)


def computed_again(backward: torch.fx.Graph) -> tuple[Decision, ...]:
    """The values that backward recomputes from forward's values and uses for gradients, instead of saving them."""
    gradients = dependent_on_tangents(backward)
    found: list[Decision] = []
    for node in backward.nodes:
        recomputed = node.op == "call_function" and node not in gradients and not aliases(node)
        if recomputed and bytes_of(node) and node.all_input_nodes and not gradients.isdisjoint(_readers(node)):
            read = ", ".join(each.name for each in node.all_input_nodes)
            why = f"backward computes it by {_operator(node)} from {read}"
            found.append(Decision("transform.keep", (node.name,), False, why, (("bytes", bytes_of(node)),)))
    return tuple(found)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view belongs to."""
    while node.op == "call_function" and aliases(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _operator(node: torch.fx.Node) -> str:
    return getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))


def _statistics_pay(node: torch.fx.Node, forward: set[torch.fx.Node], machine: Machine) -> Decision:
    """Decide whether backward recomputes a softmax from its input and two numbers of each row."""
    x, dim, value = node.args[0], node.args[1], node.meta["val"]
    assert isinstance(x, torch.fx.Node) and isinstance(dim, int)
    size = bytes_of(node)
    row = size_hint(value.shape[dim]) if value.dim() else 1
    facts = (("bytes", size), ("row", row))

    def answer(ok: bool, why: str) -> Decision:
        return Decision(_RULE, (node.name,), ok, why, facts)

    if elementwise_strides(x.meta["val"], x.meta["val"]) != tuple(value.stride()):
        return answer(False, "its parts would have the strides of its input, which are others")
    if row <= 2:
        return answer(False, "two numbers of each row are no smaller than the row")
    in_memory = next((user for user in _readers(node) if not _fuses(user)), None)
    if in_memory is not None and in_memory.op == "output":
        return answer(False, "it is a result and in memory anyway")
    if in_memory is not None:
        return answer(False, f"{in_memory.name} reads it from memory, so it is there anyway")
    if node.target is _LOG_SOFTMAX:
        return answer(True, "backward recomputes it from its input and two numbers of each row, not from a matrix")
    if not _is_alive(x, forward):
        return answer(False, "its input would be saved instead, which is as large")
    recompute = issuing(machine, OPS["exp"].cost * size / value.itemsize / machine.lanes, machine.cores)
    saved = moving(machine, 0, size, 2 * size, machine.cores)
    facts = (*facts, ("ns_saved", round(saved)), ("ns_spent", round(recompute)))
    if recompute > saved:
        return answer(False, "recomputing its exponentials takes longer than writing them")
    return answer(True, "recomputing its exponentials takes less time than writing them, and its input is alive anyway")


def _fuses(reader: torch.fx.Node) -> bool:
    """Whether a call is fused with the producer of its argument, which then need not be in memory."""
    target = reader.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.index.Tensor:  # with a mask, the number of elements depends on data
        indices: Any = reader.args[1]
        return not any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices)
    known = target.namespace == "aten" and target._opname in _FUSED
    return known or torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags


def _is_alive(x: torch.fx.Node, forward: set[torch.fx.Node]) -> bool:
    """Whether a value is an input, in memory for another reader in backward, or cheap to compute from such a value."""
    if x.op == "placeholder" or any(user not in forward and not _fuses(user) for user in _readers(x)):
        return True
    cheap = isinstance(x.target, torch._ops.OpOverload) and (_fuses(x) or aliases(x))
    return cheap and len(x.all_input_nodes) == 1 and _is_alive(x.all_input_nodes[0], forward)


def _round_inputs(graph: torch.fx.Graph, user: torch.fx.Node, seen: set[torch.fx.Node]) -> None:
    """Round bf16 and f16 values that a softmax is computed from inside kernels as well, as they are in memory.

    Backward computes the softmax from the values in memory: its rows would not sum to 1 if forward used others.
    """
    for x in user.all_input_nodes:
        if x.op != "call_function" or x in seen:
            continue
        seen.add(x)
        value = x.meta["val"]
        if not isinstance(value, torch.Tensor):
            continue  # several results are in memory anyway
        if not aliases(x) and value.dtype in (torch.bfloat16, torch.float16):
            with graph.inserting_after(x):
                wide = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float32})
            with graph.inserting_after(wide):
                rounded = graph.call_function(aten._to_copy.default, (wide,), {"dtype": value.dtype})
            wide.meta = {**x.meta, "val": value.float()}
            rounded.meta = {**x.meta, "val": value.clone()}
            user.replace_input_with(x, rounded)
        if _fuses(x) or aliases(x):
            _round_inputs(graph, x, seen)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted, exponential = _shifted(x, dim)
    result = shifted - exponential.sum(dim, keepdim=True).log()
    return result if half_to_float else result.to(x.dtype)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    _, exponential = _shifted(x, dim)
    result = exponential / exponential.sum(dim, keepdim=True)
    return result if half_to_float else result.to(x.dtype)


def _shifted(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` minus the maximum of its row, in f32 at least, and the exponential of that."""
    wide = x if x.dtype is torch.float64 else x.float()
    shifted = wide - wide.amax(dim, keepdim=True)
    return shifted, shifted.exp()


_PARTS = {_LOG_SOFTMAX: _log_softmax, _SOFTMAX: _softmax}
