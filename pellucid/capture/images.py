"""A batch of images: the first layers of a network are computed for some of the images at a time.

These layers make the largest tensors of an image network, from few weights. Of one image they stay in the last cache
until they are read, of a whole batch they do not.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from pellucid.capture.fx import bytes_of, reachable
from pellucid.capture.rows import NotInParts, operands_along, resized, shape_of
from pellucid.capture.torch_compat import fake_mode_of, is_symbolic
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
        region.members[0].prepend(node)
    _Parts(graph_module.graph, region, images).put_in_place()
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    why = (
        f"the last cache does not hold the {region.largest} bytes that a layer makes of all images until they are read"
    )
    facts = (("calls", len(region.members)), ("chunks", images // region.each))
    return (Decision(_RULE, (root.name,), True, why, facts),)


@dataclass(frozen=True, slots=True)
class _Region:
    """Calls that are made for `each` images at a time, in the order of the graph. largest: bytes of a tensor of all."""

    members: tuple[Node, ...]
    each: int
    largest: int


def _region_of(root: Node, images: int, machine: Machine, has_loops: Callable[[Node], bool]) -> _Region:
    """From the first convolution on all that makes large tensors of images, up to what the next layer reads."""
    candidates = _of_images(root, images, has_loops)
    if root not in candidates:
        raise NotInParts("the first layer reads a large weight, is ATen's, or does not lie image after image in memory")
    largest = max(map(bytes_of, candidates))
    if largest * _SHARE <= machine.last_cache:
        raise NotInParts("the last cache holds what a layer makes of them")
    sizes = [each for each in range(1, images) if images % each == 0 and images <= _MOST_PARTS * each]
    bytes_of_part = {each: largest * each // images for each in sizes}
    fitting = [each for each in sizes if bytes_of_part[each] * _SHARE <= machine.last_cache]
    each = max(fitting, default=min(sizes, default=0))
    if not each or bytes_of_part[each] * _SHARE > machine.last_cache * _MOST_SHARES:
        raise NotInParts(
            f"they have no equal parts, {_MOST_PARTS} at most, of which the last cache holds what a layer makes"
        )
    least = min(machine.cores * machine.own_cache, largest)
    members = _closed(candidates, {node for node in candidates if bytes_of(node) >= least})
    if sum(map(_is_convolution, members)) < 2:
        raise NotInParts("there are no two layers that make much of small weights")
    return _Region(members, each, largest)


def _of_images(root: Node, images: int, has_loops: Callable[[Node], bool]) -> list[Node]:
    """Calls whose result for an image depends on that image alone, in the order of the graph.

    What reads another image, a large weight, random numbers, or something that is made of the images otherwise is none,
    nor what follows.
    """
    found = dict.fromkeys(_before(root, images))
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
            found[node] = None
    return [node for node in root.graph.nodes if node in found]


def _before(root: Node, images: int) -> Iterator[Node]:
    """What is done with the images before the first convolution: padding, scaling."""
    node = cast(Node, root.args[0])
    while _dims(node, images) is not None and len(node.all_input_nodes) == 1:
        yield node
        (node,) = node.all_input_nodes


def _dims(node: Node, images: int) -> dict[Node, int | None] | None:
    """For each operand 0 if an image's result needs that image of it, None if it needs all; None if it is no such call.

    What is made must lie image after image in memory.
    """
    if node.op != "call_function" or not all(_lies_by_images(each, images) for each in _values(node)):
        return None
    if node.target is operator.getitem:
        return {cast(Node, node.args[0]): 0}
    try:
        read = operands_along(node, 0)
    except NotInParts:
        return None
    dims = dict(read)
    return dims if all(dims[operand] == dim for operand, dim in read) else None


def _values(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, list | tuple) else (value,)


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


def _closed(candidates: list[Node], large: set[Node]) -> tuple[Node, ...]:
    """What large tensors are made of, a convolution that makes less of one, and what is made of each element then."""
    known = frozenset(candidates)
    chosen: set[Node] = set()
    for node in reversed(candidates):
        if node in large or not chosen.isdisjoint(node.users):
            chosen.add(node)
    for node in candidates:
        read = known.intersection(node.all_input_nodes)
        if read <= chosen and (not _is_convolution(node) or not large.isdisjoint(read)):
            chosen.add(node)
    return tuple(node for node in candidates if node in chosen)


def _moved(region: _Region) -> list[Node]:
    """What the region reads and is computed after its beginning, where all of it will be computed; in order."""
    first, inside = region.members[0], frozenset(region.members)
    read = {each for node in region.members for each in node.all_input_nodes if each not in inside}
    needed = reachable(read, lambda node: node.all_input_nodes)
    moved = [node for node in first.graph.nodes if node in needed and first < node]
    fixed = next((node for node in moved if not is_pure(node)), None)
    if fixed is not None:
        raise NotInParts(f"{fixed.name} draws random numbers or has an effect, and has to stay in its place")
    return moved


class _Parts:
    """Puts the calls of a region, for some images after others, in its place."""

    def __init__(self, graph: torch.fx.Graph, region: _Region, images: int) -> None:
        self.graph, self.region, self.images = graph, region, images
        self.inside = frozenset(region.members)
        self.mode = fake_mode_of(graph)

    def put_in_place(self) -> None:
        results = [node for node in self.region.members if not self.inside.issuperset(node.users)]
        parts = [self._part(start) for start in range(0, self.images, self.region.each)]
        for node in results:
            whole = self._call(aten.cat.default, ([part[node] for part in parts], 0), {}, node, node.meta["val"])
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.inside)

    def _part(self, start: int) -> dict[Node, Node]:
        """The calls for the images from `start` on."""
        each, stop = self.region.each, start + self.region.each
        made: dict[Node, Node] = {}
        for node in self.region.members:
            operands = dict[Node, Node]()
            for operand, dim in (_dims(node, self.images) or {}).items():
                if operand in self.inside:
                    operands[operand] = made[operand]
                elif dim == 0:
                    value = operand.meta["val"]
                    with self.mode:
                        part = value[start:stop]
                    operands[operand] = self._call(aten.slice.Tensor, (operand, 0, start, stop), {}, operand, part)
            args, kwargs = torch.fx.map_arg(
                (resized(node, 0, each), node.kwargs), lambda old, new=operands: new.get(old, old)
            )
            made[node] = self._call(cast(Callable[..., Any], node.target), args, kwargs, node, self._value(node))
        return made

    def _value(self, node: Node) -> Any:
        """What a call makes for a part: it lies in memory as that of all images does."""
        with self.mode:
            values = [
                torch.empty_strided((self.region.each, *each.shape[1:]), each.stride(), dtype=each.dtype)
                for each in _values(node)
            ]
        return tuple(values) if isinstance(node.meta["val"], list | tuple) else values[0]

    def _call(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], like: Node, value: Any
    ) -> Node:
        """A new call before the region, from the same line as another one; `value` is what it makes."""
        with self.graph.inserting_before(self.region.members[0]):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**like.meta, "val": value}
        return made
