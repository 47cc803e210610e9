"""The ATen calls that a program makes, forward and backward, each with its user line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.capture.fx import origin_of
from pellucid.capture.torch_compat import autograd_number, is_fake, next_autograd_number
from pellucid.kit.process.child import NOT_THE_USERS
from pellucid.kit.programs.case import copied


@dataclass(slots=True)
class Call:
    """An ATen call: its arguments and results as they were at the time of the call.

    line: the user's `file:line`, for a call of the backward pass that of its forward call; empty if there is none.
    sources: by index of a leaf of its arguments, the index of the call that returned it, and of the result.
    backward: whether it was made while autograd computed a gradient.
    """

    func: Any
    leaves: list[Any]
    spec: Any
    results: list[Any]
    line: str
    sources: Mapping[int, tuple[int, int]]
    backward: bool

    @property
    def op(self) -> str:
        return op_of(self.func)

    def again(self, tensor: Callable[[int, torch.Tensor], Any], constant: Callable[[Any], Any]) -> list[Any]:
        """Its results for other arguments. tensor: given the index and value of a tensor leaf, returns its replacement;
        constant: returns that of any other leaf. Raises what the operator raises."""
        leaves = [
            tensor(at, each) if isinstance(each, torch.Tensor) else constant(each)
            for at, each in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.no_grad():
            return pytree.tree_leaves(self.func(*args, **kwargs))


def op_of(target: Any) -> str:
    """The name of an operator, without the `_` of in-place variants: `gelu_backward`, `add`."""
    schema = getattr(target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else getattr(target, "__name__", str(target))
    return name if name.startswith("_") and name.endswith("__") else name.rstrip("_")


def returns_view(target: Any) -> bool:
    """Whether an operator returns a view of an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers; some in-place ones have no tag, so all their overloads are checked."""
    same = getattr(torch.ops.aten, op_of(target), None)
    overloads = [target, *(getattr(same, name) for name in same.overloads())] if same is not None else [target]
    return any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in overloads)


class OperatorMode(TorchDispatchMode):
    """Intercepts the operators called while it is on, except those inside higher-order operators (`torch.cond`).

    Eager mode compiles some higher-order operators itself. Dynamo compiles nothing under a mode, and caches that, so
    that they would fail later. So Dynamo is reset if one was called, or if something failed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._saw_higher_order = False

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if self._saw_higher_order or kind is not None:
            torch._dynamo.reset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return self.call(func, args, kwargs or {})
        self._saw_higher_order = True
        return func(*args, **(kwargs or {}))

    def call(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Call the operator."""
        raise NotImplementedError


class Observed(OperatorMode):
    """Calls hooks before and after each ATen call made while it is on, with its user line.

    node: the node whose line is used, set by an interpreter of a graph. unknown: the lines are not known.
    """

    def __init__(self, *, unknown: bool = False) -> None:
        super().__init__()
        self.node: torch.fx.Node | None = None
        self._unknown = unknown
        self._lines: dict[int, str] = {}  # of forward calls, by the sequence number of their autograd node

    def call(self, func: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        made = self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        if not any(is_fake(each) for each in pytree.tree_leaves((args, kwargs, result))):
            self.after(func, self._line(), made, result)
        return result

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Called before an ATen call; its return value is passed to `after` as `made`."""

    def after(self, func: Any, line: str, made: Any, result: Any) -> None:
        """Called after an ATen call, whose result may be written to."""

    def _line(self) -> str:
        backward = autograd_number()
        if self._unknown or backward is not None:
            return "" if backward is None else self._lines.get(backward, "")
        line = line_of(self.node) if self.node is not None else _user_line()
        self._lines[next_autograd_number() - 1] = line
        return line


def in_backward() -> bool:
    """Whether autograd is computing a gradient."""
    return autograd_number() is not None


def line_of(node: torch.fx.Node) -> str:
    """`file:line` of a node; empty if there is none."""
    return next((str(user) for user in reversed(origin_of(node).users)), "")


def _user_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Calls(Observed):
    """Records the calls. Recorded values are copied before an operator changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []
        self._held: dict[int, list[tuple[list[Any], int]]] = {}  # by storage, the lists and indices of its tensors
        self._maker: dict[tuple[Any, ...], tuple[int, int]] = {}  # by `_view_key`, the call and result that returned it
        self._writer: dict[int, int] = {}  # by storage, the last call that wrote to it
        self._reader: dict[int, int] = {}  # by storage, the last call with it as an argument

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        given = {at: each for at, each in enumerate(leaves) if isinstance(each, torch.Tensor)}
        sources = {at: self._maker[_view_key(each)] for at, each in given.items() if _view_key(each) in self._maker}
        self._reader.update((memory_of(each), len(self.made)) for each in given.values())
        self._hold(leaves)
        for tensor in _written(func, args, kwargs):
            held = self._held.pop(memory_of(tensor), [])
            copies = copied([where[at] for where, at in held])
            for (where, at), copy in zip(held, copies, strict=True):
                where[at] = copy
        return leaves, spec, sources

    def after(self, func: Any, line: str, made: Any, result: Any) -> None:
        leaves, spec, sources = made
        results = pytree.tree_leaves(result)
        for number, each in enumerate(results):
            if isinstance(each, torch.Tensor) and memory_of(each):
                self._maker[_view_key(each)] = (len(self.made), number)
                if not returns_view(func):
                    self._writer[memory_of(each)] = len(self.made)
        self.made.append(Call(func, leaves, spec, results, line, sources, in_backward()))
        self._hold(results)

    def maker(self, tensor: torch.Tensor) -> Call | None:
        """The call that returned a tensor, else the last one that wrote to its storage, or had it as an argument."""
        last = self._writer.get(memory_of(tensor), self._reader.get(memory_of(tensor)))
        at, _ = self._maker.get(_view_key(tensor), (last, 0))
        return None if at is None else self.made[at]

    def _hold(self, leaves: list[Any]) -> None:
        for at, each in enumerate(leaves):
            if isinstance(each, torch.Tensor) and memory_of(each):
                self._held.setdefault(memory_of(each), []).append((leaves, at))


def memory_of(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return memory_of(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    arguments = func._schema.arguments if func._schema.is_mutable else ()
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor))
