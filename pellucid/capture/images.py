"""A batch of images: the first layers of a network are computed for some of the images at a time.

These layers make the largest tensors of an image network, from few weights. Of one image they stay in the last cache
until they are read, of a whole batch they do not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Node

from pellucid.capture.fx import bytes_of, call_before, reachable
from pellucid.capture.rows import NotInParts, operands_along, resized, shape_of
from pellucid.capture.torch_compat import fake_mode_of, is_symbolic, tree_leaves, tree_map
from pellucid.capture.transform import is_pure
from pellucid.ir.decision import Decision
from pellucid.machine import Machine

aten = torch.ops.aten

_RULE = "transform.images"
# The largest tensor of a part shall take a third of the last cache at most, and must not take more than two thirds; so
# many parts are made at most, for the sake of compilation.
_SHARE, _MOST_SHARES, _MOST_PARTS = 3, 2, 8
# What a convolution reads and writes for an image must be so many times its weight, which each part reads again.
_TIMES = 4
# Linear layers gained nothing: they compute too much for what they read and write (ConvNeXt).
_PRODUCTS = (aten.mm.default, aten.addmm.default)
# Convolutions of other types are ATen's, as transposed ones and those of volumes: their results would be copied.
_COMPILED = (torch.float32, torch.bfloat16, torch.float16)

_Dims: TypeAlias = "dict[Node, int | None]"


def in_images(
    graph_module: torch.fx.GraphModule, machine: Machine, has_loops: Callable[[Node], bool]
) -> tuple[Decision, ...]:
    """Change a graph for inference; what was decided, if it has convolutions of several images.

    has_loops: whether a call will be a kernel.

    Before: `%c = convolution(%x, ...); %y = relu(%c); ...`, of 4 images.
    After: the same of `slice(%x, 0, 0, 1)` and so on, and the `cat` of each result that the next layers read.
    """
    root = next(filter(_is_convolution, graph_module.graph.nodes), None)
    images = shape_of(root)[0] if root else 1
    if root is None or is_symbolic(images) or images < 2:
        return ()
    try:
        region = _region_of(root, images, machine, has_loops)
        moved = _moved(region)
    except NotInParts as refusal:
        return (Decision(_RULE, (root.name,), False, f"all images are computed together: {refusal}"),)
    for node in moved:
        region.first.prepend(node)
    _Parts(graph_module.graph, region, images).put_in_place()
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    largest = max(map(bytes_of, region.members))
    why = f"the last cache does not hold the {largest} bytes that a layer makes of all images until they are read"
    facts = (("calls", len(region.members)), ("chunks", images // region.each))
    return (Decision(_RULE, (root.name,), True, why, facts),)


@dataclass(frozen=True, slots=True)
class _Region:
    """Calls that are made for `each` images at a time, in the order of the graph, and what they read, see `_dims`."""

    members: dict[Node, _Dims]
    each: int

    @property
    def first(self) -> Node:
        return next(iter(self.members))


def _region_of(root: Node, images: int, machine: Machine, has_loops: Callable[[Node], bool]) -> _Region:
    """From the first convolution on all that makes large tensors of images, up to what the next layer reads."""
    candidates = _of_images(root, images, has_loops)
    if root not in candidates:
        raise NotInParts("the first layer reads a large weight, is ATen's, or does not lie image after image in memory")
    largest = max(map(bytes_of, candidates))
    if largest * _SHARE <= machine.last_cache:
        raise NotInParts("the last cache holds what a layer makes of them")
    each = _images_at_a_time(images, largest, machine)
    least = min(machine.cores * machine.own_cache, largest)
    members = _closed(candidates, {node for node in candidates if bytes_of(node) >= least})
    if sum(map(_is_convolution, members)) < 2:
        raise NotInParts("there are no two layers that make much of small weights")
    return _Region({node: candidates[node] for node in members}, each)


def _images_at_a_time(images: int, largest: int, machine: Machine) -> int:
    """How many make an equal part. largest: bytes of a tensor of all of them."""
    sizes = [each for each in range(1, images) if images % each == 0 and images <= _MOST_PARTS * each]
    bytes_of_part = {each: largest * each // images for each in sizes}
    fitting = [each for each in sizes if bytes_of_part[each] * _SHARE <= machine.last_cache]
    each = max(fitting, default=min(sizes, default=0))
    if not each or bytes_of_part[each] * _SHARE > machine.last_cache * _MOST_SHARES:
        raise NotInParts(
            f"they have no equal parts, {_MOST_PARTS} at most, of which the last cache holds what a layer makes"
        )
    return each


def _of_images(root: Node, images: int, has_loops: Callable[[Node], bool]) -> dict[Node, _Dims]:
    """Calls whose result for an image depends on that image alone, in the order of the graph, and their `_dims`.

    What reads another image, a large weight, random numbers, or something that is made of the images otherwise is none,
    nor what follows.
    """
    found = dict(_before(root, images))
    others: set[Node] = set()  # made of images, and none of these calls
    for node in root.graph.nodes:
        read = node.all_input_nodes
        if node in found or (node is not root and found.keys().isdisjoint(read) and others.isdisjoint(read)):
            continue
        dims = _dims(node, images) if others.isdisjoint(read) else None
        fits = is_pure(node) and node.target not in _PRODUCTS
        if _is_convolution(node):
            fits = _is_compiled(node, has_loops) and not _reads_much(node, images, root)
        if dims is None or not fits or any(dims[each] != 0 for each in read if each in found):
            others.add(node)
        else:
            found[node] = dims
    return {node: found[node] for node in root.graph.nodes if node in found}


def _before(root: Node, images: int) -> Iterator[tuple[Node, _Dims]]:
    """What is done with the images before the first convolution: padding, scaling; with its `_dims`."""
    node = cast(Node, root.args[0])
    while (dims := _dims(node, images)) is not None and len(node.all_input_nodes) == 1:
        yield node, dims
        (node,) = node.all_input_nodes


def _dims(node: Node, images: int) -> _Dims | None:
    """For each operand 0 if an image's result needs that image of it, None if it needs all; None if it is no such call.

    What is made must lie image after image in memory.
    """
    if node.op != "call_function" or not all(
        _lies_by_images(each, images) for each in tree_leaves(node.meta.get("val"))
    ):
        return None
    if node.target is operator.getitem:
        return {cast(Node, node.args[0]): 0}
    try:
        read = operands_along(node, 0)
    except NotInParts:
        return None
    dims = dict(read)
    return dims if all(dims[operand] == dim for operand, dim in read) else None


def _lies_by_images(value: Any, images: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or any(map(is_symbolic, value.shape)):
        return False
    return value.shape[0] == images and value.numel() > 0 and value.stride(0) * images == value.numel()


def _is_convolution(node: Node) -> bool:
    return node.target is aten.convolution.default


def _is_compiled(node: Node, has_loops: Callable[[Node], bool]) -> bool:
    value, transposed = node.meta["val"], node.args[6]
    return has_loops(node) and value.dtype in _COMPILED and value.dim() == 4 and not transposed


def _reads_much(node: Node, images: int, root: Node) -> bool:
    """Whether a convolution's weight is large next to what it reads and writes for an image.

    One of a single pixel, which weighs channels, stands between calls on many; the first layer stands for these.
    """
    data, weight = cast(Node, node.args[0]), cast(Node, node.args[1])
    moved = bytes_of(root) if math.prod(shape_of(node)[2:]) == 1 else bytes_of(data) + bytes_of(node)
    return bytes_of(weight) * _TIMES * images > moved


def _closed(candidates: Collection[Node], large: set[Node]) -> list[Node]:
    """What large tensors are made of, a convolution that makes less of one, and what is made of each element then."""
    chosen: set[Node] = set()
    for node in reversed(list(candidates)):
        if node in large or not chosen.isdisjoint(node.users):
            chosen.add(node)
    for node in candidates:
        read = {each for each in node.all_input_nodes if each in candidates}
        if read <= chosen and (not _is_convolution(node) or not large.isdisjoint(read)):
            chosen.add(node)
    return [node for node in candidates if node in chosen]


def _moved(region: _Region) -> list[Node]:
    """What the region reads and is computed after its beginning, where all of it will be computed; in order."""
    read = {each for dims in region.members.values() for each in dims if each not in region.members}
    needed = reachable(read, lambda node: node.all_input_nodes)
    moved = [node for node in region.first.graph.nodes if node in needed and region.first < node]
    fixed = next((node for node in moved if not is_pure(node)), None)
    if fixed is not None:
        raise NotInParts(f"{fixed.name} draws random numbers or has an effect, and has to stay in its place")
    return moved


class _Parts:
    """Puts the calls of a region, for some images after others, in its place."""

    def __init__(self, graph: torch.fx.Graph, region: _Region, images: int) -> None:
        self.region, self.images = region, images
        self.mode = fake_mode_of(graph)

    def put_in_place(self) -> None:
        inside = self.region.members.keys()
        results = [node for node in inside if not inside >= node.users.keys()]
        parts = [self._part(start) for start in range(0, self.images, self.region.each)]
        for node in results:
            pieces = [part[node] for part in parts]
            whole = self._call(aten.cat.default, (pieces, 0), {}, like=node, value=node.meta["val"])
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in inside)

    def _part(self, start: int) -> dict[Node, Node]:
        """The calls for the images from `start` on."""
        made: dict[Node, Node] = {}
        for node, dims in self.region.members.items():
            operands = {
                each: made[each] if each in made else self._slice(each, start) for each, dim in dims.items() if dim == 0
            }
            args, kwargs = torch.fx.map_arg(
                (resized(node, 0, self.region.each), node.kwargs), lambda old, new=operands: new.get(old, old)
            )
            target = cast(Callable[..., Any], node.target)
            made[node] = self._call(target, args, kwargs, like=node, value=self._value(node))
        return made

    def _slice(self, node: Node, start: int) -> Node:
        """The images from `start` on of what the region reads."""
        stop = start + self.region.each
        with self.mode:
            value = node.meta["val"][start:stop]
        return self._call(aten.slice.Tensor, (node, 0, start, stop), {}, like=node, value=value)

    def _value(self, node: Node) -> Any:
        """What a call makes for a part: it lies in memory as that of all images does."""

        def of_part(whole: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided((self.region.each, *whole.shape[1:]), whole.stride(), dtype=whole.dtype)

        with self.mode:
            return tree_map(of_part, node.meta["val"])

    def _call(self, target: Callable[..., Any], args: Any, kwargs: Any, *, like: Node, value: Any) -> Node:
        return call_before(self.region.first, target, args, kwargs, like=like, value=value)
