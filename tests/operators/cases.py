"""What the sweeps run: samples of PyTorch's operator and module databases, as functions of plain tensors."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch

from tests.operators import large

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
WIDEST = ("f64", "c128")
DIRECTIONS = ("forward", "training")
DATABASES = ("ops", "large", "modules")


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """An operator (`add`) or a module in a mode (`nn.Linear.train`) with a dtype and a direction.

    direction: `forward` without gradients, `training` with the gradients of every input that can have one.
    """

    database: str
    name: str
    dtype: str
    direction: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.direction}"

    @property
    def hash(self) -> int:
        """A number that never changes and is spread evenly, to choose a share of the tasks by."""
        return int(hashlib.sha256(str(self).encode()).hexdigest()[:8], 16)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One sample of a task: `function` takes a state like `state`, of which it may change the tensors.

    state: a list of tensors, and the module where there is one. Take `fresh()` copies of it.
    differentiable: positions of the tensors whose gradients are asked for.
    """

    task: Task
    sample: int
    function: Callable[[list[Any]], Any]
    state: list[Any]
    differentiable: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.task} #{self.sample}"

    def fresh(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> list[Any]:
        """A copy of the state, with `change` applied to each tensor. Tensors that share memory go on sharing it."""
        state = copy.deepcopy(self.state)
        for position, item in enumerate(state):
            if isinstance(item, torch.nn.Module):
                for tensor in (*item.parameters(), *item.buffers()):
                    tensor.data = change(tensor.data)
            else:
                state[position] = change(item)
        for position in self.differentiable:
            state[position].requires_grad_()
        return state

    def leaves(self, state: list[Any]) -> list[torch.Tensor]:
        """The tensors of `state` whose gradients are asked for."""
        parameters = [p for item in state if isinstance(item, torch.nn.Module) for p in item.parameters()]
        return [state[position] for position in self.differentiable] + [p for p in parameters if p.requires_grad]


def tasks(database: str, dtypes: Iterable[str], directions: Iterable[str], names: Iterable[str] = ()) -> list[Task]:
    """Every task of a database that supports the dtype, of the named operators or modules if any are named."""
    names, directions = set(names), list(directions)
    supports = _module_supports if database == "modules" else _operator_supports
    return [
        Task(database, name, dtype, direction)
        for name in (_modules() if database == "modules" else _operators())
        if not names or name in names or name.rsplit(".", 1)[0] in names
        if database != "large" or not name.startswith(large.LEFT_OUT)
        for dtype in dtypes
        for direction in directions
        if supports(name, DTYPES[dtype], direction)
    ]


def cases(task: Task) -> Iterator[Case]:
    """The first, middle and last sample of a task, or its large ones; every process makes the same ones."""
    _seed()
    if task.database == "large":
        yield from _large_cases(task)
        return
    make = {"ops": _operator_cases, "modules": _module_cases}[task.database]
    found = make(task)
    for position in sorted({0, len(found) // 2, len(found) - 1}) if found else ():
        yield found[position](position)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


# --------------------------------------------------------------------------------------------- operators


@cache
def _operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return _named((f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name, op) for op in op_db)


def _named(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary; entries of the same name are numbered from the second on."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        number = 2
        unique = name
        while unique in found:
            unique, number = f"{name}~{number}", number + 1
        found[unique] = value
    return found


def _operator_supports(name: str, dtype: torch.dtype, direction: str) -> bool:
    op = _operators()[name]
    if direction == "forward":
        found = op.supported_dtypes("cpu")
        # PyTorch seldom says where it supports the wider unsigned types. Eager mode refuses what it does not.
        return dtype in found or (dtype in large.UNSIGNED and torch.uint8 in found)
    return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")


def _operator_cases(task: Task) -> list[Callable[[int], Case]]:
    op = _operators()[task.name]
    grad = task.direction == "training"
    samples = list(op.sample_inputs("cpu", DTYPES[task.dtype], requires_grad=grad))
    return [
        lambda number, sample=sample: _operator_case(task, number, op.op, (sample.input, *sample.args), sample.kwargs)
        for sample in samples
    ]


def _large_cases(task: Task) -> Iterator[Case]:
    """The lines of the plan that the operator can follow: all in f32, every other one in other types."""
    op = _operators()[task.name]
    _seed()
    found = op.sample_inputs("cpu", DTYPES[task.dtype], requires_grad=task.direction == "training")
    samples = [((sample.input, *sample.args), sample.kwargs) for sample in found]
    for number, (elements, layout) in enumerate(large.PLAN):
        if task.dtype != "f32" and (number + task.hash) % 2:
            continue
        start = len(samples) * number // len(large.PLAN)
        chosen = large.choose(op.op, samples[start:] + samples[:start], elements, layout)
        if chosen is not None:
            yield _operator_case(task, number, op.op, *chosen)


def _operator_case(task: Task, number: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
    tensors, function = _spelled_out(op, args, kwargs)
    wanted = tuple(p for p, tensor in enumerate(tensors) if task.direction == "training" and tensor.requires_grad)
    return Case(task, number, function, [tensor.detach() for tensor in tensors], wanted)


def _spelled_out(
    op: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[[list[Any]], Any]]:
    """The tensors among the arguments, and a function that makes the call: of a list of them, or, when `op` is None,
    of a list that what is called comes first in.

    It is written as a user would write it, with numbers as literals, so that Dynamo sees what it sees in programs.
    """
    tensors: list[torch.Tensor] = []
    callee, first = ("t[0]", 1) if op is None else ("op", 0)
    names: dict[str, Any] = {"torch": torch, "op": op, "inf": float("inf"), "nan": float("nan")}

    def text(value: Any) -> str:
        match value:
            case torch.Tensor():
                tensors.append(value)
                return f"t[{len(tensors) - 1 + first}]"
            case None | bool() | int() | float() | str() | complex() | torch.dtype():
                return repr(value)
            case list():
                return f"[{', '.join(map(text, value))}]"
            case tuple():
                return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
            case dict():
                return f"{{{', '.join(f'{key!r}: {text(item)}' for key, item in value.items())}}}"
            case slice():
                return f"slice({text(value.start)}, {text(value.stop)}, {text(value.step)})"
            case _:
                names[f"c{len(names)}"] = value
                return f"c{len(names) - 1}"

    arguments = [text(value) for value in args] + [f"{key}={text(value)}" for key, value in kwargs.items()]
    exec(f"def call(t):\n    return {callee}({', '.join(arguments)})", names)
    return tensors, names["call"]


# ----------------------------------------------------------------------------------------------- modules


@cache
def _modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    found = _named((info.name, info) for info in module_db)
    return {f"{name}.{mode}": info for name, info in found.items() for mode in ("train", "eval")}


def _module_supports(name: str, dtype: torch.dtype, direction: str) -> bool:
    return dtype.is_floating_point and dtype in _modules()[name].supported_dtypes("cpu")


def _module_cases(task: Task) -> list[Callable[[int], Case]]:
    info, dtype, training = _modules()[task.name], DTYPES[task.dtype], task.name.endswith(".train")
    grad = task.direction == "training"
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=grad, training=training)
    inputs = [given for given in inputs if given.forward_input is not None]
    return [lambda number, given=given: _module_case(task, number, info.module_cls, given) for given in inputs]


def _module_case(task: Task, number: int, make: Any, given: Any) -> Case:
    """The state begins with the module, and the call is `t[0](t[1], ...)`."""
    _seed()
    module = make(*given.constructor_input.args, **given.constructor_input.kwargs)
    module = module.to(DTYPES[task.dtype]).train(task.name.endswith(".train"))
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        with torch.no_grad():
            module(*given.forward_input.args, **given.forward_input.kwargs)  # it makes its parameters now
    tensors, call = _spelled_out(None, given.forward_input.args, given.forward_input.kwargs)
    wanted = tuple(p + 1 for p, tensor in enumerate(tensors) if task.direction == "training" and tensor.requires_grad)
    return Case(task, number, call, [module, *(tensor.detach() for tensor in tensors)], wanted)
