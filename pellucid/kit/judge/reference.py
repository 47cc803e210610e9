"""Eager's results of a graph, op by op; parts of it again in float64, or on numbers that differ in the last place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from pellucid.capture.graph import attribute_of
from pellucid.kit.judge.vary import nudge_in_place, overlapping
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import in_float64, interpret, is_random, mutates, widened, wider


class Reference:
    """Eager's results of a graph, op by op."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: set[str]) -> None:
        self.module, self.inputs = module, inputs
        self._nodes = {node.name: node for node in module.graph.nodes}
        self.values: dict[str, torch.Tensor] = {}
        self.random: dict[str, Any] = {}
        output = next(iter(reversed(module.graph.nodes)))
        returned = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
        self.result_nodes = [node.name if isinstance(node, torch.fx.Node) else "" for node in returned]

        def keep(node: torch.fx.Node, value: Any) -> Any:
            if is_random(node):
                self.random[node.name] = copied(value)
            if node.name in wanted and isinstance(value, torch.Tensor):
                self.values[node.name] = value.clone() if _is_changed(node) else value
            return value

        torch.manual_seed(0)
        self.given = copied(inputs) if any(map(mutates, module.graph.nodes)) else inputs
        self.results = interpret(module, self.given, keep)
        lasting = [*self.values.values(), *self.results, *self.given, *self.inputs, *self.random.values()]
        self._owners = Counter(_memory(each) for each in pytree.tree_leaves(lasting) if isinstance(each, torch.Tensor))

    def replaced(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of a value, in the memory of eager's if nothing else lies there: fresh memory costs more."""
        mine = self.values[name]
        alone = self._owners[_memory(mine)] == 1 and not overlapping(mine)
        return mine.copy_(value) if alone and mine.shape == value.shape and mine.dtype == value.dtype else value.clone()

    def float64(self) -> dict[str, torch.Tensor]:
        """All wanted values from the inputs on; random numbers are those that eager drew."""
        return self._values(in_float64(self.module), widened)

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """The same for inputs that differ in the last place."""
        return self._values(self.module, _nudging(seed))

    def _values(self, module: torch.fx.GraphModule, change: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        wanted = {*self.values, *self.result_nodes}  # all of a training step in float64 may not fit into memory

        def keep(node: torch.fx.Node, value: Any) -> Any:
            value = change(self.random[node.name]) if node.name in self.random else value
            if isinstance(value, torch.Tensor) and node.name in wanted:
                found[node.name] = value.clone() if _is_changed(node) else value
            return value

        interpret(module, change(list(self.inputs)), keep)
        return found

    def local(self, name: str, known: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """One value from known results of earlier nodes: only what lies between them and it is computed."""
        return self._local(name, known, lambda each: each, lambda each: each)

    def local_float64(self, name: str, known: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The same in float64."""
        return self._local(name, known, widened, wider)

    def local_draw(self, name: str, seed: int, known: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The same from values that differ in the last place, in the types of the program."""
        return self._local(name, known, _nudging(seed), lambda each: each)

    def _local(
        self,
        name: str,
        known: Mapping[str, torch.Tensor],
        change: Callable[[Any], Any],
        constant: Callable[[Any], Any],
    ) -> torch.Tensor | None:
        """One value from known ones after a change. None when an operator in between does not take that."""
        nodes = self._nodes
        given = dict(zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        given |= {nodes[each]: known[each] for each in known if each in nodes and each != name}
        given |= {nodes[each]: value for each, value in self.random.items() if nodes[each].target is not _DROPOUT}
        needed = _needed(nodes[name], given.keys())
        if any(mutates(node) for node in needed if node not in given):
            given = copied(given)
        values: dict[torch.fx.Node, Any] = {}
        try:
            with torch.no_grad():
                for node in needed:
                    values[node] = self._local_value(node, given, values, change, constant)
        except Exception:
            return None
        value = values[nodes[name]]
        return value if isinstance(value, torch.Tensor) else None

    def _local_value(
        self,
        node: torch.fx.Node,
        given: Mapping[torch.fx.Node, Any],
        values: Mapping[torch.fx.Node, Any],
        change: Callable[[Any], Any],
        constant: Callable[[Any], Any],
    ) -> Any:
        """The value of a node, if the values that it needs are there."""
        if node in given:
            return change(given[node])
        if node.op == "get_attr":
            return change(attribute_of(self.module, node))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.name in self.random:
            return _dropped(args, self.random[node.name][1])
        args, kwargs = map_aggregate((args, kwargs), constant)
        return node.target(*args, **kwargs)  # type: ignore[operator]


_DROPOUT = torch.ops.aten.native_dropout.default


def _dropped(args: Sequence[Any], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout makes of its arguments with the elements that it drew before."""
    x, p = args[:2]
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p) if args[2] in (None, True) else 1.0
    return x * mask * scale, mask


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nudging(seed: int) -> Callable[[Any], Any]:
    """Copies of tensors whose floats differ in the last place, other ones with each call."""
    generator = torch.Generator().manual_seed(seed)

    def change(tree: Any) -> Any:
        fresh = copied(tree)
        nudge_in_place(pytree.tree_leaves(fresh), generator)
        return fresh

    return change


def _needed(node: torch.fx.Node, known: Collection[torch.fx.Node]) -> list[torch.fx.Node]:
    """What has to be computed for a node, in order, itself the last; nothing behind what is known."""
    order: dict[torch.fx.Node, None] = {}
    stack: list[tuple[torch.fx.Node, bool]] = [(node, False)]
    while stack:
        each, ready = stack.pop()
        if ready or each in known:
            order[each] = None
        elif each not in order:
            stack.append((each, True))
            stack += [(other, False) for other in each.all_input_nodes]
    return list(order)


def _is_changed(node: torch.fx.Node) -> bool:
    """Whether an operator that works in place may change the result of a node later."""
    return any(map(mutates, node.users))
