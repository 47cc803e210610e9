"""Where the time of an eager program goes: its operators, as measured by torch.profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from pellucid.kit.profile.result import KernelTime, Overhead, Profile
from pellucid.kit.profile.rows import GROUPS, group_of
from pellucid.kit.programs.calls import Observed
from pellucid.kit.stats import midmean, summarise
from pellucid.kit.subjects.facts import kind_of

_CALLS = 5


def eager_profile(call: Callable[[], Any], plain: Sequence[float], target: str) -> Profile:
    """The profile of a program that runs eagerly. plain: seconds of calls without a profiler.

    torch.profiler slows each operator down. The time of a call without it is the total, and operators whose times add
    up to more are scaled to it.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        begin = perf_counter()
        for _ in range(_CALLS):
            call()
        profiled = (perf_counter() - begin) / _CALLS
    times = list(plain) or [profiled]
    summary, whole = summarise(times), midmean(times) * 1e6
    events = [each for each in profiler.key_averages(group_by_input_shape=True) if each.key.startswith("aten::")]
    taken = sum(each.self_cpu_time_total for each in events) / _CALLS
    scale = max(1.0, whole / (profiled * 1e6))  # above 1 if the machine was faster during the profiled calls
    scale = min(scale, whole / taken) if taken else 1.0
    with _Lines() as seen:
        call()
    seen.within(profiler.events() or ())
    rows = [_row(each, scale, whole, seen) for each in events]
    rows.sort(key=lambda row: -row.total_microseconds)
    rest = whole - sum(row.total_microseconds for row in rows)
    note = f"operators as measured by torch.profiler; a call takes {profiled * 1e6 / whole:.2f} times as long under it"
    return Profile(
        "eager",
        target,
        summary.count,
        whole,
        summary.spread,
        whole,
        0,
        torch.get_num_threads(),
        tuple(rows),
        Overhead(max(0.0, rest), 0.0),
        notes=(note,),
    )


_Key: TypeAlias = "tuple[str, tuple[str, ...]]"
"""An operator and the shapes of its inputs, without numbers and tensors in lists."""


class _Lines(Observed):
    """Counts the calls of operators by user line."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: dict[_Key, Counter[str]] = {}
        self._any: dict[str, Counter[str]] = {}

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        return tuple(str(list(each.shape)) for each in leaves if isinstance(each, torch.Tensor) and each.dim())

    def after(self, func: Any, line: str, made: tuple[str, ...], result: Any) -> None:
        name = func._schema.name
        if line:
            self._exact.setdefault((name, made), Counter())[line] += 1
            self._any.setdefault(name, Counter())[line] += 1

    def within(self, events: Iterable[Any]) -> None:
        """Give operators that others call, as `relu` calls `clamp_min`, the lines of their callers."""
        inner: dict[_Key, Counter[str]] = {}
        for event in events:
            outer = event
            while outer is not None and outer.name not in self._any:
                outer = outer.cpu_parent
            if outer is not None and outer is not event:
                inner.setdefault(_key(event.name, event), Counter()).update(self.of(*_key(outer.name, outer)))
        self._exact |= inner

    def of(self, name: str, shapes: tuple[str, ...]) -> Counter[str]:
        """The lines of an operator with these shapes, or with any if there are none."""
        return self._exact.get((name, shapes)) or self._any.get(name, Counter())


def _key(name: str, event: Any) -> _Key:
    return name, tuple(str(list(shape)) for shape in event.input_shapes if shape)


def _row(event: Any, scale: float, whole: float, seen: _Lines) -> KernelTime:
    total = event.self_cpu_time_total * scale / _CALLS
    name = event.key
    _, shapes = key = _key(name, event)
    lines = seen.of(*key).most_common()
    group = group_of(kind_of(name.removeprefix("aten::").rstrip("_")), name)
    return KernelTime(
        name=name,
        kind="call",
        group=GROUPS["kernel" if group == "call" else group],  # a compiler would generate kernels for these
        symbol=name,
        calls=event.count / _CALLS,
        microseconds=event.self_cpu_time_total * scale / event.count,
        spread=0.0,
        total_microseconds=total,
        share=total / whole if whole else 0.0,
        shapes=shapes,
        user_lines=tuple(line for line, _ in lines),
        line_calls=tuple(float(count) for _, count in lines),
    )
