"""Eager's results of a graph, operator by operator; and parts of it recomputed in float64, or from other values."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from pellucid.capture.fx import attribute_of
from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.vary import InPlace, changed, overlapping
from pellucid.kit.programs.case import copied
from pellucid.kit.programs.graphs import in_float64, interpret, is_random, mutates, results_of, widened, wider


class Reference:
    """Eager's results of a graph, operator by operator.

    wanted: the nodes whose values are saved.
    """

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], wanted: set[str]) -> None:
        self.module, self.inputs = module, inputs
        self._nodes = {node.name: node for node in module.graph.nodes}
        self.values: dict[str, torch.Tensor] = {}
        self.random: dict[str, Any] = {}
        self.result_nodes = results_of(module)

        def keep(node: torch.fx.Node, value: Any) -> Any:
            if is_random(node):
                self.random[node.name] = copied(value)
            if node.name in wanted and isinstance(value, torch.Tensor):
                self.values[node.name] = value.clone() if _is_changed(node) else value
            return value

        torch.manual_seed(0)
        self.final_inputs = copied(inputs) if any(map(mutates, module.graph.nodes)) else inputs
        self.results = interpret(module, self.final_inputs, keep)
        lasting = [*self.values.values(), *self.results, *self.final_inputs, *self.inputs, *self.random.values()]
        self._owners = Counter(_memory(each) for each in pytree.tree_leaves(lasting) if isinstance(each, torch.Tensor))

    def replaced(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of a value, in the memory of eager's if that is unshared: fresh memory costs more."""
        mine = self.values[name]
        unshared = self._owners[_memory(mine)] == 1 and not overlapping(mine)
        fits = mine.shape == value.shape and mine.dtype == value.dtype
        return mine.copy_(value) if unshared and fits else value.clone()

    def exactly(self, change: InPlace) -> dict[str, torch.Tensor]:
        """All wanted values in float64, computed from the inputs; random numbers are those that eager drew."""
        return self._values(in_float64(self.module), lambda tree: widened(changed(tree, change)))

    def drawn(self) -> dict[str, torch.Tensor]:
        """The results of the operators that draw random numbers, by the FX node whose value is the tensor."""
        found = dict(self.random)
        for name, value in self.random.items():
            parts = [user for user in self._nodes[name].users if user.target is operator.getitem]
            found |= {user.name: value[user.args[1]] for user in parts}  # type: ignore[index]
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def eagerly(self, change: InPlace) -> dict[str, torch.Tensor]:
        """Like `exactly`, in the types of the program."""
        return self._values(self.module, lambda tree: changed(tree, change))

    def _values(self, module: torch.fx.GraphModule, change: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        wanted = {*self.values, *self.result_nodes}  # all values of a training step in float64 may not fit in memory

        def keep(node: torch.fx.Node, value: Any) -> Any:
            value = change(self.random[node.name]) if node.name in self.random else value
            if isinstance(value, torch.Tensor) and node.name in wanted:
                found[node.name] = value.clone() if _is_changed(node) else value
            return value

        interpret(module, change(list(self.inputs)), keep)
        return found

    def between(self, name: str, known: Collection[str]) -> list[torch.fx.Node]:
        """The unknown nodes that a value is computed from, without inputs and constants, in graph order."""
        available = {self._nodes[each] for each in known if each in self._nodes and each != name}
        needed = set(needed_for(self._nodes[name], available)) - available - {self._nodes[name]}
        return [node for node in self.module.graph.nodes if node in needed and node.op == "call_function"]

    def local(self, name: str, known: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """One value computed from known results of earlier nodes; only the nodes in between are run.

        None when an operator in between does not accept them.
        """
        return self._local(name, known, lambda each: each, lambda each: each)

    def expected(self, name: str, known: Mapping[str, torch.Tensor], eager: torch.Tensor) -> Expected:
        """The expected value of `local`, under the name of its node. eager: eager's result."""

        def exactly(change: InPlace) -> dict[str, torch.Tensor]:
            return found(self._local(name, known, lambda tree: widened(changed(tree, change)), wider))

        def eagerly(change: InPlace) -> dict[str, torch.Tensor]:
            return found(self._local(name, known, lambda tree: changed(tree, change), lambda each: each))

        def found(value: torch.Tensor | None) -> dict[str, torch.Tensor]:
            return {} if value is None else {name: value}

        return Expected({name: eager}, exactly, eagerly)

    def _local(
        self,
        name: str,
        known: Mapping[str, torch.Tensor],
        change: Callable[[Any], Any],
        constant: Callable[[Any], Any],
    ) -> torch.Tensor | None:
        """change: applied to each known value. constant: applied to each constant argument of the calls."""
        nodes = self._nodes
        available = dict(zip(self.module.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        available |= {nodes[each]: known[each] for each in known if each in nodes and each != name}
        available |= {nodes[each]: value for each, value in self.random.items() if nodes[each].target is not _DROPOUT}
        needed = needed_for(nodes[name], available.keys())
        if any(mutates(node) for node in needed if node not in available):
            available = copied(available)
        values: dict[torch.fx.Node, Any] = {}
        try:
            with torch.no_grad():
                for node in needed:
                    values[node] = self._local_value(node, available, values, change, constant)
        except Exception:
            return None
        value = values[nodes[name]]
        return value if isinstance(value, torch.Tensor) else None

    def _local_value(
        self,
        node: torch.fx.Node,
        available: Mapping[torch.fx.Node, Any],
        values: Mapping[torch.fx.Node, Any],
        change: Callable[[Any], Any],
        constant: Callable[[Any], Any],
    ) -> Any:
        """The value of a node whose arguments are in `values`."""
        if node in available:
            return change(available[node])
        if node.op == "get_attr":
            return change(attribute_of(self.module, node))
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.name in self.random:
            return _dropped(args, self.random[node.name][1])
        args, kwargs = map_aggregate((args, kwargs), constant)
        return node.target(*args, **kwargs)  # type: ignore[operator]


_DROPOUT = torch.ops.aten.native_dropout.default


def _dropped(args: Sequence[Any], mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout's results, with a mask that it drew before."""
    x, p = args[:2]
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p) if args[2] in (None, True) else 1.0
    return x * mask * scale, mask


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def needed_for(node: torch.fx.Node, known: Collection[torch.fx.Node]) -> list[torch.fx.Node]:
    """The nodes that a node depends on, in order, itself the last; the search stops at known nodes."""
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
    """Whether an in-place operator may change the result of a node later."""
    return any(map(mutates, node.users))
