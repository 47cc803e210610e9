"""Matches attention that a program writes out as separate ATen calls: two matrix products with a softmax between them.

Matching starts at a softmax: backwards through the calls that compute its scores to a matrix product (`Scores`), and
forwards to the matrix product that reads its weights (`AttentionMatch`). In a joint graph, the three products that
compute gradients are matched from these (`Gradients`). The argument of a softmax may have one more column, of scores
that belong to no key (sinks), whose weights are not read.
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

_DROPOUT = "dropout draws from eager's random number stream, and its weights are in memory"
_SUMS = "the product sums over something else than keys"
_SHAPES = "its scores are reshaped in several ways"
_UNTRAINED = "the kernel takes no gradients of scores that are capped or have sinks"


class NotFusible(Exception):
    """No kernel computes this attention; the message is the reason."""


@dataclass(frozen=True, slots=True)
class AdditiveMask:
    """A mask, times `factor`, that is added to scores of this shape."""

    mask: Node
    factor: float
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class MaskedFill:
    """A number that replaces scores of this shape wherever `condition` is not `keep_where`."""

    condition: Node
    keep_where: bool
    number: float
    shape: tuple[Expr, ...]


Mask: TypeAlias = "AdditiveMask | MaskedFill"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an attention: a product of queries and keys, times a scale, with masks in the order of application.

    calls: the calls that compute them, from the product on. cap: before masks, scores are cap * tanh(product / cap).
    """

    product: Node
    calls: tuple[Node, ...]
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    cap: float | None = None

    def scaled_by(self, number: float) -> Scores:
        masks = tuple(
            replace(mask, factor=mask.factor * number)
            if isinstance(mask, AdditiveMask)
            else replace(mask, number=mask.number * number)
            for mask in self.masks
        )
        cap = None if self.cap is None else self.cap * number
        return replace(self, scale=self.scale * number, masks=masks, cap=cap)

    def tanh(self) -> Scores | None:
        """Capped at 1; None if they are masked or capped already: the kernel caps once, before masks."""
        return None if self.masks or self.cap is not None else replace(self, cap=1.0)

    @property
    def operands(self) -> tuple[Node, Node]:
        """Queries, and keys as columns."""
        first, second = self.product.args[-2:]
        assert isinstance(first, Node) and isinstance(second, Node)
        return first, second


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """An attention: its scores, the softmax, the weights in all their shapes and types, and the product with values.

    sinks: scores of no key, one for each row. between: the calls between the scores and the weights of keys.
    sizes: batch, heads, rows and keys, taken from the tensor with the most dimensions.
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
    """The products that compute the gradients of queries, of keys as columns, and of values; `grad_out`: of the result.

    calls: the calls that serve only these products.
    """

    query: Node
    key: Node
    value: Node
    grad_out: Node
    calls: set[Node] = field(default_factory=set)

    @property
    def products(self) -> tuple[Node, Node, Node]:
        return self.query, self.key, self.value


def match_attention(module: torch.fx.GraphModule, softmax: Node) -> AttentionMatch | None:
    """Match the attention around a softmax; None if it lacks a product before or after it. Raises `NotFusible`."""
    between: tuple[Node, ...] = (softmax,)
    argument, shift = _without_max_shift(softmax.args[0])
    keys, sinks = _split_sinks(argument)
    scores = ScoreMatcher(module).scores(keys)
    if scores is None or not may_cap(scores.cap):
        return None
    first = softmax
    if sinks is not None:
        first, between = _weights_of_keys(softmax), (*between, argument)
    weights = set(_reshaped_and_cast(first))
    products = [user for node in weights for user in node.users if user.target in _PRODUCTS and user.args[0] is node]
    if not products:
        if any(user.target in _DROPOUTS for node in weights for user in node.users):
            raise NotFusible(_DROPOUT)
        return None
    rank = softmax.meta["val"].dim()
    if len(products) > 1 or softmax.args[1] not in (-1, rank - 1):
        raise NotFusible(_SUMS)
    (product,) = products
    used = shape_of(product.args[0].meta["val"])  # type: ignore[union-attr]
    last = shape_of(first.meta["val"])[-2:]
    if used[-2:] != last or shape_of(scores.product.meta["val"])[-2:] != last:
        raise NotFusible(_SUMS)
    sizes = _sizes((*scores.calls, *weights), last)
    return AttentionMatch(scores, softmax, sinks, (*between, *shift), frozenset(weights), product, sizes)


def _without_max_shift(node: Any) -> tuple[Any, tuple[Node, ...]]:
    """The argument of a softmax before the maximum of each row was subtracted, and the calls that subtract it."""
    match node:
        case Node(target=aten.sub.Tensor, args=(Node() as source, Node() as maximum)) if not node.kwargs:
            rank = source.meta["val"].dim()
            last = (-1, rank - 1)
            match maximum:
                case Node(target=aten.amax.default, args=(reduced, [dim], True)) if reduced is source and dim in last:
                    return source, (maximum, node)
                case Node(target=operator.getitem, args=(Node(target=aten.max.dim) as pair, 0)):
                    reduced, dim, keep = (*pair.args, False)[:3]
                    if reduced is source and dim in last and keep:
                        return source, (pair, maximum, node)
    return node, ()


def _split_sinks(node: Any) -> tuple[Any, Node | None]:
    """The scores of keys, and the sinks concatenated after them, one for each row."""
    match node:
        case Node(target=aten.cat.default, args=([Node() as keys, Node() as sinks], dim)):
            rank = keys.meta["val"].dim()
            if dim in (-1, rank - 1) and shape_of(sinks.meta["val"])[-1] == ONE:
                return keys, sinks
    return node, None


def _weights_of_keys(softmax: Node) -> Node:
    """The slice of the weights without the last column."""
    rank, columns = softmax.meta["val"].dim(), shape_of(softmax.meta["val"])[-1]
    parts = [user for user in softmax.users if user.target is aten.slice.Tensor]
    match [(part, *part.args[1:]) for part in parts]:
        case [(part, dim, 0, _, *step)] if dim in (-1, rank - 1) and step in ([], [1]):
            if shape_of(part.meta["val"])[-1] == columns - 1:
                return part
    raise NotFusible(_SUMS)


def other_reader(calls: set[Node], results: tuple[Node, ...]) -> Node | None:
    """A reader of values that these calls compute, other than the calls themselves and `results`; None if none."""
    users = (user for node in calls for user in _readers(node))
    return next((user for user in users if user not in calls and user not in results and not _is_unused(user)), None)


def _readers(node: Node) -> list[Node]:
    """The users that read a tensor's elements: not those that overwrite it or only allocate a tensor like it."""
    users = (user for user in node.users if user.target is not aten.new_empty_strided.default)
    return [user for user in users if user.target is not aten.copy.default or user.args[1] is node]


def _is_unused(node: Node) -> bool:
    return node.op == "call_function" and not node.users


def _sizes(nodes: tuple[Node, ...], last: tuple[Expr, ...]) -> tuple[Any, Any, Any, Any]:
    """Batch, heads, rows and keys; where scores never have four dimensions, there is one head.

    last: rows and keys; masks may be added to scores of other shapes.
    """
    shapes = {shape_of(node.meta["val"]): tuple(node.meta["val"].shape) for node in nodes}
    shapes = {shape: sizes for shape, sizes in shapes.items() if len(shape) <= 4 and shape[-2:] == last}
    most = max(map(len, shapes), default=0)
    found = [sizes for shape, sizes in shapes.items() if len(shape) == most]
    if len(found) != 1:
        raise NotFusible(_SHAPES)
    sizes = found[0]
    return (*sizes[:-2], *(1,) * (4 - most), *sizes[-2:])  # type: ignore[return-value]


# --------------------------------------------------------------------------------------- reshapes and casts


def reshaped_from(node: Node) -> Node | None:
    """The argument of a call whose result has the same elements in the same order, reshaped or not; else None."""
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
    """The argument of a call that transposes the last two dimensions; else None."""
    if node.target is aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    rank = node.meta["val"].dim()
    return node.args[0] if _order(node) == [*range(rank - 2), rank - 1, rank - 2] else None  # type: ignore[return-value]


def source_of(node: Node, shape: tuple[Expr, ...]) -> Node | None:
    """The earliest tensor with these elements in this shape, before copies and reshapes; None if there is none."""
    found: Node | None = None
    at: Node | None = node
    while at is not None:
        if shape_of(at.meta["val"]) == shape:
            found = at
        at = reshaped_from(at)
    return found


def repeated_from(node: Node, shape: tuple[Expr, ...]) -> Node | None:
    """The tensor that is repeated for each head of a group, (batch, shared, 1, keys, size); None if there is none."""
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
    """The permutation: for each dimension of the result, that of the argument."""
    dims = list(range(node.meta["val"].dim()))
    if node.target is aten.permute.default:
        return [dims[dim] for dim in node.args[1]]  # type: ignore[union-attr]
    first, second = (dims[dim] for dim in node.args[1:])  # type: ignore[index]
    dims[first], dims[second] = second, first
    return dims


def _cast_from(node: Node) -> Node | None:
    """The argument of a cast from one floating-point type to another; else None."""
    if node.target is not aten._to_copy.default:
        return None
    source: Any = node.args[0]
    floats = source.meta["val"].is_floating_point() and node.meta["val"].is_floating_point()
    return source if floats else None


def _reshaped_or_cast_from(node: Node) -> Node | None:
    return reshaped_from(node) or _cast_from(node)


def _reshaped_and_cast(node: Node) -> Iterator[Node]:
    """A tensor, and all reshapes and casts of it."""
    yield node
    for user in node.users:
        if user.op == "call_function" and _reshaped_or_cast_from(user) is node:
            yield from _reshaped_and_cast(user)


# --------------------------------------------------------------------------------------- how scores are computed


@dataclass(frozen=True, slots=True)
class ScoreMatcher:
    """Matches scores, from the softmax back to the product.

    product: the node that stands for the product where the graph does not compute it.
    """

    module: torch.fx.GraphModule
    product: Node | None = None

    def scores(self, node: Any) -> Scores | None:
        if node is self.product and node is not None:
            return Scores(node, (node,))
        if not isinstance(node, Node) or node.op != "call_function":
            return None
        if node.target in _PRODUCTS:
            return Scores(node, (node,))
        if node.target is aten.baddbmm.default:
            return self._added_product(node)
        source = _reshaped_or_cast_from(node)
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
        """The value of an argument that is a number, or a tensor of no dimensions whose value is known; else None."""
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
        """The operand that a call multiplies by a number, and the number."""
        first, second = node.args[:2]
        number = self.number(second)
        if number is not None:
            by_mul = node.target in (aten.mul.Tensor, aten.mul.Scalar)
            return (first, number if by_mul else 1 / number) if by_mul or number else None
        number = self.number(first)
        return (second, number) if node.target is aten.mul.Tensor and number is not None else None

    def choice(self, node: Node) -> tuple[Any, MaskedFill] | None:
        """The operand of a `where` that chooses between it and a number, and that replacement."""
        condition, first, second = node.args
        for value, other, keep_where in ((first, second, True), (second, first, False)):
            number = self.number(other)
            if number is not None and isinstance(value, Node) and isinstance(condition, Node):
                return value, MaskedFill(condition, keep_where, number, shape_of(node.meta["val"]))
        return None

    def _added_product(self, node: Node) -> Scores | None:
        mask: Any = node.args[0]
        factors = [node.kwargs.get(name, 1) for name in ("beta", "alpha")]
        if not all(isinstance(factor, int | float) for factor in factors):
            return None
        beta, alpha = (float(factor) for factor in factors)  # type: ignore[arg-type]
        masks = (AdditiveMask(mask, beta, shape_of(node.meta["val"])),) if beta else ()
        return Scores(node, (node,), alpha, masks)

    def _scaled(self, node: Node) -> Scores | None:
        found = self.scaling(node)
        scores = None if found is None else self.scores(found[0])
        return None if found is None or scores is None else scores.scaled_by(found[1])

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
                    scores = scores.scaled_by(sign_of_value) if sign_of_value != 1.0 else scores
                    return replace(scores, masks=(*scores.masks, AdditiveMask(mask, factor, shape)))
        return None

    def _chosen(self, node: Node) -> Scores | None:
        found = self.choice(node)
        if found is None or shape_of(found[0].meta["val"]) != shape_of(node.meta["val"]):
            return None
        scores = self.scores(found[0])
        return None if scores is None else replace(scores, masks=(*scores.masks, found[1]))


# --------------------------------------------------------------------------------------- gradients, in a joint graph


def match_gradients(module: torch.fx.GraphModule, match: AttentionMatch) -> Gradients | None:
    """Match the gradients of an attention; None if there are none. Raises `NotFusible` if the kernel has not these."""
    gradients = _softmax_gradients(match)
    weighted = [
        (turned, user)
        for node in match.weights
        for turned in node.users
        if transposed_from(turned) is node
        for user in turned.users
        if user.target in _PRODUCTS and user.args[0] is turned
    ]
    if not gradients and not weighted:
        return None
    if match.scores.cap is not None or match.sinks is not None:
        raise NotFusible(_UNTRAINED)
    if len(gradients) != 1 or len(weighted) != 1:
        raise NotFusible("not all gradients of queries, keys and values are taken, and the kernel computes all three")
    (turned, value), (steps, through) = weighted[0], gradients[0]
    grad_out: Any = value.args[1]
    if through.args[0] is not grad_out or transposed_from(through.args[1]) is not match.product.args[1]:  # type: ignore[arg-type]
        raise NotFusible("its gradients are not those of its own products")
    scaled = _score_gradients(ScoreMatcher(module), match, steps)
    query, key = _gradient_products(match, scaled[-1])
    return Gradients(query, key, value, grad_out, {turned, *steps, *scaled})


def _softmax_gradients(match: AttentionMatch) -> list[tuple[list[Node], Node]]:
    """The gradients of scores: for each, the calls that compute it, and the product of gradients and values they read.

    The last call is `weight * grad - weight * sum(weight * grad)`.
    """
    found: list[tuple[list[Node], Node]] = []
    for weight in match.weights:
        for scaled in weight.users:
            if scaled.target is not aten.mul.Tensor:
                continue
            grad = next((arg for arg in scaled.args if arg not in match.weights), None)
            for total in scaled.users:
                if total.target is aten.sum.dim_IntList and isinstance(grad, Node):
                    found += [(steps, through) for steps, through in _centred(match, scaled, total, grad)]
    return found


def _centred(match: AttentionMatch, scaled: Node, total: Node, grad: Node) -> Iterator[tuple[list[Node], Node]]:
    rank = scaled.meta["val"].dim()
    if total.args[1:] not in (([-1], True), ([rank - 1], True)):
        return
    for share in total.users:
        if share.target is aten.mul.Tensor and any(arg in match.weights for arg in share.args):
            for change in share.users:
                if change.target is aten.sub.Tensor and change.args == (scaled, share):
                    steps, at = [scaled, total, share, change], grad
                    while at is not None and at.target not in _PRODUCTS:
                        steps.insert(0, at)
                        at = _reshaped_or_cast_from(at)
                    if at is not None:
                        yield [at, *steps], at


def _score_gradients(matcher: ScoreMatcher, match: AttentionMatch, steps: list[Node]) -> list[Node]:
    """The calls from the gradient of the softmax's argument to that of the product: masks and scales."""
    scores, found, scale, fills = match.scores, [steps[-1]], 1.0, set[tuple[Node, bool]]()
    while not any(user.target in _PRODUCTS for user in found[-1].users):
        at, users = found[-1], _readers(found[-1])
        if len(users) != 1:
            raise NotFusible(f"{len(users)} calls read the gradients of its scores, {at.name}")
        (user,) = users
        if user.target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            scaling = matcher.scaling(user)
            if scaling is None or scaling[0] is not at:
                raise NotFusible(f"{user.name} changes gradients of its scores")
            scale *= scaling[1]
        elif user.target is aten.where.self:
            choice = matcher.choice(user)
            if choice is None or choice[0] is not at or choice[1].number != 0:
                raise NotFusible(f"{user.name} changes gradients of its scores")
            fills.add((choice[1].condition, choice[1].keep_where))
        elif _reshaped_or_cast_from(user) is not at:
            raise NotFusible(f"{user.name} reads gradients of its scores")
        found.append(user)
    expected = {(mask.condition, mask.keep_where) for mask in scores.masks if isinstance(mask, MaskedFill)}
    if fills != expected or abs(scale - scores.scale) > 1e-6 * abs(scores.scale):
        raise NotFusible("its scores and their gradients are scaled or masked differently")
    return found


def _gradient_products(match: AttentionMatch, score_gradient: Node) -> tuple[Node, Node]:
    """The products that compute the gradients of queries, and of keys as columns."""
    queries, keys = match.scores.operands
    products: Mapping[bool, list[Node]] = {
        first: [
            user
            for user in score_gradient.users
            if user.target in _PRODUCTS and (user.args[0] is score_gradient) is first
        ]
        for first in (True, False)
    }
    if len(products[True]) != 1 or len(products[False]) != 1:
        raise NotFusible("not all gradients of queries, keys and values are taken, and the kernel computes all three")
    (query,), (key,) = products[True], products[False]
    if transposed_from(query.args[1]) is not keys or transposed_from(key.args[0]) is not queries:  # type: ignore[arg-type]
        raise NotFusible("its gradients are not those of its own products")
    return query, key
