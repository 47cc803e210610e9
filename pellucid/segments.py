"""A compiled graph that was split: its segments and the Python calls between them, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from pellucid.capture.outline import Bind, EagerCall, Fit, Layout, Number, Outline, Ref, Segment, Step
from pellucid.capture.torch_compat import key_get, profiling, tree_flatten, tree_unflatten
from pellucid.executable import Name, fitted
from pellucid.ir.derived import Numbers
from pellucid.native.instance import event_name

Values: TypeAlias = dict[str, Any]


class Segments:
    """Runs an outline.

    Called with the list of the graph's arguments (the boxed calling convention: the list is emptied). A value is
    released as soon as no later step reads it.
    """

    _boxed_call = True

    def __init__(
        self, outline: Outline, executables: Mapping[str, Callable[[list[Any]], list[Any]]], name: str = "graph"
    ) -> None:
        """executables: the compiled segments, by name. name: of the graph, for profiles."""
        self.outline = outline
        self._name = name
        self._executables = executables
        last = _last_uses(outline)
        self._unused = [name for name in outline.inputs if name not in last]
        self._steps = [
            (step, [name for name, user in last.items() if user == position])
            for position, step in enumerate(outline.steps)
        ]

    def __reduce__(self) -> tuple[Callable[..., Segments], tuple[Any, ...]]:
        """Pickle without the parts that only the compiler reads."""
        steps = tuple(replace(step, graph=None) if isinstance(step, Segment) else step for step in self.outline.steps)
        return Segments, (replace(self.outline, steps=steps, decisions=()), self._executables, Name(self._name))

    def __call__(self, args: list[Any]) -> list[Any]:
        if not profiling():
            return self._run(args, _called)
        with torch.profiler.record_function(event_name(self._name)):
            return self._run(args, self._profiled)

    def _profiled(self, call: EagerCall, *rest: Any) -> Any:
        with torch.profiler.record_function(event_name(self._name, call.name)):
            return _called(call, *rest)

    def _run(self, args: list[Any], called: Callable[..., Any]) -> list[Any]:
        values: Values = dict(zip(self.outline.inputs, args, strict=True))
        args.clear()
        _drop(values, self._unused)
        numbers = Numbers({}, self.outline.derived)
        for step, dead in self._steps:
            match step:
                case Bind(name, source, path):
                    numbers.values[name] = key_get(values[source], path)
                    _drop(values, dead)
                case Fit(name, layouts):
                    values[name] = _fitted(name, values[name], layouts, numbers)
                    _drop(values, dead)
                case Segment(name, _, inputs, outputs):
                    args = [_filled(each, values, numbers) for each in inputs]
                    _drop(values, dead)
                    values.update(zip(outputs, self._executables[name](args), strict=True))
                case EagerCall():
                    values[step.name] = called(step, values, numbers, dead)
                    _drop(values, dead)
        return [_filled(output, values, numbers) for output in self.outline.outputs]


def _called(call: EagerCall, values: Values, numbers: Numbers, dead: list[str]) -> Any:
    args = [_filled(arg, values, numbers) for arg in call.args]
    kwargs = {key: _filled(value, values, numbers) for key, value in call.kwargs.items()}
    _drop(values, dead)
    return call.function(*args, **kwargs)


def _drop(values: Values, names: list[str]) -> None:
    for name in names:
        values.pop(name, None)


def _filled(value: Any, values: Values, numbers: Numbers) -> Any:
    """`value` with its references and numbers replaced by their values."""
    match value:
        case Ref(name):
            return values[name]
        case Number(term, in_tensor):
            number = numbers(term)
            return torch.tensor(number, dtype=torch.float64) if in_tensor else number
        case tuple():
            return tuple(_filled(item, values, numbers) for item in value)
        case list():
            return [_filled(item, values, numbers) for item in value]
        case dict():
            return {key: _filled(item, values, numbers) for key, item in value.items()}
        case slice():
            return slice(*(_filled(item, values, numbers) for item in (value.start, value.stop, value.step)))
        case _:
            return value


def _fitted(name: str, value: Any, layouts: tuple[Layout | None, ...], numbers: Numbers) -> Any:
    """`value` with tensors copied where their strides differ from those that the graph was captured with."""
    leaves, structure = tree_flatten(value)
    pairs = zip(leaves, layouts, strict=True)
    fitted = [leaf if layout is None else _fit(name, leaf, layout, numbers) for leaf, layout in pairs]
    return value if all(a is b for a, b in zip(leaves, fitted, strict=True)) else tree_unflatten(fitted, structure)


def _fit(name: str, tensor: torch.Tensor, layout: Layout, numbers: Numbers) -> torch.Tensor:
    shape, strides = (tuple(map(numbers, each)) for each in (layout.shape, layout.strides))
    return fitted(name, tensor, layout.dtype, shape, strides)


def _last_uses(outline: Outline) -> dict[str, int]:
    """For each value, the last step that reads it, or produces it if none reads it; past the end if it is returned."""
    last: dict[str, int] = {}
    for position, step in enumerate(outline.steps):
        last.update(dict.fromkeys(_touched(step), position))
    for name in _names(outline.outputs):
        last[name] = len(outline.steps)
    return last


def _touched(step: Step) -> Iterator[str]:
    match step:
        case Bind(_, source, _):
            yield source
        case Fit(name, _):
            yield name
        case Segment(_, _, inputs, outputs):
            yield from (*_names(inputs), *outputs)
        case EagerCall():
            yield from (*_names((step.args, step.kwargs)), step.name)


def _names(value: Any) -> Iterator[str]:
    match value:
        case Ref(name):
            yield name
        case list() | tuple():
            for item in value:
                yield from _names(item)
        case dict():
            yield from _names(list(value.values()))
        case slice():
            yield from _names((value.start, value.stop, value.step))
        case _:
            pass
