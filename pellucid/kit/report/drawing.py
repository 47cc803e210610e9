"""A drawing of a graph and its fusion: the kernels and library calls as boxes that hold their FX nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pellucid.kit.profile.python import YOURS
from pellucid.kit.profile.result import PythonSide

MAX_BOXES = 40
_MAX_NODES = 8  # FX nodes named in a box
_WIDTH, _GAP_X, _GAP_Y, _HEAD, _ROW = 186.0, 22.0, 34.0, 36.0, 15.0
_LETTERS = 24


@dataclass(slots=True)
class Step:
    """A kernel or a library call of a graph. share: of the program's time. number: its row in the profile. after: the
    indices of the steps whose results it uses."""

    name: str
    kernel: bool
    nodes: tuple[str, ...]
    share: float = 0.0
    number: int | None = None
    after: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Box:
    """A drawn step. nodes: the names that fit."""

    step: Step
    x: float
    y: float
    height: float
    title: str
    nodes: tuple[str, ...]
    width: float = _WIDTH


@dataclass(frozen=True, slots=True)
class Arrow:
    """path: SVG path data."""

    path: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """total: the number of boxes of the whole graph."""

    graph: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    width: float
    height: float
    total: int

    @property
    def is_part(self) -> bool:
        return len(self.boxes) < self.total


def draw(graph: str, steps: Sequence[Step], nodes: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw a graph. steps: in execution order. nodes: of the captured graph, as JSON; nodes of passes get no arrows.

    Of a graph with too many steps, the longest step and its neighbours are drawn.
    """
    _connect(steps, nodes)
    return _laid_out(graph, steps, _hottest(steps))


def draw_calls(seen: PythonSide) -> Drawing | None:
    """The Python functions with the longest total times, each below its callers; None without any."""
    whole = max((each.total_microseconds for each in seen.functions), default=0.0)
    steps = [
        Step(
            each.name.rpartition(".")[2] if each.name.startswith("built-in method") else each.name,
            each.part == YOURS,
            (
                *((each.where.rpartition("/")[2],) if each.where else ()),
                f"{each.total_microseconds / whole:.0%}, itself {each.own_microseconds / whole:.0%}",
                f"{each.calls:g} {'call' if each.calls == 1 else 'calls'}",
            ),
            each.total_microseconds / whole,
        )
        for each in seen.functions
        if whole
    ]
    for call in seen.calls:
        if call.caller != call.callee:
            steps[call.callee].after.add(call.caller)
    return _laid_out("Python", steps, range(min(len(steps), MAX_BOXES))) if steps else None


def _laid_out(graph: str, steps: Sequence[Step], chosen: Sequence[int]) -> Drawing:
    layers = _layers(steps, chosen)
    columns = max(len(layer) for layer in layers)
    width = columns * (_WIDTH + _GAP_X) + _GAP_X
    boxes: dict[int, Box] = {}
    y = _GAP_Y / 2
    for layer in layers:
        left = (width - len(layer) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        made = [_box(steps[n], left + at * (_WIDTH + _GAP_X), y) for at, n in enumerate(layer)]
        boxes.update(zip(layer, made, strict=True))
        y += max(each.height for each in made) + _GAP_Y
    arrows = [_arrow(boxes[one], boxes[n]) for n in chosen for one in sorted(steps[n].after) if one in boxes]
    return Drawing(graph, tuple(boxes.values()), tuple(arrows), width, y, len(steps))


def _box(step: Step, x: float, y: float) -> Box:
    names = [_cut(name) for name in step.nodes[:_MAX_NODES]]
    if len(step.nodes) > _MAX_NODES:
        names.append(f"and {len(step.nodes) - _MAX_NODES} more")
    return Box(step, x, y, _HEAD + _ROW * len(names) + 4, _cut(step.name), tuple(names))


def _cut(name: str) -> str:
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"


def _arrow(one: Box, other: Box) -> Arrow:
    x1, y1, x2, y2 = one.x + _WIDTH / 2, one.y + one.height, other.x + _WIDTH / 2, other.y
    bend = max(14.0, (y2 - y1) / 2)
    return Arrow(f"M{x1:.0f},{y1:.0f}C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}")


def _connect(steps: Sequence[Step], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Set `after` of each step: the steps that compute the operands of its nodes, looking through views."""
    operands = {str(node["name"]): list(_referred([node.get("args"), node.get("kwargs")])) for node in nodes}
    owner: dict[str, int] = {}
    for n, step in enumerate(steps):
        seen, pending = set(step.nodes), [name for node in step.nodes for name in operands.get(node, ())]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in owner:
                step.after.add(owner[name])
            else:
                pending += operands.get(name, ())
        owner.update(dict.fromkeys(step.nodes, n))


def _referred(saved: Any) -> Iterator[str]:
    """The names of nodes in the arguments of a node, in the format of `graph.json`."""
    if isinstance(saved, Mapping):
        if set(saved) == {"node"}:
            yield str(saved["node"])
        else:
            for item in saved.values():
                yield from _referred(item)
    elif isinstance(saved, list):
        for item in saved:
            yield from _referred(item)


def _hottest(steps: Sequence[Step]) -> list[int]:
    """All steps, or as many as can be drawn around the longest one; in order."""
    if len(steps) <= MAX_BOXES:
        return list(range(len(steps)))
    before = {n: set[int]() for n in range(len(steps))}
    for n, step in enumerate(steps):
        for one in step.after:
            before[one].add(n)
    reached = {max(range(len(steps)), key=lambda n: steps[n].share): None}
    for n in _growing(reached):
        for other in sorted(steps[n].after | before[n], key=lambda each: (abs(each - n), each)):
            if len(reached) < MAX_BOXES:
                reached[other] = None
    return sorted(reached)


def _growing(reached: dict[int, None]) -> Iterator[int]:
    """The keys of a dictionary that grows during the iteration."""
    at = 0
    while at < len(reached):
        yield list(reached)[at]
        at += 1


def _layers(steps: Sequence[Step], chosen: Sequence[int], most: int = 5) -> list[list[int]]:
    """Layers of steps, each below the steps that it runs after; a layer has `most` steps at most."""
    depth: dict[int, int] = {}
    layers: list[list[int]] = []
    for n in chosen:
        at = max((depth[one] + 1 for one in steps[n].after if one in depth), default=0)
        while at < len(layers) and len(layers[at]) >= most:
            at += 1
        while at >= len(layers):
            layers.append([])
        layers[at].append(n)
        depth[n] = at
    return [layer for layer in layers if layer]
