"""Times of the calls of the module that Inductor generated: its text is extended to read the clock around each call.

The time of a kernel includes its call from Python, about a microsecond, as in Inductor's own module. The time of
reading the clock is measured and subtracted.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.kit.subjects.base import Step
from pellucid.kit.subjects.clock import Timed, TimedRun, running_clock
from pellucid.kit.subjects.facts import StepFacts, library_facts, shape_text
from pellucid.kit.subjects.inductor.made import Made
from pellucid.kit.subjects.inductor.text import AFTER, BEFORE, hooked, kernels_of, loadable
from pellucid.native.timeline import CallTime, Span

_MARKS, _NEW, _NOW, _GIVEN, _RETURNED = "__marks__", "__new__", "__now__", "__given__", "__returned__"


def timed_module(name: str, made: Made, plain: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Any]:
    """A compiled graph of Inductor that records its runs while a clock is on, and otherwise runs unchanged.

    plain: the graph as Inductor returns it. The first run records the shapes of each step's arguments.
    """
    module = _TimedModule(name, made, plain)

    def run(args: list[Any]) -> Sequence[Any]:
        return module(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _TimedModule:
    """See `timed_module`."""

    def __init__(self, name: str, made: Made, plain: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._name, self._made, self._plain = name, made, plain
        self._facts: dict[int, StepFacts] = {}
        self._local = threading.local()
        self._timed: Callable[[list[Any]], Sequence[Any]] | None = None
        self._order: list[int] = []

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if not self._facts:
            return self._learn(args)
        clock = running_clock()
        if clock is None:
            return self._plain(args)
        if self._timed is None:
            self._timed = self._timing()
        self._local.marks = marks = []
        thread, begin = threading.get_native_id(), perf_counter_ns()
        try:
            return self._timed(args)
        finally:
            span = Span(thread, begin, perf_counter_ns())
            times = zip(self._order, marks[::2], marks[1::2], strict=False)
            clock.add(TimedRun(self._name, span, tuple(self._step(*each) for each in times)))

    def _step(self, number: int, begin: int, end: int) -> Timed:
        return Timed(self._facts[number], CallTime(begin, max(begin, end - read_time()), ()))

    def _timing(self) -> Callable[[list[Any]], Sequence[Any]]:
        """The module that reads the clock around its calls."""
        tree, function, _ = hooked(self._made)
        function.body = list(self._marked(function.body))
        return _loaded(self._made, tree, {_NEW: lambda: self._local.marks, _NOW: perf_counter_ns})

    def _marked(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        yield _statement(f"{_MARKS} = {_NEW}()")
        open_step = None
        for statement in body:
            hook, number = _hook_of(statement)
            if hook == BEFORE:
                open_step = number
                self._order.append(number)
            if hook == "":
                yield statement
            elif hook == BEFORE or number == open_step:
                yield _statement(f"{_MARKS}.append({_NOW}())")
            if hook == AFTER:
                open_step = None

    def _learn(self, args: list[Any]) -> Sequence[Any]:
        """Run once, and record the arguments of each step."""
        tree, function, steps = hooked(self._made)
        function.body = list(_reporting(function.body))
        written = {name: flags for name, (_, flags) in kernels_of(tree)}
        learner = _Learner(self._name, self._made, steps, written)
        result = _loaded(self._made, tree, {_GIVEN: learner.given, _RETURNED: learner.returned})(args)
        self._facts = learner.facts
        return result


def _loaded(made: Made, tree: ast.Module, names: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
    code, space = loadable(made, tree, names)
    exec(code, space)
    return space["call"]


@dataclass(slots=True)
class _Learner:
    """Derives the facts of each step from its arguments. written: by kernel, which arguments it may write to."""

    graph: str
    made: Made
    steps: Sequence[Step]
    written: Mapping[str, Sequence[bool]]
    facts: dict[int, StepFacts] = field(default_factory=dict)
    _calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def given(self, number: int, *args: Any, **kwargs: Any) -> None:
        step = self.steps[number]
        known: dict[Any, torch.Tensor] = {}
        shapes = pytree.tree_map(lambda leaf: _shape_of(leaf, known), (args, kwargs))
        facts = StepFacts(self.graph, step.name, step.symbol or step.op, "kernel", origin=step.origin)
        if step.generated:
            self.facts[number] = self._kernel(facts, step, shapes[0])
        else:
            self.facts[number] = replace(facts, kind="call")
            self._calls[number] = shapes

    def returned(self, number: int, *results: Any) -> None:
        if number in self._calls:
            args, kwargs = self._calls.pop(number)
            leaves = [_shape_of(leaf, {}) for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
            step = self.facts[number]
            self.facts[number] = library_facts(step, operator_of(step.symbol), args, kwargs, leaves)

    def _kernel(self, facts: StepFacts, step: Step, args: Sequence[Any]) -> StepFacts:
        texts = [shape_text(arg.dtype, arg.shape) if isinstance(arg, torch.Tensor) else "" for arg in args]
        sides: dict[bool, list[str]] = {False: [], True: []}
        for text, written in zip(texts, self.written[step.symbol], strict=False):
            sides[written] += [text] if text else []
        facts = replace(facts, reads=tuple(sides[False]), writes=tuple(sides[True]))
        loops = self.made.loops.get(step.symbol)
        if loops is None:
            return facts
        return replace(
            facts,
            loaded=loops.loaded,
            stored=loops.stored,
            flops=loops.flops,
            dtype=loops.dtype,
            fetched=loops.fetched,
            scalar=loops.scalar,
        )


def operator_of(name: str) -> Any:
    """The operator that the module calls by this name: an ATen name such as `mm`, or `aten.sort.stable`; else None."""
    found: Any = torch.ops.aten if "." not in name else torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _shape_of(leaf: Any, known: dict[Any, torch.Tensor]) -> Any:
    """A meta tensor; the same for equal views of the same memory."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    key = leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype
    if key not in known:
        known[key] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return known[key]


def _reporting(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements with a report of each step's arguments before its call, and of its results after it."""
    number = -1
    for statement in body:
        hook, found = _hook_of(statement)
        if hook == "" and number >= 0:
            assert isinstance(statement, ast.Expr | ast.Assign) and isinstance(statement.value, ast.Call)
            call = statement.value
            yield _statement(
                f"{_GIVEN}({', '.join(map(ast.unparse, (ast.Constant(number), *call.args)))}"
                + "".join(f", {key.arg}={ast.unparse(key.value)}" for key in call.keywords if key.arg)
                + ")"
            )
            yield statement
            if isinstance(statement, ast.Assign):
                yield _statement(f"{_RETURNED}({number}, {', '.join(map(ast.unparse, statement.targets))})")
            else:
                yield _statement(f"{_RETURNED}({number})")
        elif hook == "":
            yield statement
        number = found if hook == BEFORE else -1


def _hook_of(statement: ast.stmt) -> tuple[str, int]:
    """The hook that a statement is, and the number of its step; empty if it is not a hook."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(name), [ast.Constant(number), *_])) if name in (BEFORE, AFTER):
            assert isinstance(number, int)
            return name, number
        case _:
            return "", -1


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


@lru_cache(maxsize=1)
def read_time() -> int:
    """The nanoseconds between two consecutive readings of the clock."""
    space: dict[str, Any] = {_NEW: lambda: marks, _NOW: perf_counter_ns}
    marks: list[int] = []
    read = f"    {_MARKS}.append({_NOW}())\n"
    exec(f"def call():\n    {_MARKS} = {_NEW}()\n{2 * read}", space)
    for _ in range(2000):
        space["call"]()
    return int(median(b - a for a, b in zip(marks[::2], marks[1::2], strict=True)))
