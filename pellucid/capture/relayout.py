"""Changes the memory layout of a graph's tensors: copies the graph call by call, with all fake tensors recomputed.

Strides are not part of FX graphs, they follow from those of the inputs: so copying one tensor determines the layout of
all that is computed from it. Calls whose meaning or speed depends on strides get arguments with the strides of the
captured graph, and so do results.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.fx import RESHAPES, shape_of, strides_of, whole
from pellucid.capture.torch_compat import (
    depends_on_data,
    elementwise_strides,
    expr_of,
    fake_mode_of,
    graph_module_of,
    is_symbolic,
    quiet_fake_tensors,
    stride_of,
)
from pellucid.capture.transform import aliases
from pellucid.ir.index import Expr
from pellucid.ir.strides import is_dense, reshaped

aten = torch.ops.aten
ReadsElements: TypeAlias = "Callable[[torch.fx.Node], bool]"
"""Whether a call depends only on the elements of its arguments: it is lowered to loops that follow any strides."""

Numbers: TypeAlias = "tuple[int | Expr, ...]"
"""Numbers, or expressions of sizes: equal expressions are equal in every call."""

# ATen operators with an efficient kernel for every layout. Others get arguments with the captured strides, since
# operators that only PyTorch itself calls rely on their callers for contiguous arguments.
_ANY_LAYOUT = frozenset(
    "convolution convolution_backward mm addmm bmm baddbmm upsample_nearest2d _upsample_nearest_exact2d"
    " upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward _upsample_nearest_exact2d_backward"
    " upsample_bilinear2d_backward upsample_bicubic2d_backward".split()
)
# Calls whose meaning depends on the strides of their argument.
_BY_STRIDES = (aten.as_strided.default, aten.as_strided_.default, aten.set_.source_Tensor, aten.resize_.default)


class Refused(Exception):
    """The layout of the graph cannot be changed; the message is the reason."""


def check_graph(graph: torch.fx.Graph) -> None:
    """Raise `Refused` for a graph whose layout may not change."""
    for node in graph.nodes:
        if node.target in _BY_STRIDES:
            raise Refused(f"{node.name} depends on the strides of its argument")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Refused(f"{node.name} calls a graph of its own")
    if sizes_depend_on_data(graph):
        raise Refused("sizes depend on data")


def sizes_depend_on_data(graph: torch.fx.Graph) -> bool:
    """Whether some size depends on data: Dynamo raises an error when it is compared."""
    return any(depends_on_data(size) for node in graph.nodes for size in _sizes(node))


def _sizes(node: torch.fx.Node) -> list[Any]:
    """The sizes of the tensors that a call returns, and its other results."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return [size for each in values for size in (each.shape if isinstance(each, torch.Tensor) else [each])]


def _with_standard_strides(value: Any) -> Any:
    """`value` with the usual strides in dimensions of one element, which fake gradients of 1 x 1 weights lack."""
    return value.flatten().view(value.shape) if isinstance(value, torch.Tensor) and value.is_contiguous() else value


class Relayout:
    """Copies a graph; a subclass chooses the layouts that change, in `lay_out`."""

    def __init__(
        self, graph_module: torch.fx.GraphModule, reads_elements: ReadsElements, clones: Iterable[torch.fx.Node] = ()
    ) -> None:
        """reads_elements: true for calls whose arguments may have other strides than captured. clones: copies that may
        be replaced by their source.
        """
        self._module = graph_module
        self._reads_elements = reads_elements
        self.graph = torch.fx.Graph()
        self.new: dict[torch.fx.Node, torch.fx.Node] = {}
        self.copies: dict[tuple[torch.fx.Node, torch.memory_format], torch.fx.Node] = {}
        self._captured: dict[torch.fx.Node, torch.fx.Node] = {}
        self._shared: set[torch.fx.Node] = set()
        self._fake_mode = fake_mode_of(graph_module.graph)
        self._own_clones = frozenset(clones)
        self.removed = frozenset(filter(_makes_contiguous, self._own_clones))

    def lay_out(self, copy: torch.fx.Node, node: torch.fx.Node) -> bool:
        """Change the layout of arguments of a call; return whether its fake result has to be recomputed.

        copy: of the call `node`, in the new graph.
        """
        raise NotImplementedError

    def run(self) -> torch.fx.GraphModule:
        for node in self._module.graph.nodes:
            if node in self.removed or self._is_redundant(node):
                self.new[node] = self.new[source_of(node)]  # `_as_captured` copies it for users that need these strides
            elif node.op == "call_function":
                self.new[node] = self._call(node)
            elif node.op == "output":
                self._share(node.all_input_nodes)
                restored = pytree.tree_map_only(torch.fx.Node, self._as_captured, node.args[0])
                self.graph.output(restored).meta.update(node.meta)
            else:
                self.new[node] = self.graph.node_copy(node)
        return graph_module_of(self._module, self.graph)

    def _share(self, results: Iterable[torch.fx.Node]) -> None:
        """Make results that share memory views of one copy, in later calls of `_as_captured`."""
        bases = Counter(map(base_of, {*results}))
        self._shared = {base for base, count in bases.items() if count > 1}
        separate = {each for each in self._captured if _is_view(each) and base_of(each) in self._shared}
        self._captured = {each: copy for each, copy in self._captured.items() if each not in separate}

    def _is_redundant(self, node: torch.fx.Node) -> bool:
        """True for a copy whose source has the strides of the copy by now."""
        return node in self._own_clones and result_strides(self.new[source_of(node)]) == result_strides(node)

    def _call(self, node: torch.fx.Node) -> torch.fx.Node:
        if self._takes_any_layout(node):
            copy = self.graph.node_copy(node, self.new.__getitem__)
            unchanged = _has_same_operands(node, self.new.__getitem__)
            if not self.lay_out(copy, node) and unchanged:
                return copy  # its fake result is still valid
            if self._evaluated(copy):
                return copy
            self.graph.erase_node(copy)
        copy = self.graph.node_copy(node, self._as_captured)
        if not (_has_same_operands(node, self._as_captured) or self._evaluated(copy)):
            raise Refused(f"{node.name} does not accept copies of its arguments")
        return copy

    def _evaluated(self, node: torch.fx.Node) -> bool:
        """Compute the fake result of a call; False if it does not accept such strides, which a view may not."""
        captured = _shapes(node)
        try:
            with quiet_fake_tensors():
                node.meta["val"] = self._evaluate(node)
        except (RuntimeError, ValueError):  # of a fake tensor, ValueError of a view's decomposition
            return False
        return _shapes(node) == captured

    def _takes_any_layout(self, node: torch.fx.Node) -> bool:
        """True if a call computes the same from arguments with other strides, see `_ANY_LAYOUT`.

        Random numbers are drawn in memory order.
        """
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return True  # it selects a result, or computes a size
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
        known = target.namespace == "aten" and target._opname in _ANY_LAYOUT
        return known or torch.Tag.pointwise in target.tags or self._reads_elements(node)

    def relayout_arguments(self, call: torch.fx.Node, positions: Iterable[int], layout: torch.memory_format) -> None:
        """Give these arguments of a call the memory format `layout`."""
        with self.graph.inserting_before(call):
            args = list(call.args)
            for position in positions:
                args[position] = self.laid_out(args[position], call, layout)
            call.args = tuple(args)

    def laid_out(self, value: Any, user: torch.fx.Node, layout: torch.memory_format) -> torch.fx.Node:
        """`value` in the memory format `layout`: copied on behalf of `user` unless it has it already."""
        if _has_layout(value.meta["val"], layout):
            return value
        if (value, layout) not in self.copies:
            self.copies[value, layout] = self.called(aten.clone.default, value, user, memory_format=layout)
        return self.copies[value, layout]

    def called(
        self, target: Any, value: torch.fx.Node, user: torch.fx.Node, *args: Any, **kwargs: Any
    ) -> torch.fx.Node:
        """A call on `value` on behalf of `user`."""
        call = self.graph.call_function(target, (value, *args), kwargs)
        call.meta.update(user.meta)
        call.meta["val"] = self._evaluate(call)
        return call

    def _evaluate(self, node: torch.fx.Node) -> Any:
        operands = [each.meta["val"] for each in elementwise_operands(node)]
        if operands:  # calling the operator takes five times as long
            shape, dtype = operands[0].shape, node.meta["val"].dtype
            with self._fake_mode:
                return operands[0].new_empty_strided(shape, elementwise_strides(*operands), dtype=dtype)
        args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
        with self._fake_mode, torch.no_grad():
            result = node.target(*args, **kwargs)  # type: ignore[operator]
            if node.target in RESHAPES:
                _check_reshaped(args[0], result)
            backward = node.target is aten.convolution_backward.default
            return tuple(map(_with_standard_strides, result)) if backward else result

    def _as_captured(self, node: torch.fx.Node) -> torch.fx.Node:
        """The new counterpart of a node with the captured strides: one copy for all users that need them."""
        if node not in self._captured:
            self._captured[node] = self._with_strides(node)
        return self._captured[node]

    def _with_strides(self, node: torch.fx.Node) -> torch.fx.Node:
        """`_as_captured` uncached. For a view, the base is copied; results that share memory share the copy."""
        new, expected = self.new[node], node.meta.get("val")
        if _is_view(node) and base_of(node) in self._shared:
            return self._view_as_captured(node)
        if result_strides(new) == result_strides(node):
            return new
        if isinstance(expected, torch.Tensor) and _has_layout(expected):
            return self.laid_out(new, node, torch.contiguous_format)
        if _is_view(node):
            view = self._view_as_captured(node)
            if result_strides(view) == result_strides(node):
                return view
        return self.restored(new, node)

    def _view_as_captured(self, node: torch.fx.Node) -> torch.fx.Node:
        """The same view, of the base with the captured strides."""
        source = node.all_input_nodes[0]
        base = self._as_captured(source)
        if base is self.new[source]:
            return self.new[node]
        view = self.graph.node_copy(node, lambda each: base if each is source else self.new[each])
        view.meta["val"] = self._evaluate(view)
        return view

    def restored(self, value: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """A copy of `value` with the strides of the captured `node`, which is neither contiguous nor a view."""
        raise Refused(f"the result {node.name} must have the strides {result_strides(node)}")


def base_of(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view, or a view of a view, belongs to."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: torch.fx.Node) -> bool:
    """True for a view of its first argument, or one of several views that a call returns."""
    if not aliases(node) or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    return node.target is not operator.getitem or _is_view(node.args[0])


def elementwise_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The arguments of an element-wise call that have the shape of its result; none for other calls."""
    result, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags or node.kwargs:
        return []
    if not isinstance(result, torch.Tensor) or target._schema.is_mutable or aliases(node):
        return []
    shape = in_every_call(result.shape)
    values = ((each, each.meta["val"]) for each in node.all_input_nodes)
    return [each for each, value in values if isinstance(value, torch.Tensor) and in_every_call(value.shape) == shape]


def _makes_contiguous(clone: torch.fx.Node) -> bool:
    """True for a contiguous copy of a tensor that is not: users that need it get a copy, see `_as_captured`."""
    return _has_layout(clone.meta["val"]) and not _has_layout(source_of(clone).meta["val"])


def source_of(clone: torch.fx.Node) -> torch.fx.Node:
    """The node that is copied."""
    (source,) = clone.all_input_nodes
    return source


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensor, or each of the tensors, that a call returns."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _shapes(node: torch.fx.Node) -> list[Numbers]:
    return [in_every_call(tensor.shape) for tensor in _tensors(node)]


def result_strides(node: torch.fx.Node) -> list[Numbers]:
    """The strides of each tensor that a call returns."""
    return [in_every_call(tensor.stride(), stride_of) for tensor in _tensors(node)]


def _position_in_memory(node: torch.fx.Node) -> list[Numbers]:
    """The strides and storage offset of each tensor that a call returns: a copy and its source may differ in both."""
    return [
        (*in_every_call(tensor.stride(), stride_of), *in_every_call((tensor.storage_offset(),)))
        for tensor in _tensors(node)
    ]


def _has_same_operands(node: torch.fx.Node, new: Callable[[torch.fx.Node], torch.fx.Node]) -> bool:
    """True if the new operands of a call have the strides and storage offsets of the old ones."""
    return all(_position_in_memory(new(each)) == _position_in_memory(each) for each in node.all_input_nodes)


def in_every_call(values: Iterable[int | torch.SymInt], expression: Callable[..., Expr] = expr_of) -> Numbers:
    """Sizes, or with `stride_of` strides, as numbers or expressions: equal ones are equal in every call."""
    found = (expression(value) if is_symbolic(value) else value for value in values)
    return tuple(each.value if isinstance(each, Expr) and each.value is not None else each for each in found)


def _has_layout(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> bool:
    """True if a tensor has the memory format `layout` in every call."""
    if not any(map(is_symbolic, tensor.shape)):
        return tensor.is_contiguous(memory_format=layout)
    return is_dense(whole("", tensor), (0, 2, 3, 1) if layout is torch.channels_last else range(tensor.dim()))


def _check_reshaped(source: torch.Tensor, view: torch.Tensor) -> None:
    """Raise RuntimeError if there is no such view: fake tensors accept some across dimensions of one element."""
    strides = reshaped(whole("", source), shape_of(view))
    symbolic = any(map(is_symbolic, view.shape))
    if strides is None or (symbolic and strides != strides_of(view)):
        raise RuntimeError(f"no view of shape {tuple(view.shape)} of a tensor with strides {source.stride()}")
