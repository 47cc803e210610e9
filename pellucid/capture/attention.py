"""Attention that a program writes out becomes one call, whose kernel keeps no matrix of weights in memory.

In training both halves do, while they are one graph: forward keeps two numbers of each row for backward, no weights.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from pellucid.capture.fx import DTYPES, RESHAPES, decide, merge_origin, shape_of, strides_of
from pellucid.capture.operators import ATTENTION, ATTENTION_BACKWARD
from pellucid.capture.torch_compat import expr_of, fake_result, is_symbolic, quiet_fake_tensors, size_hint
from pellucid.capture.transform import is_pure
from pellucid.capture.written_attention import (
    SOFTMAX,
    Added,
    Gradients,
    Mask,
    NotWritten,
    Replaced,
    Written,
    reader_beside,
    repeated_from,
    reshaped_from,
    source_of,
    transposed_from,
    written_attention,
    written_gradients,
)
from pellucid.ir.attention import Masking
from pellucid.ir.contraction import DTYPES as KERNEL_DTYPES
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, ZERO, Expr
from pellucid.machine import Machine
from pellucid.machine.attention import MAX_HEAD_SIZE, Heads

aten = torch.ops.aten

_RULE = "transform.attention"
# How far the kernel must be ahead by the model: at sizes that stay in cache, products reach more than it says.
_AHEAD = 1.17
# A number that is as good as -inf beside any score in f32, but that a row of nothing else is uniform.
_LOWEST = -1e30
# Calls that read their argument in any layout, and whose results do not lie as it does.
_ANY_LAYOUT = (aten.bmm.default, aten.mm.default, aten.addmm.default, aten.baddbmm.default)
_VIEWS = (aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim)


def fuse_attention(module: torch.fx.GraphModule, machine: Machine) -> tuple[Decision, ...]:
    """Change a graph for inference: one call instead of two products and the softmax between them.

    Before: `%s = bmm(%q, %kt); %d = div(%s, 8.0); %p = _softmax(%d, -1); %o = bmm(%p, %v)`.
    After: `%a = pellucid.attention(%q, %k, %v, None, adds, 0.125); %o = getitem(%a, 0)`.
    """
    return tuple(decision for _, decision in _fused(module, machine, joint=False))


def fuse_joint_attention(joint: torch.fx.GraphModule, machine: Machine) -> torch.fx.GraphModule:
    """The same for forward and backward as one graph. The decisions stay with the nodes of forward."""
    for node, decision in _fused(joint, machine, joint=True):
        decide(node, decision)
    return joint


def _fused(module: torch.fx.GraphModule, machine: Machine, *, joint: bool) -> list[tuple[Node, Decision]]:
    """What was decided about each softmax, with a node that is still there."""
    found: list[tuple[Node, Decision]] = []
    for softmax in module.graph.find_nodes(op="call_function", target=SOFTMAX):
        try:
            written = written_attention(module, softmax)
            if written is not None:
                found.append(_fuse(module, written, machine, joint=joint))
        except NotWritten as refusal:
            found.append((softmax, Decision(_RULE, (softmax.name,), False, f"not one kernel: {refusal}")))
    if found:
        module.graph.eliminate_dead_code(is_impure_node=lambda node: not is_pure(node) and node.op != "get_attr")
        module.recompile()
    return found


def _fuse(module: torch.fx.GraphModule, written: Written, machine: Machine, *, joint: bool) -> tuple[Node, Decision]:
    gradients = written_gradients(module, written) if joint else None
    _check_readers(written, gradients)
    facts = _check_speed(_covered(written), machine, trained=gradients is not None)
    fusion = _Fusion(module.graph, written, gradients)
    names = (fusion.forward.name, written.softmax.name)
    why = "a softmax between two products is an attention"
    if gradients is not None:
        why += ", and so are their gradients: backward is given the result and two numbers for each row"
    return fusion.forward, Decision(_RULE, names, True, why, facts)


def _check_readers(written: Written, gradients: Gradients | None) -> None:
    """Nobody else may read what will not be in memory."""
    calls, results = written.calls, (written.product,)
    if gradients is not None:
        calls, results = calls | gradients.calls, (*results, *gradients.products)
    reader = reader_beside(calls, results)
    if reader is not None:
        what = "the caller" if reader.op == "output" else reader.name
        raise NotWritten(f"{what} reads its weights or scores, which must be in memory")


def _covered(written: Written) -> Heads:
    """The attention in numbers, if the kernel covers it; symbols count as they were when the graph was captured."""
    query, value = written.scores.operands[0].meta["val"], written.product.args[1].meta["val"]  # type: ignore[union-attr]
    dtype, size = DTYPES.get(query.dtype), query.shape[-1]
    types = {query.dtype, value.dtype, written.product.meta["val"].dtype}
    if dtype not in KERNEL_DTYPES or len(types) > 1 or written.softmax.meta["val"].dtype is torch.float64:
        raise NotWritten("kernels compute it in f32, bf16 and f16, with queries, keys and values of one type")
    sizes = [expr_of(each) for each in (size, value.shape[-1], written.sizes[3])]
    if sizes[0].value is None or not 2 <= sizes[0].value <= MAX_HEAD_SIZE or sizes[0] != sizes[1]:
        raise NotWritten(
            f"kernels have head sizes from 2 to {MAX_HEAD_SIZE}, known when compiled, values as long as keys"
        )
    if sizes[2] in (ZERO, ONE):
        raise NotWritten("it has a single key, or none")
    batch, heads, rows, keys = map(size_hint, written.sizes)
    return Heads(batch * heads, rows, keys, size_hint(size), dtype=dtype)


def _check_speed(heads: Heads, machine: Machine, *, trained: bool) -> tuple[tuple[str, int], ...]:
    """That the kernel takes less time than the calls; both times, in nanoseconds."""
    ours, theirs = (round(each) for each in (heads.kernel_time(machine), heads.written_out_time(machine)))
    if ours * _AHEAD > theirs:
        raise NotWritten(
            f"the kernel takes about {ours:.3g} ns on one thread, its products and softmax {theirs:.3g} ns"
        )
    held = heads.count * heads.rows * heads.keys * heads.dtype.itemsize
    if trained and held <= machine.own_cache:
        raise NotWritten(f"backward would compute its weights again, and {held} bytes of them stay in cache")
    return (("kernel_ns", ours), ("written_ns", theirs))


class _Fusion:
    """Puts the calls of an attention, and of its gradients, in the place of others."""

    def __init__(self, graph: torch.fx.Graph, written: Written, gradients: Gradients | None) -> None:
        self.graph, self.written = graph, written
        self.like = written.product
        batch, heads, rows, keys = written.sizes
        with graph.inserting_before(written.product):
            operands = self._operands(batch, heads, rows, keys, gradients)
            mask, masking = self._mask()
            scaling = (mask, masking, written.scores.scale)
            results = self._call(ATTENTION, *operands, *scaling, False, written.scores.cap, self._sinks())
            made = self._items(results, 3)
            self.forward = results
        for node in (*written.calls, written.product):
            merge_origin(results, node)
        if gradients is not None:
            self._put_gradients(gradients, operands, made, scaling)
        self._hand_on(written.product, made[0])

    def _put_gradients(
        self, gradients: Gradients, operands: tuple[Node, ...], results: tuple[Node, ...], scaling: Any
    ) -> None:
        first = next(node for node in self.graph.nodes if node in gradients.products)
        self.like = first
        with self.graph.inserting_before(first):
            grad_out = self._with_shape(gradients.grad_out, shape_of(results[0].meta["val"]))
            made = self._call(ATTENTION_BACKWARD, grad_out, *operands, *results, *scaling)
            query, key, value = self._items(made, 3)
            shared = self._shared
            columns = None if shared else self._call(aten.transpose.int, key, -1, -2)
        for node in (*gradients.calls, *gradients.products):
            merge_origin(made, node)
        self._hand_on(gradients.query, query)
        if columns is not None:
            self._hand_on(gradients.key, columns)
            self._hand_on(gradients.value, value)
            return
        for total, grad in zip(shared, (key, value), strict=True):
            with self.graph.inserting_before(total):
                self._replace(total, self._call(aten.unsqueeze.default, grad, 2))

    # ------------------------------------------------------------------------------------------------ operands

    def _operands(
        self, batch: Any, heads: Any, rows: Any, keys: Any, gradients: Gradients | None
    ) -> tuple[Node, Node, Node]:
        written = self.written
        queries, columns = written.scores.operands
        values: Any = written.product.args[1]
        size = queries.meta["val"].shape[-1]
        per_query, per_key, turned = (
            tuple(map(expr_of, (batch, heads, *last))) for last in ((rows, size), (keys, size), (size, keys))
        )
        query = self._with_shape(queries, per_query)
        key = self._transposed(source_of(columns, turned) or columns, per_key)
        value = self._with_shape(values, per_key)
        if any(
            q == k == ZERO for q, k in zip(strides_of(query.meta["val"])[:2], strides_of(key.meta["val"]), strict=False)
        ):
            raise NotWritten("heads or batches have the same queries and keys, whose weights would be computed again")
        self._shared: tuple[Node, Node] | tuple[()] = ()
        groups = [repeated_from(each, per_key) for each in (key, value)]
        if None in groups or groups[0].meta["val"].shape[1] != groups[1].meta["val"].shape[1]:  # type: ignore[union-attr]
            return query, key, value
        if gradients is not None:
            totals = [_group_total(each, per_key) for each in (gradients.key, gradients.value)]
            if None in totals:
                return query, key, value
            self._shared = (totals[0], totals[1])  # type: ignore[assignment]
        shape = tuple(map(shape_of, (each.meta["val"] for each in groups)))  # type: ignore[union-attr]
        each = [
            self._with_shape(self._call(aten.squeeze.dim, group, 2), (one[0], one[1], *one[3:]))
            for group, one in zip(groups, shape, strict=True)
        ]
        return query, each[0], each[1]

    def _with_shape(self, node: Node, shape: tuple[Expr, ...]) -> Node:
        """A tensor with these four dimensions, which are those of `node` or split the first of it."""
        found = source_of(node, shape)
        if found is not None:
            return found
        dims = len(shape_of(node.meta["val"]))
        if shape[1] == ONE and dims < 4:
            for _ in range(4 - dims):
                node = self._call(aten.unsqueeze.default, node, 1 if dims == 3 else 0)
            return node
        return self._reshape(node, shape)

    def _transposed(self, node: Node, shape: tuple[Expr, ...]) -> Node:
        source = transposed_from(node)
        if source is None:
            source = self._call(aten.transpose.int, node, -1, -2)
        return self._with_shape(source, shape)

    def _reshape(self, node: Node, shape: tuple[Expr, ...]) -> Node:
        sizes = [self._size(each) for each in shape]
        try:
            with quiet_fake_tensors():
                return self._call(aten.view.default, node, sizes)
        except (RuntimeError, ValueError):  # its strides cannot be those of this shape
            copy = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
            return self._call(aten.view.default, copy, sizes)

    def _size(self, size: Expr) -> Any:
        """A size as an argument: a number, or a node of the graph that has it."""
        if size.value is not None:
            return size.value
        for node in self.graph.nodes:
            if node is self.like:
                break
            value = node.meta.get("val")
            if is_symbolic(value) and isinstance(value, torch.SymInt) and expr_of(value) == size:
                return node
        raise NotWritten("a size of its heads is none that the graph has")

    # ------------------------------------------------------------------------------------------------ masks

    def _mask(self) -> tuple[Node | None, Masking]:
        """One mask for all, and what it does to scores."""
        masks = self.written.scores.masks
        if not masks:
            return None, "adds"
        numbers = [mask.number for mask in masks if isinstance(mask, Replaced)]
        masking: Masking = "adds"
        if len(numbers) == len(masks) and 0 not in numbers:
            masking = "replaces"
        elif not all(number <= _LOWEST for number in numbers):
            raise NotWritten("a number stands in place of scores to which a mask is added, and it does not hide them")
        elif set(numbers) == {-math.inf}:
            masking = "hides"
        total: Node | None = None
        for mask in masks:
            if isinstance(mask, Replaced) and masking != "adds":
                total = self._choice(mask, total)
                continue
            part = self._choice(mask, None) if isinstance(mask, Replaced) else self._addend(mask)
            total = part if total is None else self._call(aten.add.Tensor, total, part)
        assert total is not None
        query = self.written.scores.operands[0].meta["val"].dtype
        if total.meta["val"].dtype not in (query, torch.float32):
            total = self._call(aten._to_copy.default, total, dtype=torch.float32)
        return total, masking

    def _choice(self, mask: Replaced, otherwise: Node | None) -> Node:
        """Zero, or another mask, where a score counts, else the number."""
        zero = otherwise or self._number(0.0)
        number = self._number(mask.number)
        condition = self._aligned(mask.condition, mask)
        first, second = (zero, number) if mask.kept else (number, zero)
        return self._call(aten.where.self, condition, first, second)

    def _addend(self, mask: Added) -> Node:
        addend = self._aligned(mask.mask, mask)
        return addend if mask.factor == 1 else self._call(aten.mul.Tensor, addend, mask.factor)

    def _number(self, value: float) -> Node:
        node = self.graph.call_function(aten.full.default, ([], value), {"dtype": torch.float32})
        node.meta = {**self._meta(), "val": self.like.meta["val"].new_full((), value, dtype=torch.float32)}
        return node

    def _aligned(self, node: Node, mask: Mask) -> Node:
        """What is broadcast to scores of some shape, such that it is broadcast to scores with four dimensions.

        Rows and keys that are split, as by the lines of an image, are joined.
        """
        batch, heads, rows, keys = map(expr_of, self.written.sizes)
        if mask.shape == (rows, keys):
            return node
        if mask.shape[:2] == (batch, heads):
            before = 2
        elif mask.shape[0] == batch * heads:
            before = 1
        else:
            raise NotWritten("a mask is added to scores of another shape")
        own = shape_of(node.meta["val"])
        shape, within = (ONE,) * (len(mask.shape) - len(own)) + own, mask.shape[before:]
        apart = shape[:2] if before == 2 else (ONE, ONE) if shape[0] == ONE else (batch, heads)
        if within != (rows, keys):
            whole = self._call(aten.expand.default, node, [self._size(size) for size in (*shape[:before], *within)])
            return self._reshape(whole, (*apart, rows, keys))
        if before == 2 or shape[0] == ONE:
            return node
        return (
            self._call(aten.unsqueeze.default, node, 1) if heads == ONE else self._reshape(node, (*apart, *shape[1:]))
        )

    def _sinks(self) -> Node | None:
        """A score for each row, in f32."""
        sinks = self.written.sinks
        if sinks is None:
            return None
        each = self._with_shape(sinks, tuple(map(expr_of, (*self.written.sizes[:3], 1))))
        if each.meta["val"].dtype is not torch.float32:
            each = self._call(aten._to_copy.default, each, dtype=torch.float32)
        return self._call(aten.squeeze.dim, each, 3)

    # ------------------------------------------------------------------------------------------------ results

    def _hand_on(self, product: Node, made: Node) -> None:
        """Have those who read a product read `made`, which has the same elements in four dimensions."""
        shape = shape_of(made.meta["val"])
        for user in list(product.users):
            if reshaped_from(user) is product and shape_of(user.meta["val"]) == shape:
                self._replace(user, made)
        if any(user.users for user in product.users) or any(reshaped_from(user) is None for user in product.users):
            with self.graph.inserting_after(made):
                copy = self._copied(made)
            with self.graph.inserting_after(copy):
                flat = self._reshape(copy, shape_of(product.meta["val"]))
            product.replace_all_uses_with(flat)

    def _replace(self, old: Node, new: Node) -> None:
        """Have those who read `old` read `new`, which lies otherwise in memory: views anew, others a copy."""
        self._follow(old, new)
        if old.users:
            if strides_of(old.meta["val"]) != strides_of(new.meta["val"]):
                with self.graph.inserting_after(new):
                    new = self._copied(new)
            old.replace_all_uses_with(new)

    def _follow(self, old: Node, new: Node) -> None:
        for user in list(old.users):
            copies = user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.contiguous_format
            if copies or user.target in _ANY_LAYOUT:
                user.replace_input_with(old, new)
            elif user.target in (*_VIEWS, *RESHAPES) and user.users:
                view = self._view(user, old, new)
                if view is not None:
                    self._follow(user, view)
                    if not view.users:
                        self.graph.erase_node(view)

    def _view(self, user: Node, old: Node, new: Node) -> Node | None:
        """The same view of `new`; None if that has not the strides for it."""
        with self.graph.inserting_before(user):
            view = self.graph.node_copy(user, lambda node: new if node is old else node)
        try:
            with quiet_fake_tensors():
                view.meta["val"] = fake_result(view)
        except (RuntimeError, ValueError):
            self.graph.erase_node(view)
            return None
        return view

    def _copied(self, node: Node) -> Node:
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    # ------------------------------------------------------------------------------------------------ calls

    def _call(self, target: Any, *args: Any, **options: Any) -> Node:
        node = self.graph.call_function(target, args, options)
        node.meta = self._meta()
        try:
            node.meta["val"] = fake_result(node)
        except (RuntimeError, ValueError):
            self.graph.erase_node(node)
            raise
        return node

    def _meta(self) -> dict[str, Any]:
        """What is known of the call in whose place others are put, but for its result."""
        return {key: value for key, value in self.like.meta.items() if key not in ("val", "tensor_meta")}

    def _items(self, results: Node, count: int) -> tuple[Node, ...]:
        made: list[Node] = []
        after = results
        for position in range(count):
            with self.graph.inserting_after(after):
                after = self.graph.call_function(operator.getitem, (results, position))
            after.meta = {**results.meta, "val": results.meta["val"][position]}
            made.append(after)
        return tuple(made)


def _group_total(product: Node, shape: tuple[Expr, ...]) -> Node | None:
    """The sum over the heads of a group of gradients that a product makes, and that nobody else reads."""
    at = product
    while len(at.users) == 1:
        (user,) = at.users
        if user.target is aten.sum.dim_IntList:
            summed = shape_of(at.meta["val"])
            fits = len(summed) == 5 and (summed[0], *summed[3:]) == (shape[0], *shape[2:])
            return user if fits and user.args[1:] == ([2], True) else None
        if reshaped_from(user) is not at and transposed_from(user) is not at:
            return None
        at = user
    return None
