"""Recognises attention in a graph of ATen calls, where a program writes it out: products, and a softmax between them.

From a softmax on: upwards what makes its scores, down to a matrix product (`Scores`); downwards the matrix product that
takes its weights (`Written`). In a joint graph the three products that make gradients follow from these (`Gradients`).
Beside scores a softmax may have one of each row that belongs to no key (a sink), whose weight nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from pellucid.capture.fx import attribute_of, shape_of
from pellucid.capture.torch_compat import real_tensors
from pellucid.ir.attention import may_cap
from pellucid.ir.index import ONE, Expr, exact_div

aten = torch.ops.aten

SOFTMAX = aten._softmax.default
_PRODUCTS = (aten.bmm.default, aten.mm.default)
_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.lift_fresh_copy.default,
)  # fmt: skip
_NUMBERS = (aten.scalar_tensor.default, aten.full.default)
_COPIES = (aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default, aten.detach.default)
_DROPOUTS = (aten.native_dropout.default, aten.dropout.default, aten.bernoulli.p, aten.bernoulli.default)

_DROPOUT = "dropout draws from eager's own stream, and its weights are in memory"
_SUMS = "the product sums over something else than keys"
_SHAPES = "its scores are taken apart in several ways"
_UNTRAINED = "the kernel takes no gradients of scores that are capped, or beside sinks"


class NotWritten(Exception):
    """What looks like an attention is none that a kernel computes; the text says why."""


@dataclass(frozen=True, slots=True)
class Added:
    """A mask, times a number, that is added to scores of some shape."""

    mask: Node
    factor: float
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A number in place of scores of some shape where `condition` is not `kept`."""

    condition: Node
    kept: bool
    number: float
    shape: tuple[Expr, ...]


Mask: TypeAlias = "Added | Replaced"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an attention: a product of queries and keys, times a scale, with masks in the order of their use.

    calls: those that make them, from the product on. cap: they are cap * tanh(that product / cap), before masks.
    """

    product: Node
    calls: tuple[Node, ...]
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    cap: float | None = None

    def times(self, number: float) -> Scores:
        masks = tuple(
            replace(mask, factor=mask.factor * number)
            if isinstance(mask, Added)
            else replace(mask, number=mask.number * number)
            for mask in self.masks
        )
        cap = None if self.cap is None else self.cap * number
        return replace(self, scale=self.scale * number, masks=masks, cap=cap)

    def tanh(self) -> Scores | None:
        """Capped at 1; None if something was done to them that the kernel does after this."""
        return None if self.masks or self.cap is not None else replace(self, cap=1.0)

    @property
    def operands(self) -> tuple[Node, Node]:
        """Queries, and keys as columns."""
        first, second = self.product.args[-2:]
        assert isinstance(first, Node) and isinstance(second, Node)
        return first, second


@dataclass(frozen=True, slots=True)
class Written:
    """An attention: its scores, the softmax, the weights in all their shapes and types, and the product with values.

    sinks: the scores beside those of keys, one for each row. between: the calls between scores and weights of keys.
    sizes: of batch, heads, rows and keys, as the tensor has them that has most of them.
    """

    scores: Scores
    softmax: Node
    sinks: Node | None
    between: tuple[Node, ...]
    weights: frozenset[Node]
    product: Node
    sizes: tuple[Any, Any, Any, Any]

    @property
    def calls(self) -> set[Node]:
        return {*self.scores.calls, *self.between, *self.weights}


@dataclass(slots=True)
class Gradients:
    """The products that make the gradients of queries, of keys as columns, and of values; and that of the result.

    calls: all that are there for these alone.
    """

    query: Node
    key: Node
    value: Node
    grad_out: Node
    calls: set[Node] = field(default_factory=set)

    @property
    def products(self) -> tuple[Node, Node, Node]:
        return self.query, self.key, self.value


def written_attention(module: torch.fx.GraphModule, softmax: Node) -> Written | None:
    """The attention around a softmax; None if there is no product on both sides of it. Raises `NotWritten`."""
    between: tuple[Node, ...] = (softmax,)
    given, shift = _unshifted(softmax.args[0])
    keys, sinks = _beside_sinks(given)
    scores = Climb(module).scores(keys)
    if scores is None or not may_cap(scores.cap):
        return None
    first = softmax
    if sinks is not None:
        first, between = _weights_of_keys(softmax), (*between, given)
    weights = set(_passed_on(first))
    products = [user for node in weights for user in node.users if user.target in _PRODUCTS and user.args[0] is node]
    if not products:
        if any(user.target in _DROPOUTS for node in weights for user in node.users):
            raise NotWritten(_DROPOUT)
        return None
    rank = softmax.meta["val"].dim()
    if len(products) > 1 or softmax.args[1] not in (-1, rank - 1):
        raise NotWritten(_SUMS)
    (product,) = products
    used = shape_of(product.args[0].meta["val"])  # type: ignore[union-attr]
    last = shape_of(first.meta["val"])[-2:]
    if used[-2:] != last or shape_of(scores.product.meta["val"])[-2:] != last:
        raise NotWritten(_SUMS)
    sizes = _sizes((*scores.calls, *weights), last)
    return Written(scores, softmax, sinks, (*between, *shift), frozenset(weights), product, sizes)


def _unshifted(node: Any) -> tuple[Any, tuple[Node, ...]]:
    """What a softmax is of, which the greatest number of each row was subtracted from; and the calls that did so."""
    match node:
        case Node(target=aten.sub.Tensor, args=(Node() as given, Node() as greatest)) if not node.kwargs:
            rank = given.meta["val"].dim()
            last = (-1, rank - 1)
            match greatest:
                case Node(target=aten.amax.default, args=(source, [dim], True)) if source is given and dim in last:
                    return given, (greatest, node)
                case Node(target=operator.getitem, args=(Node(target=aten.max.dim) as pair, 0)):
                    source, dim, keep = (*pair.args, False)[:3]
                    if source is given and dim in last and keep:
                        return given, (pair, greatest, node)
    return node, ()


def _beside_sinks(node: Any) -> tuple[Any, Node | None]:
    """Scores of keys, and the scores that lie behind them, one for each row."""
    match node:
        case Node(target=aten.cat.default, args=([Node() as keys, Node() as sinks], dim)):
            rank = keys.meta["val"].dim()
            if dim in (-1, rank - 1) and shape_of(sinks.meta["val"])[-1] == ONE:
                return keys, sinks
    return node, None


def _weights_of_keys(softmax: Node) -> Node:
    """The weights of all but the last number of each row."""
    rank, columns = softmax.meta["val"].dim(), shape_of(softmax.meta["val"])[-1]
    parts = [user for user in softmax.users if user.target is aten.slice.Tensor]
    match [(part, *part.args[1:]) for part in parts]:
        case [(part, dim, 0, _, *step)] if dim in (-1, rank - 1) and step in ([], [1]):
            if shape_of(part.meta["val"])[-1] == columns - 1:
                return part
    raise NotWritten(_SUMS)


def reader_beside(calls: set[Node], results: tuple[Node, ...]) -> Node | None:
    """Somebody else who reads what these calls make, beside what they are there for."""
    users = (user for node in calls for user in _readers(node))
    return next((user for user in users if user not in calls and user not in results and not _is_unused(user)), None)


def _readers(node: Node) -> list[Node]:
    """The users of a tensor's elements: not those that write over it, or make memory like it."""
    users = (user for user in node.users if user.target is not aten.new_empty_strided.default)
    return [user for user in users if user.target is not aten.copy.default or user.args[1] is node]


def _is_unused(node: Node) -> bool:
    return node.op == "call_function" and not node.users


def _sizes(nodes: tuple[Node, ...], last: tuple[Expr, ...]) -> tuple[Any, Any, Any, Any]:
    """Batch, heads, rows and keys: where scores never have four dimensions each of a batch has one head.

    last: rows and keys; masks may be added to scores of other shapes.
    """
    shapes = {shape_of(node.meta["val"]): tuple(node.meta["val"].shape) for node in nodes}
    shapes = {shape: sizes for shape, sizes in shapes.items() if len(shape) <= 4 and shape[-2:] == last}
    most = max(map(len, shapes), default=0)
    found = [sizes for shape, sizes in shapes.items() if len(shape) == most]
    if len(found) != 1:
        raise NotWritten(_SHAPES)
    sizes = found[0]
    return (*sizes[:-2], *(1,) * (4 - most), *sizes[-2:])  # type: ignore[return-value]


# --------------------------------------------------------------------------------------- calls that keep elements


def reshaped_from(node: Node) -> Node | None:
    """The argument of a call that gives the same elements in the same order, in another shape or not."""
    target, args = node.target, node.args
    if target in _RESHAPES:
        return args[0]  # type: ignore[return-value]
    if target not in (aten.expand.default, aten.permute.default, aten.transpose.int, aten.copy.default):
        return None
    source: Any = args[1] if target is aten.copy.default else args[0]
    shape = shape_of(source.meta["val"])
    if target is aten.copy.default and source.meta["val"].dtype is not node.meta["val"].dtype:
        return None
    if target in (aten.expand.default, aten.copy.default):
        return source if shape == shape_of(node.meta["val"]) else None
    order = [dim for dim in _order(node) if shape[dim] != ONE]
    return source if order == sorted(order) else None


def transposed_from(node: Node) -> Node | None:
    """The argument of a call that exchanges the last two dimensions."""
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    rank = node.meta["val"].dim()
    return node.args[0] if _order(node) == [*range(rank - 2), rank - 1, rank - 2] else None  # type: ignore[return-value]


def source_of(node: Node, shape: tuple[Expr, ...]) -> Node | None:
    """The first tensor with these elements in this shape, before they were copied or reshaped; None if none has it."""
    found: Node | None = None
    at: Node | None = node
    while at is not None:
        if shape_of(at.meta["val"]) == shape:
            found = at
        at = reshaped_from(at)
    return found


def repeated_from(node: Node, shape: tuple[Expr, ...]) -> Node | None:
    """What was repeated for each head of a group: (batch, shared, 1, keys, size); None if nothing was."""
    at: Node | None = node
    while at is not None:
        source: Any = at.args[0] if at.target is aten.expand.default else None
        if source is not None and reshaped_from(at) is None:
            one, many = shape_of(source.meta["val"]), shape_of(at.meta["val"])
            fits = (
                len(many) == 5 and one == (*many[:2], ONE, *many[3:]) and (many[0], *many[3:]) == (shape[0], *shape[2:])
            )
            return source if fits and exact_div(shape[1], many[1]) == many[2] else None
        at = reshaped_from(at)
    return None


def _order(node: Node) -> list[int]:
    """The dimensions of the argument in the order that the result has them in."""
    dims = list(range(node.meta["val"].dim()))
    if node.target is aten.permute.default:
        return [dims[dim] for dim in node.args[1]]  # type: ignore[union-attr]
    first, second = (dims[dim] for dim in node.args[1:])  # type: ignore[index]
    dims[first], dims[second] = second, first
    return dims


def _cast_from(node: Node) -> Node | None:
    """The argument of a call that changes the type of floats alone."""
    if node.target is not aten._to_copy.default:
        return None
    source: Any = node.args[0]
    floats = source.meta["val"].is_floating_point() and node.meta["val"].is_floating_point()
    return source if floats else None


def _same_from(node: Node) -> Node | None:
    return reshaped_from(node) or _cast_from(node)


def _passed_on(node: Node) -> Iterator[Node]:
    """A tensor, and all that it becomes by calls that keep elements."""
    yield node
    for user in node.users:
        if user.op == "call_function" and _same_from(user) is node:
            yield from _passed_on(user)


# --------------------------------------------------------------------------------------- what scores are made of


@dataclass(frozen=True, slots=True)
class Climb:
    """Goes from scores back to the product that they come from. given: it, where the graph does not make it."""

    module: torch.fx.GraphModule
    given: Node | None = None

    def scores(self, node: Any) -> Scores | None:
        if node is self.given and node is not None:
            return Scores(node, (node,))
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node.target in _PRODUCTS:
            return Scores(node, (node,))
        if node.target is aten.baddbmm.default:
            return self._added_product(node)
        source = _same_from(node)
        if source is not None:
            found = self.scores(source)
        elif node.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            found = self._scaled(node)
        elif node.target in (aten.add.Tensor, aten.sub.Tensor):
            found = self._masked(node)
        elif node.target is aten.where.self:
            found = self._chosen(node)
        elif node.target is aten.tanh.default:
            scores = self.scores(node.args[0])
            found = None if scores is None else scores.tanh()
        else:
            found = None
        return None if found is None else replace(found, calls=(*found.calls, node))

    def number(self, value: Any) -> float | None:
        """The number that an argument is: written as such, or as a tensor of one element that is known."""
        if isinstance(value, bool | int | float):
            return float(value)
        if not isinstance(value, Node):
            return None
        if value.op == "get_attr":
            tensor = attribute_of(self.module, value)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() or tensor.is_complex():
                return None
            with real_tensors():
                return float(tensor)
        if value.target in _NUMBERS and not shape_of(value.meta["val"]):
            return self.number(value.args[-1])
        return self.number(value.args[0]) if value.target in _COPIES and not shape_of(value.meta["val"]) else None

    def scaling(self, node: Node) -> tuple[Any, float] | None:
        """What a call multiplies by a number, and the number."""
        first, second = node.args[:2]
        number = self.number(second)
        if number is not None:
            by_mul = node.target in (aten.mul.Tensor, aten.mul.Scalar)
            return (first, number if by_mul else 1 / number) if by_mul or number else None
        number = self.number(first)
        return (second, number) if node.target is aten.mul.Tensor and number is not None else None

    def choice(self, node: Node) -> tuple[Any, Replaced] | None:
        """What `where` has, or else a number."""
        condition, first, second = node.args
        for value, other, kept in ((first, second, True), (second, first, False)):
            number = self.number(other)
            if number is not None and isinstance(value, Node) and isinstance(condition, Node):
                return value, Replaced(condition, kept, number, shape_of(node.meta["val"]))
        return None

    def _added_product(self, node: Node) -> Scores | None:
        mask: Any = node.args[0]
        factors = [node.kwargs.get(name, 1) for name in ("beta", "alpha")]
        if not all(isinstance(factor, int | float) for factor in factors):
            return None
        beta, alpha = (float(factor) for factor in factors)  # type: ignore[arg-type]
        masks = (Added(mask, beta, shape_of(node.meta["val"])),) if beta else ()
        return Scores(node, (node,), alpha, masks)

    def _scaled(self, node: Node) -> Scores | None:
        found = self.scaling(node)
        scores = None if found is None else self.scores(found[0])
        return None if found is None or scores is None else scores.times(found[1])

    def _masked(self, node: Node) -> Scores | None:
        first, second = node.args
        shape = shape_of(node.meta["val"])
        if node.kwargs:
            return None
        sign = 1.0 if node.target is aten.add.Tensor else -1.0
        for value, mask, factor, sign_of_value in ((first, second, sign, 1.0), (second, first, 1.0, sign)):
            if isinstance(value, Node) and isinstance(mask, Node) and shape_of(value.meta["val"]) == shape:
                scores = self.scores(value)
                if scores is not None:
                    scores = scores.times(sign_of_value) if sign_of_value != 1.0 else scores
                    return replace(scores, masks=(*scores.masks, Added(mask, factor, shape)))
        return None

    def _chosen(self, node: Node) -> Scores | None:
        found = self.choice(node)
        if found is None or shape_of(found[0].meta["val"]) != shape_of(node.meta["val"]):
            return None
        scores = self.scores(found[0])
        return None if scores is None else replace(scores, masks=(*scores.masks, found[1]))


# --------------------------------------------------------------------------------------- gradients, in a joint graph


def written_gradients(module: torch.fx.GraphModule, written: Written) -> Gradients | None:
    """The gradients of an attention; None where nothing takes any. Raises `NotWritten` for others than a kernel has."""
    changes = _softmax_gradients(written)
    weighted = [
        (turned, user)
        for node in written.weights
        for turned in node.users
        if transposed_from(turned) is node
        for user in turned.users
        if user.target in _PRODUCTS and user.args[0] is turned
    ]
    if not changes and not weighted:
        return None
    if written.scores.cap is not None or written.sinks is not None:
        raise NotWritten(_UNTRAINED)
    if len(changes) != 1 or len(weighted) != 1:
        raise NotWritten("not all gradients of queries, keys and values are taken, and the kernel computes all three")
    (turned, value), (steps, through) = weighted[0], changes[0]
    grad_out: Any = value.args[1]
    if through.args[0] is not grad_out or transposed_from(through.args[1]) is not written.product.args[1]:  # type: ignore[arg-type]
        raise NotWritten("its gradients are not those of its own products")
    scaled = _scaled_changes(Climb(module), written, steps)
    query, key = _products_of_changes(written, scaled[-1])
    return Gradients(query, key, value, grad_out, {turned, *steps, *scaled})


def _softmax_gradients(written: Written) -> list[tuple[list[Node], Node]]:
    """The gradients of scores: all calls that make one from the product of gradients and values, and that product.

    The last call is `weight * grad - weight * sum(weight * grad)`.
    """
    found: list[tuple[list[Node], Node]] = []
    for weight in written.weights:
        for scaled in weight.users:
            if scaled.target is not aten.mul.Tensor:
                continue
            grad = next((arg for arg in scaled.args if arg not in written.weights), None)
            for total in scaled.users:
                if total.target is aten.sum.dim_IntList and isinstance(grad, Node):
                    found += [(steps, through) for steps, through in _centred(written, scaled, total, grad)]
    return found


def _centred(written: Written, scaled: Node, total: Node, grad: Node) -> Iterator[tuple[list[Node], Node]]:
    rank = scaled.meta["val"].dim()
    if total.args[1:] not in (([-1], True), ([rank - 1], True)):
        return
    for share in total.users:
        if share.target is aten.mul.Tensor and any(arg in written.weights for arg in share.args):
            for change in share.users:
                if change.target is aten.sub.Tensor and change.args == (scaled, share):
                    steps, at = [scaled, total, share, change], grad
                    while at is not None and at.target not in _PRODUCTS:
                        steps.insert(0, at)
                        at = _same_from(at)
                    if at is not None:
                        yield [at, *steps], at


def _scaled_changes(climb: Climb, written: Written, steps: list[Node]) -> list[Node]:
    """The calls from the gradients of the softmax's argument to those of the product: masks and scales."""
    scores, found, scale, chosen = written.scores, [steps[-1]], 1.0, set[tuple[Node, bool]]()
    while not any(user.target in _PRODUCTS for user in found[-1].users):
        at, users = found[-1], _readers(found[-1])
        if len(users) != 1:
            raise NotWritten(f"{len(users)} calls read the gradients of its scores, {at.name}")
        (user,) = users
        if user.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            scaling = climb.scaling(user)
            if scaling is None or scaling[0] is not at:
                raise NotWritten(f"{user.name} changes gradients of its scores")
            scale *= scaling[1]
        elif user.target is aten.where.self:
            choice = climb.choice(user)
            if choice is None or choice[0] is not at or choice[1].number != 0:
                raise NotWritten(f"{user.name} changes gradients of its scores")
            chosen.add((choice[1].condition, choice[1].kept))
        elif _same_from(user) is not at:
            raise NotWritten(f"{user.name} reads gradients of its scores")
        found.append(user)
    expected = {(mask.condition, mask.kept) for mask in scores.masks if isinstance(mask, Replaced)}
    if chosen != expected or abs(scale - scores.scale) > 1e-6 * abs(scores.scale):
        raise NotWritten("its scores are scaled or masked otherwise than their gradients")
    return found


def _products_of_changes(written: Written, changes: Node) -> tuple[Node, Node]:
    """The products that make the gradients of queries, and of keys as columns."""
    queries, keys = written.scores.operands
    made: Mapping[bool, list[Node]] = {
        first: [user for user in changes.users if user.target in _PRODUCTS and (user.args[0] is changes) is first]
        for first in (True, False)
    }
    if len(made[True]) != 1 or len(made[False]) != 1:
        raise NotWritten("not all gradients of queries, keys and values are taken, and the kernel computes all three")
    (query,), (key,) = made[True], made[False]
    if transposed_from(query.args[1]) is not keys or transposed_from(key.args[0]) is not queries:  # type: ignore[arg-type]
        raise NotWritten("its gradients are not those of its own products")
    return query, key
