"""Computes a huge matrix product, and what depends on its rows, in chunks of rows, so that it is never whole in memory.

The logits of a language model are by far its largest tensor, and its loss needs only one number per row of them. Their
gradient is as large, and only the gradients of the hidden states (computed row by row) and of the weight (a sum over
rows) remain of it. So the loss and these gradients are computed chunk by chunk.

Backward is linear in its tangent. Where the tangent is a single number, forward computes what backward would for a
tangent of 1, and backward multiplies that by it. (Liger Kernel, Hsu et al. 2024, does so by hand, for cross-entropy.)
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
from pellucid.capture.torch_compat import fake_mode_of, is_symbolic, must_save, size_hint
from pellucid.capture.transform import is_pure
from pellucid.ir.decision import Decision

aten = torch.ops.aten

_RULE = "transform.chunks"
# Minimum bytes of a matrix that is split, and maximum bytes of a part; the number of parts, and the minimum number of
# their rows: with fewer, reading the weight again and accumulating its gradient would take longer than the computation.
_MIN_BYTES, _PART_BYTES, _COUNT, _MIN_ROWS = 1 << 29, 1 << 28, 16, 512
# Minimum ratio of the matrix to the results that stay in memory; maximum number of calls created for it.
_MIN_RATIO, _MAX_CALLS = 3, 2000
# Keys of a node's meta that depend on whether it is in forward or in backward.
_OF_ITS_HALF = ("partitioner_tag", "autograd_backward", "recompute", "seq_nr")
_NARROW = (torch.bfloat16, torch.float16)


def in_chunks(graph_module: torch.fx.GraphModule) -> tuple[tuple[Node, Decision], ...]:
    """Change a joint or inference graph; return the decision about each huge product, with a node of the graph.

    Before: `%l = mm(%h, %w); %y = _log_softmax(%l, 1); ...; %d = sub(...); %g = mm(%d, %wt); %v = mm(t(%d), %h)`.
    After: these calls on the first rows of `%h`, then on the next ones; `%g` is their `cat` and `%v` their sum, both
    for a tangent of 1, and then times the tangent.
    """
    found: list[tuple[Node, Decision]] = []
    replaced: set[Node] = set()
    for root in list(graph_module.graph.nodes):
        if root in replaced or root.target not in (aten.mm.default, aten.addmm.default) or bytes_of(root) < _MIN_BYTES:
            continue
        facts: tuple[tuple[str, int], ...] = (("bytes", bytes_of(root)),)
        try:
            parts = _Parts(graph_module.graph, _region_of(root))
        except NotInParts as refusal:
            found.append((root, Decision(_RULE, (root.name,), False, f"it stays whole: {refusal}", facts)))
            continue
        facts = (*facts, ("chunks", parts.count))
        made = parts.replace()
        replaced.update(parts.members)
        found.append((made, Decision(_RULE, (root.name,), True, "nothing needs all of its rows at once", facts)))
    if any(decision.ok for _, decision in found):
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return tuple(found)


@dataclass(slots=True)
class _Region:
    """The calls that are computed in parts.

    dims: these calls, and the dimension of each result that is split. sums: calls that sum over all parts, with the
    split dimension of each operand. after: all nodes that depend on the product.
    """

    root: Node
    dims: dict[Node, int] = field(default_factory=dict)
    sums: dict[Node, dict[Node, int | None]] = field(default_factory=dict)
    after: set[Node] = field(default_factory=set)

    def operands(self, node: Node) -> dict[Node, int | None]:
        """The operands of a call of the region, and the dimension along which each is split, None for whole ones."""
        return self.sums[node] if node in self.sums else _operands(node, self.dims[node])

    def members(self) -> list[Node]:
        """The calls in parts and the sums, in the order of the graph."""
        return [node for node in self.root.graph.nodes if node in self.dims or node in self.sums]

    def outside(self) -> set[Node]:
        """The nodes that the region reads and does not compute."""
        read = {operand for node in self.members() for operand in self.operands(node)}
        return {node for node in read if node not in self.dims}

    def grow(self, node: Node, dim: int) -> None:
        """Add a call, and the neighbouring calls whose results would be about as large as the matrix."""
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
                    raise NotInParts(f"{node.name} is a result, all of which is in memory")
                if self.is_large(node) and user not in self.dims and user not in self.sums:
                    pending += self.join(user)

    def join(self, user: Node) -> list[tuple[Node, int]]:
        """Find how to add a call that reads a value of the region; return the calls to `grow` by."""
        terms = summed(user, self.dims)
        if terms is not None:
            self.sums[user] = _once(user, terms)
            return self._needed(self.sums[user])
        split = {operand: dim for operand, dim in self.dims.items() if operand in user.all_input_nodes}
        why = f"{user.name} is not computed from parts of rows"
        for dim in range(len(shape_of(user))):
            try:
                operands = _operands(user, dim)
            except NotInParts as refusal:
                why = str(refusal)
                continue
            if all(operands[operand] == each for operand, each in split.items()):
                return [(user, dim)]
        raise NotInParts(why)

    def _needed(self, operands: dict[Node, int | None]) -> list[tuple[Node, int]]:
        """The operands that have to be computed in parts as well."""
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
    """The calls that have to be computed in parts with a product, so that its result is never whole in memory."""
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
    """Replaces the calls of a region by calls on parts."""

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
        self.hoisted: dict[Node, Node] = {}  # the operands of the region, for a tangent of 1
        self.sums: dict[Node, Node] = {}  # over the parts so far

    def _in_parts(self) -> Iterator[tuple[Node, int]]:
        for member in self.members:
            yield from ((node, dim) for node, dim in self.region.operands(member).items() if dim is not None)
        yield from self.region.dims.items()

    def _count(self) -> int:
        """The number of parts: one that divides the rows equally, if there is one near the wanted number."""
        root = self.region.root
        count = min(max(_COUNT, -(-bytes_of(root) // _PART_BYTES)), _size(root, 0) // _MIN_ROWS, self.groups)
        if count < 2:
            raise NotInParts(f"parts of {_MIN_ROWS} rows or more, in {self.groups} indivisible groups, are too few")
        equal = (each for each in range(count, count // 2, -1) if self.groups % each == 0)
        return next(equal, count)

    def _tangent(self) -> Node | None:
        """The tangent, a single number, if the region depends on one."""
        varying = [
            node for node in self.graph.nodes if node in self.varying and (node in self.before or node in self.inside)
        ]
        tangents = [node for node in varying if is_tangent(node)]
        if not varying:
            return None
        if self.region.root in self.varying:
            raise NotInParts("it depends on what backward is given")
        if len(tangents) > 1 or shape_of(tangents[0]):
            raise NotInParts("backward is given more than one number, which forward does not know")
        for node in varying:
            if node is not tangents[0] and not is_linear(node, self.varying):
                raise NotInParts(f"{node.name} is not proportional to what backward is given, unknown in forward")
            if node.meta["val"].dtype is torch.float16:
                raise NotInParts(
                    f"{node.name} has the type float16, whose gradients may need the factor that backward is given"
                )
        return tangents[0]

    def _check(self) -> None:
        """Check that calls may be moved and repeated, and that it is worth it."""
        moved = [each for each in self.before if each.op == "call_function" and self._is_moved(each)]
        impure = next((each for each in (*self.members, *moved) if not is_pure(each)), None)
        if impure is not None:
            raise NotInParts(f"{impure.name} draws random numbers or changes a tensor, and cannot be moved")
        if len(self.members) * self.count > _MAX_CALLS:
            raise NotInParts(f"{len(self.members)} calls would be repeated {self.count} times, too many to compile")
        twice = next((each for each in self._made_before() if not self.inside.issuperset(each.users)), None)
        if twice is not None:
            raise NotInParts(f"{twice.name}, which is as large, would be computed twice")
        strided = next((each for each in self.results if not each.meta["val"].is_contiguous()), None)
        if strided is not None:
            raise NotInParts(f"{strided.name} is not contiguous")
        remaining = sum(map(bytes_of, self.results))
        if remaining * _MIN_RATIO > bytes_of(self.region.root):
            raise NotInParts(f"{remaining} bytes that are computed from it are in memory anyway")

    def _made_before(self) -> Iterator[Node]:
        """Other products that are computed in parts, and large gradients that are computed for a tangent of 1."""
        for node in self.members:
            if node not in self.region.after and node.target in (aten.mm.default, aten.addmm.default):
                yield node
        for node in self.before:
            if node in self.varying and self.region.is_large(node):
                yield node

    def _is_moved(self, node: Node) -> bool:
        """Whether an operand of the region comes after the product: the region is now computed before it."""
        return self.region.root < node

    def replace(self) -> Node:
        """Replace the region by its computation in parts; return a call of the first part."""
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
        """Compute the operands of the region before it, and for a tangent of 1."""
        root = self.region.root
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        for node in sorted(self.before, key=order.__getitem__):
            if node is self.tangent:
                value = node.meta["val"]
                options = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
                self.hoisted[node] = self._call(aten.full.default, ([], 1.0), options, like=root)
            elif node in self.varying:
                self.hoisted[node] = self._copy(node, node.args, self.hoisted)
            elif self._is_moved(node):
                root.prepend(node)

    def _part(self, start: int, stop: int) -> dict[Node, Node]:
        """Insert the calls of the region for these groups of rows."""
        made: dict[Node, Node] = {}
        slices: dict[Node, Node] = {}

        def read(node: Node, dim: int | None) -> Node:
            if node in made:
                return made[node]
            whole = self.hoisted.get(node, node)
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
        """A sum over rows, plus that over the rows of this part: in f32 if its type is bf16 or f16."""
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
        """A whole result: times the tangent, if it depends on that."""
        if node in self.region.dims:
            whole = self._call(aten.cat.default, (pieces, self.region.dims[node]), {}, like=node)
        else:
            whole = self._cast(pieces[-1], node)
        if node not in self.varying:
            return whole
        must_save(whole)
        scaled = self._call(aten.mul.Tensor, (whole, self.tangent), {}, like=node)
        return self._cast(scaled, node)

    def _cast(self, value: Node, like: Node) -> Node:
        """A value cast to the dtype of another."""
        dtype = like.meta["val"].dtype
        if value.meta["val"].dtype is dtype:
            return value
        return self._call(aten._to_copy.default, (value,), {"dtype": dtype}, like=like)

    def _copy(self, node: Node, args: tuple[Any, ...], operands: dict[Node, Node]) -> Node:
        """The call of a node with other operands."""
        args, kwargs = torch.fx.map_arg((args, node.kwargs), lambda each: operands.get(each, each))
        return self._call(cast(Callable[..., Any], node.target), args, kwargs, like=node)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, like: Node) -> Node:
        """A new call before the product, with the origin of `like`."""
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
    """The operands of a call and their split dimensions; raises `NotInParts` if one is split along two."""
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
        raise NotInParts(f"the number of rows of {node.name} is not known when it is compiled")
    return size


def _numel(node: Node) -> int:
    return math.prod(map(size_hint, shape_of(node)))
