"""Makes activations channels-last from the first convolution on, where convolutions become faster."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from pellucid.capture.fx import decide, dtype_of, elements_of
from pellucid.capture.relayout import ReadsElements, Refused, Relayout, base_of, check_graph, source_of
from pellucid.capture.torch_compat import size_hint, without_guards
from pellucid.capture.transform import may_write, returned
from pellucid.ir.contraction import DTYPES, MAX_SPREAD_CHANNELS, MAX_SPREAD_TERMS, MAX_TAPS, packs_taps
from pellucid.ir.decision import Decision
from pellucid.ir.types import DType
from pellucid.machine.library import Library

aten = torch.ops.aten
_RULE = "transform.channels-last"
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# Minimum ratio of avoided to added copies, for inference and for training, each for types of four bytes and for
# narrower ones. Kernels read most weights as stored, and are faster even where copies balance: 3 x 3 convolutions of
# planar tensors take 0.6 to 0.9 of oneDNN's time (AMD EPYC, Zen 4). In f32 training they write gradients of weights as
# stored: a VGG-11 with a ratio of 1/15 becomes 1.9 times as fast. In bf16 oneDNN computes gradients of several taps.
_WORTH = {"inference": (1.0, 0.15), "training": (0.01, 0.6)}
# For types without kernels, more copies must be avoided than added.
_NO_KERNELS = 1 + 1e-9


def channels_last(
    graph_module: torch.fx.GraphModule,
    reads_elements: ReadsElements,
    library: Library,
    use: str = "inference",
    frozen: Collection[torch.fx.Node] = (),
) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """The graph with the inputs of its convolutions channels-last, or unchanged, with the reason.

    reads_elements: true for calls whose arguments may have other strides than captured. use: `inference` or `training`.
    frozen: nodes that are computed once, before the first call: weights among them are copied then.

    Strides are not part of FX graphs, they follow from those of the inputs: so one copy before the first convolution
    determines the layout of all that follows, and results get eager's strides back at the end.

    oneDNN computes on channels-last activations directly, and copies others into a layout of its own and back. In
    exchange we copy weights, their gradients, inputs and results: the copies avoided must exceed those by a ratio,
    unless oneDNN has no instructions for the type. Weights could be left to ATen, which would copy them at every call,
    element by element.

    Before: `convolution(%x, %w, ...)`. After: `clone(%x, memory_format=channels_last)`, and the convolution of that.
    """
    nodes = [node for node in graph_module.graph.nodes if _is_planar(node)]
    if not nodes:
        return graph_module, ()
    try:
        check_graph(graph_module.graph)
        relayout = _ChannelsLast(graph_module, reads_elements, use)
        result, why = _laid_out(nodes, relayout, library, frozen)
    except Refused as refusal:
        return graph_module, (Decision(_RULE, ("convolutions",), False, str(refusal)),)
    return result, (Decision(_RULE, ("convolutions",), True, why),)


def _laid_out(
    nodes: Sequence[torch.fx.Node],
    relayout: _ChannelsLast,
    library: Library,
    frozen: Collection[torch.fx.Node],
) -> tuple[torch.fx.GraphModule, str]:
    """The graph with changed layouts, and why that pays; raises `Refused` where it does not."""
    avoided = sum(map(_avoided, nodes))
    added = sum(_added(node) for node in nodes if _argument(node, "weight") not in frozen)
    image = _argument(nodes[0], "input").meta["val"]
    worth = _worth(relayout.use, dtype_of(image))
    lacking = max(library.lacks_type(dtype_of(_argument(node, "input").meta["val"])) for node in nodes)
    why = lacking or _weigh(avoided, added, worth)
    with without_guards(nodes[0].graph):
        result = relayout.run()
    if not lacking:
        why = _weigh(avoided, added + relayout.copied, worth)
    return result, why


def _worth(use: str, dtype: DType) -> float:
    """The minimum ratio of avoided to added copies."""
    return _WORTH[use][dtype.itemsize < 4] if dtype in DTYPES else _NO_KERNELS


def _weigh(avoided: int, added: int, worth: float) -> str:
    """Why it pays; raises `Refused` if it does not."""
    why = f"spares oneDNN copies of {avoided:,} elements of activations, adds {added:,} of weights, inputs and results"
    if avoided < worth * added:
        raise Refused(why)
    return why


def lay_out_joint(
    graph_module: torch.fx.GraphModule, reads_elements: ReadsElements, library: Library
) -> torch.fx.GraphModule:
    """Like `channels_last`, for a joint graph: so forward and backward agree on the strides of saved tensors.

    The decision is attached to the first convolution.
    """
    result, decisions = channels_last(graph_module, reads_elements, library, "training")
    if decisions:
        decide(next(filter(_is_planar, result.graph.nodes)), *decisions)
    return result


def _is_planar(node: torch.fx.Node) -> bool:
    """True for a convolution over two dimensions, or its backward, that is not transposed."""
    return (
        node.target in (_FORWARD, _BACKWARD) and len(_shape(node, "input")) == 4 and not _argument(node, "transposed")
    )


def _argument(node: torch.fx.Node, name: str) -> Any:
    """The value of an argument of a convolution; all are passed by position."""
    position = [each.name for each in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    return node.args[position]


def _groups(node: torch.fx.Node) -> int:
    """The number of groups; its value at capture if it is symbolic."""
    groups = _argument(node, "groups")
    return size_hint(groups.meta["val"] if isinstance(groups, torch.fx.Node) else groups)


def _shape(node: torch.fx.Node, name: str) -> tuple[int, ...]:
    """The sizes of an argument."""
    return tuple(map(size_hint, _argument(node, name).meta["val"].shape))


def _avoided(node: torch.fx.Node) -> int:
    """The number of elements of activations that oneDNN need not copy.

    Backward reads two activations for each of two gradients. A depthwise convolution counts twice: without adjacent
    channels it takes twice the time. So does any convolution of several groups that kernels compute.
    """
    image, groups = _argument(node, "input").meta["val"], _groups(node)
    ours = dtype_of(image) in DTYPES and node.target is _FORWARD
    read = ("grad_output", "input") if node.target is _BACKWARD else ("input",)
    times = 2 if groups > 1 and (ours or groups == _shape(node, read[0])[1]) else 1
    elements = sum(math.prod(_shape(node, name)) for name in read)
    return times * (2 * elements if node.target is _BACKWARD else elements + elements_of(node))


def _added(node: torch.fx.Node) -> int:
    """The number of elements of weights and their gradients that are copied instead.

    Weights of one tap have the same layout either way, and kernels read those of some taps as stored.
    """
    weight = _argument(node, "weight").meta["val"]
    shape = _shape(node, "weight")
    size, taps = math.prod(shape), math.prod(shape[2:])
    if taps == 1 or _reads_columns(node):
        return 0
    if node.target is _BACKWARD:
        return size if weight.dtype is torch.float32 and taps <= MAX_TAPS else 2 * size
    as_stored = packs_taps(shape, _groups(node), elements_of(node))
    return 0 if weight.dtype is torch.float32 and as_stored else size


class _ChannelsLast(Relayout):
    """Makes the operands of convolutions channels-last."""

    def __init__(self, graph_module: torch.fx.GraphModule, reads_elements: ReadsElements, use: str) -> None:
        super().__init__(graph_module, reads_elements, _clones(graph_module.graph, use))
        self.use = use

    @property
    def copied(self) -> int:
        """The number of elements in inserted copies, less that in removed copies. `_added` counts those of weights."""
        weights = {self.new[_argument(node, "weight")] for node in self.new if _is_planar(node)}
        added = [clone for (value, _), clone in self.copies.items() if value not in weights]
        more, fewer = (sum(map(elements_of, nodes)) for nodes in (added, self.removed))
        return max(more - fewer, 0)

    def lay_out(self, copy: torch.fx.Node, node: torch.fx.Node) -> bool:
        if _is_planar(node):
            self.relayout_arguments(copy, self._operands(node), torch.channels_last)
            return True
        if node.target is not aten.constant_pad_nd.default or not node.users or not all(map(_is_planar, node.users)):
            return False
        if not all(map(self._reads_planes, node.users)):
            self.relayout_arguments(copy, (0,), torch.channels_last)  # the image before padding, which is smaller
        return True

    def _operands(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The positions of a convolution's arguments that become channels-last."""
        if node.target is _BACKWARD:
            return (0, 1, 2)
        if _reads_columns(node):
            return (0,)
        return (1,) if self._reads_planes(node) else (0, 1)

    def _reads_planes(self, node: torch.fx.Node) -> bool:
        """True for a convolution of few channels, which is as fast if its image is not channels-last.

        The weight alone then determines the layout of the result. In training, backward reads the image too.
        """
        shape, dtype = _shape(node, "weight"), _argument(node, "input").meta["val"].dtype
        few = shape[1] <= MAX_SPREAD_CHANNELS and shape[2:] != (1, 1) and math.prod(shape[1:]) <= MAX_SPREAD_TERMS
        ours = node.target is _FORWARD and dtype is torch.float32 and _groups(node) == 1
        return self.use == "inference" and ours and few


def _reads_columns(node: torch.fx.Node) -> bool:
    """True if output channels are adjacent in the weight: a product reads it fastest as stored."""
    weight = _argument(node, "weight").meta["val"]
    by_columns = weight.permute(2, 3, 1, 0).is_contiguous() and not weight.is_contiguous()
    return by_columns and _groups(node) == 1


def _clones(graph: torch.fx.Graph, use: str) -> set[torch.fx.Node]:
    """Copies that could be replaced by their source.

    Excluded are copies that are returned to the caller, or in training whose source is: they would share memory with
    other tensors; and copies that a call may change, or whose source it may change. Arguments may share memory, and may
    be changed before backward.
    """
    results = returned(graph)
    clones = {*graph.find_nodes(op="call_function", target=aten.clone.default)} - results
    changed = {base_of(each) for node in graph.nodes if may_write(node) for each in node.all_input_nodes}
    if not changed and use == "inference":
        return clones
    sources = {clone: base_of(source_of(clone)) for clone in clones}
    shared = changed | results if use == "training" else changed
    return {clone for clone, base in sources.items() if base.op == "call_function" and shared.isdisjoint((clone, base))}
