"""A huge matrix that a product makes, and all that is computed of its rows: some of the rows at a time.

The logits of a language model are by far its largest tensor, and of them its loss needs a number for each row. Their
gradient is as large, and what remains of that, the gradients of the hidden states and of the weight, has a row for each
or is a sum over rows. So the loss and these gradients are computed of some rows after others.

Backward is linear in the gradient that it is given. Where that is a single number, forward computes what backward would
for 1, and backward multiplies it. (Liger Kernel, Hsu et al. 2024, does that by hand, for cross-entropy.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Node

from pellucid.capture.fx import bytes_of, dependent_on_tangents, is_tangent, reachable
from pellucid.capture.rows import NotInParts, is_linear, operands_along, resized, shape_of, summed
from pellucid.capture.torch_compat import fake_mode_of, is_symbolic, keep, size_hint
from pellucid.capture.transform import is_pure
from pellucid.ir.decision import Decision

aten = torch.ops.aten

_RULE = "transform.chunks"
# Bytes of a matrix that is divided, and of a part at most; into how many parts, if these have so many rows: for fewer,
# reading the weight again and adding up its gradient would take longer than what is computed.
_LEAST, _PART, _COUNT, _ROWS = 1 << 29, 1 << 28, 16, 512
# How many times all that remains of it the matrix must be; how many calls are made of it at most.
_TIMES, _MOST_CALLS = 3, 2000
# What a node's meta says of its place in forward or backward.
_OF_ITS_HALF = ("partitioner_tag", "autograd_backward", "recompute", "seq_nr")
_NARROW = (torch.bfloat16, torch.float16)


def in_chunks(graph_module: torch.fx.GraphModule) -> tuple[tuple[Node, Decision], ...]:
    """Change a joint graph, or one for inference; what was decided about each huge product, with a node of the graph.

    Before: `%l = mm(%h, %w); %y = _log_softmax(%l, 1); ...; %d = sub(...); %g = mm(%d, %wt); %v = mm(t(%d), %h)`.
    After: the same of the first rows of `%h`, then of the next ones; `%g` is their `cat` and `%v` their sum, both
    for a tangent of 1, and then times the tangent.
    """
    found: list[tuple[Node, Decision]] = []
    replaced: set[Node] = set()
    for root in list(graph_module.graph.nodes):
        if root in replaced or root.target not in (aten.mm.default, aten.addmm.default) or bytes_of(root) < _LEAST:
            continue
        facts: tuple[tuple[str, int], ...] = (("bytes", bytes_of(root)),)
        try:
            parts = _Parts(graph_module.graph, _region_of(root))
        except NotInParts as refusal:
            found.append((root, Decision(_RULE, (root.name,), False, f"it stays whole: {refusal}", facts)))
            continue
        facts = (*facts, ("chunks", parts.count))
        made = parts.put_in_place()
        replaced.update(parts.members)
        found.append((made, Decision(_RULE, (root.name,), True, "nothing needs all of its rows at once", facts)))
    if any(decision.ok for _, decision in found):
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return tuple(found)


@dataclass(slots=True)
class _Region:
    """What is computed in parts.

    dims: the calls, and the dimension of each result along which it is. sums: calls that add up over all parts, and of
    each operand the dimension. after: all that depends on the product.
    """

    root: Node
    dims: dict[Node, int] = field(default_factory=dict)
    sums: dict[Node, dict[Node, int | None]] = field(default_factory=dict)
    after: set[Node] = field(default_factory=set)

    def operands(self, node: Node) -> dict[Node, int | None]:
        """What a call of the region reads, and along which dimension in parts."""
        return self.sums[node] if node in self.sums else _operands(node, self.dims[node])

    def members(self) -> list[Node]:
        """The calls in parts and the sums, in the order of the graph."""
        return [node for node in self.root.graph.nodes if node in self.dims or node in self.sums]

    def outside(self) -> set[Node]:
        """What the region reads and does not compute."""
        read = {operand for node in self.members() for operand in self.operands(node)}
        return {node for node in read if node not in self.dims}

    def grow(self, node: Node, dim: int) -> None:
        """Take a call in, and what would be as large as the matrix beside it."""
        pending = [(node, dim)]
        while pending:
            node, dim = pending.pop()
            if node in self.dims:
                _agree(node, self.dims[node], dim)
                continue
            self.dims[node] = dim
            pending += self._needed(_operands(node, dim))
            if node not in self.after:
                continue
            for user in node.users:
                if self.is_large(node) and user.op == "output":
                    raise NotInParts(f"{node.name} is a result, of which all is in memory")
                if self.is_large(node) and user not in self.dims and user not in self.sums:
                    pending += self.join(user)

    def join(self, user: Node) -> list[tuple[Node, int]]:
        """How to take in a call that reads something of the region: what is to grow."""
        terms = summed(user, self.dims)
        if terms is not None:
            self.sums[user] = _once(user, terms)
            return self._needed(self.sums[user])
        given = {operand: dim for operand, dim in self.dims.items() if operand in user.all_input_nodes}
        why = f"{user.name} is not made of parts of rows"
        for dim in range(len(shape_of(user))):
            try:
                operands = _operands(user, dim)
            except NotInParts as refusal:
                why = str(refusal)
                continue
            if all(operands[operand] == each for operand, each in given.items()):
                return [(user, dim)]
        raise NotInParts(why)

    def _needed(self, operands: dict[Node, int | None]) -> list[tuple[Node, int]]:
        """Operands that are to be computed in parts as well."""
        found = [(node, dim) for node, dim in operands.items() if dim is not None and self.dims.get(node) != dim]
        return [
            (node, dim)
            for node, dim in found
            if node in self.dims or (self.is_large(node) and node.op == "call_function")
        ]

    def is_large(self, node: Node) -> bool:
        """Whether a tensor has at least half as many elements as the matrix."""
        return 2 * _numel(node) >= _numel(self.root)


def _region_of(root: Node) -> _Region:
    """What has to be computed in parts with a product, so that none of it is in memory whole."""
    region = _Region(root)
    region.after = reachable([root], lambda node: node.users)
    region.grow(root, 0)
    while True:
        read = {operand for node in region.members() for operand in region.operands(node)}
        before = reachable(read, lambda node: node.all_input_nodes)
        total = next((node for node in region.sums if node in before), None)
        if total is not None:
            raise NotInParts(f"each row needs {total.name}, a sum over all of them")
        made = reachable((node for node in region.dims if region.is_large(node)), lambda node: node.users)
        between = [node for node in made & before if node not in region.dims]
        if not between:
            break
        for node in region.join(min(between)):
            region.grow(*node)
    for node in region.members():
        for operand, dim in region.operands(node).items():
            _agree(operand, region.dims.get(operand, dim), dim)
    return region


class _Parts:
    """Puts the calls of a region, part by part, in its place."""

    def __init__(self, graph: torch.fx.Graph, region: _Region) -> None:
        self.graph, self.region = graph, region
        self.members = region.members()
        self.inside = frozenset(self.members)
        sizes = {_size(node, dim) for node, dim in self._in_parts()}
        self.groups = math.gcd(*sizes)
        self.count = self._count()
        self.varying = dependent_on_tangents(graph)
        self.before = reachable(region.outside(), lambda node: node.all_input_nodes)
        self.tangent = self._tangent()
        self.results = [
            each for each in self.members if each in region.after and not self.inside.issuperset(each.users)
        ]
        self._check()
        self.mode = fake_mode_of(graph)
        self.given: dict[Node, Node] = {}  # what the region reads, for a tangent of 1
        self.sums: dict[Node, Node] = {}  # over the parts so far

    def _in_parts(self) -> Iterator[tuple[Node, int]]:
        for member in self.members:
            yield from ((node, dim) for node, dim in self.region.operands(member).items() if dim is not None)
        yield from self.region.dims.items()

    def _count(self) -> int:
        """How many parts: as many as the rows can be divided into equally, if that is about what is wanted."""
        root = self.region.root
        count = min(max(_COUNT, -(-bytes_of(root) // _PART)), _size(root, 0) // _ROWS, self.groups)
        if count < 2:
            raise NotInParts(f"parts of {_ROWS} rows or more, in {self.groups} groups that stay whole, are too few")
        equal = (each for each in range(count, count // 2, -1) if self.groups % each == 0)
        return next(equal, count)

    def _tangent(self) -> Node | None:
        """The number that backward is given, if the region depends on one."""
        varying = [
            node for node in self.graph.nodes if node in self.varying and (node in self.before or node in self.inside)
        ]
        given = [node for node in varying if is_tangent(node)]
        if not varying:
            return None
        if self.region.root in self.varying:
            raise NotInParts("backward makes it")
        if len(given) > 1 or shape_of(given[0]):
            raise NotInParts("what backward is given is more than one number, and not known in forward")
        for node in varying:
            if node is not given[0] and not is_linear(node, self.varying):
                raise NotInParts(f"{node.name} is no multiple of what backward is given, which forward does not know")
            if node.meta["val"].dtype is torch.float16:
                raise NotInParts(
                    f"{node.name} has the type float16, whose gradients may need the factor that backward is given"
                )
        return given[0]

    def _check(self) -> None:
        """That calls may be moved and made several times, and that it is worth it."""
        moved = [each for each in self.before if each.op == "call_function" and self._is_moved(each)]
        impure = next((each for each in (*self.members, *moved) if not is_pure(each)), None)
        if impure is not None:
            raise NotInParts(f"{impure.name} draws random numbers or changes a tensor, and has to stay in its place")
        if len(self.members) * self.count > _MOST_CALLS:
            raise NotInParts(f"{len(self.members)} calls would be made {self.count} times, which takes long to compile")
        twice = next((each for each in self._made_before() if not self.inside.issuperset(each.users)), None)
        if twice is not None:
            raise NotInParts(f"{twice.name}, which is as large, would be computed twice")
        turned = next((each for each in self.results if not each.meta["val"].is_contiguous()), None)
        if turned is not None:
            raise NotInParts(f"{turned.name} does not lie row after row in memory")
        remains = sum(map(bytes_of, self.results))
        if remains * _TIMES > bytes_of(self.region.root):
            raise NotInParts(f"{remains} bytes are in memory in any case, of what is computed of it")

    def _made_before(self) -> Iterator[Node]:
        """Products beside the first that are made in parts, or large gradients that are made for a tangent of 1."""
        for node in self.members:
            if node not in self.region.after and node.target in (aten.mm.default, aten.addmm.default):
                yield node
        for node in self.before:
            if node in self.varying and self.region.is_large(node):
                yield node

    def _is_moved(self, node: Node) -> bool:
        """Whether what the region reads stands after the product, before which all is computed now."""
        return self.region.root < node

    def put_in_place(self) -> Node:
        """Compute the region part by part; a call of the first."""
        self._hoist()
        pieces: dict[Node, list[Node]] = {node: [] for node in self.results}
        size = -(-self.groups // self.count)
        for start in range(0, self.groups, size):
            made = self._part(start, min(start + size, self.groups))
            for node in self.results:
                pieces[node].append(made[node])
        for node in self.results:
            whole = self._whole(node, pieces[node])
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.inside)
        return pieces[self.results[0]][0]

    def _hoist(self) -> None:
        """Have what the region reads computed before it, and for a tangent of 1."""
        root = self.region.root
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        for node in sorted(self.before, key=order.__getitem__):
            if node is self.tangent:
                value = node.meta["val"]
                options = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
                self.given[node] = self._call(aten.full.default, ([], 1.0), options, like=root)
            elif node in self.varying:
                self.given[node] = self._copy(node, node.args, self.given)
            elif self._is_moved(node):
                root.prepend(node)

    def _part(self, start: int, stop: int) -> dict[Node, Node]:
        """The calls of the region for these groups of rows."""
        made: dict[Node, Node] = {}
        slices: dict[Node, Node] = {}

        def read(node: Node, dim: int | None) -> Node:
            if node in made:
                return made[node]
            whole = self.given.get(node, node)
            if dim is None:
                return whole
            if node not in slices:
                each = _size(node, dim) // self.groups
                args = (whole, dim, start * each, stop * each)
                slices[node] = self._call(aten.slice.Tensor, args, {}, like=node)
            return slices[node]

        for node in self.members:
            operands = {each: read(each, dim) for each, dim in self.region.operands(node).items()}
            if node in self.region.sums:
                made[node] = self.sums[node] = self._added(node, operands)
            else:
                dim = self.region.dims[node]
                args = resized(node, dim, _size(node, dim) // self.groups * (stop - start))
                made[node] = self._copy(node, args, operands)
        return made

    def _added(self, node: Node, operands: dict[Node, Node]) -> Node:
        """A sum over rows with those of this part: in f32, if its type is a narrow one."""
        so_far, wide = self.sums.get(node), {"dtype": torch.float32}
        narrow = node.meta["val"].dtype in _NARROW
        if so_far is not None and node.target is aten.mm.default and not narrow:
            left, right = (operands[cast(Node, each)] for each in node.args)
            return self._call(aten.addmm.default, (so_far, left, right), {}, like=node)
        part = self._copy(node, node.args, operands)
        if narrow:
            part = self._call(aten._to_copy.default, (part,), wide, like=node)
        return part if so_far is None else self._call(aten.add.Tensor, (so_far, part), {}, like=node)

    def _whole(self, node: Node, pieces: list[Node]) -> Node:
        """All of a result: what backward is given times that for 1, if it depends on it."""
        if node in self.region.dims:
            whole = self._call(aten.cat.default, (pieces, self.region.dims[node]), {}, like=node)
        else:
            whole = self._cast(pieces[-1], node)
        if node not in self.varying:
            return whole
        keep(whole)
        scaled = self._call(aten.mul.Tensor, (whole, self.tangent), {}, like=node)
        return self._cast(scaled, node)

    def _cast(self, value: Node, like: Node) -> Node:
        """A value in the type that another has."""
        dtype = like.meta["val"].dtype
        if value.meta["val"].dtype is dtype:
            return value
        return self._call(aten._to_copy.default, (value,), {"dtype": dtype}, like=like)

    def _copy(self, node: Node, args: tuple[Any, ...], operands: dict[Node, Node]) -> Node:
        """The call of a node with other operands."""
        args, kwargs = torch.fx.map_arg((args, node.kwargs), lambda each: operands.get(each, each))
        return self._call(cast(Callable[..., Any], node.target), args, kwargs, like=node)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, like: Node) -> Node:
        """A new call before the product, which comes from the same line as another."""
        with self.graph.inserting_before(self.region.root):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {key: value for key, value in like.meta.items() if key not in _OF_ITS_HALF}
        values = torch.fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self.mode:
            made.meta["val"] = target(*values[0], **values[1])
        return made


def _operands(node: Node, dim: int) -> dict[Node, int | None]:
    return _once(node, operands_along(node, dim))


def _once(node: Node, operands: list[tuple[Node, int | None]]) -> dict[Node, int | None]:
    """What is read along which dimension, for a call that reads nothing in two ways."""
    found: dict[Node, int | None] = {}
    for operand, dim in operands:
        if found.setdefault(operand, dim) != dim:
            raise NotInParts(f"{node.name} reads {operand.name} along two dimensions")
    return found


def _agree(node: Node, known: int | None, wanted: int | None) -> None:
    if known != wanted:
        raise NotInParts(f"parts of {node.name} are needed along two dimensions")


def _size(node: Node, dim: int) -> int:
    size = shape_of(node)[dim]
    if is_symbolic(size):
        raise NotInParts(f"how many rows {node.name} has is not known when it is compiled")
    return size


def _numel(node: Node) -> int:
    return math.prod(map(size_hint, shape_of(node)))
