"""Of a frozen model: what scales and shifts the channels of a convolution, as batch norm does, goes into its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.fx import merge_origin
from pellucid.capture.torch_compat import fake_mode_of, parameters_of, quiet_fake_tensors
from pellucid.capture.transform import is_pure
from pellucid.ir.decision import Decision

aten = torch.ops.aten

_RULE = "freeze.fold"
_SHIFTS, _SCALES = (aten.add.Tensor, aten.sub.Tensor), (aten.mul.Tensor, aten.div.Tensor)


def fold_scales(graph_module: torch.fx.GraphModule) -> tuple[Decision, ...]:
    """Change a graph whose parameters are frozen: one convolution instead of a convolution and what follows it.

    Before: `%c = convolution(%x, %w); %d = sub(%c, %mean); %e = mul(%d, %factor); %f = add(%e, %shift)`.
    After: `%f = convolution(%x, mul(%w, %factor), add(mul(neg(%mean), %factor), %shift))`, in f32 and f64 alone: a
    narrower weight would lose digits.
    """
    still = _still(graph_module)
    fake_mode = fake_mode_of(graph_module.graph)
    decisions: list[Decision] = []
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        chain = _chain(node, still)
        if not any(step.target in _SCALES for step in chain):
            continue
        folded = _Fold(graph_module.graph, fake_mode, node, chain).run()
        why = f"scales and shifts of {', '.join(step.name for step in chain)} go into weight and bias"
        decisions.append(Decision(_RULE, (node.name, folded.name), True, why))
    graph_module.recompile()
    return tuple(decisions)


def _still(graph_module: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes that follow from frozen parameters alone."""
    names = set(parameters_of(graph_module))
    found: set[torch.fx.Node] = set()
    for node in graph_module.graph.nodes:
        frozen = node.name in names and all(is_pure(user) for user in node.users if user.op == "call_function")
        if frozen or (is_pure(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _chain(convolution: torch.fx.Node, still: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """The calls that scale or shift the channels of a convolution, each the only use of the one before."""
    arguments: Any = convolution.args
    _, weight, bias, *_, transposed, _, _ = arguments
    value = convolution.meta["val"]
    if transposed or value.dtype not in (torch.float32, torch.float64) or weight not in still:
        return []
    if bias is not None and bias not in still:
        return []
    found: list[torch.fx.Node] = []
    while True:
        last = found[-1] if found else convolution
        step = next(iter(last.users)) if len(last.users) == 1 else None
        if step is None or step.target not in (*_SHIFTS, *_SCALES) or step.kwargs or len(step.args) != 2:
            return found
        first, second = step.args
        if step.target in (aten.add.Tensor, aten.mul.Tensor) and second is last:
            first, second = second, first
        if first is not last or second not in still or not _is_per_channel(second, value):
            return found
        if step.meta["val"].stride() != value.stride():
            return found
        found.append(step)


def _is_per_channel(operand: Any, value: torch.Tensor) -> bool:
    """True for one element for each channel of `value` (images, channels, ...), of the same type."""
    if not isinstance(operand, torch.fx.Node):
        return False
    tensor = operand.meta["val"]
    shape = (1,) * (value.dim() - tensor.dim()) + tuple(tensor.shape)
    return tensor.dtype is value.dtype and shape == (1, value.shape[1], *(1,) * (value.dim() - 2))


@dataclass(frozen=True)
class _Fold:
    """Puts one convolution in the place of the last call of a chain, under its name."""

    graph: torch.fx.Graph
    fake_mode: Any
    convolution: torch.fx.Node
    chain: list[torch.fx.Node]

    def run(self) -> torch.fx.Node:
        arguments: Any = self.convolution.args
        x, weight, bias, *rest = arguments
        last, old = self.chain[-1], [self.convolution, *self.chain]
        with self.graph.inserting_before(last):
            shift = bias
            for step in self.chain:
                (operand,) = (each for each in step.all_input_nodes if each not in old)
                channels = operand.meta["val"].numel()
                vector = self._call(aten.view.default, operand, [channels])
                if step.target in _SCALES:
                    factor = self._call(aten.view.default, operand, [channels, *[1] * (weight.meta["val"].dim() - 1)])
                    weight = self._call(step.target, weight, factor)
                if shift is not None:
                    shift = self._call(step.target, shift, vector)
                elif step.target in _SHIFTS:
                    shift = vector if step.target is aten.add.Tensor else self._call(aten.neg.default, vector)
            made = self._call(aten.convolution.default, x, weight, shift, *rest)
        last.replace_all_uses_with(made)
        for each in reversed(old):
            if each is not last:
                merge_origin(made, each)
            self.graph.erase_node(each)
        made.name = last.name
        return made

    def _call(self, target: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(self.chain[-1].meta)
        fakes = pytree.tree_map_only(torch.fx.Node, lambda each: each.meta["val"], args)
        with quiet_fake_tensors(), self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*fakes)
        return node
