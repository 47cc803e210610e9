"""Where convolutions gain from it, activations lie channels-last from the first convolution on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.convolution_trial import convolution_seconds
from pellucid.capture.fx import RESHAPES, decide
from pellucid.capture.torch_compat import (
    check_view,
    elementwise_strides,
    fake_mode_of,
    graph_module_of,
    is_symbolic,
    quiet_fake_tensors,
)
from pellucid.capture.transform import aliases, may_write, returned
from pellucid.ir.contraction import MOST_SPREAD_CHANNELS, MOST_SPREAD_TERMS, MOST_TAPS
from pellucid.ir.decision import Decision

aten = torch.ops.aten
ReadsElements: TypeAlias = "Callable[[torch.fx.Node], bool]"
"""Whether a call goes by the elements of its arguments alone, in loops that follow their strides."""

_RULE = "transform.channels-last"
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# How much more must be spared than caused, for inference and for training, each for types of four bytes and more and
# for shorter ones. ResNet-18, ResNet-50 and VGG-11 at several sizes of image and batch neither gain nor lose there, if
# their weights are copied. In f32 training, kernels gain 1.3, since gradients are computed where they lie.
_WORTH = {"inference": (1.0, 0.15), "training": (1.0, 0.6)}
# How much longer grouped convolutions may take channels-last, and the multiplications from which they are tried: fewer
# take microseconds, which neither matter nor can be told from noise.
_GROUPED_SLOWER = 1.2
_GROUPED_WORK = 1_000_000
# Calls of ATen with a kernel for every layout, and worth it: others are given their arguments as they were captured,
# since those that only PyTorch itself calls trust their callers to have made them contiguous.
_ANY_LAYOUT = frozenset(
    "convolution convolution_backward mm addmm bmm baddbmm upsample_nearest2d upsample_nearest2d_backward"
    " upsample_bilinear2d upsample_bilinear2d_backward".split()
)
# Calls whose meaning depends on how their argument lies in memory.
_BY_STRIDES = (aten.as_strided.default, aten.as_strided_.default, aten.set_.source_Tensor, aten.resize_.default)


class _Refused(Exception):
    """The graph cannot be laid out anew; the text says why."""


def channels_last(
    graph_module: torch.fx.GraphModule, reads_elements: ReadsElements, use: str = "inference"
) -> tuple[torch.fx.GraphModule, tuple[Decision, ...]]:
    """The graph with the inputs of its convolutions channels-last, or as it is, with the reason.

    reads_elements: for the calls whose arguments may lie otherwise than captured. use: `inference` or `training`.

    Strides are not written into FX graphs, they follow from the inputs': so one copy before the first convolution lays
    out all that comes after it, and results get eager's strides back at the end.

    oneDNN works on channels-last activations where they lie, others it copies into a layout of its own and back. In
    return we copy weights, their gradients, inputs and results: what is spared must be a multiple. Weights could be
    left to ATen, which copies them at every call, but element by element.

    Before: `convolution(%x, %w, ...)`. After: `clone(%x, memory_format=channels_last)`, and the convolution of that.
    """
    nodes = [node for node in graph_module.graph.nodes if _is_planar(node)]
    if not nodes:
        return graph_module, ()
    try:
        _check_graph(graph_module.graph)
        spared, caused = sum(map(_spared, nodes)), sum(map(_caused, nodes))
        worth = _worth(use, nodes[0].args[0].meta["val"].itemsize)  # type: ignore[union-attr]
        _weigh(spared, caused, worth)
        relayout = _Relayout(graph_module, reads_elements, use)
        result = relayout.run()
        why = _weigh(spared, caused + relayout.copied, worth)
        _try_grouped(nodes)
        return result, (Decision(_RULE, ("convolutions",), True, why),)
    except _Refused as refusal:
        return graph_module, (Decision(_RULE, ("convolutions",), False, str(refusal)),)


def _worth(use: str, itemsize: int) -> float:
    """How much more must be spared than caused, for elements of so many bytes."""
    return _WORTH[use][itemsize < 4]


def _weigh(spared: int, caused: int, worth: float) -> str:
    """Why it pays; raises `_Refused` if it does not."""
    why = f"spares oneDNN {spared:,} copied elements of activations, costs {caused:,} of weights and at the ends"
    if spared <= worth * caused:
        raise _Refused(why)
    return why


def _try_grouped(nodes: Sequence[torch.fx.Node]) -> None:
    """Refuse if the convolutions of several groups, but for depthwise ones, are slower channels-last on this machine.

    oneDNN's kernels for those gain by it on some processors and lose on others; nothing that we can see tells which.
    Ours, for f32, run channels-last alone.
    """
    tried = [convolution_seconds(*_configuration(node)) for node in nodes if _is_grouped(node)]
    planar, last = (sum(seconds) for seconds in zip(*tried, strict=True)) if tried else (0.0, 0.0)
    if last > _GROUPED_SLOWER * planar:
        raise _Refused(f"grouped convolutions take {last / planar:.2f} times as long channels-last on this machine")


def _is_grouped(node: torch.fx.Node) -> bool:
    """True for a convolution of several groups, not depthwise, that oneDNN computes and that is worth a trial."""
    if _argument(node, "input").meta["val"].dtype is torch.float32:
        return False
    if node.target is not _FORWARD or not 1 < _argument(node, "groups") < _shape(node, 0)[1]:
        return False
    return math.prod(node.meta["val"].shape) * math.prod(_shape(node, 1)[1:]) >= _GROUPED_WORK


def _configuration(node: torch.fx.Node) -> tuple[Any, ...]:
    """The arguments of `convolution_seconds` for a call."""
    sizes = (_argument(node, name).meta["val"].shape for name in ("input", "weight"))
    steps = (_argument(node, name) for name in ("stride", "padding", "dilation"))
    dtype = _argument(node, "input").meta["val"].dtype
    return (*map(tuple, sizes), *map(tuple, steps), _argument(node, "groups"), dtype)


def lay_out_joint(graph_module: torch.fx.GraphModule, reads_elements: ReadsElements) -> torch.fx.GraphModule:
    """The same for forward and backward as one graph: so both halves agree on how what is saved between them lies.

    The decision stays with the first convolution.
    """
    result, decisions = channels_last(graph_module, reads_elements, "training")
    if decisions:
        decide(next(filter(_is_planar, result.graph.nodes)), *decisions)
    return result


def _is_planar(node: torch.fx.Node) -> bool:
    """True for a convolution over two dimensions, or its backward, that is not transposed."""
    return node.target in (_FORWARD, _BACKWARD) and len(_shape(node, 0)) == 4 and not _argument(node, "transposed")


def _argument(node: torch.fx.Node, name: str) -> Any:
    """The value of an argument of a convolution, all of which stand in the call by position."""
    position = [each.name for each in node.target._schema.arguments].index(name)  # type: ignore[union-attr]
    return node.args[position]


def _shape(node: torch.fx.Node, position: int) -> tuple[int, ...]:
    """The sizes of an argument."""
    argument = node.args[position]
    assert isinstance(argument, torch.fx.Node)
    return tuple(argument.meta["val"].shape)


def _spared(node: torch.fx.Node) -> int:
    """Elements of activations that oneDNN need not copy.

    The backward reads its two for each of two gradients. A depthwise convolution gains as much again: without
    channels that lie side by side it takes twice the time. So does any of several groups that kernels compute.
    """
    image, groups = _argument(node, "input").meta["val"], _argument(node, "groups")
    ours = image.dtype is torch.float32 and node.target is _FORWARD
    times = 2 if groups > 1 and (ours or groups == image.shape[1]) else 1
    if node.target is _BACKWARD:
        return times * 2 * sum(math.prod(_shape(node, position)) for position in (0, 1))
    return times * (math.prod(_shape(node, 0)) + math.prod(node.meta["val"].shape))


def _caused(node: torch.fx.Node) -> int:
    """Elements of weights and their gradients that are copied instead.

    Those of one tap lie the same either way, and kernels read those of some taps as they lie.
    """
    weight = _argument(node, "weight").meta["val"]
    size, taps = math.prod(weight.shape), math.prod(weight.shape[2:])
    if taps == 1:
        return 0
    read = 0 if weight.dtype is torch.float32 and taps <= MOST_TAPS else size
    return read + size if node.target is _BACKWARD else read


def _check_graph(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _BY_STRIDES:
            raise _Refused(f"{node.name} depends on how its argument lies in memory")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise _Refused(f"{node.name} calls a graph of its own")
        if any(map(_is_dynamic, pytree.tree_leaves(node.meta.get("val")))):
            raise _Refused("the sizes are symbolic")


def _is_dynamic(value: Any) -> bool:
    return any(map(is_symbolic, value.shape if isinstance(value, torch.Tensor) else [value]))


def _plainest(value: Any) -> Any:
    """A gradient without odd strides where a dimension has one element: fake tensors of one-tap weights come so."""
    return value.flatten().view(value.shape) if isinstance(value, torch.Tensor) and value.is_contiguous() else value


class _Relayout:
    """Copies a graph, computing anew the fake tensors of all nodes."""

    def __init__(self, graph_module: torch.fx.GraphModule, reads_elements: ReadsElements, use: str) -> None:
        self._module = graph_module
        self._reads_elements = reads_elements
        self._use = use
        self._graph = torch.fx.Graph()
        self._new: dict[torch.fx.Node, torch.fx.Node] = {}
        self._clones: dict[tuple[torch.fx.Node, torch.memory_format], torch.fx.Node] = {}
        self._fake_mode = fake_mode_of(graph_module.graph)
        self._own_clones = _clones(graph_module.graph, use)
        self._needless = set(filter(_lies_anew, self._own_clones))

    @property
    def copied(self) -> int:
        """Elements of the copies that were put in, less those left out. `_caused` counts those of weights."""
        weights = {self._new[_argument(node, "weight")] for node in self._new if _is_planar(node)}
        added = [clone for (value, _), clone in self._clones.items() if value not in weights]
        more, fewer = (sum(node.meta["val"].numel() for node in nodes) for nodes in (added, self._needless))
        return max(more - fewer, 0)

    def run(self) -> torch.fx.GraphModule:
        for node in self._module.graph.nodes:
            if node in self._needless or self._lies_so_already(node):
                self._new[node] = self._new[_source(node)]  # `_as_captured` copies it for who needs these strides
            elif node.op == "call_function":
                self._new[node] = self._call(node)
            elif node.op == "output":
                restored = pytree.tree_map_only(torch.fx.Node, self._as_captured, node.args[0])
                self._graph.output(restored).meta.update(node.meta)
            else:
                self._new[node] = self._graph.node_copy(node)
        return graph_module_of(self._module, self._graph)

    def _lies_so_already(self, node: torch.fx.Node) -> bool:
        """True for a copy of what lies by now as the copy would."""
        return node in self._own_clones and _strides(self._new[_source(node)]) == _strides(node)

    def _call(self, node: torch.fx.Node) -> torch.fx.Node:
        if self._takes_any_layout(node):
            copy = self._graph.node_copy(node, self._new.__getitem__)
            if _is_planar(node):
                self._lay_out(copy, self._operands(node))
            elif node.target is aten.constant_pad_nd.default and node.users and all(map(_is_planar, node.users)):
                if not all(map(self._reads_planes, node.users)):
                    self._lay_out(copy, (0,))  # the smaller image is copied, and convolutions may read it as it is
            elif all(_place(self._new[each]) == _place(each) for each in node.all_input_nodes):
                return copy  # its fake result is what it was
            if self._evaluated(copy):
                return copy
            self._graph.erase_node(copy)
        copy = self._graph.node_copy(node, self._as_captured)
        if not self._evaluated(copy):
            raise _Refused(f"{node.name} does not take its arguments again")
        return copy

    def _evaluated(self, node: torch.fx.Node) -> bool:
        """Compute the fake result of a call; False if it does not take such arguments: a view has not all strides."""
        try:
            with quiet_fake_tensors():
                node.meta["val"] = self._evaluate(node)
        except (RuntimeError, ValueError):  # of a fake tensor, ValueError of a view's decomposition
            return False
        return True

    def _takes_any_layout(self, node: torch.fx.Node) -> bool:
        """True if a call does the same with the same values in another order in memory, see `_ANY_LAYOUT`.

        Random numbers are drawn in that order.
        """
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return True  # it picks a result, or computes a size
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
        known = target.namespace == "aten" and target._opname in _ANY_LAYOUT
        return known or torch.Tag.pointwise in target.tags or self._reads_elements(node)

    def _operands(self, node: torch.fx.Node) -> tuple[int, ...]:
        """The arguments of a convolution that are to lie channels-last."""
        if node.target is _BACKWARD:
            return (0, 1, 2)
        return (1,) if self._reads_planes(node) else (0, 1)

    def _reads_planes(self, node: torch.fx.Node) -> bool:
        """True for a convolution that reads its image as well where it is not channels-last: one of few channels.

        The weight alone then says how the result lies. In training, backward reads the image too.
        """
        shape, dtype = _shape(node, 1), _argument(node, "input").meta["val"].dtype
        few = shape[1] <= MOST_SPREAD_CHANNELS and shape[2:] != (1, 1) and math.prod(shape[1:]) <= MOST_SPREAD_TERMS
        ours = node.target is _FORWARD and dtype is torch.float32 and _argument(node, "groups") == 1
        return self._use == "inference" and ours and few

    def _lay_out(self, call: torch.fx.Node, positions: tuple[int, ...]) -> None:
        """Have these arguments of a call lie channels-last in memory."""
        with self._graph.inserting_before(call):
            args = list(call.args)
            for position in positions:
                args[position] = self._laid_out(args[position], call, torch.channels_last)
            call.args = tuple(args)

    def _laid_out(self, value: Any, user: torch.fx.Node, layout: torch.memory_format) -> torch.fx.Node:
        """`value` in memory as `layout` says, made by a copy on behalf of `user` unless it lies so already."""
        if value.meta["val"].is_contiguous(memory_format=layout):
            return value
        if (value, layout) not in self._clones:
            clone = self._graph.call_function(aten.clone.default, (value,), {"memory_format": layout})
            clone.meta.update(user.meta)
            clone.meta["val"] = self._evaluate(clone)
            self._clones[value, layout] = clone
        return self._clones[value, layout]

    def _evaluate(self, node: torch.fx.Node) -> Any:
        whole = _whole_operands(node)
        if whole:  # asking the operator takes five times as long
            shape, dtype = whole[0].shape, node.meta["val"].dtype
            with self._fake_mode:
                return whole[0].new_empty_strided(shape, elementwise_strides(*whole), dtype=dtype)
        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
        if node.target in RESHAPES:
            check_view(*args)
        with self._fake_mode, torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            return tuple(map(_plainest, result)) if node.target is _BACKWARD else result

    def _as_captured(self, node: torch.fx.Node) -> torch.fx.Node:
        """The new counterpart of a result, with the strides that eager gives it; of a view, the base is copied."""
        new, expected = self._new[node], node.meta.get("val")
        if _strides(new) == _strides(node):
            return new
        if isinstance(expected, torch.Tensor) and expected.is_contiguous():
            return self._laid_out(new, node, torch.contiguous_format)
        if aliases(node) and isinstance(node.args[0], torch.fx.Node):
            base = self._as_captured(node.args[0])
            view = self._graph.node_copy(node, lambda each: base if each is node.args[0] else self._new[each])
            view.meta["val"] = self._evaluate(view)
            if _strides(view) == _strides(node):
                return view
        raise _Refused(f"the result {node.name} must have the strides {_strides(node)}")


def _whole_operands(node: torch.fx.Node) -> list[torch.Tensor]:
    """The arguments that have the shape of the result, of a call that goes element by element; else none."""
    result, target = node.meta["val"], node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags or node.kwargs:
        return []
    if not isinstance(result, torch.Tensor) or target._schema.is_mutable or aliases(node):
        return []
    tensors = (each.meta["val"] for each in node.all_input_nodes)
    return [each for each in tensors if isinstance(each, torch.Tensor) and each.shape == result.shape]


def _clones(graph: torch.fx.Graph, use: str) -> set[torch.fx.Node]:
    """Copies in whose place their source could stand.

    Not those that the caller may receive, or in training whose source it may, which would share memory with other
    tensors; nor those that a call may change, or whose source it may. Arguments may share memory, and be changed before
    backward.
    """
    kept = returned(graph)
    clones = {*graph.find_nodes(op="call_function", target=aten.clone.default)} - kept
    changed = {_base(each) for node in graph.nodes if may_write(node) for each in node.all_input_nodes}
    if not changed and use == "inference":
        return clones
    sources = {clone: _base(_source(clone)) for clone in clones}
    shared = changed | kept if use == "training" else changed
    return {clone for clone, base in sources.items() if base.op == "call_function" and shared.isdisjoint((clone, base))}


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a view, or a view of one, is part of."""
    source = node.args[0] if aliases(node) else None
    return _base(source) if isinstance(source, torch.fx.Node) else node


def _lies_anew(clone: torch.fx.Node) -> bool:
    """True for a contiguous copy of what lies otherwise: who needs its strides gets a copy, see `_as_captured`."""
    return clone.meta["val"].is_contiguous() and not _source(clone).meta["val"].is_contiguous()


def _source(clone: torch.fx.Node) -> torch.fx.Node:
    (source,) = clone.all_input_nodes
    return source


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensor, or each of the tensors, that a call returns."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _strides(node: torch.fx.Node) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in _tensors(node)]


def _place(node: torch.fx.Node) -> list[tuple[tuple[int, ...], int | torch.SymInt]]:
    """Strides, and at which element of its memory it begins: that of a copy's source is another than the copy's."""
    return [(tensor.stride(), tensor.storage_offset()) for tensor in _tensors(node)]
