"""What forward keeps for backward: of a softmax the statistics of its rows, where the matrix need not be in memory.

PyTorch's partitioner decides what is kept. It never computes a softmax again, because it is one operator; of its parts
it keeps the two numbers of each row, and the input, which mostly is in memory anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pellucid.capture.fx import bytes_of, decide, dependent_on_tangents, reachable
from pellucid.capture.torch_compat import (
    compute_again,
    elementwise_strides,
    keep,
    kept_results,
    size_hint,
)
from pellucid.capture.transform import aliases, decompose
from pellucid.ir.decision import Decision
from pellucid.ir.ops import OPS
from pellucid.machine import Machine, issuing, moving

aten = torch.ops.aten

# Calls without an argument in memory, whose results scatters and lookups need to know: the partitioner would keep them.
_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_RULE = "transform.keep-statistics"
_LOG_SOFTMAX, _SOFTMAX = aten._log_softmax.default, aten._softmax.default
# Calls that become part of a kernel and then need not have their argument in memory, beside those that PyTorch marks.
_FUSED = frozenset("_to_copy full_like gather index index_select".split())


def keep_less(
    joint: torch.fx.GraphModule, machine: Machine, has_loops: Callable[[torch.fx.Node], bool]
) -> torch.fx.GraphModule:
    """A joint graph, changed so that the partitioner keeps less, but nothing is computed again by a call of ATen.

    has_loops: whether a call becomes loops.

    Before: `%y = _log_softmax(%x)`, of which backward computes `exp(detach(%y))`.
    After: `%m = amax(%x); %l = log(sum(exp(%x - %m))); %y = %x - %m - %l`, and `exp(%y)`: so `%m` and `%l` are kept.
    """
    _skip_detached(joint.graph)
    for node in joint.graph.nodes:
        if node.target in _COUNTS:
            compute_again(node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) and not has_loops(node):
            keep(node)  # the partitioner takes it for a part of a kernel, which would cost nothing
    forward = _forward_of(joint.graph)
    _keep_what_is_compared(joint.graph, forward)
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
    """Let calls read what was detached: the partitioner computes nothing again that passes through `detach`."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")


def _keep_what_is_compared(graph: torch.fx.Graph, forward: set[torch.fx.Node]) -> None:
    """Have memory round what backward compares with a result of forward, as in `x == amax(x)`.

    That would be true nowhere for an `x` in bf16 or f16 that backward computes again, in f32.
    """
    in_backward = (node for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor) if node not in forward)
    for equal in in_backward:
        narrow = [node for node in equal.all_input_nodes if node.meta["val"].dtype in (torch.bfloat16, torch.float16)]
        for node in reachable(narrow, lambda each: () if each in forward else each.all_input_nodes):
            if node in forward and node.op == "call_function":
                keep(_base(node))


def _forward_of(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that results without a gradient in them depend on, and the output."""
    backward = dependent_on_tangents(graph)
    output = graph.output_node()
    results = (node for node in output.all_input_nodes if node not in backward)
    return {output} | reachable(results, lambda node: node.all_input_nodes)


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The users of a tensor and of the views of it."""
    for user in node.users:
        if user.op == "call_function" and aliases(user):
            yield from _readers(user)
        else:
            yield user


def kept(forward: torch.fx.Graph) -> tuple[Decision, ...]:
    """What forward hands to backward beside its own arguments: a sentence on each."""
    found: list[Decision] = []
    for node in kept_results(forward):
        base = _base(node)
        value = base.meta.get("val")
        if base.op == "call_function" and isinstance(value, torch.Tensor):
            read = sum(bytes_of(each) for each in base.all_input_nodes)
            why = f"{_operator(base)} is not computed again"
            if 4 * bytes_of(base) < read and _fuses(base):
                why = f"it is less than a quarter of what {_operator(base)} reads"
            elif _fuses(base):
                why = f"PyTorch's partitioner prefers it to what {_operator(base)} is computed from"
            found.append(Decision("transform.keep", (node.name,), True, why, (("bytes", bytes_of(base)),)))
    return tuple(found)


def computed_again(backward: torch.fx.Graph) -> tuple[Decision, ...]:
    """What backward computes from forward's values alone and uses for gradients, instead of having it kept."""
    gradients = dependent_on_tangents(backward)
    found: list[Decision] = []
    for node in backward.nodes:
        again = node.op == "call_function" and node not in gradients and not aliases(node)
        if again and bytes_of(node) and node.all_input_nodes and not gradients.isdisjoint(_readers(node)):
            read = ", ".join(each.name for each in node.all_input_nodes)
            why = f"backward computes it by {_operator(node)} from {read}"
            found.append(Decision("transform.keep", (node.name,), False, why, (("bytes", bytes_of(node)),)))
    return tuple(found)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view is of."""
    while node.op == "call_function" and aliases(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _operator(node: torch.fx.Node) -> str:
    return getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))


def _statistics_pay(node: torch.fx.Node, forward: set[torch.fx.Node], machine: Machine) -> Decision:
    """Whether backward shall compute a softmax again from its input and two numbers of each row."""
    x, dim, value = node.args[0], node.args[1], node.meta["val"]
    assert isinstance(x, torch.fx.Node) and isinstance(dim, int)
    size = bytes_of(node)
    row = size_hint(value.shape[dim]) if value.dim() else 1
    facts = (("bytes", size), ("row", row))

    def answer(ok: bool, why: str) -> Decision:
        return Decision(_RULE, (node.name,), ok, why, facts)

    if elementwise_strides(x.meta["val"], x.meta["val"]) != tuple(value.stride()):
        return answer(False, "its parts would lie in the order of its input in memory, which is another one")
    if row <= 2:
        return answer(False, "two numbers of each row are no less than the row")
    in_memory = next((user for user in _readers(node) if not _fuses(user)), None)
    if in_memory is not None and in_memory.op == "output":
        return answer(False, "it is a result and in memory anyway")
    if in_memory is not None:
        return answer(False, f"{in_memory.name} reads it from memory, so it is there anyway")
    if node.target is _LOG_SOFTMAX:
        return answer(True, "backward subtracts two numbers of each row from the input again, instead of a matrix")
    if not _is_alive(x, forward):
        return answer(False, "its input would be kept instead, which is as large")
    again = issuing(machine, OPS["exp"].cost * size / value.itemsize / machine.lanes, machine.cores)
    spared = moving(machine, 0, size, 2 * size, machine.cores)
    facts = (*facts, ("ns_saved", round(spared)), ("ns_spent", round(again)))
    if again > spared:
        return answer(False, "computing its exponentials again takes longer than writing them")
    return answer(True, "computing its exponentials again takes less than writing them, and its input is alive anyway")


def _fuses(reader: torch.fx.Node) -> bool:
    """Whether a call becomes part of a kernel in which its argument need not be in memory."""
    target = reader.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.index.Tensor:  # by a mask, how many elements there are depends on data
        indices: Any = reader.args[1]
        return not any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices)
    known = target.namespace == "aten" and target._opname in _FUSED
    return known or torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags


def _is_alive(x: torch.fx.Node, forward: set[torch.fx.Node]) -> bool:
    """Whether a value is an input, or backward has it in memory for another reader, or it follows from one such."""
    if x.op == "placeholder" or any(user not in forward and not _fuses(user) for user in _readers(x)):
        return True
    cheap = isinstance(x.target, torch._ops.OpOverload) and (_fuses(x) or aliases(x))
    return cheap and len(x.all_input_nodes) == 1 and _is_alive(x.all_input_nodes[0], forward)


def _round_inputs(graph: torch.fx.Graph, user: torch.fx.Node, seen: set[torch.fx.Node]) -> None:
    """Have bf16 and f16 values that a softmax is computed from rounded in kernels as well, as they are in memory.

    Backward computes the softmax from what memory holds: its rows would not sum to 1 if forward had not done so.
    """
    for x in user.all_input_nodes:
        if x.op != "call_function" or x in seen:
            continue
        seen.add(x)
        value = x.meta["val"]
        if not isinstance(value, torch.Tensor):
            continue  # of several results, each is in memory
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
    """The distance from the greatest element of the row, in f32 at least, and its exponential."""
    wide = x if x.dtype is torch.float64 else x.float()
    shifted = wide - wide.amax(dim, keepdim=True)
    return shifted, shifted.exp()


_PARTS = {_LOG_SOFTMAX: _log_softmax, _SOFTMAX: _softmax}
