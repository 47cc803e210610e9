"""Folds scales and shifts of a convolution's channels, as of batch norm, into its weight, in frozen models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.fx import RESHAPES, computed, merge_origin
from pellucid.capture.torch_compat import fake_mode_of, parameters_of, quiet_fake_tensors
from pellucid.capture.transform import is_pure
from pellucid.ir.decision import Decision

aten = torch.ops.aten

_RULE = "freeze.fold"
_LINE = 2  # the additional dimension of images that are single lines
_PAD = aten.constant_pad_nd.default
_SHIFTS, _SCALES = (aten.add.Tensor, aten.sub.Tensor), (aten.mul.Tensor, aten.div.Tensor)


def fold_scales(graph_module: torch.fx.GraphModule) -> tuple[Decision, ...]:
    """Change a graph whose parameters are frozen: fold scales and shifts after convolutions into these.

    Before: `%c = convolution(%x, %w); %d = sub(%c, %mean); %e = mul(%d, %factor); %f = add(%e, %shift)`.
    After: `%f = convolution(%x, mul(%w, %factor), add(mul(neg(%mean), %factor), %shift))`. A weight narrower than f32
    would lose precision: there `%f = add(mul(%c, %factor), add(mul(neg(%mean), %factor), %shift))`, in f32.
    """
    frozen = frozen_nodes(graph_module)
    fake_mode = fake_mode_of(graph_module.graph)
    decisions: list[Decision] = []
    done: set[torch.fx.Node] = set()
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if node in done:
            continue
        source = _source(node)
        done.update(source.parts)
        chain = _chain(source, frozen)
        if not any(step.target in _SCALES for step in chain):
            continue
        fold = _Fold(graph_module.graph, fake_mode, source, chain)
        folded = fold.into_one_scale() if _is_narrow(node) else fold.into_weight()
        where = "one scale and one shift" if _is_narrow(node) else "weight and bias"
        why = f"scales and shifts of {', '.join(step.name for step in chain)} go into {where}"
        decisions.append(Decision(_RULE, (node.name, folded.name), True, why))
    graph_module.recompile()
    return tuple(decisions)


def frozen_nodes(graph_module: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """The nodes that depend on frozen parameters alone."""
    names = set(parameters_of(graph_module))
    found: set[torch.fx.Node] = set()
    for node in graph_module.graph.nodes:
        frozen = node.name in names and all(is_pure(user) for user in node.users if user.op == "call_function")
        if frozen or (is_pure(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


@dataclass(frozen=True)
class _Source:
    """A convolution, or several whose sum is one over three dimensions, see `capture/volumes.py`.

    parts: the convolutions; the last one has the bias. calls: these, and those that compute the result, in order.
    """

    parts: tuple[torch.fx.Node, ...]
    calls: tuple[torch.fx.Node, ...]

    @property
    def result(self) -> torch.fx.Node:
        return self.calls[-1]


def _chain(source: _Source, frozen: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """The calls that scale or shift the channels of a convolution, each the only use of the one before."""
    arguments: list[Any] = [part.args for part in source.parts]
    transposed, result = arguments[-1][6], source.result
    value = result.meta["val"]
    if transposed or not value.is_floating_point():
        return []
    parameters = {each for _, weight, bias, *_ in arguments for each in (weight, bias) if each is not None}
    if not _is_narrow(source.parts[-1]) and not parameters <= frozen:
        return []
    found: list[torch.fx.Node] = []
    while True:
        last = found[-1] if found else result
        step = _only_user(last)
        if step is None or step.target not in (*_SHIFTS, *_SCALES) or step.kwargs or len(step.args) != 2:
            return found
        first, second = step.args
        if step.target in (aten.add.Tensor, aten.mul.Tensor) and second is last:
            first, second = second, first
        if first is not last or second not in frozen or not _is_per_channel(second, value):
            return found
        if step.meta["val"].stride() != value.stride() or step.meta["val"].dtype is not computed(value.dtype):
            return found
        found.append(step)


def _source(convolution: torch.fx.Node) -> _Source:
    """A convolution and the calls that compute its result: for one over one dimension, the removal of the line."""
    user = _only_user(convolution)
    if user is not None and user.target is aten.squeeze.dim and user.args[1] == _LINE:
        return _Source((convolution,), (convolution, user))
    return _volume(convolution) or _Source((convolution,), (convolution,))


def _volume(convolution: torch.fx.Node) -> _Source | None:
    """The convolution over three dimensions that a convolution of frames is part of; None if there is none."""
    calls = _frames(_last_call(convolution))
    if not calls or not _are_alone(calls):
        return None
    while (user := _only_user(calls[-1])) is not None and (more := _frames(user)) and _are_alone(more):
        calls = more
    parts = [call for call in calls if call.target is aten.convolution.default]
    whole = [part for part in parts if _last_call(part).target is not _PAD]
    biased = [part for part in parts if part.args[2] is not None]
    last = (biased or whole or parts)[-1]
    if len(biased) > 1 or last not in whole:
        return None
    if user is not None and user.target is aten.clone.default:
        calls = [*calls, user]
    return _Source((*(part for part in parts if part is not last), last), tuple(calls))


def _frames(node: Any) -> list[torch.fx.Node]:
    """The calls that compute a volume, [N, channels, frames, H, W], from convolutions of frames; empty if none."""
    if isinstance(node, torch.fx.Node) and node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        first, second = map(_frames, node.args)
        same = first and second and first[-1].meta["val"].shape == second[-1].meta["val"].shape
        return [*first, *second, node] if same else []
    calls: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node) and node.target in (_PAD, aten.transpose.int, *RESHAPES):
        calls.insert(0, node)
        node = node.args[0]
    if not calls or node.target is not aten.convolution.default:
        return []
    return [node, *calls] if _are_frames(node, calls) else []


def _are_alone(calls: list[torch.fx.Node]) -> bool:
    """Whether no other call reads the results of these calls, except the last one's, and no call occurs twice."""
    own = set(calls)
    return len(own) == len(calls) and all(own.issuperset(call.users) for call in calls[:-1])


def _last_call(convolution: torch.fx.Node) -> torch.fx.Node:
    """The last of the calls that compute a volume from one convolution's frames."""
    last = convolution
    while (user := _only_user(last)) is not None and user.target in (_PAD, aten.transpose.int, *RESHAPES):
        last = user
    return last


def _are_frames(convolution: torch.fx.Node, calls: list[torch.fx.Node]) -> bool:
    """Whether these calls turn images into a volume: a view, a transposition of frames and channels, and padding."""
    view, *others = calls
    made, shape = convolution.meta["val"].shape, view.meta["val"].shape
    if view.target not in RESHAPES or len(shape) != 5:
        return False
    if not others:
        return shape[:3] == made[:3]  # lines along depth
    transposed, *padded = others
    if transposed.target is not aten.transpose.int or transposed.args[1:] != (1, 2) or shape[2:] != made[1:]:
        return False
    return not padded or (len(padded) == 1 and len(padded[0].args) == 2 and not any(padded[0].args[1][:4]))  # type: ignore[index]


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_per_channel(operand: Any, value: torch.Tensor) -> bool:
    """True for an operand with one element per channel of `value` (images, channels, ...), of its type or f32."""
    if not isinstance(operand, torch.fx.Node):
        return False
    tensor = operand.meta["val"]
    shape = (1,) * (value.dim() - tensor.dim()) + tuple(tensor.shape)
    return tensor.dtype in (value.dtype, computed(value.dtype)) and shape == (
        1,
        value.shape[1],
        *(1,) * (value.dim() - 2),
    )


def _is_narrow(convolution: torch.fx.Node) -> bool:
    """Whether calls after the convolution are computed in a wider type than its result."""
    dtype = convolution.meta["val"].dtype
    return dtype is not computed(dtype)


@dataclass(frozen=True)
class _Fold:
    """Replaces a convolution and a chain of calls by fewer calls, the last of which keeps its name."""

    graph: torch.fx.Graph
    fake_mode: Any
    source: _Source
    chain: list[torch.fx.Node]

    def into_weight(self) -> torch.fx.Node:
        """The same convolutions with scaled weights, the last one with the total shift as bias."""
        arguments: Any = self.source.parts[-1].args
        _, weight, bias, *_ = arguments
        again: dict[torch.fx.Node, torch.fx.Node] = {}
        with self.graph.inserting_before(self.chain[-1]):
            scale, shift = self._combined([weight.meta["val"].shape[0], *[1] * (weight.meta["val"].dim() - 1)], bias)
            for call in self.source.calls:
                args = pytree.tree_map_only(torch.fx.Node, lambda each: again.get(each, each), call.args)
                if call in self.source.parts:
                    added = shift if call is self.source.parts[-1] else None
                    args = (args[0], self._call(aten.mul.Tensor, args[1], scale), added, *args[3:])
                again[call] = self._call(call.target, *args, **call.kwargs)
        return self._replaced(
            again[self.source.result], again[self.source.parts[-1]], [*self.source.calls, *self.chain]
        )

    def into_one_scale(self) -> torch.fx.Node:
        """The convolution unchanged, then one scale and one shift."""
        result = self.source.result
        value = result.meta["val"]
        with self.graph.inserting_before(self.chain[-1]):
            scale, shift = self._combined([value.shape[1], *[1] * (value.dim() - 2)], None)
            made = self._call(aten.mul.Tensor, result, scale)
            if shift is not None:
                shift = self._call(aten.view.default, shift, list(scale.meta["val"].shape))
                made = self._call(aten.add.Tensor, made, shift)
        return self._replaced(made, made, self.chain)

    def _combined(self, shape: list[int], shift: torch.fx.Node | None) -> tuple[torch.fx.Node, torch.fx.Node | None]:
        """The product of all scales, in this shape, and the combined shift, a vector."""
        scale: torch.fx.Node | None = None
        dtype = self.chain[-1].meta["val"].dtype
        for before, step in pairwise([self.source.result, *self.chain]):
            (operand,) = (each for each in step.all_input_nodes if each is not before)
            vector = self._call(aten.view.default, operand, [operand.meta["val"].numel()])
            if operand.meta["val"].dtype is not dtype:
                vector = self._call(aten._to_copy.default, vector, dtype=dtype)
            if step.target in _SCALES:
                if scale is None:
                    scale = vector if step.target is aten.mul.Tensor else self._call(aten.reciprocal.default, vector)
                else:
                    scale = self._call(step.target, scale, vector)
            if shift is not None:
                shift = self._call(step.target, shift, vector)
            elif step.target in _SHIFTS:
                shift = vector if step.target is aten.add.Tensor else self._call(aten.neg.default, vector)
        assert scale is not None
        return self._call(aten.view.default, scale, shape), shift

    def _replaced(self, made: torch.fx.Node, heir: torch.fx.Node, old: list[torch.fx.Node]) -> torch.fx.Node:
        """Replace `old` by `made`, which gets the name of the last of them. heir: the call that gets their origins."""
        last = old[-1]
        last.replace_all_uses_with(made)
        for each in reversed(old):
            if each is not last:
                merge_origin(heir, each)
            self.graph.erase_node(each)
        made.name = last.name
        return made

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.chain[-1].meta)
        fakes = pytree.tree_map_only(torch.fx.Node, lambda each: each.meta["val"], args)
        with quiet_fake_tensors(), self.fake_mode, torch.no_grad():
            node.meta["val"] = target(*fakes, **kwargs)
        return node
